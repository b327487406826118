"""Training a run from its beginning, or from where it stopped, to its end."""

import contextlib
import os
import signal
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from agalite.process import Stopped
from agalite.training import asynchronous, wandb_log
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig, TrainConfig
from agalite.training.loop import Trainer, TrainState
from agalite.training.metrics import MetricsWriter
from agalite.training.progress import Bar
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.session import (
    RETURN,
    SUCCESS,
    Diverged,
    asked_to_stop,
    config_of,
    ended,
    finish,
    mean,
    refuse_divergence,
    remember_programs,
    restored,
)

__all__ = [
    "RETURN",
    "SUCCESS",
    "Diverged",
    "config_of",
    "remember_programs",
    "resume",
    "train",
]


def train(
    config: TrainConfig | HostConfig, folder: str | os.PathLike[str], *, quiet: bool = False,
    wandb: bool = False, ray: str | None = None,
) -> Run:  # fmt: skip
    """Trains into a new folder; see `TrainConfig`. On Ctrl-C it saves and raises `Stopped`.

    `wandb`: the metrics also go to Weights & Biases, now and whenever the run is resumed. `ray`:
    the actors of a `HostConfig` are on the cluster at this address ("auto" finds it).
    """
    if wandb:
        wandb_log.check()
    _only_for_hosts(config, ray)
    remember_programs()
    if isinstance(config, HostConfig):
        with (
            contextlib.closing(asynchronous.place_actors(config, ray)) as place,
            Run.create(folder, config.to_dict()) as run,
        ):
            if wandb:
                wandb_log.mark(run)
            _announce(run, quiet=quiet)
            asynchronous.train(run, config, place, resumed=False, quiet=quiet)
        return run
    trainer = Trainer(config)
    with Run.create(folder, config.to_dict()) as run:
        if wandb:
            wandb_log.mark(run)
        _announce(run, quiet=quiet)
        run.log(f"begun: {config.env}, {config.memory}, {trainer.parameter_count:,} parameters")
        seeds = Seeds(config.seeds)
        state = seeds.begin(trainer.begin, config.seed_numbers)
        _continue(run, trainer, seeds, state, quiet=quiet)
    return run


def _announce(run: Run, *, quiet: bool) -> None:
    """Only now: whatever was wrong with the configuration or the folder has been said before."""
    if not quiet:
        print(f"training into {run.folder}", file=sys.stderr)


def resume(folder: str | os.PathLike[str], *, quiet: bool = False, ray: str | None = None) -> Run:
    """Goes on from the newest whole checkpoint, to the same end as if it had never stopped.

    Environments of Gymnasium cannot be restored: there it is what was learned that goes on.
    """
    remember_programs()
    with Run.open(folder, write=True) as run:
        config = config_of(run)
        _only_for_hosts(config, ray)
        if isinstance(config, HostConfig):
            with contextlib.closing(asynchronous.place_actors(config, ray)) as place:
                asynchronous.train(run, config, place, resumed=True, quiet=quiet)
            return run
        trainer, seeds = Trainer(config), Seeds(config.seeds)
        checkpoints = Checkpoints(run.checkpoints_folder, config.keep)
        saved = restored(run, checkpoints, seeds.shapes(trainer.begin, config.seed_numbers))
        if saved is None:
            state = seeds.begin(trainer.begin, config.seed_numbers)
        else:
            state = seeds.put(saved)
        if not ended(run, config, state.update, quiet=quiet):
            _continue(run, trainer, seeds, state, quiet=quiet)
    return run


def _only_for_hosts(config: TrainConfig | HostConfig, ray: str | None) -> None:
    if ray is not None and isinstance(config, TrainConfig):
        raise ValueError(
            f"ray={ray!r}: {config.env} is a JAX environment, part of the compiled program; "
            "Ray is for environments of Gymnasium"
        )


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
        MetricsWriter(run, config.seeds, done * per_update, quiet=quiet) as metrics,
        Bar(total * per_update, done * per_update, quiet=quiet) as bar,
        asked_to_stop() as asked,
    ):
        while done < total:
            count = min(log_every - done % log_every, total - done)
            start = time.perf_counter()
            state, values = advance(state, jnp.int32(count))
            rows = _rows(values, config.seeds)
            rate = count * per_update * config.seeds / (time.perf_counter() - start)
            done += count
            step = done * per_update
            refuse_divergence(run, rows, step, checkpoints)
            metrics.write(step, [{**row, "charts/SPS": rate} for row in rows])
            bar.update(step, rate, mean(rows))
            due = done // save_every > (done - count) // save_every
            if due or done == total or asked:
                checkpoints.save(step, state, mean(rows).get(RETURN))
            if asked and done < total:
                run.log(f"stopped at step {step} by {signal.Signals(asked[0]).name}; all is saved")
                raise Stopped(asked[0], run.folder)
    finish(
        run, config, parameters=trainer.parameter_count, seconds=time.perf_counter() - began,
        updates=done - first,
    )  # fmt: skip


def _rows(values: dict[str, Any], seeds: int) -> list[dict[str, float]]:
    host = {name: np.asarray(x, np.float64) for name, x in values.items()}
    return [{name: float(x[i]) for name, x in host.items()} for i in range(seeds)]
