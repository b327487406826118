"""What actors hand to the learner: whole rollouts, one environment at a time, never torn."""

import threading
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree, Shaped

from agalite.agents.rollout import Rollout


class Trajectory(NamedTuple):
    """T steps of one environment, N sequences of L steps each with the memory it began with."""

    rollout: Rollout
    """NumPy arrays (T, ...), without an axis for environments."""
    starts: PyTree[Shaped[np.ndarray, "N ..."]]
    versions: Int[np.ndarray, " N"]
    """How many updates the weights had seen that acted; they change between sequences only."""


class Handover(NamedTuple):
    trajectories: list[Trajectory]
    """Of all environments that came through their rollout."""
    episodes: dict[str, tuple[float, int]]
    """As in `Delivery`."""
    lost: int
    """How many did not come through it."""


class Notes:
    """A rollout of B environments while it is being made."""

    def __init__(self, count: int) -> None:
        self.looks: list[tuple[Any, ...]] = []
        """For each step: observations, resets, what the policy drew, log-probabilities, values."""
        self.answers: list[tuple[np.ndarray, ...]] = []
        """For each step: rewards, ends, values of final observations where one was cut off."""
        self.starts: list[Any] = []
        self.versions: list[int] = []
        self._torn = np.zeros(count, bool)
        self._episodes: dict[str, tuple[float, int]] = {}

    def count(
        self,
        charts: dict[str, Float[np.ndarray, " B"]],
        ends: Bool[np.ndarray, " B"],
        torn: Bool[np.ndarray, " B"],
    ) -> None:
        """Take down what a step says of episodes; those that a fault ended do not count."""
        self._torn |= torn
        counted = {}
        for name, values in charts.items():
            told = ends & ~torn & ~np.isnan(values)
            # Also where none ended: the names must be known before the first row of metrics.
            counted[name] = (float(values[told].sum()), int(told.sum()))
        self._episodes = merge(self._episodes, counted)

    def handover(self, last: Float[np.ndarray, " B"]) -> Handover:
        """`last`: what the critic says to the observations after the last step."""
        obs, resets, sampled, log_probs, values = _stack(self.looks)
        rewards, ends, after = _stack(self.answers)
        next_values = np.where(ends, after, np.concatenate([values[1:], last[None]]))
        columns = (obs, resets, sampled, log_probs, values, rewards, ends, next_values)
        starts = jax.tree.map(lambda *rows: np.stack([np.asarray(x) for x in rows]), *self.starts)
        versions = np.array(self.versions)

        def of(x: Any, b: Any) -> Any:
            return np.ascontiguousarray(x[:, b])

        trajectories = [
            Trajectory(
                Rollout(*(of(x, b) for x in columns)),
                jax.tree.map(lambda x, b=b: of(x, b), starts),
                versions,
            )
            for b in np.flatnonzero(~self._torn)
        ]
        return Handover(trajectories, self._episodes, int(self._torn.sum()))


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


def _stack(rows: list[tuple[Any, ...]]) -> list[np.ndarray]:
    """Tuples of arrays (...), one for each step, as arrays (T, ...)."""
    return [np.stack([np.asarray(x) for x in column]) for column in zip(*rows, strict=True)]


# --- Between actors and learner, in one process: rollouts one way, weights the other --------------


class Weights(NamedTuple):
    version: int
    """How many updates they have seen."""
    arrays: Any


class Parameters:
    """The newest weights. To publish is to put a reference in place: nobody is kept waiting."""

    def __init__(self, version: int, arrays: Any) -> None:
        self.latest = Weights(version, arrays)

    def publish(self, version: int, arrays: Any) -> None:
        self.latest = Weights(version, arrays)


class Closed(Exception):
    """The queue was closed while somebody waited at it."""


class Queue:
    """Trajectories in the order they came. Bounded, so that policies do not grow old in it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[Trajectory] = []
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: list[Trajectory]) -> None:
        """Waits while the queue is full. What one group finished together is taken together."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._limit)
            if self._closed:
                raise Closed
            self._items += items
            self._changed.notify_all()

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        """The `count` oldest, or None if there are not so many within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) >= count, timeout)
            if len(self._items) < count:
                return None
            taken, self._items = self._items[:count], self._items[count:]
            self._changed.notify_all()
            return taken

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
