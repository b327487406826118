"""Training a run from its beginning, or from where it stopped, to its end."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agalite.process import Stopped
from agalite.training import plots
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import TrainConfig
from agalite.training.loop import Trainer, TrainState
from agalite.training.metrics import MetricsWriter, read_metrics
from agalite.training.progress import Bar
from agalite.training.run import Run
from agalite.training.seeds import Seeds

RETURN, SUCCESS = "charts/episodic_return", "charts/success"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agalite" / "jax"


class Diverged(ValueError):
    """A loss is no longer a number."""


def train(config: TrainConfig, folder: str | os.PathLike[str], *, quiet: bool = False) -> Run:
    """Trains into a new folder; see `TrainConfig`. On Ctrl-C it saves and raises `Stopped`."""
    remember_programs()
    trainer = Trainer(config)
    with Run.create(folder, config.to_dict()) as run:
        run.log(f"begun: {config.env}, {config.memory}, {trainer.parameter_count:,} parameters")
        seeds = Seeds(config.seeds)
        state = seeds.compile(trainer.begin)(seeds.put(config.seed_numbers))
        _continue(run, trainer, seeds, state, quiet=quiet)
    return run


def resume(folder: str | os.PathLike[str], *, quiet: bool = False) -> Run:
    """Goes on from the newest whole checkpoint, to the same end as if it had never stopped."""
    remember_programs()
    with Run.open(folder, write=True) as run:
        config = config_of(run)
        trainer, seeds = Trainer(config), Seeds(config.seeds)
        checkpoints = Checkpoints(run.checkpoints_folder, config.keep)
        try:
            like = jax.eval_shape(seeds.over(trainer.begin), config.seed_numbers)
            step, state = checkpoints.restore(like)
        except FileNotFoundError:  # none was made yet; if all are damaged, that is an error
            state = seeds.compile(trainer.begin)(seeds.put(config.seed_numbers))
            run.log("resumed from the beginning: there is no checkpoint yet")
        else:
            state = seeds.put(state)
            run.log(f"resumed from step {step}")
        _continue(run, trainer, seeds, state, quiet=quiet)
    return run


def config_of(run: Run) -> TrainConfig:
    added = ("format", "versions")
    return TrainConfig.from_dict({k: v for k, v in run.config.items() if k not in added})


def remember_programs() -> None:
    """Compiled programs are kept on disk: a second run starts at once."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(_CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _continue(run: Run, trainer: Trainer, seeds: Seeds, state: TrainState, *, quiet: bool) -> None:
    config = trainer.config
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep)
    advance = seeds.compile(trainer.advance, shared=1, donate=True)
    done = int(np.asarray(state.update)[0])
    per_update, total = config.steps_per_update, config.updates
    log_every = config.in_updates(config.log_every)
    save_every = config.in_updates(config.checkpoint_every)
    began = time.perf_counter()
    first = done
    with (
        MetricsWriter(run, config.seeds, done * per_update) as metrics,
        Bar(total * per_update, done * per_update, quiet=quiet) as bar,
        _asked_to_stop() as asked,
    ):
        while done < total:
            count = min(log_every - done % log_every, total - done)
            start = time.perf_counter()
            state, values = advance(state, jnp.int32(count))
            rows = _rows(values, config.seeds)
            rate = count * per_update * config.seeds / (time.perf_counter() - start)
            done += count
            step = done * per_update
            _refuse_divergence(run, rows, step, checkpoints)
            metrics.write(step, [{**row, "charts/SPS": rate} for row in rows])
            bar.update(step, rate, _mean(rows))
            due = done // save_every > (done - count) // save_every
            if due or done == total or asked:
                checkpoints.save(step, state, _mean(rows).get(RETURN))
            if asked and done < total:
                run.log(f"stopped at step {step} by {signal.Signals(asked[0]).name}; all is saved")
                raise Stopped(asked[0])
    _finish(run, trainer, seconds=time.perf_counter() - began, updates=done - first)


def _rows(values: dict[str, Any], seeds: int) -> list[dict[str, float]]:
    host = {name: np.asarray(x, np.float64) for name, x in values.items()}
    return [{name: float(x[i]) for name, x in host.items()} for i in range(seeds)]


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over the seeds; over those in which an episode ended, where it is of episodes."""
    out = {}
    for name in rows[0]:
        numbers = [row[name] for row in rows if math.isfinite(row[name])]
        out[name] = sum(numbers) / len(numbers) if numbers else math.nan
    return out


def _refuse_divergence(
    run: Run, rows: list[dict[str, float]], step: int, checkpoints: Checkpoints
) -> None:
    for seed, row in enumerate(rows):
        for name, value in row.items():
            if name.startswith("losses/") and not math.isfinite(value):
                latest = checkpoints.latest()
                where = (
                    "there is no checkpoint"
                    if latest is None
                    else (f"the last good checkpoint is of step {latest}")
                )
                message = (
                    f"{name} of seed number {seed} became {value} by step {step}; {where} in "
                    f"{run.checkpoints_folder}. A smaller learning rate or gradient norm may help"
                )
                run.log(message)
                raise Diverged(message)


def _finish(run: Run, trainer: Trainer, *, seconds: float, updates: int) -> None:
    config = trainer.config
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
            "seeds": config.seeds,
            "parameters": trainer.parameter_count,
            "last_tenth": means,
            "seconds_of_this_session": round(seconds, 1),
            "steps_per_second_of_this_session": round(
                updates * config.steps_per_update * config.seeds / max(seconds, 1e-9), 1
            ),
        }
    )
    shown = [name for name in (RETURN, SUCCESS) if name in table]
    plots.curve([run.folder], run.curve_path, metric=shown)
    run.log(f"ended: {means}")


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that holds the signal's number once somebody pressed Ctrl-C or sent SIGTERM.

    A second Ctrl-C is not so patient: it interrupts at once.
    """
    asked: list[int] = []

    def note(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

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
