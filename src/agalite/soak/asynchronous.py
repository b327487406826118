"""`agalite soak asynchronous`: training while its environments, actors and nodes fail.

An agent is trained in environments that keep a diary (`diary.py`), first by actors in threads, then
by actors on a Ray cluster of two nodes on this machine. A thread disturbs them at regular times: an
environment's process is killed, stopped (SIGSTOP) or returns NaN; an actor's process is killed or
stopped for a while; a node is killed and replaced. Blocks of time without faults alternate with
blocks that have them, so that both throughputs come from one run. Every sequence that reaches the
learner is compared with what its environment did.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from agalite.bench.timing import progress_bar
from agalite.soak import diary
from agalite.soak.campaign import Figure, Record, descendants, is_alive, kill_all
from agalite.training.asynchronous import train as asynchronous
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import ActorStats, Trajectory
from agalite.training.config import HostConfig
from agalite.training.run import Run
from agalite.training.session import enable_compilation_cache

_BLOCK, _CALM = 180.0, 60.0  # seconds with faults, and without them before that
_TIMEOUT = 5.0  # seconds for an environment to answer: what a stopped one costs
_STALL = 10.0  # seconds between two batches that count as a stall
_PAUSE = 5.0  # seconds that an actor is stopped
_END = 30.0  # seconds for the processes to be gone after the run
_NUM_STEPS = 16


class TimeIsUp(Exception):
    """Ends the run; no fault."""


def make_config(folder: Path, seed: int, timeout: float = _TIMEOUT) -> HostConfig:
    """A small agent with four environments, each in a process, of two actors."""
    return HostConfig(
        env="gym:agalite.soak.diary:SoakDiary-v0",
        env_options={"folder": str(folder)},
        memory="agalite",
        memory_options={
            "d_model": 16,
            "layers": 1,
            "heads": 1,
            "head_size": 8,
            "ffn_size": 16,
        },
        hidden_size=16,
        num_steps=_NUM_STEPS,
        num_actors=2,
        num_workers=4,
        envs_per_worker=1,
        timeout=timeout,
        restarts=10**6,
        seed=seed,
        total_timesteps=10**9,
        log_every=_NUM_STEPS * 4 * 50,
        checkpoint_every=_NUM_STEPS * 4 * 500,
    )


class Watched:
    """The actors of a run; everything they give to the learner is checked and counted."""

    def __init__(self, actors: asynchronous.Actors) -> None:
        self._actors = actors
        self.spaces = actors.spaces
        self.batches: list[tuple[float, int]] = []
        """When the learner got a batch, and its steps."""
        self.sequences = 0
        self.torn: list[str] = []
        """Why sequences are not what happened."""
        self.faults = self.lost = 0
        self.deadline: float | None = None
        """When to end; set when the first batch has come."""
        self._last: dict[float, np.ndarray] = {}

    def start(
        self, network: Network, version: int, weights: Any, log: Callable[[str], None]
    ) -> None:
        self._actors.start(network, version, weights, log)

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeIsUp
        taken = self._actors.take(count, timeout)
        if taken is not None:
            self.batches.append((time.monotonic(), count * _NUM_STEPS))
            for trajectory in taken:
                self._check(trajectory)
        return taken

    def _check(self, trajectory: Trajectory) -> None:
        r = trajectory.rollout
        self.sequences += 1
        obs = np.asarray(r.obs)
        actions = np.asarray(r.actions)
        arrays = (np.asarray(x) for x in (r.resets, actions, r.rewards, r.ends))
        if (why := diary.torn(obs, *arrays)) is None:
            # An environment that failed is replaced by one of another number: what is left of a
            # number is one stream without gaps.
            after = self._last.get(float(obs[0, 0]))
            begins = bool(np.asarray(r.resets)[0])
            if after is not None and not diary.follows(after, obs[0], begins):
                (_, *before, _), (number, *now, _) = (
                    (x * diary.SCALE).astype(int).tolist() for x in (after, obs[0])
                )
                why = (
                    "a sequence is missing or was given twice: in environment "
                    f"{number} (episode, step) {tuple(now)} came after {tuple(before)}"
                )
        if why is not None:
            self.torn.append(why)
        self._last[float(obs[0, 0])] = obs[-1]

    def publish(self, version: int, weights: Any) -> None:
        self._actors.publish(version, weights)

    @property
    def queued(self) -> int:
        return self._actors.queued

    def pop_stats(self) -> list[ActorStats]:
        stats = self._actors.pop_stats()
        self.faults += sum(s.faults for s in stats)
        self.lost += sum(s.lost for s in stats)
        return stats

    def close(self) -> None:
        self.pop_stats()
        self._actors.close()


class _Faults:
    """Disturbs the processes of a run at regular times, in a thread.

    **Arguments:**

    - `kinds`: by name what disturbs; each returns whether there was something to disturb.
    - `seconds`: in all with faults.
    - `every`: seconds between two faults.
    - `watched`: the actors.
    """

    def __init__(
        self,
        kinds: dict[str, Callable[[], bool]],
        seconds: float,
        every: float,
        watched: Watched,
        progress: Callable[[float], None],
    ) -> None:
        self._kinds, self._every, self._watched, self._progress = kinds, every, watched, progress
        blocks = max(1, round(seconds / _BLOCK))
        self._block = seconds / blocks
        self._calm = max(min(_CALM, self._block), 2 * every)
        self._blocks = blocks
        self._closed = threading.Event()
        self.done: list[tuple[float, str]] = []
        self.spans: list[tuple[float, float, bool]] = []
        """Begin, end, and whether there are faults."""
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Faults":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while len(self._watched.batches) < 5:  # until everything is compiled
                if self._closed.wait(0.1):
                    return
            now = time.monotonic()
            self._watched.deadline = now + self._blocks * (self._block + self._calm)
            for _ in range(self._blocks):
                for seconds, faulty in ((self._calm, False), (self._block, True)):
                    self.spans.append((now, now + seconds, faulty))
                    if not self._pass(now, now + seconds, faulty):
                        return
                    now += seconds
        except BaseException as error:
            self.error = error
            self._watched.deadline = 0.0

    def _pass(self, begin: float, end: float, faulty: bool) -> bool:
        following, names = begin + self._every / 2, list(self._kinds)
        while (now := time.monotonic()) < end:
            if faulty and now >= following:
                # Each kind in turn.
                name = names[len(self.done) % len(names)]
                if self._kinds[name]():
                    self.done.append((now, name))
                following += self._every
            self._progress(now)
            if self._closed.wait(0.1):
                return False
        return True


def run(record: Record, *, minutes: float, every: float, places: tuple[str, ...]) -> None:
    """Trains in each place under faults and fills the record.

    **Arguments:**

    - `minutes`: with faults, in all places together.
    - `every`: seconds between two faults.
    - `places`: of "threads" and "ray".
    """
    enable_compilation_cache()
    with progress_bar() as progress:
        for place in places:
            seconds = 60 * minutes / len(places)
            with tempfile.TemporaryDirectory(prefix="agalite-soak-") as work:
                _train(record, place, Path(work), seconds, every, progress)


def _train(
    record: Record, place: str, work: Path, seconds: float, every: float, progress: Progress
) -> None:
    processes, rng = work / "processes", random.Random(f"{record.seed} {place}")
    processes.mkdir()
    config = make_config(processes, record.seed)
    kinds: dict[str, Callable[[], bool]] = {
        "environment killed": lambda: _signal(_environments(processes), signal.SIGKILL, rng),
        "environment stopped": lambda: _signal(_environments(processes), signal.SIGSTOP, rng),
        "NaN": lambda: _signal(_environments(processes), signal.SIGUSR2, rng),
    }
    with contextlib.ExitStack() as stack:
        address = None
        if place == "ray":
            cluster = stack.enter_context(_cluster())
            address = cluster.address
            kinds |= {
                "actor killed": lambda: _signal(_ray_actors(), signal.SIGKILL, rng),
                "actor stopped": lambda: _pause(_ray_actors(), rng),
                "node killed": cluster.replace_node,
            }
        actors = stack.enter_context(
            contextlib.closing(Watched(asynchronous.make_actors(config, address)))
        )
        folder = Run.create(work / "run", config.to_dict())
        stack.enter_context(folder)
        task = progress.add_task(f"asynchronous: {place}", total=round(seconds))

        def show(_: float) -> None:
            if faults.spans:
                at = time.monotonic() - faults.spans[0][0]
                progress.update(task, completed=round(at), total=round(_length(faults)))

        faults = _Faults(kinds, seconds, every, actors, show)
        with faults, contextlib.suppress(TimeIsUp):
            learner = asynchronous.make_learner(config, actors)
            asynchronous.train(folder, learner, actors, resumed=False, quiet=True)
        progress.remove_task(task)
    if faults.error is not None:
        raise faults.error
    deadline = time.monotonic() + _END
    while _environments(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    _report(record, place, actors, faults, len(_environments(processes)))
    log = (work / "run" / "run.log").read_text()
    record.rows[-1]["restarts_in_log"] = log.count("is restarted")


def _length(faults: _Faults) -> float:
    return faults._blocks * (faults._block + faults._calm)


def _report(record: Record, place: str, actors: Watched, faults: _Faults, left: int) -> None:
    steps, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for begin, end, faulty in faults.spans:
        steps[faulty] += sum(n for at, n in actors.batches if begin <= at < end)
        seconds[faulty] += end - begin
    calm, disturbed = (steps[x] / max(seconds[x], 1e-9) for x in (False, True))
    begin = faults.spans[0][0] if faults.spans else 0.0
    times = np.array([at for at, _ in actors.batches if at >= begin])
    gaps = np.diff(times) if len(times) > 1 else np.zeros(1)
    names = [name for _, name in faults.done]
    record.rows.append(
        {
            "place": place,
            "faults": {name: names.count(name) for name in dict.fromkeys(names)},
            "steps_per_second": {"without_faults": calm, "with_faults": disturbed},
            "seconds": {"without_faults": seconds[False], "with_faults": seconds[True]},
            "gaps_over_1_s": [round(float(x), 2) for x in gaps[gaps > 1]],
        }
    )
    for why in actors.torn:
        record.fail(f"{place}: {why}")
    record.figures += [
        Figure(f"{place}: faults", len(names), ">=", 1),
        Figure(f"{place}: sequences that reached the learner", actors.sequences),
        Figure(f"{place}: of these torn, missing or repeated", len(actors.torn), "=", 0),
        Figure(f"{place}: faults noticed, each with a restart", actors.faults),
        Figure(f"{place}: steps lost", actors.lost * _NUM_STEPS),
        Figure(f"{place}: stalls of over {_STALL:g} s", int((gaps > _STALL).sum())),
        Figure(f"{place}: longest time without a batch", round(float(gaps.max()), 1), unit="s"),
        Figure(f"{place}: throughput kept under faults", disturbed / max(calm, 1e-9)),
        Figure(f"{place}: processes left when the run has ended", left, "=", 0),
    ]


# --- what is disturbed ----------------------------------------------------------------------------


def _environments(folder: Path) -> list[int]:
    """The living processes that have made an environment, by their files."""
    found = []
    for path in folder.iterdir():
        if is_alive(int(path.name)):
            found.append(int(path.name))
        else:
            path.unlink(missing_ok=True)
    return found


def _ray_actors() -> list[int]:
    """The processes of Ray's actors; Ray puts the class into the title."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if Path(entry.path, "cmdline").read_bytes().startswith(b"ray::ActorOnRay"):
                    found.append(int(entry.name))
    return found


def _signal(processes: list[int], number: int, rng: random.Random) -> bool:
    if not processes:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(sorted(processes)), number)
        return True
    return False


def _pause(processes: list[int], rng: random.Random) -> bool:
    """Stops a process for `_PAUSE` seconds."""
    if not processes:
        return False
    pid = rng.choice(sorted(processes))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_PAUSE)
        os.kill(pid, signal.SIGCONT)
        return True
    return False


@contextlib.contextmanager
def _cluster() -> Any:
    """A Ray cluster of two nodes on this machine."""
    # By default Ray gives its workers a low priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    made = _Cluster()
    try:
        yield made
    finally:
        made.close()


class _Cluster:
    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # Ray starts its own programs with fork and exec, which cannot inherit JAX's locks.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        head = {"num_cpus": 1, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._second = self._start_node()

    def _start_node(self) -> subprocess.Popen[bytes]:
        """A node as another machine would start it; `Cluster.add_node` needs the main thread."""
        words = ["start", "--address", self.address, "--num-cpus", "1", "--block"]
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def replace_node(self) -> bool:
        """Kills the second node, with all that runs there, and starts another."""
        self._kill_node()
        self._second = self._start_node()
        return True

    def _kill_node(self) -> None:
        kill_all([*descendants(self._second.pid), self._second.pid])
        self._second.wait()

    def close(self) -> None:
        self._kill_node()
        self._cluster.shutdown()
