"""Layers shared by the models: dense, normalisation, GRU gate, MLP; and where gates start."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from agalite.memory.base import Memory
from agalite.ops.activations import mix, normalise, relu, sigmoid, tanh
from agalite.ops.matmul import LARGE, TransposedWeight, broadcast_like, product

ORTHOGONAL = jax.nn.initializers.orthogonal(math.sqrt(2))


class Linear(eqx.Module):
    """y = x W^T, with W several orthogonal blocks (width_i, in) one above the other.

    Projections of the same input are fused into one product: on a CPU a small matrix product costs
    about the same whatever its width. W is stored (out, in): the gradient's product for W then runs
    at full speed, where with (in, out) XLA falls back to a slower one (docs/performance.md).
    """

    weight: Float[Array, "out in"]

    def __init__(self, inputs: int, widths: Sequence[int], *, key: PRNGKeyArray):
        keys = jax.random.split(key, len(widths))
        blocks = [ORTHOGONAL(k, (w, inputs)) for k, w in zip(keys, widths, strict=True)]
        self.weight = jnp.concatenate(blocks)

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        return product(x, self.weight)


class Dense(Linear):
    """y = x W^T + b, b starting at zero."""

    bias: Float[Array, " out"]

    def __init__(self, inputs: int, widths: Sequence[int], *, key: PRNGKeyArray):
        super().__init__(inputs, widths, key=key)
        self.bias = jnp.zeros(sum(widths))

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        y = super().__call__(x)
        return y + broadcast_like(self.bias, y)


class HeadsOut(eqx.Module):
    """(T, H, V) -> (T, D): all heads' outputs into the model's width."""

    weight: Float[Array, "D H V"]
    bias: Float[Array, " D"]

    def __init__(self, heads: int, head_size: int, d_model: int, *, key: PRNGKeyArray):
        weight = ORTHOGONAL(key, (d_model, heads * head_size))
        self.weight = weight.reshape(d_model, heads, head_size)
        self.bias = jnp.zeros(d_model)

    def __call__(self, x: Float[Array, "T H V"]) -> Float[Array, "T D"]:
        y = product(x, self.weight)
        return y + broadcast_like(self.bias, y)


class HeadsIn(eqx.Module):
    """(T, D) -> (T, H, N): a projection for every head; several side by side, of `widths`."""

    weight: Float[Array, "H N D"]

    def __init__(self, d_model: int, heads: int, widths: Sequence[int], *, key: PRNGKeyArray):
        keys = jax.random.split(key, len(widths))
        blocks = [
            ORTHOGONAL(k, (heads * width, d_model)).reshape(heads, width, d_model)
            for k, width in zip(keys, widths, strict=True)
        ]
        self.weight = jnp.concatenate(blocks, axis=1)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T H N"]:
        return product(x, self.weight, outputs=2)


class LayerNorm(eqx.Module):
    scale: Float[Array, " D"]
    bias: Float[Array, " D"]

    def __init__(self, size: int):
        self.scale, self.bias = jnp.ones(size), jnp.zeros(size)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        y = normalise(x)
        return y * broadcast_like(self.scale, y) + broadcast_like(self.bias, y)


class GRUGate(eqx.Module):
    """GTrXL's gate (Parisotto et al., 2020) in place of the residual sum: x (T, D), y (T, D).

    With bias 2 it starts close to passing x on unchanged.
    """

    from_y: Linear  # r, z, h
    from_x: Linear  # r, z
    candidate: Linear
    bias: Float[Array, " D"]

    def __init__(self, size: int, *, key: PRNGKeyArray):
        a, b, c = jax.random.split(key, 3)
        self.from_y = Linear(size, [size] * 3, key=a)
        self.from_x = Linear(size, [size] * 2, key=b)
        self.candidate = Linear(size, [size], key=c)
        self.bias = jnp.full(size, 2.0, jnp.float32)

    def __call__(self, x: Float[Array, "T D"], y: Float[Array, "T D"]) -> Float[Array, "T D"]:
        y_r, y_z, y_h = jnp.split(self.from_y(y), 3, axis=-1)
        x_r, x_z = jnp.split(self.from_x(x), 2, axis=-1)
        r = sigmoid(y_r + x_r)
        z = sigmoid(y_z + x_z - broadcast_like(self.bias, x_z))
        h = tanh(y_h + self.candidate(r * x))
        return mix(z, h, x)


class MLP(eqx.Module):
    """(T, D) -> (T, D) through `hidden`, ReLU after both layers."""

    into: Dense
    out: Dense

    def __init__(self, size: int, hidden: int, *, key: PRNGKeyArray):
        a, b = jax.random.split(key)
        self.into, self.out = Dense(size, [hidden], key=a), Dense(hidden, [size], key=b)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return relu(self.out(relu(self.into(x))))


# Up to so many streams side by side the kernel for packed weights is faster than XLA's products.
_STREAMS = 48


def prepare_for_inference(model: Any, *, streams: int = 1) -> Any:
    """The same model with its weights laid out to act with, for so many streams side by side.

    Packed (`packed.py`), where a memory can be and they are few; else its layers' weights are
    `TransposedWeight`.
    """

    def turn(layer: Any) -> Any:
        if isinstance(layer, Memory):
            return layer.packed()
        if not isinstance(layer, (Linear, HeadsIn, HeadsOut)) or layer.weight.size >= LARGE:
            return layer
        outputs = 2 if isinstance(layer, HeadsIn) else 1
        return eqx.tree_at(
            lambda x: x.weight, layer, TransposedWeight(layer.weight, outputs=outputs)
        )

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Linear | HeadsIn | HeadsOut) or (
            isinstance(x, Memory) and streams <= _STREAMS and x.packable
        )

    return jax.tree.map(turn, model, is_leaf=is_leaf)


def write_bias(
    horizon: tuple[float, float], heads: int, width: int, *, key: PRNGKeyArray
) -> Float[Array, "heads width"]:
    """Biases for a gate that writes sigmoid(bias) of an input and keeps the rest.

    Each head's time constants tau are spread log-uniformly over `horizon`, in random order, and
    sigmoid(bias) = 1 / tau: the chrono initialisation of Tallec and Ollivier (2018).
    """
    shortest, longest = horizon
    tau = np.geomspace(shortest, longest, width)
    biases = jnp.asarray(-np.log(tau - 1), jnp.float32)
    keys = jax.random.split(key, heads)
    return jax.vmap(lambda k: jax.random.permutation(k, biases))(keys)
