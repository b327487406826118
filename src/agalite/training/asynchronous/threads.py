"""Actors as threads of this process: compiled programs and waiting let other threads run."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from agalite.envs.gymnasium.workers import Fault
from agalite.training.asynchronous.actor import Actor, make_worker, seed_for
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import Closed, Delivery, Parameters, Queue, Trajectory
from agalite.training.asynchronous.worker import TooManyFaults
from agalite.training.config import HostConfig

_PATIENCE = 3.0  # seconds that actors have to come to an end by themselves


class LocalActors:
    """A placement: `start`, then `take` and `publish` by turns, then `close`."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._first = make_worker(config, config.seed)
        self.spaces = self._first.observation_space, self._first.action_space
        self._queue = Queue(config.queue_size * config.rollouts)
        self._actors: list[Actor] = []
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._news: list[Delivery] = []
        self._turns = _Turns(config.num_actors) if config.synchronous else None
        self._closed = False

    def start(
        self, network: Network, version: int, weights: Any, tell: Callable[[str], None]
    ) -> None:
        """Begin to act with these weights; `tell` takes lines for the run's log."""
        self._network, self._parameters = network, Parameters(version, weights)
        self._begun, self._tell = version, tell
        for i in range(self._config.num_actors):
            thread = threading.Thread(target=self._act, args=(i,), name=f"actor-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def publish(self, version: int, weights: Any) -> None:
        self._parameters.publish(version, weights)

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        """So many rollouts, or None if they are not there in time; raises what an actor raised."""
        if self._turns is not None and len(self._queue) < count:
            self._turns.next()
        taken = self._queue.take(count, timeout)
        if taken is None and self._failures:
            raise self._failures[0]
        return taken

    @property
    def waiting(self) -> int:
        """Rollouts that wait for the learner."""
        return len(self._queue)

    def news(self) -> list[Delivery]:
        """What actors have said since last asked, without the rollouts."""
        said, self._news = self._news, []
        return said

    def close(self) -> None:
        self._closed = True
        self._queue.close()
        if self._turns is not None:
            self._turns.close()
        for actor in self._actors:
            actor.stop()
        for thread in self._threads:
            thread.join(_PATIENCE)
        # A thread that still waits for an environment is woken by that environment's end.
        for actor in self._actors:
            actor.close()
        self._first.close()

    def _act(self, index: int) -> None:
        config = self._config
        try:
            first = self._first
            if index:
                first = first.another(seed_for(config, self._begun, index, 0))
            actor = Actor(
                config,
                index,
                self._parameters,
                begun=self._begun,
                tell=self._say,
                network=self._network,
                first=first,
            )
            self._actors.append(actor)
            deliveries = actor.deliveries()
            while not self._closed:
                if self._turns is not None:
                    self._turns.wait()
                delivery = next(deliveries, None)
                if delivery is None:
                    return
                self._news.append(delivery._replace(trajectories=[]))
                self._queue.put(delivery.trajectories)
        except Closed:
            pass
        except Fault as error:  # later ones are the group's to deal with
            self._fail(TooManyFaults(f"environments cannot be started: {error}"))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._closed:
            self._failures.append(error)
            self._queue.close()

    def _say(self, text: str) -> None:
        # The run may have been closed while an actor was on its way out.
        with contextlib.suppress(ValueError):
            self._tell(text)


class _Turns:
    """Lets every actor make one rollout, when all of them have ended their last one."""

    def __init__(self, actors: int) -> None:
        self._actors, self._waiting, self._turn = actors, 0, 0
        self._changed = threading.Condition()
        self._closed = False

    def wait(self) -> None:
        with self._changed:
            turn = self._turn
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._turn > turn)
            if self._closed:
                raise Closed

    def next(self) -> None:
        with self._changed:
            if self._waiting == self._actors:
                self._waiting = 0
                self._turn += 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
