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
            programs.append(_program(label, trainers[label]))
            progress.advance(task)
        interleave(programs, progress, runs=rounds)
    product, *training = programs
    rows = [_row(p, product, trainers[p.name]) for p in training]
    Console().print(_table(product, rows))
    targets = _targets(rows, {p.name: p for p in training})
    show_targets(targets)
    if out is not None:
        rate = 2 * SIDE**3 / np.array(product.seconds) / 1e9
        write_results(
            out, {"gflops_of_products": rate.tolist(), "training": rows, "targets": targets}
        )


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


def _program(label: str, trainer: Trainer) -> Program:
    state = jax.jit(trainer.init)(jnp.uint32(0))
    advance = partial(trainer.advance, updates=jnp.int32(1))
    return compile_program(label, lambda state: advance(state)[1], state)


def _row(p: Program, product: Program, trainer: Trainer) -> dict[str, Any]:
    steps = trainer.config.steps_per_update
    flops = FLOPS_PER_PARAMETER * trainer.parameter_count * steps
    share = (flops / 2 / SIDE**3) / p.ratio(product)
    return {
        "name": p.name,
        "parameters": trainer.parameter_count,
        "steps_per_second": steps / (p.milliseconds / 1e3),
        "spread": p.spread,
        "share_of_product_rate": share,
        "temporary_bytes": p.temporary_bytes,
        "seconds": p.seconds,
    }


def _targets(rows: list[dict[str, Any]], programs: dict[str, Program]) -> list[dict[str, Any]]:
    agalite = programs["agalite(4,1)"]
    return [
        at_least("agalite(4,1), share of the product rate", rows[0]["share_of_product_rate"], 0.35),
        at_least("gtrxl-256's time / agalite(4,1)'s", programs["gtrxl-256"].ratio(agalite), 2),
    ]


def _table(product: Program, rows: list[dict[str, Any]]) -> Table:
    rate = 2 * SIDE**3 / (product.milliseconds / 1e3) / 1e9
    table = Table(
        title="Training, T-Maze 160, A2C, 8 environments x 256 steps; "
        f"the machine multiplies at {rate:.0f} GFLOP/s"
    )
    for column in ("memory", "parameters", "steps/s", "spread", "share", "temporary MB"):
        table.add_column(column, justify="left" if column == "memory" else "right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['steps_per_second']:,.0f}",
            f"{row['spread']:.0%}",
            f"{row['share_of_product_rate']:.0%}",
            f"{row['temporary_bytes'] / 1e6:.0f}",
        )
    return table
