"""Layers shared by the models: linear maps, normalisation, GRU gate, MLP, and the projections of
the linear attentions. Modules take one sequence (T, ...); `vmap` adds a batch.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.base import Memory
from agalite.ops.activations import mix, normalise, relu, rms_normalise, sigmoid, tanh
from agalite.ops.causal_convolution import causal_convolution
from agalite.ops.features import FEATURES, Outer, dpfp, elu1, feature_width
from agalite.ops.matmul import LARGE, TransposedWeight, broadcast_like, matmul
from agalite.ops.recurrence import Complex

ORTHOGONAL = jax.nn.initializers.orthogonal(math.sqrt(2))


class Linear(eqx.Module):
    """y = x W^T: (T, in) -> (T, out), with W several orthogonal blocks (width_i, in) stacked.

    Projections of the same input are fused into one product: on a CPU a small matrix product costs
    about the same whatever its width. W is stored (out, in): the product of the weight's gradient
    then runs at full speed, where with (in, out) XLA uses a slower routine.
    """

    weight: Float[Array, "out in"]
    few_rows: ClassVar[bool] = True
    """Acting multiplies about as many rows as there are streams (`prepare_for_inference`)."""

    def __init__(
        self, inputs: int, widths: Sequence[int], *, init: Any = ORTHOGONAL, key: PRNGKeyArray
    ):
        keys = jax.random.split(key, len(widths))
        blocks = [init(k, (w, inputs)) for k, w in zip(keys, widths, strict=True)]
        self.weight = jnp.concatenate(blocks)

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        return matmul(x, self.weight)


class Dense(Linear):
    """y = x W^T + b: (T, in) -> (T, out); b starts at zero."""

    bias: Float[Array, " out"]

    def __init__(
        self, inputs: int, widths: Sequence[int], *, init: Any = ORTHOGONAL, key: PRNGKeyArray
    ):
        super().__init__(inputs, widths, init=init, key=key)
        self.bias = jnp.zeros(sum(widths))

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        y = super().__call__(x)
        return y + broadcast_like(self.bias, y)


class ComplexIn(eqx.Module):
    """B x with a complex B (N, D): (T, D) -> (T, N). The rows of its weight are Re B, then Im B."""

    parts: Linear

    def __init__(self, d_model: int, size: int, *, init: Any = ORTHOGONAL, key: PRNGKeyArray):
        self.parts = Linear(d_model, [size, size], init=init, key=key)

    def __call__(self, x: Float[Array, "T D"]) -> Complex:
        return Complex(*jnp.split(self.parts(x), 2, axis=-1))


class ComplexOut(eqx.Module):
    """Re(C h) with a complex C (D, N): (T, N) -> (T, D).

    Two products, since joining the parts of h for one would copy them.
    """

    real: Linear
    imag: Linear

    def __init__(self, size: int, d_model: int, *, init: Any = ORTHOGONAL, key: PRNGKeyArray):
        a, b = jax.random.split(key)
        self.real = Linear(size, [d_model], init=init, key=a)
        self.imag = Linear(size, [d_model], init=init, key=b)

    def __call__(self, h: Complex) -> Float[Array, "T D"]:
        return self.real(h.real) - self.imag(h.imag)


class HeadsOut(eqx.Module):
    """(T, H, V) -> (T, D): the outputs of all heads into the model's width."""

    weight: Float[Array, "D H V"]
    bias: Float[Array, " D"]

    def __init__(self, heads: int, head_size: int, d_model: int, *, key: PRNGKeyArray):
        weight = ORTHOGONAL(key, (d_model, heads * head_size))
        self.weight = weight.reshape(d_model, heads, head_size)
        self.bias = jnp.zeros(d_model)

    def __call__(self, x: Float[Array, "T H V"]) -> Float[Array, "T D"]:
        y = matmul(x, self.weight)
        return y + broadcast_like(self.bias, y)


class HeadsIn(eqx.Module):
    """(T, D) -> (T, H, N): a projection for every head; N is the sum of `widths`."""

    weight: Float[Array, "H N D"]

    def __init__(self, d_model: int, heads: int, widths: Sequence[int], *, key: PRNGKeyArray):
        keys = jax.random.split(key, len(widths))
        blocks = [
            ORTHOGONAL(k, (heads * width, d_model)).reshape(heads, width, d_model)
            for k, width in zip(keys, widths, strict=True)
        ]
        self.weight = jnp.concatenate(blocks, axis=1)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T H N"]:
        return matmul(x, self.weight, outputs=2)


def lecun_weights(layers: Any, *, key: PRNGKeyArray) -> Any:
    """The same layers with new weights, normal with variance 1 / inputs; biases stay.

    **Arguments:**

    - `layers`: any pytree of modules; the `Linear`, `HeadsIn` and `HeadsOut` in it are changed.
    - `key`: draws the weights.
    """

    def is_layer(x: Any) -> bool:
        return isinstance(x, Linear | HeadsIn | HeadsOut)

    leaves, structure = jax.tree.flatten(layers, is_leaf=is_layer)
    for i, layer in enumerate(leaves):
        if is_layer(layer):
            shape = layer.weight.shape
            inputs = math.prod(shape[1:] if isinstance(layer, HeadsOut) else shape[-1:])
            weight = jax.random.normal(jax.random.fold_in(key, i), shape) / math.sqrt(inputs)
            leaves[i] = eqx.tree_at(lambda x: x.weight, layer, weight)
    return jax.tree.unflatten(structure, leaves)


class LayerNorm(eqx.Module):
    """(T, D) -> (T, D): zero mean and unit variance along D, then scale and bias."""

    scale: Float[Array, " D"]
    bias: Float[Array, " D"]

    def __init__(self, size: int):
        self.scale, self.bias = jnp.ones(size), jnp.zeros(size)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        y = normalise(x)
        return y * broadcast_like(self.scale, y) + broadcast_like(self.bias, y)


class GRUGate(eqx.Module):
    """GTrXL's gate (Parisotto et al., 2020) in place of a residual sum: x, y (T, D) -> (T, D).

    With `bias` 2 it starts close to the identity in x.
    """

    from_y: Linear  # r, z, h
    from_x: Linear  # r, z
    candidate: Linear
    bias: Float[Array, " D"]

    def __init__(self, size: int, *, bias: float = 2.0, key: PRNGKeyArray):
        a, b, c = jax.random.split(key, 3)
        self.from_y = Linear(size, [size] * 3, key=a)
        self.from_x = Linear(size, [size] * 2, key=b)
        self.candidate = Linear(size, [size], key=c)
        self.bias = jnp.full(size, bias, jnp.float32)

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


class HeadNorm(eqx.Module):
    """(T, H, V) -> (T, H, V): every head to a mean square of 1 along V, then scaled."""

    scale: Float[Array, "H V"]

    def __init__(self, heads: int, head_size: int):
        self.scale = jnp.ones((heads, head_size))

    def __call__(self, x: Float[Array, "T H V"]) -> Float[Array, "T H V"]:
        y = rms_normalise(x)
        return y * broadcast_like(self.scale, y)


class CausalConvolution(eqx.Module):
    """(T, C) -> (T, C): each channel convolved with its last `width` inputs, then SiLU."""

    weight: Float[Array, "W C"]
    bias: Float[Array, " C"]

    def __init__(self, width: int, channels: int, *, key: PRNGKeyArray):
        limit = width**-0.5
        self.weight = jax.random.uniform(key, (width, channels), minval=-limit, maxval=limit)
        self.bias = jnp.zeros(channels)

    def initial_state(self) -> Float[Array, "W-1 C"]:
        width, channels = self.weight.shape
        return jnp.zeros((width - 1, channels), self.weight.dtype)

    def __call__(
        self, state: Float[Array, "W-1 C"], x: Float[Array, "T C"], resets: Bool[Array, " T"]
    ) -> tuple[Float[Array, "W-1 C"], Float[Array, "T C"]]:
        state, y = causal_convolution(x, self.weight, resets, state)
        return state, jax.nn.silu(y + broadcast_like(self.bias, y))


# --- the projections of the linear attentions -----------------------------------------------------

# sigmoid(3) = 0.95: with a horizon, gamma's narrow factor starts open and leaves the time constants
# to the wide one.
_OPEN = 3.0

ProjectionInit = Literal["separate", "fused"]
PROJECTION_INITS = ("separate", "fused")


class Projected(NamedTuple):
    """What a linear attention computes from its input before the memory is updated."""

    q: Float[Array, "T H K"] | Outer
    k: Float[Array, "T H K"] | Outer
    v: Float[Array, "T H V"]
    beta: Float[Array, "T H V"] | None
    gamma: Float[Array, "T H K"] | Outer | None


class FusedProjection(eqx.Module):
    """(T, D) -> (T, H, N): W_Q, W_K, W_V, W_beta, W_gamma, W_p1, W_p2 and W_p3 in one product.

    `split` gives the N columns of each head their names: q, k, v, beta, gamma, p1, p2, p3, those of
    them that the feature map and the gates need. Activations are the caller's.

    Before training, with `init` "separate" each of them is an orthogonal matrix (H * width, D) of
    its own. With "fused" the first five are the rows of one orthogonal matrix and the last three
    those of another. A matrix with more rows than D has orthogonal columns, so the more projections
    share it, the smaller each starts: at the paper's sizes the first five give 0.45 for an input of
    unit variance, where separate ones give 1.
    """

    inputs: HeadsIn
    bias: Float[Array, "H N"]
    widths: tuple[tuple[str, int], ...] = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        *,
        heads: int,
        head_size: int,
        eta: int,
        feature: str,
        nu: int,
        gating: bool,
        horizon: tuple[float, float] | None,
        init: ProjectionInit = "separate",
        key: PRNGKeyArray,
    ):
        outer = feature == "outer"
        widths = {"q": head_size, "k": head_size, "v": head_size}
        if gating:
            wide = head_size if outer else feature_width(feature, head_size, eta=eta, nu=nu)
            widths |= {"beta": head_size, "gamma": wide}
        if outer:
            widths |= {"p1": eta, "p2": eta}
            if gating:
                widths |= {"p3": eta}
        self.widths = tuple(widths.items())
        weights, biases = jax.random.split(key)
        blocks = list(widths.values())
        if init == "fused":
            narrow = sum(width for name, width in widths.items() if name.startswith("p"))
            blocks = [width for width in (sum(blocks) - narrow, narrow) if width]
        self.inputs = HeadsIn(d_model, heads, blocks, key=weights)
        self.bias = jnp.zeros(self.inputs.weight.shape[:2])
        if horizon is not None and gating:
            start = {name: jnp.zeros((heads, width)) for name, width in widths.items()}
            for name, k in zip(("beta", "gamma"), jax.random.split(biases), strict=True):
                start[name] = write_bias(horizon, heads, widths[name], key=k)
            if outer:
                start["p3"] = jnp.full((heads, eta), _OPEN)
            self.bias = jnp.concatenate([start[name] for name in widths], axis=1)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T H N"]:
        columns = self.inputs(x)
        return columns + broadcast_like(self.bias, columns)

    def split(self, columns: Float[Array, "..."], axis: int = -1) -> dict[str, Float[Array, "..."]]:
        names, widths = zip(*self.widths, strict=True)
        bounds = list(itertools.accumulate(widths))[:-1]
        return dict(zip(names, jnp.split(columns, bounds, axis=axis), strict=True))


def feature_map(feature: str, x: Float[Array, "T H V"], *, nu: int) -> Float[Array, "T H K"]:
    """The feature maps without parameters, which the paper's ablation compares with its own."""
    match feature:
        case "dpfp":
            return dpfp(x, nu)
        case "elu1":
            return elu1(x)
        case _:
            return relu(x)


def check_feature_options(eta: int, nu: int, feature: str) -> None:
    validation.check_integer("eta", eta, minimum=1)
    validation.check_integer("nu", nu, minimum=1)
    validation.check_one_of("feature", feature, FEATURES)


def time_constants(horizon: tuple[float, float], width: int) -> Float[np.ndarray, " width"]:
    """tau of `width` elements, in steps, log-uniform over `horizon`: a step keeps 1 - 1 / tau."""
    return np.geomspace(*horizon, width)


def write_bias(
    horizon: tuple[float, float], heads: int, width: int, *, key: PRNGKeyArray
) -> Float[Array, "heads width"]:
    """Biases of a gate that writes sigmoid(bias) of an input and keeps the rest.

    Each head's time constants tau are log-uniform over `horizon`, in random order, and
    sigmoid(bias) = 1 / tau: the chrono initialisation of Tallec and Ollivier (2018).

    **Arguments:**

    - `horizon`: (shortest, longest) time constant, in steps.
    - `heads`, `width`: the shape of the biases.
    - `key`: draws the order.

    **Returns:**

    (heads, width).
    """
    biases = jnp.asarray(-np.log(time_constants(horizon, width) - 1), jnp.float32)
    keys = jax.random.split(key, heads)
    return jax.vmap(lambda k: jax.random.permutation(k, biases))(keys)


def spread_over_heads(
    horizon: tuple[float, float], heads: int, *, key: PRNGKeyArray
) -> Float[Array, " heads"]:
    """One time constant for each head, log-uniform over `horizon`, in random order."""
    tau = jnp.asarray(np.geomspace(*horizon, heads), jnp.float32)
    return jax.random.permutation(key, tau)


# --- acting ---------------------------------------------------------------------------------------

# Up to this many streams, a model's own step kernel is faster than XLA's products.
_STREAMS = 48


def prepare_for_inference(model: Any, *, streams: int = 1) -> Any:
    """The same model with its weights laid out for acting.

    **Arguments:**

    - `model`: any pytree of modules, for example an actor-critic.
    - `streams`: how many streams are stepped side by side.

    **Returns:**

    The model. A memory that has a kernel for its whole step uses it, if the streams are few;
    otherwise the weights of its layers are `TransposedWeight`s.
    """

    def prepare(layer: Any) -> Any:
        if isinstance(layer, Memory):
            return layer.prepare_for_inference()
        if not isinstance(layer, (Linear, HeadsIn, HeadsOut)) or layer.weight.size >= LARGE:
            return layer
        if isinstance(layer, Linear) and not layer.few_rows:
            return layer
        outputs = 2 if isinstance(layer, HeadsIn) else 1
        weight = TransposedWeight(layer.weight, outputs=outputs)
        return eqx.tree_at(lambda x: x.weight, layer, weight)

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Linear | HeadsIn | HeadsOut) or (
            isinstance(x, Memory) and streams <= _STREAMS and x.has_step_kernel
        )

    return jax.tree.map(prepare, model, is_leaf=is_leaf)
