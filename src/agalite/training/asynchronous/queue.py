"""What goes between actors and learner: trajectories one way, weights the other.

An actor records a rollout of B environments in a `RolloutBuffer` and splits it into trajectories of
one environment each, so that an environment that fails loses its own trajectory only.
"""

import threading
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree, Shaped

from agalite.agents.rollout import Rollout

EpisodeSums = dict[str, tuple[float, int]]
"""For each metric of episodes, its sum over the episodes that ended and their number."""


class Trajectory(NamedTuple):
    """T steps of one environment, in N sequences of T / N steps."""

    rollout: Rollout
    """NumPy arrays (T, ...), without an axis for environments."""
    initial_states: PyTree[Shaped[np.ndarray, "N ..."]]
    """The memory state before each sequence."""
    versions: Int[np.ndarray, " N"]
    """The version of the weights that acted in each sequence."""


class ActorStats(NamedTuple):
    """What an actor did since its last rollout."""

    episodes: EpisodeSums
    lost: int
    """Trajectories that were discarded because their environment failed."""
    faults: int
    """Failures of environments."""
    stalled: float
    """Seconds in which no environment was stepping; an upper bound."""
    seconds: float
    """Seconds in all."""


class RolloutResult(NamedTuple):
    """A rollout of one group of environments."""

    trajectories: list[Trajectory]
    stats: ActorStats


class RolloutBuffer:
    """A rollout of B environments while it is collected."""

    def __init__(self, num_envs: int) -> None:
        self.policy_steps: list[tuple[Any, ...]] = []
        """For each step: obs, resets, actions, log_probs, values."""
        self.env_steps: list[tuple[np.ndarray, ...]] = []
        """For each step: rewards, ends, values of the final observations of truncated episodes."""
        self.initial_states: list[Any] = []
        """For each sequence the memory state (B, ...) before it."""
        self.versions: list[int] = []
        """For each sequence the version of the weights."""
        self.episodes: EpisodeSums = {}
        self._failed = np.zeros(num_envs, bool)

    @property
    def lost(self) -> int:
        """The number of environments that failed in this rollout."""
        return int(self._failed.sum())

    def count_episodes(
        self,
        metrics: dict[str, Float[np.ndarray, " B"]],
        ends: Bool[np.ndarray, " B"],
        restarted: Bool[np.ndarray, " B"],
    ) -> None:
        """Add the episodes that ended with this step; those that a fault ended do not count."""
        self._failed |= restarted
        counted = {}
        for name, values in metrics.items():
            valid = ends & ~restarted & ~np.isnan(values)
            # Also where no episode ended: the first row of metrics must have all names.
            counted[name] = (float(values[valid].sum()), int(valid.sum()))
        self.episodes = merge_episodes(self.episodes, counted)

    def trajectories(self, last_values: Float[np.ndarray, " B"]) -> list[Trajectory]:
        """The trajectories of all environments that did not fail.

        **Arguments:**

        - `last_values`: (B,), the values of the observations after the last step.
        """
        obs, resets, actions, log_probs, values = _stack_steps(self.policy_steps)
        rewards, ends, final_values = _stack_steps(self.env_steps)
        next_values = np.where(ends, final_values, np.concatenate([values[1:], last_values[None]]))
        columns = (obs, resets, actions, log_probs, values, rewards, ends, next_values)
        states = jax.tree.map(
            lambda *rows: np.stack([np.asarray(x) for x in rows]), *self.initial_states
        )
        versions = np.array(self.versions)

        def of_env(tree: Any, b: Any) -> Any:
            return jax.tree.map(lambda x: np.ascontiguousarray(x[:, b]), tree)

        return [
            Trajectory(Rollout(*of_env(columns, b)), of_env(states, b), versions)
            for b in np.flatnonzero(~self._failed)
        ]


def stack(
    trajectories: list[Trajectory],
) -> tuple[Rollout, PyTree[Shaped[np.ndarray, "N B ..."]], Int[np.ndarray, "N B"]]:
    """A batch of B trajectories: rollout (T, B, ...), initial states (N, B, ...), versions."""
    return jax.tree.map(lambda *rows: np.stack(rows, axis=1), *trajectories)


def merge_episodes(a: EpisodeSums, b: EpisodeSums) -> EpisodeSums:
    """The sums over the episodes of both."""
    out = dict(a)
    for name, (total, count) in b.items():
        before = out.get(name, (0.0, 0))
        out[name] = (before[0] + total, before[1] + count)
    return out


def episode_mean(episodes: EpisodeSums, name: str) -> float:
    """The mean of a metric; NaN if no episode ended."""
    total, count = episodes.get(name, (0.0, 0))
    return total / count if count else float("nan")


def _stack_steps(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """T tuples of arrays (...), or of trees of them, as a tuple of arrays (T, ...)."""
    return jax.tree.map(lambda *column: np.stack([np.asarray(x) for x in column]), *rows)


class Weights(NamedTuple):
    version: int
    """The number of updates that made them."""
    arrays: Any


class ParameterStore:
    """The newest weights. Publishing replaces a reference, so neither side waits."""

    def __init__(self, version: int, arrays: Any) -> None:
        self.latest = Weights(version, arrays)

    def publish(self, version: int, arrays: Any) -> None:
        self.latest = Weights(version, arrays)


class QueueClosed(Exception):
    """The queue was closed while an actor waited to put something into it."""


class TrajectoryQueue:
    """Trajectories, first in, first out. Bounded, which bounds the policy lag.

    **Arguments:**

    - `limit`: with so many trajectories in the queue, actors wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[Trajectory] = []
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: list[Trajectory]) -> None:
        """Wait while the queue is full, then add all items together."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._limit)
            if self._closed:
                raise QueueClosed
            self._items += items
            self._changed.notify_all()

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        """The `count` oldest, or None if there are fewer after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) >= count, timeout)
            if len(self._items) < count:
                return None
            taken, self._items = self._items[:count], self._items[count:]
            self._changed.notify_all()
            return taken

    def close(self) -> None:
        """Wake all who wait; `put` raises `QueueClosed` from here on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
