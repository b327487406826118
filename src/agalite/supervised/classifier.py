"""A memory model that reads a sequence of tokens and says which class it belongs to."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import errors
from agalite.memory import Memory, Transformer, make_memory
from agalite.memory.layers import Dense, LayerNorm
from agalite.memory.lean import relu
from agalite.supervised.whole import from_nothing

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
        self, vocabulary: int, classes: int, *, memory: str, memory_options: dict[str, Any],
        embedding: int = 128, hidden: int = 128, pooling: str = "mean", key: PRNGKeyArray,
    ) -> None:  # fmt: skip
        errors.one_of("pooling", pooling, POOLINGS)
        e, m, h, o = jax.random.split(key, 4)
        self.embedding = jax.random.normal(e, (vocabulary, embedding))
        made = make_memory(memory, embedding, key=m, **memory_options)
        self.memory = from_nothing(made) if isinstance(made, Transformer) else made
        self.norm = LayerNorm(self.memory.output_size)
        self.hidden = Dense(self.memory.output_size, [hidden], key=h)
        out = Dense(hidden, [classes], key=o)
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
