"""Softmax attention (Algorithm 1), causal, over a sliding window of the past.

Query t may read the keys of the `window` inputs before it and its own, nothing older and nothing
from before the last reset. Blocks of queries read only the stretch of keys that their windows
cover, so the cost grows as T * (window + block), not as T * (window + T).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agalite import validation
from agalite.ops._arguments import as_resets, check_heads
from agalite.ops.resets import episode_starts

_BLOCK = 64
_MOST_BLOCKS = 16  # The loop over blocks is unrolled, so that shapes stay static.


def softmax_attention(
    q: Float[Array, "T H V"],
    k: Float[Array, "T H V"],
    v: Float[Array, "T H V"],
    resets: Bool[Array, " T"] | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "T H V"]:
    """Algorithm 1, causal: softmax(Q K^T * scale) V over the inputs since the last reset.

    **Arguments:**

    - `q`, `k`, `v`: (T, H, V).
    - `resets`: (T,) true where an episode begins.
    - `window`: how many inputs before its own a query may read; `None`: all.
    - `scale`: 1 / sqrt(V) if `None`. Algorithm 1 writes sqrt(d); GTrXL divides by the head's width,
        and so does this.

    **Returns:**

    (T, H, V).
    """
    check_heads(q=q, k=k, v=v, resets=resets)
    validation.check_shape("k", k, q.shape)
    steps = q.shape[0]
    if window is not None:
        validation.check_integer("window", window, minimum=0)
    return window_attention(
        q,
        k,
        v,
        episode_starts(as_resets(resets, steps)),
        window=steps - 1 if window is None else window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )


def window_attention(
    q: Float[Array, "T H V"],
    k: Float[Array, "S H V"],
    v: Float[Array, "S H V"],
    starts: Int[Array, " T"],
    *,
    window: int,
    scale: float,
    relative: tuple[Float[Array, "T H V"], Float[Array, "D H V"]] | None = None,
) -> Float[Array, "T H V"]:
    """Causal softmax attention over keys of which the first S - T are older than the sequence.

    **Arguments:**

    - `q`: (T, H, V).
    - `k`, `v`: (S, H, V), of the S - T inputs before the sequence, then of its own T.
    - `starts`: (T,) first key that each query may read (its episode's first, counted in keys).
    - `window`: how many inputs before its own a query may read.
    - `scale`: factor of the scores.
    - `relative`: queries for positions (T, H, V) and embeddings (window + 1, H, V) of distances
        0 .. window, whose product is added to the scores: Transformer-XL's relative positions.

    **Returns:**

    (T, H, V).
    """
    steps, before = q.shape[0], k.shape[0] - q.shape[0]
    block = max(_BLOCK, -(-steps // _MOST_BLOCKS))
    out = []
    for first in range(0, steps, block):
        last = min(first + block, steps)
        low, high = max(0, before + first - window), before + last
        queries = slice(first, last)
        rows = None if relative is None else (relative[0][queries], relative[1])
        out.append(
            _block(
                q[queries],
                k[low:high],
                v[low:high],
                starts[queries] - low,
                first=before + first - low,
                window=window,
                scale=scale,
                relative=rows,
            )
        )
    return jnp.concatenate(out)


def _block(
    q: Array,
    k: Array,
    v: Array,
    starts: Array,
    *,
    first: int,
    window: int,
    scale: float,
    relative: tuple[Array, Array] | None,
) -> Array:
    """`first` is the position among these keys of the first query's own key."""
    # Scaled before the product, not after: XLA would join the scaling and softmax's subtraction of
    # the largest into one operation with one rounding, and among enormous scores the largest would
    # then not be the largest.
    scores = jnp.einsum("thv,shv->hts", q * scale, k)
    if relative is not None:
        relative = relative[0] * scale, relative[1]
        scores = scores + _by_distance(*relative, keys=k.shape[0], first=first)
    own = first + jnp.arange(q.shape[0])[:, None]
    key = jnp.arange(k.shape[0])
    allowed = (key <= own) & (key >= own - window) & (key >= starts[:, None])
    # A query always reads its own key, so no row is empty and no softmax is undefined.
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shv->thv", weights, v)


def _by_distance(
    q: Float[Array, "T H V"], embedding: Float[Array, "D H V"], *, keys: int, first: int
) -> Float[Array, "H T S"]:
    """score[t, s] = q_t . embedding[first + t - s]; arbitrary where that distance is outside D."""
    steps, farthest = q.shape[0], embedding.shape[0] - 1
    # With distances laid out far to near, each query's row is the previous one's, one place to the
    # right. Padding the rows and reading them back one shorter makes that shift without a gather.
    scores = jnp.einsum("thv,dhv->htd", q, embedding[::-1])
    offset = first - farthest  # column of the first query's farthest key
    left = max(offset, 0)
    width = max(keys, left + scores.shape[-1] + steps) + 1
    padded = jnp.pad(scores, ((0, 0), (0, 0), (left, width - left - scores.shape[-1])))
    flat = padded.reshape(padded.shape[0], -1)[:, : steps * (width - 1)]
    shifted = flat.reshape(padded.shape[0], steps, width - 1)
    return shifted[:, :, left - offset : left - offset + keys]
