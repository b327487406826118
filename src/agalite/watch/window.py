"""The attention weights of GTrXL and the canonical transformer over an episode."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from agalite.memory.window import WindowAttention, sinusoids


def attention_weights(attention: WindowAttention, h: Float[Array, "T D"]) -> Float[Array, "H T T"]:
    """[head, t, i]: how much of what step t reads is step i, of an episode that begins at 0."""
    x = attention.norm(h)
    q = attention.query(x)
    keys = jnp.split(attention.key_value(x), 2, axis=-1)[0]
    steps, (_, size, d_model) = h.shape[0], attention.query.weight.shape
    distance = np.arange(steps)[:, None] - np.arange(steps)
    content = q
    position = jnp.zeros((q.shape[1], steps, steps), q.dtype)
    if (relative := attention.relative) is not None:
        content = q + relative.content_bias
        codes = sinusoids(np.arange(steps), d_model).astype(q.dtype)
        embeddings = jnp.einsum("md,hvd->mhv", codes, relative.weight)
        scores = jnp.einsum("thv,mhv->htm", q + relative.position_bias, embeddings)
        position = jnp.take_along_axis(scores, jnp.maximum(distance, 0)[None], axis=2)
    scores = (jnp.einsum("thv,shv->hts", content, keys) + position) * size**-0.5
    seen = (distance >= 0) & (distance <= attention.memory)
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
