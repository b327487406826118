"""Batching by widening: `vmap` of an operator is the same operator with more lanes.

The fast operators treat heads as independent lanes. A batch of sequences is more lanes, and laid
out that way, time first, every step of the loop is one contiguous block. JAX's own rule would carry
the batch as an extra axis in front of time and copy it out of the way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array


def batched_as_lanes(
    function: Callable[..., Any], lane_axes: tuple[Any, ...], out_axes: Any
) -> Callable[..., Any]:
    """`function(*args)` whose `vmap` merges the batch into each argument's lane axis.

    lane_axes, out_axes: for each argument, and for the result, the position of the lane axis: an
    integer, or a pytree of integers that prefixes the argument.
    """

    @custom_batching.custom_vmap
    def call(*args: Any) -> Any:
        return function(*args)

    @call.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        def merge(axis: int, x: Array, is_batched: bool) -> Array:
            if not is_batched:
                x = jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.moveaxis(x, 0, axis)
            return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

        def part(axis: int, x: Array) -> Array:
            x = x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        wide = [over(a, merge, x, b) for a, x, b in zip(lane_axes, args, batched, strict=True)]
        out = over(out_axes, part, call(*wide))
        return out, jax.tree.map(lambda _: True, out)

    def over(axes: Any, do: Callable[..., Array], *trees: Any) -> Any:
        return jax.tree.map(
            lambda axis, *sub: jax.tree.map(lambda *leaf: do(axis, *leaf), *sub), axes, *trees
        )

    return lambda *args: over(out_axes, _batch_at, call(*args))


def _batch_at(axis: int, x: Array) -> Array:
    """x itself; `vmap` puts its batch at `axis`.

    The rule above must put the batch in front. Left there, in front of time, it would make every
    operation that follows transpose its other operands.
    """
    return _placed.bind(x, axis=axis)


def _place(args: tuple[Array], axes: tuple[int], *, axis: int) -> tuple[Array, int]:
    return _placed.bind(jnp.moveaxis(args[0], axes[0], axis), axis=axis), axis


def _same(x: Any, *, axis: int) -> Any:
    del axis
    return x


_placed = Primitive("batch_at")
_placed.def_impl(_same)
_placed.def_abstract_eval(_same)
mlir.register_lowering(_placed, mlir.lower_fun(_same, multiple_results=False))
batching.primitive_batchers[_placed] = _place


def one_by_one(primitive: Primitive, args: Any, axes: Any, **params: Any) -> tuple[Any, int]:
    """A batching rule: one call of `primitive` after another, for a batch of weights."""
    size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)

    def one(i: Array) -> Any:
        taken = (
            x if a is None else jax.lax.dynamic_index_in_dim(x, i, a, keepdims=False)
            for x, a in zip(args, axes, strict=True)
        )
        return primitive.bind(*taken, **params)

    return jax.lax.map(one, jnp.arange(size)), 0


def kernel_primitive(
    name: str,
    shape: Callable[..., tuple[int, ...]],
    call: Callable[..., Array],
    params: Sequence[str] = (),
) -> Primitive:
    """A primitive that is a custom kernel, for CPUs only.

    **Arguments:**

    - `name`: of the primitive.
    - `shape`: of the result, from the arguments; its type is the first one's.
    - `call`: calls the kernel; like `shape`, with the parameters by keyword.
    - `params`: the names of the parameters.
    """
    made = Primitive(name)
    made.def_impl(jax.jit(call, static_argnames=tuple(params)))
    made.def_abstract_eval(
        lambda *args, **params: ShapedArray(shape(*args, **params), args[0].dtype)
    )
    mlir.register_lowering(made, mlir.lower_fun(call, multiple_results=False), platform="cpu")
    return made


def pad_time(inputs: Any, size: int) -> tuple[Any, int]:
    """Every (T, ...) padded with neutral steps to a multiple of `size`; and T.

    Zeros are neutral: nothing is written, and gates of zero forget nothing. Only a field named
    `keep` is padded with ones.
    """
    steps = jax.tree.leaves(inputs)[0].shape[0]
    missing = -steps % size

    def pad(x: Array, fill: float = 0) -> Array:
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)

    if not missing:
        return inputs, steps
    padded = jax.tree.map(pad, inputs)
    return (padded._replace(keep=pad(inputs.keep, 1)) if hasattr(inputs, "keep") else padded), steps


def into_chunks(inputs: Any, size: int) -> tuple[Any, int]:
    """Every (T, ...) becomes (N, size, ...), padded; and T. Short sequences get one short chunk."""
    size = min(size, 1 << (jax.tree.leaves(inputs)[0].shape[0] - 1).bit_length())
    padded, steps = pad_time(inputs, size)
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), padded), steps


def out_of_chunks(chunks: Any, steps: int) -> Any:
    """(N, size, ...) -> (T, ...), without the padding."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:steps], chunks)
