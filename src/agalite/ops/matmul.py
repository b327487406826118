"""`matmul`: the matrix product of all layers, laid out for a CPU's BLAS routines.

`jnp.einsum` under `vmap` keeps time and batch as two axes. The gradient of a weight then sums over
both, and XLA copies all of the activations' gradient into a transpose before it multiplies. Here
all rows are one axis and nothing is copied. A single row, which is a step of a stream, reads the
weights with a custom kernel (`kernels/product.h`) on all cores.

It is a JAX primitive, because only a primitive sees the batch before it is differentiated.
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
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

# With few rows, a weight of at least this many numbers is multiplied with columns instead: 1.3 to
# 1.8 times as fast. For smaller weights the two copies, into columns and back, cost what they gain.
LARGE = 500_000
_FEW = 64
# A smaller weight is read before a custom kernel has started.
_SMALL = 2**14


class TransposedWeight(eqx.Module):
    """A weight (*outputs, *inputs) stored as (*inputs, *outputs).

    About eight rows, the environments of one agent, are multiplied twice as fast with this layout;
    hundreds of rows, gradients and `LARGE` weights are not. So it is a copy for acting only.
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


def matmul(
    x: Float[Array, "..."], w: Float[Array, "..."] | TransposedWeight, *, outputs: int = 1
) -> Float[Array, "..."]:
    """x w^T for weights with any number of output and input axes.

    **Arguments:**

    - `x`: (*rows, *inputs).
    - `w`: (*outputs, *inputs), or the same as a `TransposedWeight`.
    - `outputs`: how many of the first axes of `w` are outputs; the others are summed over.

    **Returns:**

    (*rows, *outputs).
    """
    dtype = jnp.promote_types(x.dtype, w.dtype)
    inside = jnp.dtype(jnp.bfloat16) if in_bfloat16() and dtype == jnp.float32 else dtype
    if isinstance(w, TransposedWeight):
        y = _matmul(x.astype(inside), w.array.astype(inside), w.inputs, back=True)
    else:
        y = _matmul(x.astype(inside), w.astype(inside), outputs, back=False)
    return y.astype(dtype)


PRECISIONS = ("float32", "bfloat16")
_precision: ContextVar[str] = ContextVar("agalite_precision", default="float32")


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """A context in which products are traced with this precision, one of `PRECISIONS`.

    With "bfloat16" what a `matmul` reads and writes is rounded, forwards and backwards, and so is
    what is kept for the gradient. Sums over time and everything else stay float32: a gate that is
    almost one would be one in bfloat16.
    """
    before = _precision.set(name)
    try:
        # JAX keeps traces, and tells them apart by a setting of its own.
        with jax.default_matmul_precision(name) if name != "float32" else contextlib.nullcontext():
            yield
    finally:
        _precision.reset(before)


def current_precision() -> str:
    """The precision with which programs are traced here."""
    return _precision.get()


def in_bfloat16() -> bool:
    """Whether programs are traced within `precision("bfloat16")`."""
    return _precision.get() == "bfloat16"


def _matmul(x: Array, w: Array, outputs: int, *, back: bool) -> Array:
    """`back` sums over the outputs: x (*rows, *outputs) -> (*rows, *inputs)."""
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
        # XLA fuses a product and the bias added to it into one kernel that transposes the weights
        # first and runs on one core. The negations prevent that.
        return -((-flat) @ matrix).reshape(shape)
    if flat.shape[0] <= _FEW and matrix.size >= LARGE and not back:
        # The barriers keep XLA from rewriting this as a product with rows.
        columns = lax.optimization_barrier(flat.T)
        return lax.optimization_barrier(matrix.T @ columns).T.reshape(shape)
    return (flat @ matrix).reshape(shape)


def _compute_on_cpu(x: Array, w: Array, *, outputs: int, back: bool) -> Array:
    """`_compute`, with a custom kernel for a single row."""
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
    return _matmul(d, w, outputs, back=not back)


def _gradient_of_w(d: Array, x: Array, w: Any, *, outputs: int, back: bool) -> Array:
    return _correlate(x, d, w.aval, outputs) if back else _correlate(d, x, w.aval, outputs)


def _batch(args: tuple[Array, Array], axes: tuple[Any, Any], *, outputs: int, back: bool):
    (x, w), (x_axis, w_axis) = args, axes
    if w_axis is not None:  # a weight for each element of the batch
        return jax.vmap(partial(_compute, outputs=outputs, back=back), axes)(x, w), 0
    # A batch is more rows, wherever its axis is among them.
    axis = min(x_axis, _rows(x, w, outputs, back) - 1)
    return _matmul(jnp.moveaxis(x, x_axis, axis), w, outputs, back=back), axis


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


# --- broadcast_like: the same vector for every row ---------------------------------------------


def broadcast_like(b: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """b (*outputs) for every row of x (*rows, *outputs): (*rows, *outputs), to be added to x.

    Plain broadcasting makes `vmap` move the batch in front of time, and XLA then transposes all
    activations between any two products.
    """
    if x.shape[0] == 1:  # a step of a stream has no time axis to keep in front
        return jnp.broadcast_to(b, x.shape)
    return _broadcast_primitive.bind(b, x)


def _broadcast_compute(b: Array, x: Array) -> Array:
    return jnp.broadcast_to(b, x.shape)


def _broadcast_tangent(db: Array, _: Array, x: Array) -> Array:
    return _broadcast_primitive.bind(db, x)


def _broadcast_transpose(d: Any, b: Any, _: Array) -> tuple[Any, None]:
    if isinstance(d, ad.Zero):
        return ad.Zero(b.aval), None
    return jnp.sum(d, tuple(range(d.ndim - b.aval.ndim))), None


def _broadcast_batch(args: tuple[Array, Array], axes: tuple[Any, Any]) -> tuple[Array, int]:
    (b, x), (b_axis, x_axis) = args, axes
    if b_axis is not None:  # a vector for each
        return jax.vmap(_broadcast_compute, axes)(b, x), 0
    axis = min(x_axis, x.ndim - b.ndim - 1)  # as in `_batch`
    return _broadcast_primitive.bind(b, jnp.moveaxis(x, x_axis, axis)), axis


_broadcast_primitive = Primitive("row_broadcast")
_broadcast_primitive.def_impl(jax.jit(_broadcast_compute))
_broadcast_primitive.def_abstract_eval(lambda b, x: ShapedArray(x.shape, b.dtype))
mlir.register_lowering(
    _broadcast_primitive, mlir.lower_fun(_broadcast_compute, multiple_results=False)
)
ad.defjvp(_broadcast_primitive, _broadcast_tangent, None)  # of x only the shape counts
ad.primitive_transposes[_broadcast_primitive] = _broadcast_transpose
batching.primitive_batchers[_broadcast_primitive] = _broadcast_batch
