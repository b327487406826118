"""The numbers of a run over time: metrics.csv, and the same for TensorBoard (and W&B, if asked).

metrics.csv has a line for each write and seed: step, seed, then the metrics by name. Each write is
on the disk before `write` returns, so that a killed process loses at most the lines it was writing;
a line cut short is ignored by readers and removed by `agalite resume`.

Write a step's metrics before saving its checkpoint: a resumed run drops what came after its
checkpoint and makes it again, and what came before must be there.
"""

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from agalite import files, validation
from agalite.training import wandb_log
from agalite.training.run import Run

_FIXED = ["step", "seed"]


class MetricsWriter:
    """Writes the metrics of all seeds of a run that is open for writing.

    `resume_step` is the step of the checkpoint that training goes on from: later lines are dropped.
    None is a run that begins. `quiet`: what W&B has to say goes to run.log alone.
    """

    def __init__(
        self, run: Run, seeds: int, resume_step: int | None = None, *, quiet: bool = False
    ) -> None:
        validation.integer("seeds", seeds, minimum=1)
        run.require_writing()
        self._path, self._seeds = run.metrics_path, seeds
        self._last = -1
        self._names: list[str] | None = None
        if resume_step is not None:
            validation.integer("resume_step", resume_step, minimum=0)
            self._drop_after(resume_step)
        elif self._path.exists() and self._path.stat().st_size:
            raise ValueError(f"{self._path} already has metrics; resume the run, or start another")
        # A write is one call to the system, so that no buffer holds half of it back.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            self._boards = _tensorboards(run.tensorboard_folder, seeds, resume_step)
        except BaseException:
            self._file.close()
            raise
        self._sender = wandb_log.Sender(run, quiet=quiet) if wandb_log.is_marked(run) else None

    def write(self, step: int, rows: Sequence[Mapping[str, SupportsFloat]]) -> None:
        """One row of metrics per seed, all with the names of the first row ever written."""
        validation.integer("step", step, minimum=self._last + 1)
        if len(rows) != self._seeds:
            raise ValueError(f"rows has {len(rows)} rows; expected one per seed, {self._seeds}")
        names = self._names
        header = b""
        if names is None:
            names = sorted(rows[0])
            for name in names:
                _check_name(name)
            header = (",".join([*_FIXED, *names]) + "\n").encode()
        values = [_in_order(row, names, seed) for seed, row in enumerate(rows)]
        lines = "".join(
            f"{step},{seed},{','.join(map(repr, row))}\n" if row else f"{step},{seed}\n"
            for seed, row in enumerate(values)
        )
        _write_all(self._file.fileno(), header + lines.encode())
        self._names, self._last = names, int(step)
        for board, row in zip(self._boards, values, strict=True):
            for name, value in zip(names, row, strict=True):
                # NaN is an interval in which no episode ended: nothing to draw.
                if np.isfinite(value):
                    board.add_scalar(name, value, step)
            board.flush()

    def close(self, *, failed: bool = False) -> None:
        """`failed` is for W&B, which shows how a run ended."""
        self._file.close()
        for board in self._boards:
            board.close()
        if self._sender is not None:
            self._sender.close(failed=failed)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _drop_after(self, step: int) -> None:
        whole = _whole_lines(self._path)
        if not whole:
            files.write(self._path, b"")
            return
        self._names = _header(self._path, whole[0])
        kept = [line for i, line in enumerate(whole[1:], 2) if _number(self._path, i, line) <= step]
        files.write(self._path, b"".join(line + b"\n" for line in [whole[0], *kept]))
        if kept:
            self._last = _number(self._path, len(kept) + 1, kept[-1])


def read_metrics(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """ "step" (N,) and "seed" (N,) as whole numbers, every metric (N,) as float64, line by line.

    A last line that is cut short is left out. A run that has not written anything yet has no
    metrics: only "step" and "seed", of length 0.
    """
    path = Path(folder) / "metrics.csv"
    if not path.exists():
        Run.open(folder)  # says so if it is no run at all
    lines = _whole_lines(path)
    names = _FIXED + (_header(path, lines[0]) if lines else [])
    rows = [line.split(b",") for line in lines[1:]]
    for i, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"{path}, line {i}: {len(row)} values; expected {len(names)}")
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    out = {}
    for name, column in zip(names, columns, strict=True):
        try:
            out[name] = np.array(column, np.int64 if name in _FIXED else np.float64)
        except ValueError as error:
            raise ValueError(f"{path}, column {name}: {error}") from error
    return out


def _whole_lines(path: Path) -> list[bytes]:
    """Without their ends; what follows the last end is a line cut short."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().split(b"\n")[:-1]
    return []


def _header(path: Path, line: bytes) -> list[str]:
    names = line.decode(errors="replace").split(",")
    if names[:2] != _FIXED:
        raise ValueError(f"{path} does not begin with {','.join(_FIXED)}: no metrics of a run")
    return names[2:]


def _number(path: Path, i: int, line: bytes) -> int:
    try:
        return int(line.split(b",", 1)[0])
    except ValueError:
        raise ValueError(f"{path}, line {i}: {line[:40]!r} does not begin with a step") from None


def _check_name(name: str) -> None:
    plain = isinstance(name, str) and name and name not in _FIXED
    if not plain or any(c in ',"' or c.isspace() for c in name):
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
    """On the disk when it returns; after an error, such as a full disk, the file is as before."""
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


def _tensorboards(folder: Path, seeds: int, resume_step: int | None) -> list[Any]:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            'metrics for TensorBoard need tensorboardX: pip install "agalite[train]"'
        ) from error
    # TensorBoard forgets what it has from this step on, in the files of earlier processes too.
    purge = None if resume_step is None else resume_step + 1
    # Files are named by the second: without more, a run resumed at once would empty its first file.
    suffix = f".{time.time_ns()}"
    return [
        SummaryWriter(str(folder / f"seed_{i}"), purge_step=purge, filename_suffix=suffix)
        for i in range(seeds)
    ]


# --- How a run tells people where it stands: a live bar on a terminal, plain lines elsewhere ------

_SHOWN = {
    "charts/episodic_return": "return",
    "charts/success": "success",
    "losses/value_loss": "value loss",
    "losses/entropy": "ent_coef",
    "charts/validation_accuracy": "validation",
    "charts/accuracy": "accuracy",
    "losses/loss": "loss",
}
_PATIENCE = 10.0  # seconds between two plain lines


class Bar:
    """`update(step, steps_per_second, metrics)` after every interval."""

    def __init__(self, total: int, start: int, *, quiet: bool = False) -> None:
        self._total, self._start = total, start
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal and not quiet
        self._quiet = quiet
        self._last = -math.inf
        self._progress = Progress(
            TextColumn("[bold]{task.completed:,.0f}[/] steps"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("", total=total, completed=start, words="compiling")

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

    def update(self, step: int, rate: float, metrics: dict[str, float]) -> None:
        words = f"{rate:,.0f} steps/s  {describe(metrics)}"
        self._progress.update(self._task, completed=min(step, self._total), words=words)
        now = time.monotonic()
        if self._live or self._quiet or (now - self._last < _PATIENCE and step < self._total):
            return
        self._last = now
        self._console.print(
            f"{step:>12,} / {self._total:,} steps  {words}", highlight=False, soft_wrap=True
        )


def describe(metrics: dict[str, float]) -> str:
    parts = [
        f"{word} {metrics[name]:.3g}" if name in metrics and math.isfinite(metrics[name]) else ""
        for name, word in _SHOWN.items()
    ]
    return "  ".join(part for part in parts if part)
