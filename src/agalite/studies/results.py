"""What the finished trials of a study came to: numbers for each seed, by setting."""

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from agalite.studies.declaration import Measurement, Metric, Select, Study, Training
from agalite.studies.statistics import binned, last_steps
from agalite.studies.trials import Trial, expand, home

Values = Float[np.ndarray, " seeds"]

_OF_A_SESSION = {"command", "began", "machine", "versions", "seconds", "trials"}


@dataclass
class Point:
    """A setting: its levels, and a number for each seed by metric."""

    levels: dict[str, str]
    values: dict[str, Values]
    trials: list[Trial] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    """Of its runs: steps, parameters, seconds."""
    shortened: dict[str, int] = field(default_factory=dict)
    """Steps that were averaged over, by metric, where the run is too short for those declared."""

    @property
    def label(self) -> str:
        return ", ".join(self.levels.values())


@dataclass
class Results:
    study: Study
    scale: str
    home: Path
    trials: list[Trial]
    points: list[Point]
    sessions: list[dict[str, Any]]
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with files that could not be used, by the trial's (or the file's) name."""

    def state(self, trial: Trial) -> str:
        return "failed" if trial.name in self.damaged else trial.state()

    def failures(self) -> dict[str, str]:
        """Why trials failed, and which files could not be read, by name."""
        found = {t.name: t.failure() for t in self.trials if t.state() == "failed"}
        return {**found, **self.damaged}

    def select(self, levels: Select) -> list[Point]:
        return [point for point in self.points if _has(point, levels)]

    def values(self, levels: Select, metric: str) -> Values:
        """A number for each seed; the mean over the settings, where several are selected."""
        found = [p.values[metric] for p in self.select(levels) if metric in p.values]
        if not found:
            return np.zeros(0)
        if len({len(values) for values in found}) > 1:
            return np.concatenate(found)
        return np.mean(found, axis=0)

    def labels(self, factor: str) -> list[str]:
        """The levels that there are numbers for, in the order of the declaration."""
        order: list[str] = []
        for declared in self.study.factors_at(self.scale):
            if factor in declared.name.split("/"):
                order += [declared.split(label)[factor] for label in declared.levels]
        seen = list(dict.fromkeys(p.levels[factor] for p in self.points if factor in p.levels))
        return sorted(seen, key=lambda x: order.index(x) if x in order else len(order))

    def columns(self, pattern: str) -> list[str]:
        """Columns of metrics.csv that any of the runs has."""
        found: dict[str, None] = {}
        for point in self.points:
            for trial in point.trials:
                header = _header(trial.folder / "metrics.csv")
                found.update(dict.fromkeys(fnmatch.filter(header, pattern)))
        return sorted(found)

    def curve(
        self, levels: Select, column: str, bins: int
    ) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, "seeds bins"]] | None:
        """Binned, with the seeds of all runs of these settings side by side."""
        from agalite.training.metrics import read_metrics

        ends, curves = None, []
        for point in self.select(levels):
            for trial in point.trials:
                table = read_metrics(trial.folder)
                if column not in table or not len(table["step"]):
                    continue
                steps, values = binned(table, column, bins)
                if ends is None or len(steps) == len(ends):
                    ends = steps
                    curves.append(values)
        if ends is None:
            return None
        return ends, np.concatenate(curves)


def load(study: Study, scale: str, out: Path) -> Results:
    """Of the trials that are finished. Those made with other settings than declared (what a sweep
    chose) are what they are: their folders say so. One whose files are damaged is left out."""
    trials = expand(study, scale, out)
    here = home(out, study, scale)
    points: dict[tuple[str, ...], Point] = {}
    damaged: dict[str, str] = {}
    for trial in trials:
        if trial.state() != "finished":
            continue
        try:
            parts = _read(trial, study.metrics)
        # Whatever strange contents lead to: one trial must not keep the page from being written.
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            what = str(error) if isinstance(error, ValueError) else repr(error)
            if str(trial.folder) not in what:
                what = f"{trial.folder} cannot be read: {what}"
            damaged[trial.name] = trial.mended_by(what)
            continue
        for part in parts:
            key = tuple(f"{k}={v}" for k, v in part.levels.items())
            if key not in points:
                points[key] = part
                continue
            known = points[key]
            known.trials += part.trials
            for name, values in part.values.items():
                before = known.values.get(name, np.zeros(0))
                known.values[name] = np.concatenate([before, values])
            known.summary["seconds"] = known.summary.get("seconds", 0) + part.summary["seconds"]
    sessions = _sessions(here, damaged)
    return Results(study, scale, here, trials, list(points.values()), sessions, damaged)


def _read(trial: Trial, metrics: Sequence[Metric]) -> list[Point]:
    if isinstance(trial.work, Measurement):
        whole = json.loads(trial.rows_path.read_text())
        return [
            Point(
                {**trial.levels, **{k: str(v) for k, v in row["levels"].items()}},
                {k: np.array([np.nan if x is None else x for x in v], np.float64)
                 for k, v in row["values"].items()},
                [trial],
                {"seconds": whole["seconds"] / max(1, len(whole["rows"]))},
            )
            for row in whole["rows"]
        ]  # fmt: skip
    from agalite.training.metrics import read_metrics
    from agalite.training.run import Run

    summary = Run.open(trial.folder).read_summary() or {}
    table = read_metrics(trial.folder)
    if isinstance(trial.work, Training):
        reached = int(table["step"].max(initial=0))
        if reached != summary["steps"]:
            raise ValueError(
                f"{trial.folder / 'metrics.csv'} ends at step {reached:,}, the run at "
                f"{summary['steps']:,}"
            )
    values, shortened = {}, {}
    for metric in metrics:
        if metric.column.startswith("summary:"):
            found = summary[metric.column.removeprefix("summary:")]
            values[metric.column] = np.atleast_1d(np.asarray(found, np.float64))
        elif metric.column in table:
            longest = max(1, int(table["step"].max()) // 5)
            last = longest if metric.last is None else min(metric.last, longest)
            values[metric.column] = last_steps(table, metric.column, last)
            if metric.last is not None and last < metric.last:
                shortened[metric.column] = last
    facts = {
        "steps": summary.get("steps"),
        "parameters": summary.get("parameters"),
        "seconds": summary.get("seconds_of_this_session", 0.0),
    }
    return [Point(dict(trial.levels), values, [trial], facts, shortened)]


def _has(point: Point, levels: Mapping[str, str | tuple[str, ...]]) -> bool:
    for factor, wanted in levels.items():
        allowed = (wanted,) if isinstance(wanted, str) else wanted
        if point.levels.get(factor) not in allowed:
            return False
    return True


def _header(path: Path) -> list[str]:
    try:
        with open(path) as file:
            return file.readline().strip().split(",")
    except FileNotFoundError:
        return []


def _sessions(here: Path, damaged: dict[str, str]) -> list[dict[str, Any]]:
    found = []
    for path in sorted(here.glob("sessions/*.json")):
        try:
            session = json.loads(path.read_text())
            missing = _OF_A_SESSION - session.keys()
        except (OSError, ValueError, AttributeError) as error:
            damaged[path.name] = f"{path} cannot be read: {error}; remove it"
            continue
        if missing:
            damaged[path.name] = f"{path} has no {', '.join(sorted(missing))}; remove it"
            continue
        found.append(session)
    return found
