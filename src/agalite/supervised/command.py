"""`agalite lra`: Long Range Arena's ListOps and Text. Heavy modules are imported when it runs."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from agalite import extras
from agalite.system import use_devices

if TYPE_CHECKING:
    from agalite.supervised.config import LRAConfig
    from agalite.training.run import Run


@dataclass(frozen=True)
class Choices:
    """The options that decide the others, and those that are no part of the configuration."""

    memory: str = "agalite"
    """Memory model: a name that `agalite models` lists."""
    preset: str = "tuned"
    """Where the defaults of the model's options come from: tuned (this library's) or paper."""
    out: Path | None = None
    """Folder of the run; runs/<task>-<memory>-<time> if not given."""
    devices: int | None = None
    """CPU devices to train the seeds on, a divisor of their number; if not given, the largest up to
    the number of cores."""


def parse(task: str, words: Sequence[str], prog: str) -> "tuple[Choices, LRAConfig]":
    """Parses the command line of a task.

    The memory model decides which options there are, and it and `--max-length` their defaults. So
    tyro parses in two steps: these options first, then all of them.

    **Arguments:**

    - `task`: listops or text.
    - `words`: the command line after the name of the task.
    - `prog`: the name of the command in messages.
    """
    from agalite import validation
    from agalite.memory.registry import MODELS
    from agalite.supervised.config import PRESETS, LRAConfig, Settings, preset
    from agalite.supervised.data import DataConfig

    flat = tyro.conf.arg(name="")  # options without a prefix
    first = dataclasses.make_dataclass(
        "First",
        [
            ("choices", Annotated[Choices, flat], Choices()),
            ("max_length", int | None, None),
        ],
    )
    found: Any
    found, _ = tyro.cli(
        first, args=list(words), prog=prog, return_unknown_args=True, add_help=False
    )
    choices: Choices = found.choices
    validation.check_one_of("memory", choices.memory, MODELS)
    validation.check_one_of("preset", choices.preset, PRESETS)
    limit = DataConfig(task=task, max_length=found.max_length, data="any").limit
    # --steps is added here because `config.py` does not depend on the command-line parser.
    steps = Annotated[int, tyro.conf.arg(aliases=["--steps"])]
    settings = dataclasses.make_dataclass(
        "Settings",
        [("total_timesteps", steps, dataclasses.field(default=Settings.total_timesteps))],
        bases=(Settings,),
        frozen=True,
        kw_only=True,
    )
    model = MODELS[choices.memory].config
    command = dataclasses.make_dataclass(
        "LRA",
        [
            ("choices", Annotated[Choices, flat], choices),
            ("settings", Annotated[settings, flat], settings()),
            ("model", model, model(**preset(choices.preset, choices.memory, limit))),
        ],
        frozen=True,
    )
    parsed: Any = tyro.cli(
        command, args=list(words), prog=prog, description=f"Train and score a classifier on {task}."
    )
    validation.check_integer(
        "--steps (total_timesteps)", parsed.settings.total_timesteps, minimum=1
    )
    config = LRAConfig(
        **dataclasses.asdict(parsed.settings),
        task=task,
        memory=choices.memory,
        memory_options=dataclasses.asdict(parsed.model),
    )
    return parsed.choices, config


class _Task:
    task: str

    @classmethod
    def main(cls, words: list[str], name: str) -> None:
        """Parses `words` by itself, since the options depend on the memory model."""
        extras.require_training(name)
        choices, config = parse(cls.task, words, name)
        use_devices(choices.devices, config.seeds, uneven=False)
        from agalite.supervised.train import train
        from agalite.training.run import new_folder

        folder = choices.out or new_folder(config.task, config.memory)
        print(f"training into {folder}", file=sys.stderr)
        _print_summary(train(config, folder))

    @staticmethod
    def options() -> type:
        """The options that every memory model has, for completion."""
        return Choices


class ListOps(_Task):
    """Train and score a classifier of nested list operations (Long Range Arena)."""

    task = "listops"


class Text(_Task):
    """Train and score a classifier of movie reviews, byte by byte (Long Range Arena)."""

    task = "text"


@dataclass(frozen=True)
class Baselines:
    """Score the commonest class and a logistic regression on token counts."""

    task: tyro.conf.Positional[str]
    """listops or text."""
    data: str = ""
    """Source of the examples, as for the task; the task's default if not given."""
    max_length: int | None = None
    """Largest number of tokens, as for the task."""

    def run(self) -> None:
        extras.require_training("agalite lra baselines")
        from agalite.supervised.baselines import baselines
        from agalite.supervised.data import DataConfig, load

        task = load(DataConfig(task=self.task, data=self.data, max_length=self.max_length))
        scores = baselines(task)
        for note in task.notes:
            print(note)
        print(f"{'commonest class':<24} {100 * scores.majority:.2f}%")
        print(f"{'token counts':<24} {100 * scores.counts:.2f}%   (penalty {scores.penalty:g})")


@dataclass(frozen=True)
class Report:
    """Write the results of runs on one task, beside the baselines and the paper's results."""

    run_folders: tyro.conf.Positional[tuple[Path, ...]]
    """The folders of the runs."""
    out: Path
    """The file to write: .md; a figure of the learning curves goes beside it as .png."""

    def run(self) -> None:
        extras.require_training("agalite lra report")
        from agalite.supervised import report

        report.write(list(self.run_folders), self.out)
        print(f"written to {self.out}")


COMMANDS = {"listops": ListOps, "text": Text, "baselines": Baselines, "report": Report}


def is_lra_run(run: "Run") -> bool:
    """Whether `agalite lra` made a run."""
    return "task" in run.config


def resume(folder: Path) -> None:
    """Resumes a run of `agalite lra` and prints its results."""
    from agalite.supervised.train import resume

    _print_summary(resume(folder))


def _print_summary(run: "Run") -> None:
    summary = run.read_summary() or {}
    for note in summary.get("data", []):
        print(note)
    accuracies = summary["test_accuracy"]
    print(f"{'test accuracy':<24} {100 * summary['test_accuracy_mean']:.2f}%")
    if interval := summary["test_accuracy_interval_over_seeds"]:
        low, high = interval
        print(f"{'95% over seeds':<24} {100 * low:.2f}% to {100 * high:.2f}% ({len(accuracies)})")
    print(f"{'test examples':<24} {summary['test_examples']:,}")
    print(f"{'steps (tokens)':<24} {summary['steps']:,}")
    print(f"{'curve':<24} {run.curve_path}")
