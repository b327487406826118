"""What our environments add to gymnax's contract: a picture, and an end that says why.

A world is a gymnax 1.0 `Environment`: `reset(key, params) -> obs, state` and
`step(key, state, action, params) -> obs, state, reward, terminated, truncated, info`, which
begins the next episode by itself and leaves the last observation of the old one in
`info["final_observation"]`. Options are given once, at construction, and live in
`default_params`; so `params` can be left out everywhere.
"""

from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from gymnax.environments import environment
from jaxtyping import Array, UInt8

State = TypeVar("State", bound=environment.EnvState)
Params = TypeVar("Params", bound=environment.EnvParams)


class World(environment.Environment[State, Params]):
    """Subclasses write `reset_env`, `step_env`, `is_terminated`, the two spaces and `render`."""

    costly_reset: ClassVar[bool] = False
    """True when beginning an episode costs much more than a step, so that it must not be done
    for every environment at every step and thrown away (see `vector.Vector`)."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self._params = params

    @property
    def default_params(self) -> Any:
        """The options given at construction."""
        return self._params

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        """At the time limit, unless the episode ended of itself: never both."""
        late = state.time >= params.max_steps_in_episode
        return jnp.logical_and(late, jnp.logical_not(self.is_terminated(state, params)))

    def render(self, state: State, params: Params | None = None) -> UInt8[Array, "height width 3"]:
        """state -> one RGB frame."""
        raise NotImplementedError
