"""What happened in a log interval of an asynchronous run, as one row of metrics."""

import time

import numpy as np
from jaxtyping import Int

from agalite.training.trajectory import Delivery, mean, merge

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
