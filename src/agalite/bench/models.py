"""`agalite bench throughput --models`: models and encoders against their own matrix products.

Training: forward and backward over 256 steps of 8 sequences at the paper's T-Maze size. The lower
bound is AGaLiTe's matrix products alone, three of each weight, on the same number of rows; the
models of OWN_PRODUCTS are compared with their own products.
Streaming: one step at the size of the paper's latency appendix (12 layers, 8 heads), against
matrix-vector products that read as many weights once.
Encoders: forward and backward of a minibatch of frames, by the custom kernels and by XLA.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agalite.bench import encoders
from agalite.bench.model_configs import SIZE as STREAMING_SIZE
from agalite.bench.model_configs import UNFOLDED, make_model
from agalite.bench.programs import as_matrix, stream, weight_arrays
from agalite.bench.report import at_least, at_most, show_targets, write_results
from agalite.bench.timing import Program, compile_program, interleave, progress_bar
from agalite.memory import Memory, make_memory
from agalite.ops.resets import broadcast_state

STEPS, BATCH, INPUT_SIZE = 256, 8, 16

TRAINING: dict[str, tuple[str, dict[str, Any]]] = {
    "agalite r=1": ("agalite", {}),
    "agalite r=1 published": ("agalite", {"basis": "published"}),
    "agalite r=7": ("agalite", {"r": 7}),
    "agalite r=7 slots": ("agalite", {"r": 7, "basis": "slots"}),
    "agalite r=1 associative, unfolded": (UNFOLDED, {"method": "associative"}),
    "galite": ("galite", {}),
    "linear": ("linear", {}),
    "transformer-128": ("transformer", {"context": 128}),
    "gtrxl-128": ("gtrxl", {"memory": 128}),
    "gtrxl-256": ("gtrxl", {"memory": 256}),
    "gru": ("gru", {}),
    "lstm": ("lstm", {}),
    "lru": ("lru", {}),
    "s5": ("s5", {}),
    "rtu": ("rtu", {}),
    "rtu nonlinear": ("rtu", {"variant": "nonlinear"}),
    "mingru": ("mingru", {}),
    "mlstm": ("mlstm", {}),
    "deltanet": ("deltanet", {}),
    "mamba2": ("mamba2", {}),
    "ffm": ("ffm", {}),
    "feedforward": ("feedforward", {}),
}
OWN_PRODUCTS = (
    *("lru", "s5", "rtu", "rtu nonlinear", "mingru"),
    *("mlstm", "deltanet", "mamba2", "ffm"),
)
"""The rows of `TRAINING` that are compared with their own matrix products."""


def bound_of(label: str) -> str:
    """The program that a row of `TRAINING` is compared with."""
    return f"products of {label}" if label in OWN_PRODUCTS else "products"


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes the times of training and streaming.

    **Arguments:**

    - `rounds`: how often each program is timed; a streaming step at least 50 times.
    - `out`: a JSON file to write; None writes nothing.
    """
    with progress_bar() as progress:
        training = _training(rounds, progress)
        streaming = _streaming(max(rounds, 50), progress)
        pictures = encoders.time_encoders(rounds, progress)
    console = Console()
    console.print(_training_table(training))
    console.print(_streaming_table(streaming))
    console.print(encoders.table(pictures))
    targets = [*_targets(training, streaming), *encoders.targets(pictures)]
    show_targets(targets)
    if out is not None:
        write_results(
            out,
            {
                "training": {name: _row(p) for name, p in training.items()},
                "streaming": {name: _row(p) for name, p in streaming.items()},
                "encoders": {name: _row(p) for name, p in pictures.items()},
                "targets": targets,
            },
        )


def gradient_of(memory: Memory) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a loss over inputs (STEPS, BATCH, INPUT_SIZE), and its arguments."""
    weights, rest = eqx.partition(memory, eqx.is_inexact_array)
    start = broadcast_state(memory.initial_state(), BATCH)
    xs = jax.random.normal(jax.random.key(1), (STEPS, BATCH, INPUT_SIZE))
    resets = jax.random.bernoulli(jax.random.key(2), 0.01, (STEPS, BATCH))

    def loss(weights: Any, start: Any, xs: Array, resets: Array) -> Array:
        scan = eqx.combine(weights, rest).scan
        _, ys = jax.vmap(scan, in_axes=(0, 1, 1), out_axes=(0, 1))(start, xs, resets)
        return jnp.mean(jnp.square(ys))

    return jax.grad(loss), (weights, start, xs, resets)


def products_of(memory: Memory) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The three products of training of each weight on STEPS * BATCH rows, and their arguments."""
    matrices = [as_matrix(w) for w in weight_arrays(memory)]
    key = jax.random.key(0)
    inputs = [jax.random.normal(key, (STEPS * BATCH, w.shape[1])) for w in matrices]
    gradients = [jax.random.normal(key, (STEPS * BATCH, w.shape[0])) for w in matrices]

    def products(ws: list[Array], xs: list[Array], ds: list[Array]) -> list[Any]:
        return [(x @ w.T, d @ w, d.T @ x) for w, x, d in zip(ws, xs, ds, strict=True)]

    return products, (matrices, inputs, gradients)


def _training(rounds: int, progress: Progress) -> dict[str, Program]:
    """By label: a gradient of each model, and the bounds, by the names of `bound_of`."""
    task = progress.add_task("compiling", total=1 + len(TRAINING))
    base = make_memory("agalite", INPUT_SIZE)
    function, args = products_of(base)
    programs = {"products": compile_program("agalite's matrix products", function, *args)}
    progress.advance(task)
    for label, (name, options) in TRAINING.items():
        memory = make_model(name, INPUT_SIZE, **options)
        if label in OWN_PRODUCTS:
            function, args = products_of(memory)
            programs[bound_of(label)] = compile_program(
                f"{label}'s matrix products", function, *args
            )
        function, args = gradient_of(memory)
        programs[label] = compile_program(label, function, *args)
        progress.advance(task)
    interleave(list(programs.values()), progress, runs=rounds)
    return programs


def _streaming(rounds: int, progress: Progress) -> dict[str, Program]:
    """A step of AGaLiTe and two bounds: its weights read at once, and layer by layer."""
    memory = make_memory("agalite", STREAMING_SIZE["d_model"], **STREAMING_SIZE)
    x = jnp.ones(memory.input_size)
    key = jax.random.key(0)
    rows = memory.parameter_count // 4096
    whole = jax.random.normal(key, (rows, 4096))
    chain = [as_matrix(w) for w in weight_arrays(memory)]

    def chained(matrices: list[Array], x: Array) -> Array:
        # Each product depends on the one before it, as the layers of a model do.
        for w in matrices:
            x = w @ jnp.resize(x, (w.shape[1],))
        return x

    programs = {
        "one product": compile_program(
            "one matrix-vector product, as many weights", lambda w, v: w @ v, whole, jnp.ones(4096)
        ),
        "chain": compile_program("the model's own products, in a chain", chained, chain, x),
        "step": stream("agalite r=1, one step", memory),
    }
    interleave(list(programs.values()), progress, runs=rounds)
    return programs


def _targets(training: dict[str, Program], streaming: dict[str, Program]) -> list[dict[str, Any]]:
    products, agalite = training["products"], training["agalite r=1"]
    associative = training["agalite r=1 associative, unfolded"]
    galite = training["galite"]

    return [
        at_least("associative, unfolded / agalite r=1", associative.ratio(agalite), 3),
        *(
            at_most(f"{name} / its matrix products", training[name].ratio(products), limit)
            for name, limit in (
                ("agalite r=1", 1.5),
                ("agalite r=1 published", 1.5),
                ("agalite r=7", 2.5),
                ("agalite r=7 slots", 2.5),
            )
        ),
        *(
            at_most(
                f"{name} / its matrix products", training[name].ratio(training[bound_of(name)]), 2
            )
            for name in OWN_PRODUCTS
        ),
        at_most("galite / agalite r=1", galite.ratio(agalite), 2),
        at_most("galite, temporary memory in MB", galite.temporary_bytes / 1e6, 300),
        at_most("step / one product", streaming["step"].ratio(streaming["one product"]), 1.2),
        at_most("step / chained products", streaming["step"].ratio(streaming["chain"]), 1.2),
    ]


def _training_table(programs: dict[str, Program]) -> Table:
    table = Table(title=f"Forward and backward, T={STEPS}, B={BATCH}, T-Maze size")
    for column in ("program", "ms", "spread", "/ products", "temporary MB", "steps/s"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for label, p in programs.items():
        rate = STEPS * BATCH / (p.milliseconds / 1e3)
        table.add_row(
            p.name,
            f"{p.milliseconds:.1f}",
            f"{p.spread:.0%}",
            f"{p.ratio(programs[bound_of(label)]):.2f}",
            f"{p.temporary_bytes / 1e6:.0f}",
            f"{rate:,.0f}",
        )
    return table


def _streaming_table(programs: dict[str, Program]) -> Table:
    table = Table(title="One streaming step, batch 1, 12 layers, 8 heads, V=64, d=256")
    for column in ("program", "ms", "spread", "/ one product"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for p in programs.values():
        ratio = p.ratio(programs["one product"])
        table.add_row(p.name, f"{p.milliseconds:.2f}", f"{p.spread:.0%}", f"{ratio:.2f}")
    return table


def _row(p: Program) -> dict[str, Any]:
    return {
        "milliseconds": p.milliseconds,
        "spread": p.spread,
        "temporary_bytes": p.temporary_bytes,
        "seconds": p.seconds,
    }
