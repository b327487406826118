"""AGaLiTe's attention (Algorithm 4) by our own kernels: `kernels/agalite.h`.

The same scheme as `agalite_chunked.py`: sums are kept at the start of each chunk, and the gradient
rebuilds the trajectory of a chunk from there. Only for gated attention.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite import kernels
from agalite.ops._batching import batched_as_lanes
from agalite.ops.agalite.chunked import Reading, Sums

# Steps and lanes whose trajectories are rebuilt together: they fit the second cache.
_CHUNK = 8
_GROUP = 16


class Inputs(NamedTuple):
    columns: Float[Array, "T H N"]  # see projected.py
    keep: Float[Array, "T H"]
    osc: Float[Array, "T H Rk"]


def attend(
    reading: Reading, activate: bool, start: Sums, inputs: Inputs
) -> tuple[Sums, Float[Array, "T H V"]]:
    """Returns the last sums and the outputs; lanes as in `agalite_chunked.attend`.

    activate: the columns have not been through relu and sigmoid yet.
    """
    result: Any = _attend(reading, activate, start, inputs)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(reading: Reading, activate: bool, start: Sums, inputs: Inputs) -> tuple[Sums, Array]:
    last, out, *_ = _forward(reading, activate, False, start, inputs)
    return last, out


def _attend_fwd(reading: Reading, activate: bool, start: Sums, inputs: Inputs):
    last, out, scores, boundaries = _forward(reading, activate, True, start, inputs)
    return (last, out), (inputs, boundaries, scores)


def _attend_bwd(
    reading: Reading,
    activate: bool,
    saved: tuple[Inputs, Sums, Array],
    cotangents: tuple[Sums, Array],
) -> tuple[Sums, Inputs]:
    def backward(inputs: Inputs, boundaries: Sums, scores: Array, dlast: Sums, dout: Array):
        shapes = [inputs.columns.shape, *(x.shape for x in dlast)]
        dcolumns, *dstart = _call(
            "agalite_backward", shapes, reading, activate, inputs, boundaries, scores, *dlast, dout
        )
        return Sums(*dstart), Inputs(
            dcolumns, jnp.zeros_like(inputs.keep), jnp.zeros_like(inputs.osc)
        )

    backward = batched_as_lanes(backward, (1, 1, 1, 0, 1), (0, 1))
    return backward(*saved, *cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(reading: Reading, activate: bool, keep_boundaries: bool, start: Sums, inputs: Inputs):
    """-> last sums, out, scores, and the sums at the start of each chunk, if they are asked for."""

    def forward(start: Sums, inputs: Inputs):
        steps = inputs.keep.shape[0]
        out = (*inputs.keep.shape, start.values.shape[-1])
        shapes = [*(x.shape for x in start), out, inputs.osc.shape]
        if keep_boundaries:
            shapes += [(-(-steps // _CHUNK), *x.shape) for x in start]
        keys, values, out, scores, *boundaries = _call(
            "agalite_forward", shapes, reading, activate, inputs, start
        )
        return Sums(keys, values), out, scores, Sums(*boundaries) if boundaries else None

    axes = (0, 1, 1, 1 if keep_boundaries else None)
    return batched_as_lanes(forward, (0, 1), axes)(start, inputs)


def _call(
    name: str,
    shapes: list[Any],
    reading: Reading,
    activate: bool,
    x: Inputs,
    sums: Sums,
    *more: Array,
) -> list[Array]:
    constants = (jnp.asarray(c, x.keep.dtype) for c in (reading.numerator, reading.denominator))
    return kernels.call(
        name,
        shapes,
        *x,
        *constants,
        *sums,
        *more,
        narrow=sums.keys.shape[-2],
        activate=activate,
        epsilon=reading.epsilon,
        chunk=_CHUNK,
        group=max(1, min(_GROUP, x.keep.shape[1] // kernels.threads())),
    )
