"""The configuration of a run on a Long Range Arena task, and its presets."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from agalite import validation
from agalite.memory.registry import MODELS, has_option
from agalite.supervised.classifier import POOLINGS
from agalite.supervised.data import DataConfig, DataOptions
from agalite.training.config import SeedRange, UpdateSchedule

PRESETS = ("tuned", "paper")


@dataclass(frozen=True, kw_only=True)
class Settings(DataOptions):
    """Settings of a run. A step is one token that the memory reads, padding included."""

    total_timesteps: int = 40_000_000
    """Tokens of each seed in total (rounded up to whole updates)."""
    rows: int = 8
    """Rows per batch; each holds as many whole sequences as fit."""
    row_length: int = 4096
    """Tokens per row."""
    rows_at_once: int = 1
    """Rows whose gradient is computed at once; it must divide rows. More rows need more memory, and
    are no faster for AGaLiTe."""
    pooling: str = "mean"
    """Output of the memory that is classified: mean (over the sequence) or last."""
    embedding: int = 128
    """Width of a token's embedding."""
    hidden_size: int = 128
    """Width of the classifier's hidden layer."""
    learning_rate: float = 5e-4
    """Highest learning rate of AdamW."""
    warmup: float = 0.05
    """Share of the run in which the learning rate rises; it then falls to zero along a cosine."""
    weight_decay: float = 0.01
    """Weight decay of the matrices; biases, norms and gates do not decay."""
    max_grad_norm: float = 1.0
    """Largest norm of a gradient; a larger one is scaled down."""
    seed: int = 0
    """Random seed (the first one, if several are trained)."""
    seeds: int = 1
    """Number of seeds, from --seed on, that are trained at once."""
    log_every: int = 300_000
    """Tokens between two rows of metrics (rounded to whole updates)."""
    evaluate_every: int = 4_000_000
    """Tokens between two evaluations on the validation examples (rounded to whole updates)."""
    checkpoint_every: int = 1_000_000
    """Tokens between two checkpoints (rounded to whole updates)."""
    keep_checkpoints: int = 2
    """Latest checkpoints to keep; the best one is always kept."""


@dataclass(frozen=True, kw_only=True)
class LRAConfig(Settings, DataConfig, UpdateSchedule, SeedRange):
    """The configuration of a run.

    **Arguments:** the fields of this class, by keyword. `task` is required. Values that do not fit
    together are refused here, before anything is compiled.
    """

    memory: str = "agalite"
    """Name of a memory model that `agalite models` lists."""
    memory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the memory model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_one_of("memory", self.memory, MODELS)
        validation.check_options("memory_options", self.memory_options)
        validation.check_one_of("pooling", self.pooling, POOLINGS)
        for name in ("total_timesteps", "log_every", "evaluate_every", "checkpoint_every"):
            validation.check_integer(
                name, getattr(self, name), minimum=1, maximum=validation.LARGEST_COUNT
            )
        for name in (
            "rows",
            "rows_at_once",
            "embedding",
            "hidden_size",
            "seeds",
            "keep_checkpoints",
        ):
            validation.check_integer(name, getattr(self, name), minimum=1)
        validation.check_integer_between("seed", self.seed, 0, 2**32 - 1)
        self.check_seeds()
        validation.check_integer("row_length", self.row_length, minimum=self.limit)
        if self.rows % self.rows_at_once:
            raise ValueError(
                f"rows_at_once={self.rows_at_once} must divide rows={self.rows} evenly"
            )
        for name in ("learning_rate", "max_grad_norm"):
            validation.check_number(name, getattr(self, name), minimum=0.0, above=True)
        validation.check_number("weight_decay", self.weight_decay, minimum=0.0)
        validation.check_number("warmup", self.warmup, minimum=0.0, maximum=1.0)
        self.check_length()

    @property
    def steps_per_update(self) -> int:
        return self.rows * self.row_length

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `config.json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LRAConfig":
        """The inverse of `to_dict`."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"this is not the configuration of an LRA run: {error}") from error


def preset(name: str, memory: str, limit: int) -> dict[str, Any]:
    """The options of a memory model.

    **Arguments:**

    - `name`: "paper" (eta = 8 and r = 1, Appendix D) or "tuned" (the same, with initial time
      constants of the gates from 2 to `limit`).
    - `memory`: the memory model.
    - `limit`: the length of the longest sequence.
    """
    validation.check_one_of("preset", name, PRESETS)
    validation.check_one_of("memory", memory, MODELS)
    options: dict[str, Any] = {}
    if memory in ("agalite", "galite"):
        options["eta"] = 8
    if memory == "transformer":
        options["context"] = max(1, limit - 1)  # the whole sequence
    if name == "tuned" and has_option(memory, "horizon"):
        options["horizon"] = (2.0, float(max(3, limit)))
    return options
