"""`galite_attention`: Algorithm 3 with a choice of how it is computed.

method          file             what
"sequential"    reference.py     the algorithm as a loop over time
"associative"   here             the parallel scan of Appendix F: holds a matrix per time step
"chunked"       chunked.py       matrix products over chunks of time, in XLA
                published.py     the same for decay "published": a loop that keeps few states
"auto"          native.py        on a CPU: custom kernels, or "chunked" where there are none, or the
                                 decay is "published"; on an accelerator: "chunked"; for a single
                                 step: "sequential"
"""

from jaxtyping import Array, Bool, Float

from agalite import kernels, validation
from agalite.ops._arguments import (
    Features,
    both_or_neither,
    check_heads,
    choose_method,
    kernel_columns,
    per_head,
)
from agalite.ops.features import as_outer, epsilon
from agalite.ops.galite import chunked, native, published, reference
from agalite.ops.galite.reference import DECAYS, Decay
from agalite.ops.linear import MatrixState, associative, linear_attention, start_state
from agalite.ops.recurrence import Method


def galite_attention(
    q: Features,
    k: Features,
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    gamma: Features | None,
    resets: Bool[Array, " T"] | None = None,
    state: MatrixState | None = None,
    *,
    decay: Decay = "paper",
    method: Method = "auto",
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """GaLiTe's attention over one sequence (Algorithm 3, lines 9 to 11).

    **Arguments:**

    - `q`, `k`: (T, H, K) queries and keys after the feature map, or `Outer` factors of them.
    - `v`: (T, H, V) values.
    - `beta`, `gamma`: (T, H, V) and (T, H, K) gates in [0, 1]. Both `None`: nothing decays, which
        is `linear_attention`.
    - `resets`: (T,) true where an episode begins.
    - `state`: where an earlier call ended; `None` is the start of an episode.
    - `decay`: what is left of C at a step: "paper", (1 - beta) (x) (1 - gamma), or "published",
        1 - beta (x) gamma, which the authors' code has. s keeps 1 - gamma in both. "published" has
        no custom kernels: sequences are a loop over time.
    - `method`: "auto", "sequential", "associative" or "chunked". The numbers are the same up to
        rounding.

    **Returns:**

    The state after the last input, and the outputs (T, H, V).
    """
    return attend(q, k, v, beta, gamma, resets, state, decay=decay, method=method)


def attend(
    q: Features,
    k: Features,
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    gamma: Features | None,
    resets: Bool[Array, " T"] | None = None,
    state: MatrixState | None = None,
    *,
    decay: Decay = "paper",
    method: Method = "auto",
    columns: Float[Array, "T H N"] | None = None,
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """`galite_attention` as the models call it.

    columns: the projection (T, H, N) that q, k, v, beta and gamma are activations of, in the order
    of `features.join_columns`. The custom kernels read it and apply the activations themselves.
    """
    validation.check_one_of("decay", decay, DECAYS)
    if not both_or_neither(beta, gamma):
        return linear_attention(q, k, v, resets, state, method=method)
    assert beta is not None
    assert gamma is not None
    check_heads(q=q, k=k, v=v, beta=beta, gamma=gamma, resets=resets)
    outer_q, outer_k, outer_gamma = as_outer(q), as_outer(k), as_outer(gamma)
    resets, start = start_state(outer_q, v, resets, state)
    match choose_method(method, v, accelerator="chunked"):
        case "sequential":
            wide = (outer_q.expand(), outer_k.expand(), v, beta, outer_gamma.expand())
            return reference.attend(start, *wide, resets, decay=decay)
        case "associative":
            wide = (outer_q.expand(), outer_k.expand(), v, beta, outer_gamma.expand())
            return associative(start, *wide, resets, separable=decay == "paper")
        case _ if decay == "published":
            return published.attend(start, outer_q, outer_k, v, beta, outer_gamma, resets)
        case _:
            keep = per_head(~resets, v).astype(v.dtype)
            if method == "auto" and kernels.usable(*start, *outer_q, v):
                raw, activate = kernel_columns(columns, outer_q, outer_k, v, beta, outer_gamma)
                narrow = outer_q.narrow.shape[-1]
                inputs = native.Inputs(raw, keep)
                return native.attend(epsilon(v.dtype), narrow, activate, start, inputs)
            inputs = chunked.Inputs(outer_q, outer_k, outer_gamma, v, beta, keep)
            return chunked.attend(epsilon(v.dtype), start, inputs)
