"""What no program of a model can be faster than, measured beside the models.

A step of one stream must read every weight, and a matrix-vector product does nothing else. A
sequence, or many streams, must multiply with every weight, and these products alone are the bound.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from agalite.bench.models import as_matrix, weight_arrays
from agalite.bench.timing import Program, ready
from agalite.memory import Memory

READ = "weights read once"
PRODUCTS = "matrix products alone"
_WIDTH = 4096  # of the one matrix that has as many numbers as the model


def read_weights(memory: Memory) -> Program:
    """One matrix-vector product with as many weights as the model has."""
    rows = -(-memory.parameter_count // _WIDTH)
    whole = jax.random.normal(jax.random.key(0), (rows, _WIDTH))
    return ready(READ, lambda w, x: w @ x, whole, jnp.ones(_WIDTH))


def products(memory: Memory, rows: int, *, prepare_for_inference: bool = False) -> Program:
    return ready(PRODUCTS, *chain(memory, rows, prepare_for_inference=prepare_for_inference))


def products_of_training(memory: Memory, rows: int) -> Program:
    return ready(PRODUCTS, *training_chain(memory, rows))


def chain(
    memory: Memory, rows: int, *, prepare_for_inference: bool = False
) -> tuple[Any, Any, Array]:
    """A function and its arguments: each weight times `rows` inputs.

    `prepare_for_inference`: the weight lies in memory as it does for acting.
    """
    matrices = [as_matrix(w) for w in weight_arrays(memory)]
    if prepare_for_inference:
        matrices = [jnp.array(w.T) for w in matrices]

    def multiply(ws: list[Array], x: Array) -> Array:
        for w in ws:
            w = w if prepare_for_inference else w.T
            x = _fit(x, w.shape[0]) @ w
        return x

    return multiply, matrices, _rows(rows)


def training_chain(memory: Memory, rows: int) -> tuple[Any, Any, Array]:
    """Each weight's three: the output, the gradient of the input and that of the weight."""
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

    return multiply, matrices, _rows(rows)


def _rows(rows: int) -> Array:
    return jax.random.normal(jax.random.key(1), (rows, _WIDTH))


def _fit(x: Array, width: int) -> Array:
    """The first columns, or the columns over again.

    Products wait for each other, as the layers of a model do, and their results make room again:
    were all of them kept, finding memory for them would take longer than the arithmetic.
    """
    while x.shape[1] < width:
        x = jnp.concatenate([x, x], axis=1)
    return x[:, :width]
