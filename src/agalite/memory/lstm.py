"""LSTM (Hochreiter and Schmidhuber, 1997), with the paper's embedding before it."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.base import Memory
from agalite.memory.layers import Dense, write_bias
from agalite.ops.activations import relu, sigmoid, tanh
from agalite.ops.rnn import run_cell


@dataclass(frozen=True)
class LSTMConfig:
    """The defaults are the paper's for T-Maze."""

    d_model: int = 600
    """Width of the embedding; unused without one."""
    hidden_size: int = 1200
    """Width of the recurrent state and of the output."""
    embedding: bool = True
    """Whether a dense layer with ReLU comes before the cell; the authors' code has none."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant of the cell at initialisation; None: zero biases."""

    def __post_init__(self) -> None:
        validation.check_integer("d_model", self.d_model, minimum=1)
        validation.check_integer("hidden_size", self.hidden_size, minimum=1)
        validation.check_boolean("embedding", self.embedding)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


def _cell(x: Array, h: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
    i, f, g, o = jnp.split(x + h, 4)
    c = sigmoid(f) * state[1] + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


class LSTM(Memory):
    """An embedding (dense, ReLU), which can be left out, and an LSTM.

    (T, input_size) -> (T, hidden_size).

    The state has 2 * `hidden_size` floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `LSTMConfig`, by name.
    """

    embedding: Dense | None
    from_input: Dense
    from_hidden: Dense
    config: LSTMConfig = eqx.field(static=True)
    input_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = LSTMConfig(**options)
        validation.check_integer("input_size", input_size, minimum=1)
        self.input_size, self.output_size = input_size, c.hidden_size
        a, b, d, e = jax.random.split(key, 4)
        self.embedding = Dense(input_size, [c.d_model], key=a) if c.embedding else None
        width = c.d_model if c.embedding else input_size
        self.from_input = Dense(width, [c.hidden_size] * 4, key=b)
        self.from_hidden = Dense(c.hidden_size, [c.hidden_size] * 4, key=d)
        if c.horizon is not None:
            write = write_bias(c.horizon, 1, c.hidden_size, key=e)[0]
            bias = self.from_input.bias.at[: 2 * c.hidden_size].set(
                jnp.concatenate([write, -write])
            )
            self.from_input = eqx.tree_at(lambda d: d.bias, self.from_input, bias)

    def initial_state(self) -> tuple[Float[Array, " hidden"], Float[Array, " hidden"]]:
        zero = jnp.zeros(self.config.hidden_size, self.dtype)
        return zero, zero

    def input_part(self, xs: Float[Array, "T input"]) -> Float[Array, "T 4*hidden"]:
        """What the inputs (T, input) add to the cell's pre-activations (T, 4 * hidden)."""
        return self.from_input(xs if self.embedding is None else relu(self.embedding(xs)))

    def _run(
        self, state: tuple[Array, Array], xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[tuple[Array, Array], Float[Array, "T hidden"]]:
        inputs = self.input_part(xs)
        hidden, cell = run_cell(
            _cell, self.from_hidden.weight, self.from_hidden.bias, inputs, resets, state
        )
        return (hidden[-1], cell[-1]), hidden
