"""`agalite bench seeds`: what several seeds cost on all cores against one seed on one core.

The same small T-Maze run is trained in three ways: one seed on one core; a seed on every core, each
in a process of its own, as `agalite study run --jobs` does; and as many seeds by `--seeds` in one
process. Speeds are those of the rows of metrics, without starting and compiling.
"""

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agalite.bench.report import at_most, show_targets, write_results
from agalite.bench.timing import progress_bar
from agalite.training.logging import read_metrics

COMMAND = ("train", "tmaze", "--corridor", "20", "--steps", "200000", "--log-every", "20000")
LIMIT = 1.15
"""Cost of N seeds on C cores, of N/C times one seed on one core."""
ONE, SIDE_BY_SIDE, TOGETHER = "one seed, one core", "a seed on each core", "--seeds, all cores"


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes the costs.

    **Arguments:**

    - `rounds`: how often each way is timed; they are interleaved.
    - `out`: a JSON file to write; None writes nothing.
    """
    cores = available_cores()
    ways = {
        ONE: [(cores[:1], 1)],
        SIDE_BY_SIDE: [([core], 1) for core in cores],
        TOGETHER: [(cores, len(cores))],
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=(rounds + 1) * len(ways))
        for i in range(rounds + 1):
            for way, processes in ways.items():
                rate = train(processes)
                if i:  # the first round fills the caches
                    rates[way].append(rate)
                progress.update(task, advance=1, description=way)
    alone = float(np.median(rates[ONE]))
    rows = [
        {
            "way": way,
            "seeds": sum(seeds for _, seeds in ways[way]),
            "steps_per_second": float(np.median(found)),
            "rounds": found,
            # Both for as many seeds: the time on all cores against their share of single runs.
            "cost": len(cores if way != ONE else cores[:1]) * alone / float(np.median(found)),
        }
        for way, found in rates.items()
    ]
    table = Table(title=f"{len(cores)} cores: agalite " + " ".join(COMMAND))
    for column in ("", "seeds", "steps/s of all seeds", "cost"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        rate = f"{row['steps_per_second']:,.0f}"
        table.add_row(row["way"], str(row["seeds"]), rate, f"{row['cost']:.2f}")
    Console().print(table)
    cost = next(row["cost"] for row in rows if row["way"] == SIDE_BY_SIDE)
    targets = [at_most("a seed on each core, cost of one on one core", cost, LIMIT)]
    show_targets(targets)
    if out is not None:
        write_results(out, {"benchmark": "seeds", "ways": rows, "targets": targets})


def available_cores() -> list[int]:
    """The cores that this process may use, at least two."""
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("agalite bench seeds binds processes to cores, which needs Linux")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError("agalite bench seeds compares cores, and this process may use only one")
    return cores


def train(processes: Sequence[tuple[Sequence[int], int]]) -> float:
    """Environment steps per second of all seeds of processes that train at the same time.

    **Arguments:**

    - `processes`: of each the cores that it is bound to, and how many seeds it trains.
    """
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        started: list[tuple[Any, Path]] = []
        for i, (cores, seeds) in enumerate(processes):
            folder = Path(work) / str(i)
            words = [*COMMAND, "--seed", str(i), "--seeds", str(seeds), "--out", str(folder)]
            process = subprocess.Popen(
                [sys.executable, "-m", "agalite.bench.seeds", ",".join(map(str, cores)), *words],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            started.append((process, folder))
        for process, _ in started:
            _, said = process.communicate()
            if process.returncode:
                raise ValueError(f"agalite {' '.join(COMMAND)} failed: {said.strip()[-500:]}")
        return sum(_rate(folder) for _, folder in started)


def _rate(folder: Path) -> float:
    """Steps per second of a run, over all of its seeds: the median without the first row."""
    table = read_metrics(folder)
    return float(np.median(table["charts/SPS"][table["seed"] == 0][1:]))


def _child() -> None:
    """Binds the process to the cores of the first argument and runs agalite with the others."""
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    sys.argv = ["agalite", *sys.argv[2:]]
    runpy.run_module("agalite", run_name="__main__")


if __name__ == "__main__":
    _child()
