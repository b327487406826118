"""`agalite bench start`: the time from the command to the first update, and what it is made of.

A small T-Maze run is started in a process of its own, first with empty caches (nothing compiled, no
custom kernels built) and then again. The clock runs from the start of the process to the first row
of metrics.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from agalite.bench.report import at_most, show_targets, write_results
from agalite.bench.timing import progress_bar

COMMAND = ("train", "tmaze", "--corridor", "20", "--steps", "2048")
LIMITS = {"cold": 15.0, "warm": 4.0}  # seconds
# By part: JAX's own clocks, over all programs.
_CLOCKS = {
    "tracing": "/jax/core/compile/jaxpr_trace_duration",
    "lowering": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compiling, or reading the cache": "/jax/core/compile/backend_compile_duration",
}
PARTS = ("starting Python, imports", *_CLOCKS, "everything else")


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes the times of starts.

    **Arguments:**

    - `rounds`: pairs of a start with empty caches and one with full ones.
    - `out`: a JSON file to write; None writes nothing.
    """
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with progress_bar() as progress:
        task = progress.add_task("starting", total=2 * rounds)
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                for name in found:
                    found[name].append(time_start(Path(folder), name))
                    progress.advance(task)
    rows = [
        {
            "caches": name,
            "seconds": [part["total"] for part in parts],
            "parts": {p: float(np.median([part[p] for part in parts])) for p in PARTS},
        }
        for name, parts in found.items()
    ]
    table = Table(title="Seconds to the first update: agalite " + " ".join(COMMAND))
    for column in ("caches", "in all", *PARTS):
        table.add_column(column, justify="left" if column == "caches" else "right")
    for row in rows:
        parts = (f"{row['parts'][p]:.1f}" for p in PARTS)
        table.add_row(row["caches"], f"{np.median(row['seconds']):.1f}", *parts)
    Console().print(table)
    targets = [
        at_most(f"seconds, {row['caches']} caches", float(np.median(row["seconds"])), limit)
        for row, limit in zip(rows, LIMITS.values(), strict=True)
    ]
    show_targets(targets)
    if out is not None:
        write_results(out, {"benchmark": "start", "starts": rows, "targets": targets})


def time_start(folder: Path, name: str) -> dict[str, float]:
    """Seconds to the first update with the caches in `folder`, in all and by `PARTS`.

    Programs are compiled on several threads, and kernels built beside: parts are what the main
    thread waited for.
    """
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_COMPILATION_CACHE_DIR": ""}
    out = folder / name
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "agalite.bench.start", str(begin), *COMMAND, "--out", str(out)],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"agalite {' '.join(COMMAND)} failed: {done.stderr.strip()[-500:]}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    parts["everything else"] = parts["total"] - sum(parts[p] for p in PARTS[:-1])
    return parts


def _child() -> None:
    """Runs the command and prints a line of JSON: when it got to the first row of metrics."""
    begin = float(sys.argv[1])
    import jax.monitoring

    from agalite.training import logging, train  # noqa: F401 (part of the time of imports)

    parts = dict.fromkeys(_CLOCKS, 0.0)
    parts[PARTS[0]] = time.time() - begin
    names = {event: part for part, event in _CLOCKS.items()}

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in names and "total" not in parts:
            parts[names[event]] += duration_secs

    write = logging.MetricsWriter.write

    def first_row(self: Any, *args: Any) -> None:
        parts.setdefault("total", time.time() - begin)
        write(self, *args)

    jax.monitoring.register_event_duration_secs_listener(listen)
    with (
        mock.patch.object(logging.MetricsWriter, "write", first_row),
        contextlib.redirect_stdout(sys.stderr),
    ):
        sys.argv = ["agalite", *sys.argv[2:]]
        try:
            runpy.run_module("agalite", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    print(json.dumps(parts))


if __name__ == "__main__":
    _child()
