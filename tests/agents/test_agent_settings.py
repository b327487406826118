"""The settings of the learning rules: epsilon, time limits, scales, schedules, V-trace."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.agents import rollout
from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.agents.base import make_batch
from agalite.agents.ppo import PPO
from agalite.envs.registry import make
from agalite.envs.vector import VectorEnv
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.normalisation import RunningStatistics


def learn(agent, model, data, initial_states, remaining=1.0):
    optimizer = agent.make_optimizer(10)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    args = (data, initial_states, 12, jax.random.key(0), jnp.float32(remaining))
    model, _, metrics = eqx.filter_jit(agent.learn)(model, optimizer, opt_state, *args)
    return jax.tree.leaves(eqx.filter(model, eqx.is_array)), metrics


def test_a_large_adam_epsilon_stops_small_gradients():
    gradient = {"w": jnp.array([1e-7])}
    moved = {}
    for eps in (1e-8, 1e-5):
        optimizer = A2C(learning_rate=1.0, adam_eps=eps).make_optimizer(10)
        updates, _ = optimizer.update(gradient, optimizer.init(gradient))
        moved[eps] = abs(float(updates["w"][0]))
    np.testing.assert_allclose([moved[1e-8], moved[1e-5]], [1 / 1.1, 1 / 101], rtol=1e-3)


def test_a_time_limit_bootstraps_or_terminates(collected):
    env = make("tmaze", corridor=20, max_steps=4)
    envs = VectorEnv(env, 2)
    model = ActorCritic.make(
        env.observation_space(env.default_params),
        env.action_space(env.default_params),
        memory="gru",
        memory_options={"d_model": 6, "hidden_size": 7},
        previous_action=True,
        previous_reward=True,
        key=jax.random.key(0),
    )

    state = rollout.init(model, envs, jax.random.key(1))
    run = eqx.filter_jit(rollout.collect_rollout)
    options = {"num_steps": 8, "seq_len": 8, "bootstrap": False}
    data = run(model, envs, state, jax.random.key(2), **options)[1]
    assert data.ends[3].all()  # the limit is four steps
    assert (data.next_values[3] == 0).all()
    assert (data.next_values[:3] != 0).all()
    # What the memory read before a step is what the step before it did.
    np.testing.assert_array_equal(data.obs.previous_action[1:], data.actions[:-1])
    np.testing.assert_array_equal(data.obs.previous_reward[1:], data.rewards[:-1])
    # By default the value of the final observation follows.
    bootstrapped = collected("gru").rollout
    assert (bootstrapped.next_values[bootstrapped.ends] != 0).any()
    assert A2C().bootstraps
    assert not A2C(time_limit="terminate").bootstraps
    with pytest.raises(ValueError, match="time_limit='stop' is unknown"):
        A2C(time_limit="stop")


def test_reward_scale_multiplies_what_is_learned_from(collected):
    model, _, _, data, initial_states, _ = collected("gru")
    seen = []

    class Recorder(A2C):
        def _learn(self, model, _, opt_state, rollout, *args):
            del args
            seen.append(rollout.rewards)
            return model, opt_state, {}

    for scale in (1.0, 3.0):
        Recorder(reward_scale=scale).learn(
            model, None, None, data, initial_states, 12, jax.random.key(0), jnp.ones(())
        )
    np.testing.assert_array_equal(seen[0], data.rewards)
    np.testing.assert_allclose(seen[1], 3 * data.rewards)


def test_the_clip_range_is_annealed(collected):
    model, _, _, data, initial_states, _ = collected("gru")
    batch = make_batch(data, initial_states, data.values, 12)
    far = batch._replace(log_probs=batch.log_probs - 0.15)  # a ratio of 1.16
    agent = PPO(clip_coef=0.2, anneal_clip_coef=True)

    @jax.jit
    def clipped(remaining):
        clip_coef = agent._clip_range(remaining)
        return agent.loss(model, far, jnp.zeros(()), clip_coef)[1]["losses/clipfrac"]

    assert float(clipped(jnp.float32(1.0))) == 0
    assert float(clipped(jnp.float32(0.5))) == 1
    assert PPO(clip_coef=0.2)._clip_range(jnp.float32(0.5)) == 0.2


def test_no_more_epochs_beyond_the_target_kl(collected):
    """For each seed of a run; AGaLiTe's attention has a batching rule of its own."""
    model, _, _, data, initial_states, _ = collected("agalite")
    agent = PPO(update_epochs=4, num_minibatches=1, learning_rate=1e-2, target_kl=1e-9)
    optimizer = agent.make_optimizer(10)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @jax.jit
    @jax.vmap
    def metrics_of(key):
        args = (data, initial_states, 12, key, jnp.float32(1))
        return agent.learn(model, optimizer, opt_state, *args)[2]

    metrics = metrics_of(jax.random.split(jax.random.key(0)))
    # The ratio is 1 in the first epoch and no longer in the second, which is the last.
    np.testing.assert_array_equal(metrics["losses/epochs"], 2)
    assert np.isfinite(metrics["losses/value_loss"]).all()


@pytest.mark.parametrize("agent", [A2C(norm_return=True), PPO(norm_return=True, norm_adv=False)])
def test_with_normalised_returns_the_scale_of_rewards_does_not_matter(agent, collected):
    """Both losses are those of rewards, values and statistics that are all ten times smaller."""
    model, _, _, data, initial_states, _ = collected("gru")

    @jax.jit
    def scaled(factor):
        returns = RunningStatistics(()).update(factor * jnp.linspace(-1, 1, 9))
        with_statistics = eqx.tree_at(
            lambda m: m.return_statistics, model, returns, is_leaf=lambda x: x is None
        )
        batch = make_batch(data, initial_states, factor * data.values, 12)
        batch = batch._replace(values=factor * batch.values)
        batch = batch._replace(targets=batch.advantages + batch.values)
        extra = (0.2,) if isinstance(agent, PPO) else ()
        return agent.loss(with_statistics, batch, jnp.zeros(()), *extra)[1]

    once, tenfold = scaled(1.0), scaled(10.0)
    for name in ("losses/policy_loss", "losses/value_loss"):
        np.testing.assert_allclose(once[name], tenfold[name], rtol=1e-4, err_msg=name)


def test_without_vtrace_targets_are_those_of_gae(collected):
    model, _, _, data, initial_states, _ = collected("gru")
    # A policy that acted differently: V-trace would weigh its steps, GAE does not.
    old = data._replace(log_probs=data.log_probs + 1.0)
    seen = []

    class Recorder(APPO):
        def _run_epochs(self, model, _, opt_state, batch, *args):
            del args
            seen.append(batch)
            return model, opt_state, {}

    agent = Recorder(vtrace=False)
    agent.learn(model, None, None, old, initial_states, 12, jax.random.key(0), jnp.ones(()))
    expected = make_batch(old, initial_states, agent._advantages(old), 12)
    np.testing.assert_allclose(seen[0].advantages, expected.advantages, atol=1e-6)
    np.testing.assert_allclose(seen[0].targets, expected.targets, atol=1e-6)
