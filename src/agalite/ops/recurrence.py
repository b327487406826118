"""The first-order linear recurrence h_t = a_t * h_{t-1} + b_t, element by element, real or complex.

Every gated memory of the paper is this recurrence (C_t, s_t, v~_t, k~_t), and so are the diagonal
state-space models, with complex numbers. Three ways to compute it give the same numbers up to
rounding. On a CPU a plain loop is an order of magnitude faster than the associative scan; on an
accelerator it is the other way round. `activated_recurrence` has a nonlinearity around each step
and is a loop everywhere.
"""

from functools import partial
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite import kernels, validation
from agalite.ops._batching import batched_as_lanes

Method = Literal["auto", "sequential", "associative", "chunked"]
METHODS = ("auto", "sequential", "associative", "chunked")
Activation = Literal["relu", "tanh"]
ACTIVATIONS = ("relu", "tanh")

# An iteration of a loop costs a few microseconds whatever its size. Below this many elements per
# step that dominates, and running chunks side by side is worth its second pass.
_NARROW = 512


class Complex(eqx.Module):
    """Complex numbers as two real arrays of the same shape.

    Neither bfloat16 nor ONNX has complex numbers, and XLA's loops over interleaved parts are not
    vectorised.
    """

    real: Float[Array, "..."]
    imag: Float[Array, "..."]

    def __mul__(self, other: "Complex | Array") -> "Complex":
        if not isinstance(other, Complex):
            return Complex(self.real * other, self.imag * other)
        return Complex(
            self.real * other.real - self.imag * other.imag,
            self.real * other.imag + self.imag * other.real,
        )

    def __add__(self, other: "Complex") -> "Complex":
        return Complex(self.real + other.real, self.imag + other.imag)

    def __getitem__(self, index: Any) -> "Complex":
        return Complex(self.real[index], self.imag[index])

    def conj(self) -> "Complex":
        return Complex(self.real, -self.imag)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.real.shape

    @property
    def ndim(self) -> int:
        return self.real.ndim

    @property
    def size(self) -> int:
        return self.real.size


Numbers = TypeVar("Numbers", Array, Complex)


def linear_recurrence(
    decay: Numbers,
    write: Numbers,
    initial: Numbers | None = None,
    resets: Bool[Array, " T"] | None = None,
    *,
    method: Method = "auto",
) -> Numbers:
    """h with h_t = decay_t * h_{t-1} + write_t. The gradient keeps h and decay only.

    **Arguments:**

    - `decay`, `write`: (T, ...), arrays or both `Complex`.
    - `initial`: (...), the state before the first step; `None` is zero.
    - `resets`: (T,) true forgets everything before t.
    - `method`: "auto", "sequential", "associative" or "chunked".

    **Returns:**

    h (T, ...).
    """
    validation.check_one_of("method", method, METHODS)
    decay, write, start = _checked(decay, write, initial, resets)
    if decay.shape[0] == 1:  # a step of a stream
        return decay * start[None] + write
    if decay.ndim > 1:
        h: Any = _recurrence(method, decay, write, start)
        return h
    # `batched_as_lanes` widens the first axis after time.
    column: Any = jax.tree.map(lambda x: x[..., None], (decay, write, start))
    h = _recurrence(method, *column)
    return h[:, 0]


def activated_recurrence(
    decay: Numbers,
    write: Numbers,
    initial: Numbers | None = None,
    resets: Bool[Array, " T"] | None = None,
    *,
    activation: Activation,
) -> Numbers:
    """h with h_t = f(decay_t * h_{t-1} + write_t); f acts on real and imaginary parts separately.

    It is computed step by step. The gradient keeps h and decay only.

    **Arguments:**

    - `decay`, `write`: (T, N), arrays or both `Complex`.
    - `initial`: (N,), the state before the first step; `None` is zero.
    - `resets`: (T,) true forgets everything before t.
    - `activation`: f, "relu" or "tanh".

    **Returns:**

    h (T, N).
    """
    validation.check_one_of("activation", activation, ACTIVATIONS)
    decay, write, start = _checked(decay, write, initial, resets)
    if decay.shape[0] == 1:
        return _activate(activation, decay * start[None] + write)
    h: Any = _activated(activation, decay, write, start)
    return h


def _checked(decay: Any, write: Any, initial: Any, resets: Any) -> tuple[Any, Any, Any]:
    """decay, which is zero at resets, write and the initial state."""
    validation.check_shape("write", write, decay.shape)
    leaf = jax.tree.leaves(decay)[0]
    validation.check_nonempty("decay", leaf)
    if initial is None:
        initial = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), decay)
    validation.check_shape("initial", initial, decay.shape[1:])
    if resets is not None:
        validation.check_shape("resets", resets, decay.shape[:1])
        # An outer product with ones: broadcasting would make `vmap` move the batch in front of
        # time, and with it every array that follows.
        keep = jnp.tensordot((~resets).astype(leaf.dtype), jnp.ones(leaf.shape[1:], leaf.dtype), 0)
        decay = jax.tree.map(lambda x: x * keep, decay)
    return decay, write, initial


# --- the linear recurrence ------------------------------------------------------------------------


def _choose(steps: int, width: int) -> Method:
    if kernels.on_accelerator():
        return "associative"
    return "chunked" if width <= _NARROW and steps >= 256 else "sequential"


def _compute(method: Method, decay: Any, write: Any, initial: Any) -> Any:
    if method == "auto":
        method = _choose(decay.shape[0], decay[0].size)
    form = {"associative": _associative, "chunked": _chunked}.get(method, _sequential)
    return form(decay, write, initial)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(method: Method, decay: Any, write: Any, initial: Any) -> Any:
    return batched_as_lanes(partial(_compute, method), (1, 1, 0), 1)(decay, write, initial)


def _sequential(decay: Any, write: Any, initial: Any) -> Any:
    def step(h: Any, x: tuple[Any, Any]) -> tuple[Any, Any]:
        h = x[0] * h + x[1]
        return h, h

    return lax.scan(step, initial, (decay, write))[1]


def _associative(decay: Any, write: Any, initial: Any) -> Any:
    write = jax.tree.map(lambda w, first: w.at[0].add(first), write, decay[0] * initial)

    def combine(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (decay, write))[1]


def _chunked(decay: Any, write: Any, initial: Any) -> Any:
    """About sqrt(T) chunks side by side, each from zero; then their ends; then the correction."""
    steps = decay.shape[0]
    size = max(1, int(steps**0.5))
    count = -(-steps // size)
    padding = [(0, count * size - steps)] + [(0, 0)] * (decay.ndim - 1)

    def split(x: Array) -> Array:
        x = jnp.pad(x, padding)
        return jnp.moveaxis(x.reshape(count, size, *x.shape[1:]), 0, 1)

    a, b = jax.tree.map(split, (decay, write))

    def inside(carry: tuple[Any, Any], x: tuple[Any, Any]):
        carry = (x[0] * carry[0], x[0] * carry[1] + x[1])
        return carry, carry

    zero = jax.tree.map(jnp.zeros_like, b[0])
    ends, (kept, local) = lax.scan(inside, (_one(zero), zero), (a, b))

    def between(h: Any, end: tuple[Any, Any]) -> tuple[Any, Any]:
        return end[0] * h + end[1], h

    starts = lax.scan(between, initial, ends)[1]
    h = local + kept * starts
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0).reshape(count * size, *decay.shape[1:])[:steps], h
    )


def _one(zero: Any) -> Any:
    return Complex(zero.real + 1, zero.imag) if isinstance(zero, Complex) else zero + 1


def _recurrence_fwd(method: Method, decay: Any, write: Any, initial: Any):
    h = _recurrence(method, decay, write, initial)
    return h, (decay, h, initial)


def _recurrence_bwd(method: Method, saved: tuple[Any, Any, Any], dh: Any):
    def backward(decay: Any, h: Any, initial: Any, dh: Any):
        decay = decay.conj()
        # The adjoint g_t = dh_t + a*_{t+1} g_{t+1} is the same recurrence, run backwards.
        shifted = jax.tree.map(lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])]), decay)
        zero = jax.tree.map(jnp.zeros_like, initial)
        g = _compute(method, shifted[::-1], dh[::-1], zero)[::-1]
        return g * _previous(initial, h).conj(), g, decay[0] * g[0]

    return batched_as_lanes(backward, (1, 1, 0, 1), (1, 1, 0))(*saved, dh)


def _previous(initial: Any, h: Any) -> Any:
    """(T, ...): the state before each step."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), initial, h)


_recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)


# --- with a nonlinearity --------------------------------------------------------------------------


def _activate(activation: Activation, x: Any) -> Any:
    return jax.tree.map(jnp.tanh if activation == "tanh" else lambda x: jnp.maximum(x, 0), x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activated(activation: Activation, decay: Any, write: Any, initial: Any) -> Any:
    def forward(decay: Any, write: Any, initial: Any) -> Any:
        def step(h: Any, x: tuple[Any, Any]) -> tuple[Any, Any]:
            h = _activate(activation, x[0] * h + x[1])
            return h, h

        return lax.scan(step, initial, (decay, write))[1]

    return batched_as_lanes(forward, (1, 1, 0), 1)(decay, write, initial)


def _activated_fwd(activation: Activation, decay: Any, write: Any, initial: Any):
    h = _activated(activation, decay, write, initial)
    return h, (decay, h, initial)


def _activated_bwd(activation: Activation, saved: tuple[Any, Any, Any], dh: Any):
    def slope(h: Array, g: Array) -> Array:
        """g times f', which both activations have as a function of their output."""
        return g * (1 - h * h) if activation == "tanh" else jnp.where(h > 0, g, 0)

    def backward(decay: Any, h: Any, initial: Any, dh: Any):
        # g_t is the gradient of what f is applied to: g_t = f'_t (dh_t + a*_{t+1} g_{t+1}).
        def step(later: Any, x: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            a, h, dh = x
            g = jax.tree.map(slope, h, dh + later)
            return a * g, g

        decay = decay.conj()
        zero = jax.tree.map(jnp.zeros_like, initial)
        dinitial, g = lax.scan(step, zero, (decay, h, dh), reverse=True)
        return g * _previous(initial, h).conj(), g, dinitial

    return batched_as_lanes(backward, (1, 1, 0, 1), (1, 1, 0))(*saved, dh)


_activated.defvjp(_activated_fwd, _activated_bwd)
