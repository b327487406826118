"""Environments by name: `make("tmaze", corridor=160)`, `make("gym:CartPole-v1", num_envs=8)`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agalite import validation
from agalite.envs.popgym import table as popgym

if TYPE_CHECKING:
    from agalite.envs.base import JaxEnvironment
    from agalite.envs.gymnasium.vector import GymnasiumVector

GYMNASIUM = "gym:"
"""The prefix of a name that stands for a Gymnasium id."""

_VECTOR_OPTIONS = ("num_envs", "seed", "asynchronous", "timeout")
_JAX_PACKAGES = ("gymnax", "gymnasium")


@dataclass(frozen=True)
class EnvSpec:
    """A row of the table of environments. Nothing is imported until the environment is made."""

    entry_point: str
    """Where the class is: "module:Class"."""
    summary: str
    """What the task is, in a few words."""
    gymnasium_id: str = ""
    """The id it is registered under with Gymnasium; empty if it is not."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that the name decides; they are no options of `make`."""
    on_host: bool = False
    """Whether it is a Gymnasium environment that runs outside of JAX."""
    extra: str = "envs"
    """The optional dependencies it needs: pip install "agalite[...]"."""
    packages: tuple[str, ...] = _JAX_PACKAGES
    """The packages that must be importable."""
    newest_python: tuple[int, int] | None = None
    """The last Python version for which `packages` can be installed."""

    def missing_packages(self) -> tuple[str, ...]:
        """Those of `packages` that are not installed."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)

    @property
    def install_hint(self) -> str:
        """How to get the packages, or why they cannot be had with this Python."""
        newest = self.newest_python
        if newest is not None and sys.version_info[:2] > newest:
            have = ".".join(map(str, sys.version_info[:2]))
            return (
                f"Python {'.'.join(map(str, newest))} or older; this is {have}, for which "
                f"{self.packages[-1]} cannot be installed"
            )
        return f'pip install "agalite[{self.extra}]"'

    def load(self) -> type[Any]:
        """The environment's class: a `JaxEnvironment` or, on the host, a `gymnasium.Env`."""
        missing = self.missing_packages()
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"{', '.join(missing)} {verb} not installed: {self.install_hint}")
        module, name = self.entry_point.split(":")
        return getattr(importlib.import_module(module), name)


def _craftax(name: str, summary: str) -> EnvSpec:
    return EnvSpec(
        f"agalite.envs.craftax:{name}",
        summary,
        extra="envs,craftax",
        packages=(*_JAX_PACKAGES, "craftax"),
    )


def _memory_maze(size: int, objects: int) -> EnvSpec:
    return EnvSpec(
        "agalite.envs.memory_maze.env:MemoryMaze",
        f"remember where {objects} objects are",
        gymnasium_id=f"agalite/MemoryMaze-{size}x{size}-v0",
        kwargs={"size": size},
        on_host=True,
        extra="envs,memory-maze",
        packages=("gymnasium", "memory_maze", "dm_control", "mujoco", "labmaze"),
        newest_python=(3, 12),
    )


ENVIRONMENTS: dict[str, EnvSpec] = {
    "tmaze": EnvSpec(
        "agalite.envs.tmaze:TMaze",
        "remember a cue for a corridor's length",
        "agalite/TMaze-v0",
    ),
    "masked-cartpole": EnvSpec(
        "agalite.envs.cartpole:MaskedCartPole",
        "CartPole without velocities",
        "agalite/MaskedCartPole-v0",
    ),
    "noisy-masked-cartpole": EnvSpec(
        "agalite.envs.cartpole:NoisyMaskedCartPole",
        "the same, with noisy observations",
        "agalite/NoisyMaskedCartPole-v0",
    ),
    "repeat-previous": EnvSpec(
        "agalite.envs.popgym.repeat:RepeatPrevious",
        "name the suit of a card seen before",
        "agalite/RepeatPrevious-v0",
    ),
    "memory-chain": EnvSpec(
        "agalite.envs.memory_chain:MemoryChain",
        "repeat a cue after a delay",
        "agalite/MemoryChain-v0",
    ),
    "mystery-path-grid": EnvSpec(
        "agalite.envs.mystery_path.env:MysteryPathGrid",
        "find an invisible path, tile by tile",
        "agalite/MysteryPathGrid-v0",
    ),
    "mystery-path": EnvSpec(
        "agalite.envs.mystery_path.env:MysteryPath",
        "the same with smooth motion",
        "agalite/MysteryPath-v0",
    ),
    "craftax-symbolic": _craftax("Craftax", "explore, craft, fight, descend"),
    "craftax-classic-symbolic": _craftax("CraftaxClassic", "Crafter's rules, one level"),
    "memory-maze-9x9": _memory_maze(9, 3),
    "memory-maze-11x11": _memory_maze(11, 4),
    "memory-maze-13x13": _memory_maze(13, 5),
    "memory-maze-15x15": _memory_maze(15, 6),
    **{
        task.name: EnvSpec(
            task.entry_point,
            task.summary,
            gymnasium_id=f"agalite/popgym-{task.package_class}-v0",
            kwargs=task.kwargs,
        )
        for task in popgym.tasks()
    },
}


def make(name: str, **options: Any) -> "JaxEnvironment[Any, Any] | GymnasiumVector":
    """Make an environment.

    **Arguments:**

    - `name`: one of `ENVIRONMENTS`, or `"gym:<id>"` for any Gymnasium environment;
      `"gym:<package>:<id>"` imports the package that registers it first.
    - `options`: those of the environment's class. Environments that run on the host
      (`"gym:<id>"` and `memory-maze-*`) also take `num_envs` (default 1), `seed` (0),
      `asynchronous` (False), `timeout` (None), and what `gymnasium.make` takes: see
      `agalite.envs.gymnasium.from_gymnasium`.

    **Returns:**

    A `JaxEnvironment`, or a `GymnasiumVector` for environments that run on the host.
    """
    if isinstance(name, str) and name.startswith(GYMNASIUM):
        return _from_gymnasium(name.removeprefix(GYMNASIUM), options)
    if not isinstance(name, str) or name not in ENVIRONMENTS:
        raise ValueError(
            f"name={name!r} is unknown; choose one of: {', '.join(ENVIRONMENTS)}, or gym:<id>"
            f"{validation.near_match(name, ENVIRONMENTS)}"
        )
    spec = ENVIRONMENTS[name]
    env_class = spec.load()
    known = known_options(env_class, hidden=spec.kwargs)
    if spec.on_host:
        known = None if known is None else [*known, *_VECTOR_OPTIONS]
        _check_options(name, options, known)
        return _from_gymnasium(spec.gymnasium_id, options)
    _check_options(name, options, known)
    return env_class(**spec.kwargs, **options)


def on_host(name: str) -> bool:
    """Whether the environment runs outside of JAX, so that `make` gives a `GymnasiumVector`."""
    if not isinstance(name, str):  # from the config.json of a run
        raise ValueError(f"env={name!r} must be the name of an environment")
    if name.startswith(GYMNASIUM):
        return True
    return name in ENVIRONMENTS and ENVIRONMENTS[name].on_host


def with_import(name: str, package: str | None) -> str:
    """The name of an environment whose package is imported first: `--import` of the commands.

    The package becomes part of the name, "gym:<package>:<id>". So it is known wherever the name
    is: in a run's configuration, and with it when the run is resumed, evaluated or loaded, and in
    worker processes and Ray actors.

    **Arguments:**

    - `name`: of the environment.
    - `package`: what registers it with Gymnasium when imported; None changes nothing.
    """
    if package is None:
        return name
    if not name.startswith(GYMNASIUM):
        raise ValueError(
            f"--import {package} is for environments of Gymnasium, gym:<id>; this one is {name!r}"
        )
    env_id = name.removeprefix(GYMNASIUM)
    stated, _, rest = env_id.rpartition(":")
    if stated not in ("", package):
        raise ValueError(f"--import {package}: {name!r} already says to import {stated}")
    if not package or ":" in package:
        raise ValueError(f"--import {package!r} must be the name of a package")
    return f"{GYMNASIUM}{package}:{rest}"


def known_options(env_class: type[Any], hidden: Iterable[str] = ()) -> list[str] | None:
    """The constructor's argument names, without `hidden`; None if it takes any keyword."""
    parameters = inspect.signature(env_class).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.name not in hidden]


def _check_options(name: str, options: dict[str, Any], known: list[str] | None) -> None:
    unknown = [] if known is None else [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"{name} has no option {unknown[0]!r}; it has: {', '.join(known or ['none'])}"
        )


def _from_gymnasium(env_id: str, options: dict[str, Any]) -> "GymnasiumVector":
    # A row like the others, for its message about packages that are not installed.
    EnvSpec("agalite.envs.gymnasium.vector:GymnasiumVector", "").load()
    if not env_id:
        raise ValueError("name='gym:' lacks the id of a Gymnasium environment: gym:CartPole-v1")
    from agalite.envs.gymnasium.vector import from_gymnasium

    options = {"num_envs": 1, "seed": 0, **options}
    validation.check_integer("num_envs", options["num_envs"], minimum=1)
    return from_gymnasium(env_id, **options)
