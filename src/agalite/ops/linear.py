"""The linear transformer's attention (Algorithm 2): a matrix per head in which nothing decays.

`step` is the algorithm line by line. `_chunked` computes the same with matrix products over chunks
of time: without gates, a mask of which key each query may read is all that a chunk needs.
Shapes: T time, H heads, V head width, K feature width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite import validation
from agalite.ops._arguments import (
    Features,
    as_resets,
    check_heads,
    choose_method,
    feature_size,
)
from agalite.ops._batching import into_chunks, out_of_chunks
from agalite.ops.features import Outer, as_outer, epsilon
from agalite.ops.recurrence import Method, linear_recurrence
from agalite.ops.resets import reset_state

_CHUNK = 32


class MatrixState(NamedTuple):
    """C (H, V, K) and s (H, K) of Algorithms 2 and 3, for one layer."""

    C: Float[Array, "H V K"]
    s: Float[Array, "H K"]


def initial_state(heads: int, width: int, head_size: int, dtype: jnp.dtype) -> MatrixState:
    """C_0 = 0 and s_0 = 0. `width` is K."""
    return MatrixState(
        jnp.zeros((heads, head_size, width), dtype), jnp.zeros((heads, width), dtype)
    )


def step(
    state: MatrixState,
    q: Float[Array, "H K"],
    k: Float[Array, "H K"],
    v: Float[Array, "H V"],
    reset: Bool[Array, ""],
) -> tuple[MatrixState, Float[Array, "H V"]]:
    """Lines 4 to 6 of Algorithm 2 for one input."""
    C, s = reset_state(state, reset)
    C = C + v[:, :, None] * k[:, None, :]  # line 4: C_t = C_{t-1} + v_t (x) k_t
    s = s + k  # line 5: s_t = s_{t-1} + k_t
    return MatrixState(C, s), read(C, s, q)  # line 6


def read(
    C: Float[Array, "H V K"], s: Float[Array, "H K"], q: Float[Array, "H K"]
) -> Float[Array, "H V"]:
    """a_t = (C_t q_t) / (s_t . q_t): line 6 of Algorithm 2, line 11 of Algorithm 3."""
    bottom = jnp.einsum("hk,hk->h", s, q) + epsilon(q.dtype)
    return jnp.einsum("hvk,hk->hv", C, q) / bottom[:, None]


def linear_attention(
    q: Features,
    k: Features,
    v: Float[Array, "T H V"],
    resets: Bool[Array, " T"] | None = None,
    state: MatrixState | None = None,
    *,
    method: Method = "auto",
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """Linear attention over one sequence (Algorithm 2).

    **Arguments:**

    - `q`, `k`: (T, H, K) queries and keys after the feature map, or `Outer` factors of them.
    - `v`: (T, H, V) values.
    - `resets`: (T,) true where an episode begins.
    - `state`: where an earlier call ended; `None` is the start of an episode.
    - `method`: "auto", "sequential", "associative" or "chunked". The numbers are the same up to
        rounding.

    **Returns:**

    The state after the last input, and the outputs (T, H, V).
    """
    check_heads(q=q, k=k, v=v, resets=resets)
    outer_q, outer_k = as_outer(q), as_outer(k)
    resets, start = start_state(outer_q, v, resets, state)
    match choose_method(method, v, accelerator="chunked"):
        case "sequential":
            inputs = (outer_q.expand(), outer_k.expand(), v, resets)
            return lax.scan(lambda s, x: step(s, *x), start, inputs)
        case "associative":
            return associative(start, outer_q.expand(), outer_k.expand(), v, None, None, resets)
        case _:
            return _chunked(start, outer_q, outer_k, v, resets)


def start_state(
    q: Outer, v: Array, resets: Array | None, state: MatrixState | None
) -> tuple[Bool[Array, " T"], MatrixState]:
    """Resets as an array, and the state that the first input finds."""
    resets = as_resets(resets, v.shape[0])
    empty = initial_state(v.shape[1], feature_size(q), v.shape[2], v.dtype)
    if state is None:
        return resets, empty
    validation.check_structure("state", state, empty)
    return resets, reset_state(state, resets[0])


def associative(
    state: MatrixState,
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    gamma: Float[Array, "T H K"] | None,
    resets: Bool[Array, " T"],
    *,
    separable: bool = True,
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """Algorithms 2 and 3 by the parallel scan of Appendix F: C (T, H, V, K) at every step.

    separable: whether C decays by (1 - beta) (x) (1 - gamma), or else by 1 - beta (x) gamma.
    """

    def outer(a: Array, b: Array) -> Array:
        return a[..., :, None] * b[..., None, :]

    decay_k, decay_v = jnp.ones_like(k), jnp.ones_like(v)
    decay = outer(decay_v, decay_k)
    if gamma is not None and beta is not None:
        k, v, decay_k, decay_v = gamma * k, beta * v, 1 - gamma, 1 - beta
        decay = outer(decay_v, decay_k) if separable else 1 - outer(beta, gamma)

    C = linear_recurrence(decay, outer(v, k), state.C, resets, method="associative")
    s = linear_recurrence(decay_k, k, state.s, resets, method="associative")
    return MatrixState(C[-1], s[-1]), jax.vmap(read)(C, s, q)


def _chunked(
    start: MatrixState, q: Outer, k: Outer, v: Float[Array, "T H V"], resets: Bool[Array, " T"]
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    @jax.checkpoint
    def chunk(state: MatrixState, x: tuple[Outer, Outer, Array, Array]):
        q, k, v, resets = x
        q, k = q.expand(), k.expand()
        episode = jnp.cumsum(resets)
        time = jnp.arange(v.shape[0])
        seen = (episode[:, None] == episode) & (time[:, None] >= time)
        fresh, last = (episode == 0).astype(v.dtype), (episode == episode[-1]).astype(v.dtype)
        scores = jnp.where(seen, jnp.einsum("thk,jhk->htj", q, k), 0)
        top = jnp.einsum("htj,jhv->thv", scores, v)
        bottom = scores.sum(-1).T
        old = q * fresh[:, None, None]  # only queries before the first reset read the old state
        top = top + jnp.einsum("thk,hvk->thv", old, state.C)
        bottom = bottom + jnp.einsum("thk,hk->th", old, state.s)
        keep = episode[-1] == 0
        new = k * last[:, None, None]  # only keys of the last episode are passed on
        C = jnp.where(keep, state.C, 0) + jnp.einsum("thv,thk->hvk", v, new)
        s = jnp.where(keep, state.s, 0) + new.sum(0)
        return MatrixState(C, s), top / (bottom + epsilon(v.dtype))[..., None]

    chunks, steps = into_chunks((q, k, v, resets), _CHUNK)
    state, out = lax.scan(chunk, start, chunks)
    return state, out_of_chunks(out, steps)
