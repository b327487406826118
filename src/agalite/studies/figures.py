"""Draws the figures of a study: SVG for the page, PNG files beside it."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from agalite.charts import COLOURS, INK, new_figure, style_axes, unit_range
from agalite.studies.aggregate import aggregates
from agalite.studies.declaration import (
    Figure,
    Heatmap,
    LearningCurves,
    LinePlot,
    Ranking,
    SeedDots,
)
from agalite.studies.results import Results
from agalite.studies.statistics import Summary, summarise
from agalite.training.plots import bootstrap_interval

_COLOURS = (*COLOURS, "#999999")
_MARKERS = "osD^vPX*"
_PANEL_WIDTH, _PANEL_HEIGHT = 4.6, 3.1  # inches
_PANELS_PER_ROW = 3


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as it goes into a report."""

    name: str
    title: str
    svg: str
    png: bytes
    error_bands: bool
    """Whether it has any."""


def draw(results: Results) -> list[DrawnFigure]:
    """Draws every declared figure that there are results for."""
    drawn = []
    for i, figure in enumerate(results.study.figures):
        function, kind = _KINDS[type(figure)]
        name = f"{i + 1}-{kind}"
        canvas = function(results, figure)
        if canvas is None:
            continue
        bands = (
            not isinstance(figure, Heatmap | SeedDots | Ranking)
            and not results.study.metrics[0].exact
        )
        svg = _to_svg(canvas, f"{results.study.name}-{name}")
        title = figure.title or _default_title(results, figure)
        drawn.append(DrawnFigure(name, title, svg, _to_png(canvas), bands))
    return drawn


def _draw_line_plot(results: Results, figure: LinePlot) -> Any:
    metric = results.study.metric(figure.metric)
    labels = results.labels(figure.x)
    panels = _panel_labels(results, figure.panels)
    if not labels or not _has_values(results, metric.column):
        return None
    numbers = _as_numbers(labels)
    positions = numbers if numbers is not None else list(range(len(labels)))
    canvas, axes = _make_panels(len(panels))
    for panel, ax in zip(panels, axes, strict=False):
        for i, line in enumerate(results.labels(figure.lines)):
            levels = {figure.lines: line, **({figure.panels: panel} if figure.panels else {})}
            summaries = [
                summarise(results.values({**levels, figure.x: label}, metric.column))
                for label in labels
            ]
            points = [
                (x, s.mean, *_error_band(s, results.study.error_bands))
                for x, s in zip(positions, summaries, strict=True)
                if s.seeds
            ]
            if not points:
                continue
            x, middle, low, high = np.array(sorted(points), float).T
            colour = _COLOURS[i % len(_COLOURS)]
            if len(x) == 1 or numbers is None:  # there is no line that could have a band
                errors = [middle - low, high - middle]
                ax.errorbar(x, middle, errors, fmt="none", ecolor=colour, alpha=0.6, capsize=3)
            else:
                ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            ax.plot(
                x,
                middle,
                color=colour,
                marker=_MARKERS[i % len(_MARKERS)],
                markersize=4,
                linewidth=1.5,
                label=line,
                linestyle="-" if numbers else "",
            )
        if numbers is None:
            tilt = {"rotation": 30, "ha": "right"} if sum(map(len, labels)) > 40 else {}
            ax.set_xticks(positions, labels, **tilt)
        elif len(labels) <= 8 and not figure.log:
            ax.set_xticks(positions, labels)
        if figure.log:
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
        title = _panel_title(figure.panels, panel)
        _style(ax, _to_words(figure.x), metric.name, title, rate=_is_rate(metric.name))
    _add_legend(canvas, axes)
    return canvas


def _draw_learning_curves(results: Results, figure: LearningCurves) -> Any:
    # Of each panel: its title, the levels it selects, the column it shows.
    if figure.columns:
        names = results.columns(figure.columns)
        panels = [(_to_words(name.rsplit("/", 1)[-1]), {}, name) for name in names]
    else:
        column = results.study.metrics[0].column
        panels = [
            (
                _panel_title(figure.panels, label),
                {figure.panels: label} if figure.panels else {},
                column,
            )
            for label in _panel_labels(results, figure.panels)
        ]
    if not panels or not results.points:
        return None
    canvas, axes = _make_panels(len(panels), small=len(panels) > 9)
    empty = True
    for (title, levels, column), ax in zip(panels, axes, strict=False):
        for i, line in enumerate(results.labels(figure.lines)):
            found = results.curve({**levels, figure.lines: line}, column, figure.bins)
            if found is None:
                continue
            empty = False
            colour = _COLOURS[i % len(_COLOURS)]
            _draw_curve(ax, *found, colour, line, results.study.error_bands)
        _format_steps(ax)
        label = _to_words(column.rsplit("/", 1)[-1])
        y = "" if figure.columns else label
        _style(ax, "environment steps", y, title, rate=_is_rate(label))
    _add_legend(canvas, axes)
    return None if empty else canvas


def _draw_curve(
    ax: Any,
    steps: Float[np.ndarray, " bins"],
    curves: Float[np.ndarray, "seeds bins"],
    colour: str,
    label: str,
    error_bands: str,
) -> None:
    """The mean over seeds with its band, where every seed has a value; few seeds are drawn too."""
    several = len(curves) > 1
    if several and len(curves) <= 5:
        for curve in curves:
            ax.plot(steps, curve, color=colour, linewidth=0.6, alpha=0.3)
    known = np.isfinite(curves).all(0)
    marker = {"marker": "o", "markersize": 3} if known.sum() == 1 else {}
    x, values = steps[known], curves[:, known]
    if several and len(x):
        mean = values.mean(0)
        if error_bands == "standard error":
            half = values.std(0, ddof=1) / np.sqrt(len(values))
            low, high = mean - half, mean + half
        else:
            low, high = bootstrap_interval(values)
        ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    ax.plot(x, values.mean(0), color=colour, linewidth=1.7, label=label, **marker)


def _draw_heatmap(results: Results, figure: Heatmap) -> Any:
    from matplotlib.colors import LogNorm

    metric = results.study.metrics[0]
    xs, ys = results.labels(figure.x), results.labels(figure.y)
    panels = _panel_labels(results, figure.panels)
    if not xs or not ys:
        return None

    def mean(panel: str, x: str, y: str) -> float:
        levels = {figure.panels: panel} if figure.panels else {}
        return summarise(results.values({**levels, figure.x: x, figure.y: y}, metric.column)).mean

    grids = np.array([[[mean(panel, x, y) for x in xs] for y in ys] for panel in panels], float)
    positive = grids[np.isfinite(grids) & (grids > 0)]
    if not len(positive):
        return None
    norm = LogNorm(max(positive.min(), positive.max() * 1e-4), positive.max())
    canvas, axes = _make_panels(len(panels))
    mesh: Any = None
    for panel, grid, ax in zip(panels, grids, axes, strict=False):
        mesh = ax.pcolormesh(np.clip(grid, norm.vmin, None), norm=norm, cmap="viridis")
        for labels, set_ticks in ((xs, ax.set_xticks), (ys, ax.set_yticks)):
            some = slice(None, None, max(1, -(-len(labels) // 10)))  # about ten ticks
            set_ticks(np.arange(len(labels))[some] + 0.5, np.array(labels)[some])
        title = _panel_title(figure.panels, panel)
        _style(ax, _to_words(figure.x), _to_words(figure.y), title)
        ax.grid(False)
    canvas.colorbar(mesh, ax=list(axes), label=metric.name, shrink=0.9)
    return canvas


def _draw_seed_dots(results: Results, figure: SeedDots) -> Any:
    metric = results.study.metrics[0]
    found = {
        label: values
        for label in results.labels(figure.rows)
        if len(values := results.values({figure.rows: label}, metric.column))
    }
    if not found:
        return None
    labels = sorted(found, key=lambda label: float(np.median(found[label])))
    canvas = new_figure(6.4, max(2.4, 1.0 + 0.22 * len(labels)))
    ax = canvas.subplots()
    for row, label in enumerate(labels):
        values = found[label]
        ax.plot(values, [row] * len(values), "o", color=COLOURS[0], markersize=4, alpha=0.6)
        ax.plot(np.median(values), row, "|", color=INK, markersize=10, markeredgewidth=1.5)
    ax.set_yticks(range(len(labels)), labels)
    _style(ax, f"{metric.name}; the line is the median of the seeds", "", "")
    return canvas


def _draw_ranking(results: Results, figure: Ranking) -> Any:
    del figure
    found = aggregates(results)
    if not found:
        return None
    tasks = max(len(a.tasks) for a in found)
    canvas = new_figure(6.8, max(2.4, 1.0 + 0.26 * len(found)))
    ax = canvas.subplots()
    for row, a in enumerate(reversed(found)):
        ax.barh(row, a.high - a.low, left=a.low, height=0.62, color=COLOURS[0], alpha=0.35)
        ax.plot([a.mean, a.mean], [row - 0.31, row + 0.31], color=INK, linewidth=1.6)
    # One with fewer tasks is not comparable with the others.
    names = [a.label if len(a.tasks) == tasks else f"{a.label} ({len(a.tasks)})" for a in found]
    ax.set_yticks(range(len(found)), names[::-1])
    _style(ax, f"interquartile mean of the score over {tasks} tasks, 95% interval", "", "")
    ax.set_xlim(0, 1)
    return canvas


_KINDS: dict[type, tuple[Callable[[Results, Any], Any], str]] = {
    LinePlot: (_draw_line_plot, "line-plot"),
    LearningCurves: (_draw_learning_curves, "learning-curves"),
    Heatmap: (_draw_heatmap, "heatmap"),
    SeedDots: (_draw_seed_dots, "seeds"),
    Ranking: (_draw_ranking, "ranking"),
}


def _panel_labels(results: Results, factor: str | None) -> list[str]:
    return results.labels(factor) if factor else [""]


def _panel_title(factor: str | None, label: str) -> str:
    """The label; a number is given its factor, as in "corridor 20"."""
    return f"{_to_words(factor or '')} {label}" if _as_numbers([label]) is not None else label


def _has_values(results: Results, column: str) -> bool:
    return any(np.isfinite(p.values.get(column, np.zeros(0))).any() for p in results.points)


def _error_band(summary: Summary, error_bands: str) -> tuple[float, float]:
    if summary.seeds < 2:
        return summary.mean, summary.mean
    if error_bands == "standard error":
        return summary.mean - summary.standard_error, summary.mean + summary.standard_error
    return summary.low, summary.high


def _as_numbers(labels: Sequence[str]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def _make_panels(count: int, *, small: bool = False) -> tuple[Any, list[Any]]:
    columns = min(count, 6 if small else _PANELS_PER_ROW)
    rows = -(-count // columns)
    width, height = (2.4, 1.8) if small else (_PANEL_WIDTH, _PANEL_HEIGHT)
    if count == 1:
        width, height = 6.4, 4.0
    canvas = new_figure(columns * width, rows * height + 0.5)
    axes = list(np.atleast_1d(canvas.subplots(rows, columns)).ravel())
    for ax in axes[count:]:
        ax.set_axis_off()
    return canvas, axes[:count]


def _style(ax: Any, x: str, y: str, title: str, *, rate: bool = False) -> None:
    ax.set_xlabel(x, color=INK, fontsize=9)
    ax.set_ylabel(y, color=INK, fontsize=9)
    if title:
        ax.set_title(title, color=INK, fontsize=10)
    style_axes(ax, size=8)
    if rate:
        unit_range(ax)


def _is_rate(name: str) -> bool:
    return name.startswith("success")


def _format_steps(ax: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def _add_legend(canvas: Any, axes: Sequence[Any]) -> None:
    """One legend above all panels, with as many columns as fit."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        columns = int(canvas.get_figwidth() * 13) // (max(map(len, found)) + 8)
        canvas.legend(
            list(found.values()),
            list(found),
            loc="outside upper center",
            ncols=max(1, min(len(found), columns)),
            frameon=False,
            labelcolor=INK,
            fontsize=9,
        )


def _default_title(results: Results, figure: Figure) -> str:
    metric = results.study.metrics[0].name
    if isinstance(figure, LinePlot):
        metric = results.study.metric(figure.metric).name
        return f"{metric} against {_to_words(figure.x)}"
    if isinstance(figure, Heatmap):
        return f"{metric} over {_to_words(figure.x)} and {_to_words(figure.y)}"
    if isinstance(figure, Ranking):
        return "score over all tasks"
    if isinstance(figure, SeedDots):
        return f"{metric} of every seed"
    return "learning curves" + (f" of {figure.columns}" if figure.columns else "")


def _to_words(name: str) -> str:
    return name.replace("_", " ")


def _to_svg(canvas: Any, salt: str) -> str:
    import matplotlib

    # Text stays text, which is small and can be searched. The salt makes the identifiers of
    # different figures differ: all of them are in one page.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings):
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Groups have the same identifiers in every figure, and nothing refers to them.
    return re.sub(r'<g id="[^"]*"', "<g", text)


def _to_png(canvas: Any) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
