"""`agalite study`: the paper's experiments. Heavy modules are imported when a command runs."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro.conf

from agalite import extras
from agalite.system import Stopped, use_devices

if TYPE_CHECKING:
    from agalite.studies.declaration import Study
    from agalite.studies.runner import Executor
    from agalite.studies.trials import Trial

_STUDY = tyro.conf.arg(metavar="STUDY")


@dataclass(frozen=True)
class List:
    """List the studies: the paper's figures and tables, and a few others."""

    def run(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from agalite.studies.catalogue import studies
        from agalite.studies.declaration import SCALES
        from agalite.studies.trials import expand

        table = Table(box=None, pad_edge=False)
        for column in ("study", "what", *SCALES):
            numbers = column in SCALES
            table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers)
        for study in studies().values():
            counts = (
                f"{len(expand(study, scale, Path())):,}" if scale in study.scales else "-"
                for scale in SCALES
            )
            table.add_row(study.name, study.title, *counts)
        console = Console(highlight=False)
        console.print(table)
        console.print("\nThe numbers are trials at each scale: agalite study run NAME --scale cpu")


@dataclass(frozen=True)
class Run:
    """Run the trials of a study: finished ones are kept, unfinished ones are resumed."""

    name: Annotated[tyro.conf.Positional[str | None], _STUDY] = None
    """A name that `agalite study list` lists."""
    all: bool = False
    """Run all studies that have this scale, one after another, and write their pages."""
    scale: str = "smoke"
    """smoke (minutes), cpu (an evening on two cores) or paper (a cluster)."""
    hours: float | None = None
    """Stop after this time: every run is saved, and the same command goes on with it."""
    jobs: int = 1
    """Trials that run at the same time on this machine, each with its share of the cores."""
    ray: str | None = None
    """Run the trials as tasks of the Ray cluster at this address; auto finds a cluster, or starts
    one on this machine. Every node must see the folder of --out."""
    cpus: float = 1.0
    """With --ray: cores per trial."""
    gpus: float = 0.0
    """With --ray: GPUs per trial."""
    out: Path = Path("studies")
    """Folder of all studies."""
    only: tuple[str, ...] = ()
    """Run only trials with these levels: --only agent=gru agent=agalite corridor=20. seed=0 selects
    the runs that train this seed, some of which train others too."""
    chosen: Path | None = None
    """The chosen.json of a sweep's report, with settings for each agent. If not given, that of the
    study's own sweep in --out, once it has been run and its report written."""

    def run(self) -> None:
        extras.require_training("agalite study run")
        from agalite.studies.catalogue import find, in_order
        from agalite.studies.declaration import SCALES

        self._check()
        deadline = None if self.hours is None else time.monotonic() + 3600 * self.hours
        if self.name is not None:
            if not self._run_study(find(self.name), deadline):
                raise SystemExit(1)
            return
        from agalite import validation
        from agalite.studies import report

        validation.check_one_of("scale", self.scale, SCALES)
        failed = []
        for study in in_order(self.scale):
            if deadline is not None and time.monotonic() >= deadline:
                print(f"{self.hours:g} hours are over; the same command goes on", file=sys.stderr)
                break
            if not self._run_study(study, deadline):
                failed.append(study.name)
            print(f"written to {report.write(study, self.scale, self.out)}")
        if failed:
            print(f"trials failed in: {', '.join(failed)}", file=sys.stderr)
            raise SystemExit(1)

    def _check(self) -> None:
        """Refuses options that contradict each other."""
        from agalite import validation

        validation.check_integer("jobs", self.jobs, minimum=1)
        validation.check_number("cpus", self.cpus, minimum=0.0, above=True)
        validation.check_number("gpus", self.gpus, minimum=0.0)
        if self.hours is not None:
            validation.check_number("hours", self.hours, minimum=0.0, above=True)
        if self.ray is not None and self.jobs != 1:
            raise ValueError(f"jobs={self.jobs} is for this machine alone; leave it out with ray")
        if (self.name is None) != self.all:
            raise ValueError(
                "name one study or give --all: agalite study run tmaze, agalite study run --all"
            )
        if self.all and (self.only or self.chosen):
            raise ValueError("--only and --chosen are for one study; leave them out with --all")

    def _run_study(self, study: "Study", deadline: float | None) -> bool:
        """Runs the trials of one study; whether none failed."""
        from agalite.studies import runner
        from agalite.studies._wording import count_of
        from agalite.studies.declaration import Measurement
        from agalite.studies.trials import agents_without_choice, expand

        path, chosen, notes = self._choice(study)
        trials = expand(study, self.scale, self.out.absolute(), self.only, chosen)
        if others := agents_without_choice(trials, chosen):
            notes.append(f"{path} does not name {', '.join(others)}: default settings")
        if self.jobs == 1 and self.ray is None and self.hours is None and not self.all:
            seeds = {trial.seeds for trial in trials if not isinstance(trial.kind, Measurement)}
            if len(seeds) == 1:
                use_devices(None, seeds.pop())
        print(f"{study.name} at scale {self.scale}: {_overview(trials)}", file=sys.stderr)
        for note in notes:
            print(note, file=sys.stderr)
        try:
            outcomes = runner.run(
                trials,
                self._executor(),
                command=runner.command_line(),
                notes=notes,
                deadline=deadline,
            )
        except (Stopped, KeyboardInterrupt) as stopped:
            code = stopped.code if isinstance(stopped, Stopped) else 130
            print(
                f"stopped; every run is saved: {_overview(trials)}\n"
                f"resume with: {runner.command_line()}",
                file=sys.stderr,
            )
            raise SystemExit(code) from None
        print(_overview(trials), file=sys.stderr)
        if busy := sum(outcome.state == "busy" for outcome in outcomes):
            print(
                f"another process is running {count_of(busy, 'trial')} of this study; to see how "
                f"far: agalite study status {study.name} --scale {self.scale} --out {self.out}",
                file=sys.stderr,
            )
        if not self.all:
            print(f"agalite study report {study.name} --scale {self.scale} --out {self.out}")
        return not any(outcome.state in ("failed", "busy") for outcome in outcomes)

    def _choice(
        self, study: "Study"
    ) -> tuple[Path | None, dict[str, dict[str, Any]] | None, list[str]]:
        """The file with the settings of a sweep, its contents, and notes about them."""
        from agalite.studies.trials import read_choice, sweep_choice

        if self.chosen is not None:
            return self.chosen, read_choice(self.chosen), []
        if found := sweep_choice(study, self.scale, self.out):
            path, chosen = found
            return path, chosen, [f"learning rates and others as chosen by {path}"]
        if study.sweep:
            return None, None, [f"{study.sweep} has no choice in {self.out}: settings as declared"]
        return None, None, []

    def _executor(self) -> "Executor":
        from agalite.studies.runner import Inline, Processes, RayTasks

        if self.ray is not None:
            return RayTasks(self.ray, cpus=self.cpus, gpus=self.gpus)
        # A trial in this process could not be stopped by the clock.
        in_processes = self.jobs > 1 or self.hours is not None
        return Processes(self.jobs) if in_processes else Inline()


@dataclass(frozen=True)
class Status:
    """Show the state and progress of each trial of a study."""

    name: Annotated[tyro.conf.Positional[str], _STUDY]
    """A name that `agalite study list` lists."""
    scale: str = "smoke"
    """smoke, cpu or paper."""
    out: Path = Path("studies")
    """Folder of all studies."""

    def run(self) -> None:
        from agalite.studies.catalogue import find
        from agalite.studies.trials import check_format, expand

        trials = expand(find(self.name), self.scale, self.out.absolute())
        check_format(trials[0].home)
        for trial in trials:
            state = trial.state()
            share = f"{100 * trial.progress():.0f}%" if state == "unfinished" else ""
            print(f"{state:<14} {share:>4}  {trial.name}  {trial.failure()}".rstrip())
        print(_overview(trials))


@dataclass(frozen=True)
class Report:
    """Write the page of a study: figures, tables, and verdicts on the paper's claims."""

    name: Annotated[tyro.conf.Positional[str], _STUDY]
    """A name that `agalite study list` lists."""
    scale: str = "smoke"
    """smoke, cpu or paper."""
    out: Path = Path("studies")
    """Folder of all studies."""
    to: Path | None = None
    """Folder for the page and its figures; the study's own folder if not given."""

    def run(self) -> None:
        extras.require_training("agalite study report")
        from agalite.studies import report
        from agalite.studies.catalogue import find

        study = find(self.name)
        study.at(self.scale)
        print(f"written to {report.write(study, self.scale, self.out, self.to)}")


@dataclass(frozen=True)
class Claims:
    """Print every claim of the paper with the verdict of the studies in a folder, as Markdown."""

    out: Path = Path("studies")
    """Folder of all studies."""
    scale: str = "cpu"
    """smoke, cpu or paper."""
    into: Path | None = None
    """A Markdown file with the marks <!-- claims --> and <!-- /claims -->, between which the table
    is written instead."""

    def run(self) -> None:
        import os

        from agalite import validation
        from agalite.studies import verdicts
        from agalite.studies.declaration import SCALES

        validation.check_one_of("scale", self.scale, SCALES)
        if self.into is None:
            print(verdicts.claims_table(self.out, self.scale))
            return
        link = os.path.relpath(self.out, self.into.parent) + "/"
        verdicts.write_table(self.into, verdicts.claims_table(self.out, self.scale, link))
        print(f"written to {self.into}")


def _overview(trials: "Sequence[Trial]") -> str:
    """How many trials are in which state."""
    from agalite.studies._wording import count_of
    from agalite.studies.trials import STATES

    states = [trial.state() for trial in trials]
    counts = ", ".join(f"{states.count(x)} {x}" for x in STATES if x in states)
    return f"{count_of(len(states), 'trial')}: {counts}"


COMMANDS = {"list": List, "run": Run, "status": Status, "report": Report, "claims": Claims}
