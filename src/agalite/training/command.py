"""The command line of `agalite train`.

Which options there are depends on the environment, the memory model and the algorithm. So tyro
parses in two steps: `parse_choices` takes the environment and the options that decide the others
(`Choices`), and leaves all other words untouched; `parse_config` then builds the parser of those
from the dataclasses of the settings, the algorithm, the environment and the memory model.
"""

import dataclasses
import inspect
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from agalite import validation
from agalite.envs.command import parse_options
from agalite.envs.registry import ENVIRONMENTS, GYMNASIUM, on_host, with_import
from agalite.memory.registry import MODELS
from agalite.training.config import AGENTS, HostConfig, HostSettings, Settings, TrainConfig
from agalite.training.presets import PRESETS, preset

_FLAT = tyro.conf.arg(name="")  # options without a prefix
_ENV = tyro.conf.arg(
    metavar="ENV", help="Environment: a name that `agalite envs` lists, or gym:<id>."
)
_ALGORITHM = tyro.conf.arg(help_behavior_hint="(default: the preset's)")
_IMPORT = tyro.conf.arg(name="import", metavar="PACKAGE")  # a field cannot be named import


@dataclasses.dataclass(frozen=True)
class Choices:
    """The options that decide the others, and those that are no part of the configuration."""

    memory: str = "agalite"
    """Memory model: a name that `agalite models` lists."""
    algorithm: Annotated[str, _ALGORITHM] = ""
    """Learning algorithm: a2c, ppo, appo, pqn, or, learning at every step, stream-ac or
    stream-q."""
    preset: str = "tuned"
    """Where the defaults of the other options come from: tuned (this library's), paper (its
    tables) or published (its code); `agalite presets` shows them side by side."""
    out: Path | None = None
    """Folder of the run; runs/<env>-<memory>-<time> if not given."""
    seeds: int | None = None
    """Number of seeds, from --seed on, that are trained at once (JAX environments only); 1 if not
    given."""
    devices: int | None = None
    """CPU devices to train the seeds on; if not given, one for each seed, at most one per core."""
    wandb: bool = False
    """Send the metrics to Weights & Biases too, each seed as a run; WANDB_MODE=offline keeps them
    for a later `wandb sync`."""
    ray: str | None = None
    """Address of a Ray cluster for the actors (Gymnasium environments only); auto finds one, or
    starts one here."""
    package: Annotated[str | None, _IMPORT] = None
    """Package to import before the environment is made, because it registers gym:<id>; the same
    as gym:PACKAGE:<id>."""


@dataclasses.dataclass(frozen=True)
class Parsed:
    """What `parse_choices` found."""

    env: str
    """Empty if none was named, as in `agalite train --help`."""
    choices: Choices
    rest: list[str]
    """The words for `parse_config`."""


def parse(words: Sequence[str], prog: str) -> tuple[Choices, TrainConfig | HostConfig]:
    """Both steps; `prog` is the name of the command in messages."""
    parsed = parse_choices(words, prog)
    return parsed.choices, parse_config(parsed, prog)


def parse_choices(words: Sequence[str], prog: str) -> Parsed:
    """Takes the environment and the options of `Choices` from the command line.

    No environment is imported, so that JAX can still be told how many devices to use.
    """
    first = dataclasses.make_dataclass(
        "First",
        [
            # As many as there are, so that a missing one is no error under --help.
            ("envs", tyro.conf.Positional[tuple[str, ...]], ()),
            ("choices", Annotated[Choices, _FLAT], Choices()),
        ],
    )
    found: Any
    found, rest = tyro.cli(
        first, args=list(words), prog=prog, return_unknown_args=True, add_help=False
    )
    choices: Choices = found.choices
    env = found.envs[0] if found.envs else ""
    if not env and not _asks_for_help(rest):
        if late := next((word for word in rest if word in ENVIRONMENTS or on_host(word)), None):
            others = list(words)
            others.remove(late)
            raise ValueError(f"put {late} first: {prog} {shlex.join([late, *others])}")
        raise ValueError(
            f"name the environment before its options, as in: {prog} tmaze --memory gru; there "
            f"are: {', '.join(ENVIRONMENTS)}, or gym:<id>"
        )
    if len(found.envs) > 1:
        raise ValueError(f"{' and '.join(found.envs)}: one environment at a time")
    if env:
        env = with_import(env, choices.package)
    if env and env not in ENVIRONMENTS and not on_host(env):
        raise ValueError(
            f"env={env!r} is unknown; choose one of: {', '.join(ENVIRONMENTS)}, or gym:<id>"
            f"{validation.near_match(env, ENVIRONMENTS)}"
        )
    validation.check_one_of("memory", choices.memory, MODELS)
    validation.check_one_of("preset", choices.preset, PRESETS)
    if choices.algorithm:
        validation.check_one_of("algorithm", choices.algorithm, AGENTS)
    if choices.seeds is not None and on_host(env):
        raise ValueError(
            f"seeds: {env} is stepped outside JAX, one seed at a time; start a run for each, with "
            "--seed"
        )
    return Parsed(env, choices, rest)


def parse_config(parsed: Parsed, prog: str) -> TrainConfig | HostConfig:
    """Parses the other options, which begin with the values of the preset."""
    choices, env = parsed.choices, parsed.env or "tmaze"  # for the help without an environment
    algorithm = AGENTS[choices.algorithm] if choices.algorithm else None
    start = preset(choices.preset, env, choices.memory, algorithm)
    agent = start.pop("agent")
    memory_options = start.pop("memory_options", {})
    settings = _settings(env)
    env_options = _env_options(env)
    model = MODELS[choices.memory].config
    command = dataclasses.make_dataclass(
        "Train",
        [
            ("env", Annotated[tyro.conf.Positional[str], _ENV]),
            ("choices", Annotated[Choices, _FLAT], choices),
            ("settings", Annotated[settings, _FLAT], settings(**start)),
            ("agent", Annotated[type(agent), _FLAT], agent),
            ("env_options", Annotated[env_options, _FLAT], env_options()),
            ("model", model, model(**memory_options)),
        ],
        frozen=True,
    )
    words = parsed.rest
    if not _asks_for_help(words):
        words = [env, *words]
        prog = f"{prog} {env} --memory {choices.memory}"  # an error points to its --help

    def run_parser(**options: Any) -> Any:
        description = "Train an agent with memory."
        if not parsed.env:
            description += (
                f" Options shown for {env} with memory {choices.memory}; `{prog} ENV --memory M "
                "--help` shows those of another choice."
            )
        return tyro.cli(command, args=words, prog=prog, description=description, **options)

    values, unknown = run_parser(return_unknown_args=True)
    if unknown:
        _explain_misplaced(unknown, env, choices.memory, type(agent))
        run_parser()  # ends the program with tyro's message, which suggests similar options
    validation.check_integer(
        "--steps (total_timesteps)", values.settings.total_timesteps, minimum=1
    )
    changed = _changed(values.env_options, env_options())
    if env.startswith(GYMNASIUM):
        changed = parse_options(changed.get("set", ()))
    fields = {
        **dataclasses.asdict(values.settings),
        "env": env,
        "env_options": changed,
        "memory": choices.memory,
        "memory_options": _changed(values.model, model()),
        "agent": values.agent,
    }
    if on_host(env):
        return HostConfig(**fields)
    return TrainConfig(**fields, seeds=1 if choices.seeds is None else choices.seeds)


def _asks_for_help(words: Sequence[str]) -> bool:
    return "-h" in words or "--help" in words


def _settings(env: str) -> type:
    """The settings of runs in this environment, with --steps for --total-timesteps.

    The short form is added here because `config.py` does not depend on the command-line parser.
    """
    kind = HostSettings if on_host(env) else Settings
    steps = Annotated[int, tyro.conf.arg(aliases=["--steps"])]
    default = dataclasses.field(default=kind.total_timesteps)
    return dataclasses.make_dataclass(
        kind.__name__,
        [("total_timesteps", steps, default)],
        bases=(kind,),
        frozen=True,
        kw_only=True,
    )


@dataclasses.dataclass(frozen=True)
class GymnasiumOptions:
    """Options of `gymnasium.make`, which differ between environments."""

    set: tuple[str, ...] = ()
    """Options of the environment, for example: --set max_episode_steps=200."""


def _env_options(env: str) -> type:
    """A dataclass of the arguments of the environment's constructor, with their defaults."""
    if env.startswith(GYMNASIUM):
        return GymnasiumOptions
    spec = ENVIRONMENTS[env]
    env_class = spec.load()
    kinds = (_settings(env), *AGENTS.values())
    taken = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    fields: list[Any] = []
    for p in inspect.signature(env_class).parameters.values():
        hidden = p.name in spec.kwargs or p.name == "render_mode"
        if p.kind is p.VAR_KEYWORD or p.default is p.empty or hidden:
            continue
        if p.name in taken:
            raise AssertionError(f"{env} and the trainer both have an option {p.name!r}")
        annotation = Annotated[p.annotation, tyro.conf.arg(help=_argument_help(env_class, p.name))]
        fields.append((p.name, annotation, dataclasses.field(default=p.default)))
    return dataclasses.make_dataclass("EnvOptions", fields, frozen=True)


def _argument_help(env_class: type, name: str) -> str | None:
    """The description of an argument in the docstring of a class: "- `name`: description"."""
    text = inspect.cleandoc(env_class.__doc__ or "") + "\n"
    found = re.search(rf"^- `{name}`: (.*\n(?:[ \t]+\S.*\n)*)", text, flags=re.MULTILINE)
    if not found:
        return None
    words = " ".join(found[1].split())
    return words[0].upper() + words[1:]


def _explain_misplaced(unknown: Iterable[str], env: str, memory: str, agent: type) -> None:
    """Says to which model, algorithm or environment an option belongs that this one lacks."""
    for word in unknown:
        option = word.partition("=")[0]
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not option.startswith("--"):
            continue
        if name.startswith("model."):
            name = name.removeprefix("model.").removeprefix("no_")
            if owners := [other for other, kind in MODELS.items() if _has_field(kind.config, name)]:
                raise ValueError(f"{option} is an option of {_listed(owners)}, not of {memory}")
            continue
        if owners := [other for other, kind in AGENTS.items() if _has_field(kind, name)]:
            own = next(name for name, kind in AGENTS.items() if kind is agent)
            raise ValueError(
                f"{option} is an option of {_listed(owners)}; the algorithm here is {own} "
                "(--algorithm)"
            )
        others = [other for other in ENVIRONMENTS if not on_host(other)]
        if owners := [other for other in others if _has_option(other, name)]:
            raise ValueError(
                f"{option} is an option of {_listed(owners)}; the environment here is {env}"
            )


def _listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _has_field(kind: type, name: str) -> bool:
    return any(f.name == name for f in dataclasses.fields(kind))


def _has_option(env: str, name: str) -> bool:
    try:
        return _has_field(_env_options(env), name)
    except (ImportError, ValueError):  # its extra is not installed
        return False


def _changed(values: Any, defaults: Any) -> dict[str, Any]:
    """The fields that differ from the defaults: only these become part of a configuration."""
    return {
        f.name: getattr(values, f.name)
        for f in dataclasses.fields(values)
        if getattr(values, f.name) != getattr(defaults, f.name)
    }
