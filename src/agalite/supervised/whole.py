"""The canonical transformer on whole sequences that begin with nothing before them.

`memory.Transformer` carries a window of past inputs and attends to it. Here a row always starts
fresh, so that window would be masked from end to end, and half of the work with it.
"""

import equinox as eqx
from jaxtyping import Array, Bool, Float

from agalite.memory import Transformer
from agalite.memory.block import Attention
from agalite.memory.layers import HeadsIn, HeadsOut, LayerNorm
from agalite.memory.window import WindowAttention
from agalite.ops.state import episode_starts
from agalite.ops.window import window_attention


class WholeAttention(Attention):
    """`WindowAttention` from an empty window, (T, D) -> (T, D); it keeps no state."""

    norm: LayerNorm
    query: HeadsIn
    key_value: HeadsIn
    out: HeadsOut
    window: int = eqx.field(static=True)

    def __init__(self, attention: WindowAttention) -> None:
        self.norm, self.query = attention.norm, attention.query
        self.key_value, self.out = attention.key_value, attention.out
        self.window = attention.memory

    def initial_state(self) -> tuple[()]:
        return ()

    def __call__(
        self, state: tuple[()], h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[tuple[()], Float[Array, "T D"]]:
        x = self.norm(h)
        keys_values = self.key_value(x)
        width = keys_values.shape[-1] // 2
        attended = window_attention(
            self.query(x), keys_values[..., :width], keys_values[..., width:],
            episode_starts(resets), window=self.window, scale=width**-0.5,
        )  # fmt: skip
        return state, self.out(attended)


def from_nothing(memory: Transformer) -> Transformer:
    """The same weights and the same outputs, for a `scan` from `initial_state()` alone."""
    attentions = [block.attention for block in memory.blocks]
    assert all(isinstance(x, WindowAttention) for x in attentions)
    return eqx.tree_at(
        lambda m: [block.attention for block in m.blocks],
        memory,
        [WholeAttention(x) for x in attentions if isinstance(x, WindowAttention)],
    )
