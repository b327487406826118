"""Learning curves: the mean over a run's seeds, how sure it is, and the seeds themselves."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from agalite import files, validation
from agalite.charts import COLOURS, INK, blank, dress, whole_range
from agalite.training.logging import read_metrics

# --- How sure a mean is ---------------------------------------------------------------------------

_AT_ONCE = 2**20  # resampled values held in memory at a time


def bootstrap_interval(
    values: Float[np.ndarray, "N ..."],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """values (N, ...) -> low (...), high (...): where the mean over the N lies.

    The percentile bootstrap: the N samples are drawn anew with replacement, whole rows at a time,
    and the interval holds the middle of the means so found. With one sample it has no width; with a
    handful it is too narrow, as any interval is that sees nothing but the samples.
    """
    values = np.asarray(values, np.float64)
    if values.ndim == 0 or len(values) == 0:
        raise ValueError(f"values has shape {values.shape}; expected at least one sample")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be between 0 and 1")
    validation.integer("resamples", resamples, minimum=1)
    validation.finite("values", values)
    count, rows = len(values), values.reshape(len(values), -1)
    rng = np.random.default_rng(seed)
    share = np.full(count, 1 / count)
    # How often each sample is drawn is all that a mean needs to know, and it makes the means one
    # matrix product. Around the centre, so that equal samples have an interval of no width.
    centre = rows.mean(0)
    step = max(1, _AT_ONCE // count)
    means = [
        rng.multinomial(count, share, size=min(step, resamples - i)) @ (rows - centre) / count
        for i in range(0, resamples, step)
    ]
    tail = (1 - confidence) / 2
    low, high = centre + np.quantile(np.concatenate(means), (tail, 1 - tail), axis=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


FORMATS = (".png", ".svg")
_NAMES = {"success": "success rate", "SPS": "steps a second"}


class Curves(NamedTuple):
    """One metric of one run on steps common to its seeds; NaN where a seed has nothing."""

    steps: Int[np.ndarray, " N"]
    seeds: Float[np.ndarray, "S N"]


# What a run is about: an agent's return, else a classifier's accuracy.
_MAIN = ("charts/episodic_return", "charts/validation_accuracy")


def main_metric(folder: str | os.PathLike[str]) -> str:
    table = read_metrics(folder)
    return next((name for name in _MAIN if name in table), _MAIN[0])


def curve(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    metric: str | Sequence[str] = "charts/episodic_return",
    smooth: int | None = None,
    steps: str = "environment steps",
) -> None:
    """A picture, PNG or SVG by its suffix, with a line for each run and a panel for each metric.

    The line is the mean over seeds, the band its 95% bootstrap interval, the thin lines the seeds.
    `smooth` is the number of logged points that each drawn one is the mean of, those before it; 1
    is none, None a fiftieth of all. A run's line covers the steps that all its seeds have reached.
    `steps` says what a step is.
    """
    path, metrics = Path(out), [metric] if isinstance(metric, str) else list(metric)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"out={str(path)!r} must end in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"out={str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if not folders or not metrics:
        raise ValueError(f"folders={list(folders)!r}, metric={metric!r}: at least one of each")
    if smooth is not None:
        validation.integer("smooth", smooth, minimum=1)
    tables = {Path(folder): read_metrics(folder) for folder in folders}
    labels = _labels(list(tables))
    figure = _figure(len(metrics))
    for axes, name in zip(figure.axes, metrics, strict=True):
        for i, (folder, table) in enumerate(tables.items()):
            curves = common_steps(table, name, folder)
            colour = COLOURS[i % len(COLOURS)]
            _draw(axes, Curves(curves.steps, _smoothed(curves.seeds, smooth)), labels[i], colour)
        _dress(axes, name)
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
    """A run's metrics, line by line, as a curve for each seed.

    Where a seed has no number, because no episode ended, its curve is a straight line from the last
    one to the next; before its first and after its last number there is nothing.
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


def _smoothed(curves: Float[np.ndarray, "S N"], window: int | None) -> Float[np.ndarray, "S N"]:
    """Means over the `window` points that end at each; over fewer at the beginning."""
    if window is None:
        window = max(1, curves.shape[1] // 50)
    known = np.isfinite(curves)
    totals = np.cumsum(np.where(known, curves, 0.0), axis=1)
    counts = np.cumsum(known, axis=1)
    totals[:, window:] -= totals[:, :-window].copy()
    counts[:, window:] -= counts[:, :-window].copy()
    return np.where(known, totals / np.maximum(counts, 1), np.nan)


def _figure(panels: int) -> Any:
    figure = blank(7, 1.0 + 2.9 * panels)
    figure.subplots(panels, sharex=True)
    return figure


def _draw(axes: Any, curves: Curves, label: str, colour: str) -> None:
    steps, seeds = curves
    alone = len(seeds) == 1
    # A point alone makes no line: show it.
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


def _dress(axes: Any, metric: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_ylabel(_readable(metric), color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    dress(axes)
    if metric.endswith("success"):
        whole_range(axes)


def _readable(metric: str) -> str:
    """charts/episodic_return -> episodic return; losses/value -> value loss."""
    group, _, name = metric.rpartition("/")
    words = _NAMES.get(name, name).replace("_", " ")
    return f"{words} loss" if group == "losses" and "loss" not in words else words


def _labels(folders: list[Path]) -> list[str]:
    """Names of the runs, with as much of the path as tells them apart."""
    resolved = [folder.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(set(resolved)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in resolved]
