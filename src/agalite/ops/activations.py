"""Elementwise functions whose gradient keeps as little as it can.

Autodiff keeps both an activation and its derivative, and several intermediates of a normalisation.
On a CPU the memory that takes costs more time than the arithmetic; these keep one array each.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite.ops.barriers import fusion_barrier


@jax.custom_vjp
def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.sigmoid(x)


def _sigmoid_fwd(x: Array) -> tuple[Array, Array]:
    y = jax.nn.sigmoid(x)
    return y, y


sigmoid.defvjp(_sigmoid_fwd, lambda y, d: (d * y * (1 - y),))


@jax.custom_vjp
def tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.tanh(x)


def _tanh_fwd(x: Array) -> tuple[Array, Array]:
    y = jnp.tanh(x)
    return y, y


tanh.defvjp(_tanh_fwd, lambda y, d: (d * (1 - y * y),))


@jax.custom_vjp
def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(x, 0)


def _relu_fwd(x: Array) -> tuple[Array, Array]:
    y = jnp.maximum(x, 0)
    return y, y


# Zeros that are made of y, or `vmap` would move the batch in front of time (`product.spread`).
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


def _spread(row: Float[Array, " T"], like: Float[Array, "T D"]) -> Float[Array, "T D"]:
    # An outer product with ones, because broadcasting would make `vmap` move the batch in front of
    # time, and with it every array that follows; compiled, it costs nothing.
    return jnp.einsum("t,d->td", row, jnp.ones(like.shape[-1], like.dtype))


def _normalise_fwd(x: Array) -> tuple[Array, tuple[Array, Array]]:
    centred = x - _spread(x.mean(-1), x)
    precision = jax.lax.rsqrt(jnp.square(centred).mean(-1) + 1e-5)
    y = centred * _spread(precision, x)
    return y, (y, precision)


def _normalise_bwd(saved: tuple[Array, Array], d: Array) -> tuple[Array]:
    y, precision = saved
    along = (d * y).mean(-1)
    return ((d - _spread(d.mean(-1), d) - y * _spread(along, d)) * _spread(precision, d),)


normalise.defvjp(_normalise_fwd, _normalise_bwd)


@jax.custom_vjp
def grad_barrier(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, whose gradient is added up once, here, and kept.

    The gradient that comes down a residual stream has many readers in every layer, and XLA's fuser
    would add it up again inside each of them, from the last layer on (docs/performance.md).
    """
    return x


grad_barrier.defvjp(lambda x: (x, None), lambda _, d: (fusion_barrier(lambda d: d, d),))
