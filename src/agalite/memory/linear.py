"""The linear transformer (Algorithm 2) in the shared block."""

from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.layers import (
    FusedProjection,
    HeadsOut,
    LayerNorm,
    Projected,
    check_feature_options,
    feature_map,
)
from agalite.ops.activations import relu
from agalite.ops.features import Outer, feature_width
from agalite.ops.linear import MatrixState, initial_state, linear_attention
from agalite.ops.recurrence import METHODS, Method


@dataclass(frozen=True)
class LinearConfig(StackConfig):
    """Options of the linear transformer (Algorithm 2)."""

    feature: str = "elu1"
    """Feature map: elu1 (as published), relu, dpfp or outer."""
    eta: int = 4
    """Expansion of the outer feature map."""
    nu: int = 1
    """Expansion of the dpfp feature map."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential, associative or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_feature_options(self.eta, self.nu, self.feature)
        validation.check_one_of("method", self.method, METHODS)


class LinearAttention(Attention):
    """(T, D) -> (T, D): norm, projections, Algorithm 2's memory, output."""

    norm: LayerNorm
    project: FusedProjection
    out: HeadsOut
    config: LinearConfig = eqx.field(static=True)

    def __init__(self, config: LinearConfig, *, key: PRNGKeyArray):
        c = self.config = config
        a, b = jax.random.split(key)
        self.norm = LayerNorm(c.d_model)
        self.project = FusedProjection(
            c.d_model,
            heads=c.heads,
            head_size=c.head_size,
            eta=c.eta,
            feature=c.feature,
            nu=c.nu,
            gating=False,
            horizon=None,
            key=a,
        )
        self.out = HeadsOut(c.heads, c.head_size, c.d_model, key=b)

    def initial_state(self) -> MatrixState:
        c = self.config
        width = feature_width(c.feature, c.head_size, eta=c.eta, nu=c.nu)
        return initial_state(c.heads, width, c.head_size, self.out.weight.dtype)

    def projections(self, columns: Float[Array, "T H N"]) -> Projected:
        """Lines 1 to 3 of Algorithm 2, from the columns of `project`."""
        c, y = self.config, self.project.split(columns)
        if c.feature == "outer":
            q, k = Outer(relu(y["p2"]), relu(y["q"])), Outer(relu(y["p1"]), relu(y["k"]))
        else:
            q, k = (feature_map(c.feature, y[name], nu=c.nu) for name in ("q", "k"))
        return Projected(q, k, y["v"], None, None)

    def __call__(
        self, state: MatrixState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[MatrixState, Float[Array, "T D"]]:
        q, k, v, *_ = self.projections(self.project(self.norm(h)))
        # Lines 4 to 6
        state, attended = linear_attention(q, k, v, resets, state, method=self.config.method)
        return state, self.out(attended)


class LinearTransformer(Stack):
    """The linear transformer: (T, input_size) -> (T, d_model).

    The state is a matrix per head, layers * heads * (V + 1) * K floats. Nothing decays.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `LinearConfig`, by name.
    """

    config: LinearConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = LinearConfig(**options)
        self._build(c, input_size, lambda key: LinearAttention(c, key=key), key)
