"""What a memory does with its inputs, layer by layer: how much it writes, how much it keeps.

Nothing of the models is changed: their gates are computed again from the same weights and inputs,
and the tests hold them to the models' own states.
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
from agalite.memory.gated import FeatureAttention, MatrixAttention
from agalite.memory.gru import GRU
from agalite.memory.lstm import LSTM
from agalite.memory.window import WindowAttention, sinusoids
from agalite.ops.activations import relu, sigmoid
from agalite.ops.features import as_outer

_QUARTERS = ("fastest quarter", "second quarter", "third quarter", "slowest quarter")


class Row(NamedTuple):
    """One head, or one part of the units of a recurrent network."""

    name: str
    past: Float[np.ndarray, "T T"]
    """past[t, i], for i <= t: what is left at step t of what was written at step i; or, of an
    attention over a window, how much step t reads of step i."""
    written: Float[np.ndarray, " T"] | None = None
    """0 to 1, mean over the units; None where there are no gates."""
    kept: Float[np.ndarray, " T"] | None = None
    horizon: tuple[float, float, float] | None = None
    """Steps for which units keep what they hold, on average in this episode: the 10th, 50th and
    90th hundredth of the units."""


class Layer(NamedTuple):
    name: str
    reads: bool
    """Whether `past` is what is read (an attention) rather than what is left (gates)."""
    rows: list[Row]


class Gate(NamedTuple):
    """Of T steps and U units: state <- kept * state + written * input."""

    written: Float[Array, "T U"] | Float[np.ndarray, "T U"]
    kept: Float[Array, "T U"] | Float[np.ndarray, "T U"]


def look(memory: Memory, xs: Float[Array, "T input"]) -> list[Layer]:
    """What the memory did with an episode, from its first input to its T-th."""
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
    """What each layer's attention is given, an episode beginning with the first input."""
    seen: list[Array] = []

    def tapped(model: Any) -> list[Attention]:
        return [block.attention for block in model.blocks]

    taps = [_Tap(x, seen.append) for x in tapped(memory)]
    resets = jnp.zeros(xs.shape[0], bool).at[0].set(True)
    eqx.tree_at(tapped, memory, taps).scan(memory.initial_state(), xs, resets)
    return seen


class _Tap(Attention):
    """An attention that tells what it is given, and is otherwise as it was."""

    inner: Attention
    tell: Callable[[Array], None] = eqx.field(static=True)

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def __call__(
        self, state: Any, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]:
        self.tell(h)
        return self.inner(state, h, resets)


# --- the families ---------------------------------------------------------------------------------


def gates(attention: FeatureAttention, h: Float[Array, "T D"]) -> tuple[Array, Array] | None:
    """beta (T, H, V) and gamma (T, H, K) of GaLiTe and AGaLiTe; None where there are none."""
    projected = attention.project(attention.norm(h))
    if projected.beta is None or projected.gamma is None:
        return None
    return projected.beta, as_outer(projected.gamma).expand()


def _heads(attention: Attention, h: Float[Array, "T D"]) -> list[Row]:
    if isinstance(attention, WindowAttention):
        weights = np.asarray(eqx.filter_jit(attention_weights)(attention, h))
        return [Row(f"head {i + 1}", weights[i]) for i in range(len(weights))]
    if not isinstance(attention, FeatureAttention):
        return []
    found = eqx.filter_jit(gates)(attention, h)
    if found is None:  # nothing is ever forgotten, and there is nothing to see
        return []
    beta, gamma = (np.asarray(x) for x in found)
    rows = []
    for i in range(beta.shape[1]):
        values, keys = (Gate(x[:, i], 1 - x[:, i]) for x in (beta, gamma))
        if isinstance(attention, MatrixAttention):
            rows.append(_matrix(f"head {i + 1}", values, keys))
        elif isinstance(attention, AGaLiTeAttention):
            rows += [_row(f"head {i + 1} values", values), _row(f"head {i + 1} keys", keys)]
    return rows


def unit_gates(memory: GRU | LSTM, xs: Float[Array, "T input"]) -> Gate:
    _, hidden = memory.scan(memory.initial_state(), xs)
    before = jnp.concatenate([jnp.zeros_like(hidden[:1]), hidden[:-1]])
    inputs = memory.from_input(relu(memory.embedding(xs)))
    parts = inputs + memory.from_hidden(before)
    if isinstance(memory, GRU):
        _, z, _ = jnp.split(parts, 3, axis=-1)
        return Gate(1 - sigmoid(z), sigmoid(z))
    i, f, _, _ = jnp.split(parts, 4, axis=-1)
    return Gate(sigmoid(i), sigmoid(f))


# --- gates into rows ------------------------------------------------------------------------------


def survival(gate: Gate) -> Float[np.ndarray, "T T"]:
    """[t, i]: the part of what was written at step i that is still there at step t."""
    written, kept = (np.asarray(x) for x in gate)
    alive = np.array(written, np.float64)
    whole = np.maximum(alive.sum(axis=1), np.finfo(np.float64).tiny)
    found = np.zeros((len(written), len(written)))
    for t in range(len(written)):
        alive[:t] *= kept[t]
        found[t, : t + 1] = alive[: t + 1].sum(axis=1) / whole[: t + 1]
    return found


def _row(name: str, gate: Gate) -> Row:
    written, kept = (np.asarray(x).mean(axis=1) for x in gate)
    return Row(name, survival(gate), written, kept, _horizon(np.asarray(gate.kept).mean(axis=0)))


def _matrix(name: str, values: Gate, keys: Gate) -> Row:
    """A matrix whose gates are outer products: so are their means, and what survives."""
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


def _quarters(gate: Gate) -> list[Row]:
    """A mean over units that forget at once and units that never do shows neither."""
    order = np.argsort(np.asarray(gate.kept).mean(axis=0), kind="stable")
    return [
        _row(name, Gate(gate.written[:, units], gate.kept[:, units]))
        for name, units in zip(_QUARTERS, np.array_split(order, len(_QUARTERS)), strict=True)
        if len(units)
    ]


def _horizon(kept: Float[np.ndarray, " U"]) -> tuple[float, float, float]:
    """A unit that keeps the part k of itself at each step holds an input for 1 / (1 - k) steps."""
    steps = 1 / np.maximum(1 - kept.astype(np.float64), 1e-6)
    low, middle, high = np.percentile(steps, [10, 50, 90])
    return float(low), float(middle), float(high)


# --- The attention weights of GTrXL and the canonical transformer over an episode -----------------


def attention_weights(attention: WindowAttention, h: Float[Array, "T D"]) -> Float[Array, "H T T"]:
    """[head, t, i]: how much of what step t reads is step i, of an episode that begins at 0."""
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
    seen = (distance >= 0) & (distance <= attention.memory)
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
