"""What a benchmark says at its end: did the targets hold, and where are the numbers."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agalite import files
from agalite.bench.timing import machine
from agalite.charts import INK, blank, dress


def at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "limit": f"<= {limit:g}", "holds": value <= limit}


def at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "limit": f">= {limit:g}", "holds": value >= limit}


def show_targets(targets: list[dict[str, Any]]) -> None:
    table = Table(title="Targets")
    for column in ("what", "measured", "target", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for t in targets:
        table.add_row(
            t["what"], f"{t['value']:.2f}", t["limit"], "holds" if t["holds"] else "missed"
        )
    Console().print(table)


def write_results(path: Path, results: dict[str, Any]) -> None:
    files.write_json(path, {"machine": machine(), **results})
    Console().print(f"written to {path}", highlight=False, soft_wrap=True)


# --- Line figures for the benchmarks: SVG and PNG, each readable without the text around it -------

_HEIGHT, _WIDTH = 4.2, 7.6
_FEW = 4  # lines whose names find room inside the panel


@dataclass(frozen=True)
class Line:
    """Points (x, y), with a band from `low` to `high` where given; one point is a level line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashes: Any = "-"
    """As matplotlib has them."""
    marker: str = "o"
    level: bool = False
    """y does not depend on x: drawn from side to side."""


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_y: bool = True


def draw(stem: Path, title: str, panels: Sequence[Panel], *, columns: int = 1) -> list[Path]:
    """Writes stem.svg and stem.png; x is logarithmic, its ticks the values that were measured."""
    rows = -(-len(panels) // columns)
    figure = blank(_WIDTH * columns, 0.6 + _HEIGHT * rows)
    from matplotlib import rc_context

    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        _panel(ax, panel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.suptitle(title, color=INK, fontsize=11)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    # The same numbers give the same file: no date, no random names inside.
    with rc_context({"svg.hashsalt": "agalite", "svg.fonttype": "none"}):
        for path in paths:
            drawn = io.BytesIO()
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(drawn, format=path.suffix[1:], dpi=130, metadata=metadata)
            files.write(path, drawn.getvalue())
    return paths


def _panel(axes: Any, panel: Panel) -> Any:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    ticks = sorted({x for line in panel.lines if not line.level for x in line.x})
    axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for line in panel.lines:
        if line.level:
            axes.axhline(
                line.y[0], color=line.colour, linestyle=line.dashes, linewidth=1.6, label=line.label
            )
            if line.low:
                axes.axhspan(line.low[0], line.high[0], color=line.colour, alpha=0.12, linewidth=0)
            continue
        axes.plot(
            line.x,
            line.y,
            color=line.colour,
            linestyle=line.dashes,
            linewidth=1.8,
            marker=line.marker,
            markersize=4.5,
            label=line.label,
        )
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=line.colour, alpha=0.15, lw=0)
    if ticks:
        axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    if not panel.log_y:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, color=INK, fontsize=10)
    axes.set_xlabel(panel.x, color=INK)
    axes.set_ylabel(panel.y, color=INK)
    dress(axes)
    if len(panel.lines) == 1:
        return axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)
    # In the order in which the lines lie at the right, so that the eye finds them.
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -panel.lines[i].y[-1])
    place: dict[str, Any] = {"loc": "best", "framealpha": 0.7, "edgecolor": "none"}
    if len(labels) > _FEW:
        place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False}
    return axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        fontsize=9,
        labelcolor=INK,
        handlelength=4.5,
        **place,
    )
