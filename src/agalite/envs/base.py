"""The base class of the JAX environments: gymnax's contract, with rendering.

A `JaxEnvironment` is a gymnax 1.0 `Environment`, so it runs in other people's trainers too:

    obs, env_state = env.reset(key)
    obs, env_state, reward, terminated, truncated, info = env.step(key, env_state, action)

All arrays are unbatched; `vector.VectorEnv` steps many copies. `step` resets by itself at the
end of an episode and keeps the last observation in `info["final_observation"]`. The options of
an environment are given once, at construction, and become `env.default_params`, so the `params`
argument of gymnax can be left out everywhere.
"""

from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from gymnax.environments import environment, spaces
from jaxtyping import Array, UInt8

State = TypeVar("State", bound=environment.EnvState)
Params = TypeVar("Params", bound=environment.EnvParams)


class BinaryBox(spaces.Box):
    """A Box whose first numbers are 0 or 1, such as one-hot vectors.

    Agents keep these as bits until they learn from them, where an observation has many.

    **Arguments:**

    - `low`, `high`, `shape`, `dtype`: as for a Box; `shape` is that of a vector.
    - `binary`: how many of the first numbers are 0 or 1.
    """

    def __init__(
        self, low: float, high: float, shape: tuple[int], dtype: Any, *, binary: int
    ) -> None:
        super().__init__(low, high, shape, dtype)
        self.binary = binary


class JaxEnvironment(environment.Environment[State, Params]):
    """Base class of the JAX environments.

    A subclass implements `reset_env`, `step_env`, `is_terminated`, `action_space` and
    `observation_space`, and `render` if it is to be drawn. Its state has a field `time`, the
    number of steps taken, and its parameters a field `max_steps_in_episode`.
    `agalite.testing.check_env` checks a subclass against the contract.

    **Arguments:**

    - `params`: the environment's parameters, a `gymnax` `EnvParams`; returned as
      `default_params`.
    """

    costly_reset: ClassVar[bool] = False
    """Whether a reset costs much more than a step. `VectorEnv` then resets only the
    environments whose episode ended, instead of all of them at every step."""

    render_fps: ClassVar[int] = 30
    """Frames per second at which an episode is shown."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self._params = params

    @property
    def default_params(self) -> Any:
        """The parameters given at construction."""
        return self._params

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        """Whether the time limit is reached. A terminated episode is never truncated as well."""
        late = state.time >= params.max_steps_in_episode
        return jnp.logical_and(late, jnp.logical_not(self.is_terminated(state, params)))

    def render(self, state: State, params: Params | None = None) -> UInt8[Array, "height width 3"]:
        """Draw `state` as one RGB frame. A pure function, so it can be traced."""
        raise NotImplementedError
