"""A memory model that reads a sequence of tokens and says which class it belongs to."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.memory import Memory, Transformer, make_memory
from agalite.memory.block import Attention
from agalite.memory.layers import Dense, HeadsIn, HeadsOut, LayerNorm
from agalite.memory.window import WindowAttention
from agalite.ops.activations import relu
from agalite.ops.state import episode_starts
from agalite.ops.window import window_attention

POOLINGS = ("mean", "last")


class Classifier(eqx.Module):
    """tokens (T, B) in packed rows -> logits (B, S, classes), a row of S slots (see `packing`).

    Token embedding, memory, the mean of its outputs over the sequence or the last of them, then
    norm, a hidden layer with ReLU, and the logits. The memory reads from left to right: a model
    that attends looks back only, unlike the encoders of the benchmark.
    """

    embedding: Float[Array, "vocabulary E"]
    memory: Memory
    norm: LayerNorm
    hidden: Dense
    out: Dense
    pooling: str = eqx.field(static=True)

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        memory: str,
        memory_options: dict[str, Any],
        embedding: int = 128,
        hidden_size: int = 128,
        pooling: str = "mean",
        key: PRNGKeyArray,
    ) -> None:
        validation.one_of("pooling", pooling, POOLINGS)
        e, m, h, o = jax.random.split(key, 4)
        self.embedding = jax.random.normal(e, (vocabulary, embedding))
        made = make_memory(memory, embedding, key=m, **memory_options)
        self.memory = from_nothing(made) if isinstance(made, Transformer) else made
        self.norm = LayerNorm(self.memory.output_size)
        self.hidden = Dense(self.memory.output_size, [hidden_size], key=h)
        out = Dense(hidden_size, [classes], key=o)
        # All classes start equally likely, nearly.
        self.out = eqx.tree_at(lambda x: x.weight, out, 0.01 * out.weight)
        self.pooling = pooling

    def __call__(
        self,
        tokens: Int[Array, "T B"],
        resets: Bool[Array, "T B"],
        starts: Int[Array, "B S"],
        ends: Int[Array, "B S"],
    ) -> Float[Array, "B S classes"]:
        xs = self.embedding[tokens]
        state = self.memory.initial_state()
        run = jax.vmap(self.memory.scan, in_axes=(None, 1, 1), out_axes=(0, 1))
        _, ys = run(state, xs, resets)
        pooled = jax.vmap(self._pool, in_axes=(1, 0, 0))(ys, starts, ends)
        rows, slots, width = pooled.shape
        flat = pooled.reshape(rows * slots, width)
        return self.out(relu(self.hidden(self.norm(flat)))).reshape(rows, slots, -1)

    def _pool(
        self, ys: Float[Array, "T D"], starts: Int[Array, " S"], ends: Int[Array, " S"]
    ) -> Float[Array, "S D"]:
        """As one small matrix product; zero for an empty slot."""
        t = jnp.arange(ys.shape[0])
        first, end = starts[:, None], ends[:, None]
        if self.pooling == "last":
            share = ((t == end - 1) & (end > first)).astype(ys.dtype)
        else:
            inside = (t >= first) & (t < end)
            share = inside / jnp.maximum(end - first, 1).astype(ys.dtype)
        return share @ ys

    @property
    def parameter_count(self) -> int:
        """Of a model of shapes too."""
        leaves = jax.tree.leaves(self)
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))


# --- The canonical transformer on whole sequences that begin with nothing before them -------------


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
            self.query(x),
            keys_values[..., :width],
            keys_values[..., width:],
            episode_starts(resets),
            window=self.window,
            scale=width**-0.5,
        )
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
