"""Rollouts: what is collected, and what the value after a step is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.agents.rollout import batched_cond
from agalite.envs import make
from agalite.envs.vector import VectorEnv


def test_a_reset_is_true_at_the_first_observation_of_an_episode(collected):
    model, before, after, data, _, _ = collected("agalite")
    np.testing.assert_array_equal(data.resets[0], before.resets)
    np.testing.assert_array_equal(data.resets[1:], data.ends[:-1])
    np.testing.assert_array_equal(after.resets, data.ends[-1])
    # T-Maze shows its cue in the first observation, and only there.
    np.testing.assert_array_equal(data.obs[..., :2].sum(-1) > 0, data.resets)
    fresh = jax.vmap(jax.vmap(lambda o: model.step(model.initial_state(), o, jnp.array(True))[2]))
    values = jax.jit(fresh)(data.obs)
    np.testing.assert_allclose(values[data.resets], data.values[data.resets], atol=1e-5)


def test_next_values_depend_on_how_the_step_ended(collected):
    model, before, after, data, _, _ = collected("gru")
    terminated = data.ends & (jnp.abs(data.rewards) > 0.5)  # a turn pays 4 or -1
    truncated = data.ends & ~terminated
    assert terminated.any()
    assert truncated.any()
    assert (data.next_values[terminated] == 0).all()
    going = ~data.ends[:-1]
    np.testing.assert_array_equal(data.next_values[:-1][going], data.values[1:][going])
    model_step = jax.jit(jax.vmap(model.step))
    _, _, last = model_step(after.memory_state, after.obs, after.resets)
    going = ~data.ends[-1]
    np.testing.assert_allclose(data.next_values[-1][going], last[going], atol=1e-5)
    # Replay up to the first truncated step, and ask the critic about its final observation.
    memory_state, env_state = before.memory_state, before.env_state
    env_step = jax.jit(VectorEnv(make("tmaze", corridor=3, max_steps=7), 4).step)
    keys = jax.random.split(jax.random.key(3), 48)
    for t in range(48):
        memory_state, _, _ = model_step(memory_state, data.obs[t], data.resets[t])
        key = jax.random.split(keys[t])[1]
        _, env_state, _, _, cut, info = env_step(key, env_state, data.actions[t])
        np.testing.assert_array_equal(cut, truncated[t])
        if cut.any():
            no_reset = jnp.zeros(4, bool)
            _, _, final = model_step(memory_state, info["final_observation"], no_reset)
            np.testing.assert_allclose(data.next_values[t][cut], final[cut], atol=1e-5)
            assert (jnp.abs(final[cut]) > 0).all()
            return
    pytest.fail("nothing was truncated")


def test_episodes_are_summed_over_rollouts(collected):
    _, before, _, data, _, episodes = collected("gru")
    returns, count, total = np.asarray(before.returns).copy(), 0, 0.0
    for t in range(48):
        returns += np.asarray(data.rewards[t])
        done = np.asarray(data.ends[t])
        total, count = total + returns[done].sum(), count + done.sum()
        returns[done] = 0
    assert int(episodes.ended) == count
    np.testing.assert_allclose(float(episodes.returns), total, rtol=1e-4)


def test_batched_cond():
    def double(x):
        return {"y": x * 2}

    otherwise = {"y": jnp.zeros(3)}
    x = jnp.arange(3.0)
    for pred in (True, False):
        got = batched_cond(jnp.array(pred), double, otherwise, x)
        np.testing.assert_array_equal(got["y"], x * 2 if pred else 0 * x)
    preds = jnp.array([True, False])
    batched = jax.jit(jax.vmap(lambda p: batched_cond(p, double, otherwise, x)))(preds)
    np.testing.assert_array_equal(batched["y"], jnp.stack([x * 2, x * 0]))
