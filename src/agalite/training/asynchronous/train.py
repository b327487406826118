"""What happened in a log interval of an asynchronous run, as one row of metrics."""

import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Int

from agalite.envs.gymnasium.workers import Fault
from agalite.system import Stopped
from agalite.training.asynchronous.learner import Learner, LearnerState, Network
from agalite.training.asynchronous.queue import Delivery, Trajectory, mean, merge, stack
from agalite.training.asynchronous.ray import RayActors
from agalite.training.asynchronous.threads import LocalActors
from agalite.training.asynchronous.worker import TooManyFaults
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig
from agalite.training.logging import Bar, MetricsWriter, read_metrics
from agalite.training.run import Run
from agalite.training.session import (
    RETURN,
    asked_to_stop,
    ended,
    finish,
    refuse_divergence,
    restored,
)

_EPISODES = ("episodic_return", "episodic_length")


class Tally:
    """`names` are those of the rows written so far, if any: every row has the same."""

    def __init__(self, names: list[str]) -> None:
        self._names = set(names)
        self._clear()

    def _clear(self) -> None:
        self.updates = 0
        self._losses: list[dict[str, float]] = []
        self._lags: list[np.ndarray] = []
        self._waiting: list[int] = []
        self._idle = 0.0
        self._began = time.perf_counter()

    def wait(self, seconds: float) -> None:
        """The learner had nothing to learn from."""
        self._idle += seconds

    def add(self, losses: dict[str, float], lags: Int[np.ndarray, "N B"], waiting: int) -> None:
        """An update; `lags` in updates, of each sequence; `waiting` rollouts in the queue."""
        self.updates += 1
        self._losses.append(losses)
        self._lags.append(lags)
        self._waiting.append(waiting)

    def row(self, steps_per_update: int, news: list[Delivery]) -> dict[str, float]:
        """All metrics since the last row. NaN where there is nothing to say."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        episodes: dict[str, tuple[float, int]] = {}
        for delivery in news:
            episodes = merge(episodes, delivery.episodes)
        acted = sum(delivery.seconds for delivery in news)
        lags = np.concatenate([lag.ravel() for lag in self._lags])
        row = {
            **{name: float(np.mean([x[name] for x in self._losses])) for name in self._losses[0]},
            **{f"charts/{name}": mean(episodes, name) for name in (*episodes, *_EPISODES)},
            "charts/episodes": float(episodes.get("episodic_return", (0.0, 0))[1]),
            "charts/SPS": self.updates * steps_per_update / seconds,
            "charts/policy_lag": float(lags.mean()),
            "charts/policy_lag_max": float(lags.max()),
            "charts/queue": float(np.mean(self._waiting)),
            "charts/learner_idle": self._idle / seconds,
            "charts/actor_stalled": sum(d.stalled for d in news) / acted if acted else np.nan,
            "charts/faults": float(sum(delivery.faults for delivery in news)),
            "charts/lost_rollouts": float(sum(delivery.lost for delivery in news)),
        }
        self._clear()
        # A name that an environment comes up with later has no column.
        self._names = self._names or set(row)
        missing = {name: float("nan") for name in self._names}
        return {**missing, **{name: x for name, x in row.items() if name in self._names}}


# --- Training where the environments are the slow part: acting and learning go on side by side ----

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
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
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
    run: Run,
    learner: Learner,
    place: Placement,
    state: LearnerState,
    checkpoints: Checkpoints,
    *,
    quiet: bool,
) -> None:
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
        run,
        config,
        parameters=learner.network.parameter_count,
        seconds=time.perf_counter() - began,
        updates=done - first,
    )
