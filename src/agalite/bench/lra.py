"""`agalite bench throughput --lra`: classifiers of long sequences, forward and backward.

One sequence of bytes, at the sizes of the paper's Long Range Arena models. The transformer attends
to the whole sequence before each token and starts from an empty memory, so that none of its work is
masked completely (supervised/classifier.py).
"""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from agalite.bench.report import at_least, show_targets, write_results
from agalite.bench.timing import Program, compile_program, interleave, progress_bar
from agalite.supervised.classifier import Classifier
from agalite.supervised.config import preset
from agalite.supervised.text import CLASSES, VOCABULARY

LENGTHS = (2048, 4096)
MODELS = ("agalite", "galite", "linear", "transformer")


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes tokens per second.

    **Arguments:**

    - `rounds`: how often each classifier is timed.
    - `out`: a JSON file to write; None writes nothing.
    """
    programs: dict[tuple[str, int], Program] = {}
    with progress_bar() as progress:
        for length in LENGTHS:
            task = progress.add_task(f"compiling for {length}", total=len(MODELS))
            for name in MODELS:
                function, args = gradient_of(name, length)
                programs[name, length] = compile_program(f"{name}, {length}", function, *args)
                progress.advance(task)
        interleave(list(programs.values()), progress, runs=rounds)
    Console().print(_table(programs))
    long = LENGTHS[-1]
    ratio = programs["transformer", long].ratio(programs["agalite", long])
    targets = [at_least(f"transformer / agalite at {long}", ratio, 3)]
    show_targets(targets)
    if out is not None:
        rows = {program.name: _row(program, key[1]) for key, program in programs.items()}
        write_results(out, {"programs": rows, "targets": targets})


def gradient_of(name: str, length: int) -> tuple[Any, tuple[Any, ...]]:
    """The function that gives the loss and its gradient for one sequence, and its arguments."""
    model = Classifier(
        VOCABULARY,
        CLASSES,
        memory=name,
        memory_options=preset("paper", name, length),
        key=jax.random.key(0),
    )
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (length, 1)), jnp.uint8)
    resets = jnp.zeros((length, 1), bool).at[0].set(True)
    starts, ends = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), length, jnp.int32)

    def loss(weights: Any, tokens: Array) -> Array:
        logits = eqx.combine(weights, rest)(tokens, resets, starts, ends)
        return -jax.nn.log_softmax(logits)[0, 0, 0]

    return jax.value_and_grad(loss), (weights, tokens)


def _table(programs: dict[tuple[str, int], Program]) -> Table:
    table = Table(
        title="Forward and backward over one sequence, at the paper's LRA sizes (eta = 8)"
    )
    for column in ("model", "length", "tokens/s", "spread", "/ agalite", "temporary MB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for (name, length), program in programs.items():
        table.add_row(
            name,
            f"{length}",
            f"{_rate(program, length):,.0f}",
            f"{program.spread:.0%}",
            f"{program.ratio(programs['agalite', length]):.2f}",
            f"{program.temporary_bytes / 1e6:,.0f}",
        )
    return table


def _rate(program: Program, length: int) -> float:
    return length / (program.milliseconds / 1e3)


def _row(program: Program, length: int) -> dict[str, Any]:
    return {
        "tokens_per_second": _rate(program, length),
        "milliseconds": program.milliseconds,
        "spread": program.spread,
        "temporary_bytes": program.temporary_bytes,
        "seconds": program.seconds,
    }
