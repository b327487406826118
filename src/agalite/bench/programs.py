"""Models as compiled programs: a step of a stream, a whole sequence, its gradient.

Weights are arguments, so that nothing can be computed from them beforehand, and are passed as flat
lists, so that calling a program costs what a compiled loop would pay, not a walk over modules.
"""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from agalite.bench.timing import Program, ready, temporary_bytes
from agalite.memory import Memory
from agalite.memory.layers import prepare_for_inference
from agalite.ops.state import copies


def stream(name: str, memory: Memory, *, batch: int | None = None) -> Program:
    """One step; the state goes from call to call in place, as in a stream that does not end.

    The weights lie as for acting: packed where the memory can be, and turned for a `batch` of
    streams side by side.
    """
    memory = memory.packed() if batch is None else prepare_for_inference(memory, streams=batch)
    weights, join = _flat(memory)
    start, reset, xs = memory.initial_state(), jnp.zeros((), bool), stream_inputs(memory)
    if batch is not None:
        start, reset, xs = (copies(tree, batch) for tree in (start, reset, xs))
    leaves, tree = jax.tree.flatten(start)

    def step(weights: list[Array], leaves: list[Array], x: Array, reset: Array) -> Any:
        one = join(weights).step
        run = one if batch is None else jax.vmap(one)
        state, y = run(jax.tree.unflatten(tree, leaves), x, reset)
        return jax.tree.leaves(state), y

    compiled = jax.jit(step, donate_argnums=1).lower(weights, leaves, xs[0], reset).compile()
    # Leaves that share a buffer, as two zeros may, cannot both be given away.
    carried = [[jnp.array(leaf, copy=True) for leaf in leaves]]
    inputs = itertools.cycle(xs)

    def call() -> Array:
        carried[0], y = compiled(weights, carried[0], next(inputs), reset)
        return y

    return Program(name, call, temporary_bytes(compiled))


def stream_inputs(memory: Memory) -> list[Array]:
    """What a stream is fed with, over and over."""
    return list(jax.random.normal(jax.random.key(2), (4, memory.input_size)))


def sequence(name: str, memory: Memory, steps: int) -> Program:
    return ready(name, *forward(memory, steps))


def gradient(name: str, memory: Memory, steps: int) -> Program:
    return ready(name, *backward(memory, steps))


def forward(memory: Memory, steps: int) -> tuple[Any, ...]:
    """A function and its arguments: from the initial state through `steps` inputs."""
    weights, join = _flat(memory)

    def run(weights: list[Array], start: Any, xs: Array, resets: Array) -> Any:
        return join(weights).scan(start, xs, resets)

    return run, weights, memory.initial_state(), *_inputs(memory, steps)


def backward(memory: Memory, steps: int) -> tuple[Any, ...]:
    """A function and its arguments: the gradient of a loss over `steps` inputs, by all weights."""
    weights, join = _flat(memory)

    def loss(weights: list[Array], start: Any, xs: Array, resets: Array) -> Array:
        _, ys = join(weights).scan(start, xs, resets)
        return jnp.mean(jnp.square(ys))

    return jax.grad(loss), weights, memory.initial_state(), *_inputs(memory, steps)


def _flat(memory: Memory) -> tuple[list[Array], Callable[[list[Array]], Memory]]:
    """The weights as a list, and the model made of such a list."""
    weights, rest = eqx.partition(memory, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(weights)
    return leaves, lambda leaves: eqx.combine(jax.tree.unflatten(tree, leaves), rest)


def _inputs(memory: Memory, steps: int) -> tuple[Array, Array]:
    """Inputs and resets; an argument too, or XLA works out what there is to know of constants."""
    xs = jax.random.normal(jax.random.key(1), (steps, memory.input_size))
    return xs, jnp.zeros(steps, bool)
