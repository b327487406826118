"""Timing compiled programs against each other.

Load on a shared machine changes from one minute to the next, so the programs of a benchmark are
interleaved: one run of each, over and over, and ratios are taken run by run.
"""

import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jaxlib.version
import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from agalite import kernels
from agalite.system import commit, processor
from agalite.version import __version__

_MIN_RUNS = 3  # for a median, unless they take more than twice the time limit
_BURST = 4  # runs of a short program in one turn
_SHORT = 0.1  # seconds; a longer run fills the caches by itself


@dataclass(eq=False)
class Program:
    """A compiled function with its arguments, and the seconds that each run took."""

    name: str
    call: Callable[[], Any]
    temporary_bytes: int
    seconds: list[float] = field(default_factory=list)

    def time(self) -> None:
        """Runs the program once and records the seconds."""
        start = time.perf_counter()
        jax.block_until_ready(self.call())
        self.seconds.append(time.perf_counter() - start)

    @property
    def milliseconds(self) -> float:
        return 1e3 * float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        return spread(self.seconds)

    def ratio(self, base: "Program") -> float:
        """Median of this program's time by `base`'s, run by run: load affects both."""
        runs = min(len(self.seconds), len(base.seconds))
        return float(np.median(np.divide(self.seconds[:runs], base.seconds[:runs])))


def compile_program(name: str, function: Callable[..., Any], *args: Any) -> Program:
    """`function(*args)`, compiled but not run: one run of a long sequence may take minutes."""
    compiled = jax.jit(function).lower(*args).compile()
    return Program(name, lambda: compiled(*args), temporary_bytes(compiled))


def temporary_bytes(compiled: Any) -> int:
    """Memory that XLA allocates for intermediate results of a compiled program."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def interleave(
    programs: Sequence[Program],
    progress: Progress,
    *,
    runs: int,
    seconds: float | None = None,
    description: str = "timing",
) -> None:
    """Times the programs, interleaved, after one run of each that does not count.

    A step of a stream should find the caches as its own last step left them, not as another model
    did. So with a time limit a turn of a short program is one run that does not count and four that
    do.

    **Arguments:**

    - `programs`: their `seconds` are filled.
    - `progress`: shows how far it is.
    - `runs`: of each program, at most.
    - `seconds`: time limit of each program; None times one run of each, `runs` times over. No run
        starts that would exceed the limit, but every program has one run, and three if they fit
        into twice the limit.
    - `description`: shown beside the progress bar.
    """
    for program in programs:
        jax.block_until_ready(program.call())
        program.seconds.clear()
    task = progress.add_task(description, total=runs * len(programs))
    waiting = list(programs)
    while waiting:
        for program in list(waiting):
            if seconds is None:
                program.time()
            else:
                _burst(program, runs)
            finished = len(program.seconds) >= runs
            if finished or (seconds is not None and not _has_time(program, seconds)):
                waiting.remove(program)
            completed = sum(len(p.seconds) if p in waiting else runs for p in programs)
            progress.update(task, completed=completed)
    progress.remove_task(task)


def _burst(program: Program, runs: int) -> None:
    program.time()
    if program.seconds[-1] <= _SHORT:
        program.seconds.pop()
        for _ in range(min(_BURST, runs - len(program.seconds))):
            program.time()


def _has_time(program: Program, seconds: float) -> bool:
    limit = 2 * seconds if len(program.seconds) < _MIN_RUNS else seconds
    return sum(program.seconds) + min(program.seconds) <= limit


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a fraction of the median."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / 2 / median)


class _Lines(Progress):
    """A progress bar; without a terminal, a line for every tenth of a task."""

    def update(self, task_id: TaskID, **changes: Any) -> None:
        before = self._tenth(task_id)
        super().update(task_id, **changes)
        self._print(task_id, before)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        before = self._tenth(task_id)
        super().advance(task_id, advance)
        self._print(task_id, before)

    def _tenth(self, task_id: TaskID) -> int:
        task = self._tasks[task_id]
        return int(10 * task.completed / task.total) if task.total else 0

    def _print(self, task_id: TaskID, before: int) -> None:
        task = self._tasks[task_id]
        if self._tenth(task_id) > before and not self.console.is_terminal:
            passed = datetime.timedelta(seconds=round(task.elapsed or 0))
            line = f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}, {passed}"
            print(line, file=sys.stderr, flush=True)


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return _Lines(*columns, transient=True)


def load_average() -> float | None:
    """Of the last minute; None on systems that do not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def machine() -> dict[str, Any]:
    """Hardware, versions and load, which result files carry."""
    return {
        "agalite": __version__,
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": load_average(),
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "kernels": kernels.why_not() or "used",
        "huge_pages": "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", ""),
    }
