"""GaLiTe: the gated linear transformer (Algorithm 3).

The attention is written out here, to be read beside the algorithm. The block around it is
`block.py`, its layers are in `layers.py`, and lines 9 to 11 are `ops/galite/reference.py`.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.layers import (
    PROJECTION_INITS,
    FusedProjection,
    HeadsOut,
    LayerNorm,
    Projected,
    ProjectionInit,
    check_feature_options,
    feature_map,
)
from agalite.ops.activations import relu, sigmoid
from agalite.ops.features import Outer, feature_width
from agalite.ops.galite import attend
from agalite.ops.galite.reference import DECAYS, Decay
from agalite.ops.linear import MatrixState, initial_state
from agalite.ops.recurrence import METHODS, Method


@dataclass(frozen=True)
class GaLiTeConfig(StackConfig):
    """Options of GaLiTe. The defaults are the paper's for T-Maze."""

    eta: int = 4
    """Feature-map expansion: keys and queries are eta * head_size wide."""
    feature: str = "outer"
    """Feature map: outer (the paper's learned map), elu1, dpfp or relu."""
    nu: int = 1
    """Expansion of the dpfp feature map."""
    gating: bool = True
    """Whether old memories decay; without is the paper's ablation."""
    projection_init: ProjectionInit = "separate"
    """How the projections start: separate, an orthogonal matrix each, or fused, one for q, k, v,
    beta and gamma and one for p1, p2 and p3, as in the authors' code."""
    decay: Decay = "paper"
    """What is left of the matrix at a step: paper, (1 - beta) (x) (1 - gamma), or published,
    1 - beta (x) gamma, which the authors' code has and which is slower to compute."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant of the gates at initialisation; None: zero biases. With
    decay published the biases are the same, but an element of the matrix starts with the product of
    its two gates' time constants, and the normaliser s with gamma's alone."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential, associative or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_feature_options(self.eta, self.nu, self.feature)
        validation.check_one_of("projection_init", self.projection_init, PROJECTION_INITS)
        validation.check_one_of("decay", self.decay, DECAYS)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))
        validation.check_boolean("gating", self.gating)


class GaLiTeAttention(Attention):
    """(T, D) -> (T, D): norm, projections, Algorithm 3's memory, output."""

    norm: LayerNorm
    project: FusedProjection
    out: HeadsOut
    config: GaLiTeConfig = eqx.field(static=True)

    def __init__(self, config: GaLiTeConfig, *, key: PRNGKeyArray):
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
            gating=c.gating,
            horizon=c.horizon,
            init=c.projection_init,
            key=a,
        )
        self.out = HeadsOut(c.heads, c.head_size, c.d_model, key=b)

    def initial_state(self) -> MatrixState:
        c = self.config
        width = feature_width(c.feature, c.head_size, eta=c.eta, nu=c.nu)
        return initial_state(c.heads, width, c.head_size, self.out.weight.dtype)

    def projections(self, columns: Float[Array, "T H N"]) -> Projected:
        """Lines 4 to 8 of Algorithm 3, from the columns of `project`."""
        c, y = self.config, self.project.split(columns)
        beta = sigmoid(y["beta"]) if c.gating else None  # line 7
        gamma = sigmoid(y["gamma"]) if c.gating else None
        if c.feature == "outer":
            q = Outer(relu(y["p2"]), relu(y["q"]))  # line 5: f(relu(W_p2 x) (x) relu(W_Q x))
            k = Outer(relu(y["p1"]), relu(y["k"]))  # line 4: f(relu(W_p1 x) (x) relu(W_K x))
            # line 8: f(sigmoid(W_p3 x) (x) sigmoid(W_gamma x))
            gamma = None if gamma is None else Outer(sigmoid(y["p3"]), gamma)
        else:
            q, k = (feature_map(c.feature, y[name], nu=c.nu) for name in ("q", "k"))
        return Projected(q, k, y["v"], beta, gamma)  # line 6: v = W_V x

    def __call__(
        self, state: MatrixState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[MatrixState, Float[Array, "T D"]]:
        columns = self.project(self.norm(h))
        from_columns = self.config.feature == "outer" and self.config.gating
        # Lines 9 to 11
        state, attended = attend(
            *self.projections(columns),
            resets,
            state,
            decay=self.config.decay,
            method=self.config.method,
            columns=columns if from_columns else None,
        )
        return state, self.out(attended)


class GaLiTe(Stack):
    """The gated linear transformer: (T, input_size) -> (T, d_model).

    The state is a matrix per head, layers * heads * (V + 1) * K floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `GaLiTeConfig`, by name.
    """

    config: GaLiTeConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = GaLiTeConfig(**options)
        self._build(c, input_size, lambda key: GaLiTeAttention(c, key=key), key)
