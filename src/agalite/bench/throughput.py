"""`agalite bench throughput`: how fast the parts are, each against the machine's own limit."""

import importlib
from pathlib import Path
from typing import Any

from agalite import errors, files

PARTS = {
    "models": "agalite.bench.models",
    "envs": "agalite.bench.environments",
    "training": "agalite.bench.training",
    "lra": "agalite.bench.lra",
    "asynchronous": "agalite.bench.asynchronous",
    "memory_maze": "agalite.bench.memory_maze",
}
"""What can be measured, and the module whose `run(rounds=, out=, ...)` does it."""


def run(parts: list[str], *, rounds: int, out: Path | None, **options: Any) -> None:
    """parts: the ones asked for, of which there must be one."""
    errors.integer("rounds", rounds, minimum=1)
    if len(parts) != 1:
        known = ", ".join("--" + name.replace("_", "-") for name in PARTS)
        raise ValueError(f"choose one part to measure: {known}")
    if out is not None:
        files.check_writable("out", out)
    importlib.import_module(PARTS[parts[0]]).run(rounds=rounds, out=out, **options)
