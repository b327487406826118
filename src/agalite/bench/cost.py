"""`agalite bench cost`: operations and memory of the models, beside the paper's claims.

Three sources: formulas that follow the algorithms (flops.py), XLA's analysis of the compiled
program of one attention head, and times of whole models as one size after the other grows: the
length of the stream, eta, r and the width.
"""

import csv
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agalite import files, kernels, validation
from agalite.bench import flops, programs
from agalite.bench.flops import CLAIMS, COUNTS, Claim
from agalite.bench.model_configs import UNFOLDED, ModelConfig, build, make_model
from agalite.bench.report import (
    Line,
    Panel,
    check_folder,
    command_line,
    draw_figure,
    show_paths,
    write_results,
)
from agalite.bench.timing import Program, compile_program, interleave, load_average, progress_bar
from agalite.charts import BLUE, GREEN, ORANGE
from agalite.training.session import enable_compilation_cache

RATIOS = {
    "line by line": (flops.GTRXL, flops.AGALITE),
    "without relative positions": (flops.GTRXL_PLAIN, flops.AGALITE),
    "folded": (flops.GTRXL, flops.AGALITE_FOLDED),
    "folded, GTrXL cached": (flops.GTRXL_CACHED, flops.AGALITE_FOLDED),
}
"""By name: which count of GTrXL is divided by which of AGaLiTe."""
# The paper's T-Maze size, at which the scaling is measured.
SIZE: dict[str, Any] = {
    "d_model": 128,
    "layers": 4,
    "heads": 4,
    "head_size": 64,
    "ffn_size": 128,
}
_AGALITE, _GALITE, _GTRXL = "AGaLiTe", "GaLiTe", "GTrXL-128, cached"
_GTRXL_WHOLE = "GTrXL that keeps the whole stream, cached"
ENVS, STEPS = 8, 256
"""Of an update in the paper's T-Maze."""
_COLOURS = {_AGALITE: BLUE, _GALITE: GREEN}
_STREAM_LENGTHS = (128, 512, 2048, 8192)
_LAST_STEPS = 100  # before each length, over which AGaLiTe's time is taken


def run(*, seconds: float, stream: int, quick: bool, out: Path | None) -> None:
    """Counts, measures, prints and writes the cost of models.

    **Arguments:**

    - `seconds`: time limit of each program of the scaling figure.
    - `stream`: steps of the stream whose every step is timed, at least 1000.
    - `quick`: one layer and few sizes.
    - `out`: a folder for cost.json, cost.csv and the figure; None writes nothing.
    """
    validation.check_number("seconds", seconds, minimum=0, above=True)
    validation.check_integer("stream", stream, minimum=1000)
    if out is not None:
        check_folder(out)
    enable_compilation_cache()
    load = load_average()
    size = SIZE | {"layers": 1} if quick else SIZE
    with progress_bar() as progress:
        compiled = compiled_heads(CLAIMS[:1] if quick else CLAIMS, progress)
        training = training_memory(size, progress)
        scaling = measure_scaling(
            size, seconds=seconds, stream=stream, quick=quick, progress=progress
        )
    results = {
        "formulas": _formula_rows(),
        "claims": [_claim_row(claim) for claim in CLAIMS],
        "compiled": compiled,
        "training": training,
        "scaling": scaling,
    }
    show(results)
    if out is not None:
        about = {"benchmark": "cost", "command": command_line(), "load_before": load}
        settings = {"seconds_for_each": seconds, "stream": stream, "size": size}
        write_results(out / "cost.json", about | {"settings": settings} | results)
        write(results, size["layers"], out)


def _formula_rows() -> list[dict[str, Any]]:
    sizes = CLAIMS[0].sizes
    return [
        {
            "name": c.name,
            "operations": c.operations,
            "state": c.state,
            "sizes": sizes,
            "total_operations": c.total("operations", **sizes),
            "total_state": c.total("state", **sizes),
            "layer_state": c.layer_state(**sizes),
        }
        for c in COUNTS
    ]


def _claim_row(claim: Claim) -> dict[str, Any]:
    counted = {name: flops.ratios(claim, *pair) for name, pair in RATIOS.items()}
    return {
        "where": claim.where,
        "sizes": claim.sizes,
        "counted": counted,
        "paper": {"operations": claim.operations, "state": claim.state},
    }


# --- XLA's analysis of one head -------------------------------------------------------------------

_Options = Callable[[dict[str, int]], dict[str, Any]]
_HEADS: dict[str, tuple[str, _Options]] = {
    "GTrXL, projecting its memory": ("gtrxl", lambda s: {"memory": s["M"], "cache": False}),
    "GTrXL, cached": ("gtrxl", lambda s: {"memory": s["M"], "cache": True}),
    "AGaLiTe, not folded": (UNFOLDED, lambda s: {"eta": s["eta"], "r": s["r"]}),
    "AGaLiTe": ("agalite", lambda s: {"eta": s["eta"], "r": s["r"]}),
}
"""By label: a model, and its options at the sizes of a claim."""


def compiled_heads(claims: tuple[Claim, ...], progress: Progress) -> list[dict[str, Any]]:
    """`head_cost` of GTrXL and AGaLiTe at the sizes of each claim."""
    task = progress.add_task("compiling one head", total=len(claims) * len(_HEADS))
    rows = []
    for claim in claims:
        for label, (name, options) in _HEADS.items():
            cost = head_cost(name, claim.sizes["d"], claim.sizes["V"], options(claim.sizes))
            rows.append({"where": claim.where, "model": label, **cost})
            progress.advance(task)
    progress.remove_task(task)
    return rows


def head_cost(name: str, d_model: int, head_size: int, options: dict[str, Any]) -> dict[str, float]:
    """XLA's count for one input of a stream through one attention head, its norm and its output.

    **Arguments:**

    - `name`: of a model made of blocks.
    - `d_model`, `head_size`: d and V.
    - `options`: further options of the model.

    **Returns:**

    `flops`, `bytes_accessed`, `temporary_bytes` and `state_floats`. Nothing is run.
    """
    sizes = {"d_model": d_model, "layers": 1, "heads": 1, "head_size": head_size, "ffn_size": 1}
    memory: Any = eqx.filter_eval_shape(make_model, name, 1, **sizes, **options)
    attention = memory.blocks[0].attention
    weights, rest = eqx.partition(attention, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    state: Any = eqx.filter_eval_shape(lambda attention: attention.initial_state(), attention)

    def step(weights: Any, state: Any, h: Array, resets: Array) -> Any:
        return eqx.combine(weights, rest)(state, h, resets)

    args = weights, state, jnp.ones((1, d_model)), jnp.zeros(1, bool)
    with kernels.switched_off():  # XLA cannot count inside custom kernels
        compiled = jax.jit(step, donate_argnums=1).lower(*args).compile()
    cost: Any = compiled.cost_analysis() or {}
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return {
        "flops": float(cost.get("flops", float("nan"))),
        "bytes_accessed": float(cost.get("bytes accessed", float("nan"))),
        "temporary_bytes": programs.temporary_bytes(compiled),
        "state_floats": sum(x.size for x in floats),
    }


# --- Memory of training ---------------------------------------------------------------------------

_TRAINED = {
    _AGALITE: ModelConfig("agalite"),
    _GALITE: ModelConfig("galite"),
    "GTrXL-128": ModelConfig("gtrxl", {"memory": 128}),
}


def training_memory(size: dict[str, Any], progress: Progress) -> list[dict[str, Any]]:
    """Memory of a gradient over T-Maze's batch in the paper, `ENVS` sequences of `STEPS`.

    As XLA compiled it for this CPU, with the methods of a CPU and with those of an accelerator,
    whose compiler may need more or less. What custom kernels allocate for each thread is not in it.
    Nothing is run.
    """
    task = progress.add_task("compiling gradients", total=2 * len(_TRAINED))
    rows = []
    for label, config in _TRAINED.items():
        memory = build(config, size)
        weights = sum(x.nbytes for x in programs.weight_arrays(memory))
        for backend in ("cpu", "accelerator"):
            with nullcontext() if backend == "cpu" else kernels.as_on_accelerator():
                compiled = compile_program(label, *programs.batch_backward(memory, STEPS, ENVS))
            rows.append(
                {
                    "model": label,
                    "backend": backend,
                    "temporary_bytes": compiled.temporary_bytes,
                    "weights_bytes": weights,
                }
            )
            progress.advance(task)
    progress.remove_task(task)
    return rows


# --- Time and state as one size grows -------------------------------------------------------------


def measure_scaling(
    size: dict[str, Any], *, seconds: float, stream: int, quick: bool, progress: Progress
) -> list[dict[str, Any]]:
    """Time and state of one streaming step against the stream's length, eta, r and the width.

    **Arguments:**

    - `size`: of the models in everything that is not varied.
    - `seconds`: time limit of each program.
    - `stream`: length of the longest stream.
    - `quick`: two values of each size.
    - `progress`: shows how far it is.

    **Returns:**

    One entry for each panel of the figure: the size that grows, and rows of model, x, times and
    state.
    """
    count = 2 if quick else None
    configs: dict[tuple[str, str, int], tuple[ModelConfig, dict[str, Any]]] = {}
    for eta in (1, 4, 16, 64)[:count]:
        configs["eta", _AGALITE, eta] = ModelConfig("agalite", {"eta": eta}), size
        configs["eta", _GALITE, eta] = ModelConfig("galite", {"eta": eta}), size
    for r in (1, 3, 7, 15, 31)[:count]:
        configs["r", _AGALITE, r] = ModelConfig("agalite", {"r": r}), size
    for d in (64, 128, 256, 512)[:count]:
        # T-Maze's proportions: the heads together are twice as wide as the model.
        wide = size | {"d_model": d, "ffn_size": d, "head_size": d // 2}
        configs["width", _AGALITE, d] = ModelConfig("agalite"), wide
        configs["width", _GALITE, d] = ModelConfig("galite"), wide
        configs["width", _GTRXL, d] = ModelConfig("gtrxl", {"memory": 128}), wide
    lengths = [n for n in _STREAM_LENGTHS if n <= stream][:count]
    for n in lengths:
        configs["stream", _GTRXL_WHOLE, n] = ModelConfig("gtrxl", {"memory": n}), size
    timed = _time_configs(configs, seconds, progress)
    parts: dict[str, list[dict[str, Any]]] = {
        "stream": _time_stream(size, lengths[-1] if quick else stream, lengths, progress),
        "eta": [],
        "r": [],
        "width": [],
    }
    for (part, label, x), (program, state_floats) in timed.items():
        parts[part].append(_scaling_row(label, x, program.seconds, state_floats))
    names = {"stream": "length of the stream", "eta": "eta", "r": "r", "width": "width d"}
    return [{"against": names[part], "rows": rows} for part, rows in parts.items()]


def _time_configs(
    configs: dict[Any, tuple[ModelConfig, dict[str, Any]]], seconds: float, progress: Progress
) -> dict[Any, tuple[Program, int]]:
    """By the keys of `configs`: a timed step and the floats of its state."""
    task = progress.add_task("compiling sizes", total=len(configs))
    out: dict[Any, tuple[Program, int]] = {}
    for key, (config, size) in configs.items():
        memory = build(config, size)
        out[key] = programs.stream(str(key), memory), memory.state_size
        progress.advance(task)
    progress.remove_task(task)
    timed = [program for program, _ in out.values()]
    interleave(timed, progress, runs=100, seconds=seconds, description="timing sizes")
    return out


def _time_stream(
    size: dict[str, Any], stream: int, lengths: list[int], progress: Progress
) -> list[dict[str, Any]]:
    """One stream of AGaLiTe with every step timed; rows of the last steps before each length."""
    memory = build(ModelConfig("agalite"), size)
    step = programs.stream(_AGALITE, memory)
    jax.block_until_ready(step.call())
    task = progress.add_task("streaming", total=stream)
    for i in range(stream):
        step.time()
        if i % 100 == 0:
            progress.update(task, completed=i)
    progress.remove_task(task)
    return [
        _scaling_row(_AGALITE, n, step.seconds[max(0, n - _LAST_STEPS) : n], memory.state_size)
        for n in lengths
    ]


def _scaling_row(model: str, x: int, seconds: list[float], state_floats: int) -> dict[str, Any]:
    low, median, high = (1e3 * float(q) for q in np.percentile(seconds, [25, 50, 75]))
    return {
        "model": model,
        "x": x,
        "milliseconds": median,
        "low": low,
        "high": high,
        "runs": len(seconds),
        "state_floats": state_floats,
        "seconds": seconds,
    }


# --- Tables, the CSV file and the figure ----------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """Prints the formulas, the ratios, XLA's analysis and the scaling as tables."""
    console = Console()
    for formula in results["formulas"]:
        console.print(_formula_table(formula))
    for what, title in (
        ("operations", "Operations of one head, GTrXL / AGaLiTe"),
        ("state", "State floats of one head, GTrXL / AGaLiTe"),
        ("layer_state", "State floats of a layer, whose heads share GTrXL's memory"),
    ):
        console.print(_claim_table(results["claims"], what, title))
    console.print(_compiled_table(results["compiled"]))
    console.print(_training_table(results["training"]))
    for part in results["scaling"]:
        console.print(_scaling_table(part))


def _formula_table(formula: dict[str, Any]) -> Table:
    sizes = ", ".join(f"{name}={value}" for name, value in formula["sizes"].items())
    table = Table(title=f"{formula['name']}  ({sizes})", title_justify="left")
    for column in ("", "formula", "count"):
        table.add_column(column, justify="right" if column == "count" else "left")
    for what, total in (("operations", "total_operations"), ("state", "total_state")):
        for name, text in formula[what].items():
            table.add_row(name, text, "")
        table.add_row(f"[bold]{what}[/bold]", "", f"[bold]{formula[total]:,}[/bold]")
    return table


def _claim_table(claims: list[dict[str, Any]], what: str, title: str) -> Table:
    table = Table(title=title)
    for column in ("", "paper", *claims[0]["counted"]):
        table.add_column(column, justify="right" if column else "left")
    for claim in claims:
        paper = claim["paper"].get(what)
        table.add_row(
            claim["where"],
            "" if paper is None else f"{paper:g}x",
            *(f"{counted[what]:.2f}x" for counted in claim["counted"].values()),
        )
    return table


def _compiled_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="One head as XLA compiled it, with its norm and its output projection")
    for column in (
        "",
        "model",
        "operations",
        "/ AGaLiTe",
        "bytes accessed",
        "/ AGaLiTe",
        "temporary kB",
        "state floats",
    ):
        table.add_column(column, justify="left" if column in ("", "model") else "right")
    agalite = {row["where"]: row for row in rows if row["model"] == _AGALITE}
    for row in rows:
        base = agalite[row["where"]]
        table.add_row(
            row["where"],
            row["model"],
            f"{row['flops']:,.0f}",
            f"{row['flops'] / base['flops']:.2f}x",
            f"{row['bytes_accessed']:,.0f}",
            f"{row['bytes_accessed'] / base['bytes_accessed']:.2f}x",
            f"{row['temporary_bytes'] / 1e3:,.1f}",
            f"{row['state_floats']:,}",
        )
    return table


def _training_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title=f"Memory of a gradient over {ENVS} sequences of {STEPS} steps, MB, as compiled for "
        "this CPU",
    )
    for column in ("model", "methods of", "activations", "a step", "weights"):
        table.add_column(column, justify="left" if column in ("model", "methods of") else "right")
    for row in rows:
        table.add_row(
            row["model"],
            row["backend"],
            f"{row['temporary_bytes'] / 1e6:,.1f}",
            f"{row['temporary_bytes'] / 1e6 / ENVS / STEPS:.3f}",
            f"{row['weights_bytes'] / 1e6:,.1f}",
        )
    return table


def _scaling_table(part: dict[str, Any]) -> Table:
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


def write(results: dict[str, Any], layers: int, folder: Path) -> None:
    """Writes cost.csv and the figure of the scaling."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("where", "source", "operations", "state", "layer_state"))
    for claim in results["claims"]:
        paper = claim["paper"]
        writer.writerow((claim["where"], "paper", paper["operations"], paper["state"], ""))
        for name, counted in claim["counted"].items():
            writer.writerow((claim["where"], name, *counted.values()))
    writer.writerow(())
    columns = ("against", "model", "x", "milliseconds", "low", "high", "runs", "state_floats")
    writer.writerow(columns)
    for part in results["scaling"]:
        for row in part["rows"]:
            writer.writerow((part["against"], *(row[c] for c in columns[1:])))
    files.write(folder / "cost.csv", text.getvalue().encode())
    figures = _draw_scaling(results["scaling"], layers, folder / "scaling")
    show_paths([folder / "cost.csv", *figures])


def _draw_scaling(parts: list[dict[str, Any]], layers: int, stem: Path) -> list[Path]:
    """Time on the left, state on the right; a row of panels for each size that grows."""
    panels = []
    for part in parts:
        times, states = [], []
        for model in dict.fromkeys(row["model"] for row in part["rows"]):
            rows = [row for row in part["rows"] if row["model"] == model]
            xs, colour = [row["x"] for row in rows], _COLOURS.get(model, ORANGE)
            low, high = [row["low"] for row in rows], [row["high"] for row in rows]
            times.append(Line(model, xs, [row["milliseconds"] for row in rows], colour, low, high))
            states.append(Line(model, xs, [row["state_floats"] for row in rows], colour))
        against = part["against"]
        panels.append(Panel(f"Time against {against}", against, "ms per step", times))
        panels.append(Panel(f"State against {against}", against, "floats", states))
    title = (
        f"One step of one stream; layers: {layers}, heads: 4, V = 64, d = 128, eta = 4, "
        "r = 1 where not varied\nline: median, band: middle half of the runs"
    )
    return draw_figure(stem, title, panels, columns=2)
