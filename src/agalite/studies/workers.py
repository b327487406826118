"""Trials in several processes on this machine, each with its share of the cores.

The parent says which trial is next; a worker writes to nothing but that trial's folder. A worker
that dies takes its trial with it, which is recorded, and another takes its place.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from agalite.studies.placement import Begun
from agalite.studies.trials import Trial
from agalite.studies.work import Outcome, perform, record_failure

_GLANCE = 0.5  # seconds between two looks at whether somebody wants us to stop


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
                    ready = wait([worker.connection for worker in busy], _GLANCE)
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
