"""`agalite bench latency`: what a step, a sequence and a gradient take, at the paper's sizes.

The paper's appendix measures the forward pass of GTrXL and AGaLiTe, 12 layers, 8 heads, V = 64,
d = 256: one element of a stream against the context length, and a whole sequence against its
length, 100 runs each. Here are the same two figures for every model, and two more: many streams
side by side, and forward and backward. All models of a figure take turns in one run.
"""

import csv
import dataclasses
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agalite import files, validation
from agalite.bench import bounds, programs
from agalite.bench.bounds import PRODUCTS, READ
from agalite.bench.model_configs import REFERENCE, SIZE, SUBJECTS, Subject, build
from agalite.bench.models import weight_arrays
from agalite.bench.report import Line, Panel, at_least, at_most, draw, show_targets, write_results
from agalite.bench.timing import Program, interleave, progress_bar
from agalite.charts import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW
from agalite.memory import Memory
from agalite.training.session import remember_programs

# With a whole sequence or a gradient, how GTrXL keeps its memory between steps plays no role; the
# paper draws GTrXL with 128 and 512.
_SEQUENCES = (
    REFERENCE,
    "agalite(8,1)",
    "agalite(16,1)",
    "agalite(4,7)",
    "galite(4)",
    "linear",
    "gtrxl-128",
    "gtrxl-512",
    "gru",
    "lstm",
)
_BATCHES = (
    REFERENCE,
    "agalite(16,7)",
    "galite(4)",
    "linear",
    "gtrxl-128",
    "gtrxl-128, cached",
    "gtrxl-512, cached",
    "gru",
    "lstm",
)
_GRADIENTS = (REFERENCE, "galite(4)", "linear", "gtrxl-128", "gtrxl-512", "gru")
_QUICK = (REFERENCE, "galite(4)", "gtrxl-128", "gtrxl-128, cached", "gru")
# Beyond it a batch's state is not tried: GTrXL's of 512 streams would not fit into most machines.
_LARGEST_STATE = 2 * 10**9
# One run may take so many times the time that a program has; longer sequences are not tried.
_PATIENCE = 5


@dataclass(frozen=True)
class Part:
    """A figure: what is on its x axis and which models are in it."""

    title: str
    xs: tuple[int, ...]
    x: str
    models: tuple[str, ...]
    make: Callable[[str, Memory, int], Program]
    bound: Callable[[Memory, int], Program]


PARTS: dict[str, Part] = {
    "stream": Part(
        "One step of a stream",
        (1,),
        "streams",
        tuple(SUBJECTS),
        lambda name, memory, _: programs.stream(name, memory),
        lambda memory, _: bounds.read_weights(memory),
    ),
    "sequence": Part(
        "A whole sequence, forward",
        (128, 512, 2048, 4096),
        "steps",
        _SEQUENCES,
        programs.sequence,
        bounds.products,
    ),
    "batch": Part(
        "One step of many streams",
        (1, 8, 64, 512),
        "streams",
        _BATCHES,
        lambda name, memory, n: programs.stream(name, memory, batch=n),
        lambda memory, n: bounds.products(memory, n, prepare_for_inference=True),
    ),
    "gradient": Part(
        "A whole sequence, forward and backward",
        (128, 512, 2048),
        "steps",
        _GRADIENTS,
        programs.gradient,
        bounds.products_of_training,
    ),
}


@dataclass(frozen=True)
class Plan:
    """What to measure; checked before anything is built."""

    parts: Sequence[str] = ()
    models: Sequence[str] = ()
    runs: int = 100
    seconds: float = 2.0
    quick: bool = False

    def __post_init__(self) -> None:
        for part in self.parts:
            validation.one_of("parts", part, PARTS)
        for model in self.models:
            validation.one_of("models", model, SUBJECTS)
        validation.integer("runs", self.runs, minimum=1)
        validation.number("seconds", self.seconds, minimum=0, above=True)

    def chosen(self) -> dict[str, tuple[Part, list[str], tuple[int, ...]]]:
        """By part: its models, of which one is always the reference, and its places on x."""
        out = {}
        for name in self.parts or PARTS:
            part = PARTS[name]
            choice = self.models or (_QUICK if self.quick else part.models)
            wanted = [m for m in part.models if m in choice]
            if not wanted:
                continue
            labels = list(dict.fromkeys([REFERENCE, *wanted]))
            out[name] = part, labels, part.xs[:2] if self.quick else part.xs
        if not out:
            raise ValueError(
                f"models={list(self.models)} are in none of the parts {list(self.parts)}; "
                f"the parts and their models: "
                + "; ".join(f"{name}: {' '.join(p.models)}" for name, p in PARTS.items())
            )
        return out

    @property
    def size(self) -> dict[str, Any]:
        return SIZE | {"layers": 2} if self.quick else SIZE


@dataclass
class Measured:
    """One part: by place on x and model the times; and what was left out, with the reason."""

    part: Part
    programs: dict[int, dict[str, Program]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def run(plan: Plan, out: Path | None) -> None:
    chosen = plan.chosen()
    if out is not None:
        check_folder(out)
    remember_programs()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    memories: dict[str, Memory] = {}
    measured: dict[str, Measured] = {}
    with progress_bar() as progress:
        wanted = list(dict.fromkeys(m for _, labels, _ in chosen.values() for m in labels))
        task = progress.add_task("drawing weights", total=len(wanted))
        for label in wanted:
            memories[label] = build(SUBJECTS[label], plan.size)
            progress.advance(task)
        progress.remove_task(task)
        for name, (part, labels, xs) in chosen.items():
            measured[name] = measure(part, {m: memories[m] for m in labels}, xs, plan, progress)
    results = summarise(measured, memories, SUBJECTS)
    if plan.quick:  # the targets are of the full size
        results["targets"] = []
    show(results, plan.size)
    if out is not None:
        about = {"benchmark": "latency", "command": command(), "load_before": load}
        settings = {"size": plan.size, "runs": plan.runs, "seconds_for_each": plan.seconds}
        write_results(out / "latency.json", about | {"settings": settings} | results)
        write(results, plan.size, out)


def measure(
    part: Part, memories: dict[str, Memory], xs: Sequence[int], plan: Plan, progress: Progress
) -> Measured:
    found = Measured(part)
    pace: dict[str, float] = {}  # seconds for each step or stream, at the last place on x
    for x in xs:
        longest = _PATIENCE * plan.seconds
        labels = [m for m in memories if _fits(found, m, memories[m], x, pace, longest)]
        task = progress.add_task(f"{part.title}, {x}: compiling", total=1 + len(labels))
        made = {}
        for label in labels:
            made[label] = part.make(label, memories[label], x)
            progress.advance(task)
        if REFERENCE in made:
            made["bound"] = part.bound(memories[REFERENCE], x)
        progress.remove_task(task)
        turns = list(made.values())
        interleave(
            turns, progress, f"{part.title}, {x}: timing", runs=plan.runs, seconds=plan.seconds
        )
        for label, program in made.items():
            # What is compiled holds memory, and later parts need it.
            program.call = _gone
            if label != "bound":
                pace[label] = min(program.seconds) / x
        found.programs[x] = made
    return found


def _fits(
    found: Measured, label: str, memory: Memory, x: int, pace: dict[str, float], longest: float
) -> bool:
    expected = pace.get(label, 0) * x
    if expected > longest:
        found.left_out.append(f"{label} at {x}: one run would take about {expected:.0f} s")
        return False
    state = 4 * memory.state_size * (x if found.part.x == "streams" else 1)
    if state > _LARGEST_STATE:
        found.left_out.append(f"{label} at {x}: its state alone takes {state / 1e9:.1f} GB")
        return False
    return True


def _gone() -> None:
    raise RuntimeError("this program has been timed and given up")


def check_folder(out: Path) -> None:
    """Results go into a folder, which is made if its own folder is there."""
    if not out.parent.is_dir():
        raise ValueError(f"out={str(out)!r}: the folder {str(out.parent)!r} does not exist")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; name a folder")
    out.mkdir(exist_ok=True)
    files.check_writable("out", out / "results.json")


def command() -> str:
    return shlex.join(["agalite", *sys.argv[1:]])


# --- What `agalite bench latency` says: rows, tables, targets, CSV and figures --------------------

_COLUMNS = (
    "part",
    "x",
    "model",
    "context",
    "milliseconds",
    "low",
    "high",
    "spread",
    "runs",
    "by_reference",
    "by_bound",
    "per_second",
    "parameters",
    "state_floats",
    "temporary_bytes",
)
_COLOURS = {
    "agalite": BLUE,
    "galite": GREEN,
    "linear": SKY,
    "gtrxl": ORANGE,
    "gru": PINK,
    "lstm": YELLOW,
}


# --- rows ---------------------------------------------------------------------------------------


def summarise(
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
            "title": found.part.title,
            "x": found.part.x,
            "rows": rows,
            "left_out": found.left_out,
        }
    return {"reference": REFERENCE, "parts": parts, "targets": targets(parts)}


def _row(
    program: Program,
    label: str,
    x: int,
    part: Any,
    timed: dict[str, Program],
    memories: dict[str, Memory],
    subjects: dict[str, Subject],
) -> dict[str, Any]:
    low, high = (1e3 * q for q in np.percentile(program.seconds, [25, 75]))
    row: dict[str, Any] = {
        "model": program.name,
        "x": x,
        "milliseconds": program.milliseconds,
        "low": low,
        "high": high,
        "runs": len(program.seconds),
        # One run has no spread; zero would be a claim.
        "spread": program.spread if len(program.seconds) > 1 else None,
        "per_second": 1e3 * x / program.milliseconds,
        "temporary_bytes": program.temporary_bytes,
        "seconds": program.seconds,
    }
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
        ("sequence", 2048, REFERENCE, 2),
        ("sequence", 2048, "galite(4)", 3),
        ("batch", 64, REFERENCE, 2),
    ):
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
            row["model"],
            "" if context is None else f"{context:,}",
            f"{row['milliseconds']:.2f}",
            _spread(row),
            _ratio(row, "by_reference"),
            _ratio(row, "by_bound"),
            _short(row["parameters"]) if "parameters" in row else "",
            _short(row["state_floats"]) if "state_floats" in row else "",
        )
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
    model: str,
    x: list[float],
    rows: list[dict[str, Any]],
    *,
    rate: bool = False,
    level: bool = False,
) -> Line:
    def of(name: str, other: str) -> list[float]:
        return [1e3 * r["x"] / r[other] if rate else r[name] for r in rows]

    return Line(
        model,
        x,
        of("milliseconds", "milliseconds"),
        _colour(model),
        of("low", "high"),
        of("high", "low"),
        *_look(model),
        level,
    )


def _colour(model: str) -> str:
    return next((c for name, c in _COLOURS.items() if model.startswith(name)), BLACK)


def _look(model: str) -> tuple[Any, str]:
    """Members of one family share a colour and differ in their dashes and their marks."""
    if model in (READ, PRODUCTS):
        return ":", "o"
    # One after the other: the first that fits.
    looks = {
        "(8,1)": ("--", "s"),
        "(16,1)": ("-.", "^"),
        "(4,7)": (":", "D"),
        "(8,7)": ((0, (6, 1, 1, 1)), "v"),
        "(16,7)": ((0, (1, 2)), "P"),
        "-128, cached": ("-.", "^"),
        "-512, cached": (":", "D"),
        "-512": ("--", "s"),
        "gtrxl, cached": ("--", "s"),
    }
    return next((look for mark, look in looks.items() if mark in model), ("-", "o"))
