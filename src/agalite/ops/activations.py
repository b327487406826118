"""Elementwise functions whose gradients keep as little as possible.

Autodiff keeps an activation and its derivative, and several intermediates of a normalisation. On a
CPU moving that memory costs more than the arithmetic. The functions here keep one array each.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / (1 + exp(-x)); the gradient keeps the output only."""
    return jax.nn.sigmoid(x)


def _sigmoid_fwd(x: Array) -> tuple[Array, Array]:
    y = jax.nn.sigmoid(x)
    return y, y


sigmoid.defvjp(_sigmoid_fwd, lambda y, d: (d * y * (1 - y),))


@jax.custom_vjp
def tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """tanh(x); the gradient keeps the output only."""
    return jnp.tanh(x)


def _tanh_fwd(x: Array) -> tuple[Array, Array]:
    y = jnp.tanh(x)
    return y, y


tanh.defvjp(_tanh_fwd, lambda y, d: (d * (1 - y * y),))


@jax.custom_vjp
def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """max(x, 0); the gradient keeps the output only."""
    return jnp.maximum(x, 0)


def _relu_fwd(x: Array) -> tuple[Array, Array]:
    y = jnp.maximum(x, 0)
    return y, y


# Zeros made of y: constant zeros would make `vmap` move the batch in front of time
# (see `matmul.broadcast_like`).
relu.defvjp(_relu_fwd, lambda y, d: (jnp.where(y > 0, d, jnp.minimum(y, 0)),))


@jax.custom_vjp
def mix(z: Float[Array, "..."], h: Float[Array, "..."], x: Float[Array, "..."]) -> Array:
    """(1 - z) x + z h."""
    return x + z * (h - x)


def _mix_bwd(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, Array]:
    z, h, x = saved
    return d * (h - x), d * z, d * (1 - z)


mix.defvjp(lambda z, h, x: (mix(z, h, x), (z, h, x)), _mix_bwd)


@jax.custom_vjp
def normalise(x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Zero mean and unit variance along D."""
    return _normalise_fwd(x)[0]


def _columns(row: Float[Array, " T"], like: Float[Array, "T D"]) -> Float[Array, "T D"]:
    # An outer product with ones: broadcasting would make `vmap` move the batch in front of time,
    # and with it every array that follows. Compiled, it costs nothing.
    return jnp.einsum("t,d->td", row, jnp.ones(like.shape[-1], like.dtype))


def _normalise_fwd(x: Array) -> tuple[Array, tuple[Array, Array]]:
    centred = x - _columns(x.mean(-1), x)
    precision = jax.lax.rsqrt(jnp.square(centred).mean(-1) + 1e-5)
    y = centred * _columns(precision, x)
    return y, (y, precision)


def _normalise_bwd(saved: tuple[Array, Array], d: Array) -> tuple[Array]:
    y, precision = saved
    along = (d * y).mean(-1)
    return ((d - _columns(d.mean(-1), d) - y * _columns(along, d)) * _columns(precision, d),)


normalise.defvjp(_normalise_fwd, _normalise_bwd)


@jax.custom_vjp
def rms_normalise(x: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """x divided by the root of its mean square along V; for numbers of any size."""
    return _rms_fwd(x)[0]


def _along(row: Float[Array, "..."], like: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """As `_columns`."""
    return jnp.einsum("...,v->...v", row, jnp.ones(like.shape[-1], like.dtype))


def _rms_fwd(x: Array) -> tuple[Array, tuple[Array, Array]]:
    # Squares of large numbers overflow, so they are divided by the largest first.
    scale = jnp.maximum(jnp.abs(x).max(-1), 1)
    small = x / _along(scale, x)
    precision = jax.lax.rsqrt(jnp.square(small).mean(-1) + 1e-6 / scale / scale)
    y = small * _along(precision, x)
    return y, (y, precision / scale)


def _rms_bwd(saved: tuple[Array, Array], d: Array) -> tuple[Array]:
    y, precision = saved
    return ((d - y * _along((d * y).mean(-1), d)) * _along(precision, d),)


rms_normalise.defvjp(_rms_fwd, _rms_bwd)
