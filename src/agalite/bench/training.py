"""`agalite bench throughput --training`: the whole training loop, at the paper's T-Maze settings.

Eight environments, rollouts of 256 steps, corridor 160, A2C: acting, stepping and learning in one
program, as `agalite train` runs it. Beside the steps per second the table has the share of the
machine's rate of float32 matrix products, measured in the same rounds, that the model's arithmetic
makes up: 2 operations per parameter and step for acting and 6 for learning.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from agalite.agents.a2c import A2C
from agalite.bench.report import at_least, show_targets, write_results
from agalite.bench.timing import Program, compile_program, interleave, progress_bar
from agalite.training.config import TrainConfig
from agalite.training.session import enable_compilation_cache
from agalite.training.train import Trainer

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "agalite(4,1)": ("agalite", {}),
    "galite(4)": ("galite", {}),
    "gtrxl-128": ("gtrxl", {"memory": 128}),
    "gtrxl-256": ("gtrxl", {"memory": 256}),
    "linear": ("linear", {}),
    "gru": ("gru", {}),
    "lstm": ("lstm", {}),
}
FLOPS_PER_PARAMETER = 2 + 6  # per step: acting, learning
SIDE = 2048  # of the square matrices whose product measures the machine's rate


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes steps per second.

    **Arguments:**

    - `rounds`: how often an update of each model is timed.
    - `out`: a JSON file to write; None writes nothing.
    """
    enable_compilation_cache()
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=1 + len(MODELS))
        square = jnp.ones((SIDE, SIDE))
        programs = [compile_program("matrix product", lambda a: a @ a, square)]
        progress.advance(task)
        trainers = {}
        for label, (memory, options) in MODELS.items():
            trainers[label] = _trainer(memory, options)
            programs.append(update_program(label, trainers[label]))
            progress.advance(task)
        interleave(programs, progress, runs=rounds)
    product, *training = programs
    rows = [
        training_row(
            p,
            product,
            trainers[p.name],
            FLOPS_PER_PARAMETER * trainers[p.name].parameter_count,
        )
        for p in training
    ]
    title = "Training, T-Maze 160, A2C, 8 environments x 256 steps"
    Console().print(training_table(title, "memory", product, rows))
    targets = _targets(rows, {p.name: p for p in training})
    show_targets(targets)
    if out is not None:
        write_training(out, product, rows, targets)


def _trainer(memory: str, options: dict[str, Any]) -> Trainer:
    config = TrainConfig(
        env="tmaze",
        env_options={"corridor": 160},
        memory=memory,
        memory_options=options,
        agent=A2C(),
        num_envs=8,
        num_steps=256,
    )
    return Trainer(config)


def update_program(label: str, trainer: Trainer) -> Program:
    """One update: acting, stepping and learning."""
    state = jax.jit(trainer.init)(jnp.uint32(0))
    advance = partial(trainer.advance, updates=jnp.int32(1))
    return compile_program(label, lambda state: advance(state)[1], state)


def training_row(
    p: Program, product: Program, trainer: Trainer, flops_per_step: int
) -> dict[str, Any]:
    """What was measured of an update, as the table and result files have it.

    **Arguments:**

    - `p`: from `update_program`.
    - `product`: the product of two matrices (SIDE, SIDE), timed in the same rounds.
    - `trainer`: of `p`.
    - `flops_per_step`: operations of the model's matrix products for one step, learning included.
    """
    steps = trainer.config.steps_per_update
    return {
        "name": p.name,
        "parameters": trainer.parameter_count,
        "steps_per_second": steps / (p.milliseconds / 1e3),
        "spread": p.spread,
        "share_of_product_rate": (flops_per_step * steps / 2 / SIDE**3) / p.ratio(product),
        "temporary_bytes": p.temporary_bytes,
        "seconds": p.seconds,
    }


def _targets(rows: list[dict[str, Any]], programs: dict[str, Program]) -> list[dict[str, Any]]:
    agalite = programs["agalite(4,1)"]
    return [
        at_least("agalite(4,1), share of the product rate", rows[0]["share_of_product_rate"], 0.35),
        at_least("gtrxl-256's time / agalite(4,1)'s", programs["gtrxl-256"].ratio(agalite), 2),
    ]


def write_training(
    out: Path, product: Program, rows: list[dict[str, Any]], targets: list[dict[str, Any]]
) -> None:
    """Writes the result file of a benchmark of training."""
    rate = 2 * SIDE**3 / np.array(product.seconds) / 1e9
    write_results(out, {"gflops_of_products": rate.tolist(), "training": rows, "targets": targets})


def training_table(title: str, first: str, product: Program, rows: list[dict[str, Any]]) -> Table:
    """A table of rows, named in the column `first`; those not trained have a rate only."""
    rate = 2 * SIDE**3 / (product.milliseconds / 1e3) / 1e9
    table = Table(title=f"{title}; the machine multiplies at {rate:.0f} GFLOP/s")
    for column in (first, "parameters", "steps/s", "spread", "share", "temporary MB"):
        table.add_column(column, justify="left" if column == first else "right")
    for row in rows:
        trained = "parameters" in row
        table.add_row(
            row["name"],
            f"{row['parameters']:,}" if trained else "",
            f"{row['steps_per_second']:,.0f}",
            f"{row['spread']:.0%}",
            f"{row['share_of_product_rate']:.0%}" if trained else "",
            f"{row['temporary_bytes'] / 1e6:.0f}" if trained else "",
        )
    return table
