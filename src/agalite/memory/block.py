"""The transformer block of GTrXL, shared by all attentions, and the stack of blocks.

    h <- gate(h, relu(attention(norm(h))))
    h <- gate(h, mlp(norm(h)))

The models that the paper compares differ in their attention only.
"""

import abc
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.base import Memory
from agalite.memory.layers import MLP, Dense, GRUGate, LayerNorm
from agalite.ops.activations import relu
from agalite.ops.barriers import grad_barrier


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of the block that all models but GRU and LSTM share. The defaults are the paper's for
    T-Maze."""

    d_model: int = 128
    """Width of the model, and of its output."""
    layers: int = 4
    """Number of blocks."""
    ffn_size: int = 128
    """Hidden width of the block's MLP."""
    gate_bias: float = 2.0
    """Initial bias of the blocks' GRU gates: with 2, the paper's, a block starts close to the
    identity and its memory hardly shows in the output; with 0 half of the output is new."""
    embedding_bias: float = 0.0
    """Initial biases of the embedding are uniform within +- this. With 0, the paper's, the first
    layer norm removes the length of the input: of a vector of few numbers only the direction is
    left."""

    def __post_init__(self) -> None:
        for name in ("d_model", "layers", "ffn_size"):
            validation.check_integer(name, getattr(self, name), minimum=1)
        validation.check_number("gate_bias", self.gate_bias, minimum=-10.0, maximum=10.0)
        validation.check_number("embedding_bias", self.embedding_bias, minimum=0.0)


@dataclass(frozen=True)
class StackConfig(BlockConfig):
    """Sizes of the transformer models. The defaults are the paper's for T-Maze."""

    heads: int = 4
    """Attention heads of each block."""
    head_size: int = 64
    """Width of a head's values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heads", "head_size"):
            validation.check_integer(name, getattr(self, name), minimum=1)


class Attention(eqx.Module):
    """The attention of a block, with its norm and projections: (T, D) -> (T, D)."""

    @abc.abstractmethod
    def initial_state(self) -> Any: ...

    @abc.abstractmethod
    def __call__(
        self, state: Any, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]: ...

    def refresh(self, state: Any) -> Any:
        return state


class DiagonalMixer(Attention):
    """A memory in the place of the attention whose elements evolve by themselves.

        s_t = decay_t * s_{t-1} + drive_t

    The state is one vector (N,) of real numbers or `Complex` ones, in which every element has a
    decay and a drive of its own. A unit that has a nonlinearity applies it to s_t.
    """

    norm: eqx.AbstractVar[LayerNorm]

    @abc.abstractmethod
    def recurrence(self, x: Float[Array, "T D"]) -> tuple[Any, Any]:
        """decays and drives (T, N), arrays or both `Complex`, of the inputs after the norm."""

    @abc.abstractmethod
    def written(self, x: Float[Array, "T D"]) -> Float[Array, "T N"]:
        """The factor with which each element takes in its projection of the input."""


class Block(eqx.Module):
    """(T, D) -> (T, D): attention and MLP, each behind a GRU gate."""

    attention: Attention
    attention_gate: GRUGate
    norm: LayerNorm
    mlp: MLP
    mlp_gate: GRUGate

    def __init__(self, attention: Attention, config: BlockConfig, *, key: PRNGKeyArray):
        a, b, c = jax.random.split(key, 3)
        self.attention = attention
        self.attention_gate = GRUGate(config.d_model, bias=config.gate_bias, key=a)
        self.norm = LayerNorm(config.d_model)
        self.mlp = MLP(config.d_model, config.ffn_size, key=b)
        self.mlp_gate = GRUGate(config.d_model, bias=config.gate_bias, key=c)

    def __call__(
        self, state: Any, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]:
        state, attended = self.attention(state, h, resets)
        return state, self.behind_attention(h, attended)

    def behind_attention(
        self, h: Float[Array, "T D"], attended: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        h = grad_barrier(self.attention_gate(h, relu(attended)))
        return grad_barrier(self.mlp_gate(h, self.mlp(self.norm(h))))


class Stack(Memory):
    """Embedding (dense, ReLU) and blocks. The state is a tuple with one entry per block."""

    embedding: Dense
    blocks: tuple[Block, ...]
    input_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def initial_state(self) -> Any:
        return tuple(block.attention.initial_state() for block in self.blocks)

    def _run(
        self, state: Any, xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]:
        h = relu(self.embedding(xs))
        return self._run_blocks(state, h, resets)

    def _run_blocks(
        self, state: Any, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]:
        states = []
        for block, old in zip(self.blocks, state, strict=True):
            new, h = block(old, h, resets)
            states.append(new)
        return tuple(states), h

    def refresh(self, state: Any) -> Any:
        return tuple(
            block.attention.refresh(old) for block, old in zip(self.blocks, state, strict=True)
        )

    def _build(
        self, config: BlockConfig, input_size: int, attention: Any, key: PRNGKeyArray
    ) -> None:
        """Fills the fields; `attention(key)` makes the attention of one block."""
        validation.check_integer("input_size", input_size, minimum=1)
        embed, *layers = jax.random.split(key, 1 + config.layers)
        blocks = []
        for layer in layers:
            a, b = jax.random.split(layer)
            blocks.append(Block(attention(a), config, key=b))
        self.embedding = Dense(input_size, [config.d_model], key=embed)
        if (limit := config.embedding_bias) > 0:
            key = jax.random.fold_in(embed, 1)
            bias = jax.random.uniform(key, (config.d_model,), minval=-limit, maxval=limit)
            self.embedding = eqx.tree_at(lambda d: d.bias, self.embedding, bias)
        self.blocks = tuple(blocks)
        self.input_size, self.output_size = input_size, config.d_model
