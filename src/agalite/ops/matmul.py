"""The one matrix product of the models, laid out the way the CPU's library wants it.

`jnp.einsum` under `vmap` keeps time and batch as two axes. The gradient of a weight then sums over
both, and XLA transposes all of the activations' gradient into a copy before it multiplies: as many
bytes again, for every weight, many of them alive together. Here all rows are one axis, and nothing
is copied. A single row, a step of a stream, reads the weights where they lie, on all cores: with a
kernel of our own where there is one (`kernels/product.h`).

It is a primitive of its own, because only a primitive meets the batch before it is differentiated.
"""

import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from agalite import kernels

# A weight of at least so many numbers is multiplied with columns, if the rows are few: 1.3 to 1.8
# times as fast as with rows, whichever way the weight lies (docs/performance.md). For smaller ones
# the two copies into columns and back take what they gain.
LARGE = 500_000
_FEW = 64
# A smaller weight is read before a kernel of our own has started.
_SMALL = 2**14


class TransposedWeight(eqx.Module):
    """A weight (*outputs, *inputs) that lies in memory as (*inputs, *outputs).

    Eight rows, the environments of one agent, are multiplied twice as fast this way round; hundreds
    of rows, gradients, and `LARGE` weights are not (docs/performance.md). So it is a copy to act
    with.
    """

    array: Float[Array, "..."]
    inputs: int = eqx.field(static=True)
    """How many axes are inputs."""

    def __init__(self, w: Float[Array, "..."], *, outputs: int):
        self.array = jnp.moveaxis(w, tuple(range(outputs)), tuple(range(-outputs, 0)))
        self.inputs = w.ndim - outputs

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.array.shape[self.inputs :], *self.array.shape[: self.inputs])

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def __getitem__(self, index: Any) -> Array:
        axes = tuple(range(self.inputs))
        return jnp.moveaxis(self.array, axes, tuple(a - self.inputs for a in axes))[index]


def product(
    x: Float[Array, "..."], w: Float[Array, "..."] | TransposedWeight, *, outputs: int = 1
) -> Float[Array, "..."]:
    """x (*rows, *inputs), w (*outputs, *inputs) -> x w^T (*rows, *outputs).

    The first `outputs` axes of w are the result's; the others are summed over.
    """
    if isinstance(w, TransposedWeight):
        dtype = jnp.promote_types(x.dtype, w.dtype)
        return _product(x.astype(dtype), w.array.astype(dtype), w.inputs, back=True)
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return _product(x.astype(dtype), w.astype(dtype), outputs, back=False)


def _product(x: Array, w: Array, outputs: int, *, back: bool) -> Array:
    """`back` sums over the outputs instead: x (*rows, *outputs) -> (*rows, *inputs)."""
    return _primitive.bind(x, w, outputs=outputs, back=back)


def _rows(x: Any, w: Any, outputs: int, back: bool) -> int:
    """How many axes of x are rows."""
    return x.ndim - (outputs if back else w.ndim - outputs)


def _shape(x: Any, w: Any, outputs: int, back: bool) -> tuple[int, ...]:
    kept = w.shape[outputs:] if back else w.shape[:outputs]
    return (*x.shape[: _rows(x, w, outputs, back)], *kept)


def _compute(x: Array, w: Array, *, outputs: int, back: bool) -> Array:
    shape = _shape(x, w, outputs, back)
    matrix = w.reshape(math.prod(w.shape[:outputs]), -1)
    matrix = matrix if back else matrix.T
    flat = x.reshape(-1, matrix.shape[0])
    if flat.shape[0] == 1:
        # XLA joins a product and the bias added to it into one kernel that transposes the weights
        # first and runs on one core. It does not know how to do that to a difference.
        return -((-flat) @ matrix).reshape(shape)
    if flat.shape[0] <= _FEW and matrix.size >= LARGE and not back:
        # Held apart, or XLA turns the product back into one with rows.
        columns = lax.optimization_barrier(flat.T)
        return lax.optimization_barrier(matrix.T @ columns).T.reshape(shape)
    return (flat @ matrix).reshape(shape)


def _compute_on_cpu(x: Array, w: Array, *, outputs: int, back: bool) -> Array:
    """`_compute`, a single row by our own kernel."""
    shape = _shape(x, w, outputs, back)
    one_row = math.prod(x.shape[: _rows(x, w, outputs, back)]) == 1
    if not one_row or back or w.size < _SMALL or not kernels.usable(x, w):
        return _compute(x, w, outputs=outputs, back=back)
    matrix = w.reshape(math.prod(w.shape[:outputs]), -1)
    row = x.reshape(1, matrix.shape[1])
    return kernels.call("product", [(1, matrix.shape[0])], row, matrix)[0].reshape(shape)


def _correlate(d: Array, x: Array, w: Any, outputs: int) -> Array:
    """Gradient of w: d (*rows, *outputs), x (*rows, *inputs)."""
    flat = d.reshape(-1, math.prod(w.shape[:outputs]))
    return (flat.T @ x.reshape(flat.shape[0], -1)).reshape(w.shape)


def _gradient_of_x(d: Array, _: Any, w: Array, *, outputs: int, back: bool) -> Array:
    return _product(d, w, outputs, back=not back)


def _gradient_of_w(d: Array, x: Array, w: Any, *, outputs: int, back: bool) -> Array:
    return _correlate(x, d, w.aval, outputs) if back else _correlate(d, x, w.aval, outputs)


def _batch(args: tuple[Array, Array], axes: tuple[Any, Any], *, outputs: int, back: bool):
    (x, w), (x_axis, w_axis) = args, axes
    if w_axis is not None:  # a weight for each: nothing to share
        return jax.vmap(partial(_compute, outputs=outputs, back=back), axes)(x, w), 0
    # A batch is more rows, wherever it lies among them.
    axis = min(x_axis, _rows(x, w, outputs, back) - 1)
    return _product(jnp.moveaxis(x, x_axis, axis), w, outputs, back=back), axis


_primitive = Primitive("row_product")
_primitive.def_impl(jax.jit(_compute, static_argnames=("outputs", "back")))
_primitive.def_abstract_eval(
    lambda x, w, *, outputs, back: ShapedArray(_shape(x, w, outputs, back), x.dtype)
)
mlir.register_lowering(_primitive, mlir.lower_fun(_compute, multiple_results=False))
mlir.register_lowering(
    _primitive, mlir.lower_fun(_compute_on_cpu, multiple_results=False), platform="cpu"
)
ad.defbilinear(_primitive, _gradient_of_x, _gradient_of_w)
batching.primitive_batchers[_primitive] = _batch


# --- the same vector for every row --------------------------------------------------------------


def broadcast_like(b: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """b (*outputs), x (*rows, *outputs) -> b for every row (*rows, *outputs).

    To add it to x, say. Plain broadcasting makes `vmap` move the batch in front of time, and XLA
    then turns all activations over between any two products and back again.
    """
    if x.shape[0] == 1:  # a step of a stream has no time for the batch to get in front of
        return jnp.broadcast_to(b, x.shape)
    return _spread_primitive.bind(b, x)


def _spread_compute(b: Array, x: Array) -> Array:
    return jnp.broadcast_to(b, x.shape)


def _spread_tangent(db: Array, _: Array, x: Array) -> Array:
    return _spread_primitive.bind(db, x)


def _spread_transpose(d: Any, b: Any, _: Array) -> tuple[Any, None]:
    if isinstance(d, ad.Zero):
        return ad.Zero(b.aval), None
    return jnp.sum(d, tuple(range(d.ndim - b.aval.ndim))), None


def _spread_batch(args: tuple[Array, Array], axes: tuple[Any, Any]) -> tuple[Array, int]:
    (b, x), (b_axis, x_axis) = args, axes
    if b_axis is not None:  # a vector for each
        return jax.vmap(_spread_compute, axes)(b, x), 0
    axis = min(x_axis, x.ndim - b.ndim - 1)  # as in `_batch`
    return _spread_primitive.bind(b, jnp.moveaxis(x, x_axis, axis)), axis


_spread_primitive = Primitive("row_spread")
_spread_primitive.def_impl(jax.jit(_spread_compute))
_spread_primitive.def_abstract_eval(lambda b, x: ShapedArray(x.shape, b.dtype))
mlir.register_lowering(_spread_primitive, mlir.lower_fun(_spread_compute, multiple_results=False))
ad.defjvp(_spread_primitive, _spread_tangent, None)  # of x only the shape counts
ad.primitive_transposes[_spread_primitive] = _spread_transpose
batching.primitive_batchers[_spread_primitive] = _spread_batch
