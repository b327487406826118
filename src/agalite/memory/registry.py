"""Models by name: `make_memory("gtrxl", 16, memory=128, key=key)`."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from agalite import errors
from agalite.memory.agalite import AGaLiTe, AGaLiTeConfig
from agalite.memory.contract import Memory
from agalite.memory.feedforward import Feedforward, FeedforwardConfig
from agalite.memory.galite import GaLiTe, GaLiTeConfig
from agalite.memory.gru import GRU, GRUConfig
from agalite.memory.gtrxl import GTrXL, GTrXLConfig
from agalite.memory.linear import LinearConfig, LinearTransformer
from agalite.memory.lstm import LSTM, LSTMConfig
from agalite.memory.transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class Model:
    """A row of the table of models."""

    make: Callable[..., Memory]
    config: type
    remembers: str
    """In a few words, for people who choose."""


MODELS: dict[str, Model] = {
    "agalite": Model(AGaLiTe, AGaLiTeConfig, "gated sums of keys and values, low rank (Alg. 4)"),
    "galite": Model(GaLiTe, GaLiTeConfig, "a gated matrix per head (Alg. 3)"),
    "linear": Model(
        LinearTransformer, LinearConfig, "a matrix per head, nothing forgotten (Alg. 2)"
    ),
    "transformer": Model(Transformer, TransformerConfig, "the last inputs, by softmax (Alg. 1)"),
    "gtrxl": Model(GTrXL, GTrXLConfig, "the last M inputs of every layer, by softmax"),
    "gru": Model(GRU, GRUConfig, "a gated hidden vector"),
    "lstm": Model(LSTM, LSTMConfig, "a gated cell and a hidden vector"),
    "feedforward": Model(Feedforward, FeedforwardConfig, "nothing: the control"),
}


def make_memory(
    name: str, input_size: int, *, key: PRNGKeyArray | None = None, **options: Any
) -> Memory:
    """A model by its name, with the options of its config; `key` draws the weights (seed 0)."""
    errors.one_of("memory", name, MODELS)
    model = MODELS[name]
    known = [field.name for field in fields(model.config)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{name} has no option {option}={options[option]!r}; it takes: {', '.join(known)}"
            )
    return model.make(input_size, key=jax.random.key(0) if key is None else key, **options)
