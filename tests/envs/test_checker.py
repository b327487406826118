"""`check_env` accepts our environments and names the promise that another one breaks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment, spaces

from agalite.envs import make
from agalite.envs.base import JaxEnvironment
from agalite.testing import check_env


@pytest.mark.parametrize(
    "name",
    [
        "tmaze",
        "masked-cartpole",
        "repeat-previous",
        "memory-chain",
        pytest.param("noisy-masked-cartpole", marks=pytest.mark.slow),
        pytest.param("mystery-path-grid", marks=pytest.mark.slow),
        pytest.param("mystery-path", marks=pytest.mark.slow),
    ],
)
def test_ours_keep_the_contract(name):
    env = make(name)
    check_env(env, steps=40)
    params = env.default_params
    _, state = env.reset(jax.random.key(0))
    frame = np.asarray(env.render(state, params))
    assert len(np.unique(frame)) > 1, "a frame of one colour shows nothing"


@struct.dataclass
class State(environment.EnvState):
    pass


@struct.dataclass
class Params(environment.EnvParams):
    max_steps_in_episode: int = 5


class Clock(JaxEnvironment[State, Params]):
    """obs (1,): the time, divided by ten."""

    def __init__(self):
        super().__init__(Params())

    def reset_env(self, key, params):
        del key, params
        return jnp.zeros(1), State(jnp.int32(0))

    def step_env(self, key, state, action, params):
        del key, action
        state = State(state.time + 1)
        terminated = self.is_terminated(state, params)
        return state.time[None] / 10.0, state, jnp.float32(1.0), terminated, {}

    def is_terminated(self, state, params):
        del state, params
        return jnp.bool_(False)

    def action_space(self, params=None):
        del params
        return spaces.Discrete(2)

    def observation_space(self, params=None):
        del params
        return spaces.Box(0.0, 0.5, (1,), jnp.float32)


class EndsTwice(Clock):
    """Terminates at the time limit, and calls that truncated as well."""

    def is_terminated(self, state, params):
        return state.time >= params.max_steps_in_episode

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode


class Overflows(Clock):
    """Leaves its observation space at the third step."""

    def observation_space(self, params=None):
        del params
        return spaces.Box(0.0, 0.25, (1,), jnp.float32)


class NeverEnds(Clock):
    """Ignores the time limit."""

    def is_truncated(self, state, params):
        del state, params
        return jnp.bool_(False)


class ForgetsToReset(Clock):
    """Returns the final observation instead of that of the next episode."""

    def step(self, key, state, action, params=None):  # pyright: ignore
        _, *rest, info = super().step(key, state, action, params)
        return info["final_observation"], *rest, info


class GrowsItsState(Clock):
    """Its time becomes a float."""

    def step_env(self, key, state, action, params):
        obs, state, *rest = super().step_env(key, state, action, params)
        return obs, State(state.time.astype(jnp.float32)), *rest


class CountsRewards(Clock):
    """Its reward is an integer."""

    def step_env(self, key, state, action, params):
        obs, state, _, *rest = super().step_env(key, state, action, params)
        return obs, state, jnp.int32(1), *rest


def test_a_sound_one_passes():
    check_env(Clock(), steps=20)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (EndsTwice, "EndsTwice, promise 'end' at step 5: terminated and truncated are both true"),
        (Overflows, r"promise 'observation' at step 3: the observation\[0\] is 0.3\d*, outside of"),
        (NeverEnds, "promise 'time' at step 5: the episode is longer than 5 steps, its limit"),
        (ForgetsToReset, "promise 'autoreset' at step 5: the observation is not that of a reset"),
        (GrowsItsState, r"promise 'signature' at step 1: step changes the state from .*int32"),
        (CountsRewards, r"promise 'reward' at step 1: it is int32\[\]"),
    ],
)
def test_a_broken_promise_is_named_with_its_step(env, message):
    with pytest.raises(AssertionError, match=message):
        check_env(env(), steps=20)


def test_what_is_no_environment():
    with pytest.raises(ValueError, match="must be a gymnax environment"):
        check_env("tmaze")  # pyright: ignore[reportArgumentType]
