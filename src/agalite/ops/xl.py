"""Transformer-XL's attention with relative positions (Dai et al., 2019), as GTrXL uses it."""

from jaxtyping import Array, Float, Int

from agalite import validation
from agalite.ops._arguments import check_heads
from agalite.ops.softmax import window_attention


def xl_attention(
    q: Float[Array, "T H V"],
    k: Float[Array, "S H V"],
    v: Float[Array, "S H V"],
    relative: Float[Array, "M+1 H V"],
    content_bias: Float[Array, "H V"],
    position_bias: Float[Array, "H V"],
    starts: Int[Array, " T"],
) -> Float[Array, "T H V"]:
    """Softmax attention over a true sliding window of the last M inputs and the query's own.

    The score of query t and key j is ((q_t + content_bias) . k_j + (q_t + position_bias) .
    relative[t - j]) / sqrt(V).

    **Arguments:**

    - `q`: (T, H, V) queries.
    - `k`, `v`: (S, H, V) keys and values of the S - T inputs before the sequence, then of its T.
    - `relative`: (M + 1, H, V) embeddings of the distances 0 to M.
    - `content_bias`, `position_bias`: (H, V).
    - `starts`: (T,) the first key that each query may read.

    **Returns:**

    (T, H, V).
    """
    check_heads(
        q=q,
        k=k,
        v=v,
        relative=relative,
        starts=starts,
        content_bias=content_bias,
        position_bias=position_bias,
    )
    validation.check_nonempty("q", q)
    validation.check_shape("v", v, k.shape)
    if k.shape[0] < q.shape[0]:
        raise ValueError(f"k has {k.shape[0]} steps, fewer than the {q.shape[0]} of q")
    return window_attention(
        q + content_bias,
        k,
        v,
        starts,
        window=relative.shape[0] - 1,
        scale=q.shape[-1] ** -0.5,
        relative=(q + position_bias, relative),
    )
