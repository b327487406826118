"""GaLiTe: the gated linear transformer (Algorithm 3)."""

from dataclasses import dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from agalite import validation
from agalite.memory.block import Stack, StackConfig
from agalite.memory.gated import MatrixAttention, check_features
from agalite.ops.recurrence import METHODS, Method


@dataclass(frozen=True)
class GaLiTeConfig(StackConfig):
    eta: int = 4
    """Feature-map expansion: keys and queries are eta * head_size wide."""
    feature: str = "outer"
    """outer (the learned map), elu1, dpfp or relu."""
    nu: int = 1
    """Expansion of the dpfp feature map."""
    gating: bool = True
    """False switches the gates off (the paper's ablation)."""
    horizon: tuple[float, float] | None = None
    """(shortest, longest) time constants of the gates at initialisation; None: as in the paper."""
    method: Method = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self.eta, self.nu, self.feature)
        validation.one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.horizon(self.horizon))
        validation.boolean("gating", self.gating)


class GaLiTe(Stack):
    """input (T, input_size) -> (T, d_model). State: layers * heads * (V + 1) * K floats."""

    config: GaLiTeConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = GaLiTeConfig(**options)
        c = self.config

        def attention(key: PRNGKeyArray) -> MatrixAttention:
            return MatrixAttention.make(c, gating=c.gating, horizon=c.horizon, key=key)

        self._build(c, input_size, attention, key)
