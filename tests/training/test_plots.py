"""Learning curves and intervals."""

import math
import sys

import matplotlib.image
import numpy as np
import pytest

from agalite.training import plots
from agalite.training.logging import MetricsWriter
from agalite.training.plots import _smooth, bootstrap_interval, common_steps, curve
from agalite.training.run import Run


def make(folder, rows, seeds=2):
    """rows: (step, value of each seed, ...)"""
    with Run.create(folder, {}) as run, MetricsWriter(run, seeds) as metrics:
        for step, *values in rows:
            metrics.write(
                step, [{"charts/episodic_return": x, "charts/success": 0.5} for x in values]
            )
    return folder


# The interval


def test_interval_holds_the_true_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    samples = rng.exponential(size=(60, 400))  # 60 samples, 400 times; the mean is 1
    low, high = bootstrap_interval(samples, confidence=0.9)
    held = ((low <= 1) & (high >= 1)).mean()
    assert 0.83 < held < 0.94  # 0.9 were there infinitely many samples


def test_interval_is_what_drawing_anew_gives():
    values = np.array([0.0, 0.0, 1.0, 5.0])
    low, high = bootstrap_interval(values, confidence=0.8, resamples=20_000, seed=3)
    drawn = np.random.default_rng(1).choice(values, (20_000, 4)).mean(1)
    assert (float(low), float(high)) == tuple(np.quantile(drawn, [0.1, 0.9]))  # means are few
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)


def test_interval_of_one_sample_or_equal_ones_has_no_width():
    for values in (np.array([[2.5, -1.0]]), np.full((7, 2), 0.1)):
        low, high = bootstrap_interval(values)
        np.testing.assert_allclose(low, values[0], rtol=1e-15)
        np.testing.assert_array_equal(low, high)


def test_interval_of_many_samples_needs_little_memory():
    low, high = bootstrap_interval(np.random.default_rng(0).normal(size=300_000), resamples=50)
    assert -0.01 < low < high < 0.01


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, r"values has shape \(0,\)"),
        (1.0, {}, r"values has shape \(\)"),
        ([1, math.nan], {}, r"values\[1\] is nan"),
        ([1], {"confidence": 1.0}, "confidence=1.0"),
        ([1], {"resamples": 0}, "resamples=0"),
    ],
)
def test_interval_of_nonsense(values, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values, **options)


# From lines to curves


def test_gaps_are_bridged_and_nothing_is_carried_beyond(tmp_path):
    nan = math.nan
    folder = make(tmp_path / "a", [(1, nan, nan), (2, 1, nan), (4, nan, 0), (6, 3, 8), (8, nan, 9)])
    table = plots.read_metrics(folder)
    steps, seeds = common_steps(table, "charts/episodic_return", folder)
    assert steps.tolist() == [2, 4, 6, 8]
    np.testing.assert_array_equal(seeds, [[1, 2, 3, nan], [nan, 0, 8, 9]])


def test_smoothing_looks_back_and_ignores_what_is_missing():
    nan = math.nan
    curves = np.array([[1.0, 3, 5, 7, 9], [nan, 2, 4, 6, nan]])
    np.testing.assert_allclose(_smooth(curves, 2), [[1, 2, 4, 6, 8], [nan, 2, 3, 5, nan]])
    np.testing.assert_array_equal(_smooth(curves, 1), curves)
    np.testing.assert_allclose(_smooth(curves, 99)[0], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(_smooth(curves, None), curves)  # five points need none


# The picture


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    lines = [(i * 2000, *(i / 25 + rng.normal(size=3))) for i in range(1, 30)]
    return [make(folder / name, lines, seeds=3) for name in ("first", "second")]


def test_png_of_several_runs_and_metrics(runs, tmp_path):
    out = tmp_path / "curve.png"
    before = set(sys.modules)
    curve(runs, out, metric=["charts/episodic_return", "charts/success"], smooth=3)
    picture = matplotlib.image.imread(out)
    height, width, _ = picture.shape
    assert width == 1050
    assert height > 900  # two panels
    colours = {tuple(c) for c in (picture[:, :, :3] * 255).round().astype(int).reshape(-1, 3)}
    for run in (0, 1):
        assert tuple(bytes.fromhex(plots.COLOURS[run][1:])) in colours
    assert "matplotlib.pyplot" not in set(sys.modules) - before
    assert [p.name for p in tmp_path.glob(".curve*")] == []


def test_svg_names_the_runs(runs, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        curve(runs, tmp_path / "curve.svg")
    text = (tmp_path / "curve.svg").read_text()
    for words in ("first", "second", "environment steps", "episodic return", "50k"):
        assert f">{words}<" in text


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
    assert plots._labels(paths) == ["x/run", "y/run"]
    assert plots._labels(paths[:1]) == ["run"]


@pytest.mark.parametrize("rows", [[(5, 1.0)], [(5, 1.0), (10, 2.0), (15, math.nan)]])
def test_short_runs_of_one_seed_are_drawn(tmp_path, rows):
    curve([make(tmp_path / "a", rows, seeds=1)], tmp_path / "a.png")
    picture = matplotlib.image.imread(tmp_path / "a.png")
    blue = np.array(list(bytes.fromhex(plots.COLOURS[0][1:]))) / 255
    assert (np.abs(picture[:, :, :3] - blue).max(-1) < 0.01).sum() >= 9


def test_pictures_that_cannot_be_drawn(runs, tmp_path):
    empty = make(tmp_path / "empty", [(1, math.nan, math.nan)])
    for folders, out, metric, message in [
        (runs, "a.jpg", "charts/success", r"must end in \.png or \.svg"),
        (runs, "none/a.png", "charts/success", "does not exist"),
        (runs, "a.png", "charts/reward", "first has no metric 'charts/reward'; it has: charts/epi"),
        (runs, "a.png", [], "at least one"),
        ([], "a.png", "charts/success", "at least one"),
        ([empty], "a.png", "charts/episodic_return", "no episode finished"),
    ]:
        with pytest.raises(ValueError, match=message):
            curve(folders, tmp_path / out, metric=metric)
    with pytest.raises(FileNotFoundError, match="is not a run"):
        curve([tmp_path / "nowhere"], tmp_path / "a.png")
    assert not list(tmp_path.glob("a.*"))
