"""The options of `agalite train`: those of the settings, the agent, the environment and the model.

Which options there are depends on the environment, the model and the algorithm, so those are read
first; the rest of the command line is then made from their own dataclasses and signatures.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from agalite import validation
from agalite.envs.command import parse_options
from agalite.envs.registry import ENVIRONMENTS, GYMNASIUM, on_host
from agalite.memory.registry import MODELS
from agalite.training import run
from agalite.training.config import AGENTS, Config, HostConfig, HostSettings, Settings, TrainConfig
from agalite.training.presets import PRESETS, preset


@dataclasses.dataclass(frozen=True)
class Choices:
    """What decides the other options."""

    env: tyro.conf.Positional[str]
    """The environment: a name that `agalite envs` lists, or gym:<id>."""
    memory: str = "agalite"
    """The memory model: a name that `agalite models` lists."""
    algorithm: str = ""
    """a2c, ppo or appo; the preset's if not given."""
    preset: str = "tuned"
    """Where the other options start: tuned (ours) or paper."""
    out: Path | None = None
    """Folder of the run; runs/<env>-<memory>-<time> if not given."""
    devices: int | None = None
    """CPU devices to spread the seeds over; one for each seed, up to the cores, if not given."""
    wandb: bool = False
    """Send the metrics to Weights & Biases too, each seed as a run; WANDB_MODE=offline keeps them
    for a later `wandb sync`."""
    ray: str | None = None
    """Environments of Gymnasium only: put the actors on the Ray cluster at this address; auto
    finds one, or starts one here."""


def parse(words: Sequence[str], prog: str) -> tuple[Choices, TrainConfig | HostConfig]:
    choices = _peek(words)
    start = preset(choices.preset, choices.env, choices.memory)
    agent = start.pop("agent")
    if choices.algorithm and AGENTS[choices.algorithm] is not type(agent):
        agent = AGENTS[choices.algorithm]()
    memory_options = start.pop("memory_options", {})
    host = on_host(choices.env)
    kind = HostSettings if host else Settings
    settings = kind(**start)
    if host and any(word.partition("=")[0] == "--seeds" for word in words):
        raise ValueError(
            f"seeds: {choices.env} is stepped outside JAX, one seed at a time; start a run for "
            "each, with --seed"
        )
    env_options = _env_options(choices.env)
    model = MODELS[choices.memory].config
    flat = tyro.conf.arg(name="")
    parts: list[Any] = [
        ("choices", Annotated[Choices, flat]),
        ("settings", Annotated[kind, flat], settings),
        ("agent", Annotated[type(agent), flat], agent),
        ("env", Annotated[env_options, flat], env_options()),
        ("model", model, model(**memory_options)),
    ]
    command = dataclasses.make_dataclass("Train", parts, frozen=True)
    _refuse_misplaced(words, choices, (Choices, kind, type(agent), env_options))
    if not {"-h", "--help"} & set(words):  # where an error sends its reader
        prog = f"{prog} {choices.env} --memory {choices.memory}"
    parsed: Any = tyro.cli(
        command, args=list(words), prog=prog, description="Train an agent that remembers."
    )
    changed = _changed(parsed.env, env_options())
    if choices.env.startswith(GYMNASIUM):
        changed = parse_options(changed.get("set", ()))
    return parsed.choices, (HostConfig if host else TrainConfig)(
        **dataclasses.asdict(parsed.settings),
        env=choices.env,
        env_options=changed,
        memory=choices.memory,
        memory_options=_changed(parsed.model, model()),
        agent=parsed.agent,
    )


def configure(preset_name: str, settings: Mapping[str, Any]) -> TrainConfig | HostConfig:
    """Fields of `TrainConfig`, or for an environment of Gymnasium of `HostConfig`, by name; what is
    not given is the preset's, as in `parse`."""
    env, memory = settings.get("env"), settings.get("memory", Choices.memory)
    if not isinstance(env, str):
        raise ValueError(f"env={env!r} must be one of: {', '.join(ENVIRONMENTS)}, or gym:<id>")
    kind = HostConfig if on_host(env) else TrainConfig
    known = [f.name for f in dataclasses.fields(kind)]
    for name in settings:
        validation.one_of("setting", name, known)
    validation.one_of("memory", memory, MODELS)
    start = preset(preset_name, env, memory)
    options = {**start.pop("memory_options", {}), **settings.get("memory_options", {})}
    return kind(**{**start, **settings, "memory_options": options})


def new_folder(config: Config) -> Path:
    """Where a run goes if nobody says."""
    return run.new_folder(config.env, config.memory)


def _peek(words: Sequence[str]) -> Choices:
    """The choices alone, from anywhere on the command line."""
    found: dict[str, str] = {}
    names = ("memory", "algorithm", "preset")
    for i, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in names:
            value = value if equals else "".join(words[i + 1 : i + 2])
            found[name] = value
    env = next((w for i, w in enumerate(words) if _is_positional(words, i)), "tmaze")
    choices = dataclasses.replace(Choices(env), **found)
    if choices.env not in ENVIRONMENTS and not on_host(choices.env):
        raise ValueError(
            f"env={env!r} is unknown; choose one of: {', '.join(ENVIRONMENTS)}, or gym:<id>"
        )
    validation.one_of("memory", choices.memory, MODELS)
    validation.one_of("preset", choices.preset, PRESETS)
    if choices.algorithm:
        validation.one_of("algorithm", choices.algorithm, AGENTS)
    return choices


def _is_positional(words: Sequence[str], i: int) -> bool:
    """The environment comes first, or after options that each took a value."""
    if words[i].startswith("-"):
        return False
    known = words[i] in ENVIRONMENTS or words[i].startswith(GYMNASIUM)
    return i == 0 or (known and words[i - 1] != "--memory")


@dataclasses.dataclass(frozen=True)
class GymnasiumOptions:
    """What `gymnasium.make` takes depends on the environment, and only it knows."""

    set: tuple[str, ...] = ()
    """Options of the environment, for example: --set max_episode_steps=200."""


def _env_options(env: str) -> type:
    """A dataclass of what the environment's constructor takes, with its defaults."""
    if env.startswith(GYMNASIUM):
        return GymnasiumOptions
    world = ENVIRONMENTS[env].load()
    kind = HostSettings if on_host(env) else Settings
    settings = {f.name for kind in (kind, *AGENTS.values()) for f in dataclasses.fields(kind)}
    fields: list[Any] = []
    for p in inspect.signature(world).parameters.values():
        if p.kind is p.VAR_KEYWORD or p.default is p.empty or p.name in _NOT_OPTIONS:
            continue
        if p.name in settings:
            raise AssertionError(f"{env} and the trainer both have an option {p.name!r}")
        fields.append((p.name, p.annotation, dataclasses.field(default=p.default)))
    return dataclasses.make_dataclass("Environment", fields, frozen=True)


def _refuse_misplaced(words: Sequence[str], choices: Choices, known: tuple[type, ...]) -> None:
    """An option of another algorithm or environment is not unknown: it is said whose it is."""
    own = next(name for name, kind in AGENTS.items() if kind in known)
    for word in words:
        option = word.partition("=")[0]
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not option.startswith("--") or "." in name or any(_has(kind, name) for kind in known):
            continue
        if owners := [other for other, kind in AGENTS.items() if _has(kind, name)]:
            raise ValueError(
                f"{option} is an option of {' and '.join(owners)}; the algorithm here is {own} "
                "(--algorithm)"
            )
        worlds = [other for other in ENVIRONMENTS if not on_host(other)]
        if owners := [other for other in worlds if _takes(other, name)]:
            raise ValueError(
                f"{option} is an option of {' and '.join(owners)}; the environment here is "
                f"{choices.env}"
            )


def _has(kind: type, name: str) -> bool:
    return any(f.name == name for f in dataclasses.fields(kind))


def _takes(env: str, name: str) -> bool:
    try:
        return _has(_env_options(env), name)
    except (ImportError, ValueError):  # its extra is not installed
        return False


_NOT_OPTIONS = ("size", "render_mode")  # a size is part of the name; pictures are made by `eval`


def _changed(values: Any, defaults: Any) -> dict[str, Any]:
    """Only what differs from the defaults: a configuration says what was chosen."""
    return {
        f.name: getattr(values, f.name)
        for f in dataclasses.fields(values)
        if getattr(values, f.name) != getattr(defaults, f.name)
    }
