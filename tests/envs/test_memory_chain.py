"""MemoryChain: gymnax's rules, draws and observations."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.bsuite import memory_chain as gymnax_memory_chain

from agalite.envs import make


@pytest.mark.parametrize(("length", "bits"), [(1, 1), (4, 1), (5, 3)])
def test_gymnax_gives_the_same_observations_rewards_and_ends(length, bits):
    """From the same keys and with the same actions, over several episodes."""
    env = make("memory-chain", length=length, bits=bits)
    other = gymnax_memory_chain.MemoryChain(num_bits=bits)
    params = gymnax_memory_chain.EnvParams(memory_length=length, max_steps_in_episode=length + 1)
    steps = 4 * (length + 1)
    keys = jax.random.split(jax.random.key(1), steps)
    actions = jax.random.randint(jax.random.key(2), (steps,), 0, 2)

    def play(step, start):
        def body(state, now):
            obs, state, reward, terminated, truncated, info = step(now[0], state, now[1])
            return state, (obs, info["final_observation"], reward, terminated | truncated)

        first, state = start
        return first, jax.lax.scan(body, state, (keys, actions))[1]

    key = jax.random.key(0)
    ours = play(env.step, env.reset(key))
    theirs = play(lambda k, s, a: other.step(k, s, a, params), other.reset(key, params))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    _, (_, _, rewards, ends) = ours
    assert np.flatnonzero(ends).tolist() == list(range(length, steps, length + 1))
    np.testing.assert_array_equal(np.abs(rewards), ends)


def test_the_cue_is_seen_at_the_beginning_only_and_repeating_it_succeeds():
    env = make("memory-chain", length=6)
    step = jax.jit(env.step)
    obs, state = env.reset(jax.random.key(3))
    seen, done = [float(obs[2])], False
    while not done:
        answer = int(seen[0] > 0)
        obs, state, reward, terminated, truncated, info = step(jax.random.key(0), state, answer)
        done = bool(terminated)
        assert not truncated
        seen.append(float(info["final_observation"][2]))
    assert abs(seen[0]) == 1
    assert seen[1] == seen[0]
    assert not any(seen[2:])
    assert (float(reward), bool(info["success"])) == (1.0, True)


def test_gymnasium_has_it_under_its_id():
    env = gymnasium.make("agalite/MemoryChain-v0", length=2)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    rewards = [env.step(jnp.int32(0))[1] for _ in range(3)]
    assert np.abs(rewards).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, "length=0 must be a whole number from 1 to 100000"),
        ({"bits": 65}, "bits=65"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        make("memory-chain", **options)
