"""GaLiTe's attention with the published decay 1 - beta (x) gamma, for sequences.

This decay is no outer product, so neither the matrix products of `chunked.py` nor the custom
kernels apply: C goes through every step. The gradient keeps C at the boundaries of chunks of about
sqrt(T) steps and rebuilds one chunk at a time, so that it holds about 2 sqrt(T) matrices V x K per
lane and never T of them. Within a chunk it is written by hand: XLA takes more than twice the time
for the one that JAX derives.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite.ops._arguments import per_head
from agalite.ops._batching import into_chunks, out_of_chunks
from agalite.ops.features import Outer, epsilon
from agalite.ops.linear import MatrixState
from agalite.ops.recurrence import linear_recurrence


def attend(
    start: MatrixState,
    q: Outer,
    k: Outer,
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"],
    gamma: Outer,
    resets: Bool[Array, " T"],
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """The last state and the outputs (T, H, V)."""

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(state: MatrixState, x: tuple[Outer, Outer, Array, Array, Outer, Array]):
        q, k, v, beta, gamma, resets = x
        q, k, gamma = q.expand(), k.expand(), gamma.expand()
        write = gamma * k
        s = linear_recurrence(1 - gamma, write, state.s, resets, method="sequential")
        keep = per_head(~resets, v).astype(v.dtype)
        C, top = _numerators(state.C, _Inputs(q, beta, gamma, beta * v, write, keep))
        bottom = jnp.einsum("thk,thk->th", s, q) + epsilon(v.dtype)
        return MatrixState(C, s[-1]), top / bottom[..., None]

    size = 1 << v.shape[0].bit_length() // 2  # a power of two, about sqrt(T)
    chunks, steps = into_chunks((q, k, v, beta, gamma, resets), size)
    last, out = lax.scan(chunk, start, chunks)
    return last, out_of_chunks(out, steps)


class _Inputs(NamedTuple):
    """Of the steps of a chunk, or of one step; keep is 0 at a reset, else 1."""

    q: Float[Array, "*t H K"]
    beta: Float[Array, "*t H V"]
    gamma: Float[Array, "*t H K"]
    write_v: Float[Array, "*t H V"]
    write_k: Float[Array, "*t H K"]
    keep: Float[Array, "*t H"]


def _kept(x: _Inputs) -> Float[Array, "H V K"]:
    keep = x.keep[:, None]
    return keep[..., None] - (keep * x.beta)[:, :, None] * x.gamma[:, None, :]


def _step(C: Float[Array, "H V K"], x: _Inputs) -> Float[Array, "H V K"]:
    return _kept(x) * C + x.write_v[:, :, None] * x.write_k[:, None, :]


@jax.custom_vjp
def _numerators(C: Float[Array, "H V K"], xs: _Inputs) -> tuple[Array, Float[Array, "t H V"]]:
    """C after the last step, and C_t q_t of every step (t, H, V)."""

    def step(C: Array, x: _Inputs):
        C = _step(C, x)
        return C, jnp.einsum("hvk,hk->hv", C, x.q)

    return lax.scan(step, C, xs)


def _numerators_fwd(C: Array, xs: _Inputs):
    def step(C: Array, x: _Inputs):
        new = _step(C, x)
        return new, (jnp.einsum("hvk,hk->hv", new, x.q), C)

    last, (top, before) = lax.scan(step, C, xs)
    return (last, top), (xs, before)


def _numerators_bwd(saved: tuple[_Inputs, Array], cotangents: tuple[Array, Array]):
    def step(dC: Array, saved: tuple[_Inputs, Array, Array]):
        x, C, dtop = saved
        dq = jnp.einsum("hvk,hv->hk", _step(C, x), dtop)
        dC = dC + dtop[:, :, None] * x.q[:, None, :]
        dwrite_v = jnp.einsum("hvk,hk->hv", dC, x.write_k)
        dwrite_k = jnp.einsum("hvk,hv->hk", dC, x.write_v)
        lost = x.keep[:, None, None] * dC * C
        dbeta = -jnp.einsum("hvk,hk->hv", lost, x.gamma)
        dgamma = -jnp.einsum("hvk,hv->hk", lost, x.beta)
        # Resets are not differentiable.
        dx = _Inputs(dq, dbeta, dgamma, dwrite_v, dwrite_k, jnp.zeros_like(x.keep))
        return _kept(x) * dC, dx

    dlast, dtop = cotangents
    return lax.scan(step, dlast, (*saved, dtop), reverse=True)


_numerators.defvjp(_numerators_fwd, _numerators_bwd)
