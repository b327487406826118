"""A recurrent cell over time, with the gradient of its weights in one matrix product.

Autodiff of the loop would add an outer product of the weight's size to an accumulator at every
step. Here the loop backwards in time only collects the gradient of what the weights gave at each
step. That product is written once more outside the loop, for all steps and the whole batch, and its
gradient is that of the weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite.ops.matmul import current_precision, matmul, precision
from agalite.ops.resets import reset_state

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
    """The states (T, ...) after every step of a recurrent cell.

    **Arguments:**

    - `cell`: cell(from_input (G,), from_hidden (G,), state) -> state, with the hidden vector first.
    - `weight`, `bias`: (G, hidden) and (G,): from_hidden = weight h + bias.
    - `inputs`: (T, G) from_input of every step.
    - `resets`: (T,) true zeroes the state before the step.
    - `start`: the state before the first step.
    """

    def step(state: Any, x: tuple[Array, Array]) -> tuple[Any, Any]:
        state = reset_state(state, x[1])
        state = cell(x[0], matmul(state[0], weight) + bias, state)
        return state, state

    states = lax.stop_gradient(lax.scan(step, start, (inputs, resets))[1])
    before = jax.tree.map(lambda s, h: jnp.concatenate([s[None], h[:-1]]), start, states)
    before = lax.stop_gradient(jax.vmap(reset_state)(before, resets))
    from_hidden = matmul(before[0], weight) + bias
    known = (states, before, lax.stop_gradient(weight), resets)
    return _through_time(cell, current_precision(), known, from_hidden, inputs, start)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _through_time(_cell: Cell, _precision: str, known: Any, *_differentiable: Any) -> Any:
    """The states, with a gradient for from_hidden (T, G), inputs (T, G) and start."""
    return known[0]


def _fwd(_cell: Cell, _precision: str, known: Any, *differentiable: Any) -> tuple[Any, Any]:
    return known[0], (known, *differentiable)


def _bwd(cell: Cell, precision_forwards: str, saved: Any, dstates: Any):
    with precision(precision_forwards):  # the rule is traced later, outside of that context
        return _backwards(cell, saved, dstates)


def _backwards(cell: Cell, saved: Any, dstates: Any):
    (_, before, weight, resets), from_hidden, inputs, start = saved
    back = lax.optimization_barrier(weight.T)  # one copy, instead of a transpose at every step

    def step(later: Any, x: Any):
        inputs, from_hidden, before, reset, dstate = x
        _, pull = jax.vjp(cell, inputs, from_hidden, before)
        dinputs, dhidden, dbefore = pull(jax.tree.map(jnp.add, dstate, later))
        dbefore = (dbefore[0] + matmul(dhidden, back), *dbefore[1:])
        return reset_state(dbefore, reset), (dinputs, dhidden)

    zero = jax.tree.map(jnp.zeros_like, start)
    xs = (inputs, from_hidden, before, resets, dstates)
    dstart, (dinputs, dhidden) = lax.scan(step, zero, xs, reverse=True)
    return None, dhidden, dinputs, dstart


_through_time.defvjp(_fwd, _bwd)
