"""What a run of a Long Range Arena task is made of: plain data, to `config.json` and back."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from agalite import validation
from agalite.memory.registry import MODELS
from agalite.supervised.classifier import POOLINGS
from agalite.supervised.data import DataConfig, DataOptions
from agalite.training.config import InUpdates, SeveralSeeds

PRESETS = ("tuned", "paper")


@dataclass(frozen=True, kw_only=True)
class Settings(DataOptions):
    """How much is done, and how. A step is one token read by the memory, padding included."""

    total_timesteps: int = 40_000_000
    """Tokens in all, of each seed; the last batch is finished."""
    rows: int = 8
    """Rows in a batch; each holds as many whole sequences as fit."""
    row_length: int = 4096
    """Tokens in a row."""
    rows_at_once: int = 1
    """Rows whose gradient is computed together: more need more memory, and are no faster for
    AGaLiTe."""
    pooling: str = "mean"
    """What of the memory's outputs is classified: their mean over the sequence, or the last."""
    embedding: int = 128
    """Width of a token's embedding."""
    hidden_size: int = 128
    """Width of the classifier's hidden layer."""
    learning_rate: float = 5e-4
    warmup: float = 0.05
    """Share of the run in which the learning rate rises to its value; then it falls to zero."""
    weight_decay: float = 0.01
    """Of the matrices; biases, norms and gates are left alone."""
    max_grad_norm: float = 1.0
    seed: int = 0
    """The first seed."""
    seeds: int = 1
    """How many runs, with seeds from `seed` on, are trained together."""
    log_every: int = 300_000
    """Steps between two rows of metrics, about."""
    evaluate_every: int = 4_000_000
    """Steps between two scores on the validation examples, about."""
    checkpoint_every: int = 1_000_000
    """Steps between two checkpoints, about."""
    keep_checkpoints: int = 2
    """Checkpoints that stay, besides the best."""


@dataclass(frozen=True, kw_only=True)
class LRAConfig(Settings, DataConfig, InUpdates, SeveralSeeds):
    memory: str = "agalite"
    """A name that `agalite models` lists."""
    memory_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.one_of("memory", self.memory, MODELS)
        validation.one_of("pooling", self.pooling, POOLINGS)
        for name in (
            "total_timesteps",
            "rows",
            "rows_at_once",
            "embedding",
            "hidden_size",
            "seeds",
            "log_every",
            "evaluate_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("seed", self.seed, minimum=0)
        self.check_seeds()
        validation.integer("row_length", self.row_length, minimum=self.limit)
        if self.rows % self.rows_at_once:
            raise ValueError(
                f"rows_at_once={self.rows_at_once} must divide rows={self.rows} evenly"
            )
        for name in ("learning_rate", "max_grad_norm"):
            validation.number(name, getattr(self, name), minimum=0.0, above=True)
        validation.number("weight_decay", self.weight_decay, minimum=0.0)
        validation.number("warmup", self.warmup, minimum=0.0, maximum=1.0)

    @property
    def steps_per_update(self) -> int:
        return self.rows * self.row_length

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LRAConfig":
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"this is not the configuration of an LRA run: {error}") from error


def preset(name: str, memory: str, limit: int) -> dict[str, Any]:
    """Options of a memory model; `limit` is the length of the longest sequence.

    paper: eta = 8 and r = 1 (Appendix D) with gates that start as in the paper; tuned: the same
    with gates whose time constants are spread over the lengths that occur.
    """
    validation.one_of("preset", name, PRESETS)
    validation.one_of("memory", memory, MODELS)
    options: dict[str, Any] = {}
    if memory in ("agalite", "galite"):
        options["eta"] = 8
    if memory == "transformer":
        options["context"] = max(1, limit - 1)  # all there is
    if name == "tuned" and memory in ("agalite", "galite", "gru", "lstm"):
        options["horizon"] = (2.0, float(max(3, limit)))
    return options
