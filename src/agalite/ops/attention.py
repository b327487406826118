"""The paper's four self-attentions, and Transformer-XL's, as pure functions of one sequence.

Shapes: T time, H heads, V head width, K feature width (eta * V), R state vectors, M memory length.
Time comes first; `vmap` adds a batch. `resets[t]` true means that an episode begins with input t.
Each returns (state, out (T, H, V)); `state=None` is a fresh start, and the returned state continues
the stream. The functions named `_*_step` are the paper's algorithms line by line, and are what
`method="sequential"` runs; "associative" is the parallel scan of Appendix F; "chunked" is the same
mathematics reordered for speed (`agalite_chunked.py`, `galite_chunked.py`). "auto" picks by machine.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from agalite import errors
from agalite.ops import agalite_chunked, galite_chunked
from agalite.ops.delta import Basis, advance_phase, make_basis, oscillators
from agalite.ops.features import Outer, as_outer
from agalite.ops.recurrence import METHODS, Method, linear_recurrence, on_accelerator
from agalite.ops.window import window_attention

# Algorithms 2-4 divide by s . q, which relu features can make zero. The published code adds the
# same constant.
EPSILON = 1e-5

Features = Float[Array, "T H K"] | Outer


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
    _check_heads(q=q, k=k, v=v, resets=resets)
    errors.shape("k", k, q.shape)
    steps = q.shape[0]
    if window is not None:
        errors.integer("window", window, minimum=0)
    return window_attention(
        q, k, v, episode_starts(_no_resets(resets, steps)),
        window=steps - 1 if window is None else window,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip


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
    _check_heads(q=q, k=k, v=v, relative=relative, starts=starts)
    errors.shape("v", v, k.shape)
    if k.shape[0] < q.shape[0]:
        raise ValueError(f"k has {k.shape[0]} steps, fewer than the {q.shape[0]} of q")
    return window_attention(
        q + content_bias, k, v, starts,
        window=relative.shape[0] - 1,
        scale=q.shape[-1] ** -0.5,
        relative=(q + position_bias, relative),
    )  # fmt: skip


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
    q, k, resets, state = _prepare_matrix(q, k, v, None, None, resets, state)
    match _choose(method, q):
        case "sequential":
            return _sequential(_linear_step, state, (q.expand(), k.expand(), v, resets))
        case "associative":
            C, s = _matrix_trajectory(k.expand(), v, None, None, resets, state)
            return _read_matrix(C, s, q.expand())
        case _:
            start = galite_chunked.Matrix(*state)
            final, out = galite_chunked.attend_ungated(start, q, k, v, resets, epsilon=EPSILON)
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
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """Algorithm 3. beta and gamma both None switch the gates off: nothing is ever forgotten."""
    if _ungated(beta, gamma):
        return linear_attention(q, k, v, resets, state, method=method)
    q, k, resets, state = _prepare_matrix(q, k, v, beta, gamma, resets, state)
    gamma = as_outer(gamma)
    match _choose(method, q):
        case "sequential":
            inputs = (q.expand(), k.expand(), v, beta, gamma.expand(), resets)
            return _sequential(_galite_step, state, inputs)
        case "associative":
            C, s = _matrix_trajectory(k.expand(), v, beta, gamma.expand(), resets, state)
            return _read_matrix(C, s, q.expand())
        case _:
            keep = _per_head(~resets, v).astype(v.dtype)
            inputs = galite_chunked.Inputs(q, k, gamma, v, beta, keep)
            final, out = galite_chunked.attend(EPSILON, galite_chunked.Matrix(*state), inputs)
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
) -> tuple[AGaLiTeState, Float[Array, "T H V"]]:
    """Algorithm 4. beta and gamma both None switch the gates off.

    basis: "paper" (to the letter), "published", "slots" or "rank1" (needs `key` at a fresh start);
    for the last two r is the number of state vectors. fold=False keeps the duplicates and the
    separate s of the paper's equations, for comparison only.
    """
    b = make_basis(basis, r, fold=fold)
    gated = not _ungated(beta, gamma)
    _check_heads(q=q, k=k, v=v, beta=beta, gamma=gamma, resets=resets)
    q, k, gamma = as_outer(q), as_outer(k), as_outer(gamma) if gated else None
    resets = _no_resets(resets, v.shape[0])
    width = q.narrow.shape[-1] * q.wide.shape[-1]
    if state is None:
        state = agalite_state(b, v.shape[1], width, v.shape[2], v.dtype, key)
    errors.same_structure("state", state, jax.eval_shape(
        lambda: agalite_state(b, v.shape[1], width, v.shape[2], v.dtype, state.signs)
    ))  # fmt: skip
    phases = advance_phase(state.phase, resets, b.period)
    osc = oscillators(b, phases, state.signs, v.dtype)
    match _choose(method, q):
        case "sequential":
            expanded = (q.expand(), k.expand(), v, beta, gamma.expand() if gamma else None)
            inputs = (*expanded, osc, resets)
            sums, out = _sequential(_agalite_step(b), (state.keys, state.values), inputs)
        case "associative":
            sums, out = _agalite_associative(b, state, q, k, v, beta, gamma, osc, resets)
        case _:
            inputs = agalite_chunked.Inputs(
                q, k, gamma, v, beta, _per_head(osc, v), _per_head(~resets, v).astype(v.dtype)
            )
            reading = agalite_chunked.Reading(b.numerator, b.denominator, EPSILON)
            factors = (q.narrow.shape[-1], q.wide.shape[-1])
            start = agalite_chunked.Sums(
                state.keys.reshape(*state.keys.shape[:2], *factors), state.values
            )
            last, out = agalite_chunked.attend(reading, start, inputs)
            sums = (last.keys.reshape(state.keys.shape), last.values)
    return AGaLiTeState(*sums, phases[-1], state.signs), out


# --- the algorithms, one step -------------------------------------------------------------------


def _linear_step(state: MatrixState, x: tuple[Array, ...]) -> tuple[MatrixState, Array]:
    q, k, v, reset = x
    C, s = _forget(state, reset)
    C = C + v[:, :, None] * k[:, None, :]  # line 4: C_t = C_{t-1} + v_t (x) k_t
    s = s + k  # line 5: s_t = s_{t-1} + k_t
    return MatrixState(C, s), _divide(C, s, q)  # line 6: a_t = C_t q_t / (s_t . q_t)


def _galite_step(state: MatrixState, x: tuple[Array, ...]) -> tuple[MatrixState, Array]:
    q, k, v, beta, gamma, reset = x
    C, s = _forget(state, reset)
    # line 9: C_t = ((1 - beta) (x) (1 - gamma)) * C_{t-1} + (beta * v) (x) (gamma * k)
    C = (1 - beta)[:, :, None] * (1 - gamma)[:, None, :] * C
    C = C + (beta * v)[:, :, None] * (gamma * k)[:, None, :]
    s = (1 - gamma) * s + gamma * k  # line 10
    return MatrixState(C, s), _divide(C, s, q)  # line 11


def _divide(C: Array, s: Array, q: Array) -> Float[Array, "H V"]:
    return jnp.einsum("hvk,hk->hv", C, q) / (jnp.einsum("hk,hk->h", s, q) + EPSILON)[:, None]


def _agalite_step(basis: Basis):
    top, bottom = basis.numerator, basis.denominator

    def step(state: tuple[Array, Array], x: tuple[Array, ...]):
        q, k, v, beta, gamma, osc, reset = x
        keys, values = _forget(state, reset)
        if gamma is not None:
            keys, k = (1 - gamma)[:, None] * keys, gamma * k
            values, v = (1 - beta)[:, None] * values, beta * v
        # lines 7-12, all oscillators at once; s_t (line 13) is among the keys
        values = values + osc[: len(top), None] * v[:, None]
        keys = keys + osc[:, None] * k[:, None]
        scores = jnp.einsum("hrk,hk->hr", keys, q)
        # line 14: a = sum_i v~_i (k~_i . q), duplicates counted
        a = jnp.einsum("hr,hrv->hv", scores[:, : len(top)] * jnp.asarray(top, q.dtype), values)
        b = scores @ jnp.asarray(bottom, q.dtype) + EPSILON  # line 15: b = 2 r (s . q)
        return (keys, values), a / b[:, None]  # line 16

    return step


def _agalite_associative(
    basis: Basis, state: AGaLiTeState, q: Outer, k: Outer, v: Array, beta: Array | None,
    gamma: Outer | None, osc: Array, resets: Array,
):  # fmt: skip
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
    bottom = scores @ jnp.asarray(basis.denominator, v.dtype) + EPSILON
    out = jnp.einsum("thr,thrv->thv", weights, values) / bottom[..., None]
    return (keys[-1], values[-1]), out


# --- states -------------------------------------------------------------------------------------


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
        None if basis.table is not None else _key_data(key),
    )


def _key_data(key: Array | None) -> Array:
    """Raw numbers rather than a typed key: a state is plain arrays, easy to store and to export."""
    typed = jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if typed else jnp.asarray(key)


def _forget(state, reset: Array):
    """A select, not a product, so that not even an infinite state survives a reset."""
    return jax.tree.map(lambda x: jnp.where(reset, jnp.zeros_like(x), x), state)


def episode_starts(resets: Bool[Array, " T"]) -> Int[Array, " T"]:
    """(T,) index of the first input of the episode that each input is in; 0 before any reset."""
    index = jnp.arange(resets.shape[0], dtype=jnp.int32)
    return lax.cummax(jnp.where(resets, index, 0))


# --- plumbing -----------------------------------------------------------------------------------


def _sequential(step, state, inputs):
    return lax.scan(step, state, inputs)


def _matrix_trajectory(k, v, beta, gamma, resets, state: MatrixState) -> tuple[Array, Array]:
    """C (T, H, V, K) and s (T, H, K) at every step: what the other methods avoid."""
    decay_k, decay_v = jnp.ones_like(k), jnp.ones_like(v)
    if gamma is not None:
        k, v, decay_k, decay_v = gamma * k, beta * v, 1 - gamma, 1 - beta

    def outer(a: Array, b: Array) -> Array:
        return a[..., :, None] * b[..., None, :]

    C = linear_recurrence(
        outer(decay_v, decay_k), outer(v, k), state.C, resets, method="associative"
    )
    return C, linear_recurrence(decay_k, k, state.s, resets, method="associative")


def _read_matrix(C: Array, s: Array, q: Array) -> tuple[MatrixState, Array]:
    return MatrixState(C[-1], s[-1]), jax.vmap(_divide)(C, s, q)


def _choose(method: Method, q: Outer) -> Method:
    errors.one_of("method", method, METHODS)
    if method != "auto":
        return method
    if q.wide.shape[0] == 1:
        return "sequential"  # a single step: there is nothing to arrange
    return "associative" if on_accelerator() else "chunked"


def _per_head(x: Array, like: Array) -> Array:
    return jnp.broadcast_to(x[:, None], (x.shape[0], like.shape[1], *x.shape[1:]))


def _no_resets(resets: Array | None, steps: int) -> Bool[Array, " T"]:
    return jnp.zeros(steps, bool) if resets is None else jnp.asarray(resets).astype(bool)


def _ungated(beta, gamma) -> bool:
    if (beta is None) != (gamma is None):
        missing = "beta" if beta is None else "gamma"
        raise ValueError(f"{missing}=None but the other gate is given; pass both or neither")
    return beta is None


def _prepare_matrix(q, k, v, beta, gamma, resets, state):
    _check_heads(q=q, k=k, v=v, beta=beta, gamma=gamma, resets=resets)
    q, k = as_outer(q), as_outer(k)
    width = q.narrow.shape[-1] * q.wide.shape[-1]
    heads, head_size = v.shape[1:]
    if state is None:
        state = matrix_state(heads, width, head_size, v.dtype)
    errors.same_structure(
        "state", state, jax.eval_shape(lambda: matrix_state(heads, width, head_size, v.dtype))
    )
    return q, k, _no_resets(resets, v.shape[0]), state


def _check_heads(**arrays) -> None:
    """Shapes agree with v (T, H, V) and, for k and gamma, with the features of q."""
    v = arrays["v"]
    errors.shape("v", v, ("T", "H", "V"))
    errors.nonempty("v", v)
    q = arrays["q"]
    steps = (q.wide if isinstance(q, Outer) else q).shape[0]
    heads, head_size = v.shape[1:]
    features = {
        name: x for name, x in arrays.items() if name in ("q", "k", "gamma") and x is not None
    }
    for name, x in features.items():
        time = steps if name == "q" else v.shape[0]
        same = q if name != "q" else x
        if isinstance(x, Outer) != isinstance(same, Outer):
            raise ValueError(f"{name} and q must both be arrays (T, H, K) or both be Outer")
        if isinstance(x, Outer):
            errors.shape(f"{name}.narrow", x.narrow, (time, heads, same.narrow.shape[-1]))
            errors.shape(f"{name}.wide", x.wide, (time, heads, same.wide.shape[-1]))
        else:
            errors.shape(name, x, (time, heads, same.shape[-1]))
    if arrays.get("beta") is not None:
        errors.shape("beta", arrays["beta"], (v.shape[0], heads, head_size))
    if arrays.get("relative") is not None:
        errors.shape("relative", arrays["relative"], ("M+1", heads, head_size))
    for name in ("resets", "starts"):
        if arrays.get(name) is not None:
            errors.shape(name, arrays[name], (steps,))
    for name, x in arrays.items():
        for leaf in jax.tree.leaves(x):
            errors.finite(name, leaf)
