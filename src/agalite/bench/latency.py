"""`agalite bench latency`: time of a step, a sequence and a gradient, at the paper's sizes.

The paper's appendix measures the forward pass of GTrXL and AGaLiTe with 12 layers, 8 heads, V = 64
and d = 256: one element of a stream against the context length, and a whole sequence against its
length, 100 runs each. This benchmark has the same two figures for every model, and two more: a
batch of streams, and forward and backward. All programs of a figure are interleaved in one process.

`run` is the command: `Plan` says what to measure, `measure` times one part, `summarise` makes rows
of the times, and the rest prints and draws them.
"""

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agalite import files, validation
from agalite.bench import programs
from agalite.bench.model_configs import MODEL_CONFIGS, REFERENCE, SIZE, ModelConfig, build
from agalite.bench.programs import PRODUCTS, READ, weight_arrays
from agalite.bench.report import (
    Line,
    Panel,
    at_least,
    at_most,
    check_folder,
    command_line,
    draw_figure,
    show_paths,
    show_targets,
    write_results,
)
from agalite.bench.timing import Program, interleave, load_average, progress_bar
from agalite.charts import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW
from agalite.memory import Memory
from agalite.training.session import enable_compilation_cache

# In `scan` GTrXL's cache makes no difference. The paper draws GTrXL-128 and GTrXL-512.
_SEQUENCE_MODELS = (
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
_BATCH_MODELS = (
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
_GRADIENT_MODELS = (REFERENCE, "galite(4)", "linear", "gtrxl-128", "gtrxl-512", "gru")
_QUICK_MODELS = (REFERENCE, "galite(4)", "gtrxl-128", "gtrxl-128, cached", "gru")
# GTrXL's state of 512 streams does not fit into the memory of most machines.
_MAX_STATE_BYTES = 2 * 10**9
# A program is left out if one run would take this many times the program's time limit.
_MAX_RUN = 5


@dataclass(frozen=True)
class Part:
    """A figure: its x axis, its models, and how a program is made of a model and an x."""

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
        tuple(MODEL_CONFIGS),
        lambda name, memory, _: programs.stream(name, memory),
        lambda memory, _: programs.read_weights(memory),
    ),
    "sequence": Part(
        "A whole sequence, forward",
        (128, 512, 2048, 4096),
        "steps",
        _SEQUENCE_MODELS,
        programs.sequence,
        programs.products,
    ),
    "batch": Part(
        "One step of many streams",
        (1, 8, 64, 512),
        "streams",
        _BATCH_MODELS,
        lambda name, memory, n: programs.stream(name, memory, batch_size=n),
        lambda memory, n: programs.products(memory, n, transposed=True),
    ),
    "gradient": Part(
        "A whole sequence, forward and backward",
        (128, 512, 2048),
        "steps",
        _GRADIENT_MODELS,
        programs.gradient,
        programs.training_products,
    ),
}


@dataclass(frozen=True)
class Plan:
    """The options of `agalite bench latency`, checked before anything is built."""

    parts: Sequence[str] = ()
    """Names in `PARTS`; all if empty."""
    models: Sequence[str] = ()
    """Names in `MODEL_CONFIGS`; each part's own if empty."""
    runs: int = 100
    seconds: float = 2.0
    """Time limit of each program."""
    quick: bool = False

    def __post_init__(self) -> None:
        for part in self.parts:
            validation.check_one_of("parts", part, PARTS)
        for model in self.models:
            validation.check_one_of("models", model, MODEL_CONFIGS)
        validation.check_integer("runs", self.runs, minimum=1)
        validation.check_number("seconds", self.seconds, minimum=0, above=True)

    def chosen(self) -> dict[str, tuple[Part, list[str], tuple[int, ...]]]:
        """By name: the part, its models, the first of which is the reference, and its xs."""
        out = {}
        for name in self.parts or PARTS:
            part = PARTS[name]
            choice = self.models or (_QUICK_MODELS if self.quick else part.models)
            models = [m for m in part.models if m in choice]
            if not models:
                continue
            labels = list(dict.fromkeys([REFERENCE, *models]))
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
    """The timed programs of one part, by x and model, and the reasons for those left out."""

    part: Part
    programs: dict[int, dict[str, Program]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def run(plan: Plan, out: Path | None) -> None:
    """Measures, prints and writes the latency of models.

    **Arguments:**

    - `plan`: what to measure.
    - `out`: a folder for latency.json, latency.csv and the figures; None writes nothing.
    """
    chosen = plan.chosen()
    if out is not None:
        check_folder(out)
    enable_compilation_cache()
    load = load_average()
    memories: dict[str, Memory] = {}
    measured: dict[str, Measured] = {}
    with progress_bar() as progress:
        labels = list(dict.fromkeys(m for _, models, _ in chosen.values() for m in models))
        task = progress.add_task("drawing weights", total=len(labels))
        for label in labels:
            memories[label] = build(MODEL_CONFIGS[label], plan.size)
            progress.advance(task)
        progress.remove_task(task)
        for name, (part, models, xs) in chosen.items():
            measured[name] = measure(part, {m: memories[m] for m in models}, xs, plan, progress)
    results = summarise(measured, memories, MODEL_CONFIGS)
    if plan.quick:  # the targets are of the full size
        results["targets"] = []
    show(results, plan.size)
    if out is not None:
        about = {"benchmark": "latency", "command": command_line(), "load_before": load}
        settings = {"size": plan.size, "runs": plan.runs, "seconds_for_each": plan.seconds}
        write_results(out / "latency.json", about | {"settings": settings} | results)
        write(results, plan.size, out)


def measure(
    part: Part, memories: dict[str, Memory], xs: Sequence[int], plan: Plan, progress: Progress
) -> Measured:
    """Times one part.

    **Arguments:**

    - `part`: what to time.
    - `memories`: the models by label.
    - `xs`: sequence lengths or batch sizes, in rising order.
    - `plan`: the number of runs and the time limit.
    - `progress`: shows how far it is.

    **Returns:**

    The timed programs. Those whose run or state would be too large are left out, with the reason.
    """
    measured = Measured(part)
    seconds_per_x: dict[str, float] = {}  # at the previous x
    for x in xs:
        limit = _MAX_RUN * plan.seconds
        labels = [m for m in memories if _fits(measured, m, memories[m], x, seconds_per_x, limit)]
        task = progress.add_task(f"{part.title}, {x}: compiling", total=1 + len(labels))
        made = {}
        for label in labels:
            made[label] = part.make(label, memories[label], x)
            progress.advance(task)
        if REFERENCE in made:
            made["bound"] = part.bound(memories[REFERENCE], x)
        progress.remove_task(task)
        interleave(
            list(made.values()),
            progress,
            runs=plan.runs,
            seconds=plan.seconds,
            description=f"{part.title}, {x}: timing",
        )
        for label, program in made.items():
            program.call = _released  # frees the executable and its buffers
            if label != "bound":
                seconds_per_x[label] = min(program.seconds) / x
        measured.programs[x] = made
    return measured


def _fits(
    measured: Measured,
    label: str,
    memory: Memory,
    x: int,
    seconds_per_x: dict[str, float],
    limit: float,
) -> bool:
    expected = seconds_per_x.get(label, 0) * x
    if expected > limit:
        measured.left_out.append(f"{label} at {x}: one run would take about {expected:.0f} s")
        return False
    state_bytes = 4 * memory.state_size * (x if measured.part.x == "streams" else 1)
    if state_bytes > _MAX_STATE_BYTES:
        measured.left_out.append(
            f"{label} at {x}: its state alone takes {state_bytes / 1e9:.1f} GB"
        )
        return False
    return True


def _released() -> None:
    raise RuntimeError("this program has been timed and released")


# --- Rows and targets -----------------------------------------------------------------------------


def summarise(
    measured: dict[str, Measured],
    memories: dict[str, Memory],
    model_configs: dict[str, ModelConfig],
) -> dict[str, Any]:
    """The results as JSON holds them: one row for each part, x and model."""
    parts = {}
    for name, found in measured.items():
        rows = [
            _row(program, label, x, found.part, timed, memories, model_configs)
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
    part: Part,
    timed: dict[str, Program],
    memories: dict[str, Memory],
    model_configs: dict[str, ModelConfig],
) -> dict[str, Any]:
    low, high = (1e3 * q for q in np.percentile(program.seconds, [25, 75]))
    row: dict[str, Any] = {
        "model": program.name,
        "x": x,
        "milliseconds": program.milliseconds,
        "low": low,
        "high": high,
        "runs": len(program.seconds),
        # Unknown of one run, not zero.
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
        "context": model_configs[label].context,
        "parameters": memory.parameter_count,
        "state_floats": memory.state_size * streams,
    }
    if "bound" in timed:
        # The bound is measured with the reference's weights and proportional to their number.
        reads = timed["bound"].name == READ
        own, reference = (_weight_count(m, reads) for m in (memory, memories[REFERENCE]))
        row["by_bound"] = program.ratio(timed["bound"]) * reference / own
    return row


def _weight_count(memory: Memory, reads: bool) -> int:
    """Weights that the bound reads, or that it multiplies by."""
    return memory.parameter_count if reads else sum(w.size for w in weight_arrays(memory))


def targets(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets whose programs were measured."""
    out = []
    if row := _find(parts, "stream", REFERENCE, 1):
        out.append(at_most(f"a step of {REFERENCE} / {READ}", row["by_bound"], 1.2))
        if gtrxl := _find(parts, "stream", "gtrxl-512", 1):
            out.append(at_least(f"a step of gtrxl-512 / {REFERENCE}", gtrxl["by_reference"], 3))
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


# --- Tables ---------------------------------------------------------------------------------------


def show(results: dict[str, Any], size: dict[str, Any]) -> None:
    """Prints the tables of all parts and the targets."""
    console = Console()
    console.print(f"{_size_text(size)}; medians, ± half the distance of the quartiles")
    for name, part in results["parts"].items():
        title = part["title"]
        if name == "stream":
            console.print(_stream_table(title, part["rows"]))
            continue
        unit = "actions per second" if part["x"] == "streams" else "ms"
        console.print(_table_over_x(f"{title}: {unit}", part, unit))
        console.print(_table_over_x(f"{title}: / {REFERENCE}", part, "by_reference"))
        console.print(_table_over_x(f"{title}: / its products", part, "by_bound"))
        for line in part["left_out"]:
            console.print(f"left out: {line}", highlight=False)
    if results["targets"]:
        show_targets(results["targets"])


def _size_text(size: dict[str, Any]) -> str:
    return f"{size['layers']} layers, {size['heads']} heads, V = 64, d = 256"


def _stream_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """One row for each model, narrow enough for a terminal of 80 columns."""
    caption = f"ref: {REFERENCE}; bound: {READ}; M: context; state: floats"
    table = Table(title=title, caption=caption)
    table.add_column("model", no_wrap=True)
    for column in ("M", "ms", "±", "/ref", "/bound", "params", "state"):
        table.add_column(column, justify="right")
    for row in rows:
        context = row.get("context")
        table.add_row(
            row["model"],
            "" if context is None else f"{context:,}",
            f"{row['milliseconds']:.2f}",
            _spread_text(row),
            _ratio_text(row, "by_reference"),
            _ratio_text(row, "by_bound"),
            _count_text(row["parameters"]) if "parameters" in row else "",
            _count_text(row["state_floats"]) if "state_floats" in row else "",
        )
    return table


def _table_over_x(title: str, part: dict[str, Any], what: str) -> Table:
    """A row for each model, a column for each x; `what` is a unit or a ratio's name."""
    xs = sorted({row["x"] for row in part["rows"]})
    table = Table(title=title)
    table.add_column("model", no_wrap=True)
    for x in xs:
        table.add_column(f"{x:,} {part['x']}", justify="right")
    cells = {(row["model"], x): "" for row in part["rows"] for x in xs}
    for row in part["rows"]:
        if what == "ms":
            text = f"{row['milliseconds']:,.1f} {_spread_text(row, '±')}"
        elif what == "actions per second":
            text = f"{row['per_second']:,.0f} {_spread_text(row, '±')}"
        else:
            text = _ratio_text(row, what)
        cells[row["model"], row["x"]] = text
    for model in dict.fromkeys(row["model"] for row in part["rows"]):
        line = [cells[model, x] for x in xs]
        if any(line):
            table.add_row(model, *line)
    return table


def _spread_text(row: dict[str, Any], sign: str = "") -> str:
    return "1 run" if row["spread"] is None else f"{sign}{row['spread']:.0%}"


def _ratio_text(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}" if name in row else ""


def _count_text(count: int) -> str:
    return f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count / 1e3:.3g} k"


# --- The CSV file and the figures -----------------------------------------------------------------

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
# By a part of the model's name; the first that is in it.
_STYLES = {
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


def write(results: dict[str, Any], size: dict[str, Any], folder: Path) -> None:
    """Writes latency.csv and a figure for each part."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore")
    writer.writeheader()
    for name, part in results["parts"].items():
        writer.writerows({"part": name, **row} for row in part["rows"])
    files.write(folder / "latency.csv", text.getvalue().encode())
    paths = [folder / "latency.csv"]
    for name, part in results["parts"].items():
        paths += draw_figure(folder / name, _figure_title(name, size, part), [_panel(name, part)])
    show_paths(paths)


def _figure_title(name: str, size: dict[str, Any], part: dict[str, Any]) -> str:
    what = {
        "stream": "Time of one streaming step against context: AGaLiTe's does not depend on it",
        "sequence": "Time of a forward pass over a whole sequence",
        "batch": "Actions per second of a batch of streams",
        "gradient": "Time of forward and backward over a whole sequence",
    }[name]
    title = f"{what}\n{_size_text(size)}; line: median, band: middle half of the runs"
    if part["left_out"]:
        title += "\na line ends where one run would take too long, or its state 2 GB"
    return title


def _panel(name: str, part: dict[str, Any]) -> Panel:
    if name == "stream":
        lines = _lines_over_context(part)
        return Panel("", "context M (inputs a layer can read)", "ms per step", lines)
    lines = []
    for model in dict.fromkeys(row["model"] for row in part["rows"]):
        rows = [row for row in part["rows"] if row["model"] == model]
        lines.append(_line(model, [row["x"] for row in rows], rows, rate=name == "batch"))
    if name == "batch":
        return Panel("", "streams in a batch", "actions per second", lines)
    return Panel("", "length of the sequence, steps", "ms", lines)


def _lines_over_context(part: dict[str, Any]) -> list[Line]:
    """As the paper draws it: GTrXL over its memory length, other models as horizontal lines."""
    lines: list[Line] = []
    projecting: list[dict[str, Any]] = []
    cached: list[dict[str, Any]] = []
    for row in part["rows"]:
        if row.get("context") is None:
            lines.append(_line(row["model"], [1], [row], level=True))
        else:
            (cached if "cached" in row["model"] else projecting).append(row)
    for model, label, rows in (
        ("gtrxl", "GTrXL, projecting its memory at every step", projecting),
        ("gtrxl, cached", "GTrXL, cached", cached),
    ):
        if rows:
            line = _line(model, [row["context"] for row in rows], rows)
            lines.append(dataclasses.replace(line, label=label))
    return lines


def _line(
    model: str,
    x: list[float],
    rows: list[dict[str, Any]],
    *,
    rate: bool = False,
    level: bool = False,
) -> Line:
    """The rows' milliseconds, or with `rate` their actions per second."""

    def values(time: str, inverse: str) -> list[float]:
        # The quartile of a rate that is low is that of a time that is high.
        return [1e3 * r["x"] / r[inverse] if rate else r[time] for r in rows]

    y = values("milliseconds", "milliseconds")
    low, high = values("low", "high"), values("high", "low")
    return Line(model, x, y, _colour(model), low, high, *_style(model), level)


def _colour(model: str) -> str:
    return next((c for name, c in _COLOURS.items() if model.startswith(name)), BLACK)


def _style(model: str) -> tuple[Any, str]:
    """Dashes and marker, in which models of one colour differ."""
    if model in (READ, PRODUCTS):
        return ":", "o"
    return next((style for part, style in _STYLES.items() if part in model), ("-", "o"))
