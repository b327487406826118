"""The canonical transformer (Algorithm 1), causal, with a finite context, in the shared block."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Stack, StackConfig
from agalite.memory.window import WindowAttention, sinusoids
from agalite.ops.activations import relu
from agalite.ops.delta import advance_phase

# Absolute positions count inputs since the reset and start over after this many.
_POSITIONS = 2**16


@dataclass(frozen=True)
class TransformerConfig(StackConfig):
    context: int = 128
    """How many inputs before the present one each layer can read."""
    cache: bool = True
    """Keep keys and values between steps; False projects the whole context at every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.integer("context", self.context, minimum=1)
        validation.boolean("cache", self.cache)


class TransformerState(NamedTuple):
    layers: tuple[Any, ...]
    position: Int[Array, ""]


class Transformer(Stack):
    """input (T, input_size) -> (T, d_model), with sinusoidal positions added to the embedding.

    Each layer reads the last `context` inputs and its own, since the reset.
    """

    config: TransformerConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = TransformerConfig(**options)

        def attention(key: PRNGKeyArray) -> WindowAttention:
            return WindowAttention(
                c.d_model,
                heads=c.heads,
                head_size=c.head_size,
                memory=c.context,
                relative=False,
                cached=c.cache,
                key=key,
            )

        self._build(c, input_size, attention, key)

    def initial_state(self) -> TransformerState:
        return TransformerState(super().initial_state(), jnp.zeros((), jnp.int32))

    def refresh(self, state: TransformerState) -> TransformerState:
        return state._replace(layers=super().refresh(state.layers))

    def _run(
        self, state: TransformerState, xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[TransformerState, Float[Array, "T D"]]:
        positions = advance_phase(state.position, resets, _POSITIONS)
        h = relu(self.embedding(xs))
        h = h + sinusoids(positions, self.output_size).astype(h.dtype)
        layers, h = self._run_blocks(state.layers, h, resets)
        return TransformerState(layers, positions[-1]), h
