"""xLSTM's matrix memory with exponential gates (Beck et al., 2024): mLSTM.

`step` is Equations 19 to 21 with the stabiliser of Equations 15 to 17. C and n are stored divided
by exp(m), where m is at least the largest exponent of what they sum up. The lower bound 1 of the
normaliser in Equation 21 becomes exp(-m), so that the output is that of the equations without
stabiliser. It then does not depend on m, and no gradient passes through m.
`_chunked` computes the same with matrix products over chunks of time.
Shapes: T time, H heads, V width of keys and values.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite import validation
from agalite.ops._arguments import as_resets, check_heads
from agalite.ops._scalar_decay import (
    Method,
    as_keep,
    choose,
    chunk_size,
    decays,
    into_chunks,
    out_of_chunks,
    over_lanes,
    pass_on,
)
from agalite.ops.resets import reset_state

_CHUNK = 64
NOTHING = -1e30
"""The exponent of nothing: m of an empty memory, and an input gate that writes nothing.

With m = 0, a forget gate of exp(100) would raise the stabiliser of an empty memory so far that what
is then written underflows.
"""


class MLSTMState(NamedTuple):
    """C (H, V, K) and n (H, K) divided by exp(m), and the stabiliser m (H,)."""

    C: Float[Array, "H V K"]
    n: Float[Array, "H K"]
    m: Float[Array, " H"]


def initial_state(heads: int, head_size: int, dtype: jnp.dtype) -> MLSTMState:
    """C_0 = 0, n_0 = 0 and m_0 = `NOTHING`."""
    return MLSTMState(
        jnp.zeros((heads, head_size, head_size), dtype),
        jnp.zeros((heads, head_size), dtype),
        jnp.full(heads, NOTHING, dtype),
    )


def _reset(state: MLSTMState, reset: Bool[Array, ""]) -> MLSTMState:
    """`initial_state` where `reset` is true."""
    C, n, m = reset_state(state, reset)
    return MLSTMState(C, n, jnp.where(reset, jnp.full_like(m, NOTHING), m))


def step(
    state: MLSTMState,
    q: Float[Array, "H V"],
    k: Float[Array, "H V"],
    v: Float[Array, "H V"],
    i: Float[Array, " H"],
    log_f: Float[Array, " H"],
    reset: Bool[Array, ""],
) -> tuple[MLSTMState, Float[Array, "H V"]]:
    """One input; i is the input gate's pre-activation, the logarithm of i_t."""
    C, n, m_old = _reset(state, reset)
    # Equation 15: m_t = max(log f_t + m_{t-1}, log i_t)
    m = lax.stop_gradient(jnp.maximum(log_f + m_old, i))
    write = jnp.exp(i - m)  # Equation 16: i'_t
    keep = jnp.exp(log_f + lax.stop_gradient(m_old) - m)  # Equation 17: f'_t
    # Equation 19: C_t = f_t C_{t-1} + i_t v_t k_t^T
    C = keep[:, None, None] * C + write[:, None, None] * v[:, :, None] * k[:, None, :]
    n = keep[:, None] * n + write[:, None] * k  # Equation 20: n_t = f_t n_{t-1} + i_t k_t
    # Equation 21: C_t q_t / max(|n_t . q_t|, 1)
    top, bottom = jnp.einsum("hvk,hk->hv", C, q), jnp.einsum("hk,hk->h", n, q)
    return MLSTMState(C, n, m), top / jnp.maximum(jnp.abs(bottom), jnp.exp(-m))[:, None]


def mlstm(
    q: Float[Array, "T H V"],
    k: Float[Array, "T H V"],
    v: Float[Array, "T H V"],
    i: Float[Array, "T H"],
    log_f: Float[Array, "T H"],
    resets: Bool[Array, " T"] | None = None,
    state: MLSTMState | None = None,
    *,
    method: Method = "auto",
) -> tuple[MLSTMState, Float[Array, "T H V"]]:
    """The memory of mLSTM over one sequence, before its output gate.

    **Arguments:**

    - `q`, `k`, `v`: (T, H, V) queries, keys and values.
    - `i`: (T, H) logarithms of the input gate, any number.
    - `log_f`: (T, H) logarithms of the forget gate.
    - `resets`: (T,) true where an episode begins.
    - `state`: where an earlier call ended; `None` is the start of an episode.
    - `method`: "auto", "sequential" or "chunked". The numbers are the same up to rounding.

    **Returns:**

    The state after the last input, and the outputs (T, H, V).
    """
    check_heads(q=q, k=k, v=v, resets=resets)
    for name, gate in (("i", i), ("log_f", log_f)):
        validation.check_shape(name, gate, v.shape[:2])
    resets = as_resets(resets, len(v))
    empty = initial_state(v.shape[1], v.shape[2], v.dtype)
    start = empty if state is None else _reset(state, resets[0])
    validation.check_structure("state", start, empty)
    if choose(method, len(v)) == "sequential":
        return lax.scan(lambda s, x: step(s, *x), start, (q, k, v, i, log_f, resets))
    return _chunked(start, q, k, v, i, log_f, as_keep(resets, v))


def _of_lanes(
    start: MLSTMState, q: Array, k: Array, v: Array, i: Array, log_f: Array, keep: Array
) -> tuple[MLSTMState, Array]:
    steps = len(v)
    size = chunk_size(steps, _CHUNK)
    q, k, v, log_f = (into_chunks(x, size) for x in (q, k, v, log_f))
    i = into_chunks(i, size, fill=NOTHING)
    d = decays(log_f, into_chunks(keep, size, fill=1))
    exponents = jnp.where(d.seen, d.between + i[:, :, None, :], -jnp.inf)

    # The stabilisers: m_found (N, H) at the start of each chunk, m (N, H, t) at each step.
    since, highest, m_start = lax.stop_gradient((d.since, exponents.max(-1), start.m))

    def pass_m(m: Array, x: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        since, fresh, highest = x
        return jnp.maximum(since + jnp.where(fresh, m, NOTHING), highest), m

    ends = since[..., -1], d.fresh[..., -1], highest[..., -1]
    m_last, m_found = lax.scan(pass_m, m_start, ends)
    m_found = m_found[..., None]
    m = jnp.maximum(since + jnp.where(d.fresh, m_found, NOTHING), highest)

    mask = jnp.exp(exponents - m[..., None])
    from_start = jnp.exp(jnp.where(d.fresh, d.since + m_found - m, -jnp.inf))
    to_end = mask[:, :, -1, :, None] * k
    # C and n are read and written apart: a matrix of V + 1 columns is slow to multiply by.
    first = jnp.concatenate([jnp.swapaxes(start.C, 1, 2), start.n[..., None]], axis=-1)
    written = jnp.concatenate(
        [jnp.einsum("nhjk,nhjv->nhkv", to_end, v), to_end.sum(2)[..., None]], axis=-1
    )
    last, found = pass_on(first, from_start[..., -1], written)
    scores = jnp.einsum("nhtk,nhjk->nhtj", q, k) * mask
    read = jnp.einsum("nhtk,nhkv->nhtv", q, found[..., :-1])
    top = jnp.einsum("nhtj,nhjv->nhtv", scores, v) + from_start[..., None] * read
    bottom = scores.sum(-1) + from_start * jnp.einsum("nhtk,nhk->nht", q, found[..., -1])
    out = top / jnp.maximum(jnp.abs(bottom), jnp.exp(-m))[..., None]
    state = MLSTMState(jnp.swapaxes(last[..., :-1], 1, 2), last[..., -1], m_last)
    return state, out_of_chunks(out, steps)


_chunked = over_lanes(_of_lanes, (0, 1, 1, 1, 1, 1, 1), (0, 1))
