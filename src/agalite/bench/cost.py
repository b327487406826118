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

from agalite import errors, files, native
from agalite.bench import cost_report, scaling
from agalite.bench.counts import (
    AGALITE,
    AGALITE_FOLDED,
    CLAIMS,
    COUNTS,
    GTRXL,
    GTRXL_CACHED,
    GTRXL_PLAIN,
    Claim,
    ratios,
)  # fmt: skip
from agalite.bench.latency import check_folder, command
from agalite.bench.report import write_results
from agalite.bench.timing import progress_bar
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
    errors.number("seconds", seconds, minimum=0, above=True)
    errors.integer("stream", stream, minimum=1000)
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
    cost_report.show(results)
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
        "where": claim.where, "sizes": claim.sizes, "counted": counted,
        "paper": {"operations": claim.operations, "state": claim.state},
    }  # fmt: skip


# --- what the compiler says ---------------------------------------------------------------------


def compiled_heads(claims: tuple[Claim, ...], progress: Progress) -> list[dict[str, Any]]:
    """By claim: the cost of one attention head as compiled, with its norm and its output."""
    variants: dict[str, tuple[str, Any]] = {
        "GTrXL, projecting its memory": ("gtrxl", lambda s: {"memory": s["M"], "cache": False}),
        "GTrXL, cached": ("gtrxl", lambda s: {"memory": s["M"], "cache": True}),
        "AGaLiTe, not folded": (
            "agalite", lambda s: {"eta": s["eta"], "r": s["r"], "fold": False},
        ),
        "AGaLiTe": ("agalite", lambda s: {"eta": s["eta"], "r": s["r"]}),
    }  # fmt: skip
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
    with native.switched_off():  # the compiler cannot look into our kernels
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
    drawn = cost_report.figure(results["scaling"], layers, folder / "scaling")
    for path in (folder / "cost.csv", *drawn):
        Console().print(f"written to {path}", highlight=False, soft_wrap=True)
