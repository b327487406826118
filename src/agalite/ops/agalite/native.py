"""AGaLiTe's attention (Algorithm 4) by custom kernels: `kernels/agalite.h` and `kernels/stack.h`.

`attend` is one layer over a sequence, with the scheme of `chunked.py`: sums are kept at the start
of each chunk, and the gradient rebuilds a chunk's trajectory from there. It needs gates.

`step_layers` is one step of all layers of a model in a single kernel. A step is a chain of small
products, and starting what lies between them takes XLA longer than computing it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from agalite import kernels
from agalite.ops._batching import batched_as_lanes
from agalite.ops.agalite.chunked import Readout, Sums
from agalite.ops.delta import Basis, advance_phase, oscillators
from agalite.ops.features import EPSILON

# Steps and lanes whose trajectories are rebuilt together: they fit the L2 cache.
_CHUNK = 8
_GROUP = 16


class Inputs(NamedTuple):
    columns: Float[Array, "T H N"]  # the layout of features.join_columns
    keep: Float[Array, "T H"]
    cosines: Float[Array, "T H Rk"]


def attend(
    readout: Readout, activate: bool, start: Sums, inputs: Inputs
) -> tuple[Sums, Float[Array, "T H V"]]:
    """The last sums and the outputs (T, H, V).

    activate: apply relu and sigmoid to the columns; false if they are activated already.
    """
    result: Any = _attend(readout, activate, start, inputs)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(readout: Readout, activate: bool, start: Sums, inputs: Inputs) -> tuple[Sums, Array]:
    last, out, *_ = _forward(readout, activate, False, start, inputs)
    return last, out


def _attend_fwd(readout: Readout, activate: bool, start: Sums, inputs: Inputs):
    last, out, scores, boundaries = _forward(readout, activate, True, start, inputs)
    return (last, out), (inputs, boundaries, scores)


def _attend_bwd(
    readout: Readout,
    activate: bool,
    saved: tuple[Inputs, Sums, Array],
    cotangents: tuple[Sums, Array],
) -> tuple[Sums, Inputs]:
    def backward(inputs: Inputs, boundaries: Sums, scores: Array, dlast: Sums, dout: Array):
        shapes = [inputs.columns.shape, *(x.shape for x in dlast)]
        dcolumns, *dstart = _call(
            "agalite_backward", shapes, readout, activate, inputs, boundaries, scores, *dlast, dout
        )
        return Sums(*dstart), Inputs(
            dcolumns, jnp.zeros_like(inputs.keep), jnp.zeros_like(inputs.cosines)
        )

    backward = batched_as_lanes(backward, (1, 1, 1, 0, 1), (0, 1))
    return backward(*saved, *cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(readout: Readout, activate: bool, keep_boundaries: bool, start: Sums, inputs: Inputs):
    """The last sums, outputs, scores, and if asked for the sums at the start of each chunk."""

    def forward(start: Sums, inputs: Inputs):
        steps = inputs.keep.shape[0]
        out = (*inputs.keep.shape, start.values.shape[-1])
        shapes = [*(x.shape for x in start), out, inputs.cosines.shape]
        if keep_boundaries:
            shapes += [(-(-steps // _CHUNK), *x.shape) for x in start]
        keys, values, out, scores, *boundaries = _call(
            "agalite_forward", shapes, readout, activate, inputs, start
        )
        return Sums(keys, values), out, scores, Sums(*boundaries) if boundaries else None

    axes = (0, 1, 1, 1 if keep_boundaries else None)
    return batched_as_lanes(forward, (0, 1), axes)(start, inputs)


def _call(
    name: str,
    shapes: list[Any],
    readout: Readout,
    activate: bool,
    x: Inputs,
    sums: Sums,
    *more: Array,
) -> list[Array]:
    constants = (jnp.asarray(c, x.keep.dtype) for c in (readout.numerator, readout.denominator))
    return kernels.call(
        name,
        shapes,
        *x,
        *constants,
        *sums,
        *more,
        narrow=sums.keys.shape[-2],
        activate=activate,
        epsilon=readout.epsilon,
        chunk=_CHUNK,
        group=max(1, min(_GROUP, x.keep.shape[1] // kernels.threads())),
    )


class TraceArrays(NamedTuple):
    """Pairs (weight, bias) by name, as in `ops.traces.AGaLiTeTrace`."""

    keys: dict[str, Any]
    values: dict[str, Any]

    def flat(self) -> tuple[list[Array], list[Array]]:
        """Weights and biases in the kernels' order."""
        pairs = [self.keys[name] for name in _KEY_ROWS] + [self.values[n] for n in _VALUE_ROWS]
        weights, biases = zip(*pairs, strict=True)
        return list(weights), list(biases)


_KEY_ROWS, _VALUE_ROWS = ("p1", "k", "p3", "gamma"), ("v", "beta")


def advance_trace(
    trace: TraceArrays,
    columns: Float[Array, "T H N"],
    cosines: Float[Array, "T Rk"],
    inputs: Float[Array, "T D"],
    keys: Float[Array, "H Rk E W"],
    values: Float[Array, "H R V"],
    resets: Bool[Array, " T"],
) -> TraceArrays:
    """`ops.traces.agalite_trace` by a custom kernel; `columns` are not activated yet."""
    heads = columns.shape[1]
    keep = jnp.broadcast_to((~resets).astype(columns.dtype)[:, None], columns.shape[:2])
    cosines = jnp.broadcast_to(cosines[:, None], (cosines.shape[0], heads, cosines.shape[1]))
    weights, biases = trace.flat()

    def advance(streams: Any, state: Any) -> Any:
        columns, keep, cosines, inputs = streams
        keys, values, weights, biases = state
        arrays = [*weights, *biases]
        # Where every step advances the trace, copying it would cost more than that.
        in_place = {6 + i: i for i in range(len(arrays))} if columns.shape[0] == 1 else {}
        new = kernels.call(
            "agalite_trace",
            [x.shape for x in arrays],
            *(columns, keep, cosines, inputs, keys, values),
            *arrays,
            in_place=in_place,
            narrow=keys.shape[2],
            activate=True,
        )
        return new[: len(weights)], new[len(weights) :]

    streams = lax.stop_gradient((columns, keep, cosines, inputs[:, None]))
    state = lax.stop_gradient((keys, values, weights, biases))
    weights, biases = batched_as_lanes(advance, (1, 0), (0, 0))(streams, state)
    pairs = [
        type(x)(*new)
        for x, new in zip(_pairs(trace), zip(weights, biases, strict=True), strict=True)
    ]
    named = dict(zip((*_KEY_ROWS, *_VALUE_ROWS), pairs, strict=True))
    return TraceArrays({n: named[n] for n in _KEY_ROWS}, {n: named[n] for n in _VALUE_ROWS})


def _pairs(trace: TraceArrays) -> list[Any]:
    return [*(trace.keys[n] for n in _KEY_ROWS), *(trace.values[n] for n in _VALUE_ROWS)]


def trace_gradient(
    keys: Float[Array, "H Rk E W"], values: Float[Array, "H R V"], trace: TraceArrays
) -> dict[str, Float[Array, "H D X"]]:
    """The gradient of the rows of each projection, from those of keys and values."""

    def contract(keys: Array, values: Array, weights: list[Array]) -> list[Array]:
        lanes, _, narrow, wide = keys.shape
        widths = (narrow, wide, narrow, wide, values.shape[2], values.shape[2])
        shapes = [(lanes, weights[0].shape[1], width) for width in widths]
        return kernels.call("agalite_trace_gradient", shapes, keys, values, *weights)

    rows = batched_as_lanes(contract, (0, 0, 0), 0)(keys, values, trace.flat()[0])
    return dict(zip((*_KEY_ROWS, *_VALUE_ROWS), rows, strict=True))


def step_layers(
    weights: Float[Array, " N"],
    basis: Basis,
    keys: Float[Array, "L H Rk K"],
    values: Float[Array, "L H R V"],
    phase: Int[Array, ""],
    signs: UInt32[Array, " 2"] | None,
    h: Float[Array, "1 D"],
    resets: Bool[Array, " 1"],
    *,
    eta: int,
    ffn_size: int,
) -> tuple[Float[Array, "L H Rk K"], Float[Array, "L H R V"], Int[Array, ""], Float[Array, "1 D"]]:
    """One step of all L layers: keys, values, phase and h after it.

    weights: every weight of every layer, in the order in which the kernel reads them
    (`agalite.memory.agalite.PackedBlocks`).
    """
    phases = advance_phase(phase, resets, basis.period)
    cosines = oscillators(basis, phases, signs, h.dtype)
    readout = [jnp.asarray(c, h.dtype) for c in (basis.numerator, basis.denominator)]
    streams = (h, keys[None], values[None], cosines, (~resets).astype(h.dtype))
    h, keys, values = _stack_kernel(eta, ffn_size)((weights, *readout), streams)
    return keys[0], values[0], phases[0], h


def _stack_kernel(eta: int, ffn_size: int) -> Any:
    """The kernel. Under `vmap` it takes more streams, or runs once for each set of weights."""

    @custom_batching.custom_vmap
    def call(weights: Any, streams: Any) -> tuple[Array, ...]:
        h, keys, values, cosines, keep = streams
        packed, *readout = weights
        new = kernels.call(
            "stack",
            [h.shape, keys.shape, values.shape],
            h,
            packed,
            keys,
            values,
            cosines,
            keep,
            *readout,
            narrow=eta,
            hidden=ffn_size,
            epsilon=EPSILON,
        )
        return tuple(new)

    @call.def_vmap
    def rule(size: int, batched: Any, weights: Any, streams: Any) -> tuple[Any, Any]:
        def broadcast(is_batched: bool, x: Array) -> Array:
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        streams = jax.tree.map(broadcast, batched[1], streams)
        if any(jax.tree.leaves(batched[0])):
            weights = jax.tree.map(broadcast, batched[0], weights)
            out = lax.map(lambda x: call(*x), (weights, streams))
        else:
            merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), streams)
            out = tuple(x.reshape(size, -1, *x.shape[1:]) for x in call(weights, merged))
        return out, (True, True, True)

    return call
