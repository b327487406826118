"""Training where the environments are the slow part: acting and learning go on side by side.

    actors ---- whole rollouts ---> queue ---> learner
       ^                                         |
       +------------ newest weights -------------+

An actor (`actor.py`) owns environments, acts with the newest weights there are and hands over whole
rollouts, one environment's at a time, each with the memory its sequences began with and the version
of the weights that acted (`trajectory.py`). The queue (`exchange.py`) is bounded, so that nobody's
policy grows old in it. The learner (`learner.py`) corrects for the age that is left (`agents/appo`)
and publishes its weights without keeping anyone waiting. Where actors run is up to a placement:
threads here (`local.py`), actors of Ray anywhere (`cluster.py`).

This file is the run around them: its log, metrics, checkpoints and ends. A checkpoint holds what
was learned. It cannot hold environments: a resumed run begins new episodes in all of them.
"""

import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from agalite.envs.workers import Fault
from agalite.process import Stopped
from agalite.training.checkpoint import Checkpoints
from agalite.training.cluster import RayActors
from agalite.training.config import HostConfig
from agalite.training.group import TooManyFaults
from agalite.training.learner import Learner, LearnerState
from agalite.training.local import LocalActors
from agalite.training.metrics import MetricsWriter, read_metrics
from agalite.training.network import Network
from agalite.training.progress import Bar
from agalite.training.run import Run
from agalite.training.session import (
    RETURN,
    asked_to_stop,
    ended,
    finish,
    refuse_divergence,
    restored,
)
from agalite.training.tally import Tally
from agalite.training.trajectory import Delivery, Trajectory, stack

_GLANCE = 0.2  # seconds between two looks at whether somebody wants the run to stop

_NEW_EPISODES = (
    ": what was learned is restored; environments cannot be, so all of them begin new episodes"
)


class Placement(Protocol):
    """Where the actors are. `close` ends them all, whatever they are doing."""

    spaces: tuple[Any, Any]
    """Of observations and of actions."""

    def start(
        self, network: Network, version: int, weights: Any, tell: Callable[[str], None]
    ) -> None: ...
    def take(self, count: int, timeout: float) -> list[Trajectory] | None: ...
    def publish(self, version: int, weights: Any) -> None: ...
    def news(self) -> list[Delivery]: ...
    def close(self) -> None: ...

    @property
    def waiting(self) -> int: ...


def place_actors(config: HostConfig, ray: str | None) -> Placement:
    """Looks for what the environments need, and says what is missing before there is a run.

    `ray`: the address of a cluster for the actors, or "auto"; None: they are threads.
    """
    try:
        return LocalActors(config) if ray is None else RayActors(config, ray)
    except Fault as error:
        raise ValueError(str(error)) from error


def train(
    run: Run, config: HostConfig, place: Placement, *, resumed: bool, quiet: bool = False
) -> None:
    """Trains into an open run, from its beginning or (`resumed`) from its newest checkpoint."""
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep)
    try:
        network = Network(config, *place.spaces)
        learner = Learner(config, network)
        state = None
        if resumed:
            state = restored(run, checkpoints, learner.like(), but=_NEW_EPISODES)
        else:
            run.log(f"begun: {config.env}, {config.memory}, {network.parameter_count:,} parameters")
        if state is None:
            state = learner.begin(np.uint32(config.seed))
        if not ended(run, config, state.update, quiet=quiet):
            _continue(run, learner, place, state, checkpoints, quiet=quiet)
    finally:
        place.close()


def _continue(
    run: Run, learner: Learner, place: Placement, state: LearnerState, checkpoints: Checkpoints,
    *, quiet: bool,
) -> None:  # fmt: skip
    config = learner.config
    done = first = int(state.update)
    per_update, total = config.steps_per_update, config.updates
    log_every = config.in_updates(config.log_every)
    save_every = config.in_updates(config.checkpoint_every)
    began = time.perf_counter()
    names = [name for name in read_metrics(run.folder) if name not in ("step", "seed")]
    with (
        MetricsWriter(run, 1, done * per_update, quiet=quiet) as metrics,
        Bar(total * per_update, done * per_update, quiet=quiet) as bar,
        asked_to_stop() as asked,
    ):
        tally, row, saved = Tally(names), {}, done
        place.start(learner.network, done, state.weights, run.log)

        def note() -> dict[str, float]:
            """Write down what happened since the last time."""
            row = tally.row(per_update, place.news())
            metrics.write(done * per_update, [row])
            bar.update(done * per_update, row["charts/SPS"], row)
            return row

        def save_all(row: dict[str, float]) -> None:
            """As it is now, in the middle of an interval: what is learned is never lost."""
            if done > saved:
                row = note() if tally.updates else row
                checkpoints.save(done * per_update, state, row.get(RETURN))

        while done < total:
            start = time.perf_counter()
            batch = None
            try:
                while batch is None and not asked:
                    batch = place.take(config.rollouts, _GLANCE)
            except TooManyFaults as error:
                save_all(row)
                rest = (
                    f"what was learned is saved: agalite resume {run.folder}"
                    if done
                    else "nothing had been learned yet"
                )
                run.log(f"stopped at step {done * per_update}: {error}")
                raise TooManyFaults(f"{error}; {rest}") from error
            except Exception as error:
                save_all(row)
                run.log(f"stopped at step {done * per_update}: {error}")
                raise
            if batch is None:
                save_all(row)
                name = signal.Signals(asked[0]).name
                run.log(f"stopped at step {done * per_update} by {name}; all is saved")
                raise Stopped(asked[0], run.folder)
            tally.wait(time.perf_counter() - start)
            rollout, starts, versions = stack(batch)
            new, losses = learner.update(state, rollout, starts)
            # Published once they are there: actors would otherwise wait for them.
            numbers = {name: float(x) for name, x in jax.block_until_ready(losses).items()}
            refuse_divergence(run, [numbers], (done + 1) * per_update, checkpoints)
            state, done = jax.block_until_ready(new), done + 1
            place.publish(done, state.weights)
            tally.add(numbers, done - 1 - versions, place.waiting)
            if done % log_every == 0 or done == total:
                row = note()
                if done == total or done // save_every > saved // save_every:
                    checkpoints.save(done * per_update, state, row.get(RETURN))
                    saved = done
    finish(
        run, config, parameters=learner.network.parameter_count,
        seconds=time.perf_counter() - began, updates=done - first,
    )  # fmt: skip
