"""How a run tells people where it stands: a live bar on a terminal, plain lines elsewhere."""

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SHOWN = {
    "charts/episodic_return": "return",
    "charts/success": "success",
    "losses/value_loss": "value loss",
    "losses/entropy": "entropy",
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
            TextColumn("[bold]{task.completed:,.0f}[/] steps"), BarColumn(), TaskProgressColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[words]}"),
            console=self._console, disable=not self._live,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, completed=start, words="compiling")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
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
