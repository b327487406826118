"""Gates and attention weights of a memory over an episode, layer by layer.

The models do not record them: they are computed again from the same weights and inputs, and the
tests compare them with the models' states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from agalite.memory import Memory
from agalite.memory.agalite import AGaLiTeAttention
from agalite.memory.block import Attention, Stack
from agalite.memory.deltanet import DeltaNetAttention
from agalite.memory.diagonal import DiagonalMixer
from agalite.memory.ffm import FFMAttention
from agalite.memory.galite import GaLiTeAttention
from agalite.memory.gru import GRU
from agalite.memory.linear import LinearAttention
from agalite.memory.lstm import LSTM
from agalite.memory.mamba2 import Mamba2Attention
from agalite.memory.mlstm import MLSTMAttention
from agalite.memory.transformer import WindowAttention, sinusoids
from agalite.ops.activations import sigmoid
from agalite.ops.features import as_outer
from agalite.ops.mlstm import NOTHING
from agalite.ops.recurrence import Complex

_COLUMNS = 8  # of a matrix's values at a time: all V * K elements of all steps are much memory
_QUARTERS = ("fastest quarter", "second quarter", "third quarter", "slowest quarter")


class Row(NamedTuple):
    """One head, or a quarter of the units of a recurrent network or layer."""

    name: str
    past: Float[np.ndarray, "T T"]
    """[t, i] for i <= t. With gates: the fraction of what was written at step i that is left at
    step t. With attention: the weight of step i at step t."""
    written: Float[np.ndarray, " T"] | None = None
    """The mean over units of the fraction of the input that is written; None without gates."""
    kept: Float[np.ndarray, " T"] | None = None
    """The mean over units of the fraction of the state that is kept; None without gates."""
    horizon: tuple[float, float, float] | None = None
    """Steps for which units keep an input, averaged over the episode: the 10th, 50th and 90th
    percentile of the units."""


class Layer(NamedTuple):
    """The rows of one layer of a memory."""

    name: str
    reads: bool
    """Whether `past` holds attention weights rather than what gates leave."""
    rows: list[Row]


class Gate(NamedTuple):
    """The gates of U units over T steps: state <- kept * state + written * input."""

    written: Float[Array, "T U"] | Float[np.ndarray, "T U"]
    kept: Float[Array, "T U"] | Float[np.ndarray, "T U"]


def inspect_memory(memory: Memory, xs: Float[Array, "T input"]) -> list[Layer]:
    """The gates or attention weights of a memory over an episode.

    **Arguments:**

    - `memory`: the model.
    - `xs`: its inputs (T, input) from the first of the episode.

    **Returns:**

    One entry per layer; none for models without gates and attention weights.
    """
    match memory:
        case GRU() | LSTM():
            found: Gate = eqx.filter_jit(unit_gates)(memory, xs)
            return [Layer("units", False, _quarters(Gate(*(np.asarray(x) for x in found))))]
        case Stack():
            inputs = eqx.filter_jit(attention_inputs)(memory, xs)
            return [
                Layer(f"layer {i + 1}", isinstance(block.attention, WindowAttention), rows)
                for i, (block, h) in enumerate(zip(memory.blocks, inputs, strict=True))
                if (rows := _heads(block.attention, h))
            ]
    return []


def attention_inputs(memory: Stack, xs: Float[Array, "T input"]) -> list[Float[Array, "T D"]]:
    """The inputs of each layer's attention in an episode that begins with the first input."""
    inputs: list[Array] = []

    def attentions(model: Any) -> list[Attention]:
        return [block.attention for block in model.blocks]

    recorders = [_Recorder(x, inputs.append) for x in attentions(memory)]
    resets = jnp.zeros(xs.shape[0], bool).at[0].set(True)
    eqx.tree_at(attentions, memory, recorders).scan(memory.initial_state(), xs, resets)
    return inputs


class _Recorder(Attention):
    """An attention that passes its input to a function."""

    inner: Attention
    record: Callable[[Array], None] = eqx.field(static=True)

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def __call__(
        self, state: Any, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]:
        self.record(h)
        return self.inner(state, h, resets)


FeatureAttention = AGaLiTeAttention | GaLiTeAttention | LinearAttention


def gates(attention: FeatureAttention, h: Float[Array, "T D"]) -> tuple[Array, Array] | None:
    """beta (T, H, V) and gamma (T, H, K) of GaLiTe or AGaLiTe; None without gating."""
    projected = attention.projections(attention.project(attention.norm(h)))
    if projected.beta is None or projected.gamma is None:
        return None
    return projected.beta, as_outer(projected.gamma).expand()


HeadAttention = MLSTMAttention | DeltaNetAttention | Mamba2Attention


def head_gates(attention: HeadAttention, h: Float[Array, "T D"]) -> Gate:
    """The one gate of every head, (T, H), in an episode that begins with the first input.

    What the delta rule erases under a key is not counted: only alpha, which decays everything.
    """
    match attention:
        case MLSTMAttention():
            _, _, _, i, log_f, _ = attention.inputs(h)

            def stabilise(m: Array, x: tuple[Array, Array]) -> tuple[Array, Gate]:
                i, log_f = x
                new = jnp.maximum(log_f + m, i)
                return new, Gate(jnp.exp(i - new), jnp.exp(log_f + m - new))

            return jax.lax.scan(stabilise, jnp.full_like(i[0], NOTHING), (i, log_f))[1]
        case DeltaNetAttention():
            _, _, beta, log_alpha = attention.columns(h)
            return Gate(beta, jnp.exp(log_alpha))
        case _:
            _, _, dt = attention.columns(h)
            return Gate(dt, jnp.exp(attention.decay(dt)))


def trace_gates(attention: FFMAttention, h: Float[Array, "T D"]) -> Gate:
    """The input gate and the constant decay of every trace of FFM, (T, M)."""
    _, gate, _, _ = attention.columns(h)
    return Gate(gate, jnp.broadcast_to(jnp.exp(-jnp.abs(attention.alpha)), gate.shape))


def _heads(attention: Attention, h: Float[Array, "T D"]) -> list[Row]:
    if isinstance(attention, HeadAttention):
        found = eqx.filter_jit(head_gates)(attention, h)
        written, kept = (np.asarray(x) for x in found)
        return [
            _row(f"head {i + 1}", Gate(written[:, i : i + 1], kept[:, i : i + 1]))
            for i in range(written.shape[1])
        ]
    if isinstance(attention, FFMAttention):
        found = eqx.filter_jit(trace_gates)(attention, h)
        return _quarters(Gate(*(np.asarray(x) for x in found)))
    if isinstance(attention, WindowAttention):
        weights = np.asarray(eqx.filter_jit(attention_weights)(attention, h))
        return [Row(f"head {i + 1}", weights[i]) for i in range(len(weights))]
    if isinstance(attention, DiagonalMixer):
        found: Gate = eqx.filter_jit(element_gates)(attention, h)
        return _quarters(Gate(*(np.asarray(x) for x in found)))
    if not isinstance(attention, FeatureAttention):
        return []
    gated = eqx.filter_jit(gates)(attention, h)
    if gated is None:
        return []
    beta, gamma = (np.asarray(x) for x in gated)
    rows = []
    for i in range(beta.shape[1]):
        values, keys = (Gate(x[:, i], 1 - x[:, i]) for x in (beta, gamma))
        if isinstance(attention, GaLiTeAttention):
            matrix = _matrix if attention.config.decay == "paper" else _published_matrix
            rows.append(matrix(f"head {i + 1}", values, keys))
        elif isinstance(attention, AGaLiTeAttention):
            rows += [_row(f"head {i + 1} values", values), _row(f"head {i + 1} keys", keys)]
    return rows


def unit_gates(memory: GRU | LSTM, xs: Float[Array, "T input"]) -> Gate:
    """The gates of all units of a GRU or LSTM."""
    _, hidden = memory.scan(memory.initial_state(), xs)
    before = jnp.concatenate([jnp.zeros_like(hidden[:1]), hidden[:-1]])
    parts = memory.input_part(xs) + memory.from_hidden(before)
    if isinstance(memory, GRU):
        _, z, _ = jnp.split(parts, 3, axis=-1)
        return Gate(1 - sigmoid(z), sigmoid(z))
    i, f, _, _ = jnp.split(parts, 4, axis=-1)
    return Gate(sigmoid(i), sigmoid(f))


def element_gates(mixer: DiagonalMixer, h: Float[Array, "T D"]) -> Gate:
    """What each element of a diagonal recurrence writes and keeps; of complex ones the absolute
    value. What the nonlinear RTU's activation removes besides is not in it."""
    x = mixer.norm(h)
    kept, _ = mixer.recurrence(x)
    if isinstance(kept, Complex):
        kept = jnp.hypot(kept.real, kept.imag)
    return Gate(mixer.written(x), kept)


def survival(gate: Gate) -> Float[np.ndarray, "T T"]:
    """[t, i]: the fraction of what was written at step i that is left at step t."""
    left = _left(*(np.asarray(x, np.float64) for x in gate))
    return left / np.maximum(np.diag(left), np.finfo(np.float64).tiny)


def _left(written: np.ndarray, kept: np.ndarray) -> Float[np.ndarray, "T T"]:
    """[t, i]: what is left at step t of what was written at step i, summed over units.

    What the first half wrote passes the middle: decayed to it, times the decay since. So all pairs
    of the halves are one matrix product, and nothing is divided.
    """
    steps = len(written)
    out = np.zeros((steps, steps))
    if steps == 1:
        out[0, 0] = written.sum()
        return out
    m = steps // 2
    to_middle, since = np.ones_like(kept[:m]), kept[m:].copy()
    for i in range(m - 2, -1, -1):  # faster than np.cumprod along the first axis
        np.multiply(to_middle[i + 1], kept[i + 1], out=to_middle[i])
    for t in range(1, len(since)):
        since[t] *= since[t - 1]
    out[m:, :m] = since @ (written[:m] * to_middle).T
    out[:m, :m] = _left(written[:m], kept[:m])
    out[m:, m:] = _left(written[m:], kept[m:])
    return out


def _row(name: str, gate: Gate) -> Row:
    written, kept = (np.asarray(x).mean(axis=1) for x in gate)
    return Row(name, survival(gate), written, kept, _horizon(np.asarray(gate.kept).mean(axis=0)))


def _matrix(name: str, values: Gate, keys: Gate) -> Row:
    """The row of a matrix state. Its gates are outer products, so the means factorise."""
    a, b = _row("", values), _row("", keys)
    assert a.written is not None
    assert b.written is not None
    kept = np.outer(np.asarray(values.kept).mean(axis=0), np.asarray(keys.kept).mean(axis=0))
    return Row(
        name,
        a.past * b.past,
        a.written * b.written,
        (1 - a.written) * (1 - b.written),
        _horizon(kept.ravel()),
    )


def _published_matrix(name: str, values: Gate, keys: Gate) -> Row:
    """The row of a matrix state that keeps 1 - beta (x) gamma, which does not factorise."""
    beta, gamma = (np.asarray(x.written, np.float64) for x in (values, keys))
    steps, columns = beta.shape
    left = np.zeros((steps, steps))
    for some in np.array_split(beta, -(-columns // _COLUMNS), axis=1):
        written = (some[:, :, None] * gamma[:, None, :]).reshape(steps, -1)
        left += _left(written, 1 - written)
    written = beta.mean(axis=1) * gamma.mean(axis=1)
    return Row(
        name,
        left / np.maximum(np.diag(left), np.finfo(np.float64).tiny),
        written,
        1 - written,
        _horizon((1 - beta.T @ gamma / steps).ravel()),
    )


def _quarters(gate: Gate) -> list[Row]:
    """Rows of a quarter of the units each, since units that forget quickly and units that keep
    their state would cancel out in one mean."""
    order = np.argsort(np.asarray(gate.kept).mean(axis=0), kind="stable")
    return [
        _row(name, Gate(gate.written[:, units], gate.kept[:, units]))
        for name, units in zip(_QUARTERS, np.array_split(order, len(_QUARTERS)), strict=True)
        if len(units)
    ]


def _horizon(kept: Float[np.ndarray, " U"]) -> tuple[float, float, float]:
    """Percentiles of 1 / (1 - k) steps, the time constant of a unit that keeps the fraction k."""
    steps = 1 / np.maximum(1 - kept.astype(np.float64), 1e-6)
    low, median, high = np.percentile(steps, [10, 50, 90])
    return float(low), float(median), float(high)


def attention_weights(attention: WindowAttention, h: Float[Array, "T D"]) -> Float[Array, "H T T"]:
    """[head, t, i]: the softmax weight of step i at step t, in an episode that begins at step 0.

    `attention` is of GTrXL or the canonical transformer, `h` (T, D) the layer's inputs.
    """
    x = attention.norm(h)
    q = attention.query(x)
    keys = jnp.split(attention.key_value(x), 2, axis=-1)[0]
    steps, (_, size, d_model) = h.shape[0], attention.query.weight.shape
    distance = np.arange(steps)[:, None] - np.arange(steps)
    content = q
    position = jnp.zeros((q.shape[1], steps, steps), q.dtype)
    if (relative := attention.relative) is not None:
        content = q + relative.content_bias
        codes = sinusoids(np.arange(steps), d_model).astype(q.dtype)
        embeddings = jnp.einsum("md,hvd->mhv", codes, relative.weight)
        scores = jnp.einsum("thv,mhv->htm", q + relative.position_bias, embeddings)
        position = jnp.take_along_axis(scores, jnp.maximum(distance, 0)[None], axis=2)
    scores = (jnp.einsum("thv,shv->hts", content, keys) + position) * size**-0.5
    visible = (distance >= 0) & (distance <= attention.memory)
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
