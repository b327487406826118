"""The metrics of a run for Weights & Biases too (`--wandb`): the trainer's side of it.

Another process does the sending (wandb_sender.py). It reads metrics.csv as that grows, so nothing
that W&B does, or waits for, can hold up or end the training; and whatever could not be sent is
still in the file, to be sent when the run is resumed.

runs/NAME/wandb/agalite.json says that a run goes to W&B, and under which names: it is no part of
the configuration, since it decides nothing of the outcome. Each seed is a W&B run of its own, all
of them in a group named like the folder: W&B draws the mean and the spread of a group by itself.
"""

import contextlib
import os
import secrets
import string
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from agalite import extras, files
from agalite.training.run import Run

_COMMAND = (sys.executable, "-P", "-m", "agalite.training.wandb_sender")
_PATIENCE = 30.0  # seconds that the end of a run waits for the last metrics to be sent


def check() -> None:
    """Before anything is compiled: is W&B installed, and has it an account or is it offline?"""
    extras.require("--wandb", ["wandb"], "wandb")
    done = subprocess.run(
        [*_COMMAND, "--check"],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stdout or done.stderr).strip().splitlines()[-1:] or ["wandb does not start"]
        raise ValueError(f"--wandb: {last[0]}")


def is_marked(run: Run) -> bool:
    return _plan_path(run).exists()


def mark(run: Run) -> None:
    """From now on, and each time it is resumed, the metrics of this run also go to W&B."""
    run.require_writing()
    first, count = int(run.config["seed"]), int(run.config.get("seeds", 1))
    several = count > 1
    plan: dict[str, Any] = {
        # W&B's own variables; noted, so that a run resumed elsewhere goes to the same place.
        "project": os.environ.get("WANDB_PROJECT") or "agalite",
        "entity": os.environ.get("WANDB_ENTITY") or None,
        "group": os.environ.get("WANDB_RUN_GROUP") or (run.name if several else None),
        "runs": [
            {
                "id": "".join(secrets.choice(_LETTERS) for _ in range(8)),
                "name": f"{run.name}-seed{first + i}" if several else run.name,
                "seed": first + i,
            }
            for i in range(count)
        ],
    }
    path = _plan_path(run)
    path.parent.mkdir(exist_ok=True)
    files.write_json(path, plan)


class Sender:
    """Sends the metrics of a run that was marked, from its start to `close`. Never raises."""

    def __init__(self, run: Run, *, quiet: bool = False) -> None:
        self._run: Run | None = run
        self._quiet = quiet
        self._process: subprocess.Popen[str] | None = None
        try:
            extras.require("sending the metrics to W&B", ["wandb"], "wandb")
            self._process = subprocess.Popen(
                [*_COMMAND, str(run.folder)],
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        except (OSError, ValueError) as error:
            self._tell(f"warning: no metrics for W&B: {error}")
            return
        self._listener = threading.Thread(
            target=self._listen, args=[self._process], name="wandb", daemon=True
        )
        self._listener.start()

    def close(self, *, failed: bool = False) -> None:
        """Waits for the last metrics to be sent, for a while; then leaves the sender to itself."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already, and said why
            process.stdin.write("1" if failed else "0")
            process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._tell("W&B is slow: the rest of the metrics is being sent in the background")
        else:
            self._listener.join()
        self._run = None

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        told = False
        for line in process.stdout:
            self._tell(line.rstrip("\n"))
            told = True
        code = process.wait()
        if code < 0 or (code > 0 and not told):
            self._tell(f"warning: the process that sends metrics to W&B ended with code {code}")

    def _tell(self, text: str) -> None:
        run = self._run
        if run is None:  # closed: the folder may be another process's by now
            return
        with contextlib.suppress(OSError, ValueError):
            run.log(text)
        if not self._quiet:
            print(text, file=sys.stderr)


_LETTERS = string.ascii_lowercase + string.digits


def _plan_path(run: Run) -> Path:
    return run.folder / "wandb" / "agalite.json"


def _environment() -> dict[str, str]:
    return {**os.environ, "WANDB_SILENT": "true"}
