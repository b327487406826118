"""The results of a study: a number per seed for each combination of levels; a sweep's choice."""

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from agalite.studies.declaration import (
    LEARNED,
    SCORE,
    TASK,
    Levels,
    Measurement,
    Metric,
    Score,
    SeedFailure,
    Study,
    Training,
)
from agalite.studies.statistics import binned_curves, mean_of_last_steps
from agalite.studies.trials import Trial, check_format, expand, make_config, study_folder

Values = Float[np.ndarray, " seeds"]

_NEAR = 0.02  # of the best mean: candidates of a sweep that count as equal
_SCORE_BINS = 40
_WHOLE_BINS = 100  # parts of a run, which count alike in its mean ("whole:...")
_SESSION_FIELDS = {"command", "started", "machine", "versions", "seconds", "trials"}


@dataclass
class Point:
    """One combination of levels, with a number per seed for each metric."""

    levels: dict[str, str]
    values: dict[str, Values]
    trials: list[Trial] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    """Facts about its runs: steps, parameters, seconds."""
    shortened: dict[str, int] = field(default_factory=dict)
    """The steps averaged over, for metrics whose `last_steps` is more than a fifth of the run."""

    def matches(self, levels: Levels) -> bool:
        """Whether it has one of the selected levels of every factor."""
        return all(
            self.levels.get(factor) in ((wanted,) if isinstance(wanted, str) else wanted)
            for factor, wanted in levels.items()
        )


@dataclass
class Results:
    """All that the folder of a study at a scale holds."""

    study: Study
    scale: str
    home: Path
    trials: list[Trial]
    points: list[Point]
    """Of the finished trials."""
    sessions: list[dict[str, Any]]
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with files that could not be read, by the name of the trial or file."""

    def state(self, trial: Trial) -> str:
        """The state of a trial; one with damaged files has failed."""
        return "failed" if trial.name in self.damaged else trial.state()

    def failures(self) -> dict[str, str]:
        """Why trials failed, and which files could not be read, by name."""
        found = {t.name: t.failure() for t in self.trials if t.state() == "failed"}
        return {**found, **self.damaged}

    def select(self, levels: Levels) -> list[Point]:
        """The points with these levels."""
        return [point for point in self.points if point.matches(levels)]

    def values(self, levels: Levels, metric: str) -> Values:
        """A number per seed: the mean over the selected points."""
        found = [p.values[metric] for p in self.select(levels) if metric in p.values]
        if not found:
            return np.zeros(0)
        if len({len(values) for values in found}) > 1:
            return np.concatenate(found)
        return np.mean(found, axis=0)

    def labels(self, factor: str) -> list[str]:
        """The labels of a factor that have results, in the order of the declaration."""
        order = self.study.labels_at(self.scale).get(factor, [])
        seen = list(dict.fromkeys(p.levels[factor] for p in self.points if factor in p.levels))
        return sorted(seen, key=lambda x: order.index(x) if x in order else len(order))

    def columns(self, pattern: str) -> list[str]:
        """The columns of metrics.csv of any run that match a pattern."""
        found: set[str] = set()
        for point in self.points:
            for trial in point.trials:
                found.update(fnmatch.filter(_header(trial.folder / "metrics.csv"), pattern))
        return sorted(found)

    def curve(
        self, levels: Levels, column: str, bins: int
    ) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, "seeds bins"]] | None:
        """The binned learning curves of all seeds of the selected points; None without any."""
        from agalite.training.logging import read_metrics

        ends, curves = None, []
        for point in self.select(levels):
            score = self.study.scores.get(point.levels.get(TASK, "")) if column == SCORE else None
            shown = column if score is None else score.column
            for trial in point.trials:
                table = read_metrics(trial.folder)
                if shown not in table or not len(table["step"]):
                    continue
                steps, values = binned_curves(table, shown, bins, _whole_run(trial))
                values = values if score is None else score.of(values)
                if ends is None or len(steps) == len(ends):
                    ends = steps
                    curves.append(values)
        if ends is None:
            return None
        return ends, np.concatenate(curves)


def load(study: Study, scale: str, out: Path) -> Results:
    """Reads the results of the finished trials of a study.

    A trial with damaged files is left out and named in `Results.damaged`. A trial that ran with
    other settings than declared, which a sweep has chosen, counts as it is.

    **Arguments:**

    - `study`, `scale`: what was run, and how large.
    - `out`: the folder of all studies.
    """
    home = study_folder(out, study, scale)
    check_format(home)
    trials = expand(study, scale, out)
    points: dict[tuple[str, ...], Point] = {}
    damaged: dict[str, str] = {}
    for trial in trials:
        if trial.state() != "finished":
            continue
        try:
            parts = _read(trial, study)
        # Whatever damaged files lead to: the report of the other trials is still written.
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = str(error) if isinstance(error, ValueError) else repr(error)
            if str(trial.folder) not in problem:
                problem = f"{trial.folder} cannot be read: {problem}"
            damaged[trial.name] = trial.with_remedy(problem)
            continue
        for part in parts:
            key = tuple(f"{k}={v}" for k, v in part.levels.items())
            if key in points:
                _merge(points[key], part)
            else:
                points[key] = part
    sessions = _read_sessions(home, damaged)
    return Results(study, scale, home, trials, list(points.values()), sessions, damaged)


def _whole_run(trial: Trial) -> int | None:
    """The steps of a run that has ended before all of them, because it had succeeded."""
    early = json.loads(trial.result_path.read_text()).get("stopped_at_success")
    return int(trial.settings["total_timesteps"]) if early else None


def _merge(point: Point, part: Point) -> None:
    """Adds the seeds of another trial of the same combination of levels."""
    point.trials += part.trials
    for name, values in part.values.items():
        point.values[name] = np.concatenate([point.values.get(name, np.zeros(0)), values])
    point.summary["seconds"] = point.summary.get("seconds", 0) + part.summary["seconds"]


def _read(trial: Trial, study: Study) -> list[Point]:
    if isinstance(trial.kind, Measurement):
        return _read_rows(trial)
    from agalite.training.logging import read_metrics
    from agalite.training.run import Run

    summary = Run.open(trial.folder).read_summary() or {}
    table = read_metrics(trial.folder)
    if isinstance(trial.kind, Training):
        reached = int(table["step"].max(initial=0))
        if reached != summary["steps"]:
            raise ValueError(
                f"{trial.folder / 'metrics.csv'} ends at step {reached:,}, the run at "
                f"{summary['steps']:,}"
            )
    values, shortened = {}, {}
    for failure in study.seed_failures:
        if failure.column in table:
            fifth = max(1, int(table["step"].max()) // 5)
            values[failure.column] = mean_of_last_steps(table, failure.column, fifth)
    if score := study.scores.get(trial.levels.get(TASK, "")):
        values |= _scores(trial, table, score)
    for metric in study.metrics:
        if metric.column.startswith("summary:"):
            found = summary[metric.column.removeprefix("summary:")]
            values[metric.column] = np.atleast_1d(np.asarray(found, np.float64))
        elif metric.column.startswith("whole:"):
            column = metric.column.removeprefix("whole:")
            if column in table:
                curves = binned_curves(table, column, _WHOLE_BINS, _whole_run(trial))[1]
                values[metric.column] = np.nanmean(curves, axis=1)
        elif metric.column in table:
            fifth = max(1, int(table["step"].max()) // 5)
            last_steps = fifth if metric.last_steps is None else min(metric.last_steps, fifth)
            values[metric.column] = mean_of_last_steps(table, metric.column, last_steps)
            if metric.last_steps is not None and last_steps < metric.last_steps:
                shortened[metric.column] = last_steps
    facts = {
        "steps": summary.get("steps"),
        "parameters": summary.get("parameters"),
        "state": _state_size(trial) if study.scores else None,
        "seconds": summary.get("seconds_of_this_session", 0.0),
    }
    return [Point(dict(trial.levels), values, [trial], facts, shortened)]


def _scores(trial: Trial, table: dict[str, np.ndarray], score: Score) -> dict[str, Values]:
    """The score at the end of a run, and the step at which the task was learned."""
    fifth = max(1, int(table["step"].max()) // 5)
    ends, curves = binned_curves(table, score.column, _SCORE_BINS, _whole_run(trial))
    learned = score.of(curves) >= LEARNED
    first = np.where(learned.any(axis=1), ends[np.argmax(learned, axis=1)], np.nan)
    return {
        SCORE: score.of(mean_of_last_steps(table, score.column, fifth)),
        "learned at": first,
    }


def _state_size(trial: Trial) -> int:
    """Floats that the memory of a trial carries from step to step."""
    import jax

    from agalite.memory import make_memory

    config = make_config(trial)
    # It does not depend on the width of the input.
    return jax.eval_shape(lambda: make_memory(config.memory, 8, **config.memory_options)).state_size


def count_failures(point: Point, ways: Sequence[SeedFailure]) -> dict[str, int]:
    """How many seeds of a point failed in each way; a seed counts for the first that applies."""
    counts: dict[str, int] = {}
    left: np.ndarray | None = None
    for way in ways:
        values = point.values.get(way.column)
        if values is None:
            continue
        left = np.ones(len(values), bool) if left is None else left
        failed = left & ~(values >= way.below)  # NaN, where no episode ended, counts
        counts[way.name] = int(failed.sum())
        left &= ~failed
    return {way.name: counts.get(way.name, 0) for way in ways} if counts else {}


def _read_rows(trial: Trial) -> list[Point]:
    """A point for each row that a measurement returned."""
    stored = json.loads(trial.rows_path.read_text())
    seconds = stored["seconds"] / max(1, len(stored["rows"]))
    points = []
    for row in stored["rows"]:
        levels = {**trial.levels, **{k: str(v) for k, v in row["levels"].items()}}
        values = {
            k: np.array([np.nan if x is None else x for x in v], np.float64)
            for k, v in row["values"].items()
        }
        points.append(Point(levels, values, [trial], {"seconds": seconds}))
    return points


def _header(path: Path) -> list[str]:
    try:
        with open(path) as file:
            return file.readline().strip().split(",")
    except FileNotFoundError:
        return []


def _read_sessions(home: Path, damaged: dict[str, str]) -> list[dict[str, Any]]:
    found = []
    for path in sorted(home.glob("sessions/*.json")):
        try:
            session = json.loads(path.read_text())
            missing = _SESSION_FIELDS - session.keys()
        except (OSError, ValueError, AttributeError) as error:
            damaged[path.name] = f"{path} cannot be read: {error}; remove it"
            continue
        if missing:
            damaged[path.name] = f"{path} has no {', '.join(sorted(missing))}; remove it"
            continue
        found.append(session)
    return found


@dataclass(frozen=True)
class Choice:
    """What a sweep has chosen for one combination of the levels `Selection.within`."""

    within: dict[str, str]
    chosen: dict[str, str]
    mean: float
    settings: dict[str, Any]
    """What the chosen levels stand for: {"agent.learning_rate": 0.0005, ...}."""
    candidates: int
    """How many were compared."""


def choose(results: Results) -> list[Choice]:
    """Applies the selection rule of a sweep.

    The best candidate has the best mean of the first metric over all other factors and seeds;
    between those within 2% of the best, the rule may name a metric that decides. A candidate with
    a seed in which no episode ended is chosen last.
    """
    rule = results.study.selection
    if rule is None:
        return []
    metric = results.study.metrics[0]
    factors = {factor.name: factor for factor in results.study.factors_at(results.scale)}
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Point]]] = {}
    for point in results.points:
        if metric.column not in point.values:
            continue
        group = tuple(point.levels[name] for name in rule.within)
        candidate = tuple(point.levels[name] for name in rule.choose)
        groups.setdefault(group, {}).setdefault(candidate, []).append(point)
    choices = []
    for group, candidates in groups.items():
        means = {key: _mean(points, metric) for key, points in candidates.items()}
        ranks = {key: _rank(mean, metric) for key, mean in means.items()}
        best = max(ranks, key=ranks.__getitem__)
        if rule.between_equals is not None and np.isfinite(ranks[best]):
            decides = results.study.metric(rule.between_equals)
            near = _NEAR * abs(ranks[best])
            equals = [key for key, rank in ranks.items() if rank >= ranks[best] - near]
            best = max(equals, key=lambda key: _rank(_mean(candidates[key], decides), decides))
        chosen = dict(zip(rule.choose, best, strict=True))
        settings: dict[str, Any] = {}
        for name, label in chosen.items():
            settings.update(factors[name].levels[label])
        within = dict(zip(rule.within, group, strict=True))
        choices.append(Choice(within, chosen, means[best], settings, len(means)))
    return choices


def _mean(points: Sequence[Point], metric: Metric) -> float:
    """The mean over points of their means over seeds; NaN if a seed has no value."""
    return float(np.mean([np.mean(point.values[metric.column]) for point in points]))


def _rank(mean: float, metric: Metric) -> float:
    """Higher is better; without a value it is the lowest."""
    if np.isnan(mean):
        return -np.inf
    return mean if metric.higher_is_better else -mean
