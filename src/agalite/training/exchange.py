"""Between actors and learner, in one process: rollouts one way, weights the other.

Neither ever waits for the other's work: an actor takes the newest weights there are, and stops only
while more rollouts wait than were asked for; the learner takes what is there.
"""

import threading
from typing import Any, NamedTuple

from agalite.training.trajectory import Trajectory


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
