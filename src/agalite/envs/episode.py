"""One episode of a world, frame by frame, for people to look at."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Shaped, UInt8

LONGEST = 1000  # steps, where nobody says how many
_SLOWEST = 8.0  # frames a second; a world's own speed is for people who play it

# act(key, memory, obs, first) -> memory, action; first is true with an episode's first observation.
Act = Callable[[Array, Any, Shaped[Array, "..."], Bool[Array, ""]], tuple[Any, Array]]


class Episode(NamedTuple):
    frames: list[UInt8[np.ndarray, "height width 3"]]
    total: float
    """The sum of the rewards."""
    why: str
    """How it ended, in words."""


def speed(world: Any) -> float:
    """Frames a second to show it at."""
    return max(_SLOWEST, getattr(world, "frames_a_second", 30.0))


def play(world: Any, act: Act, memory: Any, *, seed: int, steps: Iterable[int]) -> Episode:
    """Until it ends or `steps` (0, 1, 2, ...) run out."""
    params = world.default_params

    @jax.jit
    def begin(key: Array) -> Any:
        obs, state = world.reset_env(key, params)
        return obs, state, world.render(state, params)

    @jax.jit
    def step(key: Array, memory: Any, obs: Array, state: Any, first: Array) -> Any:
        choose, move = jax.random.split(key)
        memory, action = act(choose, memory, obs, first)
        obs, state, reward, terminated, _ = world.step_env(move, state, action, params)
        truncated = world.is_truncated(state, params)
        return memory, obs, state, world.render(state, params), reward, terminated, truncated

    key = jax.random.key(seed)
    obs, state, frame = begin(jax.random.fold_in(key, 0))
    frames, total, why = [np.asarray(frame)], 0.0, "stopped before its end"
    for i in steps:
        memory, obs, state, frame, reward, terminated, truncated = step(
            jax.random.fold_in(key, i + 1), memory, obs, state, np.asarray(i == 0)
        )
        frames.append(np.asarray(frame))
        total += float(reward)
        if terminated or truncated:
            why = "ended" if terminated else "stopped by the time limit"
            break
    return Episode(frames, total, why)
