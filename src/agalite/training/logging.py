"""The metrics of a run: metrics.csv, TensorBoard, Weights & Biases and a progress bar.

`MetricsWriter` takes one row of metrics per seed and step, named as in CleanRL
(charts/episodic_return, charts/SPS, losses/...), and writes it to

- metrics.csv: columns step, seed, then the metrics by name; one line per write and seed. A write is
  on the disk when `write` returns, so a killed process loses at most the lines it was writing. An
  incomplete last line is ignored by readers and removed on resume.
- tensorboard/seed_N/, for TensorBoard.
- Weights & Biases, if `enable_wandb` was called for the run.

The metrics of a step must be written before its checkpoint is saved: a resumed run drops the lines
after its checkpoint and writes them again, and relies on the lines before it.
"""

import contextlib
import json
import math
import os
import secrets
import string
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from agalite import extras, files, validation
from agalite.training.run import Run

_KEYS = ["step", "seed"]

# Seconds for W&B to begin and to end its runs. W&B's own environment variables override them.
_WANDB_INIT_TIMEOUT = 30.0
_WANDB_FINISH_TIMEOUT = 30.0

# Metrics that the progress bar shows, and their labels there.
_SHOWN = {
    "charts/episodic_return": "return",
    "charts/success": "success",
    "losses/value_loss": "value loss",
    "losses/entropy": "entropy",
    "charts/validation_accuracy": "validation",
    "charts/accuracy": "accuracy",
    "losses/loss": "loss",
}
_LINE_INTERVAL = 10.0  # seconds between two lines of progress where there is no terminal


class MetricsWriter:
    """Writes the metrics of all seeds of a run that is open for writing.

    **Arguments:**

    - `run`: the run, open for writing.
    - `seeds`: how many seeds it has; every write has a row for each.
    - `resume_step`: the step of the checkpoint that training continues from. Later lines are
        dropped. None for a run that begins.
    - `quiet`: messages about W&B go to run.log only, not to the terminal.
    """

    def __init__(
        self, run: Run, seeds: int, resume_step: int | None = None, *, quiet: bool = False
    ) -> None:
        validation.check_integer("seeds", seeds, minimum=1)
        run.require_writing()
        self._path, self._seeds = run.metrics_path, seeds
        self._last_step = -1
        self._names: list[str] | None = None
        if resume_step is not None:
            validation.check_integer(
                "resume_step", resume_step, minimum=0, maximum=validation.LARGEST_COUNT
            )
            self._drop_after(resume_step)
        elif self._path.exists() and self._path.stat().st_size:
            raise ValueError(f"{self._path} already has metrics; resume the run, or start another")
        # Unbuffered: a write is one system call.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            folder = run.tensorboard_folder
            self._boards = [_TensorBoard(folder / f"seed_{i}", resume_step) for i in range(seeds)]
        except BaseException:
            self._file.close()
            raise
        self._wandb = _WandbRuns(run, quiet=quiet) if _wandb_path(run).exists() else None

    def write(self, step: int, rows: Sequence[Mapping[str, SupportsFloat]]) -> None:
        """Write one row of metrics per seed.

        **Arguments:**

        - `step`: environment steps done; larger than at the last write.
        - `rows`: for each seed its metrics. All rows of a run have the same names. NaN means that
            there is no value, for example because no episode ended.
        """
        validation.check_integer(
            "step", step, minimum=self._last_step + 1, maximum=validation.LARGEST_COUNT
        )
        if len(rows) != self._seeds:
            raise ValueError(f"rows has {len(rows)} rows; expected one per seed, {self._seeds}")
        names = self._names
        header = b""
        if names is None:
            names = sorted(rows[0])
            for name in names:
                _check_name(name)
            header = (",".join([*_KEYS, *names]) + "\n").encode()
        values = [_in_order(row, names, seed) for seed, row in enumerate(rows)]
        lines = "".join(
            f"{step},{seed},{','.join(map(repr, row))}\n" if row else f"{step},{seed}\n"
            for seed, row in enumerate(values)
        )
        _write_all(self._file.fileno(), header + lines.encode())
        self._names, self._last_step = names, int(step)
        for board, row in zip(self._boards, values, strict=True):
            board.write(int(step), dict(zip(names, row, strict=True)))
        if self._wandb is not None:
            self._wandb.log(int(step), [dict(zip(names, row, strict=True)) for row in values])

    def close(self, *, failed: bool = False) -> None:
        """Close all files. W&B shows the run as finished, or with `failed` as failed."""
        self._file.close()
        for board in self._boards:
            board.close()
        if self._wandb is not None:
            self._wandb.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _drop_after(self, step: int) -> None:
        """Remove the lines of later steps, and an incomplete last one."""
        lines = _complete_lines(self._path)
        if not lines:
            files.write(self._path, b"")
            return
        self._names = _metric_names(self._path, lines[0])
        kept = [line for i, line in enumerate(lines[1:], 2) if _step(self._path, i, line) <= step]
        files.write(self._path, b"".join(line + b"\n" for line in [lines[0], *kept]))
        if kept:
            self._last_step = _step(self._path, len(kept) + 1, kept[-1])


def read_metrics(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the metrics of a run.

    **Arguments:**

    - `folder`: the folder of the run.

    **Returns:**

    Columns by name: "step" (N,) and "seed" (N,) as integers, every metric (N,) as float64. An
    incomplete last line is ignored. A run without metrics has the columns "step" and "seed" of
    length 0.
    """
    path = Path(folder) / "metrics.csv"
    if not path.exists():
        Run.open(folder)  # raises if the folder is not a run
    lines = _complete_lines(path)
    names = _KEYS + (_metric_names(path, lines[0]) if lines else [])
    rows = [line.split(b",") for line in lines[1:]]
    for i, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"{path}, line {i}: {len(row)} values; expected {len(names)}")
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    out = {}
    for name, column in zip(names, columns, strict=True):
        try:
            out[name] = np.array(column, np.int64 if name in _KEYS else np.float64)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}, column {name}: {error}") from error
    return out


def _complete_lines(path: Path) -> list[bytes]:
    """All lines that end with a newline, without it."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().split(b"\n")[:-1]
    return []


def _metric_names(path: Path, line: bytes) -> list[str]:
    names = line.decode(errors="replace").split(",")
    if names[:2] != _KEYS:
        raise ValueError(f"{path} does not begin with {','.join(_KEYS)}: no metrics of a run")
    return names[2:]


def _step(path: Path, i: int, line: bytes) -> int:
    try:
        return int(line.split(b",", 1)[0])
    except ValueError:
        raise ValueError(f"{path}, line {i}: {line[:40]!r} does not begin with a step") from None


def _check_name(name: str) -> None:
    valid = isinstance(name, str) and name and name not in _KEYS
    if not valid or any(c in ',"' or c.isspace() for c in name):
        raise ValueError(
            f"metric name {name!r} must be text without spaces, commas or quotes, "
            "for example charts/episodic_return"
        )


def _in_order(row: Mapping[str, SupportsFloat], names: list[str], seed: int) -> list[float]:
    if row.keys() != set(names):
        missing, extra = sorted(set(names) - row.keys()), sorted(row.keys() - set(names))
        raise ValueError(
            f"rows[{seed}] must have the metrics of the first row written: "
            f"missing {missing}, not expected {extra}"
        )
    return [float(row[name]) for name in names]


def _write_all(handle: int, data: bytes) -> None:
    """Append and sync. After an error, such as a full disk, the file is as before."""
    before = os.lseek(handle, 0, os.SEEK_END)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, before)
        raise


class _TensorBoard:
    """The event file of a seed. What `write` was given is on the disk when it returns.

    A file of a resumed run lets TensorBoard discard what earlier files have after its step.

    tensorboardX's `SummaryWriter` hands events to a thread that its `flush` does not wait for: a
    killed process would lose values of steps that its checkpoint is past, and never write them
    again.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise ValueError(
                'metrics for TensorBoard need tensorboardX: pip install "agalite[train]"'
            ) from error
        self._proto: Any = event_pb2  # its names are made when it is imported
        folder.mkdir(exist_ok=True)
        # Event files are named by the second. Without a suffix, a run resumed within the same
        # second would overwrite its first file.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if resume_step is not None:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(resume_step + 1, session_log=start)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Write the metrics of a step, without those that have no value."""
        summary = self._proto.Event().summary
        for name, value in row.items():
            if math.isfinite(value):
                summary.value.add(tag=name, simple_value=value)
        self._add(step, summary=summary)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, **what: Any) -> None:
        self._file.write_event(self._proto.Event(step=step, wall_time=time.time(), **what))


def check_wandb() -> None:
    """Raise `ValueError` unless W&B is installed and either has an account or is offline."""
    extras.require("--wandb", ["wandb"], "wandb")
    import wandb

    settings = wandb.setup().settings
    if settings.mode not in ("online", "run", "shared") or wandb.run is not None:
        return
    silent, settings.silent = settings.silent, True
    try:
        logged_in = wandb.login(prompt=False, verify=False)
    finally:
        settings.silent = silent
    if not logged_in:
        raise ValueError(
            "--wandb: W&B has no account to send to: run `wandb login` first, or set "
            "WANDB_MODE=offline to keep the metrics for a later `wandb sync`"
        )


def enable_wandb(run: Run) -> None:
    """Send the metrics of a run to W&B too, in this session and whenever it is resumed.

    Every seed is a W&B run; several seeds are a group named like the folder. Their ids are stored
    in wandb/agalite.json in the run's folder. They are no part of the configuration, since they do
    not influence training.
    """
    run.require_writing()
    first, count = int(run.config["seed"]), int(run.config.get("seeds", 1))
    letters = string.ascii_lowercase + string.digits
    record: dict[str, Any] = {
        # W&B's environment variables are stored, so that a run that is resumed elsewhere continues
        # in the same project.
        "project": os.environ.get("WANDB_PROJECT") or "agalite",
        "entity": os.environ.get("WANDB_ENTITY") or None,
        "group": os.environ.get("WANDB_RUN_GROUP") or (run.name if count > 1 else None),
        "runs": [
            {
                "id": "".join(secrets.choice(letters) for _ in range(8)),
                "name": f"{run.name}-seed{first + i}" if count > 1 else run.name,
                "seed": first + i,
            }
            for i in range(count)
        ],
    }
    path = _wandb_path(run)
    path.parent.mkdir(exist_ok=True)
    files.write_json(path, record)


class _WandbRuns:
    """The W&B runs of all seeds. No method raises: after an error, training continues without W&B.

    W&B's background process does the sending: `log` puts a row into its queue and returns, so a
    slow or blocked network never stalls training.
    """

    def __init__(self, run: Run, *, quiet: bool) -> None:
        self._run, self._quiet = run, quiet
        self._path = _wandb_path(run)
        self._record: dict[str, Any] = {}
        self._runs: list[Any] = []
        self._next: list[int] = []  # the first step of each seed that W&B does not have
        self._last_step = -1
        try:
            self._open()
            self._send_missing()
        except Exception as error:  # of many types, most of them W&B's own
            self._give_up(error)

    def log(self, step: int, rows: list[dict[str, float]]) -> None:
        """Queue a row of each seed, unless W&B has it from an earlier session."""
        try:
            for run, first, row in zip(self._runs, self._next, rows, strict=False):
                if step >= first:
                    run.log({k: x for k, x in row.items() if math.isfinite(x)}, step=step)
            self._last_step = step
        except Exception as error:
            self._give_up(error)

    def close(self, *, failed: bool) -> None:
        """Wait until all is sent, or for `_WANDB_FINISH_TIMEOUT`."""
        if not self._runs:
            return
        offline = self._runs[0].offline
        try:
            self._finish(1 if failed else 0)
        except Exception as error:
            self._give_up(error)
            return
        # Offline, W&B does not know what earlier sessions have logged. Recorded here, at the end:
        # W&B's process buffers what it writes, and loses it if the session is killed.
        if offline:
            sent = max(self._last_step, int(self._record.get("sent", -1)))
            files.write_json(self._path, {**self._record, "sent": sent})

    def _open(self) -> None:
        extras.require("sending metrics", ["wandb"], "wandb")
        import wandb

        self._record = json.loads(self._path.read_text())
        offline = wandb.setup().settings.mode in ("offline", "dryrun")
        for i, mine in enumerate(self._record["runs"]):
            run = wandb.init(
                project=self._record["project"],
                entity=self._record["entity"],
                group=self._record["group"],
                id=mine["id"],
                name=mine["name"],
                resume=None if offline else "allow",
                config={**self._run.config, "seed": mine["seed"]},
                dir=self._run.folder,
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    save_code=False,
                    init_timeout=_seconds("WANDB_INIT_TIMEOUT", _WANDB_INIT_TIMEOUT),
                    finish_timeout=_seconds("WANDB_FINISH_TIMEOUT", _WANDB_FINISH_TIMEOUT),
                    finish_timeout_raises=True,
                    program="agalite train",
                    x_disable_stats=i > 0,  # the machine's load is the same for every seed
                ),
            )
            if run.disabled:
                return
            self._runs.append(run)
            sent = int(self._record.get("sent", -1))
            self._next.append(sent + 1 if run.offline else int(run.step))
        first, more = self._runs[0], len(self._runs) - 1
        if first.offline:
            where = f"send the metrics with wandb sync {self._run.folder}/wandb/offline-*"
            self._report(f"W&B is offline: {where}")
        else:
            others = f" and {more} more in the group {self._record['group']}" if more else ""
            self._report(f"W&B: {first.url}{others}")

    def _send_missing(self) -> None:
        """Send the lines of metrics.csv that W&B does not have."""
        if not self._runs:
            return
        table = read_metrics(self._run.folder)
        names = [name for name in table if name not in _KEYS]
        for step in np.unique(table["step"]):
            at = np.flatnonzero(table["step"] == step)
            self.log(int(step), [{name: float(table[name][i]) for name in names} for i in at])

    def _give_up(self, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._report(
            f"warning: W&B failed, training goes on without it: {text}. The metrics are in "
            "metrics.csv; if the run is resumed, W&B gets what is missing"
        )
        with contextlib.suppress(Exception):
            self._finish(1)

    def _finish(self, exit_code: int) -> None:
        runs, self._runs = self._runs, []
        # All at once: each waits for its own uploads.
        with ThreadPoolExecutor(max(1, len(runs))) as pool:
            futures = [pool.submit(run.finish, exit_code) for run in runs]
        for future in futures:
            future.result()

    def _report(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._run.log(text)
        if not self._quiet:
            print(text, file=sys.stderr)


def _wandb_path(run: Run) -> Path:
    return run.folder / "wandb" / "agalite.json"


def _seconds(variable: str, default: float) -> float:
    return float(os.environ.get(variable) or default)


class ProgressBar:
    """Shows the progress of a run on stderr: a live bar on a terminal, lines elsewhere.

    **Arguments:**

    - `total`: environment steps of the whole run.
    - `start`: steps that are done already.
    - `quiet`: show nothing.
    """

    def __init__(self, total: int, start: int, *, quiet: bool = False) -> None:
        self._total = total
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal and not quiet
        self._quiet = quiet
        self._last = -math.inf
        self._progress = Progress(
            TextColumn("[bold]{task.completed:,.0f}[/] steps"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("", total=total, completed=start, text="compiling")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, step: int, steps_per_second: float, metrics: dict[str, float]) -> None:
        """Show the state after `step` steps."""
        text = f"{steps_per_second:,.0f} steps/s  {_describe(metrics)}"
        self._progress.update(self._task, completed=min(step, self._total), text=text)
        now = time.monotonic()
        recent = now - self._last < _LINE_INTERVAL and step < self._total
        if self._live or self._quiet or recent:
            return
        self._last = now
        self._console.print(
            f"{step:>12,} / {self._total:,} steps  {text}", highlight=False, soft_wrap=True
        )


def _describe(metrics: dict[str, float]) -> str:
    return "  ".join(
        f"{label} {metrics[name]:.3g}"
        for name, label in _SHOWN.items()
        if math.isfinite(metrics.get(name, math.nan))
    )
