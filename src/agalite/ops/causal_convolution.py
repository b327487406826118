"""A short causal convolution over time, each channel by itself, with its own state and resets."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agalite import validation
from agalite.ops._arguments import as_resets
from agalite.ops.matmul import broadcast_like
from agalite.ops.resets import reset_state


def causal_convolution(
    x: Float[Array, "T C"],
    weight: Float[Array, "W C"],
    resets: Bool[Array, " T"] | None = None,
    state: Float[Array, "W-1 C"] | None = None,
) -> tuple[Float[Array, "W-1 C"], Float[Array, "T C"]]:
    """y_t = sum_i weight_i * x_{t-i} over the inputs of the episode, i = 0 .. W - 1.

    **Arguments:**

    - `x`: (T, C).
    - `weight`: (W, C); the first row is the present input's.
    - `resets`: (T,) true where an episode begins.
    - `state`: (W - 1, C), the last inputs of an earlier call, oldest first; `None` is zero.

    **Returns:**

    The last W - 1 inputs, those of earlier episodes zero, and y (T, C).
    """
    validation.check_shape("x", x, ("T", "C"))
    validation.check_shape("weight", weight, ("W", x.shape[1]))
    (steps, channels), before = x.shape, weight.shape[0] - 1
    resets = as_resets(resets, steps)
    empty = jnp.zeros((before, channels), x.dtype)
    start = empty if state is None else reset_state(state, resets[0])
    validation.check_structure("state", start, empty)
    padded = jnp.concatenate([start, x])
    # What the state holds is of the present episode, or zero.
    keep = jnp.concatenate([jnp.ones(before, x.dtype), 1 - resets.astype(x.dtype)])
    ones = jnp.ones(channels, x.dtype)

    y = x * broadcast_like(weight[0], x)
    latest, seen = [x[-1:]], jnp.ones(steps, x.dtype)
    for i in range(1, before + 1):
        # Whether no episode has begun after t - i, up to t.
        seen = seen * keep[before - i + 1 : before - i + 1 + steps]
        # An outer product: broadcasting would make `vmap` move the batch in front of time.
        earlier = padded[before - i : before - i + steps] * jnp.einsum("t,c->tc", seen, ones)
        y = y + earlier * broadcast_like(weight[i], x)
        latest.append(earlier[-1:])
    return jnp.concatenate(latest[:before][::-1]) if before else empty, y
