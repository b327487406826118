"""Scores of several tasks together, for studies that compare models over tasks.

A score is 0 for what an agent without memory, or without learning, gets in a task, and 1 for the
best there is. Over tasks it is the interquartile mean over all tasks and seeds, with a bootstrap
interval in which the seeds of each task are resampled on their own (Agarwal et al., 2021).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from agalite.studies.declaration import SCORE, TASK
from agalite.studies.results import Point, Results
from agalite.studies.statistics import interquartile_mean

_RESAMPLES = 2000


@dataclass(frozen=True)
class Aggregate:
    """One level of the factor that is compared."""

    label: str
    mean: float
    """The interquartile mean over tasks and seeds."""
    low: float
    high: float
    """Its 95% interval."""
    tasks: dict[str, float]
    """The mean score of each task."""
    sooner: dict[str, float]
    """Steps until the score reaches `declaration.LEARNED`, the median over seeds; inf if most never
    do."""
    speed: float
    """Steps a second, the geometric mean over tasks."""
    parameters: int
    state: int


def aggregates(results: Results) -> list[Aggregate]:
    """One for each level with results, the best first; empty for studies without scores."""
    factor = results.study.compared
    if not results.study.scores or factor is None:
        return []
    found = []
    for label in results.labels(factor):
        points = [p for p in results.select({factor: label}) if np.isfinite(p.values[SCORE]).any()]
        if points:
            found.append(_aggregate(label, points))
    return sorted(found, key=lambda a: (-len(a.tasks), -a.mean))


def _aggregate(label: str, points: list[Point]) -> Aggregate:
    scores = {p.levels[TASK]: np.nan_to_num(p.values[SCORE]) for p in points}
    low, high = _interval(list(scores.values()))
    # Seeds that never got there count as infinitely late.
    steps = {
        p.levels[TASK]: float(np.median(np.nan_to_num(p.values["learned at"], nan=np.inf)))
        for p in points
    }
    speeds = [np.mean(p.values["charts/SPS"]) for p in points if "charts/SPS" in p.values]
    return Aggregate(
        label,
        interquartile_mean(np.concatenate(list(scores.values()))),
        low,
        high,
        {task: float(values.mean()) for task, values in scores.items()},
        steps,
        float(np.exp(np.mean(np.log(speeds)))) if speeds else np.nan,
        max(int(p.summary.get("parameters") or 0) for p in points),
        max(int(p.summary.get("state") or 0) for p in points),
    )


def _interval(tasks: list[Float[np.ndarray, " seeds"]]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    means = [
        interquartile_mean(np.concatenate([rng.choice(x, len(x)) for x in tasks]))
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def gap_closed(found: list[Aggregate], sees: str, blind: str) -> dict[str, float]:
    """The share of the observability gap that each level closes, the mean over tasks.

    **Arguments:**

    - `found`: what `aggregates` gave.
    - `sees`: the level without memory that observes the hidden state.
    - `blind`: the level without memory that does not.

    **Returns:**

    (its score - blind's) / (sees' - blind's) by label, over the tasks in which the two differ by at
    least 0.1; empty if there are none.
    """
    by_label = {a.label: a for a in found}
    if sees not in by_label or blind not in by_label:
        return {}
    top, bottom = by_label[sees].tasks, by_label[blind].tasks
    gaps = {t: top[t] - bottom[t] for t in top if t in bottom and top[t] - bottom[t] >= 0.1}
    return {
        a.label: float(np.mean([(a.tasks[t] - bottom[t]) / gaps[t] for t in gaps if t in a.tasks]))
        for a in found
        if any(t in a.tasks for t in gaps)
    }
