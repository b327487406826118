"""The paper's statistics over seeds, and the two of rliable (Agarwal et al., 2021) beside them."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from agalite import errors
from agalite.training.statistics import bootstrap_interval

EPISODES = "charts/episodes"


class Summary(NamedTuple):
    """Of one number a seed."""

    seeds: int
    mean: float
    error: float
    """Standard error; NaN with one seed."""
    low: float
    high: float
    """95% bootstrap interval of the mean."""
    middle: float
    """Interquartile mean."""


def summarise(values: Float[np.ndarray, " seeds"]) -> Summary:
    """Seeds without a number (no episode ended) are left out."""
    values = np.asarray(values, np.float64)
    return _summary(values[np.isfinite(values)].tobytes())


@lru_cache(maxsize=4096)  # a page shows the same numbers in figures and in tables
def _summary(data: bytes) -> Summary:
    values = np.frombuffer(data)
    if len(values) == 0:
        return Summary(0, *[np.nan] * 5)
    low, high = bootstrap_interval(values)
    return Summary(
        len(values), float(values.mean()), standard_error(values), float(low), float(high),
        interquartile_mean(values),
    )  # fmt: skip


def standard_error(values: Float[np.ndarray, " N"]) -> float:
    if len(values) < 2:
        return np.nan
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def interquartile_mean(values: Float[np.ndarray, " N"]) -> float:
    """Mean of the middle half: a quarter of the values, rounded down, is left out at each end."""
    values = np.sort(np.asarray(values, np.float64))
    cut = len(values) // 4
    return float(values[cut : len(values) - cut].mean())


def probability_of_improvement(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " M"]) -> float:
    """That a seed of x has more than a seed of y; equal ones count half (Mann and Whitney)."""
    x, y = np.asarray(x, np.float64)[:, None], np.asarray(y, np.float64)[None, :]
    return float(np.mean((x > y) + 0.5 * (x == y)))


def difference_interval(
    x: Float[np.ndarray, " N"], y: Float[np.ndarray, " M"], *, confidence: float = 0.95,
    resamples: int = 4000, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """Where mean(x) - mean(y) lies: both are resampled, each for itself."""
    return _interval(x, y, np.subtract, confidence, resamples, seed)


def ratio_interval(
    x: Float[np.ndarray, " N"], y: Float[np.ndarray, " M"], *, confidence: float = 0.95,
    resamples: int = 4000, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """Where mean(x) / mean(y) lies."""
    return _interval(x, y, np.divide, confidence, resamples, seed)


def _interval(x, y, combine, confidence, resamples, seed):
    rng = np.random.default_rng(seed)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    means = [
        rng.multinomial(len(v), np.full(len(v), 1 / len(v)), size=resamples) @ v / len(v)
        for v in (x, y)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(combine(*means), (tail, 1 - tail))
    return float(low), float(high)


def last_steps(
    table: Mapping[str, np.ndarray], column: str, last: int
) -> Float[np.ndarray, " seeds"]:
    """Mean of a metric over the episodes that ended in the last so many steps, for each seed.

    A line of the table is the mean over the episodes of its interval, so it counts as many times as
    there were episodes. NaN for a seed in which none ended.
    """
    errors.integer("last", last, minimum=1)
    steps = table["step"]
    late = steps > steps.max() - last
    late |= steps == steps.max()
    seeds = np.unique(table["seed"])
    return np.array([_mean(table, column, late & (table["seed"] == seed)) for seed in seeds])


def binned(
    table: Mapping[str, np.ndarray], column: str, bins: int
) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, "seeds bins"]]:
    """A curve for each seed: means over `bins` equal parts of the run, and the steps they end at.

    NaN where no episode ended.
    """
    errors.integer("bins", bins, minimum=1)
    steps, seeds = table["step"], np.unique(table["seed"])
    bins = min(bins, len(np.unique(steps)))
    ends = steps.max() * np.arange(1, bins + 1) / bins
    part = np.searchsorted(ends, steps)
    curves = [
        [_mean(table, column, (table["seed"] == seed) & (part == i)) for i in range(bins)]
        for seed in seeds
    ]
    return ends, np.array(curves)


def _mean(table: Mapping[str, np.ndarray], column: str, rows: np.ndarray) -> float:
    values = table[column][rows]
    known = np.isfinite(values)
    if not known.any():
        return np.nan
    of_episodes = column.startswith("charts/") and EPISODES in table and column != EPISODES
    weights = table[EPISODES][rows][known] if of_episodes else np.ones(known.sum())
    return float(np.average(values[known], weights=weights)) if weights.sum() > 0 else np.nan
