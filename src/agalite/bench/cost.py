"""`agalite bench cost`: operations and memory of one head, counted, compiled and beside the paper.

Three sources: formulas that follow the algorithms (counts.py), what XLA says of the compiled
program of one attention head, and times of whole models as one size after the other grows.
"""

import csv
import io
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agalite import files, kernels, validation
from agalite.bench import scaling
from agalite.bench.flops import (
    AGALITE,
    AGALITE_FOLDED,
    CLAIMS,
    COUNTS,
    GTRXL,
    GTRXL_CACHED,
    GTRXL_PLAIN,
    Claim,
    ratios,
)
from agalite.bench.latency import check_folder, command
from agalite.bench.report import Line, Panel, draw, write_results
from agalite.bench.scaling import AGALITE as AGALITE_LABEL
from agalite.bench.scaling import GALITE as GALITE_LABEL
from agalite.bench.timing import progress_bar
from agalite.charts import BLUE, GREEN, ORANGE
from agalite.memory import make_memory
from agalite.training.session import remember_programs

PAIRS = {
    "line by line": (GTRXL, AGALITE),
    "without relative positions": (GTRXL_PLAIN, AGALITE),
    "folded": (GTRXL, AGALITE_FOLDED),
    "folded, GTrXL cached": (GTRXL_CACHED, AGALITE_FOLDED),
}
"""What of GTrXL is divided by what of AGaLiTe."""


def run(*, seconds: float, stream: int, quick: bool, out: Path | None) -> None:
    validation.number("seconds", seconds, minimum=0, above=True)
    validation.integer("stream", stream, minimum=1000)
    if out is not None:
        check_folder(out)
    remember_programs()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with progress_bar() as progress:
        compiled = compiled_heads(CLAIMS[:1] if quick else CLAIMS, progress)
        scaled = scaling.measure(seconds=seconds, stream=stream, quick=quick, progress=progress)
    results = {
        "formulas": _formulas(),
        "claims": [_claim(claim) for claim in CLAIMS],
        "compiled": compiled,
        "scaling": scaled,
    }
    show(results)
    if out is not None:
        about = {"benchmark": "cost", "command": command(), "load_before": load}
        size = scaling.size(quick)
        settings = {"seconds_for_each": seconds, "stream": stream, "size": size}
        write_results(out / "cost.json", about | {"settings": settings} | results)
        _write(results, size["layers"], out)


def _formulas() -> list[dict[str, Any]]:
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


def _claim(claim: Claim) -> dict[str, Any]:
    counted = {name: ratios(claim, *pair) for name, pair in PAIRS.items()}
    return {
        "where": claim.where,
        "sizes": claim.sizes,
        "counted": counted,
        "paper": {"operations": claim.operations, "state": claim.state},
    }


# --- what the compiler says ---------------------------------------------------------------------


def compiled_heads(claims: tuple[Claim, ...], progress: Progress) -> list[dict[str, Any]]:
    """By claim: the cost of one attention head as compiled, with its norm and its output."""
    variants: dict[str, tuple[str, Any]] = {
        "GTrXL, projecting its memory": ("gtrxl", lambda s: {"memory": s["M"], "cache": False}),
        "GTrXL, cached": ("gtrxl", lambda s: {"memory": s["M"], "cache": True}),
        "AGaLiTe, not folded": (
            "agalite",
            lambda s: {"eta": s["eta"], "r": s["r"], "fold": False},
        ),
        "AGaLiTe": ("agalite", lambda s: {"eta": s["eta"], "r": s["r"]}),
    }
    task = progress.add_task("compiling one head", total=len(claims) * len(variants))
    rows = []
    for claim in claims:
        for label, (name, options) in variants.items():
            found = head_cost(name, claim.sizes["d"], claim.sizes["V"], options(claim.sizes))
            rows.append({"where": claim.where, "model": label, **found})
            progress.advance(task)
    progress.remove_task(task)
    return rows


def head_cost(name: str, d: int, head_size: int, options: dict[str, Any]) -> dict[str, float]:
    """XLA's own count for one input of a stream: operations, bytes and floats of the state."""
    sizes = {"d_model": d, "layers": 1, "heads": 1, "head_size": head_size, "ffn_size": 1}
    # Of shapes only: nothing is run, so there need not be weights.
    memory: Any = eqx.filter_eval_shape(make_memory, name, 1, **sizes, **options)
    attention = memory.blocks[0].attention
    weights, rest = eqx.partition(attention, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    state: Any = eqx.filter_eval_shape(lambda attention: attention.initial_state(), attention)

    def step(weights: Any, state: Any, h: Array, resets: Array) -> Any:
        return eqx.combine(weights, rest)(state, h, resets)

    args = weights, state, jnp.ones((1, d)), jnp.zeros(1, bool)
    with kernels.switched_off():  # the compiler cannot look into our kernels
        compiled = jax.jit(step, donate_argnums=1).lower(*args).compile()
    cost: Any = compiled.cost_analysis() or {}
    analysis = compiled.memory_analysis()
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return {
        "flops": float(cost.get("flops", float("nan"))),
        "bytes_accessed": float(cost.get("bytes accessed", float("nan"))),
        "temporary_bytes": 0 if analysis is None else analysis.temp_size_in_bytes,
        "state_floats": sum(x.size for x in floats),
    }


# --- files --------------------------------------------------------------------------------------


def _write(results: dict[str, Any], layers: int, folder: Path) -> None:
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
    drawn = figure(results["scaling"], layers, folder / "scaling")
    for path in (folder / "cost.csv", *drawn):
        Console().print(f"written to {path}", highlight=False, soft_wrap=True)


# --- What `agalite bench cost` says: formulas, the paper's ratios and ours, XLA's count, figures --

_COLOURS = {AGALITE_LABEL: BLUE, GALITE_LABEL: GREEN}


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
            claim["where"],
            "" if paper is None else f"{paper:g}x",
            *(f"{counted[what]:.2f}x" for counted in claim["counted"].values()),
        )
    return table


def _compiled(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="One head as XLA compiled it, with its norm and its output projection")
    for column in (
        "",
        "model",
        "operations",
        "/ AGaLiTe",
        "bytes touched",
        "/ AGaLiTe",
        "temporary kB",
        "state floats",
    ):
        table.add_column(column, justify="left" if column in ("", "model") else "right")
    base = {row["where"]: row for row in rows if row["model"] == AGALITE_LABEL}
    for row in rows:
        mine = base[row["where"]]
        table.add_row(
            row["where"],
            row["model"],
            f"{row['flops']:,.0f}",
            f"{row['flops'] / mine['flops']:.2f}x",
            f"{row['bytes_accessed']:,.0f}",
            f"{row['bytes_accessed'] / mine['bytes_accessed']:.2f}x",
            f"{row['temporary_bytes'] / 1e3:,.1f}",
            f"{row['state_floats']:,}",
        )
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
