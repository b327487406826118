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


class Damaged(ValueError):
    """Files of one trial that cannot be used: no reason to stop the others."""


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

    @property
    def end_path(self) -> Path:
        """The file that is written last: where it is, the trial has ended."""
        return self.rows_path if isinstance(self.work, Measurement) else (
            self.folder / "summary.json")  # fmt: skip

    def state(self) -> str:
        if self.end_path.exists():
            return "failed" if self.damage() else "finished"
        if self.failure_path.exists():
            return "failed"
        return "half-finished" if (self.folder / "config.json").exists() else "not begun"

    def failure(self) -> str:
        """Why it failed; empty if it did not."""
        if damage := self.damage():
            return damage
        try:
            return str(json.loads(self.failure_path.read_text())["error"])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError):
            return f"why is not known: {self.failure_path} cannot be read"

    def damage(self) -> str:
        """What is wrong with the files of a trial that has ended, as far as a glance shows (the
        report reads all of them); empty if nothing is, or if it has not ended."""
        try:
            found = json.loads(self.end_path.read_text())
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            return self.mended_by(f"{self.end_path} cannot be read: {error}")
        measured = isinstance(self.work, Measurement)
        needed = {"rows", "asked", "seconds"} if measured else {"steps"}
        if not isinstance(found, dict) or not needed <= found.keys():
            return self.mended_by(f"{self.end_path} is not what a finished trial writes")
        for name in () if measured else ("config.json", "metrics.csv"):
            path = self.folder / name
            if not path.exists() or not path.stat().st_size:
                return self.mended_by(f"{path} is {'empty' if path.exists() else 'missing'}")
        return ""

    def mended_by(self, what: str) -> str:
        """What is wrong, with the way out."""
        return f"{what}; remove the folder {self.folder} and run the study again"


def counted(n: int, what: str) -> str:
    """ "1 trial", "2,000 trials"."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


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
    for agent in chosen or {}:
        # At any scale: what the paper's sweep chose may be tried out at a smaller one.
        if not (known := _agents(study)):
            raise ValueError(f"study {study.name} has no agents; run it without --chosen")
        errors.one_of(f"agent of study {study.name} in chosen", agent, known)
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


def not_chosen(trials: Sequence[Trial], chosen: Mapping[str, Any] | None) -> list[str]:
    """The agents whose settings stay as declared, though others were given what a sweep chose."""
    if chosen is None:
        return []
    agents = dict.fromkeys(trial.levels["agent"] for trial in trials if "agent" in trial.levels)
    return [agent for agent in agents if agent not in chosen]


def _agents(study: Study) -> list[str]:
    """At all scales together."""
    found: dict[str, None] = {}
    for factor in (*study.factors, *(f for at in study.scales.values() for f in at.factors)):
        for label in factor.levels:
            found.update(dict.fromkeys([factor.split(label).get("agent", "")]))
    return [agent for agent in found if agent]


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
