"""Running a recurrent cell over time, with the gradient of its weights in one product.

Autodiff of the loop would add an outer product the size of the weight matrix to an accumulator at
every step. Here the loop back in time only collects the gradient of what the weights gave at each
step; that product is written once more outside the loop, for all steps and the whole batch, and its
gradient is the weights'.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite.ops.matmul import product
from agalite.ops.state import forget

# cell(from_input (G,), from_hidden (G,), state) -> state; the hidden vector is state[0].
Cell = Callable[[Array, Array, Any], Any]


def run_cell(
    cell: Cell,
    weight: Float[Array, "G hidden"],
    bias: Float[Array, " G"],
    inputs: Float[Array, "T G"],
    resets: Bool[Array, " T"],
    start: Any,
) -> Any:
    """States (T, ...) of every step; from_hidden is weight h + bias; a reset zeroes the state."""

    def step(state: Any, x: tuple[Array, Array]) -> tuple[Any, Any]:
        state = forget(state, x[1])
        state = cell(x[0], product(state[0], weight) + bias, state)
        return state, state

    states = lax.stop_gradient(lax.scan(step, start, (inputs, resets))[1])
    before = jax.tree.map(lambda s, h: jnp.concatenate([s[None], h[:-1]]), start, states)
    before = lax.stop_gradient(jax.vmap(forget)(before, resets))
    from_hidden = product(before[0], weight) + bias
    known = (states, before, lax.stop_gradient(weight), resets)
    return _through_time(cell, known, from_hidden, inputs, start)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through_time(_cell: Cell, known: Any, *_differentiable: Any) -> Any:
    """The states, with a gradient for from_hidden (T, G), inputs (T, G) and start."""
    return known[0]


def _fwd(_cell: Cell, known: Any, *differentiable: Any) -> tuple[Any, Any]:
    return known[0], (known, *differentiable)


def _bwd(cell: Cell, saved: Any, dstates: Any):
    (_, before, weight, resets), from_hidden, inputs, start = saved
    back = lax.optimization_barrier(weight.T)  # a copy made once, not turned at every step

    def step(later: Any, x: Any):
        inputs, from_hidden, before, reset, dstate = x
        _, pull = jax.vjp(cell, inputs, from_hidden, before)
        dinputs, dhidden, dbefore = pull(jax.tree.map(jnp.add, dstate, later))
        dbefore = (dbefore[0] + product(dhidden, back), *dbefore[1:])
        return forget(dbefore, reset), (dinputs, dhidden)

    zero = jax.tree.map(jnp.zeros_like, start)
    xs = (inputs, from_hidden, before, resets, dstates)
    dstart, (dinputs, dhidden) = lax.scan(step, zero, xs, reverse=True)
    return None, dhidden, dinputs, dstart


_through_time.defvjp(_fwd, _bwd)
