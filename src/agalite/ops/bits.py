"""Observations whose first numbers are 0 or 1, kept as bits, times a weight (`kernels/bits.h`).

A one-hot observation of n numbers takes n / 8 bytes so instead of 4 n, exactly. What is stored and
shuffled between acting and learning is small, and the product reads little but the weight. The
kernels are JAX primitives for the reason given in `matmul.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jaxtyping import Array, Float, UInt32

from agalite import kernels
from agalite.ops._batching import kernel_primitive, one_by_one
from agalite.ops.matmul import in_bfloat16, matmul

_WORD = 32


class Bits(NamedTuple):
    """Rows (*rows, n) of which the first numbers are 0 or 1."""

    bits: UInt32[Array, "*rows words"]
    """The first numbers; number i is bit i % 32 of word i // 32."""
    rest: Float[Array, "*rows R"]
    """The last R of the n numbers."""


def pack(x: Float[Array, "*rows n"], binary: int) -> Bits:
    """Rows as `Bits`.

    **Arguments:**

    - `x`: (*rows, n), of which the first `binary` numbers are 0 or 1. Others count as 1.
    - `binary`: how many.
    """
    first = x[..., :binary] != 0
    missing = -binary % _WORD
    first = jnp.pad(first, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    words = first.reshape(*x.shape[:-1], -1, _WORD).astype(jnp.uint32)
    shifted = words << jnp.arange(_WORD, dtype=jnp.uint32)
    return Bits(jnp.sum(shifted, axis=-1, dtype=jnp.uint32), x[..., binary:])


def unpack(x: Bits, n: int) -> Float[Array, "*rows n"]:
    """The rows (*rows, n) of which `pack` made `x`."""
    binary = n - x.rest.shape[-1]
    ones = (x.bits[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    first = ones.reshape(*x.bits.shape[:-1], -1)[..., :binary]
    return jnp.concatenate([first.astype(x.rest.dtype), x.rest], axis=-1)


def bits_matmul(x: Bits, w: Float[Array, "inputs outputs"]) -> Float[Array, "*rows outputs"]:
    """x w: by custom kernels, and where there are none a `matmul` of the unpacked rows.

    There is no gradient with respect to x.
    """
    if in_bfloat16() or not kernels.usable(x.rest, w):
        return matmul(unpack(x, w.shape[0]), w.T)
    return _forward.bind(jax.lax.stop_gradient(x.rest), x.bits, w)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _forward_call(rest: Array, bits: Array, w: Array) -> Array:
    rows = _rows(bits)
    others = rest.reshape(rows.shape[0], -1)
    (out,) = kernels.call("bits_forward", [(rows.shape[0], w.shape[1])], others, rows, w)
    return out.reshape(*bits.shape[:-1], w.shape[1])


def _weights_call(d: Array, bits: Array, rest: Array, *, inputs: int) -> Array:
    rows = _rows(bits)
    others = rest.reshape(rows.shape[0], -1)
    return kernels.call("bits_weights", [(inputs, d.shape[-1])], _rows(d), rows, others)[0]


def _batch(args: tuple[Array, ...], axes: tuple[Any, ...]) -> tuple[Any, int]:
    rest, bits, w = args
    if axes[2] is not None or axes[0] is None or axes[1] is None:
        return one_by_one(_forward, args, axes)
    # A batch is more rows, wherever its axis is among them.
    axis = min(axes[1], bits.ndim - 2)
    rest, bits = (jnp.moveaxis(x, a, axis) for x, a in zip((rest, bits), axes, strict=False))
    return _forward.bind(rest, bits, w), axis


def _transpose(d: Any, rest: Array, bits: Array, w: Any) -> tuple[None, None, Any]:
    if isinstance(d, ad.Zero):
        return None, None, ad.Zero(w.aval)
    return None, None, _weights.bind(d, bits, rest, inputs=w.aval.shape[0])


def _weights_transpose(
    w: Any, d: Any, bits: Array, rest: Array, *, inputs: int
) -> tuple[Any, None, None]:
    """The gradient of the gradient: `w` is the cotangent of the result."""
    del inputs
    if isinstance(w, ad.Zero):
        return ad.Zero(d.aval), None, None
    return _forward.bind(rest, bits, w), None, None


_forward = kernel_primitive(
    "bits_forward", lambda _, bits, w: (*bits.shape[:-1], w.shape[1]), _forward_call
)
_weights = kernel_primitive(
    "bits_weights",
    lambda d, bits, rest, *, inputs: (inputs, d.shape[-1]),  # noqa: ARG005
    _weights_call,
    ("inputs",),
)
ad.defjvp(_forward, None, None, lambda dw, rest, bits, w: _forward.bind(rest, bits, dw))  # noqa: ARG005
ad.primitive_transposes[_forward] = _transpose
ad.defjvp(
    _weights,
    lambda dd, d, bits, rest, *, inputs: _weights.bind(dd, bits, rest, inputs=inputs),  # noqa: ARG005
    None,
    None,
)
ad.primitive_transposes[_weights] = _weights_transpose
batching.primitive_batchers[_forward] = _batch
batching.primitive_batchers[_weights] = partial(one_by_one, _weights)
