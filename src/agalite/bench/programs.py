"""Models as compiled programs, and the lower bounds they are compared with.

A program is a step of a stream, a whole sequence or its gradient. Weights are arguments, so that
XLA cannot fold them into constants, and are passed as flat lists: calling a program then costs what
a compiled loop would pay, and not the flattening of a module.

The bounds: a step of one stream must read every weight, and a matrix-vector product does nothing
else. A sequence, or a batch of streams, must multiply by every weight.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from agalite.bench.timing import Program, compile_program, temporary_bytes
from agalite.memory import Memory
from agalite.memory.layers import prepare_for_inference
from agalite.ops.resets import broadcast_state

READ = "weights read once"
PRODUCTS = "matrix products alone"
_WIDTH = 4096  # of the matrix that `read_weights` multiplies by


def stream(name: str, memory: Memory, *, batch_size: int | None = None) -> Program:
    """One step of a stream; each call carries the state on, in place.

    The weights are laid out as for acting: packed for one stream where the model supports it,
    transposed for a batch.

    **Arguments:**

    - `name`: of the program.
    - `memory`: the model.
    - `batch_size`: streams that step together; None is one stream without a batch axis.
    """
    if batch_size is None:
        memory = memory.prepare_for_inference()
    else:
        memory = prepare_for_inference(memory, streams=batch_size)
    weights, join = _flatten(memory)
    start, reset, xs = memory.initial_state(), jnp.zeros((), bool), stream_inputs(memory)
    if batch_size is not None:
        start, reset, xs = (broadcast_state(tree, batch_size) for tree in (start, reset, xs))
    leaves, tree = jax.tree.flatten(start)

    def step(weights: list[Array], leaves: list[Array], x: Array, reset: Array) -> Any:
        one = join(weights).step
        run = one if batch_size is None else jax.vmap(one)
        state, y = run(jax.tree.unflatten(tree, leaves), x, reset)
        return jax.tree.leaves(state), y

    compiled = jax.jit(step, donate_argnums=1).lower(weights, leaves, xs[0], reset).compile()
    # Leaves that share a buffer, as two zeros may, cannot both be donated.
    carried = [[jnp.array(leaf, copy=True) for leaf in leaves]]
    inputs = itertools.cycle(xs)

    def call() -> Array:
        carried[0], y = compiled(weights, carried[0], next(inputs), reset)
        return y

    return Program(name, call, temporary_bytes(compiled))


def stream_inputs(memory: Memory) -> list[Array]:
    """The inputs of a stream, repeated indefinitely: four of shape (input,)."""
    return list(jax.random.normal(jax.random.key(2), (4, memory.input_size)))


def sequence(name: str, memory: Memory, steps: int) -> Program:
    """`scan` over `steps` inputs from the initial state."""
    return compile_program(name, *forward(memory, steps))


def gradient(name: str, memory: Memory, steps: int) -> Program:
    """The gradient of a loss over `steps` inputs with respect to all weights."""
    return compile_program(name, *backward(memory, steps))


def forward(memory: Memory, steps: int) -> tuple[Any, ...]:
    """The function of `sequence` and its arguments."""
    weights, join = _flatten(memory)

    def run(weights: list[Array], start: Any, xs: Array, resets: Array) -> Any:
        return join(weights).scan(start, xs, resets)

    return run, weights, memory.initial_state(), *_sequence_inputs(memory, steps)


def backward(memory: Memory, steps: int) -> tuple[Any, ...]:
    """The function of `gradient` and its arguments."""
    weights, join = _flatten(memory)

    def loss(weights: list[Array], start: Any, xs: Array, resets: Array) -> Array:
        _, ys = join(weights).scan(start, xs, resets)
        return jnp.mean(jnp.square(ys))

    return jax.grad(loss), weights, memory.initial_state(), *_sequence_inputs(memory, steps)


def batch_backward(memory: Memory, steps: int, batch_size: int) -> tuple[Any, ...]:
    """`backward` of a batch of sequences, and its arguments."""
    weights, join = _flatten(memory)

    def loss(weights: list[Array], xs: Array, resets: Array) -> Array:
        model = join(weights)
        scan = jax.vmap(lambda xs, resets: model.scan(model.initial_state(), xs, resets)[1], 1, 1)
        return jnp.mean(jnp.square(scan(xs, resets)))

    xs, resets = _sequence_inputs(memory, steps)
    batch = (jnp.repeat(x[:, None], batch_size, axis=1) for x in (xs, resets))
    return jax.grad(loss), weights, *batch


def read_weights(memory: Memory) -> Program:
    """The bound of one stream: a matrix-vector product with as many weights as the model has."""
    rows = -(-memory.parameter_count // _WIDTH)
    matrix = jax.random.normal(jax.random.key(0), (rows, _WIDTH))
    return compile_program(READ, lambda w, x: w @ x, matrix, jnp.ones(_WIDTH))


def products(memory: Memory, rows: int, *, transposed: bool = False) -> Program:
    """The bound of a forward pass: every weight times `rows` inputs."""
    return compile_program(PRODUCTS, *forward_products(memory, rows, transposed=transposed))


def training_products(memory: Memory, rows: int) -> Program:
    """The bound of a gradient: the three products of every weight with `rows` inputs."""
    return compile_program(PRODUCTS, *backward_products(memory, rows))


def forward_products(
    memory: Memory, rows: int, *, transposed: bool = False
) -> tuple[Any, Any, Array]:
    """The function of `products` and its arguments.

    `transposed`: the weights are stored (in, out), as for acting.
    """
    matrices = [as_matrix(w) for w in weight_arrays(memory)]
    if transposed:
        matrices = [jnp.array(w.T) for w in matrices]

    def multiply(ws: list[Array], x: Array) -> Array:
        for w in ws:
            w = w if transposed else w.T
            x = _fit(x, w.shape[0]) @ w
        return x

    return multiply, matrices, _product_inputs(rows)


def backward_products(memory: Memory, rows: int) -> tuple[Any, Any, Array]:
    """The function of `training_products` and its arguments.

    Of each weight: the output, the gradient of the input and the gradient of the weight.
    """
    matrices = [as_matrix(w) for w in weight_arrays(memory)]

    def multiply(ws: list[Array], x: Array) -> list[Array]:
        inputs, gradients = [], []
        for w in ws:
            inputs.append(_fit(x, w.shape[1]))
            x = inputs[-1] @ w.T
        for w, x_in in zip(reversed(ws), reversed(inputs), strict=True):
            x = _fit(x, w.shape[0])
            gradients.append(x.T @ x_in)
            x = x @ w
        return gradients

    return multiply, matrices, _product_inputs(rows)


def weight_arrays(memory: Memory) -> list[Array]:
    """The arrays that multiply activations: no biases and no norms."""
    paths = jax.tree_util.tree_leaves_with_path(eqx.filter(memory, eqx.is_inexact_array))
    return [x for path, x in paths if "weight" in jax.tree_util.keystr(path)]


def as_matrix(w: Array) -> Array:
    """(out, in) of a weight (out, in), (H, N, in) or (out, H, V)."""
    if w.ndim == 2:
        return w
    heads_first = w.shape[0] < w.shape[1]
    return w.reshape(-1, w.shape[-1]) if heads_first else w.reshape(w.shape[0], -1)


def _flatten(memory: Memory) -> tuple[list[Array], Callable[[list[Array]], Memory]]:
    """The weights as a list, and the function from such a list to the model."""
    weights, rest = eqx.partition(memory, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(weights)
    return leaves, lambda leaves: eqx.combine(jax.tree.unflatten(tree, leaves), rest)


def _sequence_inputs(memory: Memory, steps: int) -> tuple[Array, Array]:
    """Inputs (T, input) and resets (T,), which are arguments so that XLA does not fold them."""
    xs = jax.random.normal(jax.random.key(1), (steps, memory.input_size))
    return xs, jnp.zeros(steps, bool)


def _product_inputs(rows: int) -> Array:
    return jax.random.normal(jax.random.key(1), (rows, _WIDTH))


def _fit(x: Array, width: int) -> Array:
    """x (rows, n) -> (rows, width): the first columns, or the columns repeated.

    Each product depends on the one before it, as the layers of a model do, so that its result can
    be freed: allocating memory for all of them takes longer than the arithmetic.
    """
    while x.shape[1] < width:
        x = jnp.concatenate([x, x], axis=1)
    return x[:, :width]


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of its inner programs, those of a loop as often as it runs."""
    for eqn in jaxpr.eqns:
        yield eqn
        inner = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        )
        for program in (getattr(x, "jaxpr", x) for x in inner):
            if hasattr(program, "eqns"):
                for _ in range(eqn.params.get("length", 1)):
                    yield from equations(program)
