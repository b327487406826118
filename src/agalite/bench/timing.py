"""Timing compiled programs against each other in one run."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jaxlib.version
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agalite import kernels
from agalite.system import commit, processor
from agalite.version import __version__


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / 2 / middle)


@dataclass
class Program:
    """A compiled function, ready to run, and how long it took each time."""

    name: str
    call: Callable[[], Any]
    temporary_bytes: int
    seconds: list[float] = field(default_factory=list)

    def time(self) -> None:
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
        """Median over the rounds of this round's time by that one's: noise hits both alike."""
        rounds = min(len(self.seconds), len(base.seconds))
        return float(np.median(np.divide(self.seconds[:rounds], base.seconds[:rounds])))


def ready(name: str, function: Callable[..., Any], *args: Any) -> Program:
    """Compiled, and not run yet: the first run of a long sequence may take minutes."""
    compiled = jax.jit(function).lower(*args).compile()
    return Program(name, lambda: compiled(*args), temporary_bytes(compiled))


def compile_program(name: str, function: Callable[..., Any], *args: Any) -> Program:
    """Compiled and run once, so that the first timed run is like the others."""
    program = ready(name, function, *args)
    jax.block_until_ready(program.call())
    return program


def temporary_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def interleave_rounds(programs: list[Program], rounds: int, progress: Progress) -> None:
    """One run of each, `rounds` times over."""
    task = progress.add_task("timing", total=rounds * len(programs))
    for _ in range(rounds):
        for program in programs:
            program.time()
            progress.advance(task)


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, transient=True)


def machine() -> dict[str, Any]:
    """What a reader must know to compare these numbers with others."""
    return {
        "agalite": __version__,
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "kernels": kernels.why_not() or "used",
        "huge_pages": "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", ""),
    }


# --- Programs timed in turns, so many runs each or until their time is used up --------------------

_LEAST = 3
"""Runs that a median needs at least, whatever the time limit; one that is very long gets fewer."""
_BURST = 4
_QUICK = 0.1  # seconds: a longer run warms its own caches


def interleave(
    programs: Sequence[Program], progress: Progress, what: str, *, runs: int, seconds: float
) -> None:
    """Each program has up to `runs` runs and `seconds` of time; a busy machine slows all alike.

    A turn of short runs is several in a row after one that does not count: a stream finds the
    caches as its own last step left them, not as another model did. No run is begun that would take
    more than the time left; every program has one, and three if they take no more than twice it.
    """
    for program in programs:
        # The very first run can take many times as long as any other.
        jax.block_until_ready(program.call())
        program.seconds.clear()
    task = progress.add_task(what, total=runs * len(programs))
    waiting = list(range(len(programs)))
    while waiting:
        for i in list(waiting):
            _turn(programs[i], runs)
            enough = len(programs[i].seconds) >= runs
            if enough or not _has_time(programs[i], seconds):
                waiting.remove(i)
            progress.update(task, completed=_completed(programs, runs, waiting))
    progress.remove_task(task)


def _turn(program: Program, runs: int) -> None:
    program.time()
    if program.seconds[-1] <= _QUICK:
        program.seconds.pop()
        for _ in range(min(_BURST, runs - len(program.seconds))):
            program.time()


def _has_time(program: Program, seconds: float) -> bool:
    limit = 2 * seconds if len(program.seconds) < _LEAST else seconds
    return sum(program.seconds) + min(program.seconds) <= limit


def _completed(programs: Sequence[Program], runs: int, waiting: list[int]) -> int:
    return sum(len(p.seconds) if i in waiting else runs for i, p in enumerate(programs))
