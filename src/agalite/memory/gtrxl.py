"""GTrXL (Parisotto et al., 2020): Transformer-XL attention in the gated block.

The attention, its ring buffer and its cache are `transformer.WindowAttention` with relative
positions; the block is `block.py`.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from agalite import validation
from agalite.memory.block import Stack, StackConfig
from agalite.memory.layers import lecun_weights
from agalite.memory.transformer import WindowAttention


@dataclass(frozen=True)
class GTrXLConfig(StackConfig):
    """Options of GTrXL. The sizes are the paper's for T-Maze."""

    memory: int = 128
    """M, the number of inputs before the present one that each layer can read."""
    cache: bool = True
    """Keep keys and values between steps; otherwise every step projects the whole memory."""
    init: Literal["orthogonal", "lecun"] = "orthogonal"
    """Initial weights: orthogonal (gain sqrt(2), as in the other models) or lecun (normal with
    variance 1 / inputs, as in the paper's code)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("memory", self.memory, minimum=1)
        validation.check_boolean("cache", self.cache)
        validation.check_one_of("init", self.init, ("orthogonal", "lecun"))


class GTrXL(Stack):
    """Gated Transformer-XL: (T, input_size) -> (T, d_model).

    Each layer reads a true sliding window of M inputs. Scanning and stepping see the same window,
    so the outputs that a learner recomputes equal those that acted. The state has layers * M *
    d_model floats, and with the cache 2 * layers * M * heads * V more. After an update of the
    weights, pass stored states through `refresh`.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `GTrXLConfig`, by name.
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
        if c.init == "lecun":
            parts = self.embedding, self.blocks
            self.embedding, self.blocks = lecun_weights(parts, key=jax.random.fold_in(key, 1))
