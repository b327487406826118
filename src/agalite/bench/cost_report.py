"""What `agalite bench cost` says: formulas, the paper's ratios and ours, XLA's count, figures."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agalite.bench.figures import Line, Panel, draw
from agalite.bench.scaling import AGALITE, GALITE
from agalite.charts import BLUE, GREEN, ORANGE

_COLOURS = {AGALITE: BLUE, GALITE: GREEN}


def show(results: dict[str, Any]) -> None:
    console = Console()
    for formula in results["formulas"]:
        console.print(_formula(formula))
    for what, title in (
        ("operations", "Operations of one head, GTrXL / AGaLiTe"),
        ("state", "State floats of one head, GTrXL / AGaLiTe"),
        ("layer_state", "State floats of a layer, whose heads share GTrXL's memory"),
    ):
        console.print(_claims(results["claims"], what, title))
    console.print(_compiled(results["compiled"]))
    for part in results["scaling"]:
        console.print(_scaling(part))


def _formula(formula: dict[str, Any]) -> Table:
    sizes = ", ".join(f"{name}={value}" for name, value in formula["sizes"].items())
    table = Table(title=f"{formula['name']}  ({sizes})", title_justify="left")
    for column in ("", "formula", "count"):
        table.add_column(column, justify="right" if column == "count" else "left")
    for what, total in (("operations", "total_operations"), ("state", "total_state")):
        for name, text in formula[what].items():
            table.add_row(name, text, "")
        table.add_row(f"[bold]{what}[/bold]", "", f"[bold]{formula[total]:,}[/bold]")
    return table


def _claims(claims: list[dict[str, Any]], what: str, title: str) -> Table:
    table = Table(title=title)
    columns = ("", "paper", *claims[0]["counted"])
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for claim in claims:
        paper = claim["paper"].get(what)
        table.add_row(
            claim["where"], "" if paper is None else f"{paper:g}x",
            *(f"{counted[what]:.2f}x" for counted in claim["counted"].values()),
        )  # fmt: skip
    return table


def _compiled(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="One head as XLA compiled it, with its norm and its output projection")
    for column in (
        "", "model", "operations", "/ AGaLiTe", "bytes touched", "/ AGaLiTe", "temporary kB",
        "state floats",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("", "model") else "right")
    base = {row["where"]: row for row in rows if row["model"] == AGALITE}
    for row in rows:
        mine = base[row["where"]]
        table.add_row(
            row["where"], row["model"], f"{row['flops']:,.0f}",
            f"{row['flops'] / mine['flops']:.2f}x", f"{row['bytes_accessed']:,.0f}",
            f"{row['bytes_accessed'] / mine['bytes_accessed']:.2f}x",
            f"{row['temporary_bytes'] / 1e3:,.1f}", f"{row['state_floats']:,}",
        )  # fmt: skip
    return table


def _scaling(part: dict[str, Any]) -> Table:
    table = Table(title=f"A streaming step against {part['against']}: ms, state floats")
    xs = sorted({row["x"] for row in part["rows"]})
    table.add_column("model")
    for x in xs:
        table.add_column(f"{x:,}", justify="right")
    for model in dict.fromkeys(row["model"] for row in part["rows"]):
        cells = {
            row["x"]: f"{row['milliseconds']:.2f} ms, {row['state_floats']:,}"
            for row in part["rows"]
            if row["model"] == model
        }
        table.add_row(model, *(cells.get(x, "") for x in xs))
    return table


def figure(parts: list[dict[str, Any]], layers: int, stem: Path) -> list[Path]:
    """Time on the left, state on the right; one row for everything that grows."""
    panels = []
    for part in parts:
        rows = part["rows"]
        models = list(dict.fromkeys(row["model"] for row in rows))
        times, states = [], []
        for model in models:
            mine = [row for row in rows if row["model"] == model]
            colour = _COLOURS.get(model, ORANGE)
            xs = [row["x"] for row in mine]
            low, high = [row["low"] for row in mine], [row["high"] for row in mine]
            times.append(Line(model, xs, [row["milliseconds"] for row in mine], colour, low, high))
            states.append(Line(model, xs, [row["state_floats"] for row in mine], colour))
        against = part["against"]
        panels.append(Panel(f"Time against {against}", against, "ms a step", times))
        panels.append(Panel(f"State against {against}", against, "floats", states))
    title = (
        f"One step of one stream; layers: {layers}, heads: 4, V = 64, d = 128, eta = 4, "
        "r = 1 where not varied\nline: median, band: middle half of the runs"
    )
    return draw(stem, title, panels, columns=2)
