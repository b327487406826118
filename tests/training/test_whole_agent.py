"""An agent with previous actions and rewards, statistics and a second memory, used everywhere.

Acting in training, evaluation, `load_policy`, an exported file and the watch page must agree on
what the memory reads.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agalite
from agalite.agents.ppo import PPO
from agalite.export.policy import export_run
from agalite.training.config import TrainConfig
from agalite.training.evaluate import evaluate, film
from agalite.training.policy import load
from agalite.watch.episode import play
from agalite.watch.saliency import episode_inputs

CONFIG = TrainConfig(
    env="masked-cartpole",
    memory="gru",
    memory_options={"d_model": 8, "hidden_size": 8},
    agent=PPO(num_minibatches=2, update_epochs=1, norm_return=True, reward_scale=0.5),
    previous_action=True,
    previous_reward=True,
    separate_critic=True,
    norm_obs=True,
    hidden_size=8,
    num_envs=2,
    num_steps=32,
    total_timesteps=192,
    log_every=64,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return agalite.train(CONFIG, tmp_path_factory.mktemp("runs") / "whole", quiet=True)


def test_statistics_are_in_the_checkpoint(run):
    model, _, step = load(run.folder)
    assert float(model.obs_statistics.count) == step == 192
    assert (np.asarray(model.obs_statistics.variance) != 1).all()
    assert float(model.return_statistics.count) == 192


def test_a_policy_remembers_its_action_and_asks_for_the_reward(run):
    policy, model = agalite.load_policy(run, greedy=True), load(run.folder).model
    env = gymnasium.make("agalite/MaskedCartPole-v0")
    obs, _ = env.reset(seed=0)
    state, memory_state = policy.initial_state(), model.initial_state()
    previous, reward, step = (
        model.actor.no_action(()),
        0.0,
        jax.jit(lambda m, o, a, r, first: model.step(m, model.inputs(o, a, r), first)),
    )
    for t in range(4):
        memory_state, expected, value = step(memory_state, obs, previous, reward, t == 0)
        np.testing.assert_allclose(policy.value(obs, state, t == 0, reward), value, rtol=1e-5)
        action, state = policy.act(obs, state, t == 0, reward)
        previous = expected.mode()
        assert int(previous) == int(action) == int(state.previous_action)
        obs, reward, *_ = env.step(action)
    with pytest.raises(ValueError, match="give the reward of its last action"):
        policy.act(obs, state)
    with pytest.raises(ValueError, match="reward='much' must be a number"):
        policy.act(obs, state, False, "much")


def test_evaluation_film_and_watch_use_them(run, tmp_path):
    model, trainer, _ = load(run.folder)
    scores = evaluate(model, trainer.env, episodes=2, greedy=True)
    assert (scores.returns > 0).all()
    total = film(model, trainer.env, tmp_path / "episode.gif", greedy=True)
    episode = play(model, trainer.env, seed=0, steps=500, greedy=True)
    assert total == episode.total
    # The whole episode at once gives the values that acting step by step gave.
    arrays = map(jnp.asarray, (episode.obs, episode.sampled, episode.rewards))
    resets = np.arange(len(episode.steps)) == 0
    inputs = episode_inputs(model, *arrays)
    _, _, values = jax.jit(lambda: model.scan(model.initial_state(), inputs, resets))()
    np.testing.assert_allclose(values, episode.values, rtol=1e-4, atol=1e-5)


def test_the_exported_file_takes_them(run, tmp_path):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "policy.onnx"
    (written,) = export_run(run.folder, onnx=path)  # compares 200 steps with the agent
    assert written.difference < 1e-5
    import onnxruntime

    names = [x.name for x in onnxruntime.InferenceSession(path).get_inputs()]
    assert names[:4] == ["observation", "reset", "previous_action", "previous_reward"]
