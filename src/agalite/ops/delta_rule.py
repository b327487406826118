"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024): a matrix that is corrected.

`step` is their Equation 10. `_chunked` is the form with matrix products (their Section 3.3): with
u_t = beta_t (v_t - alpha_t S_{t-1} k_t), a step is S_t = alpha_t S_{t-1} + u_t k_t^T, so that all
u_t of a chunk solve one triangular system. Its entries are products of numbers in [0, 1] and of
scalar products of keys; nothing is divided by a decay.
Shapes: T time, H heads, V head width, K key width.
"""

import jax
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
)
from agalite.ops.resets import reset_state

_CHUNK = 32
_BLOCK = 8  # up to this size an inverse is written out row by row


def step(
    state: Float[Array, "H V K"],
    q: Float[Array, "H K"],
    k: Float[Array, "H K"],
    v: Float[Array, "H V"],
    beta: Float[Array, " H"],
    log_alpha: Float[Array, " H"],
    reset: Bool[Array, ""],
) -> tuple[Float[Array, "H V K"], Float[Array, "H V"]]:
    """Equation 10: S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

    The output is o_t = S_t q_t.
    """
    S = jnp.exp(log_alpha)[:, None, None] * reset_state(state, reset)
    error = v - jnp.einsum("hvk,hk->hv", S, k)
    S = S + (beta[:, None] * error)[:, :, None] * k[:, None, :]
    return S, jnp.einsum("hvk,hk->hv", S, q)


def gated_delta_rule(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H"],
    log_alpha: Float[Array, "T H"],
    resets: Bool[Array, " T"] | None = None,
    state: Float[Array, "H V K"] | None = None,
    *,
    method: Method = "auto",
) -> tuple[Float[Array, "H V K"], Float[Array, "T H V"]]:
    """The gated delta rule over one sequence.

    **Arguments:**

    - `q`, `k`: (T, H, K) queries and keys; keys of length at most 1, or the state may grow.
    - `v`: (T, H, V) values.
    - `beta`: (T, H) writing strength, in [0, 1].
    - `log_alpha`: (T, H) logarithm of the decay, at most 0.
    - `resets`: (T,) true where an episode begins.
    - `state`: (H, V, K), where an earlier call ended; `None` is zero.
    - `method`: "auto", "sequential" or "chunked". The numbers are the same up to rounding.

    **Returns:**

    The state after the last input, and the outputs (T, H, V).
    """
    check_heads(q=q, k=k, v=v, resets=resets)
    for name, gate in (("beta", beta), ("log_alpha", log_alpha)):
        validation.check_shape(name, gate, v.shape[:2])
    resets = as_resets(resets, len(v))
    empty = jnp.zeros((*v.shape[1:], k.shape[-1]), v.dtype)
    start = empty if state is None else reset_state(state, resets[0])
    validation.check_structure("state", start, empty)
    if choose(method, len(v)) == "sequential":
        return lax.scan(lambda s, x: step(s, *x), start, (q, k, v, beta, log_alpha, resets))
    return _chunked(start, q, k, v, beta, log_alpha, as_keep(resets, v))


def _of_lanes(
    start: Array, q: Array, k: Array, v: Array, beta: Array, log_alpha: Array, keep: Array
) -> tuple[Array, Array]:
    steps = len(v)
    size = chunk_size(steps, _CHUNK)
    q, k, v, beta, log_alpha = (into_chunks(x, size) for x in (q, k, v, beta, log_alpha))
    d = decays(log_alpha, into_chunks(keep, size, fill=1))
    mask = jnp.where(d.seen, jnp.exp(d.between), 0)
    from_start = jnp.where(d.fresh, jnp.exp(d.since), 0)
    # u_t + beta_t sum_{j<t} decay(j, t) (k_t . k_j) u_j = beta_t (v_t - decay(t) S_0 k_t)
    before = beta[..., None] * jnp.einsum("nhtk,nhjk->nhtj", k, k) * mask
    right = jnp.concatenate([v, from_start[..., None] * k], axis=-1) * beta[..., None]
    solved = jnp.einsum("nhtj,nhjv->nhtv", unit_lower_inverse(before), right)
    of_values, of_state = jnp.split(solved, [v.shape[-1]], axis=-1)
    to_end = k * mask[:, :, -1, :, None]

    def one(S: Float[Array, "H K V"], x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        kept, of_values, of_state, to_end = x
        u = of_values - jnp.einsum("htk,hkv->htv", of_state, S)
        new = kept[:, None, None] * S + jnp.einsum("htk,htv->hkv", to_end, u)
        return new, (S, u)

    by_chunk = (from_start[..., -1], of_values, of_state, to_end)
    last, (found, u) = lax.scan(one, jnp.swapaxes(start, 1, 2), by_chunk)
    scores = jnp.einsum("nhtk,nhjk->nhtj", q, k) * mask
    out = jnp.einsum("nhtj,nhjv->nhtv", scores, u)
    out = out + from_start[..., None] * jnp.einsum("nhtk,nhkv->nhtv", q, found)
    return jnp.swapaxes(last, 1, 2), out_of_chunks(out, steps)


_chunked = over_lanes(_of_lanes, (0, 1, 1, 1, 1, 1, 1), (0, 1))


@jax.custom_vjp
def unit_lower_inverse(a: Float[Array, "... t t"]) -> Float[Array, "... t t"]:
    """(I + A)^-1, where A is the part of `a` strictly below the diagonal; t is a power of two.

    The inverse of two diagonal blocks gives that of the block of twice the size, from single rows
    on. A series of powers of A would cost as little, but its terms grow like binomial coefficients
    where keys repeat. A product for each level is several times faster on a CPU than a triangular
    solver for each chunk.
    """
    size = a.shape[-1]
    block = min(_BLOCK, size)
    x = _diagonal_blocks(a, block)
    rows = [jnp.zeros_like(x[..., 0, :]).at[..., 0].set(1)]
    for i in range(1, block):
        row = jnp.zeros_like(rows[0]).at[..., i].set(1)
        for j in range(i):
            row = row - x[..., i, j, None] * rows[j]
        rows.append(row)
    inverse = jnp.stack(rows, axis=-2)
    while block < size:
        below = _diagonal_blocks(a, 2 * block)[..., block:, :block]
        upper, lower = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        below = -jnp.einsum("...ij,...jk,...kl->...il", lower, below, upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([below, lower], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(a: Float[Array, "... t t"], size: int) -> Float[Array, "... n b b"]:
    count = a.shape[-1] // size
    blocks = [a[..., i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)]
    return jnp.stack(blocks, axis=-3)


def _inverse_bwd(inverse: Array, d: Array) -> tuple[Array]:
    return (jnp.tril(-jnp.einsum("...ji,...jk,...lk->...il", inverse, d, inverse), -1),)


def _inverse_fwd(a: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)
