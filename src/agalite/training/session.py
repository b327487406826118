"""What every training run does, whichever way it acts: stops when asked, refuses NaN, sums up."""

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from agalite import files
from agalite.training import plots
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import Config, HostConfig, InUpdates, TrainConfig, config_from
from agalite.training.logging import read_metrics
from agalite.training.run import Run

_ONE_REQUEST = 1.0  # seconds within which signals to stop are one and the same
RETURN, SUCCESS = "charts/episodic_return", "charts/success"
NOTHING_LEFT = "there is nothing left to do: the run has ended"


class Diverged(ValueError):
    """A loss is no longer a number."""


def config_of(run: Run) -> TrainConfig | HostConfig:
    if "task" in run.config:
        raise ValueError(
            f"{run.folder} is a run of `agalite lra {run.config['task']}`: a classifier, not an "
            "agent; `agalite resume` and `agalite lra report` know it"
        )
    try:
        return config_from(run.asked)
    except ValueError as error:
        raise ValueError(f"{run.folder / 'config.json'}: {error}") from error


def remember_programs() -> None:
    """Compiled programs are kept on disk: a second run starts at once."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(files.cache("jax")))
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over the seeds; over those in which an episode ended, where it is of episodes."""
    out = {}
    for name in rows[0]:
        numbers = [row[name] for row in rows if math.isfinite(row[name])]
        out[name] = sum(numbers) / len(numbers) if numbers else math.nan
    return out


def refuse_divergence(
    run: Run, rows: list[dict[str, float]], step: int, checkpoints: Checkpoints
) -> None:
    for seed, row in enumerate(rows):
        losses = {name: value for name, value in row.items() if name.startswith("losses/")}
        wrong = [name for name, value in losses.items() if not math.isfinite(value)]
        if not wrong:
            continue
        latest = checkpoints.latest()
        where = (
            "there is no checkpoint"
            if latest is None
            else f"the last good checkpoint is of step {latest}"
        )
        values = " and ".join(sorted({str(losses[name]) for name in wrong}))
        message = (
            f"{', '.join(wrong)} of seed number {seed} became {values} by step {step}; {where} in "
            f"{run.checkpoints_folder}. A smaller learning rate or gradient norm may help"
        )
        run.log(f"{message}. All of step {step}: {row}")
        raise Diverged(message)


@contextmanager
def warnings_logged(run: Run) -> Iterator[None]:
    """Warnings that come up meanwhile go to the run's log too, for whoever comes the next day."""
    seen: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
    finally:
        for w in seen:
            run.log(f"warning: {w.message}")
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


def restored(run: Run, checkpoints: Checkpoints, like: Any, *, but: str = "") -> Any | None:
    """The newest whole state, or None if none was saved yet; the log says which, and what was
    passed over. `but`: what it says besides, of what cannot be restored."""
    try:
        with warnings_logged(run):
            step, state = checkpoints.restore(like)
    except FileNotFoundError:  # none was made yet; if all are damaged, that is an error
        run.log("resumed from the beginning: there is no checkpoint yet")
        return None
    run.log(f"resumed from step {step}{but}")
    return state


def ended(run: Run, config: InUpdates, update: Any, *, quiet: bool = True) -> bool:
    """Whether a run that is resumed has come to its end before; its summary then stays as it is."""
    over = int(np.max(np.asarray(update))) >= config.updates and run.read_summary() is not None
    if over:
        run.log(NOTHING_LEFT)
        if not quiet:
            print(NOTHING_LEFT, file=sys.stderr)
    return over


def finish(run: Run, config: Config, *, parameters: int, seconds: float, updates: int) -> None:
    """Writes the summary and draws the curve; `parameters` is how many the network has."""
    seeds = config.seeds_in_all
    table = read_metrics(run.folder)
    last = table["step"] > 0.9 * table["step"].max()
    means = {
        name: float(np.nanmean(table[name][last]))
        for name in table
        if name.startswith("charts/") and np.isfinite(table[name][last]).any()
    }
    run.write_summary(
        {
            "steps": int(table["step"].max()),
            "seeds": seeds,
            "parameters": parameters,
            "last_tenth": means,
            "seconds_of_this_session": round(seconds, 1),
            "steps_per_second_of_this_session": round(
                updates * config.steps_per_update * seeds / max(seconds, 1e-9), 1
            ),
        }
    )
    shown = [name for name in (RETURN, SUCCESS) if np.isfinite(table.get(name, np.nan)).any()]
    if shown:
        plots.curve([run.folder], run.curve_path, metric=shown)
    else:
        run.log("no episode has ended: there is no curve to draw")
    run.log(f"ended: {means}")


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that holds the signal's number once somebody pressed Ctrl-C or sent SIGTERM.

    A second one is not so patient: it interrupts at once. Unless it comes right behind the first:
    `timeout`, for one, sends its signal twice, to the process and to its group.
    """
    asked: list[int] = []
    since = math.inf

    def note(number: int, _: Any) -> None:
        nonlocal since
        now = time.monotonic()
        if not asked:
            asked.append(number)
            since = now
        elif now - since > _ONE_REQUEST:
            raise KeyboardInterrupt

    try:
        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever owns the signals stops us
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
