"""Algorithm 4, line by line: AGaLiTe's attention as a recurrence over time.

Everything else in this folder computes the same numbers faster and is tested against this file.

Shapes: T time, H heads, V head width, K feature width (eta * V), R oscillators with a value vector,
Rk >= R oscillators with a key vector. Time is the first axis; `vmap` adds a batch.

The paper keeps r + 1 vectors k~ and v~ and a separate normaliser s. The state here is folded: equal
vectors are stored once and counted as often as they occur, and s is one of the key vectors
(`agalite.ops.delta` explains why both are exact). `make_basis(..., fold=False)` keeps the letter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from agalite.ops.delta import Basis
from agalite.ops.features import epsilon
from agalite.ops.resets import reset_state


class AGaLiTeState(NamedTuple):
    """The running sums of Algorithm 4 for one layer.

    keys (H, Rk, K) are k~ and values (H, R, V) are v~. In the paper's basis Rk = R = r // 2 + 1 and
    s is keys[:, 0]. phase () counts the inputs since the reset, modulo the basis's period. signs is
    the random key of the basis rank1 and None for all others.
    """

    keys: Float[Array, "H Rk K"]
    values: Float[Array, "H R V"]
    phase: Int[Array, ""]
    signs: UInt32[Array, " 2"] | None = None


def initial_state(
    basis: Basis, heads: int, width: int, head_size: int, dtype: jnp.dtype, key: Array | None
) -> AGaLiTeState:
    """Line 1: all sums are zero.

    **Arguments:**

    - `basis`: of `make_basis`.
    - `heads`: H.
    - `width`: K.
    - `head_size`: V.
    - `dtype`: of the sums.
    - `key`: of the random signs; needed by the basis rank1 only.

    **Returns:**

    keys (H, Rk, K), values (H, R, V), phase ().
    """
    if basis.table is None and key is None:
        raise ValueError("basis='rank1' draws random signs: pass key=jax.random.key(...)")
    return AGaLiTeState(
        jnp.zeros((heads, basis.key_vectors, width), dtype),
        jnp.zeros((heads, basis.value_vectors, head_size), dtype),
        jnp.zeros((), jnp.int32),
        None if basis.table is not None or key is None else _key_data(key),
    )


def step(
    basis: Basis,
    state: tuple[Float[Array, "H Rk K"], Float[Array, "H R V"]],
    q: Float[Array, "H K"],
    k: Float[Array, "H K"],
    v: Float[Array, "H V"],
    beta: Float[Array, "H V"] | None,
    gamma: Float[Array, "H K"] | None,
    cosines: Float[Array, " Rk"],
    reset: Bool[Array, ""],
) -> tuple[tuple[Float[Array, "H Rk K"], Float[Array, "H R V"]], Float[Array, "H V"]]:
    """Lines 7 to 16 for one input.

    **Arguments:**

    - `basis`: of `make_basis`.
    - `state`: (k~ (H, Rk, K), v~ (H, R, V)) at t - 1.
    - `q`, `k`: (H, K).
    - `v`: (H, V).
    - `beta`, `gamma`: (H, V) and (H, K), or both `None` without gating.
    - `cosines`: (Rk,) cos(omega_i t).
    - `reset`: (), true if an episode begins with this input.

    **Returns:**

    (k~, v~) at t, and the attention (H, V).
    """
    keys, values = reset_state(state, reset)
    count = basis.value_vectors
    if gamma is not None and beta is not None:
        # The decay and the gated write of lines 9, 10 and 13.
        keys, k = (1 - gamma)[:, None] * keys, gamma * k
        values, v = (1 - beta)[:, None] * values, beta * v
    # Line 9: v~_t = v~_{t-1} * (1 - beta_t) + cos(omega_i t) (beta_t * v_t)
    values = values + cosines[:count, None] * v[:, None]
    # Lines 10 and 13: the same for k~ with gamma_t and k_t; s is the sum whose cosine is always 1.
    keys = keys + cosines[:, None] * k[:, None]
    # Line 14: a = sum_i v~_t^i (k~_t^i . q_t); `numerator` counts folded vectors.
    scores = jnp.einsum("hrk,hk->hr", keys, q)
    weights = scores[:, :count] * jnp.asarray(basis.numerator, q.dtype)
    a = jnp.einsum("hr,hrv->hv", weights, values)
    # Line 15: b = 2 r (s_t . q_t); `denominator` is 2 r at s and zero elsewhere.
    b = scores @ jnp.asarray(basis.denominator, q.dtype) + epsilon(q.dtype)
    # Line 16: a_t = a / b
    return (keys, values), a / b[:, None]


def attend(
    basis: Basis,
    state: AGaLiTeState,
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    gamma: Float[Array, "T H K"] | None,
    cosines: Float[Array, "T Rk"],
    resets: Bool[Array, " T"],
) -> tuple[tuple[Float[Array, "H Rk K"], Float[Array, "H R V"]], Float[Array, "T H V"]]:
    """`step` for every input.

    **Arguments:**

    - `basis`: of `make_basis`.
    - `state`: before the first input.
    - `q`, `k`, `v`, `beta`, `gamma`, `cosines`, `resets`: (T, ...) of what `step` takes.

    **Returns:**

    The last (k~, v~) and the attention (T, H, V).
    """
    return lax.scan(
        lambda carry, x: step(basis, carry, *x),
        (state.keys, state.values),
        (q, k, v, beta, gamma, cosines, resets),
    )


def _key_data(key: Array) -> UInt32[Array, " 2"]:
    """Raw numbers instead of a typed key: a state is plain arrays, easy to store and to export."""
    typed = jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if typed else jnp.asarray(key)
