"""Rollouts: what is collected, and what the value after a step is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.agents.rollout import batched_cond, collect_rollout, init
from agalite.envs import make
from agalite.envs.vector import VectorEnv
from agalite.networks.actor_critic import ActorCritic


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


def test_noise_is_held_for_some_steps():
    env = make("tmaze", corridor=100)
    envs = VectorEnv(env, 64)
    model = ActorCritic.make(
        env.observation_space(env.default_params),
        env.action_space(env.default_params),
        memory="feedforward",
        memory_options={"d_model": 8, "layers": 1, "ffn_size": 8},
        hidden_size=8,
        actor_gain=1e-6,  # so uniform that equal noise gives equal actions
        key=jax.random.key(0),
    )

    def actions(noise_steps, noise_key=None):
        _, data, _, _ = collect_rollout(
            model,
            envs,
            init(model, envs, jax.random.key(1)),
            jax.random.key(2),
            num_steps=24,
            seq_len=12,
            noise_steps=noise_steps,
            noise_key=noise_key,
        )
        return np.asarray(data.actions)  # (24, 64)

    held, fresh = actions(8).reshape(3, 8, 64), actions(1)
    np.testing.assert_array_equal(held, np.broadcast_to(held[:, :1], held.shape))
    assert (held[0, 0] != held[1, 0]).any()
    assert (held[1, 0] != held[2, 0]).any()
    outlasts = actions(48, jax.random.key(3))
    np.testing.assert_array_equal(outlasts, np.broadcast_to(outlasts[:1], outlasts.shape))
    assert (fresh[1:] != fresh[:-1]).mean() == pytest.approx(0.75, abs=0.05)
    # Across environments and blocks the actions are still the policy's: a quarter each.
    np.testing.assert_allclose(np.bincount(held[:, 0].ravel(), minlength=4) / 192, 0.25, atol=0.1)


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
