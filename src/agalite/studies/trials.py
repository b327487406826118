"""A study, at a scale, as trials: which there are, where their folders are, how far each is.

OUT/NAME/SCALE/
  trials/TRIAL/        an ordinary run folder, or rows.json of what was measured
  failures/TRIAL.json  why it failed, until it has succeeded
  sessions/*.json      who ran what, when, on which machine: one file for each `study run`
  report.html, figures/

The folders are the index: nothing else says what is done. A trial's folder is written by nobody but
the process that runs it, and a run's own lock sees to it that there is only one.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agalite import errors
from agalite.studies.declaration import Measurement, Study, Supervised, Training
from agalite.studies.sizes import size

STATES = ("finished", "half-finished", "failed", "not begun")


@dataclass(frozen=True)
class Trial:
    """One setting with seeds `first` to `first + seeds - 1`."""

    name: str
    levels: dict[str, str]
    settings: dict[str, Any]
    work: Training | Supervised | Measurement
    first: int
    seeds: int
    home: Path
    """The folder of the study at its scale."""

    @property
    def folder(self) -> Path:
        return self.home / "trials" / self.name

    @property
    def failure_path(self) -> Path:
        return self.home / "failures" / f"{self.name}.json"

    @property
    def rows_path(self) -> Path:
        return self.folder / "rows.json"

    @property
    def steps(self) -> int:
        """Of work, to weigh trials by."""
        return int(self.settings.get("steps", 1)) * self.seeds

    def state(self) -> str:
        ended = "rows.json" if isinstance(self.work, Measurement) else "summary.json"
        if (self.folder / ended).exists():
            return "finished"
        if self.failure_path.exists():
            return "failed"
        return "half-finished" if (self.folder / "config.json").exists() else "not begun"

    def failure(self) -> str:
        try:
            return json.loads(self.failure_path.read_text())["error"]
        except FileNotFoundError:
            return ""


def home(out: Path, study: Study, scale: str) -> Path:
    return out / study.name / scale


def expand(
    study: Study, scale: str, out: Path, only: Sequence[str] = (),
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Trial]:  # fmt: skip
    """All trials, or those that `only` ("factor=level", ...) names.

    `chosen`: what a sweep has chosen, settings for each agent (`chosen.json` of its report).
    """
    at, factors = study.at(scale), study.factors_at(scale)
    wanted = _wanted(study, scale, only)
    trials = []
    for labels in itertools.product(*(factor.levels for factor in factors)):
        levels: dict[str, str] = {}
        changes: dict[str, Any] = {}
        for factor, label in zip(factors, labels, strict=True):
            levels.update(factor.split(label))
            changes.update(factor.levels[label])
        if any(levels[name] not in allowed for name, allowed in wanted.items()):
            continue
        changes.update((chosen or {}).get(levels.get("agent", ""), {}))
        settings = {**study.base, **at.changes, **changes}
        if not isinstance(study.work, Measurement):
            memory = str(settings.get("memory", "agalite"))
            settings = {**study.base, **at.changes, **size(at.size, memory), **changes}
        trials += _with_seeds(study, scale, out, levels, settings)
    return trials


def _with_seeds(
    study: Study, scale: str, out: Path, levels: dict[str, str], settings: dict[str, Any]
) -> list[Trial]:
    at = study.at(scale)
    together = at.together or at.seeds
    if _alone(settings):
        together = 1
    name = _name(levels) or study.name
    trials = []
    for first in range(0, at.seeds, together):
        count = min(together, at.seeds - first)
        part = "" if at.seeds == count else f",seed={first}"
        if part and count > 1:
            part += f"-{first + count - 1}"
        trials.append(
            Trial(name + part, levels, settings, study.work, first, count, home(out, study, scale))
        )
    return trials


def _alone(settings: Mapping[str, Any]) -> bool:
    """Environments that are programs of their own are trained one seed at a time."""
    env = str(settings.get("env", ""))
    return env.startswith(("gym:", "memory-maze"))


def _name(levels: Mapping[str, str]) -> str:
    words = (f"{name}={label}" for name, label in levels.items())
    return ",".join(re.sub(r"[^\w.=+-]", "-", word) for word in words)


def _wanted(study: Study, scale: str, only: Sequence[str]) -> dict[str, set[str]]:
    """The same factor several times: any of them; different factors: all of them."""
    known: dict[str, dict[str, None]] = {}
    for factor in study.factors_at(scale):
        for label in factor.levels:
            for name, part in factor.split(label).items():
                known.setdefault(name, {})[part] = None
    wanted: dict[str, set[str]] = {}
    for word in only:
        name, equals, label = word.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"only={word!r} must be one of the factors of {study.name} with a level: "
                + ", ".join(f"{n}=..." for n in known)
            )
        errors.one_of(f"{name} of study {study.name} at scale {scale}", label, known[name])
        wanted.setdefault(name, set()).add(label)
    return wanted
