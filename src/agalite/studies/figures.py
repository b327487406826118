"""A study's figures, as SVG for the page and PNG for everything else."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agalite.charts import COLOURS, INK, blank, dress, whole_range
from agalite.studies.declaration import Against, Curves, Figure, Map
from agalite.studies.results import Results, summarise
from agalite.training.plots import bootstrap_interval

_COLOURS = (*COLOURS, "#999999")
_MARKS = "osD^vPX*"
_WIDE, _HIGH = 4.6, 3.1  # inches of a panel
_ACROSS = 3  # panels in a row


@dataclass(frozen=True)
class Drawn:
    name: str
    title: str
    svg: str
    png: bytes
    shaded: bool
    """Whether it shows how sure the means are."""


def draw(results: Results) -> list[Drawn]:
    """All that there are numbers for."""
    drawn = []
    for i, figure in enumerate(results.study.figures):
        name = f"{i + 1}-{type(figure).__name__.lower()}"
        made = _PAINTERS[type(figure)](results, figure)
        if made is not None:
            title = figure.title or _title(results, figure)
            svg = _svg(made, f"{results.study.name}-{name}")
            exact = results.study.metrics[0].exact
            shaded = not isinstance(figure, Map) and not exact
            drawn.append(Drawn(name, title, svg, _png(made), shaded))
    return drawn


def _against(results: Results, figure: Against) -> Any:
    metric = results.study.metric(figure.metric)
    labels = results.labels(figure.x)
    panels = _levels(results, figure.panels)
    if not labels or not _measured(results, metric.column):
        return None
    numeric = _numbers(labels)
    at = numeric if numeric is not None else list(range(len(labels)))
    made, axes = _panels(len(panels))
    for panel, ax in zip(panels, axes, strict=False):
        for i, line in enumerate(results.labels(figure.lines)):
            where = {figure.lines: line, **({figure.panels: panel} if figure.panels else {})}
            xs, middle, low, high = [], [], [], []
            for x, label in zip(at, labels, strict=True):
                values = results.values({**where, figure.x: label}, metric.column)
                s = summarise(values)
                if not s.seeds:
                    continue
                xs.append(x)
                middle.append(s.mean)
                down, up = _band(s, results.study.bands)
                low.append(down)
                high.append(up)
            if not xs:
                continue
            colour = _COLOURS[i % len(_COLOURS)]
            order = np.argsort(xs)
            xs, middle, low, high = (np.array(v, float)[order] for v in (xs, middle, low, high))
            if len(xs) == 1 or numeric is None:  # no line that could have a band
                ends = [middle - low, high - middle]
                ax.errorbar(xs, middle, ends, fmt="none", ecolor=colour, alpha=0.6, capsize=3)
            else:
                ax.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
            ax.plot(
                xs,
                middle,
                color=colour,
                marker=_MARKS[i % len(_MARKS)],
                markersize=4,
                linewidth=1.5,
                label=line,
                linestyle="-" if numeric else "",
            )
        if numeric is None:
            tilt = {"rotation": 30, "ha": "right"} if sum(map(len, labels)) > 40 else {}
            ax.set_xticks(at, labels, **tilt)
        elif len(labels) <= 8 and not figure.log:
            ax.set_xticks(at, labels)
        if figure.log:
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
        _dress(ax, _words(figure.x), metric.name, _panel(figure.panels, panel))
        _rate(ax, metric.name)
    _legend(made, axes)
    return made


def _curves(results: Results, figure: Curves) -> Any:
    column = results.study.metrics[0].column
    if figure.columns:
        names = results.columns(figure.columns)
        panels = [(name.rsplit("/", 1)[-1].replace("_", " "), {}, name) for name in names]
    else:
        panels = [
            (_panel(figure.panels, p), {figure.panels: p} if figure.panels else {}, column)
            for p in _levels(results, figure.panels)
        ]
    if not panels or not results.points:
        return None
    made, axes = _panels(len(panels), small=len(panels) > 9)
    some = False
    for (title, where, name), ax in zip(panels, axes, strict=False):
        for i, line in enumerate(results.labels(figure.lines)):
            found = results.curve({**where, figure.lines: line}, name, figure.bins)
            if found is None:
                continue
            steps, seeds = found
            some = True
            _curve(ax, steps, seeds, _COLOURS[i % len(_COLOURS)], line, results.study.bands)
        _steps_axis(ax)
        label = _words(name.rsplit("/", 1)[-1])
        _dress(ax, "environment steps", "" if figure.columns else label, title)
        _rate(ax, label)
    _legend(made, axes)
    return made if some else None


def _curve(ax: Any, steps: Any, seeds: Any, colour: str, label: str, bands: str) -> None:
    several = len(seeds) > 1
    if several and len(seeds) <= 5:
        for seed in seeds:
            ax.plot(steps, seed, color=colour, linewidth=0.6, alpha=0.3)
    known = np.isfinite(seeds).all(0)
    dots = {"marker": "o", "markersize": 3} if known.sum() == 1 else {}
    at, values = steps[known], seeds[:, known]
    if several and len(at):
        mean = values.mean(0)
        if bands == "standard error":
            half = values.std(0, ddof=1) / np.sqrt(len(values))
            low, high = mean - half, mean + half
        else:
            low, high = bootstrap_interval(values)
        ax.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    ax.plot(at, values.mean(0), color=colour, linewidth=1.7, label=label, **dots)


def _map(results: Results, figure: Map) -> Any:
    from matplotlib.colors import LogNorm

    metric = results.study.metrics[0]
    xs, ys = results.labels(figure.x), results.labels(figure.y)
    panels = _levels(results, figure.panels)
    if not xs or not ys:
        return None
    grids = []
    for panel in panels:
        where = {figure.panels: panel} if figure.panels else {}
        grids.append(
            [
                [
                    summarise(
                        results.values({**where, figure.x: x, figure.y: y}, metric.column)
                    ).mean
                    for x in xs
                ]
                for y in ys
            ]
        )
    grids = np.array(grids, float)
    positive = grids[np.isfinite(grids) & (grids > 0)]
    if not len(positive):
        return None
    norm = LogNorm(max(positive.min(), positive.max() * 1e-4), positive.max())
    made, axes = _panels(len(panels))
    shown: Any = None
    for panel, grid, ax in zip(panels, grids, axes, strict=False):
        shown = ax.pcolormesh(np.clip(grid, norm.vmin, None), norm=norm, cmap="viridis")
        ax.set_xticks(np.arange(len(xs))[_some(xs)] + 0.5, np.array(xs)[_some(xs)])
        ax.set_yticks(np.arange(len(ys))[_some(ys)] + 0.5, np.array(ys)[_some(ys)])
        _dress(ax, _words(figure.x), _words(figure.y), _panel(figure.panels, panel))
        ax.grid(False)
    made.colorbar(shown, ax=list(axes), label=metric.name, shrink=0.9)
    return made


_PAINTERS: dict[type, Callable[[Results, Any], Any]] = {
    Against: _against,
    Curves: _curves,
    Map: _map,
}


def _some(labels: Sequence[str]) -> slice:
    return slice(None, None, max(1, -(-len(labels) // 10)))


def _levels(results: Results, factor: str | None) -> list[str]:
    return results.labels(factor) if factor else [""]


def _panel(factor: str | None, label: str) -> str:
    """A number alone says little: "corridor 20"."""
    return f"{_words(factor or '')} {label}" if _numbers([label]) is not None else label


def _measured(results: Results, column: str) -> bool:
    return any(np.isfinite(p.values.get(column, np.zeros(0))).any() for p in results.points)


def _band(s: Any, bands: str) -> tuple[float, float]:
    if s.seeds < 2:
        return s.mean, s.mean
    if bands == "standard error":
        return s.mean - s.error, s.mean + s.error
    return s.low, s.high


def _numbers(labels: Sequence[str]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def _panels(count: int, *, small: bool = False) -> tuple[Any, list[Any]]:
    across = min(count, 6 if small else _ACROSS)
    down = -(-count // across)
    wide, high = (2.4, 1.8) if small else (_WIDE, _HIGH)
    if count == 1:
        wide, high = 6.4, 4.0
    made = blank(across * wide, down * high + 0.5)
    axes = list(np.atleast_1d(made.subplots(down, across)).ravel())
    for ax in axes[count:]:
        ax.set_axis_off()
    return made, axes[:count]


def _dress(ax: Any, x: str, y: str, title: str) -> None:
    ax.set_xlabel(x, color=INK, fontsize=9)
    ax.set_ylabel(y, color=INK, fontsize=9)
    if title:
        ax.set_title(title, color=INK, fontsize=10)
    dress(ax, size=8)


def _rate(ax: Any, name: str) -> None:
    if name.startswith("success"):
        whole_range(ax)


def _steps_axis(ax: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def _legend(made: Any, axes: Sequence[Any]) -> None:
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        # As many side by side as there is room for.
        room = int(made.get_figwidth() * 13) // (max(map(len, found)) + 8)
        made.legend(
            list(found.values()),
            list(found),
            loc="outside upper center",
            ncols=max(1, min(len(found), room)),
            frameon=False,
            labelcolor=INK,
            fontsize=9,
        )


def _title(results: Results, figure: Figure) -> str:
    metric = results.study.metrics[0].name
    if isinstance(figure, Against):
        metric = results.study.metric(figure.metric).name
        return f"{metric} against {_words(figure.x)}"
    if isinstance(figure, Map):
        return f"{metric} over {_words(figure.x)} and {_words(figure.y)}"
    return "learning curves" + (f" of {figure.columns}" if figure.columns else "")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _svg(made: Any, salt: str) -> str:
    import matplotlib

    # Text stays text, for small files that can be searched; names differ between figures, as all
    # of them are in one page.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": salt}
    drawn = io.StringIO()
    with matplotlib.rc_context(settings):
        made.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    # Groups are numbered alike in every figure, and nothing refers to them.
    return re.sub(r'<g id="[^"]*"', "<g", text)


def _png(made: Any) -> bytes:
    drawn = io.BytesIO()
    made.savefig(drawn, format="png", dpi=130)
    return drawn.getvalue()
