"""Models by name: `make_memory("gtrxl", 16, memory=128, key=key)`.

A new model adds a row to MODELS.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
from jaxtyping import PRNGKeyArray
from rich.console import Console
from rich.table import Table

from agalite import extras, validation
from agalite.memory.agalite import AGaLiTe, AGaLiTeConfig
from agalite.memory.base import Memory
from agalite.memory.deltanet import DeltaNet, DeltaNetConfig
from agalite.memory.feedforward import Feedforward, FeedforwardConfig
from agalite.memory.ffm import FFM, FFMConfig
from agalite.memory.galite import GaLiTe, GaLiTeConfig
from agalite.memory.gru import GRU, GRUConfig
from agalite.memory.gtrxl import GTrXL, GTrXLConfig
from agalite.memory.linear import LinearConfig, LinearTransformer
from agalite.memory.lru import LRU, LRUConfig
from agalite.memory.lstm import LSTM, LSTMConfig
from agalite.memory.mamba2 import Mamba2, Mamba2Config
from agalite.memory.memax import Memax, MemaxConfig
from agalite.memory.mingru import MinGRU, MinGRUConfig
from agalite.memory.mlstm import MLSTM, MLSTMConfig
from agalite.memory.rtu import RTU, RTUConfig
from agalite.memory.s5 import S5, S5Config
from agalite.memory.transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class Model:
    """A row of the table of models."""

    make: Callable[..., Memory]
    config: type
    remembers: str
    """What its state holds, in a few words."""


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
    "lru": Model(LRU, LRUConfig, "complex numbers that rotate and decay, at learned rates"),
    "s5": Model(S5, S5Config, "the same, of a discretised state-space model (HiPPO)"),
    "rtu": Model(RTU, RTUConfig, "pairs that rotate and decay, read through a nonlinearity"),
    "mingru": Model(MinGRU, MinGRUConfig, "a hidden vector, gated by the input alone"),
    "mlstm": Model(MLSTM, MLSTMConfig, "a matrix per head, exponential gates (xLSTM)"),
    "deltanet": Model(DeltaNet, DeltaNetConfig, "a matrix per head, corrected and gated"),
    "mamba2": Model(Mamba2, Mamba2Config, "a matrix per head, one decay each (SSD)"),
    "ffm": Model(FFM, FFMConfig, "decaying, oscillating sums of the inputs"),
    "memax": Model(Memax, MemaxConfig, "what its cell does: about twenty of another package"),
    "feedforward": Model(Feedforward, FeedforwardConfig, "nothing: the control"),
}


def make_memory(
    name: str, input_size: int, *, key: PRNGKeyArray | None = None, **options: Any
) -> Memory:
    """A memory model by its name.

    **Arguments:**

    - `name`: a key of `MODELS`.
    - `input_size`: width of the input.
    - `key`: draws the weights; `None` is `jax.random.key(0)`.
    - `options`: fields of the model's config, for example `layers=2`.
    """
    validation.check_one_of("memory", name, MODELS)
    model = MODELS[name]
    known = [field.name for field in fields(model.config)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{name} has no option {option}={options[option]!r}; it takes: {', '.join(known)}"
            )
    return model.make(input_size, key=jax.random.key(0) if key is None else key, **options)


def has_option(name: str, option: str) -> bool:
    """Whether a model's config has this field."""
    return any(field.name == option for field in fields(MODELS[name].config))


def models_with_traces() -> list[str]:
    """Names of the models that have traces, with default options at least."""
    made: Any = Memory.has_traces
    return [
        name
        for name, model in MODELS.items()
        if isinstance(model.make, type) and getattr(model.make, "has_traces", made) is not made
    ]


BLOCKS = (
    "agalite",
    "galite",
    "linear",
    "transformer",
    "gtrxl",
    "mlstm",
    "deltanet",
    "mamba2",
    "ffm",
)
"""The models that are stacks of the same block and take the same sizes."""
DIAGONAL = ("lru", "s5", "rtu", "mingru")
"""The models with a diagonal recurrence in the place of the block's attention."""

_SMALL = {"d_model": 64, "layers": 2, "heads": 2, "head_size": 32, "ffn_size": 64}

SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(BLOCKS, _SMALL),
    **{
        name: {"d_model": 64, "layers": 2, "ffn_size": 64, "hidden_size": size}
        for name, size in (("lru", 144), ("s5", 144), ("rtu", 144), ("mingru", 192))
    },
    "ffm": _SMALL | {"head_size": 16},
    "mamba2": _SMALL | {"d_state": 32},
    "feedforward": {"d_model": 64, "layers": 2, "ffn_size": 64},
    "gru": {"d_model": 128, "hidden_size": 192},
    "lstm": {"d_model": 128, "hidden_size": 160},
}
"""Options of each model at a small size for two cores, about 190k parameters each."""


def model_rows(input_size: int) -> list[tuple[str, int, int, int, str]]:
    """(name, parameters, floats of state, output width, what it remembers) of every model.

    `memax` is left out where that package is not installed.
    """
    validation.check_integer("input_size", input_size, minimum=1)
    out = []
    for name, model in MODELS.items():
        if name == "memax" and not extras.installed("memax"):
            continue
        # Shapes only: no weights are drawn.
        memory = jax.eval_shape(lambda name=name: make_memory(name, input_size))
        row = (memory.parameter_count, memory.state_size, memory.output_size, model.remembers)
        out.append((name, *row))
    return out


def print_models(input_size: int) -> None:
    """The table of `agalite models`."""
    table = Table(title=f"Memory models at the paper's T-Maze sizes, input of {input_size}")
    for column in ("name", "parameters", "state (floats)", "output", "remembers"):
        table.add_column(column, justify="left" if column in ("name", "remembers") else "right")
    for name, parameters, state, output, remembers in model_rows(input_size):
        table.add_row(name, f"{parameters:,}", f"{state:,}", str(output), remembers)
    Console().print(table)
