"""The options of `agalite lra listops|text`: the run's settings, and those of its memory model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from agalite import validation
from agalite.memory.registry import MODELS
from agalite.supervised.config import PRESETS, LRAConfig, Settings, preset
from agalite.supervised.data import DataConfig
from agalite.training import run


@dataclasses.dataclass(frozen=True)
class Choices:
    """What decides the other options."""

    memory: str = "agalite"
    """The memory model: a name that `agalite models` lists."""
    preset: str = "tuned"
    """Where the model's options start: tuned (ours) or paper."""
    out: Path | None = None
    """Folder of the run; runs/<task>-<memory>-<time> if not given."""
    devices: int | None = None
    """CPU devices to spread the seeds over; one for each seed, up to the cores, if not given."""


def parse(task: str, words: Sequence[str], prog: str) -> tuple[Choices, LRAConfig]:
    """Which options a model has depends on its name, so that is looked for first."""
    choices = Choices(
        memory=_peek(words, "memory") or Choices.memory,
        preset=_peek(words, "preset") or Choices.preset,
    )
    validation.one_of("memory", choices.memory, MODELS)
    validation.one_of("preset", choices.preset, PRESETS)
    given = _peek(words, "max_length") or ""
    length = int(given) if given.replace("_", "").isdigit() else None
    limit = DataConfig(task=task, max_length=length, data="any").limit
    model = MODELS[choices.memory].config
    flat = tyro.conf.arg(name="")
    parts: list[Any] = [
        ("choices", Annotated[Choices, flat], choices),
        ("settings", Annotated[Settings, flat], Settings()),
        ("model", model, model(**preset(choices.preset, choices.memory, limit))),
    ]
    command = dataclasses.make_dataclass("LRA", parts, frozen=True)
    parsed: Any = tyro.cli(
        command, args=list(words), prog=prog, description=f"Train and score a classifier on {task}."
    )
    config = LRAConfig(
        **dataclasses.asdict(parsed.settings),
        task=task,
        memory=choices.memory,
        memory_options=dataclasses.asdict(parsed.model),
    )
    return parsed.choices, config


def new_folder(config: LRAConfig) -> Path:
    return run.new_folder(config.task, config.memory)


def _peek(words: Sequence[str], option: str) -> str | None:
    """The last value of an option, from anywhere on the command line."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") == f"__{option}":
            found = value if equals else following
    return found
