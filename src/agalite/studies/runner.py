"""Running a study: what is finished stays, what is half-finished goes on, the rest is begun."""

import contextlib
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agalite import files
from agalite.machine import commit, processor, versions
from agalite.process import Stopped
from agalite.studies.board import Board
from agalite.studies.placement import Here, Placement
from agalite.studies.trials import Damaged, Trial
from agalite.studies.work import Outcome, check

FROM_PYTHON = "from Python"
_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "optax", "gymnax", "craftax", "ray")


def run(
    trials: Sequence[Trial], placement: Placement | None = None, *, quiet: bool = False,
    command: str | None = None, notes: Sequence[str] = (),
) -> list[Outcome]:  # fmt: skip
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
