"""Statistics over seeds: the paper's, and two that Agarwal et al. (2021) recommend.

The paper reports means with standard errors or 95% bootstrap intervals. Beside them are the
interquartile mean and the probability of improvement.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from agalite import validation
from agalite.training.plots import bootstrap_interval

EPISODES = "charts/episodes"


class Summary(NamedTuple):
    """Statistics of one number per seed."""

    seeds: int
    mean: float
    standard_error: float
    """NaN with one seed."""
    low: float
    high: float
    """95% bootstrap interval of the mean."""
    interquartile_mean: float


def summarise(values: Float[np.ndarray, " seeds"]) -> Summary:
    """The statistics of the finite values; a seed in which no episode ended has NaN."""
    values = np.asarray(values, np.float64)
    return _summarise(values[np.isfinite(values)].tobytes())


@lru_cache(maxsize=4096)  # a page shows the same numbers in figures and in tables
def _summarise(data: bytes) -> Summary:
    values = np.frombuffer(data)
    if len(values) == 0:
        return Summary(0, *[np.nan] * 5)
    low, high = bootstrap_interval(values)
    return Summary(
        len(values),
        float(values.mean()),
        standard_error(values),
        float(low),
        float(high),
        interquartile_mean(values),
    )


def standard_error(values: Float[np.ndarray, " N"]) -> float:
    """The standard error of the mean; NaN for one value."""
    if len(values) < 2:
        return np.nan
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def interquartile_mean(values: Float[np.ndarray, " N"]) -> float:
    """The mean without a quarter of the values, rounded down, at each end."""
    values = np.sort(np.asarray(values, np.float64))
    cut = len(values) // 4
    return float(values[cut : len(values) - cut].mean())


def probability_of_improvement(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " M"]) -> float:
    """The probability that a seed of x exceeds a seed of y; ties count half (Mann-Whitney)."""
    x, y = np.asarray(x, np.float64)[:, None], np.asarray(y, np.float64)[None, :]
    return float(np.mean((x > y) + 0.5 * (x == y)))


def difference_interval(
    x: Float[np.ndarray, " N"],
    y: Float[np.ndarray, " M"],
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> tuple[float, float]:
    """A bootstrap interval of mean(x) - mean(y); x and y are resampled independently."""
    return _interval(x, y, np.subtract, confidence, resamples, seed)


def ratio_interval(
    x: Float[np.ndarray, " N"],
    y: Float[np.ndarray, " M"],
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> tuple[float, float]:
    """A bootstrap interval of mean(x) / mean(y); x and y are resampled independently."""
    return _interval(x, y, np.divide, confidence, resamples, seed)


def _interval(
    x: Float[np.ndarray, " N"],
    y: Float[np.ndarray, " M"],
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
    confidence: float,
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    means = [
        rng.multinomial(len(v), np.full(len(v), 1 / len(v)), size=resamples) @ v / len(v)
        for v in (x, y)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(combine(means[0], means[1]), (tail, 1 - tail))
    return float(low), float(high)


def mean_of_last_steps(
    table: Mapping[str, np.ndarray], column: str, last_steps: int
) -> Float[np.ndarray, " seeds"]:
    """The mean of a metric over the episodes that ended in the last steps of a run.

    **Arguments:**

    - `table`: the columns of metrics.csv. A row is the mean over the episodes of its interval, so
      it is weighted by their number.
    - `column`: the metric.
    - `last_steps`: how many steps count.

    **Returns:**

    A number per seed; NaN for a seed in which no episode ended.
    """
    validation.check_integer("last_steps", last_steps, minimum=1, maximum=validation.LARGEST_COUNT)
    steps = table["step"]
    late = steps > steps.max() - last_steps
    late |= steps == steps.max()
    seeds = np.unique(table["seed"])
    return np.array([_mean(table, column, late & (table["seed"] == seed)) for seed in seeds])


def binned_curves(
    table: Mapping[str, np.ndarray], column: str, bins: int, total: int | None = None
) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, "seeds bins"]]:
    """A learning curve per seed: means over equal parts of a run.

    **Arguments:**

    - `table`: the columns of metrics.csv.
    - `column`: the metric.
    - `bins`: the number of parts; fewer if the table has fewer steps.
    - `total`: the steps of the run. One that has ended early, because it had succeeded
      (`stop_at_success`), goes on with its last part's mean.

    **Returns:**

    The steps at which the parts end, and the means; NaN where no episode ended.
    """
    validation.check_integer("bins", bins, minimum=1)
    steps, seeds = table["step"], np.unique(table["seed"])
    end = max(int(steps.max()), total or 0)
    bins = min(bins, max(1, round(len(np.unique(steps)) * end / int(steps.max()))))
    ends = end * np.arange(1, bins + 1) / bins
    part = np.searchsorted(ends, steps)
    curves = [
        [_mean(table, column, (table["seed"] == seed) & (part == i)) for i in range(bins)]
        for seed in seeds
    ]
    found = np.array(curves)
    last = int(part.max())
    found[:, last + 1 :] = found[:, last : last + 1]
    return ends, found


def _mean(table: Mapping[str, np.ndarray], column: str, rows: np.ndarray) -> float:
    values = table[column][rows]
    known = np.isfinite(values)
    if not known.any():
        return np.nan
    per_episode = column.startswith("charts/") and EPISODES in table and column != EPISODES
    weights = table[EPISODES][rows][known] if per_episode else np.ones(known.sum())
    return float(np.average(values[known], weights=weights)) if weights.sum() > 0 else np.nan
