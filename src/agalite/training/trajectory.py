"""What actors hand to the learner: whole rollouts, one environment at a time, never torn."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int, PyTree, Shaped

from agalite.agents.rollout import Rollout


class Trajectory(NamedTuple):
    """T steps of one environment, N sequences of L steps each with the memory it began with."""

    rollout: Rollout
    """NumPy arrays (T, ...), without an axis for environments."""
    starts: PyTree[Shaped[np.ndarray, "N ..."]]
    versions: Int[np.ndarray, " N"]
    """How many updates the weights had seen that acted; they change between sequences only."""


class Delivery(NamedTuple):
    """What an actor has to say at the end of a rollout of one of its groups."""

    trajectories: list[Trajectory]
    episodes: dict[str, tuple[float, int]]
    """Sum and number, over the episodes that ended, of each chart."""
    lost: int
    """Rollouts thrown away, since their environment failed on the way."""
    faults: int
    """Of environments, since the last delivery."""
    stalled: float
    """Seconds, since the last delivery, in which no environment had anything to do; at most."""
    seconds: float
    """Since the last delivery."""


def stack(
    trajectories: list[Trajectory],
) -> tuple[Rollout, PyTree[Shaped[np.ndarray, "N B ..."]], Int[np.ndarray, "N B"]]:
    """Rollout (T, B, ...), starts (N, B, ...) and versions (N, B)."""
    return jax.tree.map(lambda *rows: np.stack(rows, axis=1), *trajectories)


def merge(
    into: dict[str, tuple[float, int]], episodes: dict[str, tuple[float, int]]
) -> dict[str, tuple[float, int]]:
    out = dict(into)
    for name, (total, count) in episodes.items():
        before = out.get(name, (0.0, 0))
        out[name] = (before[0] + total, before[1] + count)
    return out


def mean(episodes: dict[str, tuple[float, int]], name: str) -> float:
    """NaN where there was nothing."""
    total, count = episodes.get(name, (0.0, 0))
    return total / count if count else float("nan")
