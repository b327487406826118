"""The trials of a study: which there are, where each is stored, how far it is, how it runs.

OUT/NAME/SCALE/
  study.json           the format of this folder
  trials/TRIAL/        a run folder (`agalite train`, `agalite lra`), or rows.json of a measurement
  failures/TRIAL.json  why a trial failed, until it succeeds
  sessions/*.json      one file per `study run`: command, machine, versions, outcomes (`runner.py`)
  report.html, figures/, numbers.json, chosen.json (`report.py`)

These folders are the only record of what is done. Only the process that runs a trial writes to its
folder; the lock of a run folder refuses a second one.
"""

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import os
import platform
import re
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agalite import files, validation
from agalite.studies.catalogue.agents import model_size
from agalite.studies.declaration import Measurement, Study, Supervised, Training
from agalite.system import Stopped

FORMAT = 2
STATES = ("finished", "unfinished", "failed", "not started")


class Damaged(ValueError):
    """The files of one trial cannot be used; other trials are not affected."""


@dataclass(frozen=True)
class Trial:
    """One combination of levels with its seeds: a job that can be pickled and run anywhere."""

    name: str
    levels: dict[str, str]
    """The label of each factor."""
    settings: dict[str, Any]
    """Flat settings, without seeds."""
    kind: Training | Supervised | Measurement
    first_seed: int
    seeds: int
    """The trial has the seeds from `first_seed` to `first_seed + seeds - 1`."""
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
    def result_path(self) -> Path:
        """The file that is written last: the trial has ended if it exists."""
        measured = isinstance(self.kind, Measurement)
        return self.rows_path if measured else self.folder / "summary.json"

    @property
    def steps(self) -> int:
        """Steps of all seeds: the weight of this trial in the study's progress."""
        return int(self.settings.get("total_timesteps", 1)) * self.seeds

    def state(self) -> str:
        """One of `STATES`, as the files show."""
        if self.result_path.exists():
            return "failed" if self.damage() else "finished"
        if self.failure_path.exists():
            return "failed"
        return "unfinished" if (self.folder / "config.json").exists() else "not started"

    def progress(self) -> float:
        """The share of the steps that metrics.csv has reached, from 0 to 1."""
        if self.state() == "finished":
            return 1.0
        step = _last_step(self.folder / "metrics.csv")
        return min(1.0, step / max(1, int(self.settings.get("total_timesteps", 1))))

    def failure(self) -> str:
        """Why the trial failed; empty if it did not."""
        if damage := self.damage():
            return damage
        try:
            return str(json.loads(self.failure_path.read_text())["error"])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError):
            return f"the reason is not known: {self.failure_path} cannot be read"

    def damage(self) -> str:
        """What is wrong with the files of an ended trial; empty if nothing is, or it has not ended.

        This is a quick check. The report reads all of the files.
        """
        try:
            result = json.loads(self.result_path.read_text())
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            return self.with_remedy(f"{self.result_path} cannot be read: {error}")
        measured = isinstance(self.kind, Measurement)
        needed = {"rows", "requested", "seconds"} if measured else {"steps"}
        if not isinstance(result, dict) or not needed <= result.keys():
            return self.with_remedy(f"{self.result_path} is not what a finished trial writes")
        for name in () if measured else ("config.json", "metrics.csv"):
            path = self.folder / name
            if not path.exists() or not path.stat().st_size:
                return self.with_remedy(f"{path} is {'empty' if path.exists() else 'missing'}")
        return ""

    def with_remedy(self, problem: str) -> str:
        """A problem with this trial's files, and what to do about it."""
        return f"{problem}; remove the folder {self.folder} and run the study again"


def _last_step(path: Path) -> int:
    """The step in the last complete line of metrics.csv; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    number = lines[-1].split(b",", 1)[0] if lines else b""
    return int(number) if number.isdigit() else 0


def study_folder(out: Path, study: Study, scale: str) -> Path:
    """Where the trials and the report of a study at a scale are."""
    return out / study.name / scale


def check_format(home: Path) -> None:
    """Refuses a study's folder that another version of agalite made in another format."""
    path = home / "study.json"
    if not (home / "trials").exists() and not path.exists():
        return
    try:
        found = json.loads(path.read_text())["format"]
    except FileNotFoundError:
        found = 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error
    if found != FORMAT:
        raise ValueError(
            f"{home} is in study format {found}, and this version of agalite reads format "
            f"{FORMAT}; run the study again with another --out"
        )


def write_format(home: Path) -> None:
    """Marks a study's folder with the format that `check_format` expects."""
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "study.json").exists():
        files.write_json(home / "study.json", {"format": FORMAT})


def expand(
    study: Study,
    scale: str,
    out: Path,
    only: Sequence[str] = (),
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Trial]:
    """The trials of a study.

    **Arguments:**

    - `study`, `scale`: what to run, and how large.
    - `out`: the folder of all studies.
    - `only`: "factor=label" selects trials, "seed=0" those that train this seed. Several labels
      of one factor are alternatives; several factors must all match.
    - `chosen`: settings for each agent, as the report of a sweep writes them (chosen.json).

    **Returns:**

    The trials, in the order of the declaration.
    """
    at = study.at(scale)
    factors = study.factors_at(scale)
    wanted = _parse_only(study, scale, only)
    seeds = {int(seed) for seed in wanted.pop("seed", set())}
    chosen = chosen or {}
    for agent in chosen:
        # Agents of any scale: a choice made at one scale may be tried out at another.
        if not (known := _all_agents(study)):
            raise ValueError(f"study {study.name} has no agents; run it without --chosen")
        validation.check_one_of(f"agent of study {study.name} in chosen", agent, known)
    trials = []
    for labels in itertools.product(*(factor.levels for factor in factors)):
        levels: dict[str, str] = {}
        varied: dict[str, Any] = {}
        for factor, label in zip(factors, labels, strict=True):
            levels.update(factor.split(label))
            varied.update(factor.levels[label])
        if any(levels[name] not in allowed for name, allowed in wanted.items()):
            continue
        varied.update(chosen.get(levels.get("agent", ""), {}))
        settings = {**study.base, **at.settings, **varied}
        if not isinstance(study.kind, Measurement):
            memory = str(settings.get("memory", "agalite"))
            size = model_size(at.model_size, memory)
            settings = {**study.base, **at.settings, **size, **varied}
        kind = study.kind_at(scale)
        if isinstance(kind, Training) and "total_timesteps" not in settings:
            settings["total_timesteps"] = _steps_of_preset(kind, settings)
        trials += _share_seeds(study, scale, out, levels, settings)
    if seeds:
        trials = [x for x in trials if seeds & set(range(x.first_seed, x.first_seed + x.seeds))]
    return trials


def _steps_of_preset(kind: Training, settings: Mapping[str, Any]) -> int:
    from agalite.training.config import AGENTS
    from agalite.training.presets import preset

    memory, algorithm = str(settings.get("memory", "agalite")), settings.get("algorithm")
    kind_of_agent = None if algorithm is None else AGENTS.get(str(algorithm))
    start = preset(kind.preset, str(settings["env"]), memory, kind_of_agent)
    return int(start["total_timesteps"])


def sweep_choice(study: Study, scale: str, out: Path) -> tuple[Path, dict[str, Any]] | None:
    """The chosen.json of the study's sweep and what it says; None without a sweep or its report."""
    path = out / study.sweep / scale / "chosen.json"
    if not study.sweep or not path.exists():
        return None
    return path, read_choice(path)


def read_choice(path: Path) -> dict[str, Any]:
    """Settings for each agent, as a sweep's report writes them (chosen.json)."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"chosen={str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(x, dict) for x in found.values()):
        raise ValueError(f"chosen={str(path)!r} is not the chosen.json of a sweep's report")
    return found


def agents_without_choice(trials: Sequence[Trial], chosen: Mapping[str, Any] | None) -> list[str]:
    """The agents that keep their declared settings although a sweep chose settings for others."""
    if chosen is None:
        return []
    agents = dict.fromkeys(trial.levels["agent"] for trial in trials if "agent" in trial.levels)
    return [agent for agent in agents if agent not in chosen]


def _all_agents(study: Study) -> list[str]:
    """The labels of the factor "agent" at all scales."""
    found: dict[str, None] = {}
    for factor in (*study.factors, *(f for at in study.scales.values() for f in at.factors)):
        for label in factor.levels:
            found.update(dict.fromkeys([factor.split(label).get("agent", "")]))
    return [agent for agent in found if agent]


def _share_seeds(
    study: Study, scale: str, out: Path, levels: dict[str, str], settings: dict[str, Any]
) -> list[Trial]:
    """One trial for each `seeds_per_run` seeds of a combination of levels."""
    at, home = study.at(scale), study_folder(out, study, scale)
    # Environments that run in processes of their own are trained one seed at a time.
    on_host = str(settings.get("env", "")).startswith(("gym:", "memory-maze"))
    per_run = 1 if on_host else at.seeds_per_run or at.seeds
    words = (f"{factor}={label}" for factor, label in levels.items())
    name = ",".join(re.sub(r"[^\w.=+-]", "-", word) for word in words) or study.name
    trials = []
    end = at.first_seed + at.seeds
    for first in range(at.first_seed, end, per_run):
        count = min(per_run, end - first)
        suffix = "" if at.seeds == count else f",seed={first}"
        if suffix and count > 1:
            suffix += f"-{first + count - 1}"
        kind = study.kind_at(scale)
        trials.append(Trial(name + suffix, levels, settings, kind, first, count, home))
    return trials


def _parse_only(study: Study, scale: str, only: Sequence[str]) -> dict[str, set[str]]:
    at = study.at(scale)
    seeds = range(at.first_seed, at.first_seed + at.seeds)
    known = {**study.labels_at(scale), "seed": [str(seed) for seed in seeds]}
    wanted: dict[str, set[str]] = {}
    for word in only:
        name, equals, label = word.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"only={word!r} must be one of the factors of {study.name} with a level: "
                + ", ".join(f"{n}=..." for n in known)
            )
        what = f"{name} of study {study.name} at scale {scale}"
        validation.check_one_of(what, label, known[name])
        wanted.setdefault(name, set()).add(label)
    return wanted


# The settings of a trial as the configuration of a run.


def make_config(trial: Trial) -> Any:
    """The TrainConfig, HostConfig or LRAConfig of a trial; ValueError if a setting is wrong."""
    flat = {**trial.settings, "seed": trial.first_seed}
    if isinstance(trial.kind, Supervised):
        return _lra_config(trial.kind.preset, {**flat, "seeds": trial.seeds})
    assert isinstance(trial.kind, Training)
    return _train_config(trial.kind.preset, flat, trial.seeds)


def _train_config(preset_name: str, flat: dict[str, Any], seeds: int) -> Any:
    from agalite.envs.registry import on_host
    from agalite.memory.registry import MODELS
    from agalite.training.config import AGENTS, HostConfig, TrainConfig
    from agalite.training.presets import preset

    nested = nest(flat)
    algorithm = nested.pop("algorithm", None)  # as --algorithm: that agent with its defaults
    env, memory = str(nested["env"]), str(nested.setdefault("memory", "agalite"))
    validation.check_one_of("memory", memory, MODELS)
    if algorithm is not None:
        validation.check_one_of("algorithm", algorithm, AGENTS)
    start = preset(preset_name, env, memory, None if algorithm is None else AGENTS[algorithm])
    _check_names(flat, HostConfig if on_host(env) else TrainConfig, start["agent"])
    agent = dataclasses.replace(start.pop("agent"), **nested.pop("agent", {}))
    options = {**start.pop("memory_options", {}), **nested.pop("memory_options", {})}
    values = {**start, **nested, "memory_options": options, "agent": agent}
    if on_host(env):
        if seeds != 1:
            raise ValueError(f"seeds={seeds}: {env} is trained one seed at a time")
        return HostConfig(**values)
    return TrainConfig(**values, seeds=seeds)


def _lra_config(preset_name: str, flat: dict[str, Any]) -> Any:
    from agalite.supervised.config import LRAConfig, preset
    from agalite.supervised.data import DataConfig

    _check_names(flat, LRAConfig)
    nested = nest(flat)
    memory = str(nested.get("memory", "agalite"))
    data = DataConfig(task=str(nested["task"]), max_length=nested.get("max_length"), data="any")
    options = {**preset(preset_name, memory, data.limit), **nested.pop("memory_options", {})}
    return LRAConfig(**{**nested, "memory": memory, "memory_options": options})


def _check_names(flat: Mapping[str, Any], config: type, agent: Any = None) -> None:
    """Refuses unknown settings, which may come from a file (a sweep's chosen.json).

    Options of memory models and environments are checked by those.
    """
    names = {f.name for f in dataclasses.fields(config)}
    options = sorted(names & {"memory_options", "env_options"})
    known = [*(names - {*options, "agent"}), *(f"{name}.OPTION" for name in options)]
    if agent is not None:
        known += ["algorithm", *(f"agent.{f.name}" for f in dataclasses.fields(agent))]
    for name in flat:
        if not name.startswith(tuple(f"{x}." for x in options)):
            validation.check_one_of("setting", name, known)


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


def requested(trial: Trial) -> dict[str, Any]:
    """Everything that decides a trial's outcome, in the form its folder stores."""
    if isinstance(trial.kind, Measurement):
        return files.plain(
            {"function": trial.kind.function, "seeds": trial.seeds, "settings": trial.settings}
        )
    return files.plain(make_config(trial).to_dict())


def stored(trial: Trial) -> dict[str, Any] | None:
    """What a trial's folder was made with; None if there is no folder. Raises `Damaged`."""
    if problem := trial.damage():
        raise Damaged(problem)
    if isinstance(trial.kind, Measurement):
        try:
            return json.loads(trial.rows_path.read_text())["requested"]
        except FileNotFoundError:
            return None
    if not (trial.folder / "config.json").exists():
        return None
    from agalite.training.run import Run

    try:
        run = Run.open(trial.folder)
    except ValueError as error:
        raise Damaged(trial.with_remedy(str(error))) from error
    settings = {k: v for k, v in run.settings.items() if k != "data_sha256"}
    if isinstance(trial.kind, Training):
        from agalite.training.config import config_from_dict

        # A run of an older version has the default of every setting that is new since.
        with contextlib.suppress(ValueError):
            return files.plain(config_from_dict(settings).to_dict())
    return settings


def check_settings(trial: Trial) -> None:
    """Refuses wrong settings, and a folder that was made with other settings."""
    want, have = requested(trial), stored(trial)
    if have is None or have == want:
        return
    names = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
    raise ValueError(
        f"{trial.folder} was made with other settings ({', '.join(names)}); remove it, or choose "
        "another --out"
    )


def find_same_run(trial: Trial) -> Trial | None:
    """A finished trial of another study, at the same scale and in the same `out`, that is the same
    run: the same configuration with the same seeds. None if there is none, and for measurements.
    """
    if isinstance(trial.kind, Measurement):
        return None
    want = requested(trial)
    scale = trial.home.name
    for path in sorted(trial.home.parent.parent.glob(f"*/{scale}/trials/*/config.json")):
        home = path.parents[2]
        other = dataclasses.replace(trial, name=path.parent.name, home=home)
        if home == trial.home or other.state() != "finished":
            continue
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            found = json.loads(path.read_text())
            # These tell most runs apart without reading the rest.
            if any(found.get(name) != want[name] for name in ("memory", "seed", "seeds")):
                continue
            if _with_defaults(stored(other) or {}) == _with_defaults(want):
                return other
    return None


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with every option of the memory model, also those that were not given."""
    from agalite.memory.registry import MODELS

    config = MODELS[settings["memory"]].config(**settings["memory_options"])
    return {**settings, "memory_options": files.plain(dataclasses.asdict(config))}


# Running one trial.


@dataclass(frozen=True)
class Outcome:
    """How a trial ended in this session."""

    trial: str
    state: str
    """finished, failed, stopped (it can be resumed) or busy (another process is running it)."""
    seconds: float
    message: str = ""
    signal: int = 0
    """The signal that stopped it."""


def run_trial(trial: Trial, lock_timeout: float = 0.0) -> Outcome:
    """Runs a trial in this process, from its start or its last checkpoint.

    **Arguments:**

    - `trial`: the trial.
    - `lock_timeout`: seconds to wait while another process holds the lock of the run folder. A
      process on a lost node of a cluster takes a while to end.

    **Returns:**

    The outcome. Errors are recorded in the trial's failure file and not raised.
    """
    start = time.monotonic()

    def outcome(state: str, message: str = "", signal: int = 0) -> Outcome:
        return Outcome(trial.name, state, time.monotonic() - start, message, signal)

    while True:
        try:
            _start_or_resume(trial)
        except Stopped as stopped:
            return outcome("stopped", signal=stopped.code - 128)
        except BlockingIOError as error:
            if time.monotonic() - start < lock_timeout:
                time.sleep(0.5)
                continue
            return outcome("busy", str(error))
        except Exception as error:
            message = str(error) or "no message"
            if not isinstance(error, ValueError | OSError):
                message = f"{type(error).__name__}: {message}"
            record_failure(trial, message, traceback.format_exc())
            return outcome("failed", message)
        finally:
            _limit_memory_maps()
        trial.failure_path.unlink(missing_ok=True)
        return outcome("finished")


def record_failure(trial: Trial, message: str, details: str = "") -> None:
    """Writes why a trial failed to its failure file."""
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


def _start_or_resume(trial: Trial) -> None:
    trial.folder.parent.mkdir(parents=True, exist_ok=True)
    check_settings(trial)
    if trial.state() == "finished":
        return
    if isinstance(trial.kind, Measurement):
        _measure(trial, trial.kind)
        return
    if not trial.folder.exists() and (same := find_same_run(trial)) is not None:
        _copy_run(same.folder, trial.folder)
        return
    from agalite.training.checkpoint import AllDamaged

    if isinstance(trial.kind, Supervised):
        from agalite.supervised.train import resume, train
    else:
        from agalite.training.train import resume, train
    if (trial.folder / "config.json").exists():
        try:
            resume(trial.folder, quiet=True)
        except AllDamaged as error:
            raise Damaged(trial.with_remedy(error.args[0])) from error
    else:
        train(make_config(trial), trial.folder, quiet=True)


def _copy_run(source: Path, folder: Path) -> None:
    """Copies a finished run, so that the folder appears whole or not at all."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(source, part, ignore=shutil.ignore_patterns(".lock"))
        with open(part / "run.log", "a") as log:
            log.write(f"copied from {source}, the same run\n")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _measure(trial: Trial, kind: Measurement) -> None:
    module, name = kind.function.split(":")
    function = getattr(importlib.import_module(module), name)
    start = time.perf_counter()
    rows = function(seeds=trial.seeds, **trial.settings)
    seconds = time.perf_counter() - start
    trial.folder.mkdir(parents=True, exist_ok=True)
    result = {"requested": requested(trial), "seconds": round(seconds, 3), "rows": rows}
    files.write_json(trial.rows_path, result)


_MANY_MAPS = 15_000


def _limit_memory_maps() -> None:
    """Drops compiled programs when they hold many memory maps.

    Linux allows a process 65,530 of them, and one process may run many trials.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
