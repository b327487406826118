"""Running a study: what is finished stays, what is half-finished goes on, the rest is begun."""

import contextlib
import multiprocessing
import os
import platform
import queue
import shlex
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agalite import files
from agalite.studies.trials import (
    Damaged,
    Outcome,
    Trial,
    check,
    counted,
    perform,
    progress,
    record_failure,
)
from agalite.system import Stopped, commit, processor, versions
from agalite.training.asynchronous.ray import connect, import_ray, own_paths, require_cluster

# --- Where trials are run: in this process, in several on this machine (`workers.py`), or on a Ray

Begun = Callable[[Trial], None]


class Placement(Protocol):
    def run(self, trials: Sequence[Trial], begun: Begun) -> Iterator[Outcome]: ...


class Here:
    """One after the other, in this process: JAX starts once."""

    def run(self, trials: Sequence[Trial], begun: Begun) -> Iterator[Outcome]:
        for trial in trials:
            begun(trial)
            outcome = perform(trial)
            yield outcome
            if outcome.state == "stopped":
                return


# --- Trials in several processes on this machine, each with its share of the cores ----------------

_POLL = 0.5  # seconds between two looks at whether somebody wants us to stop


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    trial: Trial | None = None


class Processes:
    """`jobs` workers. When somebody asks to stop, each saves its run and goes."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        # Not forked: JAX has threads, and a copy of them would hang.
        self._context = multiprocessing.get_context("spawn")

    def run(self, trials: Sequence[Trial], begun: Begun) -> Iterator[Outcome]:
        from agalite.training.session import asked_to_stop

        waiting = deque(trials)
        jobs = max(1, min(self._jobs, len(waiting)))
        with asked_to_stop() as asked:
            workers = [self._start(i, jobs) for i in range(jobs)]
            try:
                told = False
                while True:
                    if asked and not told:
                        told = True
                        waiting.clear()
                        for worker in workers:
                            if worker.trial is not None:
                                _signal(worker.process, signal.SIGTERM)
                    for worker in workers:
                        if worker.trial is None and waiting:
                            worker.trial = waiting.popleft()
                            begun(worker.trial)
                            with contextlib.suppress(OSError):  # gone; found out below
                                worker.connection.send(worker.trial)
                    busy = [worker for worker in workers if worker.trial is not None]
                    if not busy:
                        break
                    ready = wait([worker.connection for worker in busy], _POLL)
                    for i, worker in enumerate(workers):
                        if worker.trial is not None and worker.connection in ready:
                            yield self._receive(worker, asked)
                            if not worker.process.is_alive():
                                _end(worker)
                                workers[i] = self._start(i, jobs)
                if asked:
                    yield Outcome("", "stopped", 0.0, signal=asked[0])
            finally:
                for worker in workers:
                    _end(worker)

    def _start(self, i: int, jobs: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, i, jobs))
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _receive(self, worker: _Worker, asked: list[int]) -> Outcome:
        trial = worker.trial
        assert trial is not None
        worker.trial = None
        try:
            outcome: Outcome = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(10)
            if asked:
                return Outcome(trial.name, "stopped", 0.0, signal=asked[0])
            message = f"the process that ran it died ({_ending(worker.process.exitcode)})"
            record_failure(trial, message)
            return Outcome(trial.name, "failed", 0.0, message)
        if asked and outcome.state == "stopped":  # by us, because of that
            name = signal.Signals(asked[0]).name
            return replace(outcome, signal=asked[0], message=f"stopped by {name}")
        return outcome


def _end(worker: _Worker) -> None:
    worker.connection.close()  # which tells an idle worker to go
    worker.process.join(5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _signal(process: BaseProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _work(connection: Any, i: int, jobs: int) -> None:
    """A worker's life. Ctrl-C on the terminal is the parent's to answer."""
    with contextlib.suppress(OSError):
        os.setsid()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[i::jobs] or cores)
    trials: queue.SimpleQueue[Trial | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                trials.put(connection.recv())
        except (EOFError, OSError):
            # Nobody is there any more who could stop this run: it saves itself and ends.
            trials.put(None)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    while (trial := trials.get()) is not None:
        outcome = perform(trial)
        with contextlib.suppress(OSError):
            connection.send(outcome)


# --- Trials as tasks of a Ray cluster. The study's folder must be one that every node sees --------

_RAY_POLL = 0.5  # seconds between two looks at whether somebody wants us to stop
_RETRIES = 20  # of one trial; nodes are lost, or taken away, often enough
_LOCKED = 120.0  # seconds until a process on a lost node has surely noticed
_SAVING = 300.0  # seconds for all runs to be saved after Ctrl-C


class OnRay:
    """`address` is that of a cluster; "auto" finds one, or starts one on this machine."""

    def __init__(self, address: str, *, cpus: float = 1.0, gpus: float = 0.0) -> None:
        import_ray()
        require_cluster(address)  # before anything is begun
        self._address = address
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}

    def run(self, trials: Sequence[Trial], begun: Begun) -> Iterator[Outcome]:
        from agalite.training.session import asked_to_stop

        ray = import_ray()
        ours = connect(ray, self._address)
        try:
            task = ray.remote(perform).options(
                **self._resources,
                max_retries=_RETRIES,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": {"PYTHONPATH": own_paths()}},
            )
            pending: dict[Any, Trial] = {}
            for trial in trials:
                pending[task.remote(trial, _LOCKED)] = trial
                begun(trial)
            with asked_to_stop() as asked:
                deadline = None
                while pending:
                    if asked and deadline is None:
                        deadline = time.monotonic() + _SAVING
                        for ref in pending:
                            # Ctrl-C for the task, which saves its run.
                            with contextlib.suppress(ray.exceptions.RayError):
                                ray.cancel(ref)
                    if deadline is not None and time.monotonic() > deadline:
                        break
                    try:
                        ready, _ = ray.wait(list(pending), num_returns=1, timeout=_RAY_POLL)
                    except KeyboardInterrupt:
                        # What Ray makes of any signal; a second one is not so patient.
                        if deadline is not None or not asked:
                            raise
                        continue
                    for ref in ready:
                        yield _outcome(ray, ref, pending.pop(ref), asked)
                if asked:
                    yield Outcome("", "stopped", 0.0, signal=asked[0])
        finally:
            if ours:
                ray.shutdown()


def _outcome(ray: Any, ref: Any, trial: Trial, asked: list[int]) -> Outcome:
    try:
        return ray.get(ref)
    except (ray.exceptions.RayError, KeyboardInterrupt) as error:
        if asked:
            return Outcome(trial.name, "stopped", 0.0, signal=asked[0] or signal.SIGINT)
        message = f"lost on the cluster: {str(error).strip().splitlines()[-1]}"
        record_failure(trial, message, str(error))
        return Outcome(trial.name, "failed", 0.0, message)


# --- How far a study is: all trials together, with the time left. A live line on a terminal, plain

_PATIENCE = 30.0  # seconds between two plain lines
_SHOWN = 4  # trials named on the line


class Board:
    """`begun` and `ended` as trials come and go; what is at work is read from its folder."""

    def __init__(self, trials: Sequence[Trial], *, quiet: bool = False) -> None:
        self._trials = {trial.name: trial for trial in trials}
        self._total = sum(trial.steps for trial in trials) or 1
        self._shares = {trial.name: progress(trial) for trial in trials}
        self._before = self._done()
        self._active: dict[str, Trial] = {}
        self._states: dict[str, str] = {}
        self._quiet = quiet
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began = self._said = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live.start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._live.stop()

    def begun(self, trial: Trial) -> None:
        with self._lock:
            self._active[trial.name] = trial

    def ended(self, outcome: Outcome) -> None:
        with self._lock:
            self._active.pop(outcome.trial, None)
            self._states[outcome.trial] = outcome.state
            if outcome.state in ("finished", "failed"):
                self._shares[outcome.trial] = 1.0  # nothing more is to be done for it here
            line = self._line()
        if self._quiet:
            return
        # Somebody who pressed Ctrl-C need not be told why.
        how = f": {outcome.message}" if outcome.message else ""
        self._console.print(
            f"{outcome.state:>9}  {outcome.trial}  {outcome.seconds:.0f} s{how}", markup=False
        )
        if not self._live.is_started:
            self._console.print(f"           {line}", markup=False)
            self._said = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            with self._lock:
                for name, trial in self._active.items():
                    self._shares[name] = max(self._shares[name], progress(trial))
                line = self._line()
            if self._quiet:
                continue
            if self._live.is_started:
                self._live.update(Text(line), refresh=True)
            elif time.monotonic() - self._said > _PATIENCE:
                self._said = time.monotonic()
                self._console.print(f"           {line}", markup=False)

    def _done(self) -> float:
        return sum(self._shares[name] * trial.steps for name, trial in self._trials.items())

    def _line(self) -> str:
        done = self._done()
        ended = sum(share >= 1 for share in self._shares.values())
        failed = sum(state == "failed" for state in self._states.values())
        parts = [
            f"{ended} of {counted(len(self._trials), 'trial')}",
            f"{100 * done / self._total:.0f}%",
        ]
        if failed:
            parts.append(f"{failed} failed")
        rate = (done - self._before) / (time.monotonic() - self._began + 1e-9)
        if rate > 0 and done < self._total:
            parts.append(f"{in_words((self._total - done) / rate)} left")
        # On a cluster all are asked for at once, and few have begun.
        at_work = [n for n in self._active if len(self._active) == 1 or self._shares[n] > 0]
        named = [f"{name} {100 * self._shares[name]:.0f}%" for name in at_work[:_SHOWN]]
        return "  ".join([*parts, *named])


def in_words(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.1f} min"


FROM_PYTHON = "from Python"
_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "optax", "gymnax", "craftax", "ray")


def run(
    trials: Sequence[Trial],
    placement: Placement | None = None,
    *,
    quiet: bool = False,
    command: str | None = None,
    notes: Sequence[str] = (),
) -> list[Outcome]:
    """Runs all that is not finished; the outcomes of this session.

    `command` is what the report says was typed, `notes` what else it should say. Raises `Stopped`
    when somebody asked to stop, with every run saved.
    """
    for trial in trials:
        # Before anything is begun. One damaged folder is that trial's failure, recorded when its
        # turn comes, and no reason to keep the others waiting.
        with contextlib.suppress(Damaged):
            check(trial)
    left = [trial for trial in trials if trial.state() != "finished"]
    if not left:
        return []
    session = _Session(left[0].home, command, notes)
    outcomes: list[Outcome] = []
    stopped = 0
    with Board(trials, quiet=quiet) as board:
        try:
            for outcome in (placement or Here()).run(left, board.begun):
                stopped = stopped or outcome.signal
                if outcome.trial:
                    outcomes.append(outcome)
                    board.ended(outcome)
                    session.write(outcomes)
        finally:
            session.write(outcomes, over=True)
    if stopped:
        raise Stopped(stopped)
    return outcomes


def count(trials: Sequence[Trial]) -> dict[str, int]:
    """How many trials are in which state."""
    return dict(Counter(trial.state() for trial in trials))


def command_line() -> str:
    """What was typed to start this process, which is `agalite`."""
    return shlex.join(["agalite", *sys.argv[1:]])


class _Session:
    """A file of its own for every `study run`: several may run side by side."""

    def __init__(self, home: Path, command: str | None, notes: Sequence[str]) -> None:
        folder = home / "sessions"
        folder.mkdir(parents=True, exist_ok=True)
        part = time.time_ns() // 1000 % 10**6  # one process may run several in a second
        now = f"{time.strftime('%Y%m%d-%H%M%S')}.{part:06d}"
        self._path = folder / f"{now}-{platform.node()}-{os.getpid()}.json"
        self._began = time.monotonic()
        self._facts: dict[str, Any] = {
            "command": command or FROM_PYTHON,
            "began": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine(),
            "versions": versions(_PACKAGES),
            "commit": commit(),
            "notes": list(notes),
        }
        self.write([])  # now: a process that is killed writes nothing any more

    def write(self, outcomes: Sequence[Outcome], *, over: bool = False) -> None:
        files.write_json(
            self._path,
            {
                **self._facts,
                "seconds": round(time.monotonic() - self._began, 1),
                "over": over,
                "trials": [
                    {"trial": o.trial, "state": o.state, "seconds": round(o.seconds, 1)}
                    for o in outcomes
                ],
            },
        )


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "processor": processor(),
    }
    with contextlib.suppress(OSError):
        words = Path("/proc/meminfo").read_text().split()
        facts["memory_gb"] = round(int(words[1]) / 2**20, 1)
        load = Path("/proc/loadavg").read_text().split()[0]
        facts["load_before"] = float(load)
    return facts
