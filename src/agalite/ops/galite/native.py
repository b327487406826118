"""GaLiTe's attention (Algorithm 3) by our own kernels: `kernels/galite.h`.

C is kept every `_CHUNK` steps, and the gradient rebuilds it between; so the memory of training
grows as (T / chunk) * V * K a lane, and the kernels themselves need about a megabyte a thread.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite import kernels
from agalite.ops._batching import batched_as_lanes
from agalite.ops.galite.chunked import Matrix

_CHUNK = 64


class Inputs(NamedTuple):
    columns: Float[Array, "T H N"]  # see projected.py
    keep: Float[Array, "T H"]


def attend(
    epsilon: float, narrow: int, activate: bool, start: Matrix, inputs: Inputs
) -> tuple[Matrix, Float[Array, "T H V"]]:
    """Returns the last state and the outputs; lanes as in `galite_chunked.attend`.

    narrow: E; activate: the columns have not been through relu and sigmoid yet.
    """
    result: Any = _attend((epsilon, narrow, activate), start, inputs)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Any, start: Matrix, inputs: Inputs) -> tuple[Matrix, Array]:
    last, out, *_ = _forward(how, False, start, inputs)
    return last, out


def _attend_fwd(how: Any, start: Matrix, inputs: Inputs):
    last, out, bottom, boundaries = _forward(how, True, start, inputs)
    return (last, out), (inputs, boundaries, out, bottom)


def _attend_bwd(
    how: Any, saved: tuple[Inputs, Matrix, Array, Array], cotangents: tuple[Matrix, Array]
) -> tuple[Matrix, Inputs]:
    def backward(
        inputs: Inputs, boundaries: Matrix, out: Array, bottom: Array, dlast: Matrix, dout: Array
    ):
        shapes = [inputs.columns.shape, *(x.shape for x in dlast)]
        dcolumns, *dstart = _call(
            "galite_backward", shapes, how, inputs, boundaries, out, bottom, *dlast, dout
        )
        return Matrix(*dstart), Inputs(dcolumns, jnp.zeros_like(inputs.keep))

    backward = batched_as_lanes(backward, (1, 1, 1, 1, 0, 1), (0, 1))
    return backward(*saved, *cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(how: Any, keep_boundaries: bool, start: Matrix, inputs: Inputs):
    """-> last state, out, what it was divided by, and the state at the start of each chunk."""

    def forward(start: Matrix, inputs: Inputs):
        steps = inputs.keep.shape[0]
        out = (*inputs.keep.shape, start.C.shape[-2])
        shapes = [*(x.shape for x in start), out, inputs.keep.shape]
        if keep_boundaries:
            shapes += [(-(-steps // _CHUNK), *x.shape) for x in start]
        C, s, out, bottom, *boundaries = _call("galite_forward", shapes, how, inputs, start)
        return Matrix(C, s), out, bottom, Matrix(*boundaries) if boundaries else None

    axes = (0, 1, 1, 1 if keep_boundaries else None)
    return batched_as_lanes(forward, (0, 1), axes)(start, inputs)


def _call(
    name: str,
    shapes: list[Any],
    how: tuple[float, int, bool],
    x: Inputs,
    state: Matrix,
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
