"""The aggregator of Fast and Forgetful Memory (Morad et al., 2023): decay times oscillation.

S_t = Gamma * S_{t-1} + x_t 1^T element by element, for M traces and C contexts, with the complex
numbers Gamma_mc = exp(-|alpha_m|) exp(-i omega_c). Complex numbers are stored as real and imaginary
parts. There is no counter of steps: the phase of what is remembered is in S itself.
`step` is the recurrence. `_sequential` is a loop whose gradient is one more loop and keeps S only;
on a CPU it is the fastest form. `_associative` is for accelerators.
Shapes: T time, M traces, C contexts.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite import kernels, validation
from agalite.ops._arguments import as_resets
from agalite.ops.resets import reset_state

Method = Literal["auto", "sequential", "associative"]
METHODS = ("auto", "sequential", "associative")


class FFMState(NamedTuple):
    """The real and imaginary part of S."""

    real: Float[Array, "M C"]
    imag: Float[Array, "M C"]


def gamma(alpha: Float[Array, " M"], omega: Float[Array, " C"]) -> FFMState:
    """Gamma = exp(-|alpha|) exp(-i omega)^T."""
    decay = jnp.exp(-jnp.abs(alpha))
    return FFMState(jnp.outer(decay, jnp.cos(omega)), -jnp.outer(decay, jnp.sin(omega)))


def step(
    state: FFMState, rotation: FFMState, x: Float[Array, " M"], reset: Bool[Array, ""]
) -> FFMState:
    """S_t = Gamma * S_{t-1} + x_t 1^T for one input; `rotation` is Gamma."""
    (a, b), (re, im) = rotation, reset_state(state, reset)
    return FFMState(a * re - b * im + x[:, None], a * im + b * re)


def aggregate(
    x: Float[Array, "T M"],
    alpha: Float[Array, " M"],
    omega: Float[Array, " C"],
    resets: Bool[Array, " T"] | None = None,
    state: FFMState | None = None,
    *,
    method: Method = "auto",
) -> tuple[FFMState, Float[Array, "T 2 M C"]]:
    """Every S_t of one sequence.

    **Arguments:**

    - `x`: (T, M), what is added.
    - `alpha`: (M,), decays; only their absolute value counts.
    - `omega`: (C,), frequencies, in radians a step.
    - `resets`: (T,) true where an episode begins.
    - `state`: where an earlier call ended; `None` is zero.
    - `method`: "auto", "sequential" or "associative". The numbers are the same up to rounding.

    **Returns:**

    The last S, and all of them (T, 2, M, C): real parts, then imaginary parts.
    """
    validation.check_shape("x", x, ("T", "M"))
    validation.check_nonempty("x", x)
    validation.check_shape("alpha", alpha, (x.shape[1],))
    validation.check_shape("omega", omega, ("C",))
    validation.check_one_of("method", method, METHODS)
    resets = as_resets(resets, len(x))
    empty = FFMState(*jnp.zeros((2, len(alpha), len(omega)), x.dtype))
    start = empty if state is None else reset_state(state, resets[0])
    validation.check_structure("state", start, empty)
    rotation = gamma(alpha, omega)
    if len(x) == 1:
        last = step(start, rotation, x[0], resets[0])
        return last, jnp.stack(last)[None]
    if method == "auto":
        method = "associative" if kernels.on_accelerator() else "sequential"
    run = _associative if method == "associative" else _sequential
    h = run(jnp.stack(rotation), jnp.stack(start), x, 1 - resets.astype(x.dtype))
    return FFMState(*h[-1]), h


def _turn(g: Float[Array, "2 M C"], h: Float[Array, "2 M C"]) -> Float[Array, "2 M C"]:
    """The product of complex numbers."""
    return jnp.stack([g[0] * h[0] - g[1] * h[1], g[0] * h[1] + g[1] * h[0]])


def _conjugate(g: Float[Array, "2 M C"]) -> Float[Array, "2 M C"]:
    return jnp.stack([g[0], -g[1]])


@jax.custom_vjp
def _sequential(g: Array, start: Array, x: Array, keep: Array) -> Float[Array, "T 2 M C"]:
    def one(h: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, keep = inputs
        h = _turn(g, keep * h)
        h = jnp.stack([h[0] + x[:, None], h[1]])
        return h, h

    return lax.scan(one, start, (x, keep))[1]


def _sequential_fwd(g: Array, start: Array, x: Array, keep: Array) -> tuple[Array, Any]:
    h = _sequential(g, start, x, keep)
    return h, (g, start, h, keep)


def _sequential_bwd(saved: tuple[Array, ...], dh: Array) -> tuple[Array, ...]:
    g, start, h, keep = saved
    back = _conjugate(g)

    def one(carry: tuple[Array, Array], inputs: tuple[Array, Array, Array]):
        behind, dg = carry
        dh, before, keep = inputs
        adjoint = dh + behind
        dg = dg + _turn(adjoint, _conjugate(keep * before))
        return (keep * _turn(back, adjoint), dg), adjoint[0].sum(-1)

    before = jnp.concatenate([start[None], h[:-1]])
    zero = jnp.zeros_like(start)
    (dstart, dg), dx = lax.scan(one, (zero, zero), (dh, before, keep), reverse=True)
    return dg, dstart, dx, jnp.zeros_like(keep)


_sequential.defvjp(_sequential_fwd, _sequential_bwd)


def _associative(g: Array, start: Array, x: Array, keep: Array) -> Float[Array, "T 2 M C"]:
    decay = keep[:, None, None, None] * g
    write = jnp.stack([jnp.broadcast_to(x[:, :, None], (*x.shape, g.shape[-1]))] * 2, axis=1)
    write = write * jnp.array([1, 0], x.dtype)[:, None, None]
    write = write.at[0].add(_turn(decay[0], start))

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        turn = jax.vmap(_turn)
        return turn(left[0], right[0]), turn(right[0], left[1]) + right[1]

    return lax.associative_scan(combine, (decay, write))[1]
