"""What the finished trials of a study came to: numbers for each seed, by setting."""

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from agalite import validation
from agalite.studies.declaration import Measurement, Metric, Select, Study, Training
from agalite.studies.trials import Trial, expand, home
from agalite.training.plots import bootstrap_interval

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
        from agalite.training.logging import read_metrics

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
                {
                    k: np.array([np.nan if x is None else x for x in v], np.float64)
                    for k, v in row["values"].items()
                },
                [trial],
                {"seconds": whole["seconds"] / max(1, len(whole["rows"]))},
            )
            for row in whole["rows"]
        ]
    from agalite.training.logging import read_metrics
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


# --- What a sweep chooses: the settings with the best mean of the metric --------------------------


@dataclass(frozen=True)
class Choice:
    within: dict[str, str]
    chosen: dict[str, str]
    mean: float
    settings: dict[str, Any]
    """What the chosen levels stand for: {"agent.learning_rate": 0.0005, ...}."""
    of: int
    """How many were compared."""


def choose(results: Results) -> list[Choice]:
    """For each combination of the levels `within`: the best of `choose`, by the mean over all other
    factors and seeds. A seed without any finished episode makes a setting the last to be chosen."""
    rule = results.study.selection
    if rule is None:
        return []
    metric = results.study.metrics[0]
    factors = {factor.name: factor for factor in results.study.factors_at(results.scale)}
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[float]]] = {}
    for point in results.points:
        if metric.column not in point.values:
            continue
        group = tuple(point.levels[name] for name in rule.within)
        candidate = tuple(point.levels[name] for name in rule.choose)
        mean = float(np.mean(point.values[metric.column]))
        groups.setdefault(group, {}).setdefault(candidate, []).append(mean)
    sign = 1 if metric.higher else -1
    out = []
    for group, candidates in groups.items():
        scores = {key: float(np.mean(values)) for key, values in candidates.items()}
        # NaN compares with nothing: it is the worst there is.
        best = max(
            scores, key=lambda key: sign * scores[key] if scores[key] == scores[key] else -np.inf
        )
        chosen = dict(zip(rule.choose, best, strict=True))
        settings: dict[str, Any] = {}
        for name, label in chosen.items():
            settings.update(factors[name].levels[label])
        out.append(
            Choice(
                dict(zip(rule.within, group, strict=True)),
                chosen,
                scores[best],
                settings,
                len(scores),
            )
        )
    return out


# --- The paper's statistics over seeds, and the two of rliable (Agarwal et al., 2021) beside them -

EPISODES = "charts/episodes"


class Summary(NamedTuple):
    """Of one number a seed."""

    seeds: int
    mean: float
    error: float
    """Standard error; NaN with one seed."""
    low: float
    high: float
    """95% bootstrap interval of the mean."""
    middle: float
    """Interquartile mean."""


def summarise(values: Float[np.ndarray, " seeds"]) -> Summary:
    """Seeds without a number (no episode ended) are left out."""
    values = np.asarray(values, np.float64)
    return _summary(values[np.isfinite(values)].tobytes())


@lru_cache(maxsize=4096)  # a page shows the same numbers in figures and in tables
def _summary(data: bytes) -> Summary:
    values = np.frombuffer(data)
    if len(values) == 0:
        return Summary(0, *[np.nan] * 5)
    low, high = bootstrap_interval(values)
    return Summary(
        len(values),
        float(values.mean()),
        standard_error(values),
        float(low),
        float(high),
        interquartile_mean(values),
    )


def standard_error(values: Float[np.ndarray, " N"]) -> float:
    if len(values) < 2:
        return np.nan
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def interquartile_mean(values: Float[np.ndarray, " N"]) -> float:
    """Mean of the middle half: a quarter of the values, rounded down, is left out at each end."""
    values = np.sort(np.asarray(values, np.float64))
    cut = len(values) // 4
    return float(values[cut : len(values) - cut].mean())


def probability_of_improvement(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " M"]) -> float:
    """That a seed of x has more than a seed of y; equal ones count half (Mann and Whitney)."""
    x, y = np.asarray(x, np.float64)[:, None], np.asarray(y, np.float64)[None, :]
    return float(np.mean((x > y) + 0.5 * (x == y)))


def difference_interval(
    x: Float[np.ndarray, " N"],
    y: Float[np.ndarray, " M"],
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> tuple[float, float]:
    """Where mean(x) - mean(y) lies: both are resampled, each for itself."""
    return _interval(x, y, np.subtract, confidence, resamples, seed)


def ratio_interval(
    x: Float[np.ndarray, " N"],
    y: Float[np.ndarray, " M"],
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> tuple[float, float]:
    """Where mean(x) / mean(y) lies."""
    return _interval(x, y, np.divide, confidence, resamples, seed)


def _interval(x, y, combine, confidence, resamples, seed):
    rng = np.random.default_rng(seed)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    means = [
        rng.multinomial(len(v), np.full(len(v), 1 / len(v)), size=resamples) @ v / len(v)
        for v in (x, y)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(combine(*means), (tail, 1 - tail))
    return float(low), float(high)


def last_steps(
    table: Mapping[str, np.ndarray], column: str, last: int
) -> Float[np.ndarray, " seeds"]:
    """Mean of a metric over the episodes that ended in the last so many steps, for each seed.

    A line of the table is the mean over the episodes of its interval, so it counts as many times as
    there were episodes. NaN for a seed in which none ended.
    """
    validation.integer("last", last, minimum=1)
    steps = table["step"]
    late = steps > steps.max() - last
    late |= steps == steps.max()
    seeds = np.unique(table["seed"])
    return np.array([_mean(table, column, late & (table["seed"] == seed)) for seed in seeds])


def binned(
    table: Mapping[str, np.ndarray], column: str, bins: int
) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, "seeds bins"]]:
    """A curve for each seed: means over `bins` equal parts of the run, and the steps they end at.

    NaN where no episode ended.
    """
    validation.integer("bins", bins, minimum=1)
    steps, seeds = table["step"], np.unique(table["seed"])
    bins = min(bins, len(np.unique(steps)))
    ends = steps.max() * np.arange(1, bins + 1) / bins
    part = np.searchsorted(ends, steps)
    curves = [
        [_mean(table, column, (table["seed"] == seed) & (part == i)) for i in range(bins)]
        for seed in seeds
    ]
    return ends, np.array(curves)


def _mean(table: Mapping[str, np.ndarray], column: str, rows: np.ndarray) -> float:
    values = table[column][rows]
    known = np.isfinite(values)
    if not known.any():
        return np.nan
    of_episodes = column.startswith("charts/") and EPISODES in table and column != EPISODES
    weights = table[EPISODES][rows][known] if of_episodes else np.ones(known.sum())
    return float(np.average(values[known], weights=weights)) if weights.sum() > 0 else np.nan
