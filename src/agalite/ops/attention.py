"""The paper's four self-attentions, and Transformer-XL's, as pure functions of one sequence.

Shapes: T time, H heads, V head width, K feature width (eta * V), R state vectors, M memory length.
Time comes first; `vmap` adds a batch. `resets[t]` true means that an episode begins with input t.
Each returns (state, out (T, H, V)); `state=None` is a fresh start, and the returned state continues
the stream. The functions named `_*_step` are the paper's algorithms line by line, and are what
`method="sequential"` runs; "associative" is the parallel scan of Appendix F; "chunked" is the same
mathematics reordered for speed (`agalite_chunked.py`, `galite_chunked.py`). "auto" chooses; on a
CPU our own kernels (`agalite_native.py`, `galite_native.py`), or "chunked" where there are none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from agalite import kernels, validation
from agalite.ops._arguments import bool_resets, both_or_neither, check_heads
from agalite.ops.agalite import chunked as agalite_chunked
from agalite.ops.agalite import native as agalite_native
from agalite.ops.columns import columns_of, columns_shape
from agalite.ops.delta import Basis, advance_phase, make_basis, oscillators
from agalite.ops.features import Outer, as_outer
from agalite.ops.galite import chunked as galite_chunked
from agalite.ops.galite import native as galite_native
from agalite.ops.recurrence import METHODS, Method, linear_recurrence, on_accelerator
from agalite.ops.state import (
    AGaLiTeState,
    MatrixState,
    agalite_state,
    episode_starts,
    forget,
    matrix_state,
)
from agalite.ops.window import window_attention

# Algorithms 2-4 divide by s . q, which relu features can make zero. The published code adds the
# same constant.
EPSILON = 1e-5

Features = Float[Array, "T H K"] | Outer


def softmax_attention(
    q: Float[Array, "T H V"],
    k: Float[Array, "T H V"],
    v: Float[Array, "T H V"],
    resets: Bool[Array, " T"] | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "T H V"]:
    """Algorithm 1, causal: softmax(Q K^T * scale) V over the inputs since the last reset.

    window: how many inputs before its own a query may read (None: all). scale: 1 / sqrt(V) if None.
    (Algorithm 1 writes sqrt(d); the attention that GTrXL uses, and ours, divides by the head's.)
    """
    check_heads(q=q, k=k, v=v, resets=resets)
    validation.check_shape("k", k, q.shape)
    steps = q.shape[0]
    if window is not None:
        validation.integer("window", window, minimum=0)
    return window_attention(
        q,
        k,
        v,
        episode_starts(bool_resets(resets, steps)),
        window=steps - 1 if window is None else window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )


def xl_attention(
    q: Float[Array, "T H V"],
    k: Float[Array, "S H V"],
    v: Float[Array, "S H V"],
    relative: Float[Array, "M+1 H V"],
    content_bias: Float[Array, "H V"],
    position_bias: Float[Array, "H V"],
    starts: Int[Array, " T"],
) -> Float[Array, "T H V"]:
    """Transformer-XL attention (Dai et al., 2019) with a true sliding window of M inputs.

    k, v: keys and values of the S - T inputs before the sequence and of its own T. relative:
    embeddings of the distances 0 .. M. starts: (T,) the first key each query may read. The score of
    query t and key j is ((q_t + content_bias) . k_j + (q_t + position_bias) . relative[t - j]),
    divided by sqrt(V).
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
    validation.nonempty("q", q)
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


def linear_attention(
    q: Features,
    k: Features,
    v: Float[Array, "T H V"],
    resets: Bool[Array, " T"] | None = None,
    state: MatrixState | None = None,
    *,
    method: Method = "auto",
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """Algorithm 2; q and k have been through the feature map already."""
    check_heads(q=q, k=k, v=v, resets=resets)
    outer_q, outer_k = as_outer(q), as_outer(k)
    resets, start = _matrix_start(outer_q, v, resets, state)
    match _choose(method, v):
        case "sequential":
            return lax.scan(_linear_step, start, (outer_q.expand(), outer_k.expand(), v, resets))
        case "associative":
            C, s = _matrix_trajectory(outer_k.expand(), v, None, None, resets, start)
            return _read_matrix(C, s, outer_q.expand())
        case _:
            final, out = galite_chunked.attend_ungated(
                galite_chunked.Matrix(*start),
                outer_q,
                outer_k,
                v,
                resets,
                epsilon=_epsilon(v.dtype),
            )
            return MatrixState(*final), out


def galite_attention(
    q: Features,
    k: Features,
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    gamma: Features | None,
    resets: Bool[Array, " T"] | None = None,
    state: MatrixState | None = None,
    *,
    method: Method = "auto",
    columns: Float[Array, "T H N"] | None = None,
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """Algorithm 3. beta and gamma both None switch the gates off: nothing is ever forgotten.

    columns: see `agalite_attention`.
    """
    if not both_or_neither(beta, gamma):
        return linear_attention(q, k, v, resets, state, method=method)
    assert beta is not None
    assert gamma is not None
    check_heads(q=q, k=k, v=v, beta=beta, gamma=gamma, resets=resets)
    outer_q, outer_k, outer_gamma = as_outer(q), as_outer(k), as_outer(gamma)
    resets, start = _matrix_start(outer_q, v, resets, state)
    match _choose(method, v):
        case "sequential":
            wide = (outer_q.expand(), outer_k.expand(), v, beta, outer_gamma.expand())
            return lax.scan(_galite_step, start, (*wide, resets))
        case "associative":
            wide = (outer_k.expand(), v, beta, outer_gamma.expand())
            C, s = _matrix_trajectory(*wide, resets, start)
            return _read_matrix(C, s, outer_q.expand())
        case _:
            keep = _per_head(~resets, v).astype(v.dtype)
            matrix = galite_chunked.Matrix(*start)
            if _kernels(method, matrix, outer_q, v):
                raw, activate = _columns(columns, outer_q, outer_k, v, beta, outer_gamma)
                narrow = outer_q.narrow.shape[-1]
                inputs = galite_native.Inputs(raw, keep)
                final, out = galite_native.attend(
                    _epsilon(v.dtype), narrow, activate, matrix, inputs
                )
            else:
                inputs = galite_chunked.Inputs(outer_q, outer_k, outer_gamma, v, beta, keep)
                final, out = galite_chunked.attend(_epsilon(v.dtype), matrix, inputs)
            return MatrixState(*final), out


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
    fold: bool = True,
    method: Method = "auto",
    columns: Float[Array, "T H N"] | None = None,
) -> tuple[AGaLiTeState, Float[Array, "T H V"]]:
    """Algorithm 4. beta and gamma both None switch the gates off.

    basis: "paper" (to the letter), "published", "slots" or "rank1" (needs `key` at a fresh start);
    for the last two r is the number of state vectors. fold=False keeps the duplicates and the
    separate s of the paper's equations, for comparison only. columns: what q, k, v, beta and gamma
    are the activations of, if they come from one projection (`projected.py`): kernels start there.
    """
    b = make_basis(basis, r, fold=fold)
    gated = both_or_neither(beta, gamma)
    check_heads(q=q, k=k, v=v, beta=beta, gamma=gamma, resets=resets)
    outer_q, outer_k = as_outer(q), as_outer(k)
    outer_gamma = as_outer(gamma) if gated and gamma is not None else None
    resets = bool_resets(resets, v.shape[0])
    start = _agalite_start(b, outer_q, v, resets, state, key)
    phases = advance_phase(start.phase, resets, b.period)
    osc = oscillators(b, phases, start.signs, v.dtype)
    match _choose(method, v):
        case "sequential":
            wide_gamma = None if outer_gamma is None else outer_gamma.expand()
            inputs = (outer_q.expand(), outer_k.expand(), v, beta, wide_gamma, osc, resets)
            (keys, values), out = lax.scan(_agalite_step(b), (start.keys, start.values), inputs)
        case "associative":
            (keys, values), out = _agalite_associative(
                b, start, outer_q, outer_k, v, beta, outer_gamma, osc, resets
            )
        case _:
            keep = _per_head(~resets, v).astype(v.dtype)
            reading = agalite_chunked.Reading(b.numerator, b.denominator, _epsilon(v.dtype))
            factors = (outer_q.narrow.shape[-1], outer_q.wide.shape[-1])
            shape = start.keys.shape
            sums = agalite_chunked.Sums(start.keys.reshape(*shape[:2], *factors), start.values)
            osc = _per_head(osc, v)
            if outer_gamma is not None and beta is not None and _kernels(method, sums, outer_q, v):
                raw, activate = _columns(columns, outer_q, outer_k, v, beta, outer_gamma)
                inputs = agalite_native.Inputs(raw, keep, osc)
                last, out = agalite_native.attend(reading, activate, sums, inputs)
            else:
                inputs = agalite_chunked.Inputs(outer_q, outer_k, outer_gamma, v, beta, osc, keep)
                last, out = agalite_chunked.attend(reading, sums, inputs)
            keys, values = last.keys.reshape(shape), last.values
    return AGaLiTeState(keys, values, phases[-1], start.signs), out


# --- the algorithms, one step -------------------------------------------------------------------


def _linear_step(state: MatrixState, x: tuple[Array, ...]) -> tuple[MatrixState, Array]:
    q, k, v, reset = x
    C, s = forget(state, reset)
    C = C + v[:, :, None] * k[:, None, :]  # line 4: C_t = C_{t-1} + v_t (x) k_t
    s = s + k  # line 5: s_t = s_{t-1} + k_t
    return MatrixState(C, s), _divide(C, s, q)  # line 6: a_t = C_t q_t / (s_t . q_t)


def _galite_step(state: MatrixState, x: tuple[Array, ...]) -> tuple[MatrixState, Array]:
    q, k, v, beta, gamma, reset = x
    C, s = forget(state, reset)
    # line 9: C_t = ((1 - beta) (x) (1 - gamma)) * C_{t-1} + (beta * v) (x) (gamma * k)
    C = (1 - beta)[:, :, None] * (1 - gamma)[:, None, :] * C
    C = C + (beta * v)[:, :, None] * (gamma * k)[:, None, :]
    s = (1 - gamma) * s + gamma * k  # line 10
    return MatrixState(C, s), _divide(C, s, q)  # line 11


def _divide(C: Array, s: Array, q: Array) -> Float[Array, "H V"]:
    bottom = jnp.einsum("hk,hk->h", s, q) + _epsilon(q.dtype)
    return jnp.einsum("hvk,hk->hv", C, q) / bottom[:, None]


def _epsilon(dtype: jnp.dtype) -> float:
    """EPSILON, or in float16, to which that is nothing, the smallest number it can divide by."""
    return max(EPSILON, float(jnp.finfo(dtype).tiny))


def _agalite_step(basis: Basis) -> Callable[..., tuple[tuple[Array, Array], Array]]:
    top, bottom = basis.numerator, basis.denominator

    def step(state: tuple[Array, Array], x: tuple[Array, ...]):
        q, k, v, beta, gamma, osc, reset = x
        keys, values = forget(state, reset)
        if gamma is not None:
            keys, k = (1 - gamma)[:, None] * keys, gamma * k
            values, v = (1 - beta)[:, None] * values, beta * v
        # lines 7-12, all oscillators at once; s_t (line 13) is among the keys
        values = values + osc[: len(top), None] * v[:, None]
        keys = keys + osc[:, None] * k[:, None]
        scores = jnp.einsum("hrk,hk->hr", keys, q)
        # line 14: a = sum_i v~_i (k~_i . q), duplicates counted
        a = jnp.einsum("hr,hrv->hv", scores[:, : len(top)] * jnp.asarray(top, q.dtype), values)
        b = scores @ jnp.asarray(bottom, q.dtype) + _epsilon(q.dtype)  # line 15: b = 2 r (s . q)
        return (keys, values), a / b[:, None]  # line 16

    return step


def _agalite_associative(
    basis: Basis,
    state: AGaLiTeState,
    q: Outer,
    k: Outer,
    v: Array,
    beta: Array | None,
    gamma: Outer | None,
    osc: Array,
    resets: Array,
) -> tuple[tuple[Array, Array], Array]:
    """Appendix F: the whole trajectory at once by an associative scan."""
    count = basis.value_vectors
    write_k, write_v = k.expand(), v
    decay_k, decay_v = jnp.ones_like(write_k), jnp.ones_like(v)
    if gamma is not None and beta is not None:
        g = gamma.expand()
        write_k, write_v, decay_k, decay_v = g * write_k, beta * v, 1 - g, 1 - beta

    def run(decay: Array, write: Array, osc: Array, initial: Array) -> Array:
        write = osc[:, None, :, None] * write[:, :, None]
        decay = jnp.broadcast_to(decay[:, :, None], write.shape)
        return linear_recurrence(decay, write, initial, resets, method="associative")

    keys = run(decay_k, write_k, osc, state.keys)
    values = run(decay_v, write_v, osc[:, :count], state.values)
    scores = jnp.einsum("thrk,thk->thr", keys, q.expand())
    weights = scores[..., :count] * jnp.asarray(basis.numerator, v.dtype)
    bottom = scores @ jnp.asarray(basis.denominator, v.dtype) + _epsilon(v.dtype)
    out = jnp.einsum("thr,thrv->thv", weights, values) / bottom[..., None]
    return (keys[-1], values[-1]), out


# --- plumbing -----------------------------------------------------------------------------------


def _matrix_trajectory(
    k: Array, v: Array, beta: Array | None, gamma: Array | None, resets: Array, state: MatrixState
) -> tuple[Array, Array]:
    """C (T, H, V, K) and s (T, H, K) at every step: what the other methods avoid."""
    decay_k, decay_v = jnp.ones_like(k), jnp.ones_like(v)
    if gamma is not None and beta is not None:
        k, v, decay_k, decay_v = gamma * k, beta * v, 1 - gamma, 1 - beta

    def outer(a: Array, b: Array) -> Array:
        return a[..., :, None] * b[..., None, :]

    C = linear_recurrence(
        outer(decay_v, decay_k), outer(v, k), state.C, resets, method="associative"
    )
    return C, linear_recurrence(decay_k, k, state.s, resets, method="associative")


def _read_matrix(C: Array, s: Array, q: Array) -> tuple[MatrixState, Array]:
    return MatrixState(C[-1], s[-1]), jax.vmap(_divide)(C, s, q)


def _choose(method: Method, v: Array) -> Method:
    validation.one_of("method", method, METHODS)
    if method != "auto":
        return method
    if v.shape[0] == 1:
        return "sequential"  # a single step: there is nothing to arrange
    return "associative" if on_accelerator() else "chunked"


def _kernels(method: Method, state: Any, q: Outer, v: Array) -> bool:
    """Whether "auto" means our own kernels, which compute what "chunked" does."""
    return method == "auto" and kernels.usable(*state, *q, v)


def _columns(
    columns: Array | None, q: Outer, k: Outer, v: Array, beta: Array, gamma: Outer
) -> tuple[Array, bool]:
    """Columns for the kernels, and whether they are still to be activated."""
    if columns is None:
        return columns_of(q, k, v, beta, gamma), False
    if columns.shape != columns_shape(q, v):
        raise ValueError(
            f"columns of shape {columns.shape} are not what q and v come from: that is "
            f"(T, H, 3 W + 2 V + 3 E) = {columns_shape(q, v)}"
        )
    return columns, True


def _per_head(x: Array, like: Array) -> Array:
    return jnp.broadcast_to(x[:, None], (x.shape[0], like.shape[1], *x.shape[1:]))


def _width(q: Outer) -> int:
    return q.narrow.shape[-1] * q.wide.shape[-1]


def _matrix_start(
    q: Outer, v: Array, resets: Array | None, state: MatrixState | None
) -> tuple[Bool[Array, " T"], MatrixState]:
    resets = bool_resets(resets, v.shape[0])
    empty = matrix_state(v.shape[1], _width(q), v.shape[2], v.dtype)
    if state is None:
        return resets, empty
    validation.same_structure("state", state, empty)
    return resets, forget(state, resets[0])


def _agalite_start(
    basis: Basis, q: Outer, v: Array, resets: Array, state: AGaLiTeState | None, key: Array | None
) -> AGaLiTeState:
    signs = key if state is None else getattr(state, "signs", None)
    empty = agalite_state(basis, v.shape[1], _width(q), v.shape[2], v.dtype, signs)
    if state is None:
        return empty
    validation.same_structure("state", state, empty)
    return forget(state, resets[0])._replace(signs=signs)
