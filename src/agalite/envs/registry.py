"""Environments by name: `make("tmaze", corridor=160)`, and `make("gym:CartPole-v1", count=8)`."""

import dataclasses
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agalite import errors

if TYPE_CHECKING:
    from agalite.envs.bridge import GymnasiumVector
    from agalite.envs.world import World

GYMNASIUM = "gym:"


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

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)

    @property
    def installation(self) -> str:
        return f'pip install "agalite[{self.extra}]"'

    def load(self) -> type["World[Any, Any]"]:
        missing = self.missing()
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"{', '.join(missing)} {verb} not installed: {self.installation}")
        module, name = self.place.split(":")
        return getattr(importlib.import_module(module), name)


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
        "agalite.envs.mystery_path:MysteryPathGrid", "find an invisible path, tile by tile"
    ),
    "mystery-path": Environment(
        "agalite.envs.mystery_path:MysteryPath", "the same with smooth motion"
    ),
    "craftax-symbolic": Environment(
        "agalite.envs.craftax:Craftax", "explore, craft, fight, descend", **_CRAFTAX
    ),
    "craftax-classic-symbolic": Environment(
        "agalite.envs.craftax:CraftaxClassic", "Crafter's rules, one level", **_CRAFTAX
    ),
}


def make(name: str, **options: Any) -> "World[Any, Any] | GymnasiumVector":
    """A JAX environment, one of `ENVIRONMENTS`; or "gym:<id>", any Gymnasium environment.

    options: those of the environment. For "gym:<id>" they are `count` (how many copies, 1),
    `seed` (0), `asynchronous` (False), and what `gymnasium.make` takes.
    """
    if isinstance(name, str) and name.startswith(GYMNASIUM):
        return _from_gymnasium(name.removeprefix(GYMNASIUM), options)
    if not isinstance(name, str) or name not in ENVIRONMENTS:
        raise ValueError(
            f"name={name!r} is unknown; choose one of: {', '.join(ENVIRONMENTS)}, or gym:<id>"
        )
    world = ENVIRONMENTS[name].load()
    _check_options(name, options, known_options(world))
    return world(**options)


def known_options(world: type["World[Any, Any]"]) -> list[str] | None:
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
    bridge = dataclasses.replace(ENVIRONMENTS["tmaze"], place="agalite.envs.bridge:GymnasiumVector")
    bridge.load()  # says what to install if Gymnasium is missing
    if not env_id:
        raise ValueError("name='gym:' lacks the id of a Gymnasium environment: gym:CartPole-v1")
    from agalite.envs.bridge import from_gymnasium

    options = {"count": 1, "seed": 0, **options}
    errors.integer("count", options["count"], minimum=1)
    return from_gymnasium(env_id, **options)
