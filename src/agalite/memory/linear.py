"""The linear transformer (Algorithm 2) in the shared block."""

from dataclasses import dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from agalite import validation
from agalite.memory.block import Stack, StackConfig
from agalite.memory.gated import MatrixAttention, check_features
from agalite.ops.recurrence import METHODS, Method


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
        validation.one_of("method", self.method, METHODS)


class LinearTransformer(Stack):
    """input (T, input_size) -> (T, d_model). State: layers * heads * (V + 1) * K floats."""

    config: LinearConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = LinearConfig(**options)
        c = self.config

        def attention(key: PRNGKeyArray) -> MatrixAttention:
            return MatrixAttention.make(c, gating=False, horizon=None, key=key)

        self._build(c, input_size, attention, key)
