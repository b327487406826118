"""The progress of a study on the console: a live line on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agalite.studies._wording import count_of, duration
from agalite.studies.trials import Outcome, Trial

_LINE_INTERVAL = 30.0  # seconds between two plain lines
_NAMED = 4  # running trials that the line names


class ProgressDisplay:
    """Shows how far all trials of a study are, and an estimate of the time left.

    A thread reads the progress of running trials from their folders, wherever they run.

    **Arguments:**

    - `trials`: all trials, finished ones included.
    - `quiet`: print nothing.
    """

    def __init__(self, trials: Sequence[Trial], *, quiet: bool = False) -> None:
        self._trials = {trial.name: trial for trial in trials}
        self._total = sum(trial.steps for trial in trials) or 1
        self._shares = {trial.name: trial.progress() for trial in trials}
        self._initial = self._steps_done()
        self._running: dict[str, Trial] = {}
        self._failed: set[str] = set()
        self._quiet = quiet
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._start = self._last_line = time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live.start()
        self._thread = threading.Thread(target=self._refresh, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join()
        self._live.stop()

    def started(self, trial: Trial) -> None:
        """Call when a trial is submitted."""
        with self._lock:
            self._running[trial.name] = trial

    def ended(self, outcome: Outcome) -> None:
        """Call when a trial has ended; prints a line about it."""
        with self._lock:
            self._running.pop(outcome.trial, None)
            if outcome.state == "failed":
                self._failed.add(outcome.trial)
            if outcome.state in ("finished", "failed"):
                self._shares[outcome.trial] = 1.0  # no work is left for it in this session
            line = self._line()
        if self._quiet:
            return
        reason = f": {outcome.message}" if outcome.message else ""
        self._console.print(
            f"{outcome.state:>9}  {outcome.trial}  {outcome.seconds:.0f} s{reason}", markup=False
        )
        if not self._live.is_started:
            self._console.print(f"           {line}", markup=False)
            self._last_line = time.monotonic()

    def _refresh(self) -> None:
        while not self._closed.wait(1.0):
            with self._lock:
                for name, trial in self._running.items():
                    self._shares[name] = max(self._shares[name], trial.progress())
                line = self._line()
            if self._quiet:
                continue
            if self._live.is_started:
                self._live.update(Text(line), refresh=True)
            elif time.monotonic() - self._last_line > _LINE_INTERVAL:
                self._last_line = time.monotonic()
                self._console.print(f"           {line}", markup=False)

    def _steps_done(self) -> float:
        return sum(self._shares[name] * trial.steps for name, trial in self._trials.items())

    def _line(self) -> str:
        done = self._steps_done()
        ended = sum(share >= 1 for share in self._shares.values())
        parts = [
            f"{ended} of {count_of(len(self._trials), 'trial')}",
            f"{100 * done / self._total:.0f}%",
        ]
        if self._failed:
            parts.append(f"{len(self._failed)} failed")
        rate = (done - self._initial) / (time.monotonic() - self._start + 1e-9)
        if rate > 0 and done < self._total:
            parts.append(f"{duration((self._total - done) / rate)} left")
        # A cluster is given all trials at once, most of which wait: name those with progress.
        names = [n for n in self._running if len(self._running) == 1 or self._shares[n] > 0]
        parts += [f"{name} {100 * self._shares[name]:.0f}%" for name in names[:_NAMED]]
        return "  ".join(parts)
