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


class TracedAttention(Attention):
    """An attention, or what stands in its place, that can have traces (`ops.traces`)."""

    @property
    def has_traces(self) -> bool:
        return True

    @abc.abstractmethod
    def initial_trace(self) -> Any:
        """Of the initial state: zeros. Without traces an error that says why."""

    @abc.abstractmethod
    def traced(
        self,
        state: Any,
        trace: Any,
        h: Float[Array, "T D"],
        resets: Bool[Array, " T"],
        past: Any,
    ) -> tuple[Any, Float[Array, "T D"], Any]:
        """As a call, with a gradient that reaches weights of `past` through the trace.

        Also returns the trace after the last input.
        """


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


class TracedStack(Stack):
    """A stack of blocks whose attentions can have traces."""

    @property
    def has_traces(self) -> bool:
        return self._attentions()[0].has_traces

    def initial_trace(self) -> tuple[Any, ...]:
        """One trace for each layer (`ops.traces`), zeros.

        With fixed weights the gradient of a sequence equals that of full backpropagation through
        all of the past for what a model of one layer computes its recurrence from: the norm before
        it, projections, gates and rates; and for everything above them. In a stack every layer has
        its own trace. Left out is the effect that weights had on the past inputs of the layers
        above them: of the norm, recurrence, output, gates and MLP of a layer through the states of
        later layers, and of the embedding, and any encoder below it, through all states. Their
        gradients reach back to the beginning of the sequence.
        """
        return tuple(attention.initial_trace() for attention in self._attentions())

    def _run_traced(
        self,
        state: Any,
        trace: tuple[Any, ...],
        xs: Float[Array, "T input"],
        resets: Bool[Array, " T"],
        past: Any,
    ) -> tuple[Any, Float[Array, "T D"], tuple[Any, ...]]:
        h = relu(self.embedding(xs))
        states, traces = [], []
        layers = zip(
            self._plain_blocks(), self._layer_states(state), trace, past._attentions(), strict=True
        )
        for block, old, old_trace, of_past in layers:
            attention: Any = block.attention
            new, out, new_trace = attention.traced(old, old_trace, h, resets, of_past)
            h = block.behind_attention(h, out)
            states.append(new)
            traces.append(new_trace)
        return self._join_states(state, tuple(states)), h, tuple(traces)

    def _attentions(self) -> tuple[TracedAttention, ...]:
        attentions: Any = tuple(block.attention for block in self._plain_blocks())
        return attentions

    # A model that keeps its layers' weights or states in another form overrides these.

    def _plain_blocks(self) -> tuple[Block, ...]:
        return self.blocks

    def _layer_states(self, state: Any) -> tuple[Any, ...]:
        return state

    def _join_states(self, before: Any, layers: tuple[Any, ...]) -> Any:
        del before
        return layers
