"""The part of `agalite bench throughput --models` that times the encoders of images.

Forward and backward of the frames that Mystery Path's preset has in a minibatch, 128 steps of 4
environments: by the custom kernels, by XLA without them, and the matrix products alone that the
layers consist of, three of each but two of the first, whose images need no gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.progress import Progress
from rich.table import Table

from agalite import kernels
from agalite.bench.programs import equations
from agalite.bench.report import at_least
from agalite.bench.timing import Program, compile_program, interleave
from agalite.networks.encoders import AtariConv, Encoder, ImpalaResNet, PatchEncoder

STEPS, ENVS = 128, 4
ENCODERS: dict[str, tuple[Callable[..., Encoder], tuple[int, ...]]] = {
    "atari": (AtariConv, (84, 84, 3)),
    "impala": (ImpalaResNet, (64, 64, 3)),
    "patch": (PatchEncoder, (84, 84, 3)),
}
KERNELS, XLA, PRODUCTS = "kernels", "XLA", "products"


def time_encoders(rounds: int, progress: Progress) -> dict[str, Program]:
    """By "encoder, kernels" (if there are any), "encoder, XLA" and "encoder, products"."""
    task = progress.add_task("compiling encoders", total=len(ENCODERS))
    programs: dict[str, Program] = {}
    for name, (kind, shape) in ENCODERS.items():
        encoder = kind(shape, key=jax.random.key(0))
        frames = jax.random.randint(jax.random.key(1), (STEPS, ENVS, *shape), 0, 256)
        frames = frames.astype(jnp.uint8)
        if kernels.why_not() is None:
            programs[f"{name}, {KERNELS}"] = _gradient(f"{name}, {KERNELS}", encoder, frames)
        with kernels.switched_off():
            programs[f"{name}, {XLA}"] = _gradient(f"{name}, {XLA}", encoder, frames)
        programs[f"{name}, {PRODUCTS}"] = _products(f"{name}, {PRODUCTS}", encoder, frames)
        progress.advance(task)
    interleave(list(programs.values()), progress, runs=rounds)
    return programs


def _gradient(label: str, encoder: Encoder, frames: Array) -> Program:
    weights, rest = eqx.partition(encoder, eqx.is_array)

    def loss(weights: Any, frames: Array) -> Array:
        encode = eqx.combine(weights, rest).over_time
        return jnp.mean(jnp.square(jax.vmap(encode, in_axes=1, out_axes=1)(frames)))

    return compile_program(label, jax.grad(loss), weights, frames)


def _products(label: str, encoder: Encoder, frames: Array) -> Program:
    """Matrix products of the sizes of each layer's."""
    sizes = product_sizes(encoder, frames.shape)
    key = jax.random.key(0)
    xs = [jax.random.normal(key, (rows, inputs)) for rows, inputs, _ in sizes]
    ws = [jax.random.normal(key, (outputs, inputs)) for _, inputs, outputs in sizes]
    ds = [jax.random.normal(key, (rows, outputs)) for rows, _, outputs in sizes]

    def products(xs: list[Array], ws: list[Array], ds: list[Array]) -> list[Any]:
        made = []
        for i, (x, w, d) in enumerate(zip(xs, ws, ds, strict=True)):
            made += [x @ w.T, d.T @ x] + ([d @ w] if i else [])
        return made

    return compile_program(label, products, xs, ws, ds)


def product_sizes(encoder: Encoder, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of the matrix product of each layer on frames (T, B, X, Y, C)."""
    frames = math.prod(shape[:2])
    with kernels.switched_off():  # then every layer is a `row_product`
        image = jax.ShapeDtypeStruct((1, *shape[2:]), jnp.uint8)
        program = jax.make_jaxpr(lambda x: encoder.over_time(x))(image)
    found = []
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name == "row_product":
            outputs, inputs = eqn.invars[1].aval.shape
            found.append((frames * eqn.outvars[0].aval.size // outputs, inputs, outputs))
    return found


def targets(programs: dict[str, Program]) -> list[dict[str, Any]]:
    """XLA's time is what the encoders took before they had kernels."""
    return [
        at_least(
            f"{name} encoder: XLA / kernels",
            programs[f"{name}, {XLA}"].ratio(programs[f"{name}, {KERNELS}"]),
            2,
        )
        for name in ENCODERS
        if f"{name}, {KERNELS}" in programs
    ]


def table(programs: dict[str, Program]) -> Table:
    """Milliseconds, frames per second and the ratio to the encoder's own products."""
    found = Table(title=f"Encoders, forward and backward, {STEPS * ENVS} frames")
    for column in ("program", "ms", "spread", "/ products", "temporary MB", "frames/s"):
        found.add_column(column, justify="left" if column == "program" else "right")
    for label, p in programs.items():
        base = programs[f"{label.partition(',')[0]}, {PRODUCTS}"]
        found.add_row(
            label,
            f"{p.milliseconds:.1f}",
            f"{p.spread:.0%}",
            f"{p.ratio(base):.2f}",
            f"{p.temporary_bytes / 1e6:.0f}",
            f"{STEPS * ENVS / (p.milliseconds / 1e3):,.0f}",
        )
    return found
