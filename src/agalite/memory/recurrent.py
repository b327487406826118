"""Running a recurrent cell over time, with the gradient of its weights in one product.

Autodiff of the loop would add an outer product the size of the weight matrix to an accumulator at
every step. The gradient of the cell's pre-activations is collected instead, and the weights' is one
matrix product at the end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite.memory.product import product
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
    return _run_cell(cell, weight, bias, inputs, resets, start)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_cell(
    cell: Cell, weight: Array, bias: Array, inputs: Array, resets: Array, start: Any
) -> Any:
    return _forward(cell, weight, bias, inputs, resets, start)


def _forward(cell: Cell, weight: Array, bias: Array, inputs: Array, resets: Array, start: Any):
    def step(state: Any, x: tuple[Array, Array]) -> tuple[Any, Any]:
        state = forget(state, x[1])
        state = cell(x[0], product(state[0], weight) + bias, state)
        return state, state

    return lax.scan(step, start, (inputs, resets))[1]


def _fwd(cell: Cell, weight: Array, bias: Array, inputs: Array, resets: Array, start: Any):
    states = _forward(cell, weight, bias, inputs, resets, start)
    return states, (weight, bias, inputs, resets, start, states)


def _bwd(cell: Cell, saved: Any, dstates: Any):
    weight, bias, inputs, resets, start, states = saved
    before = jax.tree.map(lambda s, h: jnp.concatenate([s[None], h[:-1]]), start, states)
    before = jax.vmap(forget)(before, resets)
    from_hidden = before[0] @ weight.T + bias

    def step(later: Any, x: Any):
        inputs, from_hidden, before, reset, dstate = x
        _, vjp = jax.vjp(cell, inputs, from_hidden, before)
        dinputs, dhidden, dbefore = vjp(jax.tree.map(jnp.add, dstate, later))
        dbefore = (dbefore[0] + dhidden @ weight, *dbefore[1:])
        return forget(dbefore, reset), (dinputs, dhidden)

    zero = jax.tree.map(jnp.zeros_like, start)
    xs = (inputs, from_hidden, before, resets, dstates)
    dstart, (dinputs, dhidden) = lax.scan(step, zero, xs, reverse=True)
    dweight = jnp.einsum("tg,th->gh", dhidden, before[0])
    return dweight, dhidden.sum(0), dinputs, None, dstart


_run_cell.defvjp(_fwd, _bwd)
