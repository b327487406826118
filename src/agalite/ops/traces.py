"""Real-time recurrent learning for diagonal recurrences (Williams and Zipser, 1989).

The state of a diagonal recurrence obeys, element by element,

    h_t = a_t h_{t-1} + b_t

with a_t and b_t functions of a few pre-activations z_t = w . x_t + c of the input x_t. The total
derivative of h_t by such a row w is a vector of the input's width and obeys the same decay:

    S_t = a_t S_{t-1} + d_t x_t        d_t = (da_t / dz) h_{t-1} + db_t / dz

and that by c is the same with 1 for x_t. S is the *trace*. Over T steps

    S_T = (a_T ... a_1) S_0 + sum_t (a_T ... a_{t+1}) d_t x_t

is one matrix product (D, T) (T, elements). `advance` computes it; `with_past` lets a gradient that
arrives at h_0 reach the rows through S_0. The cumulative decays run backwards from the last step:
nothing is divided by a decay, and decays of zero, which resets are, need no special case.

The second part of the file is AGaLiTe's: `agalite_trace` (docs/rtrl.md has the derivation).
"""

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from agalite import kernels
from agalite.ops.agalite import native
from agalite.ops.features import Outer


class RowTrace(NamedTuple):
    """The derivative of each element of a state by one row of a projection of its own.

    *N is the shape of the state, D the width of the projection's input. D is the first axis: the
    product of `advance` is three times as fast as with the elements first (CPU, XLA).
    """

    weight: Shaped[Array, "D *N"] | None
    """By the row; None if the pre-activation does not depend on the input."""
    bias: Shaped[Array, "*N"]
    """By the constant that is added to the product."""


def empty_trace(shape: tuple[int, ...], width: int | None, dtype: Any) -> RowTrace:
    """The trace before the first input: zeros.

    **Arguments:**

    - `shape`: *N, of the state.
    - `width`: D, of the input; `None` for a parameter that is not multiplied with an input.
    - `dtype`: of the state; it may be complex.
    """
    weight = None if width is None else jnp.zeros((width, *shape), dtype)
    return RowTrace(weight, jnp.zeros(shape, dtype))


def previous_states(
    decay: Shaped[Array, "T ..."],
    write: Shaped[Array, "T *N"],
    initial: Shaped[Array, "*N"],
    resets: Bool[Array, " T"],
) -> Shaped[Array, "T *N"]:
    """h_{t-1} of every step of h_t = decay_t h_{t-1} + write_t, zero where an episode begins.

    **Arguments:**

    - `decay`: (T, ...), broadcast against `write`.
    - `write`: (T, *N).
    - `initial`: (*N,), the state before the first step.
    - `resets`: (T,), true forgets everything before t.
    """

    def step(h: Array, x: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        decay, write, reset = x
        h = jnp.where(reset, jnp.zeros_like(h), h)
        return decay * h + write, h

    if write.shape[0] == 1:
        return jnp.where(resets[0], jnp.zeros_like(initial), initial)[None]
    return lax.scan(step, initial, (decay, write, resets))[1]


def advance(
    trace: Any,
    decay: Shaped[Array, "T ..."],
    derivatives: Any,
    inputs: Float[Array, "T D"],
    resets: Bool[Array, " T"],
) -> Any:
    """The trace after a sequence, or after one step (T = 1), which is elementwise.

    Of a layer h_t = a_t h_{t-1} + b_t with N elements and P pre-activations each, every one a row
    of one projection of x_t: `decay` (T, N, 1), `derivatives` (T, N, P), and `trace` a `RowTrace`
    of (D, N, P) and (N, P). Or a dictionary of derivatives (T, N), one for each kind of row, and
    of `RowTrace`s of (D, N) and (N,).

    **Arguments:**

    - `trace`: a `RowTrace`, or a pytree of them.
    - `decay`: (T, ...) a_t, broadcast against the derivatives.
    - `derivatives`: (T, *N) dh_t / dz_t with h_{t-1} held fixed, or a pytree of such arrays, one
        for each `RowTrace`. With `previous_states`, (da_t / dz) h_{t-1} + db_t / dz.
    - `inputs`: (T, D) x_t.
    - `resets`: (T,), true where an episode begins: the trace before it is forgotten.

    **Returns:**

    The new trace. No gradient flows through it.
    """
    trace, decay, derivatives, inputs = lax.stop_gradient((trace, decay, derivatives, inputs))
    keep = resets.reshape(-1, *(1,) * (decay.ndim - 1))
    decay = jnp.where(keep, jnp.zeros_like(decay), decay)
    if decay.shape[0] == 1:
        return _map(lambda d, old: _step(old, decay[0], d[0], inputs[0]), derivatives, trace)
    total, after = _decay_to_end(decay)
    return _map(lambda d, old: _sum(old, total, after * d, inputs), derivatives, trace)


def _map(function: Callable[..., RowTrace], derivatives: Any, trace: Any) -> Any:
    """`function(derivative, its RowTrace)` for every leaf of `derivatives`."""
    return jax.tree.map(function, derivatives, trace)


def _step(old: RowTrace, decay: Array, derivative: Array, x: Array) -> RowTrace:
    weight = old.weight
    if weight is not None:
        column = x.reshape(-1, *(1,) * derivative.ndim)
        weight = decay[None] * weight + column * derivative[None]
    return RowTrace(weight, decay * old.bias + derivative)


def _sum(old: RowTrace, total: Array, decayed: Array, inputs: Array) -> RowTrace:
    weight = old.weight
    if weight is not None:
        weight = total[None] * weight + jnp.tensordot(inputs, decayed, axes=(0, 0))
    return RowTrace(weight, total * old.bias + decayed.sum(0))


def _decay_to_end(decay: Shaped[Array, "T ..."]) -> tuple[Array, Shaped[Array, "T ..."]]:
    """The product of all decays (...), and at every step that of the later ones (T, ...)."""

    def step(later: Array, a: Array) -> tuple[Array, Array]:
        return later * a, later

    return lax.scan(step, jnp.ones_like(decay[0]), decay, reverse=True)


def with_past(state: Shaped[Array, "*N"], rows: Any, trace: Any) -> Shaped[Array, "*N"]:
    """`state`; a gradient that arrives at it reaches `rows` through the trace.

    With lambda (*N,) the gradient of the state, a row of element n gets lambda_n S[:, n]. What the
    state itself depends on gets nothing: the trace stands for all of the past.

    **Arguments:**

    - `state`: (*N,).
    - `rows`: a pytree of `RowTrace`s with the weights themselves, of the trace's shapes. An array
        that several elements share is broadcast by the caller, whose gradient then sums.
    - `trace`: the trace of this state.
    """

    @jax.custom_vjp
    def past(state: Array, rows: Any, trace: Any) -> Array:
        del rows, trace
        return state

    def backward(trace: Any, gradient: Array) -> tuple[None, Any, None]:
        def contract(s: Array, row: Any) -> Array:
            d = gradient.reshape(*(1,) * (s.ndim - gradient.ndim), *gradient.shape) * s
            if jnp.issubdtype(d.dtype, jnp.complexfloating) and not jnp.issubdtype(
                row.dtype, jnp.complexfloating
            ):
                d = d.real
            return d.astype(row.dtype)

        return None, jax.tree.map(contract, trace, shapes), None

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    past.defvjp(lambda state, _, trace: (state, trace), backward)
    result: Any = past(state, rows, trace)
    return result


# --- AGaLiTe --------------------------------------------------------------------------------------

# In the order in which the custom kernels take them (`kernels/trace.h`).
KEY_ROWS = ("p1", "k", "p3", "gamma")
VALUE_ROWS = ("v", "beta")


class AGaLiTeTrace(NamedTuple):
    """The trace of one layer, by the names of its projections (`layers.FusedProjection`).

    Heads are the first axis, so that a batch of sequences is more heads for the custom kernels.
    """

    keys: dict[str, RowTrace]
    """Of k~: weights (H, D, Rk, E, W) and biases (H, Rk, E, W) of p1, k, p3 and gamma; of maps
    without parameters k and gamma; without gates p1 and k, or k."""
    values: dict[str, RowTrace]
    """Of v~: weights (H, D, R, V) and biases (H, R, V) of v and beta; without gates v."""


class Slopes(NamedTuple):
    """Derivatives of the activations of a key's factors by their pre-activations."""

    narrow: Float[Array, "T H E"] | None
    """None if the narrow factor is a constant."""
    wide: Float[Array, "T H W"]


def empty_agalite_trace(
    keys: tuple[int, ...], values: tuple[int, ...], names: Container[str], width: int, dtype: Any
) -> AGaLiTeTrace:
    """Zeros.

    **Arguments:**

    - `keys`, `values`: (H, Rk, E, W) and (H, R, V), shapes of the state.
    - `names`: of the projections that there are.
    - `width`: D.
    - `dtype`: of the state.
    """

    def zeros(shape: tuple[int, ...], rows: tuple[str, ...]) -> dict[str, RowTrace]:
        heads, *elements = shape
        one = RowTrace(jnp.zeros((heads, width, *elements), dtype), jnp.zeros(shape, dtype))
        return {name: one for name in rows if name in names}

    return AGaLiTeTrace(zeros(keys, KEY_ROWS), zeros(values, VALUE_ROWS))


def agalite_trace(
    trace: AGaLiTeTrace,
    keys: Float[Array, "H Rk E W"],
    values: Float[Array, "H R V"],
    k: Outer,
    slopes: Slopes,
    gamma: Outer | None,
    v: Float[Array, "T H V"],
    beta: Float[Array, "T H V"] | None,
    cosines: Float[Array, "T Rk"],
    inputs: Float[Array, "T D"],
    resets: Bool[Array, " T"],
    *,
    columns: Float[Array, "T H N"] | None = None,
) -> AGaLiTeTrace:
    """The trace of a layer of AGaLiTe after a sequence (Algorithm 4, lines 7 to 13).

    An element of k~ obeys h_t = (1 - g_t) h_{t-1} + c_t g_t u_t with u = p1_e k_w and
    g = p3_e gamma_w, all activated; an element of v~ the same with u = v and g = beta.

    **Arguments:**

    - `trace`: before the sequence.
    - `keys`, `values`: k~ and v~ before the sequence.
    - `k`, `gamma`, `v`, `beta`: activated; `gamma` and `beta` are sigmoids, or both `None`.
    - `slopes`: of the activations of `k`.
    - `cosines`: (T, Rk) oscillators c_t.
    - `inputs`: (T, D), what the projections multiply.
    - `resets`: (T,).
    - `columns`: the projection that `k`, `gamma`, `v` and `beta` are activations of, in the order
        of `features.join_columns`: custom kernels read it. `None`: XLA.

    **Returns:**

    The trace after the sequence. No gradient flows through it.
    """
    if columns is not None and kernels.usable(columns, inputs, keys):
        arrays = native.TraceArrays(*trace)
        arrays = native.advance_trace(arrays, columns, cosines, inputs, keys, values, resets)
        return lax.stop_gradient(AGaLiTeTrace(*arrays))

    def expand(narrow: Array, wide: Array) -> Float[Array, "T H 1 E W"]:
        return (narrow[..., :, None] * wide[..., None, :])[:, :, None]

    def run(
        old: dict[str, RowTrace],
        start: Array,
        content: Array,
        gate: Array | None,
        sides: dict[str, tuple[bool, Array]],
        cosines: Array,
    ) -> dict[str, RowTrace]:
        """content is u, gate g or None; sides: whether a row is the gate's, and dg/dz or du/dz."""
        c = cosines.reshape(*cosines.shape[:1], 1, -1, *(1,) * (start.ndim - 2))
        decay = jnp.ones_like(content) if gate is None else 1 - gate
        write, change = c * content, None
        if gate is not None:
            change = write - previous_states(decay, gate * write, start, resets)
        derivatives = {}
        for name, (of_gate, side) in sides.items():
            if of_gate and change is not None:
                derivatives[name] = change * side
            else:
                derivatives[name] = c * (side if gate is None else gate * side)

        def one_head(old: Any, decay: Array, derivatives: Any) -> Any:
            return advance(old, decay, derivatives, inputs, resets)

        return jax.vmap(one_head, in_axes=(0, 1, 1))(old, decay, derivatives)

    k_sides = {"k": (False, expand(k.narrow, slopes.wide))}
    if slopes.narrow is not None:
        k_sides["p1"] = (False, expand(slopes.narrow, k.wide))
    v_sides = {"v": (False, jnp.ones_like(v)[:, :, None])}
    key_gate = value_gate = None
    if gamma is not None and beta is not None:
        key_gate, value_gate = expand(*gamma), beta[:, :, None]
        k_sides["gamma"] = (True, expand(gamma.narrow, _sigmoid_slope(gamma.wide)))
        if slopes.narrow is not None:
            k_sides["p3"] = (True, expand(_sigmoid_slope(gamma.narrow), gamma.wide))
        v_sides["beta"] = (True, _sigmoid_slope(value_gate))
    count = values.shape[1]
    return AGaLiTeTrace(
        run(trace.keys, keys, expand(*k), key_gate, k_sides, cosines),
        run(trace.values, values, v[:, :, None], value_gate, v_sides, cosines[:, :count]),
    )


def _sigmoid_slope(y: Float[Array, "..."]) -> Float[Array, "..."]:
    return y * (1 - y)


def agalite_with_past(
    keys: Float[Array, "H Rk E W"],
    values: Float[Array, "H R V"],
    rows: dict[str, RowTrace],
    trace: AGaLiTeTrace,
) -> tuple[Float[Array, "H Rk E W"], Float[Array, "H R V"]]:
    """`keys` and `values`; gradients that arrive at them reach `rows` through the trace.

    `with_past` for AGaLiTe, whose rows each write several elements.

    **Arguments:**

    - `keys`, `values`: k~ and v~.
    - `rows`: of each projection, with width X: weight (H, D, X) and bias (H, X).
    - `trace`: of `keys` and `values`.
    """

    @jax.custom_vjp
    def past(keys: Array, values: Array, rows: Any, trace: Any) -> tuple[Array, Array]:
        del rows, trace
        return keys, values

    def forward(keys: Array, values: Array, _: Any, trace: Any) -> Any:
        return (keys, values), trace

    def backward(trace: AGaLiTeTrace, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
        keys, values = gradients
        every = {**trace.keys, **trace.values}
        biases = {
            name: jnp.sum((keys if name in KEY_ROWS else values) * x.bias, _SUMMED[name])
            for name, x in every.items()
        }
        if every.keys() == {*KEY_ROWS, *VALUE_ROWS} and kernels.usable(keys, values):
            weights = native.trace_gradient(keys, values, native.TraceArrays(*trace))
        else:
            weights = {}
            for name, x in every.items():
                arrived = (keys if name in KEY_ROWS else values)[:, None]
                axes, weight = tuple(axis + 1 for axis in _SUMMED[name]), jnp.asarray(x.weight)
                weights[name] = jnp.sum(arrived * weight, axes)
        return None, None, {n: RowTrace(weights[n], biases[n]) for n in every}, None

    past.defvjp(forward, backward)
    result: Any = past(keys, values, {n: rows[n] for n in (*trace.keys, *trace.values)}, trace)
    return result


# The axes of a state, (H, Rk, E, W) or (H, R, V), that share a row.
_SUMMED = {"p1": (1, 3), "p3": (1, 3), "k": (1, 2), "gamma": (1, 2), "v": (1,), "beta": (1,)}
