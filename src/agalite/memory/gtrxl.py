"""GTrXL (Parisotto et al., 2020): Transformer-XL attention in the gated block."""

from dataclasses import dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from agalite import validation
from agalite.memory.block import Stack, StackConfig
from agalite.memory.window import WindowAttention


@dataclass(frozen=True)
class GTrXLConfig(StackConfig):
    memory: int = 128
    """M: how many inputs before the present one each layer can read."""
    cache: bool = True
    """Keep keys and values between steps; False projects the whole memory at every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.integer("memory", self.memory, minimum=1)
        validation.boolean("cache", self.cache)


class GTrXL(Stack):
    """input (T, input_size) -> (T, d_model), a true sliding window of M inputs per layer.

    Scanning and stepping see the same window, so that a policy's recomputed outputs equal those it
    acted with. State: layers * M * d_model floats, and as much again times 2 * heads * V / d_model
    with the cache. After an update of the weights, pass stored states through `refresh`.
    """

    config: GTrXLConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = GTrXLConfig(**options)

        def attention(key: PRNGKeyArray) -> WindowAttention:
            return WindowAttention(
                c.d_model,
                heads=c.heads,
                head_size=c.head_size,
                memory=c.memory,
                relative=True,
                cached=c.cache,
                key=key,
            )

        self._build(c, input_size, attention, key)
