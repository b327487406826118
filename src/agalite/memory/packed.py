"""AGaLiTe laid out to step with: all layers' weights in one array, for one kernel.

A step is a chain of small products, and what lies between them takes XLA longer to start than to
compute; handing it hundreds of arrays takes as long again. So a model that is only stepped, for one
stream or a few, has a copy of its weights in the order in which a step reads them, and a kernel
goes through all layers (`kernels/stack.h`). `Block` says what is computed; whatever is not a plain
step, its gradient for one, is computed by the blocks.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jaxtyping import Array, Bool, Float, Int

from agalite import kernels
from agalite.memory.block import Block
from agalite.ops.attention import EPSILON
from agalite.ops.delta import Basis, advance_phase, oscillators


class Packed(eqx.Module):
    """Blocks of which `weights` has all numbers; `blocks` takes them apart again."""

    weights: Float[Array, " N"]
    structure: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __init__(self, blocks: tuple[Block, ...]):
        arrays = in_order(blocks)
        self.weights = jnp.concatenate([x.reshape(-1) for x in arrays])
        self.shapes = tuple(x.shape for x in arrays)
        self.structure = jax.tree.structure(blocks)

    @property
    def blocks(self) -> tuple[Block, ...]:
        arrays, at = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            arrays.append(self.weights[at : at + size].reshape(shape))
            at += size
        empty = jax.tree.unflatten(self.structure, [None] * self.structure.num_leaves)
        return eqx.tree_at(in_order, empty, arrays, is_leaf=lambda x: x is None)


def in_order(blocks: tuple[Block, ...]) -> list[Array]:
    """Every weight, in the order in which the kernel reads them."""
    found = []
    for block in blocks:
        attention: Any = block.attention
        first, second, mlp = block.attention_gate, block.mlp_gate, block.mlp
        found += [
            attention.norm.scale,
            attention.norm.bias,
            attention.project.inputs.weight,
            attention.project.bias,
            first.from_x.weight,
            attention.out.weight,
            attention.out.bias,
            first.from_y.weight,
            first.candidate.weight,
            first.bias,
            block.norm.scale,
            block.norm.bias,
            mlp.into.weight,
            mlp.into.bias,
            second.from_x.weight,
            mlp.out.weight,
            mlp.out.bias,
            second.from_y.weight,
            second.candidate.weight,
            second.bias,
        ]
    return found


def packable(blocks: Any) -> bool:
    """Whether the kernel can step these layers: as they were made, of one floating-point type."""
    if isinstance(blocks, Packed):
        return False
    attention = blocks[0].attention
    if not attention.project.raw or attention.config.method != "auto":
        return False
    leaves = jax.tree.leaves(blocks)
    return len(leaves) == len(in_order(blocks)) and kernels.usable(*leaves)


def step(
    packed: Packed,
    basis: Basis,
    eta: int,
    hidden: int,
    state: Any,
    h: Float[Array, "1 D"],
    resets: Bool[Array, " 1"],
) -> tuple[Float[Array, "Y H Rk K"], Float[Array, "Y H R V"], Int[Array, ""], Float[Array, "1 D"]]:
    """All Y layers, one step: keys, values, phase, h. `state`: an `AGaLiTeMemoryState`."""
    phases = advance_phase(state.phase, resets, basis.period)
    osc = oscillators(basis, phases, state.signs, h.dtype)
    reading = [jnp.asarray(c, h.dtype) for c in (basis.numerator, basis.denominator)]
    streams = (h, state.keys[None], state.values[None], osc, (~resets).astype(h.dtype))
    h, keys, values = _many_streams(eta, hidden)((packed.weights, *reading), streams)
    return keys[0], values[0], phases[0], h


def _many_streams(eta: int, hidden: int) -> Any:
    """The kernel. Its `vmap` has more streams; with weights for each, one call after another."""

    @custom_batching.custom_vmap
    def call(weights: Any, streams: Any) -> tuple[Array, ...]:
        h, keys, values, osc, keep = streams
        packed, *reading = weights
        new = kernels.call(
            "stack",
            [h.shape, keys.shape, values.shape],
            h,
            packed,
            keys,
            values,
            osc,
            keep,
            *reading,
            narrow=eta,
            hidden=hidden,
            epsilon=EPSILON,
        )
        return tuple(new)

    @call.def_vmap
    def rule(size: int, batched: Any, weights: Any, streams: Any) -> tuple[Any, Any]:
        def everywhere(is_batched: bool, x: Array) -> Array:
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        streams = jax.tree.map(everywhere, batched[1], streams)
        if any(jax.tree.leaves(batched[0])):
            weights = jax.tree.map(everywhere, batched[0], weights)
            out = lax.map(lambda x: call(*x), (weights, streams))
        else:
            merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), streams)
            out = tuple(x.reshape(size, -1, *x.shape[1:]) for x in call(weights, merged))
        return out, (True, True, True)

    return call
