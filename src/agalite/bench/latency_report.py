"""What `agalite bench latency` says: rows, tables, targets, CSV and figures."""

import csv
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agalite import files
from agalite.bench.bounds import PRODUCTS, READ
from agalite.bench.figures import Line, Panel, draw
from agalite.bench.models import weight_arrays
from agalite.bench.report import at_least, at_most, show_targets
from agalite.bench.subjects import REFERENCE, Subject
from agalite.bench.timing import Program
from agalite.charts import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW
from agalite.memory import Memory

_COLUMNS = (
    "part", "x", "model", "context", "milliseconds", "low", "high", "spread", "runs",
    "by_reference", "by_bound", "per_second", "parameters", "state_floats", "temporary_bytes",
)  # fmt: skip
_COLOURS = {
    "agalite": BLUE, "galite": GREEN, "linear": SKY, "gtrxl": ORANGE, "gru": PINK, "lstm": YELLOW,
}  # fmt: skip


# --- rows ---------------------------------------------------------------------------------------


def results(
    measured: dict[str, Any], memories: dict[str, Memory], subjects: dict[str, Subject]
) -> dict[str, Any]:
    parts = {}
    for name, found in measured.items():
        rows = [
            _row(program, label, x, found.part, timed, memories, subjects)
            for x, timed in found.programs.items()
            for label, program in timed.items()
        ]
        parts[name] = {
            "title": found.part.title, "x": found.part.x, "rows": rows, "left_out": found.left_out,
        }  # fmt: skip
    return {"reference": REFERENCE, "parts": parts, "targets": targets(parts)}


def _row(
    program: Program, label: str, x: int, part: Any, timed: dict[str, Program],
    memories: dict[str, Memory], subjects: dict[str, Subject],
) -> dict[str, Any]:  # fmt: skip
    low, high = (1e3 * q for q in np.percentile(program.seconds, [25, 75]))
    row: dict[str, Any] = {
        "model": program.name, "x": x, "milliseconds": program.milliseconds, "low": low,
        "high": high, "runs": len(program.seconds),
        # One run has no spread; zero would be a claim.
        "spread": program.spread if len(program.seconds) > 1 else None,
        "per_second": 1e3 * x / program.milliseconds,
        "temporary_bytes": program.temporary_bytes, "seconds": program.seconds,
    }  # fmt: skip
    if REFERENCE in timed:
        row["by_reference"] = program.ratio(timed[REFERENCE])
    if label not in memories:
        return row
    memory = memories[label]
    streams = x if part.x == "streams" else 1
    row |= {
        "context": subjects[label].context,
        "parameters": memory.parameter_count,
        "state_floats": memory.state_size * streams,
    }
    if "bound" in timed:
        # The bound was measured with the reference's weights: it grows with the number of them.
        reads = timed["bound"].name == READ
        mine, reference = (_weights(m, reads) for m in (memory, memories[REFERENCE]))
        row["by_bound"] = program.ratio(timed["bound"]) * reference / mine
    return row


def _weights(memory: Memory, reads: bool) -> int:
    """What the bound is proportional to: all weights are read, the matrices are multiplied."""
    return memory.parameter_count if reads else sum(w.size for w in weight_arrays(memory))


def _sizes(size: dict[str, Any]) -> str:
    return f"{size['layers']} layers, {size['heads']} heads, V = 64, d = 256"


# --- targets ------------------------------------------------------------------------------------


def targets(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of issue 8 whose programs were measured."""
    out = []
    if row := _find(parts, "stream", REFERENCE, 1):
        out.append(at_most(f"a step of {REFERENCE} / {READ}", row["by_bound"], 1.2))
        if slow := _find(parts, "stream", "gtrxl-512", 1):
            out.append(at_least(f"a step of gtrxl-512 / {REFERENCE}", slow["by_reference"], 3))
    for part, x, model, limit in (
        ("sequence", 2048, REFERENCE, 2), ("sequence", 2048, "galite(4)", 3),
        ("batch", 64, REFERENCE, 2),
    ):  # fmt: skip
        row = _find(parts, part, model, x)
        if row and "by_bound" in row:
            what = f"{x} {parts[part]['x']} of {model} / {PRODUCTS}"
            out.append(at_most(what, row["by_bound"], limit))
    return out


def _find(parts: dict[str, Any], part: str, model: str, x: int) -> dict[str, Any] | None:
    rows = parts.get(part, {}).get("rows", [])
    return next((r for r in rows if r["model"] == model and r["x"] == x), None)


# --- tables -------------------------------------------------------------------------------------


def show(found: dict[str, Any], size: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{_sizes(size)}; medians, ± half the distance of the quartiles")
    for name, part in found["parts"].items():
        title = part["title"]
        if name == "stream":
            console.print(_one_by_one(title, part["rows"]))
            continue
        rate = "actions a second" if part["x"] == "streams" else "ms"
        console.print(_across(f"{title}: {rate}", part, rate))
        console.print(_across(f"{title}: / {REFERENCE}", part, "by_reference"))
        console.print(_across(f"{title}: / its products", part, "by_bound"))
        for line in part["left_out"]:
            console.print(f"left out: {line}", highlight=False)
    if found["targets"]:
        show_targets(found["targets"])


def _one_by_one(title: str, rows: list[dict[str, Any]]) -> Table:
    caption = f"ref: {REFERENCE}; bound: {READ}; M: context; state: floats"
    table = Table(title=title, caption=caption)
    table.add_column("model", no_wrap=True)
    # As narrow as they are so that 80 columns cut off nothing.
    for column in ("M", "ms", "±", "/ref", "/bound", "params", "state"):
        table.add_column(column, justify="right")
    for row in rows:
        context = row.get("context")
        table.add_row(
            row["model"], "" if context is None else f"{context:,}",
            f"{row['milliseconds']:.2f}", _spread(row), _ratio(row, "by_reference"),
            _ratio(row, "by_bound"),
            _short(row["parameters"]) if "parameters" in row else "",
            _short(row["state_floats"]) if "state_floats" in row else "",
        )  # fmt: skip
    return table


def _spread(row: dict[str, Any], sign: str = "") -> str:
    return "1 run" if row["spread"] is None else f"{sign}{row['spread']:.0%}"


def _short(count: int) -> str:
    return f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count / 1e3:.3g} k"


def _across(title: str, part: dict[str, Any], what: str) -> Table:
    """A row for each model, a column for each place on x."""
    xs = sorted({row["x"] for row in part["rows"]})
    table = Table(title=title)
    table.add_column("model", no_wrap=True)
    for x in xs:
        table.add_column(f"{x:,} {part['x']}", justify="right")
    cells = {(row["model"], x): "" for row in part["rows"] for x in xs}
    for row in part["rows"]:
        if what == "ms":
            text = f"{row['milliseconds']:,.1f} {_spread(row, '±')}"
        elif what == "actions a second":
            text = f"{row['per_second']:,.0f} {_spread(row, '±')}"
        else:
            text = _ratio(row, what)
        cells[row["model"], row["x"]] = text
    for model in dict.fromkeys(row["model"] for row in part["rows"]):
        line = [cells[model, x] for x in xs]
        if any(line):
            table.add_row(model, *line)
    return table


def _ratio(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}" if name in row else ""


# --- files --------------------------------------------------------------------------------------


def write(found: dict[str, Any], size: dict[str, Any], folder: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore")
    writer.writeheader()
    for name, part in found["parts"].items():
        writer.writerows({"part": name, **row} for row in part["rows"])
    files.write(folder / "latency.csv", text.getvalue().encode())
    paths = [folder / "latency.csv"]
    for name, part in found["parts"].items():
        paths += draw(folder / name, _about(name, size, part), [_panel(name, part)])
    for path in paths:
        Console().print(f"written to {path}", highlight=False, soft_wrap=True)


def _about(name: str, size: dict[str, Any], part: dict[str, Any]) -> str:
    what = {
        "stream": "Time of one streaming step against context: AGaLiTe's does not depend on it",
        "sequence": "Time of a forward pass over a whole sequence",
        "batch": "Actions a second with many streams side by side",
        "gradient": "Time of forward and backward over a whole sequence",
    }[name]
    about = f"{what}\n{_sizes(size)}; line: median, band: middle half of the runs"
    if part["left_out"]:
        about += "\na line ends where one run would take too long, or its state 2 GB"
    return about


def _panel(name: str, part: dict[str, Any]) -> Panel:
    if name == "stream":
        return Panel("", "context M (inputs a layer can read)", "ms a step", _against_context(part))
    lines = []
    for model in dict.fromkeys(row["model"] for row in part["rows"]):
        rows = [row for row in part["rows"] if row["model"] == model]
        lines.append(_line(model, [row["x"] for row in rows], rows, rate=name == "batch"))
    if name == "batch":
        return Panel("", "streams side by side", "actions a second", lines)
    return Panel("", "length of the sequence, steps", "ms", lines)


def _against_context(part: dict[str, Any]) -> list[Line]:
    """GTrXL over its memory, everything else as a level line, as the paper draws it."""
    lines, windows = [], {"GTrXL, projecting its memory at every step": [], "GTrXL, cached": []}
    for row in part["rows"]:
        if row.get("context") is not None:
            names = list(windows)
            windows[names["cached" in row["model"]]].append(row)
        else:
            lines.append(_line(row["model"], [1], [row], level=True))
    for name, rows in windows.items():
        if rows:
            label = "gtrxl, cached" if "cached" in name else "gtrxl"
            line = _line(label, [row["context"] for row in rows], rows)
            lines.append(dataclasses.replace(line, label=name))
    return lines


def _line(
    model: str, x: list[float], rows: list[dict[str, Any]], *, rate: bool = False,
    level: bool = False,
) -> Line:  # fmt: skip
    def of(name: str, other: str) -> list[float]:
        return [1e3 * r["x"] / r[other] if rate else r[name] for r in rows]

    return Line(
        model, x, of("milliseconds", "milliseconds"), _colour(model), of("low", "high"),
        of("high", "low"), *_look(model), level,
    )  # fmt: skip


def _colour(model: str) -> str:
    return next((c for name, c in _COLOURS.items() if model.startswith(name)), BLACK)


def _look(model: str) -> tuple[Any, str]:
    """Members of one family share a colour and differ in their dashes and their marks."""
    if model in (READ, PRODUCTS):
        return ":", "o"
    # One after the other: the first that fits.
    looks = {
        "(8,1)": ("--", "s"), "(16,1)": ("-.", "^"), "(4,7)": (":", "D"),
        "(8,7)": ((0, (6, 1, 1, 1)), "v"), "(16,7)": ((0, (1, 2)), "P"),
        "-128, cached": ("-.", "^"), "-512, cached": (":", "D"), "-512": ("--", "s"),
        "gtrxl, cached": ("--", "s"),
    }  # fmt: skip
    return next((look for mark, look in looks.items() if mark in model), ("-", "o"))
