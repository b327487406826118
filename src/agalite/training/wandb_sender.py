"""The process that sends a run's metrics to Weights & Biases: started by wandb_log.py, no other.

It reads metrics.csv as the trainer writes it. Standard input is how the trainer says that it has
ended: "0" if all went well, "1" if not, or nothing at all if it was killed. What is to be noted in
run.log goes to standard output, a line each.

A step is sent once: W&B says which step it expects next, and offline, where it does not know,
agalite.json remembers the last. So what an earlier session could not send is sent by this one.
"""

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from agalite import files

_POLL = 1.0  # seconds between two looks at metrics.csv
_RETRY = 60.0  # seconds until W&B is tried again when it could not be reached
# Seconds that W&B may take to begin, and to end, a run; its own variables may say otherwise.
_INIT = float(os.environ.get("WANDB_INIT_TIMEOUT") or 30.0)
_FINISH = float(os.environ.get("WANDB_FINISH_TIMEOUT") or 300.0)


def check() -> str | None:
    """None if a run could be sent, or kept for later; else what is in the way."""
    import wandb

    # "dryrun" is W&B's older word for offline.
    if wandb.setup().settings.mode not in ("online", "run", "shared"):
        return None
    if wandb.login(prompt=False, verify=False):
        return None
    return (
        "W&B has no account to send to: run `wandb login` first, or set WANDB_MODE=offline to "
        "keep the metrics for a later `wandb sync`"
    )


class _Sending:
    def __init__(self, folder: Path, plan_path: Path) -> None:
        self._folder, self._plan_path = folder, plan_path
        self._plan: dict[str, Any] = json.loads(plan_path.read_text())
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._csv = open(folder / "metrics.csv", "rb")  # noqa: SIM115 - as long as the process
        self._names: list[str] | None = None
        self._runs: list[Any] = []
        self._next: list[int] = []
        self._refusal = ""

    def open(self) -> bool:
        """Begin the W&B runs that have not begun yet; false if W&B cannot be reached."""
        import wandb

        runs = self._plan["runs"]
        while len(self._runs) < len(runs):
            mine = runs[len(self._runs)]
            settings = wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                reinit="create_new",
                init_timeout=_INIT,
                finish_timeout=_FINISH,
                program="agalite train",
                # The machine's load is the trainer's, and the same for every seed.
                x_stats_pid=os.getppid(),
                x_disable_stats=bool(self._runs),
            )
            try:
                run = wandb.init(
                    project=self._plan["project"],
                    entity=self._plan["entity"],
                    group=self._plan["group"],
                    id=mine["id"],
                    name=mine["name"],
                    resume="allow",
                    config={**self._config, "seed": mine["seed"]},
                    dir=self._folder,
                    settings=settings,
                )
            except Exception as error:  # of many kinds, most of them W&B's own
                self._say_once(f"warning: W&B cannot be reached, training goes on: {error}")
                # All of them: it takes no second attempt at a run until the first is forgotten.
                self.close(1)
                self._runs.clear()
                self._next.clear()
                return False
            sent = int(self._plan.get("sent", -1))
            self._next.append(sent + 1 if run.offline else int(run.step))
            self._runs.append(run)
            if len(self._runs) == len(runs):
                self._say_where()
        return True

    def forward(self) -> None:
        """All lines that have been added since."""
        last = -1
        for line in _whole_lines(self._csv):
            words = line.decode().split(",")
            if self._names is None:
                self._names = words[2:]
                continue
            step, seed = int(words[0]), int(words[1])
            values = (float(word) for word in words[2:])
            row = {name: x for name, x in zip(self._names, values, strict=True) if math.isfinite(x)}
            if step >= self._next[seed]:
                self._runs[seed].log(row, step=step)
                last = max(last, step)
        if last >= 0:
            self._plan["sent"] = last
            files.write_json(self._plan_path, self._plan)

    def close(self, code: int) -> None:
        import wandb

        wandb.teardown(exit_code=code)

    def _say_where(self) -> None:
        first, more = self._runs[0], len(self._runs) - 1
        others = f" and {more} more in the group {self._plan['group']}" if more else ""
        if first.offline:
            say(f"W&B is offline: send the metrics with wandb sync {self._folder}/wandb/offline-*")
        else:
            say(f"W&B: {first.url}{others}")

    def _say_once(self, text: str) -> None:
        if text != self._refusal:
            say(text)
        self._refusal = text


def send(folder: Path) -> int:
    code: int | None = None
    with open(folder / "wandb" / ".lock", "w") as lock:
        # The sender of a session that was killed may still be sending what that one had written.
        fcntl.flock(lock, fcntl.LOCK_EX)
        sending = _Sending(folder, folder / "wandb" / "agalite.json")
        while True:
            ready = sending.open()
            if ready:
                sending.forward()
            if code is not None:
                break
            code = _wait(_POLL if ready else _RETRY)
        if not ready:
            say(f"warning: W&B has not all metrics; `agalite resume {folder}` tries again")
        sending.close(code)
    return 0 if ready else 1


def say(text: str) -> None:
    """A line for run.log."""
    with contextlib.suppress(OSError):  # the trainer is gone
        print(" ".join(text.split()), flush=True)


def _wait(seconds: float) -> int | None:
    """Until the trainer ends, which gives the code, or time is up, which gives None."""
    readable, _, _ = select.select([0], [], [], seconds)
    if not readable:
        return None
    return 0 if os.read(0, 1) == b"0" else 1


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(place)
            return
        yield line[:-1]


def main(words: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if words == ["--check"]:
            refusal = check()
            if refusal:
                say(refusal)
            return 1 if refusal else 0
        return send(Path(words[0]))
    except Exception as error:
        # Whatever it is, it must reach run.log, and can do no other harm.
        say(f"warning: W&B failed, training goes on: {type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
