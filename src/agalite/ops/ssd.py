"""Mamba-2's state space model (Dao and Gu, 2024): a matrix per head that decays by one number.

`step` is the recurrence of their Equation 2 with A_t = a_t I, here with S = h^T, (V, K), so that
C_t is the query, B_t the key and x_t the value. `_chunked` is their dual form (Section 6): inside a
chunk an attention with a mask of decays, between chunks the recurrence.
Shapes: T time, H heads, G groups of heads, V head width, K state width.
"""

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


def step(
    state: Float[Array, "H V K"],
    q: Float[Array, "H K"],
    k: Float[Array, "H K"],
    v: Float[Array, "H V"],
    log_decay: Float[Array, " H"],
    reset: Bool[Array, ""],
) -> tuple[Float[Array, "H V K"], Float[Array, "H V"]]:
    """Equation 2 for one input: S_t = a_t S_{t-1} + v_t k_t^T and y_t = S_t q_t."""
    S = reset_state(state, reset)
    S = jnp.exp(log_decay)[:, None, None] * S + v[:, :, None] * k[:, None, :]
    return S, jnp.einsum("hvk,hk->hv", S, q)


def state_space_dual(
    q: Float[Array, "T G K"],
    k: Float[Array, "T G K"],
    v: Float[Array, "T H V"],
    log_decay: Float[Array, "T H"],
    resets: Bool[Array, " T"] | None = None,
    state: Float[Array, "H V K"] | None = None,
    *,
    method: Method = "auto",
) -> tuple[Float[Array, "H V K"], Float[Array, "T H V"]]:
    """The scalar-decay state space model over one sequence.

    **Arguments:**

    - `q`, `k`: (T, G, K), C_t and B_t of the paper. H is a multiple of G: H / G heads in a row
        share theirs.
    - `v`: (T, H, V), the inputs x_t.
    - `log_decay`: (T, H), the logarithm of a_t, at most 0.
    - `resets`: (T,) true where an episode begins.
    - `state`: (H, V, K), where an earlier call ended; `None` is zero.
    - `method`: "auto", "sequential" or "chunked". The numbers are the same up to rounding.

    **Returns:**

    The state after the last input, and the outputs (T, H, V).
    """
    check_heads(q=q, k=k, v=v[:, : q.shape[1]], resets=resets)
    if v.shape[1] % q.shape[1]:
        raise ValueError(
            f"v has {v.shape[1]} heads; it must be a multiple of the {q.shape[1]} of q and k"
        )
    validation.check_shape("log_decay", log_decay, v.shape[:2])
    resets = as_resets(resets, len(v))
    empty = jnp.zeros((*v.shape[1:], k.shape[-1]), v.dtype)
    start = empty if state is None else reset_state(state, resets[0])
    validation.check_structure("state", start, empty)
    if choose(method, len(v)) == "sequential":
        q, k = (jnp.repeat(x, v.shape[1] // q.shape[1], axis=1) for x in (q, k))
        return lax.scan(lambda s, x: step(s, *x), start, (q, k, v, log_decay, resets))
    return _chunked(start, q, k, v, log_decay, as_keep(resets, v))


def _of_lanes(start: Array, q: Array, k: Array, v: Array, log_decay: Array, keep: Array):
    steps = len(v)
    size = chunk_size(steps, _CHUNK)
    q, k, v, log_decay = (into_chunks(x, size) for x in (q, k, v, log_decay))
    d = decays(log_decay, into_chunks(keep, size, fill=1))
    mask = jnp.where(d.seen, jnp.exp(d.between), 0)
    from_start = jnp.where(d.fresh, jnp.exp(d.since), 0)
    # Heads (g, p): g groups, each of p heads that share q and k.
    groups = q.shape[1]
    v = v.reshape(v.shape[0], groups, -1, *v.shape[2:])
    mask, from_start = (x.reshape(*v.shape[:3], *x.shape[2:]) for x in (mask, from_start))
    written = jnp.einsum("ngjk,ngpjv->ngpkv", k, v * mask[..., -1, :, None])
    chunks, heads = len(v), log_decay.shape[1]
    last, found = pass_on(
        jnp.swapaxes(start, 1, 2),
        from_start[..., -1].reshape(chunks, heads),
        written.reshape(chunks, heads, *written.shape[3:]),
    )
    found = found.reshape(written.shape)
    scores = jnp.einsum("ngtk,ngjk->ngtj", q, k)[:, :, None] * mask
    out = jnp.einsum("ngptj,ngpjv->ngptv", scores, v)
    out = out + from_start[..., None] * jnp.einsum("ngtk,ngpkv->ngptv", q, found)
    out = out.reshape(chunks, heads, *out.shape[3:])
    return jnp.swapaxes(last, 1, 2), out_of_chunks(out, steps)


_chunked = over_lanes(_of_lanes, (0, 1, 1, 1, 1, 1), (0, 1))
