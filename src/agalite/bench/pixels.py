"""`agalite bench throughput --training --pixels`: training where observations are images or large.

Mystery Path Grid with the small AGaLiTe and each encoder, as `agalite train` runs it, against the
machine's rate of float32 matrix products in the same rounds. A frame passes the network once for
acting and, in every epoch, once forward and twice backward, but for the first layer, whose pixels
need no gradient. Craftax Symbolic, where it is installed, against its own rate with random actions.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from agalite.agents.ppo import PPO
from agalite.bench.environments import random_rollout
from agalite.bench.programs import equations
from agalite.bench.report import at_least, show_targets
from agalite.bench.timing import Program, compile_program, interleave, progress_bar
from agalite.bench.training import (
    SIDE,
    training_row,
    training_table,
    update_program,
    write_training,
)
from agalite.envs.registry import ENVIRONMENTS
from agalite.memory.registry import SMALL
from agalite.training.config import TrainConfig
from agalite.training.presets import configure
from agalite.training.session import enable_compilation_cache
from agalite.training.train import Trainer

GRID, CRAFTAX = "mystery-path-grid", "craftax-symbolic"
MEMORY = "agalite"
ENCODERS = ("patch", "patch-large", "atari")
RANDOM = f"{CRAFTAX}, random actions"


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes steps per second.

    **Arguments:**

    - `rounds`: how often an update of each configuration is timed.
    - `out`: a JSON file to write; None writes nothing.
    """
    enable_compilation_cache()
    craftax = not ENVIRONMENTS[CRAFTAX].missing_packages()
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=1 + len(ENCODERS) + 2 * craftax)
        square = jnp.ones((SIDE, SIDE))
        programs = [compile_program("matrix product", lambda a: a @ a, square)]
        progress.advance(task)
        trainers = {}
        for encoder in ENCODERS:
            trainers[encoder] = _trainer(GRID, encoder=encoder)
            programs.append(update_program(encoder, trainers[encoder]))
            progress.advance(task)
        if craftax:
            trainers[CRAFTAX] = _trainer(CRAFTAX)
            programs.append(update_program(CRAFTAX, trainers[CRAFTAX]))
            progress.advance(task)
            programs.append(_random_program(trainers[CRAFTAX]))
            progress.advance(task)
        interleave(programs, progress, runs=rounds)
    by_name = {p.name: p for p in programs}
    product = by_name.pop("matrix product")
    rows = [_row(by_name[name], product, trainer) for name, trainer in trainers.items()]
    ratio = None
    if craftax:
        steps = trainers[CRAFTAX].config.steps_per_update
        ratio = by_name[RANDOM].milliseconds / by_name[CRAFTAX].milliseconds
        rows.append(
            {
                "name": RANDOM,
                "steps_per_second": steps / (by_name[RANDOM].milliseconds / 1e3),
                "spread": by_name[RANDOM].spread,
            }
        )
    title = "Training with the tuned preset and the small AGaLiTe"
    Console().print(training_table(title, "", product, rows))
    targets = _targets(rows, ratio)
    show_targets(targets)
    if out is not None:
        write_training(out, product, rows, targets)


def _trainer(env: str, **settings: Any) -> Trainer:
    config = configure(
        "tuned", {"env": env, "memory": MEMORY, "memory_options": SMALL[MEMORY], **settings}
    )
    assert isinstance(config, TrainConfig)
    return Trainer(config)


def _random_program(trainer: Trainer) -> Program:
    """As many steps of the environments as an update takes."""
    c = trainer.config
    rollout, state = random_rollout(trainer.env, c.num_envs, c.num_steps)
    return compile_program(RANDOM, rollout, state, jax.random.key(1))


def forward_flops(trainer: Trainer) -> tuple[int, int]:
    """Operations of the matrix products that one observation passes through, and of the first.

    Those of the encoder are counted in its program, where a weight multiplies every patch; each
    other parameter counts once.
    """
    model = jax.eval_shape(lambda: trainer.model(trainer.init(jnp.uint32(0)).weights))
    encoder = model.encoder
    space = trainer.env.observation_space(trainer.env.default_params)
    obs = jax.ShapeDtypeStruct(space.shape, space.dtype)
    program = jax.make_jaxpr(lambda encoder, obs: encoder(obs))(encoder, obs)
    inside = sum(x.size for x in jax.tree.leaves(encoder) if hasattr(x, "size"))
    products = [n for n in map(_product_flops, equations(program.jaxpr)) if n]
    return sum(products) + 2 * (trainer.parameter_count - inside), products[0]


def _product_flops(eqn: Any) -> int:
    """Of the matrix product that an equation is; 0 for others."""
    # Rows (..., n) by a weight: `ops.matmul`, `ops.sparse`, whose zeros count.
    if eqn.primitive.name in ("row_product", "sparse_forward"):
        return 2 * eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1]
    if eqn.primitive.name == "convolution_forward":  # `ops.convolution`
        return 2 * eqn.outvars[0].aval.size * eqn.params["window"].inputs
    return 0


def _row(p: Program, product: Program, trainer: Trainer) -> dict[str, Any]:
    agent = trainer.config.agent
    assert isinstance(agent, PPO)
    forward, first = forward_flops(trainer)
    flops = forward + agent.update_epochs * (3 * forward - first)
    row = training_row(p, product, trainer, flops)
    return row if p.name == CRAFTAX else {**row, "name": f"{GRID}, {p.name}"}


def _targets(rows: list[dict[str, Any]], ratio: float | None) -> list[dict[str, Any]]:
    by_name = {row["name"]: row for row in rows}
    patch, atari = by_name[f"{GRID}, patch"], by_name[f"{GRID}, atari"]
    found = [
        at_least("patch, steps per second", patch["steps_per_second"], 4000),
        at_least("patch, share of the product rate", patch["share_of_product_rate"], 0.25),
        at_least("atari, steps per second", atari["steps_per_second"], 700),
    ]
    if ratio is not None:
        found.append(at_least(f"{CRAFTAX}, training's rate / that of random actions", ratio, 0.6))
    return found
