"""Many copies of a world: the same as each by itself, with resets done only where they are due."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment, spaces

from agalite.envs.base import World
from agalite.envs.vector import Vector


@struct.dataclass
class CountState(environment.EnvState):
    goal: jax.Array
    noise: jax.Array


@struct.dataclass
class CountParams(environment.EnvParams):
    max_steps_in_episode: int = 7


class Count(World[CountState, CountParams]):
    """Ends by itself after a random number of steps, or is cut off at seven."""

    def __init__(self, costly: bool) -> None:
        super().__init__(CountParams())
        self.costly_reset = costly  # type: ignore[misc]

    def reset_env(self, key, params):
        del params
        goal, noise = jax.random.split(key)
        state = CountState(
            time=jnp.int32(0),
            goal=jax.random.randint(goal, (), 1, 12),
            noise=jax.random.normal(noise),
        )
        return self._look(state), state

    def step_env(self, key, state, action, params):
        noise = jax.random.normal(key) + action
        state = state.replace(time=state.time + 1, noise=noise)
        ended = self.is_terminated(state, params)
        return self._look(state), state, noise, ended, {"goal": state.goal}

    def is_terminated(self, state, params):
        del params
        return state.time >= state.goal

    def _look(self, state):
        return jnp.stack([state.time.astype(jnp.float32), state.noise])

    def action_space(self, params=None):
        del params
        return spaces.Discrete(3)


@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_resets_in_blocks_change_nothing(count):
    plain, blocks = Vector(Count(False), count), Vector(Count(True), count)
    _, state = plain.reset(jax.random.key(0))
    actions = jnp.arange(count) % 3

    def run(vector):
        def step(state, key):
            obs, state, *rest = vector.step(key, state, actions)
            return state, (obs, *rest)

        keys = jax.random.split(jax.random.key(1), 40)
        return jax.jit(lambda s: jax.lax.scan(step, s, keys))(state)

    got, want = run(blocks), run(plain)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    _, (_, _, terminated, truncated, _) = want
    assert terminated.any()
    assert truncated.any() or count < 5
    assert not (terminated & truncated).any()


def test_all_may_end_at_once():
    vector = Vector(Count(True), 64)
    _, state = vector.reset(jax.random.key(0))
    state = state.replace(goal=jnp.ones(64, jnp.int32))
    obs, state, _, terminated, _, info = vector.step(
        jax.random.key(2), state, jnp.zeros(64, jnp.int32)
    )
    assert terminated.all()
    assert (info["final_observation"][:, 0] == 1).all()
    assert (obs[:, 0] == 0).all()
    assert len(np.unique(np.asarray(obs[:, 1]))) == 64, "each begins an episode of its own"


def test_seeds_side_by_side():
    vector = Vector(Count(True), 8)
    keys = jax.random.split(jax.random.key(0), 3)

    def run(key):
        begin, *steps = jax.random.split(key, 11)
        _, state = vector.reset(begin)
        rewards = []
        for k in steps:
            _, state, reward, *_ = vector.step(k, state, jnp.zeros(8, jnp.int32))
            rewards.append(reward)
        return jnp.stack(rewards)

    together = jax.jit(jax.vmap(run))(keys)
    for i in range(3):
        np.testing.assert_array_equal(together[i], jax.jit(run)(keys[i]))


@pytest.mark.parametrize("count", [0, -1, 2.5, True])
def test_a_count_that_is_none(count):
    with pytest.raises(ValueError, match="count="):
        Vector(Count(True), count)
