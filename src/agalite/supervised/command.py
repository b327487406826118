"""`agalite lra`: Long Range Arena's ListOps and Text. Nothing heavy is imported until it is run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro.conf

from agalite import extras
from agalite.system import use_devices


class _Task:
    task: str

    @classmethod
    def main(cls, words: list[str], name: str) -> None:
        """Which options there are depends on the memory model."""
        extras.require_training(name)
        from agalite.supervised import options

        choices, config = options.parse(cls.task, words, name)
        use_devices(choices.devices, config.seeds)
        folder = choices.out or options.new_folder(config)
        from agalite.supervised.train import train

        print(f"training into {folder}", file=sys.stderr)
        _show(train(config, folder))


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
    """As for the task; its own if not given."""
    max_length: int | None = None

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
    """Write what runs of one task scored, beside the baselines and the paper's figures."""

    run_folders: tyro.conf.Positional[tuple[Path, ...]]
    """The folders of the runs."""
    out: Path
    """The file to write: .md; the curves go beside it as .png."""

    def run(self) -> None:
        extras.require_training("agalite lra report")
        from agalite.supervised import report

        report.write(list(self.run_folders), self.out)
        print(f"written to {self.out}")


COMMANDS = {"listops": ListOps, "text": Text, "baselines": Baselines, "report": Report}


def made(run: Any) -> bool:
    """Whether a run is of one of these tasks."""
    return "task" in run.config


def resume(folder: Path) -> None:
    from agalite.supervised.train import resume

    _show(resume(folder))


def _show(run: Any) -> None:
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
