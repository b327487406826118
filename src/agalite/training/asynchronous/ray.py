"""Actors on a Ray cluster: the actor of actor.py in processes on any machine.

Each actor has two requests for rollouts pending, so that it acts while the learner learns. Finished
rollouts stay in Ray's object store until the learner takes them; nothing else is queued, which
bounds the policy lag. An actor that dies, alone or with its machine, loses its unfinished rollouts
and is replaced by a new one.
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

from agalite.envs.gymnasium.workers import EnvError
from agalite.training.asynchronous.actor import Actor
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import (
    ActorStats,
    ParameterStore,
    RolloutResult,
    Trajectory,
)
from agalite.training.asynchronous.worker import TooManyFaults, make_worker, worker_seed
from agalite.training.config import HostConfig

_PENDING_REQUESTS = 2  # rollouts requested from an actor at a time
_CONNECT_TIMEOUT = 5.0  # seconds for a cluster to accept a connection
_START_TIMEOUT = 300.0  # seconds for the first actor to be scheduled and make its environments


class RemoteResult(NamedTuple):
    """What a remote actor returns for a request."""

    rollout: RolloutResult | None
    log: list[str]
    """Lines for the run's log."""
    failure: str | None = None
    """Why the run must stop: environments fail too often."""


class RemoteActor:
    """What runs in a process of Ray: an actor, and the newest weights it was sent."""

    def __init__(self, config: HostConfig, index: int) -> None:
        from agalite.training.session import enable_compilation_cache

        enable_compilation_cache()
        self._config, self._index = config, index
        self._log: list[str] = []
        self._failure: str | None = None
        self._parameters: ParameterStore | None = None
        self._published: tuple[int, Any] | None = None
        self._first_worker = make_worker(config, worker_seed(config, 0, index, 0))

    def spaces(self) -> tuple[Any, Any]:
        return self._first_worker.observation_space, self._first_worker.action_space

    def start(self, version: int, weights: Any) -> None:
        self._parameters = parameters = ParameterStore(version, weights)
        if self._published is not None:
            parameters.publish(*self._published)
        try:
            actor = Actor(
                self._config,
                self._index,
                parameters,
                start_update=version,
                log=self._log.append,
                first_worker=self._first_worker,
            )
            self._rollouts = actor.rollouts()
        except EnvError as error:
            self._failure = f"environments cannot be started: {error}"

    def publish(self, version: int, weights: Any) -> None:
        self._published = version, weights  # it may come before `start` has begun
        if self._parameters is not None:
            self._parameters.publish(version, weights)

    def next(self) -> RemoteResult:
        if self._failure is not None:
            return RemoteResult(None, [], self._failure)
        try:
            rollout, failure = next(self._rollouts), None
        except TooManyFaults as error:
            rollout, failure = None, str(error)
        log, self._log[:] = list(self._log), []
        return RemoteResult(rollout, log, failure)


class RayActors:
    """The actors of a run on a Ray cluster; see `Actors` in train.py.

    **Arguments:**

    - `config`: of the run.
    - `address`: of the cluster; "auto" finds one, or starts one on this machine.
    """

    def __init__(self, config: HostConfig, address: str) -> None:
        if config.synchronous:
            raise ValueError("synchronous=True is for comparisons on one machine; leave out ray")
        self._ray, self._config = import_ray(), config
        self._connected_here = connect(self._ray, address)
        self._pending: dict[Any, int] = {}  # requests, and the index of their actor
        self._items: deque[Trajectory] = deque()
        self._stats: list[ActorStats] = []
        self._faults = 0
        self._restarts = [0] * config.num_actors
        self._actors: list[Any] = []
        try:
            self._actors = [self._make(i) for i in range(config.num_actors)]
            spaces = self._actors[0].spaces.remote()
            if not self._ray.wait([spaces], timeout=_CONNECT_TIMEOUT)[0]:
                print(
                    "waiting for the Ray cluster to make an actor and its environments, for "
                    f"{_START_TIMEOUT:.0f} s at most",
                    file=sys.stderr,
                )
            self.spaces = self._ray.get(spaces, timeout=_START_TIMEOUT)
        except self._ray.exceptions.RayError as error:
            self.close()
            raise ValueError(
                f"actors cannot be made on the Ray cluster: {self._explain(error)}"
            ) from error
        except BaseException:
            self.close()
            raise

    def start(
        self, network: Network, version: int, weights: Any, log: Callable[[str], None]
    ) -> None:
        del network  # every actor makes its own
        self._log, self._version = log, version
        self._weights = self._ray.put(jax.device_get(weights))
        for i in range(self._config.num_actors):
            self._start(i)

    def publish(self, version: int, weights: Any) -> None:
        self._version, self._weights = version, self._ray.put(jax.device_get(weights))
        for actor in self._actors:
            actor.publish.remote(version, self._weights)

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        end = time.monotonic() + timeout
        while len(self._items) < count:
            left = end - time.monotonic()
            if left <= 0:
                return None
            ready, _ = self._ray.wait(self._next_answers(), num_returns=1, timeout=left)
            for ref in ready:
                self._receive(ref)
        return [self._items.popleft() for _ in range(count)]

    @property
    def queued(self) -> int:
        """Without those in Ray's object store."""
        return len(self._items)

    def pop_stats(self) -> list[ActorStats]:
        stats, self._stats = self._stats, []
        return stats

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._connected_here:
            self._ray.shutdown()
            self._connected_here = False

    def _make(self, i: int) -> Any:
        kind = self._ray.remote(concurrency_groups={"weights": 1})(_ray_actor_class(self._ray))
        # A restarted actor gets a new index, and with it other seeds.
        index = i + self._config.num_actors * self._restarts[i]
        options: dict[str, Any] = {
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu", "PYTHONPATH": import_paths()}},
        }
        return kind.options(**options).remote(self._config, index)

    def _start(self, i: int) -> None:
        self._actors[i].start.remote(self._version, self._weights)
        for _ in range(_PENDING_REQUESTS):
            self._request(i)

    def _request(self, i: int) -> None:
        self._pending[self._actors[i].next.remote()] = i

    def _next_answers(self) -> list[Any]:
        """The oldest request of every actor: on other nodes a later one may be answered first."""
        oldest: dict[int, Any] = {}
        for ref, i in self._pending.items():
            oldest.setdefault(i, ref)
        return list(oldest.values())

    def _receive(self, ref: Any) -> None:
        i = self._pending.pop(ref, None)
        if i is None:  # of an actor that was restarted meanwhile
            return
        try:
            result: RemoteResult = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError:
            raise  # an error in this library, not of the cluster
        except self._ray.exceptions.RayError as error:
            self._restart(i, error)
            return
        for line in result.log:
            self._log(line)
        if result.failure is not None:
            raise TooManyFaults(result.failure)
        assert result.rollout is not None
        self._items.extend(result.rollout.trajectories)
        self._stats.append(result.rollout.stats)
        self._request(i)

    def _restart(self, i: int, error: Exception) -> None:
        """Replace an actor that died, and repeat the requests that were pending."""
        self._faults += 1
        reason = str(error).splitlines()[0]  # the rest is advice for administrators of clusters
        self._log(f"actor {i} was lost: {reason}")
        if self._faults > self._config.restarts:
            raise TooManyFaults(
                f"actors were lost {self._faults} times (restarts={self._config.restarts} are "
                f"allowed); the last was actor {i}: {reason}"
            )
        lost = self._config.num_envs // self._config.num_actors
        self._stats.append(ActorStats({}, lost, 1, 0.0, 0.0))
        self._pending = {ref: j for ref, j in self._pending.items() if j != i}
        self._restarts[i] += 1
        self._ray.kill(self._actors[i])  # it may be unreachable rather than dead
        self._actors[i] = self._make(i)
        self._start(i)
        self._log(f"actor {i} is restarted with {lost} environments")

    def _explain(self, error: Exception) -> str:
        if isinstance(error, self._ray.exceptions.GetTimeoutError):
            return f"the first was not ready within {_START_TIMEOUT:.0f} s"
        last = str(error).strip().splitlines()[-1]
        if last.startswith("The actor"):  # Ray's own message: the actor did not raise anything
            return (
                "a process that was to become one died; if nobody killed it, memory may have "
                "run out. Run the command again"
            )
        return last  # what the actor raised


def _ray_actor_class(ray: Any) -> type[RemoteActor]:
    """`RemoteActor` with a second thread for `publish`, so that weights arrive while it acts."""

    class ActorOnRay(RemoteActor):
        @ray.method(concurrency_group="weights")
        def publish(self, version: int, weights: Any) -> None:
            super().publish(version, weights)

    return ActorOnRay


def import_paths() -> str:
    """This process's import paths outside the Python installation, for PYTHONPATH.

    A user's environments may be defined there.
    """
    installed = (sys.prefix, sys.base_prefix)
    paths = [p for p in sys.path if os.path.isdir(p) and not p.startswith(installed)]
    return os.pathsep.join(paths)


def import_ray() -> Any:
    """The module `ray`; `ValueError` if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ValueError('actors on a cluster need Ray: pip install "agalite[ray]"') from error
    return ray


def require_cluster(address: str) -> None:
    """Raise `ValueError` if nothing listens at HOST:PORT, where Ray would retry indefinitely.

    "auto" and ray://... are left to Ray.
    """
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address:
        return
    deadline = time.monotonic() + _CONNECT_TIMEOUT
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT):
                return
        except (OSError, ValueError, OverflowError) as error:  # refused; no name; no number
            # A head node that has just been started may not listen yet.
            refused = isinstance(error, ConnectionRefusedError)
            if not refused or time.monotonic() > deadline:
                raise ValueError(
                    f"ray={address!r}: there is no cluster at {address} ({error}); start one with "
                    "`ray start --head`, or use auto"
                ) from error
        time.sleep(0.5)


def connect(ray: Any, address: str) -> bool:
    """Connect to a cluster, unless this process is connected to one.

    **Arguments:**

    - `ray`: the module.
    - `address`: as for `RayActors`.

    **Returns:**

    Whether a connection was made, which the caller must close.
    """
    if ray.is_initialized():
        return False
    require_cluster(address)
    # Ray starts its own programs with fork and exec, which cannot inherit JAX's locks.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        if address != "auto":
            raise ValueError(
                f"ray={address!r}: there is no cluster at {address}; start one with "
                "`ray start --head`"
            ) from error
        # By default Ray gives its workers a low priority; the learner, which waits for them, would
        # take the cores from them.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(include_dashboard=False, **quiet)
    else:
        where = ray.get_runtime_context().gcs_address if address == "auto" else address
        print(f"joined the Ray cluster at {where}", file=sys.stderr)
    return True
