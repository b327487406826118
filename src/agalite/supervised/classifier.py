"""A classifier of token sequences around a memory model (Appendix D)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.memory import Memory, Transformer, make_memory
from agalite.memory.block import Attention
from agalite.memory.layers import Dense, HeadsIn, HeadsOut, LayerNorm
from agalite.memory.transformer import WindowAttention
from agalite.ops.activations import relu
from agalite.ops.resets import episode_starts
from agalite.ops.softmax import window_attention

POOLINGS = ("mean", "last")


class Classifier(eqx.Module):
    """Tokens (T, B) in packed rows (`batches.py`) -> logits (B, S, classes) of the S slots per row.

    Token embedding, memory, the mean of the memory's outputs over the sequence or the last of them,
    layer norm, a hidden layer with ReLU, logits. Attention is causal, as everywhere in this
    library; the encoders of the benchmark attend in both directions.

    **Arguments:**

    - `vocabulary`, `classes`: the numbers of tokens and of classes.
    - `memory`, `memory_options`: the memory model and its options.
    - `embedding`: width of a token's embedding.
    - `hidden_size`: width of the hidden layer.
    - `pooling`: "mean" or "last".
    - `key`: draws the weights.
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
        validation.check_one_of("pooling", pooling, POOLINGS)
        e, m, h, o = jax.random.split(key, 4)
        self.embedding = jax.random.normal(e, (vocabulary, embedding))
        model = make_memory(memory, embedding, key=m, **memory_options)
        self.memory = without_state(model) if isinstance(model, Transformer) else model
        self.norm = LayerNorm(self.memory.output_size)
        self.hidden = Dense(self.memory.output_size, [hidden_size], key=h)
        out = Dense(hidden_size, [classes], key=o)
        # With small weights all classes start almost equally likely.
        self.out = eqx.tree_at(lambda x: x.weight, out, 0.01 * out.weight)
        self.pooling = pooling

    def __call__(
        self,
        tokens: Int[Array, "T B"],
        resets: Bool[Array, "T B"],
        starts: Int[Array, "B S"],
        ends: Int[Array, "B S"],
    ) -> Float[Array, "B S classes"]:
        """The logits of every slot; those of an empty slot mean nothing."""
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
        """The pooled outputs of one row's slots, as a matrix product; zero for an empty slot."""
        t = jnp.arange(ys.shape[0])
        first, end = starts[:, None], ends[:, None]
        if self.pooling == "last":
            weights = ((t == end - 1) & (end > first)).astype(ys.dtype)
        else:
            inside = (t >= first) & (t < end)
            weights = inside / jnp.maximum(end - first, 1).astype(ys.dtype)
        return weights @ ys

    @property
    def parameter_count(self) -> int:
        """The number of parameters; the arrays may be shapes."""
        leaves = jax.tree.leaves(self)
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))


class FullAttention(Attention):
    """`WindowAttention` over sequences that start with an empty window; it has no state.

    A stateful window would be attended to although all of it is masked.
    """

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


def without_state(memory: Transformer) -> Transformer:
    """A transformer with the same weights whose `scan` always starts from an empty window.

    The outputs equal those of `memory.scan` from `memory.initial_state()`.
    """
    attentions = [block.attention for block in memory.blocks]
    assert all(isinstance(x, WindowAttention) for x in attentions)
    return eqx.tree_at(
        lambda m: [block.attention for block in m.blocks],
        memory,
        [FullAttention(x) for x in attentions if isinstance(x, WindowAttention)],
    )
