"""Doing a trial: from its beginning, or from where it stopped, to its end."""

import dataclasses
import gc
import importlib
import json
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agalite import errors, files
from agalite.process import Stopped
from agalite.studies.declaration import Measurement, Supervised
from agalite.studies.trials import Damaged, Trial


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
    errors.one_of("memory", memory, MODELS)
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
            errors.one_of("setting", name, known)


def _supervised(preset_name: str, flat: dict[str, Any]) -> Any:
    from agalite.supervised.config import LRAConfig, preset
    from agalite.supervised.data import DataConfig

    _require_known(flat, LRAConfig)
    nested = nest(flat)
    memory = str(nested.get("memory", "agalite"))
    limit = DataConfig(
        task=str(nested["task"]), max_length=nested.get("max_length"), data="any"
    ).limit  # fmt: skip
    options = {**preset(preset_name, memory, limit), **nested.pop("memory_options", {})}
    return LRAConfig(**{**nested, "memory": memory, "memory_options": options})


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"agent.entropy": 0.1} -> {"agent": {"entropy": 0.1}}."""
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
    return min(1.0, step / max(1, int(trial.settings.get("steps", 1))))


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
