"""GaLiTe's attention (Algorithm 3) by custom kernels: `kernels/galite.h`. It needs gates.

C is kept every `_CHUNK` steps, and the gradient rebuilds it in between. So the memory of training
grows as (T / chunk) * V * K per lane, and the kernels themselves need about a megabyte per thread.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite import kernels
from agalite.ops._batching import batched_as_lanes
from agalite.ops.linear import MatrixState

_CHUNK = 64


class Inputs(NamedTuple):
    columns: Float[Array, "T H N"]  # the layout of features.join_columns
    keep: Float[Array, "T H"]


def attend(
    epsilon: float, narrow: int, activate: bool, start: MatrixState, inputs: Inputs
) -> tuple[MatrixState, Float[Array, "T H V"]]:
    """The last state and the outputs (T, H, V).

    narrow: E, the width of the outer products' narrow factor. activate: apply relu and sigmoid to
    the columns; false if they are activated already.
    """
    result: Any = _attend((epsilon, narrow, activate), start, inputs)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Any, start: MatrixState, inputs: Inputs) -> tuple[MatrixState, Array]:
    last, out, *_ = _forward(how, False, start, inputs)
    return last, out


def _attend_fwd(how: Any, start: MatrixState, inputs: Inputs):
    last, out, bottom, boundaries = _forward(how, True, start, inputs)
    return (last, out), (inputs, boundaries, out, bottom)


def _attend_bwd(
    how: Any, saved: tuple[Inputs, MatrixState, Array, Array], cotangents: tuple[MatrixState, Array]
) -> tuple[MatrixState, Inputs]:
    def backward(
        inputs: Inputs,
        boundaries: MatrixState,
        out: Array,
        bottom: Array,
        dlast: MatrixState,
        dout: Array,
    ):
        shapes = [inputs.columns.shape, *(x.shape for x in dlast)]
        dcolumns, *dstart = _call(
            "galite_backward", shapes, how, inputs, boundaries, out, bottom, *dlast, dout
        )
        return MatrixState(*dstart), Inputs(dcolumns, jnp.zeros_like(inputs.keep))

    backward = batched_as_lanes(backward, (1, 1, 1, 1, 0, 1), (0, 1))
    return backward(*saved, *cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(how: Any, keep_boundaries: bool, start: MatrixState, inputs: Inputs):
    """The last state, outputs, their denominators, and if asked for the state before each chunk."""

    def forward(start: MatrixState, inputs: Inputs):
        steps = inputs.keep.shape[0]
        out = (*inputs.keep.shape, start.C.shape[-2])
        shapes = [*(x.shape for x in start), out, inputs.keep.shape]
        if keep_boundaries:
            shapes += [(-(-steps // _CHUNK), *x.shape) for x in start]
        C, s, out, bottom, *boundaries = _call("galite_forward", shapes, how, inputs, start)
        return MatrixState(C, s), out, bottom, MatrixState(*boundaries) if boundaries else None

    axes = (0, 1, 1, 1 if keep_boundaries else None)
    return batched_as_lanes(forward, (0, 1), axes)(start, inputs)


def _call(
    name: str,
    shapes: list[Any],
    how: tuple[float, int, bool],
    x: Inputs,
    state: MatrixState,
    *more: Array,
) -> list[Array]:
    epsilon, narrow, activate = how
    return kernels.call(
        name,
        shapes,
        *x,
        *state,
        *more,
        narrow=narrow,
        activate=activate,
        epsilon=epsilon,
        chunk=_CHUNK,
    )
