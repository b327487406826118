"""Actors on a Ray cluster: the actor of `actor.py`, in processes of their own, on any machine.

Each is asked for its next rollouts twice over, so that it has something to do while the learner
learns; what is finished waits in the object store until the learner comes for it. Nothing else
waits anywhere, so no policy grows old. An actor that dies, alone or with its machine, takes the
rollouts with it that it was in, and another takes its place, wherever there is one.
"""

import os
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from agalite.envs.gymnasium.workers import Fault
from agalite.training.asynchronous.actor import Actor, make_worker, seed_for
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import Delivery, Parameters, Trajectory
from agalite.training.asynchronous.worker import TooManyFaults
from agalite.training.config import HostConfig

_AHEAD = 2  # deliveries that an actor is asked for before the first has come
_ANSWER = 5.0  # seconds until a cluster must have answered
_PATIENCE = 300.0  # seconds until the first actor must have found a place and made its environments


class Said(NamedTuple):
    delivery: Delivery | None
    log: list[str]
    enough: str | None = None
    """Why the run must stop: environments fail too often."""


class Remote:
    """What runs in a process of Ray: an actor, and the newest weights it was sent."""

    def __init__(self, config: HostConfig, index: int) -> None:
        from agalite.training.session import remember_programs

        remember_programs()
        self._config, self._index = config, index
        self._log: list[str] = []
        self._failure: str | None = None
        self._first = make_worker(config, seed_for(config, 0, index, 0))

    def spaces(self) -> tuple[Any, Any]:
        return self._first.observation_space, self._first.action_space

    def start(self, version: int, weights: Any) -> None:
        self._parameters = Parameters(version, weights)
        try:
            actor = Actor(
                self._config,
                self._index,
                self._parameters,
                begun=version,
                tell=self._log.append,
                first=self._first,
            )
            self._deliveries = actor.deliveries()
        except Fault as error:
            self._failure = f"environments cannot be started: {error}"

    def publish(self, version: int, weights: Any) -> None:
        self._parameters.publish(version, weights)

    def next(self) -> Said:
        if self._failure is not None:
            return Said(None, [], self._failure)
        try:
            delivery, enough = next(self._deliveries), None
        except TooManyFaults as error:
            delivery, enough = None, str(error)
        log, self._log[:] = list(self._log), []
        return Said(delivery, log, enough)


class RayActors:
    """A placement: `start`, then `take` and `publish` by turns, then `close`.

    `address` is that of a cluster; "auto" finds one, or starts one on this machine.
    """

    def __init__(self, config: HostConfig, address: str) -> None:
        if config.synchronous:
            raise ValueError("synchronous=True is for comparisons on one machine; leave out ray")
        self._ray, self._config = import_ray(), config
        self._ours = connect(self._ray, address)
        self._pending: dict[Any, int] = {}
        self._items: deque[Trajectory] = deque()
        self._news: list[Delivery] = []
        self._faults = 0
        self._lives = [0] * config.num_actors
        self._actors: list[Any] = []
        try:
            self._actors = [self._make(i) for i in range(config.num_actors)]
            spaces = self._actors[0].spaces.remote()
            if not self._ray.wait([spaces], timeout=_ANSWER)[0]:
                print(
                    "waiting for the Ray cluster to make an actor and its environments, for "
                    f"{_PATIENCE:.0f} s at most",
                    file=sys.stderr,
                )
            self.spaces = self._ray.get(spaces, timeout=_PATIENCE)
        except self._ray.exceptions.RayError as error:
            self.close()
            why = str(error).strip().splitlines()[-1]  # what the actor itself raised
            if isinstance(error, self._ray.exceptions.GetTimeoutError):
                why = f"the first was not ready within {_PATIENCE:.0f} s"
            elif why.startswith("The actor"):  # Ray's words: it raised nothing
                why = (
                    "a process that was to become one died; if nobody killed it, memory may have "
                    "run out. Run the command again"
                )
            raise ValueError(f"actors cannot be made on the Ray cluster: {why}") from error
        except BaseException:
            self.close()
            raise

    def start(
        self, network: Network, version: int, weights: Any, tell: Callable[[str], None]
    ) -> None:
        """Begin to act with these weights; `tell` takes lines for the run's log."""
        del network  # every actor makes its own
        self._tell, self._version = tell, version
        self._weights = self._ray.put(jax.device_get(weights))
        for i in range(self._config.num_actors):
            self._begin(i)

    def publish(self, version: int, weights: Any) -> None:
        self._version, self._weights = version, self._ray.put(jax.device_get(weights))
        for actor in self._actors:
            actor.publish.remote(version, self._weights)

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        """So many rollouts, or None if they are not there in time."""
        end = time.monotonic() + timeout
        while len(self._items) < count:
            left = end - time.monotonic()
            if left <= 0:
                return None
            ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=left)
            for ref in ready:
                self._receive(ref)
        return [self._items.popleft() for _ in range(count)]

    @property
    def waiting(self) -> int:
        """Rollouts that wait for the learner, of those it has come for."""
        return len(self._items)

    def news(self) -> list[Delivery]:
        """What actors have said since last asked, without the rollouts."""
        said, self._news = self._news, []
        return said

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._ours:
            self._ray.shutdown()
            self._ours = False

    def _make(self, i: int) -> Any:
        kind = self._ray.remote(concurrency_groups={"weights": 1})(_with_groups(self._ray))
        # An actor in its second life plays other episodes than in its first.
        index = i + self._config.num_actors * self._lives[i]
        options: dict[str, Any] = {
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu", "PYTHONPATH": own_paths()}},
        }
        return kind.options(**options).remote(self._config, index)

    def _begin(self, i: int) -> None:
        self._actors[i].start.remote(self._version, self._weights)
        for _ in range(_AHEAD):
            self._ask(i)

    def _ask(self, i: int) -> None:
        self._pending[self._actors[i].next.remote()] = i

    def _receive(self, ref: Any) -> None:
        i = self._pending.pop(ref, None)
        if i is None:  # of an actor that has been replaced meanwhile
            return
        try:
            said: Said = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError:
            raise  # a mistake in this program, not in the world around it
        except self._ray.exceptions.RayError as error:
            self._replace(i, error)
            return
        for line in said.log:
            self._tell(line)
        if said.enough is not None:
            raise TooManyFaults(said.enough)
        assert said.delivery is not None
        self._items.extend(said.delivery.trajectories)
        self._news.append(said.delivery._replace(trajectories=[]))
        self._ask(i)

    def _replace(self, i: int, error: Exception) -> None:
        """Another actor for one that died, with everything it was asked for."""
        self._faults += 1
        # What follows the first line is advice for people who look after clusters.
        self._tell(f"actor {i} was lost: {str(error).splitlines()[0]}")
        if self._faults > self._config.restarts:
            raise TooManyFaults(
                f"actors were lost {self._faults} times (restarts={self._config.restarts} are "
                f"allowed); the last was actor {i}: {str(error).splitlines()[0]}"
            )
        lost = self._config.num_envs // self._config.num_actors
        self._news.append(Delivery([], {}, lost, 1, 0.0, 0.0))
        self._pending = {ref: j for ref, j in self._pending.items() if j != i}
        self._lives[i] += 1
        self._ray.kill(self._actors[i])  # it may be out of reach rather than dead
        self._actors[i] = self._make(i)
        self._begin(i)
        self._tell(f"actor {i} is begun again, with {lost} environments")


def _with_groups(ray: Any) -> type[Remote]:
    """`Remote`, whose weights may come while it acts: a thread for each."""

    class ActorOnRay(Remote):
        @ray.method(concurrency_group="weights")
        def publish(self, version: int, weights: Any) -> None:
            super().publish(version, weights)

    return ActorOnRay


def own_paths() -> str:
    """Where this process finds modules that are not installed: a user's environments, perhaps."""
    installed = (sys.prefix, sys.base_prefix)
    found = [p for p in sys.path if os.path.isdir(p) and not p.startswith(installed)]
    return os.pathsep.join(found)


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError('actors on a cluster need Ray: pip install "agalite[ray]"') from error
    return ray


def require_cluster(address: str) -> None:
    """Refuses HOST:PORT where nothing listens: Ray would try again for ever, with its own warnings.

    "auto" and ray://... are left to Ray, which knows better what they are.
    """
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address:
        return
    deadline = time.monotonic() + _ANSWER
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER):
                return
        except (OSError, ValueError, OverflowError) as error:  # refused; no name; no number
            # A head that was started a moment ago may not listen yet.
            refused = isinstance(error, ConnectionRefusedError)
            if not refused or time.monotonic() > deadline:
                raise ValueError(
                    f"ray={address!r}: there is no cluster at {address} ({error}); start one with "
                    "`ray start --head`, or use auto"
                ) from error
        time.sleep(0.5)


def connect(ray: Any, address: str) -> bool:
    """Whether a connection was made here, to be closed by us."""
    if ray.is_initialized():
        return False
    require_cluster(address)
    # Ray starts its own programs with fork and exec: none of them runs with a copy of JAX's locks.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    try:
        ray.init(address=address, **{k: v for k, v in quiet.items() if k != "include_dashboard"})
    except ConnectionError as error:
        if address != "auto":
            raise ValueError(
                f"ray={address!r}: there is no cluster at {address}; start one with "
                "`ray start --head`"
            ) from error
        # By default Ray runs its workers at the lowest priority but a few; the learner, which waits
        # for them, would take the machine from them.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(**quiet)
    else:
        where = ray.get_runtime_context().gcs_address if address == "auto" else address
        print(f"joined the Ray cluster at {where}", file=sys.stderr)
    return True
