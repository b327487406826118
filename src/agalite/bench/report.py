"""Output that the benchmarks share: targets, result files and line figures."""

import io
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agalite import files
from agalite.bench.timing import machine
from agalite.charts import INK, new_figure, style_axes

_PANEL_WIDTH, _PANEL_HEIGHT = 7.6, 4.2  # inches
_MAX_LINES_INSIDE = 4  # a legend of more lines goes beside the panel


def at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    """A target that holds if `value <= limit`."""
    return {"what": what, "value": value, "limit": f"<= {limit:g}", "holds": value <= limit}


def at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    """A target that holds if `value >= limit`."""
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


def check_folder(out: Path) -> None:
    """Makes the folder of the results; its parent must exist."""
    if not out.parent.is_dir():
        raise ValueError(
            f"out={str(out)!r}: the folder {str(out.parent)!r} does not exist; "
            "make it, or choose another (--out)"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; name a folder")
    out.mkdir(exist_ok=True)
    files.check_writable("out", out / "results.json")


def command_line() -> str:
    """The command that this process was started with."""
    return shlex.join(["agalite", *sys.argv[1:]])


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Writes `results` as JSON, with a description of the machine."""
    files.write_json(path, {"machine": machine(), **results})
    show_paths([path])


def show_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        Console().print(f"written to {path}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Line:
    """Points (x, y), and a band from `low` to `high` if given."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashes: Any = "-"
    """A line style of matplotlib."""
    marker: str = "o"
    level: bool = False
    """y does not depend on x: a horizontal line at y[0]."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: their title, their labels and their lines."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]


def draw_figure(stem: Path, title: str, panels: Sequence[Panel], *, columns: int = 1) -> list[Path]:
    """Draws panels with logarithmic axes, whose ticks on x are the measured values.

    **Arguments:**

    - `stem`: the files' path without its suffix.
    - `title`: above all panels.
    - `panels`: in rows of `columns`.

    **Returns:**

    The paths of the two files, an SVG and a PNG. Equal numbers give equal files.
    """
    rows = -(-len(panels) // columns)
    figure = new_figure(_PANEL_WIDTH * columns, 0.6 + _PANEL_HEIGHT * rows)
    from matplotlib import rc_context

    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        _draw_panel(ax, panel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.suptitle(title, color=INK, fontsize=11)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("svg", "png")]
    # Without a date and random ids inside.
    with rc_context({"svg.hashsalt": "agalite", "svg.fonttype": "none"}):
        for path in paths:
            drawn = io.BytesIO()
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(drawn, format=path.suffix[1:], dpi=130, metadata=metadata)
            files.write(path, drawn.getvalue())
    return paths


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    for line in panel.lines:
        _draw_line(axes, line)
    ticks = sorted({x for line in panel.lines if not line.level for x in line.x})
    if ticks:
        axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(panel.title, color=INK, fontsize=10)
    axes.set_xlabel(panel.x, color=INK)
    axes.set_ylabel(panel.y, color=INK)
    style_axes(axes)
    _draw_legend(axes, panel)


def _draw_line(axes: Any, line: Line) -> None:
    if line.level:
        axes.axhline(
            line.y[0], color=line.colour, linestyle=line.dashes, linewidth=1.6, label=line.label
        )
        if line.low:
            axes.axhspan(line.low[0], line.high[0], color=line.colour, alpha=0.12, linewidth=0)
        return
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


def _draw_legend(axes: Any, panel: Panel) -> None:
    if len(panel.lines) == 1:
        axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)
        return
    # In the order of the lines' right ends.
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -panel.lines[i].y[-1])
    position: dict[str, Any] = {"loc": "best", "framealpha": 0.7, "edgecolor": "none"}
    if len(labels) > _MAX_LINES_INSIDE:
        position = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False}
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        fontsize=9,
        labelcolor=INK,
        handlelength=4.5,
        **position,
    )
