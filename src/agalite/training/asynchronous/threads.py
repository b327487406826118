"""Actors as threads of this process.

Threads suffice: compiled programs and waiting for environments release Python's global lock.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from agalite.envs.gymnasium.workers import EnvError
from agalite.training.asynchronous.actor import Actor
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import (
    ActorStats,
    ParameterStore,
    QueueClosed,
    Trajectory,
    TrajectoryQueue,
)
from agalite.training.asynchronous.worker import TooManyFaults, make_worker, worker_seed
from agalite.training.config import HostConfig

_STOP_TIMEOUT = 3.0  # seconds for an actor to stop by itself before its environments are closed


class ThreadActors:
    """The actors of a run, each in a thread; see `Actors` in train.py."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._first_worker = make_worker(config, config.seed)
        self.spaces = self._first_worker.observation_space, self._first_worker.action_space
        self._queue = TrajectoryQueue(config.queue_size * config.rollouts)
        self._actors: list[Actor] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self._stats: list[ActorStats] = []
        self._rounds = _Rounds(config.num_actors) if config.synchronous else None
        self._closed = False

    def start(
        self, network: Network, version: int, weights: Any, log: Callable[[str], None]
    ) -> None:
        self._network, self._parameters = network, ParameterStore(version, weights)
        self._start_update, self._log = version, log
        for i in range(self._config.num_actors):
            thread = threading.Thread(target=self._act, args=(i,), name=f"actor-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def publish(self, version: int, weights: Any) -> None:
        self._parameters.publish(version, weights)

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        if self._rounds is not None and len(self._queue) < count:
            self._rounds.start_next()
        taken = self._queue.take(count, timeout)
        if taken is None and self._errors:
            raise self._errors[0]
        return taken

    @property
    def queued(self) -> int:
        return len(self._queue)

    def pop_stats(self) -> list[ActorStats]:
        stats, self._stats = self._stats, []
        return stats

    def close(self) -> None:
        self._closed = True
        self._queue.close()
        if self._rounds is not None:
            self._rounds.close()
        for actor in self._actors:
            actor.stop()
        for thread in self._threads:
            thread.join(_STOP_TIMEOUT)
        # Closing the environments wakes a thread that still waits for one.
        for actor in self._actors:
            actor.close()
        self._first_worker.close()

    def _act(self, index: int) -> None:
        config = self._config
        try:
            first_worker = self._first_worker
            if index:
                seed = worker_seed(config, self._start_update, index, 0)
                first_worker = first_worker.recreate(seed)
            actor = Actor(
                config,
                index,
                self._parameters,
                start_update=self._start_update,
                log=self._log_line,
                network=self._network,
                first_worker=first_worker,
            )
            self._actors.append(actor)
            rollouts = actor.rollouts()
            while not self._closed:
                if self._rounds is not None:
                    self._rounds.wait()
                result = next(rollouts, None)
                if result is None:
                    return
                self._stats.append(result.stats)
                self._queue.put(result.trajectories)
        except QueueClosed:
            pass
        except EnvError as error:  # only while starting; the group handles later ones
            self._fail(TooManyFaults(f"environments cannot be started: {error}"))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Let `take` raise the error in the learner's thread."""
        if not self._closed:
            self._errors.append(error)
            self._queue.close()

    def _log_line(self, text: str) -> None:
        # The run may be closed while an actor is stopping.
        with contextlib.suppress(ValueError):
            self._log(text)


class _Rounds:
    """For synchronous training: every actor collects one rollout per round."""

    def __init__(self, num_actors: int) -> None:
        self._num_actors, self._waiting, self._round = num_actors, 0, 0
        self._changed = threading.Condition()
        self._closed = False

    def wait(self) -> None:
        """Called by an actor: wait for the next round."""
        with self._changed:
            current = self._round
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._round > current)
            if self._closed:
                raise QueueClosed

    def start_next(self) -> None:
        """Called by the learner: start the next round if all actors wait for it."""
        with self._changed:
            if self._waiting == self._num_actors:
                self._waiting = 0
                self._round += 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
