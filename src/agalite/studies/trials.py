"""A study, at a scale, as trials: which there are, where their folders are, how far each is.

OUT/NAME/SCALE/
  trials/TRIAL/        an ordinary run folder, or rows.json of what was measured
  failures/TRIAL.json  why it failed, until it has succeeded
  sessions/*.json      who ran what, when, on which machine: one file for each `study run`
  report.html, figures/

The folders are the index: nothing else says what is done. A trial's folder is written by nobody but
the process that runs it, and a run's own lock sees to it that there is only one.
"""

import dataclasses
import gc
import importlib
import itertools
import json
import platform
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agalite import files, validation
from agalite.studies.catalogue.agents import size
from agalite.studies.declaration import Measurement, Study, Supervised, Training
from agalite.system import Stopped

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
        return int(self.settings.get("total_timesteps", 1)) * self.seeds

    @property
    def end_path(self) -> Path:
        """The file that is written last: where it is, the trial has ended."""
        return (
            self.rows_path if isinstance(self.work, Measurement) else (self.folder / "summary.json")
        )

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
    study: Study,
    scale: str,
    out: Path,
    only: Sequence[str] = (),
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Trial]:
    """All trials, or those that `only` ("factor=level", ...) names.

    `chosen`: what a sweep has chosen, settings for each agent (`chosen.json` of its report).
    """
    at, factors = study.at(scale), study.factors_at(scale)
    wanted = _wanted(study, scale, only)
    for agent in chosen or {}:
        # At any scale: what the paper's sweep chose may be tried out at a smaller one.
        if not (known := _agents(study)):
            raise ValueError(f"study {study.name} has no agents; run it without --chosen")
        validation.one_of(f"agent of study {study.name} in chosen", agent, known)
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
        validation.one_of(f"{name} of study {study.name} at scale {scale}", label, known[name])
        wanted.setdefault(name, set()).add(label)
    return wanted


# --- Doing a trial: from its beginning, or from where it stopped, to its end ----------------------


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: finished, failed, stopped, or busy (somebody else is at it)."""

    trial: str
    state: str
    seconds: float
    message: str = ""
    signal: int = 0


def perform(trial: Trial, patience: float = 0.0) -> Outcome:
    """Runs the trial, here. Whatever goes wrong is recorded, and no reason to stop the others.

    `patience`: seconds to wait for a process that still writes to the run's folder: one on a node
    that was lost may take a while to notice.
    """
    began = time.monotonic()
    deadline = began + patience
    while True:
        try:
            _perform(trial)
        except Stopped as stopped:
            number = stopped.code - 128
            return Outcome(trial.name, "stopped", time.monotonic() - began, str(stopped), number)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            return Outcome(trial.name, "busy", time.monotonic() - began, str(error))
        except Exception as error:
            message = _words(error)
            record_failure(trial, message, traceback.format_exc())
            return Outcome(trial.name, "failed", time.monotonic() - began, message)
        finally:
            _tidy_up()
        trial.failure_path.unlink(missing_ok=True)
        return Outcome(trial.name, "finished", time.monotonic() - began)


def record_failure(trial: Trial, message: str, details: str = "") -> None:
    trial.failure_path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(
        trial.failure_path,
        {
            "error": message,
            "details": details,
            "host": platform.node(),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        },
    )


def asked(trial: Trial) -> dict[str, Any]:
    """What decides the trial's outcome, as its folder keeps it; wrong settings raise ValueError."""
    if isinstance(trial.work, Measurement):
        return files.plain(
            {"function": trial.work.function, "seeds": trial.seeds, "settings": trial.settings}
        )
    return files.plain(config(trial).to_dict())


def stored(trial: Trial) -> dict[str, Any] | None:
    """What the trial's folder was made with, if it is there. Raises `Damaged` where that cannot be
    known."""
    if why := trial.damage():
        raise Damaged(why)
    if isinstance(trial.work, Measurement):
        try:
            return json.loads(trial.rows_path.read_text())["asked"]
        except FileNotFoundError:
            return None
    if not (trial.folder / "config.json").exists():
        return None
    from agalite.training.run import Run

    try:
        run = Run.open(trial.folder)
    except ValueError as error:
        raise Damaged(trial.mended_by(str(error))) from error
    return {k: v for k, v in run.asked.items() if k != "data_sha256"}


def check(trial: Trial) -> None:
    """Refuses settings that cannot be, and a folder that was made with other ones."""
    want, have = asked(trial), stored(trial)
    if have is None or have == want:
        return
    names = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
    raise ValueError(
        f"{trial.folder} was made with other settings ({', '.join(names)}); remove it, or choose "
        "another --out"
    )


def config(trial: Trial) -> Any:
    """The configuration of the run that the trial is."""
    flat = {**trial.settings, "seed": trial.first}
    if isinstance(trial.work, Supervised):
        return _supervised(trial.work.preset, {**flat, "seeds": trial.seeds})
    assert not isinstance(trial.work, Measurement)
    return _training(trial.work.preset, flat, trial.seeds)


def _training(preset_name: str, flat: dict[str, Any], seeds: int) -> Any:
    from agalite.envs.registry import on_host
    from agalite.memory.registry import MODELS
    from agalite.training.config import HostConfig, TrainConfig
    from agalite.training.presets import preset

    nested = nest(flat)
    env, memory = str(nested["env"]), str(nested.setdefault("memory", "agalite"))
    validation.one_of("memory", memory, MODELS)
    start = preset(preset_name, env, memory)
    _require_known(flat, HostConfig if on_host(env) else TrainConfig, start["agent"])
    agent = dataclasses.replace(start.pop("agent"), **nested.pop("agent", {}))
    options = {**start.pop("memory_options", {}), **nested.pop("memory_options", {})}
    values = {**start, **nested, "memory_options": options, "agent": agent}
    if on_host(env):
        if seeds != 1:
            raise ValueError(f"seeds={seeds}: {env} is trained one seed at a time")
        return HostConfig(**values)
    return TrainConfig(**values, seeds=seeds)


def _require_known(flat: Mapping[str, Any], kind: type, agent: Any = None) -> None:
    """Settings come from files too (a sweep's chosen.json), and a wrong name must say so. What is
    an option of a memory model or of an environment, that one knows best."""
    names = {f.name for f in dataclasses.fields(kind)}
    free = sorted(names & {"memory_options", "env_options"})
    known = [*(names - {*free, "agent"}), *(f"{name}.OPTION" for name in free)]
    if agent is not None:
        known += [f"agent.{f.name}" for f in dataclasses.fields(agent)]
    for name in flat:
        if not name.startswith(tuple(f"{x}." for x in free)):
            validation.one_of("setting", name, known)


def _supervised(preset_name: str, flat: dict[str, Any]) -> Any:
    from agalite.supervised.config import LRAConfig, preset
    from agalite.supervised.data import DataConfig

    _require_known(flat, LRAConfig)
    nested = nest(flat)
    memory = str(nested.get("memory", "agalite"))
    limit = DataConfig(
        task=str(nested["task"]), max_length=nested.get("max_length"), data="any"
    ).limit
    options = {**preset(preset_name, memory, limit), **nested.pop("memory_options", {})}
    return LRAConfig(**{**nested, "memory": memory, "memory_options": options})


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"agent.ent_coef": 0.1} -> {"agent": {"ent_coef": 0.1}}."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        inside = out
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return out


def progress(trial: Trial) -> float:
    """The share of the trial that is done, as its folder shows."""
    if trial.state() == "finished":
        return 1.0
    step = _last_step(trial.folder / "metrics.csv")
    return min(1.0, step / max(1, int(trial.settings.get("total_timesteps", 1))))


def _last_step(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    number = lines[-1].split(b",", 1)[0] if lines else b""
    return int(number) if number.isdigit() else 0


def _perform(trial: Trial) -> None:
    trial.folder.parent.mkdir(parents=True, exist_ok=True)
    check(trial)
    if trial.state() == "finished":
        return
    if isinstance(trial.work, Measurement):
        _measure(trial, trial.work)
        return
    from agalite.training.checkpoint import AllDamaged

    if isinstance(trial.work, Supervised):
        from agalite.supervised.train import resume, train
    else:
        from agalite.training.train import resume, train
    if (trial.folder / "config.json").exists():
        try:
            resume(trial.folder, quiet=True)
        except AllDamaged as error:
            raise Damaged(trial.mended_by(str(error))) from error
    else:
        train(config(trial), trial.folder, quiet=True)


def _measure(trial: Trial, work: Measurement) -> None:
    module, name = work.function.split(":")
    function = getattr(importlib.import_module(module), name)
    began = time.perf_counter()
    rows = function(seeds=trial.seeds, **trial.settings)
    seconds = time.perf_counter() - began
    trial.folder.mkdir(parents=True, exist_ok=True)
    whole = {"asked": asked(trial), "seconds": round(seconds, 3), "rows": rows}
    files.write_json(trial.rows_path, whole)


def _words(error: Exception) -> str:
    text = str(error) or "no message"
    expected = isinstance(error, ValueError | OSError)
    return text if expected else f"{type(error).__name__}: {text}"


_MANY_MAPS = 15_000


def _tidy_up() -> None:
    """Compiled programs take memory maps, of which Linux allows a process 65,530; a process that
    runs many trials would get there."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
