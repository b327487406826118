"""Environments by name: `make("tmaze", corridor=160)`, and `make("gym:CartPole-v1", count=8)`."""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agalite import validation

if TYPE_CHECKING:
    from agalite.envs.base import World
    from agalite.envs.gymnasium.vector import GymnasiumVector

GYMNASIUM = "gym:"
_VECTOR_OPTIONS = ("count", "seed", "asynchronous", "timeout")


@dataclass(frozen=True)
class Environment:
    """A row of the table of environments. Nothing is imported until it is made."""

    place: str
    """module:class."""
    summary: str
    """In a few words, for people who choose."""
    extra: str = "envs"
    """The optional dependencies it needs: pip install "agalite[...]"."""
    needs: tuple[str, ...] = ("gymnax", "gymnasium")
    """The packages that must be importable."""
    host: bool = False
    """A program of its own, stepped through Gymnasium, rather than a JAX environment."""
    gymnasium: str = ""
    """Its Gymnasium id, if it is on the host."""
    newest_python: tuple[int, int] | None = None
    """The last Python that the packages it needs are made for."""

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)

    @property
    def installation(self) -> str:
        newest = self.newest_python
        if newest is not None and sys.version_info[:2] > newest:
            have = ".".join(map(str, sys.version_info[:2]))
            return f"Python {'.'.join(map(str, newest))} or older; this is {have}, for which " + (
                f"{self.needs[-1]} cannot be installed"
            )
        return f'pip install "agalite[{self.extra}]"'

    def load(self) -> type[Any]:
        """The class of a world or, on the host, that of a Gymnasium environment."""
        missing = self.missing()
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"{', '.join(missing)} {verb} not installed: {self.installation}")
        module, name = self.place.split(":")
        return getattr(importlib.import_module(module), name)


def _memory_maze(size: int, objects: int) -> Environment:
    return Environment(
        "agalite.envs.memory_maze.env:MemoryMaze",
        f"remember where {objects} objects are",
        extra="envs,memory-maze",
        needs=("gymnasium", "memory_maze", "dm_control", "mujoco", "labmaze"),
        host=True,
        gymnasium=f"agalite/MemoryMaze-{size}x{size}-v0",
        newest_python=(3, 12),
    )


_CRAFTAX: dict[str, Any] = {"extra": "envs,craftax", "needs": ("gymnax", "gymnasium", "craftax")}

ENVIRONMENTS: dict[str, Environment] = {
    "tmaze": Environment("agalite.envs.tmaze:TMaze", "remember a cue for a corridor's length"),
    "masked-cartpole": Environment(
        "agalite.envs.cartpole:MaskedCartPole", "CartPole without velocities"
    ),
    "noisy-masked-cartpole": Environment(
        "agalite.envs.cartpole:NoisyMaskedCartPole", "the same, seen through noise"
    ),
    "mystery-path-grid": Environment(
        "agalite.envs.mystery_path.env:MysteryPathGrid", "find an invisible path, tile by tile"
    ),
    "mystery-path": Environment(
        "agalite.envs.mystery_path.env:MysteryPath", "the same with smooth motion"
    ),
    "craftax-symbolic": Environment(
        "agalite.envs.craftax:Craftax", "explore, craft, fight, apply_gradients", **_CRAFTAX
    ),
    "craftax-classic-symbolic": Environment(
        "agalite.envs.craftax:CraftaxClassic", "Crafter's rules, one level", **_CRAFTAX
    ),
    "memory-maze-9x9": _memory_maze(9, 3),
    "memory-maze-11x11": _memory_maze(11, 4),
    "memory-maze-13x13": _memory_maze(13, 5),
    "memory-maze-15x15": _memory_maze(15, 6),
}


def make(name: str, **options: Any) -> "World[Any, Any] | GymnasiumVector":
    """A JAX environment, one of `ENVIRONMENTS`; or "gym:<id>", any Gymnasium environment.

    options: those of the environment. For "gym:<id>", and for those on the host, also `count`
    (how many copies, 1), `seed` (0), `asynchronous` (False), and what `gymnasium.make` takes.
    """
    if isinstance(name, str) and name.startswith(GYMNASIUM):
        return _from_gymnasium(name.removeprefix(GYMNASIUM), options)
    if not isinstance(name, str) or name not in ENVIRONMENTS:
        raise ValueError(
            f"name={name!r} is unknown; choose one of: {', '.join(ENVIRONMENTS)}, or gym:<id>"
        )
    environment = ENVIRONMENTS[name]
    world = environment.load()
    known = known_options(world)
    if environment.host:
        # The size is in the name.
        known = [*(x for x in known or () if x != "size"), *_VECTOR_OPTIONS]
        _check_options(name, options, known)
        return _from_gymnasium(environment.gymnasium, options)
    _check_options(name, options, known)
    return world(**options)


def on_host(name: str) -> bool:
    """Whether the environment is stepped through Gymnasium: `make` gives a `GymnasiumVector`."""
    if name.startswith(GYMNASIUM):
        return True
    return name in ENVIRONMENTS and ENVIRONMENTS[name].host


def known_options(world: type[Any]) -> list[str] | None:
    """Names that the environment's constructor takes; None if it checks them itself."""
    parameters = inspect.signature(world).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def _check_options(name: str, options: dict[str, Any], known: list[str] | None) -> None:
    unknown = [] if known is None else [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"{name} has no option {unknown[0]!r}; it has: {', '.join(known or ['none'])}"
        )


def _from_gymnasium(env_id: str, options: dict[str, Any]) -> "GymnasiumVector":
    bridge = dataclasses.replace(
        ENVIRONMENTS["tmaze"], place="agalite.envs.gymnasium.vector:GymnasiumVector"
    )
    bridge.load()  # says what to install if Gymnasium is missing
    if not env_id:
        raise ValueError("name='gym:' lacks the id of a Gymnasium environment: gym:CartPole-v1")
    from agalite.envs.gymnasium.vector import from_gymnasium

    options = {"count": 1, "seed": 0, **options}
    validation.integer("count", options["count"], minimum=1)
    return from_gymnasium(env_id, **options)
