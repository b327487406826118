"""Projections of the linear attentions: queries, keys, values, gates and the feature map.

Lines 2-6 of Algorithm 4 (and 4-8 of Algorithm 3): what comes before the memory is updated. GaLiTe,
AGaLiTe and the linear transformer share them; the ablations of the paper are its options.
"""

import itertools
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Attention
from agalite.memory.layers import HeadsIn, HeadsOut, LayerNorm, write_bias
from agalite.ops.activations import relu, sigmoid
from agalite.ops.attention import galite_attention
from agalite.ops.features import FEATURES, Outer, dpfp, elu1, feature_width
from agalite.ops.matmul import broadcast_like
from agalite.ops.state import MatrixState, matrix_state

# sigmoid(3) = 0.95: with a horizon, gamma's narrow factor starts open and leaves the time constants
# to the wide one.
_OPEN = 3.0


def check_features(eta: int, nu: int, feature: str) -> None:
    validation.integer("eta", eta, minimum=1)
    validation.integer("nu", nu, minimum=1)
    validation.one_of("feature", feature, FEATURES)


class Projected(NamedTuple):
    q: Float[Array, "T H K"] | Outer
    k: Float[Array, "T H K"] | Outer
    v: Float[Array, "T H V"]
    beta: Float[Array, "T H V"] | None
    gamma: Float[Array, "T H K"] | Outer | None


class Projection(eqx.Module):
    """(T, D) -> q, k, v, beta, gamma: `columns` in one matrix product, then `activated`."""

    inputs: HeadsIn
    bias: Float[Array, "H N"]
    heads: int = eqx.field(static=True)
    head_size: int = eqx.field(static=True)
    eta: int = eqx.field(static=True)
    feature: str = eqx.field(static=True)
    nu: int = eqx.field(static=True)
    gating: bool = eqx.field(static=True)

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
        key: PRNGKeyArray,
    ):
        self.heads, self.head_size, self.eta = heads, head_size, eta
        self.feature, self.nu, self.gating = feature, nu, gating
        weights, biases = jax.random.split(key)
        self.inputs = HeadsIn(d_model, heads, list(self._widths().values()), key=weights)
        self.bias = jnp.zeros(self.inputs.weight.shape[:2])
        if horizon is not None and gating:
            self.bias = self._spread(horizon, biases)

    @property
    def width(self) -> int:
        return feature_width(self.feature, self.head_size, eta=self.eta, nu=self.nu)

    def _widths(self) -> dict[str, int]:
        """Per head, in the order in which they lie in the weights."""
        widths = {"q": self.head_size, "k": self.head_size, "v": self.head_size}
        if self.gating:
            gamma = self.head_size if self.feature == "outer" else self.width
            widths |= {"beta": self.head_size, "gamma": gamma}
        if self.feature == "outer":
            widths |= {"p1": self.eta, "p2": self.eta}
            if self.gating:
                widths |= {"p3": self.eta}
        return widths

    def _spread(self, horizon: tuple[float, float], key: PRNGKeyArray) -> Float[Array, "H N"]:
        widths = self._widths()
        biases = {name: jnp.zeros((self.heads, width)) for name, width in widths.items()}
        for name, k in zip(("beta", "gamma"), jax.random.split(key), strict=True):
            biases[name] = write_bias(horizon, self.heads, widths[name], key=k)
        if self.feature == "outer":
            biases["p3"] = jnp.full((self.heads, self.eta), _OPEN)
        return jnp.concatenate([biases[name] for name in widths], axis=1)

    @property
    def raw(self) -> bool:
        """Whether kernels can start from `columns` as they are (`ops/columns.py`)."""
        return self.feature == "outer" and self.gating

    def __call__(self, x: Float[Array, "T D"]) -> Projected:
        return self.activated(self.columns(x))

    def columns(self, x: Float[Array, "T D"]) -> Float[Array, "T H N"]:
        columns = self.inputs(x)
        return columns + broadcast_like(self.bias, columns)

    def activated(self, columns: Float[Array, "T H N"]) -> Projected:
        widths = self._widths()
        bounds = list(itertools.accumulate(widths.values()))[:-1]
        y = dict(zip(widths, jnp.split(columns, bounds, axis=-1), strict=True))
        beta = sigmoid(y["beta"]) if self.gating else None
        gamma = sigmoid(y["gamma"]) if self.gating else None
        match self.feature:
            case "outer":
                q = Outer(relu(y["p2"]), relu(y["q"]))
                k = Outer(relu(y["p1"]), relu(y["k"]))
                gamma = None if gamma is None else Outer(sigmoid(y["p3"]), gamma)
            case "dpfp":
                q, k = dpfp(y["q"], self.nu), dpfp(y["k"], self.nu)
            case _:
                phi = {"elu1": elu1, "relu": relu}[self.feature]
                q, k = phi(y["q"]), phi(y["k"])
        return Projected(q, k, y["v"], beta, gamma)


class FeatureAttention(Attention):
    """Norm, projection and output of a linear attention; subclasses add the memory between."""

    norm: LayerNorm
    project: Projection
    out: HeadsOut
    config: Any = eqx.field(static=True)

    @classmethod
    def make(
        cls, config: Any, *, gating: bool, horizon: tuple[float, float] | None, key: PRNGKeyArray
    ) -> Self:
        a, b = jax.random.split(key)
        project = Projection(
            config.d_model,
            heads=config.heads,
            head_size=config.head_size,
            eta=config.eta,
            feature=config.feature,
            nu=config.nu,
            gating=gating,
            horizon=horizon,
            key=a,
        )
        out = HeadsOut(config.heads, config.head_size, config.d_model, key=b)
        return cls(LayerNorm(config.d_model), project, out, config)


class MatrixAttention(FeatureAttention):
    """A matrix per head: Algorithm 3 with gates, Algorithm 2 without."""

    def initial_state(self) -> MatrixState:
        c = self.config
        return matrix_state(c.heads, self.project.width, c.head_size, self.out.weight.dtype)

    def __call__(
        self, state: MatrixState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[MatrixState, Float[Array, "T D"]]:
        columns = self.project.columns(self.norm(h))
        state, attended = galite_attention(
            *self.project.activated(columns),
            resets,
            state,
            method=self.config.method,
            columns=columns if self.project.raw else None,
        )
        return state, self.out(attended)
