"""The first-order linear recurrence h_t = a_t * h_{t-1} + b_t, element by element.

Every gated memory of the paper is this recurrence (C_t, s_t, v~_t, k~_t). Three ways to compute it
give the same numbers up to rounding. On a CPU a plain loop is an order of magnitude faster than the
associative scan; on an accelerator it is the other way round.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite import kernels, validation

Method = Literal["auto", "sequential", "associative", "chunked"]
METHODS = ("auto", "sequential", "associative", "chunked")

# An iteration of a loop costs a few microseconds whatever its size. Below this many elements per
# step that dominates, and running chunks side by side is worth its second pass.
_NARROW = 512


def linear_recurrence(
    decay: Float[Array, "T *width"],
    write: Float[Array, "T *width"],
    initial: Float[Array, "*width"] | None = None,
    resets: Bool[Array, " T"] | None = None,
    *,
    method: Method = "auto",
) -> Float[Array, "T *width"]:
    """h with h_t = decay_t * h_{t-1} + write_t. The gradient keeps h and decay only.

    **Arguments:**

    - `decay`, `write`: (T, ...).
    - `initial`: (...), the state before the first step; `None` is zero.
    - `resets`: (T,) true forgets everything before t.
    - `method`: "auto", "sequential", "associative" or "chunked".

    **Returns:**

    h (T, ...).
    """
    validation.check_one_of("method", method, METHODS)
    validation.check_shape("write", write, decay.shape)
    validation.check_nonempty("decay", decay)
    if initial is None:
        initial = jnp.zeros(decay.shape[1:], decay.dtype)
    validation.check_shape("initial", initial, decay.shape[1:])
    if resets is not None:
        validation.check_shape("resets", resets, decay.shape[:1])
        reset = resets.reshape(-1, *(1,) * (decay.ndim - 1))
        decay = jnp.where(reset, 0, decay)
    if method == "auto":
        method = _choose(decay.shape[0], decay[0].size)
    h: Any = _recurrence(method, decay, write, initial)
    return h


def _choose(steps: int, width: int) -> Method:
    if kernels.on_accelerator():
        return "associative"
    return "chunked" if width <= _NARROW and steps >= 256 else "sequential"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(method: Method, decay: Array, write: Array, initial: Array) -> Array:
    match method:
        case "associative":
            return _associative(decay, write, initial)
        case "chunked":
            return _chunked(decay, write, initial)
        case _:
            return _sequential(decay, write, initial)


def _sequential(decay: Array, write: Array, initial: Array) -> Array:
    def step(h: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        h = x[0] * h + x[1]
        return h, h

    return lax.scan(step, initial, (decay, write))[1]


def _associative(decay: Array, write: Array, initial: Array) -> Array:
    write = write.at[0].add(decay[0] * initial)

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (decay, write))[1]


def _chunked(decay: Array, write: Array, initial: Array) -> Array:
    """About sqrt(T) chunks side by side, each from zero; then their ends; then the correction."""
    steps = decay.shape[0]
    size = max(1, int(steps**0.5))
    count = -(-steps // size)
    padding = [(0, count * size - steps)] + [(0, 0)] * (decay.ndim - 1)

    def split(x: Array, fill: float) -> Array:
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.moveaxis(x.reshape(count, size, *x.shape[1:]), 0, 1)

    a, b = split(decay, 1.0), split(write, 0.0)

    def inside(carry: tuple[Array, Array], x: tuple[Array, Array]):
        carry = (x[0] * carry[0], x[0] * carry[1] + x[1])
        return carry, carry

    zero = jnp.zeros_like(b[0])
    ends, (kept, local) = lax.scan(inside, (zero + 1, zero), (a, b))

    def between(h: Array, end: tuple[Array, Array]) -> tuple[Array, Array]:
        return end[0] * h + end[1], h

    starts = lax.scan(between, initial, ends)[1]
    h = jnp.moveaxis(local + kept * starts, 1, 0)
    return h.reshape(count * size, *decay.shape[1:])[:steps]


def _recurrence_fwd(method: Method, decay: Array, write: Array, initial: Array):
    h = _recurrence(method, decay, write, initial)
    return h, (decay, h, initial)


def _recurrence_bwd(method: Method, saved: tuple[Array, Array, Array], dh: Array):
    decay, h, initial = saved
    # The adjoint g_t = dh_t + a_{t+1} g_{t+1} is the same recurrence, run backwards.
    shifted = jnp.concatenate([decay[1:], jnp.zeros_like(decay[:1])])
    reversed_g: Any = _recurrence(method, shifted[::-1], dh[::-1], jnp.zeros_like(initial))
    g = reversed_g[::-1]
    previous = jnp.concatenate([initial[None], h[:-1]])
    return g * previous, g, decay[0] * g[0]


_recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)
