"""How far a study is: all trials together, with the time left. A live line on a terminal, plain
lines elsewhere."""

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agalite.studies.trials import Trial, counted
from agalite.studies.work import Outcome, progress

_PATIENCE = 30.0  # seconds between two plain lines
_SHOWN = 4  # trials named on the line


class Board:
    """`begun` and `ended` as trials come and go; what is at work is read from its folder."""

    def __init__(self, trials: Sequence[Trial], *, quiet: bool = False) -> None:
        self._trials = {trial.name: trial for trial in trials}
        self._total = sum(trial.steps for trial in trials) or 1
        self._shares = {trial.name: progress(trial) for trial in trials}
        self._before = self._done()
        self._active: dict[str, Trial] = {}
        self._states: dict[str, str] = {}
        self._quiet = quiet
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began = self._said = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live.start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._over.set()
        self._thread.join()
        self._live.stop()

    def begun(self, trial: Trial) -> None:
        with self._lock:
            self._active[trial.name] = trial

    def ended(self, outcome: Outcome) -> None:
        with self._lock:
            self._active.pop(outcome.trial, None)
            self._states[outcome.trial] = outcome.state
            if outcome.state in ("finished", "failed"):
                self._shares[outcome.trial] = 1.0  # nothing more is to be done for it here
            line = self._line()
        if self._quiet:
            return
        # Somebody who pressed Ctrl-C need not be told why.
        how = f": {outcome.message}" if outcome.message else ""
        self._console.print(
            f"{outcome.state:>9}  {outcome.trial}  {outcome.seconds:.0f} s{how}", markup=False
        )
        if not self._live.is_started:
            self._console.print(f"           {line}", markup=False)
            self._said = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            with self._lock:
                for name, trial in self._active.items():
                    self._shares[name] = max(self._shares[name], progress(trial))
                line = self._line()
            if self._quiet:
                continue
            if self._live.is_started:
                self._live.update(Text(line), refresh=True)
            elif time.monotonic() - self._said > _PATIENCE:
                self._said = time.monotonic()
                self._console.print(f"           {line}", markup=False)

    def _done(self) -> float:
        return sum(self._shares[name] * trial.steps for name, trial in self._trials.items())

    def _line(self) -> str:
        done = self._done()
        ended = sum(share >= 1 for share in self._shares.values())
        failed = sum(state == "failed" for state in self._states.values())
        parts = [
            f"{ended} of {counted(len(self._trials), 'trial')}",
            f"{100 * done / self._total:.0f}%",
        ]
        if failed:
            parts.append(f"{failed} failed")
        rate = (done - self._before) / (time.monotonic() - self._began + 1e-9)
        if rate > 0 and done < self._total:
            parts.append(f"{in_words((self._total - done) / rate)} left")
        # On a cluster all are asked for at once, and few have begun.
        at_work = [n for n in self._active if len(self._active) == 1 or self._shares[n] > 0]
        named = [f"{name} {100 * self._shares[name]:.0f}%" for name in at_work[:_SHOWN]]
        return "  ".join([*parts, *named])


def in_words(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.1f} min"
