"""Conversion between Gymnasium's spaces and a learner's arrays (B, ...), with checks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

Batch = np.ndarray  # (B, ...)


class Codec(NamedTuple):
    """`space` is that of one environment as the learner sees it; `convert` takes a batch of B."""

    space: gym.Space
    convert: Callable[[Any], Batch]


def observations(space: gym.Space, name: str) -> Codec:
    """How observations of `space` become arrays.

    A Box stays as it is, with its dtype. The others become float32: Discrete(n) a one-hot (n,),
    MultiDiscrete the one-hots of its entries concatenated, MultiBinary its zeros and ones. `name`
    is the environment's, for messages.
    """
    if isinstance(space, gym.spaces.Box) and 0 in space.shape:
        raise ValueError(
            f"the observation space of {name} has shape {space.shape}, which holds no numbers"
        )
    if isinstance(space, gym.spaces.Box):
        return Codec(space, np.asarray)
    if isinstance(space, gym.spaces.MultiBinary):
        return Codec(_unit_box(space.shape), lambda batch: np.asarray(batch, np.float32))
    if isinstance(space, gym.spaces.Discrete):
        sizes, start = np.array([space.n]), np.array([space.start])
    elif isinstance(space, gym.spaces.MultiDiscrete):
        sizes, start = np.ravel(space.nvec), np.ravel(space.start)
    else:
        raise ValueError(
            _unsupported("observation", space, name, "Box, Discrete, MultiBinary, MultiDiscrete")
            + "; gymnasium.wrappers.FlattenObservation can make a Box of Dict and Tuple"
        )

    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    width = int(sizes.sum())

    def one_hots(batch: Any) -> Batch:
        entries = np.asarray(batch).reshape(len(batch), -1) - start
        if ((entries < 0) | (entries >= sizes)).any():
            raise ValueError(f"{name} gave an observation outside its own {space}: {batch}")
        encoded = np.zeros((len(entries), width), np.float32)
        np.put_along_axis(encoded, entries + offsets, 1.0, axis=1)
        return encoded

    return Codec(_unit_box((width,)), one_hots)


def actions(space: gym.Space, name: str, num_envs: int) -> Codec:
    """How a learner's actions (num_envs, ...) become actions of `space`.

    Discrete and MultiDiscrete are counted from 0, whatever their `start`; a Box must be finite.
    Values out of range raise a `ValueError` and are never clipped.
    """
    if isinstance(space, gym.spaces.Discrete):
        sizes, start = np.asarray(space.n), np.asarray(space.start)
        learner_space: gym.Space = gym.spaces.Discrete(int(space.n))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        sizes, start = space.nvec, space.start
        learner_space = gym.spaces.MultiDiscrete(space.nvec, dtype=space.dtype.type)
    elif isinstance(space, gym.spaces.Box):
        return Codec(space, _box_actions(space, name, num_envs))
    else:
        raise ValueError(_unsupported("action", space, name, "Box, Discrete, MultiDiscrete"))

    def integers(batch: Any) -> Batch:
        values = np.asarray(batch)
        _check_action_shape(values, (num_envs, *sizes.shape), name)
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"actions have dtype {values.dtype}; {name} wants whole numbers")
        _check_range(values, 0, sizes - 1, name)
        return (values.astype(np.int64) + start).astype(space.dtype)

    return Codec(learner_space, integers)


def _box_actions(space: gym.spaces.Box, name: str, num_envs: int) -> Callable[[Any], Batch]:
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"the action space of {name} is {space}, without limits; "
            "gymnasium.wrappers.RescaleAction or a Box with finite bounds is needed"
        )
    whole = np.issubdtype(space.dtype, np.integer)

    def numbers(batch: Any) -> Batch:
        values = np.asarray(batch)
        _check_action_shape(values, (num_envs, *space.shape), name)
        if not np.issubdtype(values.dtype, np.integer if whole else np.number):
            raise ValueError(f"actions have dtype {values.dtype}; {name} wants {space.dtype}")
        # A learner's float32 may exceed a float64 bound by a rounding error: compare at the
        # coarser of the two precisions, then clip to the bound.
        coarse = values.dtype if np.issubdtype(values.dtype, np.floating) else space.dtype
        _check_range(values, space.low.astype(coarse), space.high.astype(coarse), name)
        return np.clip(values.astype(space.dtype), space.low, space.high)

    return numbers


def _check_action_shape(values: np.ndarray, expected: tuple[int, ...], name: str) -> None:
    if values.shape != expected:
        raise ValueError(f"actions have shape {values.shape}; {name} wants {expected}")


def _check_range(values: np.ndarray, low: Any, high: Any, name: str) -> None:
    bad = ~((values >= low) & (values <= high))  # true for NaN as well
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        least, most = (np.broadcast_to(x, values.shape)[where] for x in (low, high))
        raise ValueError(
            f"actions{list(where)}={values[where]} is out of range for {name}: "
            f"from {least} to {most}"
        )


def _unit_box(shape: Sequence[int]) -> gym.spaces.Box:
    return gym.spaces.Box(0.0, 1.0, tuple(shape), np.float32)


def _unsupported(kind: str, space: gym.Space, name: str, allowed: str) -> str:
    return (
        f"the {kind} space of {name} is {type(space).__name__}, which is not supported "
        f"({space}); supported are {allowed}"
    )


def describe(space: Any) -> str:
    """A short text about a space of Gymnasium or gymnax: `Box(84x84x3) uint8, 0 to 255`."""
    # By class name: both libraries use the same, and importing gymnax takes two seconds.
    kinds = {kind.__name__ for kind in type(space).__mro__}
    if "Box" in kinds:
        low, high = np.unique(np.asarray(space.low)), np.unique(np.asarray(space.high))
        even = len(low) == len(high) == 1 and np.isfinite([low[0], high[0]]).all()
        limits = f", {low[0]:g} to {high[0]:g}" if even else ""
        return f"Box({_times(space.shape)}) {np.dtype(space.dtype).name}{limits}"
    if "Discrete" in kinds:
        start = int(getattr(space, "start", 0))
        return f"Discrete({int(space.n)})" + (f" from {start}" if start else "")
    if "MultiDiscrete" in kinds:
        return f"MultiDiscrete({', '.join(str(int(n)) for n in np.ravel(space.nvec))})"
    if "MultiBinary" in kinds:
        return f"MultiBinary({_times(space.shape)})"
    return type(space).__name__


def _times(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape) or "1"
