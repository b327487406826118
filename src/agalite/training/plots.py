"""Learning curves as pictures: the mean over a run's seeds, its interval, and the seeds."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from agalite import files, validation
from agalite.charts import COLOURS, INK, new_figure, style_axes, unit_range
from agalite.training.logging import read_metrics

FORMATS = (".png", ".svg")
_MAIN_METRICS = ("charts/episodic_return", "charts/validation_accuracy")
_LABELS = {"success": "success rate", "SPS": "steps per second"}
_MAX_RESAMPLED = 2**20  # resampled values in memory at a time


class Curves(NamedTuple):
    """One metric of one run on steps common to its seeds; NaN where a seed has no value."""

    steps: Int[np.ndarray, " N"]
    seeds: Float[np.ndarray, "S N"]


def main_metric(folder: str | os.PathLike[str]) -> str:
    """The metric that a run is judged by: an agent's return or a classifier's accuracy."""
    table = read_metrics(folder)
    return next((name for name in _MAIN_METRICS if name in table), _MAIN_METRICS[0])


def curve(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    metric: str | Sequence[str] = "charts/episodic_return",
    smooth: int | None = None,
    steps: str = "environment steps",
) -> None:
    """Draw learning curves: a panel for each metric, a line for each run.

    A line is the mean over seeds, the band its 95% bootstrap interval, the thin lines the seeds. It
    covers the steps that all seeds of the run have reached.

    **Arguments:**

    - `folders`: the folders of the runs.
    - `out`: the picture's path, which ends in .png or .svg.
    - `metric`: the name of a metric, or several.
    - `smooth`: how many logged points, the last of them the point itself, each drawn point is the
        mean of. 1 for none; None for a fiftieth of all points.
    - `steps`: the label of the horizontal axis.
    """
    path, metrics = Path(out), [metric] if isinstance(metric, str) else list(metric)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"out={str(path)!r} must end in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"out={str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if not folders or not metrics:
        raise ValueError(f"folders={list(folders)!r}, metric={metric!r}: at least one of each")
    if smooth is not None:
        validation.check_integer("smooth", smooth, minimum=1)
    tables = {Path(folder): read_metrics(folder) for folder in folders}
    labels = _labels(list(tables))
    figure = _figure(len(metrics))
    for axes, name in zip(figure.axes, metrics, strict=True):
        for i, (folder, table) in enumerate(tables.items()):
            curves = common_steps(table, name, folder)
            colour = COLOURS[i % len(COLOURS)]
            _draw(axes, Curves(curves.steps, _smooth(curves.seeds, smooth)), labels[i], colour)
        _label_axes(axes, name)
    figure.axes[-1].set_xlabel(steps, color=INK)
    if len(tables) > 1:
        columns = min(len(tables), 3)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=columns,
            frameon=False,
            labelcolor=INK,
        )
    else:
        several = len(np.unique(next(iter(tables.values()))["seed"])) > 1
        what = "mean over seeds with its 95% interval" if several else "one seed"
        figure.suptitle(f"{labels[0]}: {what}", color=INK, fontsize=11)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lower()[1:], dpi=150)
    files.write(path, drawn.getvalue())


def common_steps(table: dict[str, np.ndarray], metric: str, folder: Path) -> Curves:
    """One metric of a run as a curve for each seed.

    Where a seed has no value, because no episode ended, it is interpolated linearly; before its
    first and after its last value it is NaN.

    **Arguments:**

    - `table`: the run's metrics, from `read_metrics`.
    - `metric`: the name of the metric.
    - `folder`: the run's folder, for error messages.
    """
    if metric not in table or metric in ("step", "seed"):
        known = ", ".join(sorted(table.keys() - {"step", "seed"})) or "nothing yet"
        raise ValueError(f"{folder} has no metric {metric!r}; it has: {known}")
    known = np.isfinite(table[metric])
    if not known.any():
        raise ValueError(f"{folder} has no number for {metric} yet: was no episode finished?")
    steps = np.unique(table["step"][known])
    curves = []
    for seed in np.unique(table["seed"][known]):
        mine = known & (table["seed"] == seed)
        curves.append(
            np.interp(steps, table["step"][mine], table[metric][mine], left=np.nan, right=np.nan)
        )
    return Curves(steps, np.stack(curves))


def bootstrap_interval(
    values: Float[np.ndarray, "N ..."],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """The percentile bootstrap interval of a mean over samples.

    With one sample it has no width; with a handful it is too narrow.

    **Arguments:**

    - `values`: (N, ...), N samples, which are drawn with replacement as whole rows.
    - `confidence`: the share of resampled means inside the interval.
    - `resamples`: how many means are resampled.
    - `seed`: of the resampling.

    **Returns:**

    The bounds, low (...) and high (...).
    """
    values = np.asarray(values, np.float64)
    if values.ndim == 0 or len(values) == 0:
        raise ValueError(f"values has shape {values.shape}; expected at least one sample")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be between 0 and 1")
    validation.check_integer("resamples", resamples, minimum=1)
    validation.check_finite("values", values)
    count, rows = len(values), values.reshape(len(values), -1)
    rng = np.random.default_rng(seed)
    share = np.full(count, 1 / count)
    # A resampled mean depends only on how often each sample is drawn, so all means are one matrix
    # product. Centred, so that equal samples have an interval of no width.
    centre = rows.mean(0)
    step = max(1, _MAX_RESAMPLED // count)
    means = [
        rng.multinomial(count, share, size=min(step, resamples - i)) @ (rows - centre) / count
        for i in range(0, resamples, step)
    ]
    tail = (1 - confidence) / 2
    low, high = centre + np.quantile(np.concatenate(means), (tail, 1 - tail), axis=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def _smooth(curves: Float[np.ndarray, "S N"], window: int | None) -> Float[np.ndarray, "S N"]:
    """Means over the last `window` points; over fewer at the beginning."""
    if window is None:
        window = max(1, curves.shape[1] // 50)
    known = np.isfinite(curves)
    totals = np.cumsum(np.where(known, curves, 0.0), axis=1)
    counts = np.cumsum(known, axis=1)
    totals[:, window:] -= totals[:, :-window].copy()
    counts[:, window:] -= counts[:, :-window].copy()
    return np.where(known, totals / np.maximum(counts, 1), np.nan)


def _figure(panels: int) -> Any:
    figure = new_figure(7, 1.0 + 2.9 * panels)
    figure.subplots(panels, sharex=True)
    return figure


def _draw(axes: Any, curves: Curves, label: str, colour: str) -> None:
    steps, seeds = curves
    alone = len(seeds) == 1
    # A single point makes no line, so it gets a marker.
    dots = {"marker": "o", "markersize": 3} if len(steps) == 1 else {}
    if not alone:
        for seed in seeds:
            axes.plot(steps, seed, color=colour, linewidth=0.7, alpha=0.3, **dots)
    everywhere = np.isfinite(seeds).all(0)
    at, values = steps[everywhere], seeds[:, everywhere]
    if not alone and len(at):
        low, high = bootstrap_interval(values)
        axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(at, values.mean(0), color=colour, linewidth=1.8, label=label, **dots)


def _label_axes(axes: Any, metric: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_ylabel(_label(metric), color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    style_axes(axes)
    if metric.endswith("success"):
        unit_range(axes)


def _label(metric: str) -> str:
    """charts/episodic_return -> episodic return; losses/value -> value loss."""
    group, _, name = metric.rpartition("/")
    words = _LABELS.get(name, name).replace("_", " ")
    return f"{words} loss" if group == "losses" and "loss" not in words else words


def _labels(folders: list[Path]) -> list[str]:
    """The names of the runs, with as many parent folders as make them unique."""
    resolved = [folder.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(set(resolved)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in resolved]
