"""Runs the trials of a study: finished ones are skipped, unfinished ones resumed, others started.

`run` is the scheduling loop. An `Executor` decides where trials run: `Inline` in this process,
`Processes` in several on this machine, `RayTasks` on a Ray cluster.
"""

import contextlib
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from agalite import files
from agalite.studies.progress import ProgressDisplay
from agalite.studies.trials import (
    Damaged,
    Outcome,
    Trial,
    check_format,
    check_settings,
    record_failure,
    run_trial,
    write_format,
)
from agalite.system import Stopped, commit, keep_niceness, processor, versions

FROM_PYTHON = "from Python"
_POLL = 0.5  # seconds between two checks for a request to stop
_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "optax", "gymnax", "craftax", "ray")


class Executor(Protocol):
    """Where trials run. `run` calls the methods from one thread, `start` first, `close` last."""

    in_process: bool
    """Whether trials run in the calling thread, and so receive its signals themselves."""

    def start(self, count: int) -> int:
        """Prepares for `count` trials; returns how many may be submitted at the same time."""
        ...

    def submit(self, trial: Trial) -> None:
        """Starts a trial."""
        ...

    def wait(self, timeout: float) -> list[Outcome]:
        """The outcomes of trials that have ended, after at most `timeout` seconds if none has."""
        ...

    def stop(self) -> None:
        """Asks every running trial to save and stop; `wait` still returns their outcomes."""
        ...

    def close(self) -> None:
        """Ends what is still running."""
        ...


def run(
    trials: Sequence[Trial],
    executor: Executor | None = None,
    *,
    quiet: bool = False,
    command: str | None = None,
    notes: Sequence[str] = (),
    deadline: float | None = None,
) -> list[Outcome]:
    """Runs every trial that is not finished.

    **Arguments:**

    - `trials`: trials of one study at one scale.
    - `executor`: where they run; one after another in this process if not given.
    - `quiet`: print no progress.
    - `command`: what was typed, for the report.
    - `notes`: what else the report should say about this session.
    - `deadline`: the value of `time.monotonic()` at which running trials are asked to save and
      stop; an executor that runs them in this process starts no more, and ends the one that runs.

    **Returns:**

    The outcomes of this session. A trial that fails does not end the others. Raises `Stopped` when
    SIGINT or SIGTERM asks to stop; every run is saved then.
    """
    if trials:
        check_format(trials[0].home)
    for trial in trials:
        # Before anything starts. A damaged folder is left to its trial, which fails on its own.
        with contextlib.suppress(Damaged):
            check_settings(trial)
    waiting = deque(trial for trial in trials if trial.state() != "finished")
    if not waiting:
        return []
    from agalite.training.session import stop_signals

    executor = executor or Inline()
    write_format(trials[0].home)
    session = _SessionRecord(trials[0].home, command, notes)
    outcomes: list[Outcome] = []
    running, stopping, stopped_by = 0, False, 0
    # In this process, training handles signals itself and a measurement is interrupted at once.
    signals = contextlib.nullcontext([]) if executor.in_process else stop_signals()
    with ProgressDisplay(trials, quiet=quiet) as display:
        try:
            slots = executor.start(len(waiting))
            with signals as received:  # after `start`: Ray installs signal handlers of its own
                while waiting or running:
                    late = deadline is not None and time.monotonic() >= deadline
                    if (received or late) and not stopping:
                        stopping, stopped_by = True, received[0] if received else 0
                        waiting.clear()
                        executor.stop()
                    while waiting and running < slots:
                        trial = waiting.popleft()
                        executor.submit(trial)
                        display.started(trial)
                        running += 1
                    try:
                        ended = executor.wait(_POLL)
                    except KeyboardInterrupt:
                        # Ray raises this for every signal; only a second one interrupts at once.
                        if stopping or not received:
                            raise
                        continue
                    for outcome in ended:
                        running -= 1
                        if outcome.state == "stopped" and not late:
                            stopped_by = stopped_by or outcome.signal
                            if executor.in_process:
                                waiting.clear()
                        outcomes.append(outcome)
                        display.ended(outcome)
                        session.write(outcomes)
        finally:
            executor.close()
            session.write(outcomes, ended=True)
    if stopped_by:
        raise Stopped(stopped_by)
    return outcomes


class Inline:
    """One trial after another in this process: JAX starts once and uses all of its devices."""

    in_process = True

    def start(self, count: int) -> int:
        return min(1, count)

    def submit(self, trial: Trial) -> None:
        self._trial = trial

    def wait(self, timeout: float) -> list[Outcome]:
        del timeout  # the trial runs to its end
        return [run_trial(self._trial)]

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Running:
    trial: Trial
    process: BaseProcess
    connection: Connection


class Processes:
    """Up to `jobs` processes on this machine, one for each trial, each with its share of cores.

    `concurrent.futures.ProcessPoolExecutor` does not do: when one of its processes is killed, for
    example because memory runs out, it fails all other work (`BrokenProcessPool`), and it cannot
    ask a running task to stop.
    """

    in_process = False

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._running: dict[int, _Running] = {}  # by slot, which decides the cores
        self._stopping = False
        # A forked copy of JAX's threads would hang.
        self._context = multiprocessing.get_context("spawn")

    def start(self, count: int) -> int:
        self._slots = max(1, min(self._jobs, count))
        return self._slots

    def submit(self, trial: Trial) -> None:
        slot = min(set(range(self._slots)) - self._running.keys())
        ours, theirs = self._context.Pipe()
        args = (theirs, slot, self._slots, trial)
        process = self._context.Process(target=_run_in_child, args=args)
        process.start()
        theirs.close()
        self._running[slot] = _Running(trial, process, ours)

    def wait(self, timeout: float) -> list[Outcome]:
        ready = wait([running.connection for running in self._running.values()], timeout)
        slots = [slot for slot, running in self._running.items() if running.connection in ready]
        return [self._receive(self._running.pop(slot)) for slot in slots]

    def stop(self) -> None:
        self._stopping = True
        for running in self._running.values():
            running.process.terminate()

    def close(self) -> None:
        for running in self._running.values():
            _end(running)
        self._running.clear()

    def _receive(self, running: _Running) -> Outcome:
        try:
            return running.connection.recv()
        except (EOFError, OSError):
            running.process.join(10)
            if self._stopping:  # before it could handle the signal
                return _stopped(running.trial)
            code = running.process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            message = f"the process that ran it died ({how})"
            record_failure(running.trial, message)
            return Outcome(running.trial.name, "failed", 0.0, message)
        finally:
            _end(running)


def _end(running: _Running) -> None:
    running.connection.close()
    running.process.join(5)
    if running.process.is_alive():
        running.process.kill()
        running.process.join()


def _run_in_child(connection: Any, slot: int, slots: int, trial: Trial) -> None:
    """The main function of a process of `Processes`: runs one trial and sends its outcome."""
    # Ctrl-C on the terminal reaches only the parent, which then asks its children to stop.
    with contextlib.suppress(OSError):
        os.setsid()
        keep_niceness()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[slot::slots] or cores)
    ended = threading.Event()

    def follow_parent() -> None:
        """Saves and stops the run when the parent is gone."""
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow_parent, daemon=True).start()
    outcome = run_trial(trial)
    ended.set()
    with contextlib.suppress(OSError):
        connection.send(outcome)


_RAY_RETRIES = 20  # of one trial: nodes are lost often
_RAY_LOCK_TIMEOUT = 120.0  # seconds for a process on a lost node to end
_RAY_STOP_TIMEOUT = 300.0  # seconds for all runs to be saved


class RayTasks:
    """Each trial is a task of a Ray cluster. Every node must see the folder of the study.

    A task that is lost with its node is run again on another one, where it resumes.

    **Arguments:**

    - `address`: that of a cluster; "auto" finds one, or starts one on this machine.
    - `cpus`, `gpus`: what each trial needs.
    """

    in_process = False

    def __init__(self, address: str, *, cpus: float = 1.0, gpus: float = 0.0) -> None:
        from agalite.training.asynchronous.ray import import_ray, require_cluster

        import_ray()
        require_cluster(address)  # before anything starts
        self._address = address
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        self._running: dict[Any, Trial] = {}
        self._deadline: float | None = None
        self._owns_connection = False

    def start(self, count: int) -> int:
        from agalite.training.asynchronous.ray import connect, import_paths, import_ray

        self._ray = import_ray()
        self._owns_connection = connect(self._ray, self._address)
        self._task = self._ray.remote(run_trial).options(
            **self._resources,
            max_retries=_RAY_RETRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"PYTHONPATH": import_paths()}},
        )
        return count  # Ray has a queue of its own

    def submit(self, trial: Trial) -> None:
        self._running[self._task.remote(trial, _RAY_LOCK_TIMEOUT)] = trial

    def wait(self, timeout: float) -> list[Outcome]:
        if self._deadline is not None and time.monotonic() > self._deadline:
            left, self._running = self._running, {}
            return [_stopped(trial) for trial in left.values()]
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout)
        outcomes = []
        for ref in ready:
            outcomes.append(self._result(ref))
            del self._running[ref]
        return outcomes

    def stop(self) -> None:
        self._deadline = time.monotonic() + _RAY_STOP_TIMEOUT
        for ref in self._running:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(ref)  # SIGINT in the task, which saves its run

    def close(self) -> None:
        if self._owns_connection:
            self._ray.shutdown()

    def _result(self, ref: Any) -> Outcome:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            trial = self._running[ref]
            if self._deadline is not None:
                return _stopped(trial)
            message = f"lost on the cluster: {str(error).strip().splitlines()[-1]}"
            record_failure(trial, message, str(error))
            return Outcome(trial.name, "failed", 0.0, message)


def _stopped(trial: Trial) -> Outcome:
    return Outcome(trial.name, "stopped", 0.0, signal=signal.SIGTERM)


def command_line() -> str:
    """What was typed to start this process of `agalite`."""
    return shlex.join(["agalite", *sys.argv[1:]])


class _SessionRecord:
    """A file of its own for every call of `run`, since several may run side by side.

    It is written at the start and after every trial: a process that is killed writes nothing more.
    """

    def __init__(self, home: Path, command: str | None, notes: Sequence[str]) -> None:
        folder = home / "sessions"
        folder.mkdir(parents=True, exist_ok=True)
        microseconds = time.time_ns() // 1000 % 10**6  # a process may run several in a second
        now = f"{time.strftime('%Y%m%d-%H%M%S')}.{microseconds:06d}"
        self._path = folder / f"{now}-{platform.node()}-{os.getpid()}.json"
        self._start = time.monotonic()
        self._facts: dict[str, Any] = {
            "command": command or FROM_PYTHON,
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": _machine(),
            "versions": versions(_PACKAGES),
            "commit": commit(),
            "notes": list(notes),
        }
        self.write([])

    def write(self, outcomes: Sequence[Outcome], *, ended: bool = False) -> None:
        files.write_json(
            self._path,
            {
                **self._facts,
                "seconds": round(time.monotonic() - self._start, 1),
                "ended": ended,
                "trials": [
                    {"trial": o.trial, "state": o.state, "seconds": round(o.seconds, 1)}
                    for o in outcomes
                ],
            },
        )


def _machine() -> dict[str, Any]:
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
