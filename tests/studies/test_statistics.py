"""Statistics over seeds."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.studies import statistics

numbers = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)


@given(numbers)
@settings(deadline=None, max_examples=50)
def test_interquartile_mean_is_scipys_trimmed_mean(values):
    ours = statistics.interquartile_mean(np.array(values))
    assert ours == pytest.approx(scipy.stats.trim_mean(values, 0.25), abs=1e-9)


@given(numbers, numbers)
@settings(deadline=None, max_examples=50)
def test_probability_of_improvement_counts_pairs(x, y):
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in x for b in y]
    ours = statistics.probability_of_improvement(np.array(x), np.array(y))
    assert ours == pytest.approx(sum(pairs) / len(pairs))


def test_summary_of_seeds():
    values = np.array([1.0, 2.0, 3.0, 6.0, np.nan])
    s = statistics.summarise(values)
    assert (s.seeds, s.mean, s.interquartile_mean) == (4, 3.0, 2.5)
    assert s.standard_error == pytest.approx(scipy.stats.sem(values[:4]))
    assert s.low < 3.0 < s.high
    one = statistics.summarise(np.array([2.0]))
    assert (one.seeds, one.mean, one.low, one.high) == (1, 2.0, 2.0, 2.0)
    assert math.isnan(one.standard_error)
    assert statistics.summarise(np.array([np.nan])).seeds == 0


def _table():
    """Two seeds, six lines each; the episodes differ in number."""
    step = np.repeat(np.arange(100, 700, 100), 2)
    seed = np.tile([0, 1], 6)
    rng = np.random.default_rng(0)
    episodes = rng.integers(0, 5, 12).astype(float)
    success = np.where(episodes > 0, rng.random(12), np.nan)
    return {"step": step, "seed": seed, "charts/episodes": episodes, "charts/success": success}


def test_last_steps_are_a_mean_over_episodes():
    table = _table()
    ours = statistics.mean_of_last_steps(table, "charts/success", 250)
    for seed in (0, 1):
        total = count = 0.0
        for i in range(12):
            if table["seed"][i] == seed and table["step"][i] > 350 and table["charts/episodes"][i]:
                count += table["charts/episodes"][i]
                total += table["charts/episodes"][i] * table["charts/success"][i]
        assert ours[seed] == pytest.approx(total / count)


def test_bins_hold_what_falls_into_them():
    table = _table()
    ends, curves = statistics.binned_curves(table, "charts/success", 3)
    np.testing.assert_array_equal(ends, [200, 400, 600])
    for seed in (0, 1):
        for i, end in enumerate(ends):
            mine = (table["seed"] == seed) & (table["step"] > end - 200) & (table["step"] <= end)
            weights = table["charts/episodes"][mine]
            if weights.sum():
                want = np.nansum(weights * table["charts/success"][mine]) / weights.sum()
                assert curves[seed, i] == pytest.approx(want)
            else:
                assert np.isnan(curves[seed, i])


def test_a_run_that_ended_early_goes_on_with_its_last_mean():
    table = _table()  # 600 steps
    ends, curves = statistics.binned_curves(table, "charts/success", 6, total=1200)
    np.testing.assert_array_equal(ends, [200, 400, 600, 800, 1000, 1200])
    short = statistics.binned_curves(table, "charts/success", 3)[1]
    np.testing.assert_array_equal(curves[:, :3], short)
    np.testing.assert_array_equal(curves[:, 3:], np.repeat(short[:, -1:], 3, axis=1))


def test_difference_interval_covers_the_truth():
    rng = np.random.default_rng(1)
    hits = 0
    for i in range(200):
        x, y = rng.normal(1.0, 1.0, 20), rng.normal(0.0, 2.0, 30)
        low, high = statistics.difference_interval(x, y, resamples=400, seed=i)
        hits += low <= 1.0 <= high
    assert 175 <= hits <= 200  # 95%, a little less for a bootstrap of few samples
