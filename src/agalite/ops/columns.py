"""Columns: what a layer's projection gives every head, laid out as our kernels read it.

columns (T, H, N), N = 3 W + 2 V + 3 E: q (W), k (W), v (V), beta (V), gamma (W), and the narrow
factors of k, q and gamma (E each); q, k and gamma stand for outer products of width K = E * W
(`features.Outer`). A model's projection computes them side by side, in this order, before they go
through relu and sigmoid; the kernels activate them as they read, and nothing is written twice.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite.ops.features import Outer


def columns_of(
    q: Outer, k: Outer, v: Float[Array, "T H V"], beta: Float[Array, "T H V"], gamma: Outer
) -> Float[Array, "T H N"]:
    """Of what has been activated already."""
    parts = (q.wide, k.wide, v, beta, gamma.wide, k.narrow, q.narrow, gamma.narrow)
    return jnp.concatenate(parts, axis=-1)


def columns_shape(q: Outer, v: Array) -> tuple[int, ...]:
    """(T, H, N) of the projection that gave q and v."""
    width = 3 * q.wide.shape[-1] + 2 * v.shape[-1] + 3 * q.narrow.shape[-1]
    return (*v.shape[:2], width)
