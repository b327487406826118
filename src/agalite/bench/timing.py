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


def compile_program(name: str, function: Callable[..., Any], *args: Any) -> Program:
    compiled = jax.jit(function).lower(*args).compile()
    analysis = compiled.memory_analysis()
    temporary = 0 if analysis is None else analysis.temp_size_in_bytes
    jax.block_until_ready(compiled(*args))
    return Program(name, lambda: compiled(*args), temporary)


def take_turns(programs: list[Program], rounds: int, progress: Progress) -> None:
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
    cpu = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            cpu = next((x.split(":")[1].strip() for x in lines if "model name" in x), cpu)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "huge_pages": "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", ""),
    }
