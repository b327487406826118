"""`agalite bench traces`: what gradients past the rollout cost, and how exact a stack's are.

Cost: an update of A2C in T-Maze (acting, stepping and learning in one program) with traces and
without, interleaved. Every program continues from its own last state, as training does, so that the
later rounds also show whether the time grows with the length of the stream.

Angles: between the gradient of the last steps of a sequence and that of full backpropagation
through the whole sequence, for AGaLiTe with 1, 2 and 4 layers and one layer of every other model
that has traces, with them and without.
"""

import functools
import math
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from agalite.agents.a2c import A2C
from agalite.bench.report import at_most, show_targets, write_results
from agalite.bench.timing import Program, interleave, progress_bar, temporary_bytes
from agalite.memory import Memory, make_memory
from agalite.memory.registry import DIAGONAL, SMALL
from agalite.training.config import TrainConfig
from agalite.training.session import enable_compilation_cache
from agalite.training.train import Trainer

# Options of the memory, environments, steps of a rollout.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "full size, 8 x 256": ({}, 8, 256),
    "small, 32 x 64": (SMALL["agalite"], 32, 64),
    "small, 32 x 16": (SMALL["agalite"], 32, 16),
}
LIMIT = 1.5
DEPTHS = (("agalite", 1), ("agalite", 2), ("agalite", 4), *((name, 1) for name in DIAGONAL))
"""Models and their numbers of layers."""
STEPS, LAST = 128, 16


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes costs and angles.

    **Arguments:**

    - `rounds`: how often an update of each program is timed.
    - `out`: a JSON file to write; None writes nothing.
    """
    enable_compilation_cache()
    found = angles()
    Console().print(angle_table(found))
    rows, targets = [], []
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=2 * len(CASES))
        programs: dict[str, dict[str, Program]] = {}
        trainers = {}
        for case, (options, envs, steps) in CASES.items():
            programs[case] = {}
            for gradient in ("bptt", "rtrl"):
                trainers[case] = trainer = make_trainer(options, envs, steps, gradient)
                programs[case][gradient] = update_program(f"{case}, {gradient}", trainer)
                progress.advance(task)
        everything = [p for case in programs.values() for p in case.values()]
        interleave(everything, progress, runs=rounds)
    for case, pair in programs.items():
        rows.append(cost_row(case, trainers[case], pair["bptt"], pair["rtrl"]))
        targets.append(at_most(f"update with traces / without, {case}", rows[-1]["ratio"], LIMIT))
    Console().print(cost_table(rows))
    show_targets(targets)
    if out is not None:
        write_results(out, {"cost": rows, "angles": found, "targets": targets})


def make_trainer(options: dict[str, Any], envs: int, steps: int, gradient: str) -> Trainer:
    """A2C in T-Maze with a corridor of 160."""
    config = TrainConfig(
        env="tmaze",
        env_options={"corridor": 160},
        memory="agalite",
        memory_options=options,
        agent=A2C(),
        num_envs=envs,
        num_steps=steps,
        gradient=gradient,
    )
    return Trainer(config)


def update_program(label: str, trainer: Trainer) -> Program:
    """One update; every call continues where the last one stopped."""
    state = jax.jit(trainer.init)(jnp.uint32(0))
    advance = functools.partial(trainer.advance, updates=jnp.int32(1))
    compiled = jax.jit(advance, donate_argnums=0).lower(state).compile()
    last = [state]

    def call() -> Any:
        last[0], metrics = compiled(last[0])
        return metrics

    return Program(label, call, temporary_bytes(compiled))


def cost_row(case: str, trainer: Trainer, without: Program, with_: Program) -> dict[str, Any]:
    """What was measured of a case, as the table and result files have it."""
    c = trainer.config
    size = make_memory("agalite", 1, **c.memory_options).trace_size
    third = max(1, len(with_.seconds) // 3)
    return {
        "name": case,
        "parameters": trainer.parameter_count,
        "trace_floats": size,
        "trace_bytes": 4 * size * c.num_envs,
        "without_ms": without.milliseconds,
        "with_ms": with_.milliseconds,
        "ratio": with_.ratio(without),
        # Load affects both programs, so growth is that of the ratio.
        "last_third_by_first": float(
            np.median(np.divide(with_.seconds[-third:], without.seconds[-third:]))
            / np.median(np.divide(with_.seconds[:third], without.seconds[:third]))
        ),
        "temporary_bytes": [without.temporary_bytes, with_.temporary_bytes],
        "seconds": [without.seconds, with_.seconds],
    }


def cost_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="An update of A2C in T-Maze with traces, against one without")
    columns = (
        "case",
        "parameters",
        "trace floats",
        "MB of all",
        "without",
        "with",
        "ratio",
        "flat",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['trace_floats']:,}",
            f"{row['trace_bytes'] / 1e6:.0f}",
            f"{row['without_ms']:.1f} ms",
            f"{row['with_ms']:.1f} ms",
            f"{row['ratio']:.2f}",
            f"{row['last_third_by_first']:.2f}",
        )
    table.caption = (
        "trace floats: of one environment; MB: of all of them; flat: the ratio of the last third "
        "of the rounds by that of the first"
    )
    return table


def angles(depths: tuple[tuple[str, int], ...] = DEPTHS, seeds: int = 3) -> list[dict[str, Any]]:
    """Angles to full backpropagation, in degrees, means over `seeds` models.

    The gradient is that of a random linear function of the outputs of the last LAST of STEPS random
    inputs. Models have the small size, and time constants from 2 to 512 steps.

    **Arguments:**

    - `depths`: models and their numbers of layers.
    - `seeds`: how many models of each.
    """
    rows = []
    for name, layers in depths:
        measured = [_angles_of(name, layers, seed) for seed in range(seeds)]
        mean = {column: float(np.mean([m[column] for m in measured])) for column in measured[0]}
        rows.append({"model": name, "layers": layers, **mean})
    return rows


def _angles_of(name: str, layers: int, seed: int) -> dict[str, float]:
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    options = {**SMALL[name], "horizon": (2.0, 512.0), "layers": layers}
    model = make_memory(name, 16, key=a, **options)
    xs = jax.random.normal(b, (STEPS, 16))
    readout = jax.random.normal(c, (LAST, model.output_size))
    resets = jnp.zeros(STEPS, bool)

    def gradient(function: Any) -> Any:
        return eqx.filter_jit(jax.grad(lambda model: jnp.sum(readout * function(model))))(model)

    def full(model: Memory) -> Array:
        return model.scan(model.initial_state(), xs, resets)[1][-LAST:]

    @jax.jit
    def before(xs: Array) -> Any:
        start = model.initial_state(), xs, resets[:-LAST], model.initial_trace()
        return model.scan_and_advance(*start)[::2]

    state, trace = before(xs[:-LAST])
    last = xs[-LAST:], resets[-LAST:]
    expected = gradient(full)
    traced = gradient(lambda model: model.scan(state, *last, trace=trace)[1])
    truncated = gradient(lambda model: model.scan(state, *last)[1])

    def recurrent(gradient: Any) -> Any:
        """The weights that the traces are of: all but those that read the state."""
        return [
            eqx.filter(weights, eqx.is_array)
            for block in gradient.blocks
            for name, weights in vars(block.attention).items()
            if name not in ("out", "skip", "bias")
        ]

    return {
        "traces": angle(traced, expected),
        "truncated": angle(truncated, expected),
        "traces, recurrence": angle(recurrent(traced), recurrent(expected)),
        "truncated, recurrence": angle(recurrent(truncated), recurrent(expected)),
    }


def angle(a: Any, b: Any) -> float:
    """Between two pytrees of arrays, in degrees."""
    a, b = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
        for tree in (a, b)
    )
    cosine = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    return math.degrees(math.acos(min(1.0, max(-1.0, cosine))))


def angle_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title=f"Degrees between the gradient of the last {LAST} of {STEPS} steps and full "
        "backpropagation"
    )
    columns = ("traces", "truncated", "traces, recurrence", "truncated, recurrence")
    table.add_column("model")
    for column in ("layers", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row[column]:.1f}" for column in columns)
        table.add_row(row["model"], str(row["layers"]), *numbers)
    table.caption = "of all weights of the memory; and of those that the traces are of"
    return table
