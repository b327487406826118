"""A feed-forward network without memory: the control that tells whether a task needs one."""

from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.base import Memory
from agalite.memory.layers import MLP, Dense, GRUGate, LayerNorm
from agalite.ops.activations import relu


@dataclass(frozen=True)
class FeedforwardConfig:
    """Options of the network without memory."""

    d_model: int = 128
    """Width of the model and of its output."""
    layers: int = 4
    """Number of blocks."""
    ffn_size: int = 128
    """Hidden width of a block's MLP."""

    def __post_init__(self) -> None:
        for name in ("d_model", "layers", "ffn_size"):
            validation.check_integer(name, getattr(self, name), minimum=1)


class Layer(eqx.Module):
    """(T, D) -> (T, D): the second half of the transformer block."""

    norm: LayerNorm
    mlp: MLP
    gate: GRUGate

    def __init__(self, d_model: int, ffn_size: int, *, key: PRNGKeyArray):
        a, b = jax.random.split(key)
        self.norm = LayerNorm(d_model)
        self.mlp = MLP(d_model, ffn_size, key=a)
        self.gate = GRUGate(d_model, key=b)

    def __call__(self, h: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.gate(h, self.mlp(self.norm(h)))


class Feedforward(Memory):
    """A gated MLP: (T, input_size) -> (T, d_model), each input by itself. The state is empty.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `FeedforwardConfig`, by name.
    """

    embedding: Dense
    blocks: tuple[Layer, ...]
    config: FeedforwardConfig = eqx.field(static=True)
    input_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = FeedforwardConfig(**options)
        validation.check_integer("input_size", input_size, minimum=1)
        self.input_size, self.output_size = input_size, c.d_model
        first, *rest = jax.random.split(key, 1 + c.layers)
        self.embedding = Dense(input_size, [c.d_model], key=first)
        self.blocks = tuple(Layer(c.d_model, c.ffn_size, key=k) for k in rest)

    def initial_state(self) -> tuple[()]:
        return ()

    def _run(
        self, state: tuple[()], xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[tuple[()], Float[Array, "T D"]]:
        del resets  # there is nothing to forget
        h = relu(self.embedding(xs))
        for layer in self.blocks:
            h = layer(h)
        return state, h
