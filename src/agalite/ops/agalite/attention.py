"""`agalite_attention`: Algorithm 4 with a choice of how it is computed.

method          file          what
"sequential"    reference.py  the algorithm as a loop over time
"associative"   here          the parallel scan of the paper's Appendix F
"chunked"       chunked.py    a loop over time arranged for a CPU's caches, in XLA
"auto"          native.py     on a CPU: custom kernels, or "chunked" where there are none;
                              on an accelerator: "associative"; for a single step: "sequential"
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agalite import kernels, validation
from agalite.ops._arguments import (
    Features,
    as_resets,
    both_or_neither,
    check_heads,
    choose_method,
    feature_size,
    kernel_columns,
    per_head,
)
from agalite.ops.agalite import chunked, native, reference
from agalite.ops.agalite.reference import AGaLiTeState
from agalite.ops.delta import Basis, advance_phase, make_basis, oscillators
from agalite.ops.features import Outer, as_outer, epsilon
from agalite.ops.recurrence import Method, linear_recurrence
from agalite.ops.resets import reset_state


def agalite_attention(
    q: Features,
    k: Features,
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    gamma: Features | None,
    resets: Bool[Array, " T"] | None = None,
    state: AGaLiTeState | None = None,
    *,
    r: int = 1,
    basis: str = "paper",
    key: Array | None = None,
    method: Method = "auto",
) -> tuple[AGaLiTeState, Float[Array, "T H V"]]:
    """AGaLiTe's attention over one sequence (Algorithm 4, lines 7 to 16).

    **Arguments:**

    - `q`, `k`: (T, H, K) queries and keys after the feature map, or `Outer` factors of them.
    - `v`: (T, H, V) values.
    - `beta`, `gamma`: (T, H, V) and (T, H, K) gates in [0, 1]. Both `None`: nothing decays.
    - `resets`: (T,) true where an episode begins. Nothing before such an input has any influence
        from it on.
    - `state`: where an earlier call ended; `None` is the start of an episode.
    - `r`: the approximation parameter; for the bases slots and rank1 the number of state vectors.
    - `basis`: "paper" (the equations to the letter), "published" (the authors' code), "slots" or
        "rank1". See `agalite.ops.delta`.
    - `key`: the random signs of the basis rank1, needed where `state` is `None`.
    - `method`: "auto", "sequential", "associative" or "chunked". The numbers are the same up to
        rounding.

    **Returns:**

    The state after the last input, and the outputs (T, H, V).
    """
    return attend(
        q, k, v, beta, gamma, resets, state, basis=make_basis(basis, r), key=key, method=method
    )


def attend(
    q: Features,
    k: Features,
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    gamma: Features | None,
    resets: Bool[Array, " T"] | None = None,
    state: AGaLiTeState | None = None,
    *,
    basis: Basis,
    key: Array | None = None,
    method: Method = "auto",
    columns: Float[Array, "T H N"] | None = None,
) -> tuple[AGaLiTeState, Float[Array, "T H V"]]:
    """`agalite_attention` for a ready `Basis`, as the models call it.

    columns: the projection (T, H, N) that q, k, v, beta and gamma are activations of, in the order
    of `features.join_columns`. The custom kernels read it and apply the activations themselves.
    """
    gated = both_or_neither(beta, gamma)
    check_heads(q=q, k=k, v=v, beta=beta, gamma=gamma, resets=resets)
    outer_q, outer_k = as_outer(q), as_outer(k)
    outer_gamma = as_outer(gamma) if gated and gamma is not None else None
    resets = as_resets(resets, v.shape[0])
    start = _start(basis, outer_q, v, resets, state, key)
    phases = advance_phase(start.phase, resets, basis.period)
    cosines = oscillators(basis, phases, start.signs, v.dtype)
    match choose_method(method, v, accelerator="associative"):
        case "sequential":
            wide_gamma = None if outer_gamma is None else outer_gamma.expand()
            inputs = (outer_q.expand(), outer_k.expand(), v, beta, wide_gamma, cosines, resets)
            (keys, values), out = reference.attend(basis, start, *inputs)
        case "associative":
            (keys, values), out = _associative(
                basis, start, outer_q, outer_k, v, beta, outer_gamma, cosines, resets
            )
        case _:
            keep = per_head(~resets, v).astype(v.dtype)
            cosines = per_head(cosines, v)
            readout = chunked.Readout(basis.numerator, basis.denominator, epsilon(v.dtype))
            factors = (outer_q.narrow.shape[-1], outer_q.wide.shape[-1])
            shape = start.keys.shape
            sums = chunked.Sums(start.keys.reshape(*shape[:2], *factors), start.values)
            use_kernels = method == "auto" and kernels.usable(*sums, *outer_q, v)
            if outer_gamma is not None and beta is not None and use_kernels:
                raw, activate = kernel_columns(columns, outer_q, outer_k, v, beta, outer_gamma)
                native_inputs = native.Inputs(raw, keep, cosines)
                last, out = native.attend(readout, activate, sums, native_inputs)
            else:
                inputs = chunked.Inputs(outer_q, outer_k, outer_gamma, v, beta, cosines, keep)
                last, out = chunked.attend(readout, sums, inputs)
            keys, values = last.keys.reshape(shape), last.values
    return AGaLiTeState(keys, values, phases[-1], start.signs), out


def _start(
    basis: Basis, q: Outer, v: Array, resets: Array, state: AGaLiTeState | None, key: Array | None
) -> AGaLiTeState:
    signs = key if state is None else getattr(state, "signs", None)
    empty = reference.initial_state(basis, v.shape[1], feature_size(q), v.shape[2], v.dtype, signs)
    if state is None:
        return empty
    validation.check_structure("state", state, empty)
    return reset_state(state, resets[0])._replace(signs=signs)


def _associative(
    basis: Basis,
    state: AGaLiTeState,
    q: Outer,
    k: Outer,
    v: Array,
    beta: Array | None,
    gamma: Outer | None,
    cosines: Array,
    resets: Array,
) -> tuple[tuple[Array, Array], Array]:
    """Appendix F: the whole trajectory of k~ and v~ at once by an associative scan."""
    count = basis.value_vectors
    write_k, write_v = k.expand(), v
    decay_k, decay_v = jnp.ones_like(write_k), jnp.ones_like(v)
    if gamma is not None and beta is not None:
        g = gamma.expand()
        write_k, write_v, decay_k, decay_v = g * write_k, beta * v, 1 - g, 1 - beta

    def run(decay: Array, write: Array, cosines: Array, initial: Array) -> Array:
        write = cosines[:, None, :, None] * write[:, :, None]
        decay = jnp.broadcast_to(decay[:, :, None], write.shape)
        return linear_recurrence(decay, write, initial, resets, method="associative")

    keys = run(decay_k, write_k, cosines, state.keys)
    values = run(decay_v, write_v, cosines[:, :count], state.values)
    scores = jnp.einsum("thrk,thk->thr", keys, q.expand())
    weights = scores[..., :count] * jnp.asarray(basis.numerator, v.dtype)
    bottom = scores @ jnp.asarray(basis.denominator, v.dtype) + epsilon(v.dtype)
    out = jnp.einsum("thr,thrv->thv", weights, values) / bottom[..., None]
    return (keys[-1], values[-1]), out
