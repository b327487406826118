"""PQN: targets, loss, exploration, and what an update does."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.agents import rollout
from agalite.agents.base import advance_traces, make_batch
from agalite.agents.pqn import PQN
from agalite.envs import make
from agalite.envs.vector import VectorEnv
from agalite.networks.actor_critic import ActorCritic
from agalite.training.config import HostConfig, TrainConfig
from agalite.training.presets import preset
from agalite.training.train import Trainer

STEPS, SEQ_LEN, ENVS = 48, 12, 4
SMALL = {"d_model": 8, "layers": 1, "heads": 1, "head_size": 8, "ffn_size": 8}


def collect(agent, remaining=1.0, memory="agalite", options=SMALL):
    """A network with action values and a rollout in which episodes terminate and truncate."""
    env = make("tmaze", corridor=3, max_steps=7)
    envs = VectorEnv(env, ENVS)
    model = ActorCritic.make(
        env.observation_space(env.default_params),
        env.action_space(env.default_params),
        memory=memory,
        memory_options=options,
        hidden_size=16,
        hidden_norm=True,
        actor_gain=1.0,
        epsilon=agent.epsilon,
        key=jax.random.key(0),
    )

    @eqx.filter_jit
    def run(model, remaining):
        state = rollout.init(model, envs, jax.random.key(1))
        sample = agent.sampler(remaining)
        return rollout.collect_rollout(
            model,
            envs,
            state,
            jax.random.key(2),
            num_steps=STEPS,
            seq_len=SEQ_LEN,
            sample=sample,
        )

    _, data, states, _ = run(model, jnp.float32(remaining))
    return model, data, states


def action_values(model, data):
    """(T, B, n), one environment after the other, without sequences or batches."""
    values, scan = [], eqx.filter_jit(model.scan)
    for env in range(ENVS):
        obs, resets = jax.tree.map(lambda x, env=env: x[:, env], (data.obs, data.resets))
        _, policy, best = scan(model.initial_state(), obs, resets)
        np.testing.assert_allclose(policy.values.max(-1), best, rtol=1e-6)
        values.append(policy.values)
    return jnp.stack(values, axis=1)


def test_targets_and_loss_against_a_loop():
    agent = PQN(gamma=0.9, q_lambda=0.7)
    model, data, states = collect(agent)
    assert (data.ends & (data.rewards < 0)).any()
    returns = np.zeros((STEPS, ENVS))
    after = np.asarray(data.next_values[-1], np.float64)
    for t in reversed(range(STEPS)):
        best = np.asarray(data.next_values[t], np.float64)
        mixed = np.where(data.ends[t], best, 0.7 * after + 0.3 * best)
        returns[t] = after = np.asarray(data.rewards[t]) + 0.9 * mixed
    np.testing.assert_allclose(agent._returns(data), returns, rtol=1e-4, atol=1e-5)

    values = np.asarray(action_values(model, data))
    taken = np.take_along_axis(values, np.asarray(data.actions)[..., None], axis=-1)[..., 0]
    batch = make_batch(data, states, agent._returns(data) - data.values, SEQ_LEN)
    loss, metrics = agent.loss(model, batch)
    np.testing.assert_allclose(loss, 0.5 * np.mean((taken - returns) ** 2), rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/q_values"], values.max(-1).mean(), rtol=1e-4)


def test_exploration_falls_and_its_end_is_the_policy_of_the_network():
    agent = PQN(epsilon_start=1.0, epsilon_end=0.0, epsilon_fraction=0.5)
    np.testing.assert_allclose(agent.exploration(jnp.array([1.0, 0.75, 0.5, 0.1])), [1, 0.5, 0, 0])
    greedy = {}
    for remaining in (1.0, 0.75, 0.0):
        model, data, _ = collect(agent, remaining, "gru", {"d_model": 8, "hidden_size": 8})
        best = action_values(model, data).argmax(-1)
        greedy[remaining] = float((data.actions == best).mean())
    assert greedy[0.0] == 1.0
    # Of four actions a random one is the best in one of four steps.
    assert greedy[1.0] == pytest.approx(0.25, abs=0.12)
    assert greedy[0.75] == pytest.approx(0.625, abs=0.14)


def test_updates_lower_the_error_of_the_taken_actions():
    agent = PQN(learning_rate=1e-2, update_epochs=12, num_minibatches=4)
    model, data, states = collect(agent)
    optimizer = agent.make_optimizer(10)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    batch = make_batch(data, states, agent._returns(data) - data.values, SEQ_LEN)
    before, _ = agent.loss(model, batch)
    learn = eqx.filter_jit(agent.learn)
    args = (data, states, SEQ_LEN, jax.random.key(0), jnp.float32(1.0))
    new, _, metrics = learn(model, optimizer, opt_state, *args)
    after, _ = agent.loss(new, batch)
    assert after < 0.7 * before
    assert metrics["charts/epsilon"] == 1.0
    again = learn(model, optimizer, opt_state, *args)[0]
    assert eqx.tree_equal(eqx.filter(new, eqx.is_array), eqx.filter(again, eqx.is_array))


def test_traces_change_the_gradient_and_not_the_loss():
    agent = PQN()
    model, data, states = collect(agent)
    trace = model.initial_trace(ENVS)
    traces, _ = advance_traces(model, trace, data, states, SEQ_LEN)
    advantages = agent._returns(data) - data.values
    gradients = {}
    for name, of_states in (("bptt", None), ("rtrl", traces)):
        batch = make_batch(data, states, advantages, SEQ_LEN, of_states)
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        loss, gradients[name] = jax.jit(
            jax.value_and_grad(
                lambda a, batch=batch, static=static: agent.loss(eqx.combine(a, static), batch)[0]
            )
        )(arrays)
        np.testing.assert_allclose(loss, agent.loss(model, batch)[0], rtol=1e-5)
    one, other = (
        jnp.concatenate([x.ravel() for x in jax.tree.leaves(g.memory)]) for g in gradients.values()
    )
    assert jnp.linalg.norm(one - other) > 1e-3 * jnp.linalg.norm(one)


@pytest.mark.parametrize("env", ["tmaze", "masked-cartpole", "repeat-previous"])
def test_the_preset_keeps_the_discount_and_has_no_critic(env):
    settings = preset("tuned", env, "gru", PQN)
    own = preset("tuned", env, "gru")
    assert isinstance(settings["agent"], PQN)
    assert settings["agent"].gamma == own["agent"].gamma
    assert settings["hidden_norm"]
    config = TrainConfig(env=env, memory="gru", **settings)
    assert Trainer(config).parameter_count > 0
    assert config == TrainConfig.from_dict(config.to_dict())


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match=r"q_lambda=1.5"):
        PQN(q_lambda=1.5)
    with pytest.raises(ValueError, match="pqn has no critic"):
        TrainConfig(env="tmaze", agent=PQN(), separate_critic=True)
    with pytest.raises(ValueError, match=r"num_minibatches=3 must divide the 8"):
        TrainConfig(env="tmaze", agent=PQN(num_minibatches=3))
    with pytest.raises(ValueError, match="cannot learn from policies"):
        HostConfig(env="gym:CartPole-v1", agent=PQN())  # pyright: ignore[reportArgumentType]
    pendulum = make("popgym-position-only-pendulum-easy")
    with pytest.raises(ValueError, match="need a Discrete space"):
        ActorCritic.make(
            pendulum.observation_space(pendulum.default_params),
            pendulum.action_space(pendulum.default_params),
            memory="gru",
            epsilon=0.1,
            key=jax.random.key(0),
        )
