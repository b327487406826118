"""Algorithm 3, line by line: GaLiTe's attention as a recurrence over time.

Everything else in this folder computes the same numbers faster and is tested against this file.
Shapes: T time, H heads, V head width, K feature width (eta * V). The state is C (H, V, K) and
s (H, K), zero at the start (line 2).
"""

from typing import Literal

from jax import lax
from jaxtyping import Array, Bool, Float

from agalite.ops.linear import MatrixState, read
from agalite.ops.resets import reset_state

Decay = Literal["paper", "published"]
"""What is left of C at a step: (1 - beta) (x) (1 - gamma), or 1 - beta (x) gamma."""
DECAYS = ("paper", "published")


def step(
    state: MatrixState,
    q: Float[Array, "H K"],
    k: Float[Array, "H K"],
    v: Float[Array, "H V"],
    beta: Float[Array, "H V"],
    gamma: Float[Array, "H K"],
    reset: Bool[Array, ""],
    *,
    decay: Decay = "paper",
) -> tuple[MatrixState, Float[Array, "H V"]]:
    """Lines 9 to 11 for one input.

    **Arguments:**

    - `state`: C (H, V, K) and s (H, K) at t - 1.
    - `q`, `k`: (H, K).
    - `v`: (H, V).
    - `beta`, `gamma`: (H, V) and (H, K).
    - `reset`: (), true if an episode begins with this input.
    - `decay`: see `Decay`.

    **Returns:**

    The state at t, and the attention (H, V).
    """
    C, s = reset_state(state, reset)
    # Line 9: C_t = ((1 - beta_t) (x) (1 - gamma_t)) * C_{t-1} + (beta_t * v_t) (x) (gamma_t * k_t)
    if decay == "published":  # the authors' code: (1 - beta_t (x) gamma_t) * C_{t-1} instead
        C = (1 - beta[:, :, None] * gamma[:, None, :]) * C
    else:
        C = (1 - beta)[:, :, None] * (1 - gamma)[:, None, :] * C
    C = C + (beta * v)[:, :, None] * (gamma * k)[:, None, :]
    # Line 10: s_t = (1 - gamma_t) * s_{t-1} + gamma_t * k_t
    s = (1 - gamma) * s + gamma * k
    # Line 11: a_t = (C_t q_t) / (s_t . q_t)
    return MatrixState(C, s), read(C, s, q)


def attend(
    state: MatrixState,
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"],
    gamma: Float[Array, "T H K"],
    resets: Bool[Array, " T"],
    *,
    decay: Decay = "paper",
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """`step` for every input.

    **Arguments:**

    - `state`: before the first input.
    - `q`, `k`, `v`, `beta`, `gamma`, `resets`: (T, ...) of what `step` takes.
    - `decay`: see `Decay`.

    **Returns:**

    The last state and the attention (T, H, V).
    """
    inputs = (q, k, v, beta, gamma, resets)
    return lax.scan(lambda s, x: step(s, *x, decay=decay), state, inputs)
