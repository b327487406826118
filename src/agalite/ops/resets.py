"""What a reset does to a state, and where episodes begin in a sequence."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def reset_state(state: Any, reset: Bool[Array, ""]) -> Any:
    """Every leaf of `state` zeroed where `reset` is true.

    A select and not a product, so that infinite or NaN states are forgotten too.
    """
    return jax.tree.map(lambda x: jnp.where(reset, jnp.zeros_like(x), x), state)


def episode_starts(resets: Bool[Array, " T"]) -> Int[Array, " T"]:
    """(T,) index of the first input of the episode that each input is in; 0 before any reset."""
    index = jnp.arange(resets.shape[0], dtype=jnp.int32)
    return lax.cummax(jnp.where(resets, index, 0))


def broadcast_state(state: Any, count: int) -> Any:
    """Every leaf (...) becomes (count, ...): the same state for each element of a batch."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), state)
