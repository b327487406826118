"""Beginning and end of a session of training: what all trainers of the library share.

A session is one process's part of a run, from `train` or `resume` until the run has ended or is
stopped. Used by `train.py`, `asynchronous/train.py` and `supervised/train.py`.
"""

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from agalite import files
from agalite.networks.encoders import observation_bytes
from agalite.system import available_memory
from agalite.training import plots
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import (
    Config,
    HostConfig,
    TrainConfig,
    UpdateSchedule,
    config_from_dict,
)
from agalite.training.logging import read_metrics
from agalite.training.run import Run

RETURN, SUCCESS = "charts/episodic_return", "charts/success"
_SAME_REQUEST = 1.0  # seconds within which several signals count as one request to stop
_NOTHING_LEFT = "there is nothing left to do: the run has ended"


class Diverged(ValueError):
    """A loss became NaN or infinite."""


def enable_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that the next run of the same program starts at once."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(files.cache("jax")))
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def check_memory(config: Config, observation_space: Any) -> None:
    """Refuses an update whose observations alone do not fit into memory, before compiling it.

    They are held twice: as the rollout and as the sequences that are learned from; of several seeds
    by as many as there are devices (`Seeds`).

    **Arguments:**

    - `config`: of the run.
    - `observation_space`: of one environment.
    """
    available = available_memory()
    if available is None or jax.default_backend() != "cpu":
        return
    one = observation_bytes(config.encoder, observation_space)
    together = min(config.num_seeds, jax.local_device_count())
    needed = 2 * one * config.steps_per_update * together
    if needed > available:
        seeds = f" and {together} seeds at a time" if together > 1 else ""
        fitting = available // (2 * one * together)
        fewer = (
            "take a smaller batch_size"
            if isinstance(config, HostConfig)
            else "take fewer environments or a smaller num_steps"
        )
        raise ValueError(
            f"an update of {config.steps_per_update:,} steps{seeds} holds observations of "
            f"{needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB of memory are available; "
            f"at most {fitting:,} steps fit: {fewer}"
        )


# The memory of a gradient step is counted, which takes a second, from so many environment steps on,
# or if its observations are this share of what is free: a network of residual convolutions keeps a
# hundred times as much as it reads.
_LARGE_STEP, _LARGE_SHARE = 2**16, 1 / 500


def check_gradient_memory(
    steps: int, observations: int, count: Callable[[], int], together: int, advice: str
) -> None:
    """Refuses a gradient step whose backward pass does not fit into memory, before compiling it.

    **Arguments:**

    - `steps`: environment steps in it.
    - `observations`: bytes of their observations. With few steps and small observations nothing
        is checked.
    - `count`: the bytes that its forward pass keeps for the backward pass.
    - `together`: seeds that learn at the same time.
    - `advice`: what makes it smaller.
    """
    available = available_memory()
    if available is None or jax.default_backend() != "cpu":
        return
    if steps < _LARGE_STEP and together * observations < _LARGE_SHARE * available:
        return
    needed = together * count()
    if needed > available:
        seeds = f" of each of {together} seeds" if together > 1 else ""
        raise ValueError(
            f"a gradient step on {steps:,} environment steps{seeds} keeps {needed / 2**30:.1f} GiB "
            f"for its backward pass, and {available / 2**30:.1f} GiB of memory are available; at "
            f"most {steps * available // needed:,} steps fit: {advice}"
        )


def load_config(run: Run) -> TrainConfig | HostConfig:
    """The configuration of a run."""
    if "task" in run.config:
        raise ValueError(
            f"{run.folder} is a run of `agalite lra {run.config['task']}`: a classifier, not an "
            "agent; use `agalite resume` or `agalite lra report`"
        )
    try:
        return config_from_dict(run.settings)
    except ValueError as error:
        raise ValueError(f"{run.folder / 'config.json'}: {error}") from error


def restore_latest(run: Run, checkpoints: Checkpoints, like: Any, *, note: str = "") -> Any | None:
    """The state of the newest undamaged checkpoint; None if none was saved yet.

    The run's log says which one, and which damaged ones were skipped.

    **Arguments:**

    - `like`: a state of the same structure; shapes are enough.
    - `note`: added to the line in the log.
    """
    try:
        with log_warnings(run):
            step, state = checkpoints.restore(like)
    except FileNotFoundError:  # there is none yet; if all are damaged, that is another error
        if run.read_summary() is not None:
            raise ValueError(
                f"{run.folder} has ended, as its summary.json says, but its checkpoints are gone: "
                "there is nothing to continue; train again, into another folder"
            ) from None
        run.log("resumed from the beginning: there is no checkpoint yet")
        return None
    run.log(f"resumed from step {step}{note}")
    return state


@contextmanager
def log_warnings(run: Run) -> Iterator[None]:
    """Writes warnings to the run's log, as well as showing them."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for w in caught:
            run.log(f"warning: {w.message}")
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)


def already_finished(run: Run, config: UpdateSchedule, update: Any, *, quiet: bool = True) -> bool:
    """Whether a resumed run had reached its end before; if so, its summary is left as it is."""
    summary = run.read_summary()
    reached = int(np.max(np.asarray(update))) >= config.updates
    finished = summary is not None and (reached or bool(summary.get("stopped_at_success")))
    if finished:
        run.log(_NOTHING_LEFT)
        if not quiet:
            print(_NOTHING_LEFT, file=sys.stderr)
    return finished


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Catches Ctrl-C and SIGTERM; yields a list that then holds the signal's number.

    A later second signal raises `KeyboardInterrupt`. One right after the first counts as the same
    request: `timeout`, for example, signals the process and then its group.
    """
    received: list[int] = []
    first = math.inf

    def handle(number: int, _: Any) -> None:
        nonlocal first
        now = time.monotonic()
        if not received:
            received.append(number)
            first = now
        elif now - first > _SAME_REQUEST:
            raise KeyboardInterrupt

    try:
        before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread may handle signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def mean_over_seeds(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the seeds that have a finite value for it."""
    out = {}
    for name in rows[0]:
        numbers = [row[name] for row in rows if math.isfinite(row[name])]
        out[name] = sum(numbers) / len(numbers) if numbers else math.nan
    return out


def check_losses(
    run: Run, rows: list[dict[str, float]], step: int, checkpoints: Checkpoints
) -> None:
    """Raises `Diverged` if a loss is not finite, before that state is saved."""
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


class SuccessWindow:
    """Whether a run may end early: the success rates of the last steps (`stop_at_success`).

    **Arguments:**

    - `run`: its metrics.csv has the rows of earlier sessions.
    - `threshold`: the success rate of every seed; None: never.
    - `total_timesteps`: of the run.
    """

    def __init__(self, run: Run, threshold: float | None, total_timesteps: int) -> None:
        self._run, self._threshold = run, threshold
        self._steps = max(1, min(200_000, total_timesteps // 10))

    def reached(self, step: int) -> bool:
        """Whether the rows up to `step` reach the threshold."""
        if self._threshold is None or step < self._steps:
            return False
        table = read_metrics(self._run.folder)
        late = table["step"] > step - self._steps
        ended = np.nan_to_num(table["charts/episodes"])
        successes = np.nan_to_num(table[SUCCESS]) * ended
        for seed in np.unique(table["seed"]):
            rows = late & (table["seed"] == seed)
            if successes[rows].sum() < self._threshold * max(1.0, ended[rows].sum()):
                return False
        return True


def finish(
    run: Run,
    config: Config,
    *,
    parameters: int,
    seconds: float,
    updates: int,
    stopped_at_success: bool = False,
) -> None:
    """Writes the summary of a run that has ended and draws its learning curve.

    **Arguments:**

    - `parameters`: the size of the network.
    - `seconds`, `updates`: of this session.
    - `stopped_at_success`: whether it has ended before all of its steps (`SuccessWindow`).
    """
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
            "seeds": config.num_seeds,
            "parameters": parameters,
            **({"stopped_at_success": True} if stopped_at_success else {}),
            "last_tenth": means,
            "seconds_of_this_session": round(seconds, 1),
            "steps_per_second_of_this_session": round(
                updates * config.steps_per_update * config.num_seeds / max(seconds, 1e-9), 1
            ),
        }
    )
    shown = [name for name in (RETURN, SUCCESS) if np.isfinite(table.get(name, np.nan)).any()]
    if shown:
        plots.curve([run.folder], run.curve_path, metric=shown)
    else:
        run.log("no episode has ended: there is no curve to draw")
    run.log(f"ended: {means}")
