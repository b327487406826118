"""What the operators carry from one call to the next, and how a reset empties it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from agalite.ops.delta import Basis


class MatrixState(NamedTuple):
    """C (H, V, K) and s (H, K) of Algorithms 2 and 3."""

    C: Float[Array, "H V K"]
    s: Float[Array, "H K"]


class AGaLiTeState(NamedTuple):
    """The running sums of Algorithm 4, folded (see `ops.delta`).

    keys (H, Rk, K) are k~, values (H, R, V) are v~; in the paper's basis Rk = R = r//2 + 1 and s is
    keys[:, 0]. phase () int32 is the number of inputs since the reset, modulo the basis's period.
    signs is rank1's random key, None otherwise.
    """

    keys: Float[Array, "H Rk K"]
    values: Float[Array, "H R V"]
    phase: Int[Array, ""]
    signs: UInt32[Array, " 2"] | None = None


def copies(state: Any, count: int) -> Any:
    """(...) -> (count, ...), every leaf: the same state for each of a batch."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), state)


def matrix_state(heads: int, width: int, head_size: int, dtype: jnp.dtype) -> MatrixState:
    return MatrixState(
        jnp.zeros((heads, head_size, width), dtype), jnp.zeros((heads, width), dtype)
    )


def agalite_state(
    basis: Basis, heads: int, width: int, head_size: int, dtype: jnp.dtype, key: Array | None
) -> AGaLiTeState:
    if basis.table is None and key is None:
        raise ValueError("basis='rank1' draws random signs: pass key=jax.random.key(...)")
    return AGaLiTeState(
        jnp.zeros((heads, basis.key_vectors, width), dtype),
        jnp.zeros((heads, basis.value_vectors, head_size), dtype),
        jnp.zeros((), jnp.int32),
        None if basis.table is not None or key is None else _key_data(key),
    )


def _key_data(key: Array) -> UInt32[Array, " 2"]:
    """Raw numbers rather than a typed key: a state is plain arrays, easy to store and to export."""
    typed = jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if typed else jnp.asarray(key)


def forget(state: Any, reset: Bool[Array, ""]) -> Any:
    """A select, not a product, so that not even an infinite state survives."""
    return jax.tree.map(lambda x: jnp.where(reset, jnp.zeros_like(x), x), state)


def episode_starts(resets: Bool[Array, " T"]) -> Int[Array, " T"]:
    """(T,) index of the first input of the episode that each input is in; 0 before any reset."""
    index = jnp.arange(resets.shape[0], dtype=jnp.int32)
    return lax.cummax(jnp.where(resets, index, 0))
