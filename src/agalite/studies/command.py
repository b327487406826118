"""`agalite study`: the paper's experiments. Nothing heavy is imported until it is run."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro.conf

from agalite import extras
from agalite.system import Stopped, use_devices


@dataclass(frozen=True)
class List:
    """List the studies: every figure and table of the paper, and ours."""

    def run(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from agalite.studies.catalogue import studies
        from agalite.studies.trials import expand

        table = Table(box=None, pad_edge=False)
        for column in ("study", "what", "smoke", "cpu", "paper"):
            numbers = column not in ("study", "what")
            table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers)
        for study in studies().values():
            counts = (len(expand(study, scale, Path())) for scale in ("smoke", "cpu", "paper"))
            table.add_row(study.name, study.title, *(f"{count:,}" for count in counts))
        console = Console(highlight=False)
        console.print(table)
        console.print("\nThe numbers are trials at each scale: agalite study run NAME --scale cpu")


@dataclass(frozen=True)
class Run:
    """Run a study's trials: finished ones stay, half-finished ones go on."""

    name: tyro.conf.Positional[str]
    """A name that `agalite study list` lists."""
    scale: str = "smoke"
    """smoke (minutes), cpu (an evening on two cores) or paper (a cluster)."""
    jobs: int = 1
    """Processes on this machine, each with its share of the cores."""
    ray: str | None = None
    """Run the trials as tasks of the Ray cluster at this address; auto finds one, or starts one
    here. Every node must see the folder of --out."""
    cpus: float = 1.0
    """With --ray: cores for each trial."""
    gpus: float = 0.0
    """With --ray: GPUs for each trial."""
    out: Path = Path("studies")
    """Folder for all studies."""
    only: tuple[str, ...] = ()
    """Only these levels: --only agent=gru agent=agalite corridor=20."""
    chosen: Path | None = None
    """The chosen.json of a sweep's report: each agent gets the settings that it names."""

    def run(self) -> None:
        extras.require_training("agalite study run")
        from agalite import validation
        from agalite.studies import runner
        from agalite.studies.catalogue import find
        from agalite.studies.declaration import Measurement
        from agalite.studies.trials import counted, expand, not_chosen

        study = find(self.name)
        validation.integer("jobs", self.jobs, minimum=1)
        validation.number("cpus", self.cpus, minimum=0.0, above=True)
        validation.number("gpus", self.gpus, minimum=0.0)
        if self.ray is not None and self.jobs != 1:
            raise ValueError(f"jobs={self.jobs} is for this machine alone; leave it out with ray")
        chosen = _chosen(self.chosen)
        trials = expand(study, self.scale, self.out.absolute(), self.only, chosen)
        notes = []
        if left_out := not_chosen(trials, chosen):
            notes.append(f"{self.chosen} does not name {', '.join(left_out)}: default settings")
        if self.jobs == 1 and self.ray is None:
            seeds = {trial.seeds for trial in trials if not isinstance(trial.work, Measurement)}
            if len(seeds) == 1:
                use_devices(None, seeds.pop())
        print(f"{study.name} at scale {self.scale}: {_standing(trials)}", file=sys.stderr)
        for note in notes:
            print(note, file=sys.stderr)
        try:
            outcomes = runner.run(
                trials, self._placement(), command=runner.command_line(), notes=notes
            )
        except (Stopped, KeyboardInterrupt) as stopped:
            code = stopped.code if isinstance(stopped, Stopped) else 130
            print(
                f"stopped; every run is saved: {_standing(trials)}\n"
                f"go on with: {runner.command_line()}",
                file=sys.stderr,
            )
            raise SystemExit(code) from None
        print(f"{_standing(trials)}", file=sys.stderr)
        if busy := sum(outcome.state == "busy" for outcome in outcomes):
            print(
                f"another process is running {counted(busy, 'trial')} of this study; to see how "
                f"far: agalite study status {study.name} --scale {self.scale} --out {self.out}",
                file=sys.stderr,
            )
        print(f"agalite study report {study.name} --scale {self.scale} --out {self.out}")
        if any(outcome.state in ("failed", "busy") for outcome in outcomes):
            raise SystemExit(1)

    def _placement(self) -> Any:
        if self.ray is not None:
            from agalite.studies.runner import OnRay

            return OnRay(self.ray, cpus=self.cpus, gpus=self.gpus)
        if self.jobs > 1:
            from agalite.studies.runner import Processes

            return Processes(self.jobs)
        from agalite.studies.runner import Here

        return Here()


@dataclass(frozen=True)
class Status:
    """Say how far each trial of a study is."""

    name: tyro.conf.Positional[str]
    """A name that `agalite study list` lists."""
    scale: str = "smoke"
    """smoke, cpu or paper."""
    out: Path = Path("studies")
    """Folder for all studies."""

    def run(self) -> None:
        from agalite.studies.catalogue import find
        from agalite.studies.trials import expand, progress

        trials = expand(find(self.name), self.scale, self.out.absolute())
        for trial in trials:
            state = trial.state()
            share = f"{100 * progress(trial):.0f}%" if state == "half-finished" else ""
            print(f"{state:<14} {share:>4}  {trial.name}  {trial.failure()}".rstrip())
        print(_standing(trials))


@dataclass(frozen=True)
class Report:
    """Write a study's page: figures, tables, the paper's claims beside our numbers."""

    name: tyro.conf.Positional[str]
    """A name that `agalite study list` lists."""
    scale: str = "smoke"
    """smoke, cpu or paper."""
    out: Path = Path("studies")
    """Folder for all studies."""
    to: Path | None = None
    """Folder for the page and its figures; the study's own if not given."""

    def run(self) -> None:
        extras.require_training("agalite study report")
        from agalite.studies import report
        from agalite.studies.catalogue import find

        study = find(self.name)
        study.at(self.scale)
        print(f"written to {report.write(study, self.scale, self.out, self.to)}")


def _chosen(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"chosen={str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(x, dict) for x in found.values()):
        raise ValueError(f"chosen={str(path)!r} is not the chosen.json of a sweep's report")
    return found


def _standing(trials: Any) -> str:
    from agalite.studies.runner import count
    from agalite.studies.trials import STATES, counted

    counts = count(trials)
    words = ", ".join(f"{counts[state]} {state}" for state in STATES if state in counts)
    return f"{counted(len(trials), 'trial')}: {words}"


COMMANDS = {"list": List, "run": Run, "status": Status, "report": Report}
