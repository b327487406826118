"""`VectorEnv` equals `jax.vmap(env.step)`, with resets computed only where episodes ended."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment, spaces

from agalite.envs.base import JaxEnvironment
from agalite.envs.vector import VectorEnv


@struct.dataclass
class CountState(environment.EnvState):
    goal: jax.Array
    noise: jax.Array


@struct.dataclass
class CountParams(environment.EnvParams):
    max_steps_in_episode: int = 7


class Count(JaxEnvironment[CountState, CountParams]):
    """Ends by itself after a random number of steps, or is truncated at seven."""

    def __init__(self, costly: bool) -> None:
        super().__init__(CountParams())
        self.costly_reset = costly  # type: ignore[misc]

    def reset_env(self, key, params):
        del params
        goal, noise = jax.random.bits(key, (2,))
        state = CountState(jnp.int32(0), (1 + goal % 11).astype(jnp.int32), self._float(noise))
        return self._look(state), state

    def step_env(self, key, state, action, params):
        noise = self._float(jax.random.bits(key)) + action
        state = state.replace(time=state.time + 1, noise=noise)
        ended = self.is_terminated(state, params)
        return self._look(state), state, noise, ended, {"goal": state.goal}

    def is_terminated(self, state, params):
        del params
        return state.time >= state.goal

    def _float(self, bits):
        return bits.astype(jnp.float32) / 2.0**32

    def _look(self, state):
        # An image, whose axes a reset in blocks merges.
        return jnp.stack([state.time.astype(jnp.float32), state.noise]).reshape(2, 1, 1)

    def action_space(self, params=None):
        del params
        return spaces.Discrete(3)


@pytest.mark.parametrize("num_envs", [5, 100])  # blocks of one and of three, the last overlaps
def test_resets_in_blocks_change_nothing(num_envs):
    plain, blocks = VectorEnv(Count(False), num_envs), VectorEnv(Count(True), num_envs)
    actions = jnp.arange(num_envs) % 3

    def run(vector):
        def step(state, key):
            obs, state, *rest = vector.step(key, state, actions)
            return state, (obs, *rest)

        keys = jax.random.split(jax.random.key(1), 40)
        return jax.jit(lambda key: jax.lax.scan(step, vector.reset(key)[1], keys))(
            jax.random.key(0)
        )

    got, want = run(blocks), run(plain)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    _, (_, _, terminated, truncated, _) = want
    assert terminated.any()
    assert truncated.any()
    assert not (terminated & truncated).any()


def test_all_may_end_at_once():
    vector = VectorEnv(Count(True), 64)

    @jax.jit
    def reset_and_step(key):
        _, state = vector.reset(key)
        state = state.replace(goal=jnp.ones(64, jnp.int32))
        return vector.step(key, state, jnp.zeros(64, jnp.int32))

    obs, _, _, terminated, _, info = reset_and_step(jax.random.key(0))
    assert terminated.all()
    assert (info["final_observation"][:, 0] == 1).all()
    assert (obs[:, 0] == 0).all()
    assert len(np.unique(np.asarray(obs[:, 1]))) == 64, "each begins an episode of its own"


def test_seeds_side_by_side():
    vector = VectorEnv(Count(True), 8)
    keys = jax.random.split(jax.random.key(0), 3)

    def run(key):
        reset_key, *step_keys = jax.random.split(key, 11)

        def step(state, key):
            _, state, reward, *_ = vector.step(key, state, jnp.zeros(8, jnp.int32))
            return state, reward

        return jax.lax.scan(step, vector.reset(reset_key)[1], jnp.stack(step_keys))[1]

    together = jax.jit(jax.vmap(run))(keys)
    alone = jax.jit(run)
    for i in range(3):
        np.testing.assert_array_equal(together[i], alone(keys[i]))


@pytest.mark.parametrize("num_envs", [0, -1, 2.5, True])
def test_an_invalid_number_of_environments(num_envs):
    with pytest.raises(ValueError, match="num_envs="):
        VectorEnv(Count(True), num_envs)
