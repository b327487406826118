"""`sparse_matmul`: observations that are mostly zeros times a weight (`kernels/sparse.h`).

One-hot observations are wide and almost empty. The kernel reads only the rows of the weight that
belong to other numbers than zero, and turns to a dense product when there are many. It is a JAX
primitive for the reason given in `matmul.py`.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad, batching
from jaxtyping import Array, Float

from agalite import kernels
from agalite.ops._batching import kernel_primitive, one_by_one
from agalite.ops.matmul import in_bfloat16, matmul


def sparse_matmul(
    x: Float[Array, "*rows inputs"], w: Float[Array, "inputs outputs"]
) -> Float[Array, "*rows outputs"]:
    """x w, where x is mostly zeros: fast by custom kernels, and where there are none a `matmul`.

    The kernel may skip zeros: do not rely on what a zero times a weight that is not finite is.
    """
    if in_bfloat16() or not kernels.usable(x, w):
        return matmul(x, w.T)
    return _forward.bind(x, w)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _forward_call(x: Array, w: Array) -> Array:
    rows = _rows(x)
    (out,) = kernels.call("sparse_forward", [(rows.shape[0], w.shape[1])], rows, w)
    return out.reshape(*x.shape[:-1], w.shape[1])


def _weights_call(x: Array, d: Array) -> Array:
    shape = (x.shape[-1], d.shape[-1])
    return kernels.call("sparse_weights", [shape], _rows(x), _rows(d))[0]


def _batch(args: tuple[Array, Array], axes: tuple[Any, Any]) -> tuple[Any, int]:
    (x, w), (x_axis, w_axis) = args, axes
    if w_axis is not None:
        return one_by_one(_forward, args, axes)
    # A batch is more rows, wherever its axis is among them.
    axis = min(x_axis, x.ndim - 2)
    return _forward.bind(jnp.moveaxis(x, x_axis, axis), w), axis


_forward = kernel_primitive(
    "sparse_forward", lambda x, w: (*x.shape[:-1], w.shape[1]), _forward_call
)
_weights = kernel_primitive(
    "sparse_weights", lambda x, d: (x.shape[-1], d.shape[-1]), _weights_call
)
ad.defbilinear(_forward, lambda d, _, w: matmul(d, w), lambda d, x, _: _weights.bind(x, d))
# The gradient of the gradient: w is the cotangent of the result.
ad.defbilinear(_weights, lambda w, _, d: matmul(d, w), lambda w, x, _: _forward.bind(x, w))
batching.primitive_batchers[_forward] = _batch
batching.primitive_batchers[_weights] = partial(one_by_one, _weights)
