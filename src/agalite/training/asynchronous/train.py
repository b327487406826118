"""The asynchronous training loop: take a batch of trajectories, update, publish, log, save.

The data flow is drawn in the package's docstring. Environments cannot be restored: a resumed run
continues with the weights and the optimiser's state of its checkpoint and new episodes.
"""

import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jaxtyping import Int

from agalite.envs.gymnasium.workers import EnvError
from agalite.system import Stopped
from agalite.training.asynchronous.learner import Learner, LearnerState, Network
from agalite.training.asynchronous.queue import (
    ActorStats,
    EpisodeSums,
    Trajectory,
    episode_mean,
    merge_episodes,
    stack,
)
from agalite.training.asynchronous.ray import RayActors
from agalite.training.asynchronous.threads import ThreadActors
from agalite.training.asynchronous.worker import TooManyFaults
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig
from agalite.training.diagnostics import Diagnostics
from agalite.training.logging import MetricsWriter, ProgressBar, read_metrics
from agalite.training.run import Run
from agalite.training.session import (
    RETURN,
    already_finished,
    check_losses,
    check_memory,
    finish,
    restore_latest,
    stop_signals,
)

_POLL_INTERVAL = 0.2  # seconds between two checks whether the run is to stop
_EPISODE_METRICS = ("episodic_return", "episodic_length")


class Actors(Protocol):
    """The actors of a run: `start`, then `take` and `publish` in turn, then `close`."""

    spaces: tuple[Any, Any]
    """The observation space and the action space of one environment."""

    def start(
        self, network: Network, version: int, weights: Any, log: Callable[[str], None]
    ) -> None:
        """Begin to act with these weights; `log` takes lines for the run's log."""
        ...

    def take(self, count: int, timeout: float) -> list[Trajectory] | None:
        """The `count` oldest trajectories, or None if there are fewer after `timeout` seconds.

        Raises what an actor raised, for example `TooManyFaults`.
        """
        ...

    def publish(self, version: int, weights: Any) -> None:
        """Give the actors new weights; `version` is the number of updates that made them."""
        ...

    @property
    def queued(self) -> int:
        """The number of trajectories that wait for the learner."""
        ...

    def pop_stats(self) -> list[ActorStats]:
        """What the actors did since the last call."""
        ...

    def close(self) -> None:
        """End all actors and environments, whatever they are doing."""
        ...


def make_actors(config: HostConfig, ray: str | None) -> Actors:
    """The actors of a run, not started yet.

    Makes the first environments, so that what they lack is reported before there is a run.

    **Arguments:**

    - `config`: of the run.
    - `ray`: the address of a Ray cluster for the actors, or "auto"; None for threads.
    """
    try:
        return ThreadActors(config) if ray is None else RayActors(config, ray)
    except EnvError as error:
        raise ValueError(str(error)) from error


def make_learner(config: HostConfig, actors: Actors) -> Learner:
    """The learner of a run, for the spaces of its environments.

    A configuration that does not fit them is refused here, before there is a run.

    **Arguments:**

    - `config`: of the run.
    - `actors`: from `make_actors`.
    """
    check_memory(config, actors.spaces[0])
    return Learner(config, Network(config, *actors.spaces))


def train(
    run: Run, learner: Learner, actors: Actors, *, resumed: bool, quiet: bool = False
) -> None:
    """Train a run to its end.

    **Arguments:**

    - `run`: open for writing.
    - `learner`: from `make_learner`.
    - `actors`: from `make_actors`; closed at the end.
    - `resumed`: continue from the newest checkpoint rather than from the beginning.
    - `quiet`: show no progress.
    """
    config = learner.config
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
    try:
        state = None
        if resumed:
            note = "; environments cannot be restored, all of them begin new episodes"
            state = restore_latest(run, checkpoints, learner.state_shapes(), note=note)
        else:
            run.log(
                f"started: {config.env}, {config.memory}, "
                f"{learner.network.parameter_count:,} parameters"
            )
        if state is None:
            state = learner.init(np.uint32(config.seed))
        if not already_finished(run, config, state.update, quiet=quiet):
            _TrainingLoop(run, learner, actors, state, checkpoints).run(quiet=quiet)
    finally:
        actors.close()


class _TrainingLoop:
    """Trains from `state` to the end of the run."""

    def __init__(
        self,
        run: Run,
        learner: Learner,
        actors: Actors,
        state: LearnerState,
        checkpoints: Checkpoints,
    ) -> None:
        self._run, self._learner, self._actors = run, learner, actors
        self._state, self._checkpoints = state, checkpoints
        self._config = learner.config
        self._updates = self._saved = int(state.update)
        names = [name for name in read_metrics(run.folder) if name not in ("step", "seed")]
        self._interval = IntervalMetrics(names)
        self._last_return: float | None = None

    @property
    def _step(self) -> int:
        return self._updates * self._config.steps_per_update

    def run(self, *, quiet: bool) -> None:
        config = self._config
        total_updates, first_update = config.updates, self._updates
        log_every = config.in_updates(config.log_every)
        save_every = config.in_updates(config.checkpoint_every)
        total_steps = total_updates * config.steps_per_update
        began = time.perf_counter()
        with (
            MetricsWriter(self._run, 1, self._step, quiet=quiet) as metrics,
            ProgressBar(total_steps, self._step, quiet=quiet) as bar,
            stop_signals() as signals,
        ):
            self._metrics, self._bar = metrics, bar
            action_space = self._actors.spaces[1]
            self._diagnostics = Diagnostics(self._run, config, action_space, quiet=quiet)
            network = self._learner.network
            self._actors.start(network, self._updates, self._state.weights, self._run.log)
            while self._updates < total_updates:
                self._update(self._wait_for_batch(signals))
                last = self._updates == total_updates
                if self._updates % log_every == 0 or last:
                    self._log()
                    if last or self._updates // save_every > self._saved // save_every:
                        self._save()
        finish(
            self._run,
            config,
            parameters=network.parameter_count,
            seconds=time.perf_counter() - began,
            updates=self._updates - first_update,
        )

    def _wait_for_batch(self, signals: list[int]) -> list[Trajectory]:
        """The trajectories of one update. Saves and raises if there are none or a signal came."""
        start = time.perf_counter()
        batch = None
        try:
            while batch is None and not signals:
                batch = self._actors.take(self._config.rollouts, _POLL_INTERVAL)
        except Exception as error:
            self._stop_after(error)
        if batch is None:
            self._save_progress()
            name = signal.Signals(signals[0]).name
            self._run.log(f"stopped at step {self._step} by {name}; all is saved")
            raise Stopped(signals[0], self._run.folder)
        self._interval.add_idle(time.perf_counter() - start)
        return batch

    def _update(self, batch: list[Trajectory]) -> None:
        rollout, initial_states, versions = stack(batch)
        state, losses = self._learner.update(self._state, rollout, initial_states)
        losses = {name: float(x) for name, x in jax.block_until_ready(losses).items()}
        step = (self._updates + 1) * self._config.steps_per_update
        check_losses(self._run, [losses], step, self._checkpoints)
        # Published when they are computed: actors would otherwise wait for them.
        self._state = jax.block_until_ready(state)
        self._updates += 1
        self._actors.publish(self._updates, self._state.weights)
        self._interval.add_update(losses, self._updates - 1 - versions, self._actors.queued)

    def _log(self) -> None:
        row = self._interval.pop_row(self._config.steps_per_update, self._actors.pop_stats())
        self._metrics.write(self._step, [row])
        self._bar.update(self._step, row["charts/SPS"], row)
        self._diagnostics.add(self._step, [row], self._state.opt_state)
        self._last_return = row.get(RETURN)

    def _save(self) -> None:
        self._checkpoints.save(self._step, self._state, self._last_return)
        self._saved = self._updates

    def _save_progress(self) -> None:
        """Save the updates since the last checkpoint, with a row of metrics for them."""
        if self._updates > self._saved:
            if self._interval.updates:
                self._log()
            self._save()

    def _stop_after(self, error: Exception) -> NoReturn:
        self._save_progress()
        self._run.log(f"stopped at step {self._step}: {error}")
        if not isinstance(error, TooManyFaults):
            raise error
        if self._updates:
            rest = f"what was learned is saved: agalite resume {self._run.folder}"
        else:
            rest = "nothing had been learned yet"
        raise TooManyFaults(f"{error}; {rest}") from error


class IntervalMetrics:
    """Collects the metrics of a log interval.

    **Arguments:**

    - `names`: the names of the rows written so far, if any. Every row has the same names.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = set(names)
        self._clear()

    def _clear(self) -> None:
        self.updates = 0
        self._losses: list[dict[str, float]] = []
        self._lags: list[np.ndarray] = []
        self._queued: list[int] = []
        self._idle = 0.0
        self._began = time.perf_counter()

    def add_idle(self, seconds: float) -> None:
        """The learner waited for a batch."""
        self._idle += seconds

    def add_update(
        self, losses: dict[str, float], lags: Int[np.ndarray, "N B"], queued: int
    ) -> None:
        """An update: its losses, the policy lag of each sequence, the length of the queue."""
        self.updates += 1
        self._losses.append(losses)
        self._lags.append(lags)
        self._queued.append(queued)

    def pop_row(self, steps_per_update: int, stats: list[ActorStats]) -> dict[str, float]:
        """The metrics since the last row; NaN where there is no value."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        episodes: EpisodeSums = {}
        for s in stats:
            episodes = merge_episodes(episodes, s.episodes)
        acted = sum(s.seconds for s in stats)
        lags = np.concatenate([lag.ravel() for lag in self._lags])
        episode_metrics = (*episodes, *_EPISODE_METRICS)
        row = {
            **{name: float(np.mean([x[name] for x in self._losses])) for name in self._losses[0]},
            **{f"charts/{name}": episode_mean(episodes, name) for name in episode_metrics},
            "charts/episodes": float(episodes.get("episodic_return", (0.0, 0))[1]),
            "charts/SPS": self.updates * steps_per_update / seconds,
            "charts/policy_lag": float(lags.mean()),
            "charts/policy_lag_max": float(lags.max()),
            "charts/queue": float(np.mean(self._queued)),
            "charts/learner_idle": self._idle / seconds,
            "charts/actor_stalled": sum(s.stalled for s in stats) / acted if acted else np.nan,
            "charts/faults": float(sum(s.faults for s in stats)),
            "charts/lost_rollouts": float(sum(s.lost for s in stats)),
        }
        self._clear()
        # A metric that an environment first reports later has no column.
        self._names = self._names or set(row)
        missing = {name: float("nan") for name in self._names}
        return {**missing, **{name: x for name, x in row.items() if name in self._names}}
