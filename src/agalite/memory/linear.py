"""The linear transformer (Algorithm 2) in the shared block."""

from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import errors
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.gated import Projection, check_features
from agalite.memory.layers import HeadsOut, LayerNorm
from agalite.ops.attention import linear_attention
from agalite.ops.recurrence import METHODS, Method
from agalite.ops.state import MatrixState, matrix_state


@dataclass(frozen=True)
class LinearConfig(StackConfig):
    feature: str = "elu1"
    """elu1 (as published), relu, dpfp or outer."""
    eta: int = 4
    """Expansion of the outer feature map."""
    nu: int = 1
    """Expansion of the dpfp feature map."""
    method: Method = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self.eta, self.nu, self.feature)
        errors.one_of("method", self.method, METHODS)


class LinearAttention(Attention):
    norm: LayerNorm
    project: Projection
    out: HeadsOut
    config: LinearConfig = eqx.field(static=True)

    def __init__(self, c: LinearConfig, *, key: PRNGKeyArray):
        a, b = jax.random.split(key)
        self.norm = LayerNorm(c.d_model)
        self.project = Projection(
            c.d_model, heads=c.heads, head_size=c.head_size, eta=c.eta, feature=c.feature,
            nu=c.nu, gating=False, horizon=None, key=a,
        )  # fmt: skip
        self.out = HeadsOut(c.heads, c.head_size, c.d_model, key=b)
        self.config = c

    def initial_state(self) -> MatrixState:
        c = self.config
        return matrix_state(c.heads, self.project.width, c.head_size, self.out.weight.dtype)

    def __call__(
        self, state: MatrixState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[MatrixState, Float[Array, "T D"]]:
        x = self.project(self.norm(h))
        state, attended = linear_attention(x.q, x.k, x.v, resets, state, method=self.config.method)
        return state, self.out(attended)


class LinearTransformer(Stack):
    """input (T, input_size) -> (T, d_model). State: layers * heads * (V + 1) * K floats."""

    config: LinearConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = LinearConfig(**options)
        self._build(self.config, input_size, lambda k: LinearAttention(self.config, key=k), key)
