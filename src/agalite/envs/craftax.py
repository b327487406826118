"""Craftax with symbolic observations, full and Classic: an adapter for the `craftax` package.

The package's own environments report only that an episode is done, and their autoreset builds a
new map for every environment at every step. This adapter separates terminated from truncated and
leaves the autoreset to `VectorEnv`, which builds maps only where they are needed
(`costly_reset`).
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite import validation
from agalite.envs.base import BinaryBox, JaxEnvironment

_NO_LIMIT = np.iinfo(np.int32).max
_TILE = 16  # pixels along a side of a tile, the size of craftax's own textures

# Set by `max_steps`, or internal to craftax's map generator.
_NOT_OPTIONS = ("max_timesteps", "fractal_noise_angles")


@struct.dataclass
class CraftaxState(environment.EnvState):
    """The game's own state, and the steps since its beginning."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    game: Any  # craftax's own state


@struct.dataclass
class CraftaxParams(environment.EnvParams):
    """The game's own parameters, and the time limit."""

    max_steps_in_episode: int = 10_000
    game: Any = None  # craftax's own parameters; their time limit is not used


class _Symbolic(JaxEnvironment[CraftaxState, CraftaxParams]):
    """What the two games share. `_package` holds the modules of one of them."""

    costly_reset = True
    render_fps: ClassVar[int] = 10

    _package: ClassVar[str]
    _game_class: ClassVar[str]
    _others: ClassVar[int]
    """Numbers of an observation, the last ones, that are not 0 or 1: what the player has."""

    def __init__(self, max_steps: int, options: dict[str, Any]) -> None:
        validation.check_integer_between("max_steps", max_steps, 1, 2**31 - 1)
        module = _import(f"{self._package}.envs.craftax_symbolic_env")
        self._game = getattr(module, self._game_class)()
        game = _with_options(self._game.default_params, options)
        super().__init__(CraftaxParams(int(max_steps), game))

    def reset_env(
        self, key: PRNGKeyArray, params: CraftaxParams
    ) -> tuple[Float[Array, " features"], CraftaxState]:
        obs, game = self._game.reset_env(key, params.game)
        return obs, _state(game)

    def step_env(
        self,
        key: PRNGKeyArray,
        state: CraftaxState,
        action: Int[Array, ""] | float,
        params: CraftaxParams,
    ) -> tuple[
        Float[Array, " features"],
        CraftaxState,
        Float[Array, ""],
        Bool[Array, ""],
        dict[str, Float[Array, ""]],
    ]:
        limited = params.game.replace(max_timesteps=params.max_steps_in_episode)
        obs, game, reward, _, info = self._game.step_env(
            key, state.game, jnp.asarray(action, jnp.int32), limited
        )
        state = _state(game)
        # craftax's `discount` is 0 at the time limit too, which is a truncation here.
        info = {name: value for name, value in info.items() if name != "discount"}
        reward = jnp.asarray(reward, jnp.float32)
        return obs, state, reward, self.is_terminated(state, params), info

    def observe(
        self,
        key: PRNGKeyArray,  # noqa: ARG002
        state: CraftaxState,
        action: Int[Array, ""] | float | None,  # noqa: ARG002
        params: CraftaxParams,  # noqa: ARG002
    ) -> Float[Array, " features"]:
        return self._game.get_obs(state.game)

    def is_terminated(self, state: CraftaxState, params: CraftaxParams) -> Bool[Array, ""]:
        """Whether the player died or, in the full game, defeated the boss.

        It is craftax's own rule, with the time limit out of reach.
        """
        unlimited = params.game.replace(max_timesteps=_NO_LIMIT)
        return jnp.asarray(self._game.is_terminal(state.game, unlimited), bool)

    @property
    def num_actions(self) -> int:
        return int(self._game.num_actions)

    def action_space(self, params: CraftaxParams | None = None) -> spaces.Discrete:  # noqa: ARG002
        return spaces.Discrete(self.num_actions)

    def observation_space(self, params: CraftaxParams | None = None) -> spaces.Box:
        (numbers,) = self._game.observation_space((params or self._params).game).shape
        high = self._highest(params or self._params)
        return BinaryBox(0.0, high, (numbers,), jnp.float32, binary=numbers - self._others)

    def _highest(self, params: CraftaxParams) -> float:  # noqa: ARG002
        """The largest value in an observation."""
        return 1.0

    def render(
        self,
        state: CraftaxState,
        params: CraftaxParams | None = None,  # noqa: ARG002
    ) -> UInt8[Array, "height width 3"]:
        """The player's view, 16 pixels per tile, with the inventory below.

        The first call loads craftax's textures, which takes a few seconds, and compiles.
        """
        return _renderer(self._package)(state.game)


class Craftax(_Symbolic):
    """Craftax: obs (8268,) float32; 43 actions (`craftax.craftax.constants.Action`).

    An episode is terminated by the player's death or the boss's. `info["Achievements/<name>"]`
    has the package's names and values: for each of the 67 achievements, 100 at the last step of
    an episode in which it was reached, and 0 at all other steps.

    **Arguments:**

    - `max_steps`: the episode is truncated after so many.
    - `options`: fields of craftax's `EnvParams`, for example `god_mode=True` or
      `day_length=300`.
    """

    _package = "craftax.craftax"
    _game_class = "CraftaxSymbolicEnvNoAutoReset"
    _others = 51

    def __init__(self, *, max_steps: int = 100_000, **options: Any) -> None:
        super().__init__(max_steps, options)

    def _highest(self, params: CraftaxParams) -> float:
        # The package's space says 1. Mana is observed in tenths, and its maximum is 6 plus 3 for
        # every point of intelligence: more than any other entry.
        return max(1.0, (6 + 3 * params.game.max_attribute) / 10)


class CraftaxClassic(_Symbolic):
    """Craftax Classic: obs (1345,) float32; 17 actions.

    The actions are those of `craftax.craftax_classic.constants.Action`. An episode is terminated
    by the player's death. As in `Craftax`, `info` has the achievements, 22 of them;
    `info["score"]` is the package's score of the episode, at its last step.

    **Arguments:**

    - `max_steps`: the episode is truncated after so many.
    - `options`: fields of the `EnvParams` of craftax's classic game, for example
      `spawn_cow_chance=0.1`.
    """

    _package = "craftax.craftax_classic"
    _game_class = "CraftaxClassicSymbolicEnvNoAutoReset"
    _others = 22

    def __init__(self, *, max_steps: int = 10_000, **options: Any) -> None:
        super().__init__(max_steps, options)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Craftax needs a package that is not installed ({error.name}): "
            'pip install "agalite[envs,craftax]"',
            name=error.name,
        ) from error


def _with_options(defaults: Any, options: dict[str, Any]) -> Any:
    """craftax's parameters with `options` set; each must have the type of its default."""
    known = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    known = {name: value for name, value in known.items() if name not in _NOT_OPTIONS}
    checked = {}
    for name, value in options.items():
        validation.check_one_of("option", name, ["max_steps", *known])
        default = known[name]
        if isinstance(default, bool):
            validation.check_boolean(name, value)
            checked[name] = bool(value)
        elif isinstance(default, int):
            validation.check_integer(name, value, minimum=1)
            checked[name] = int(value)
        else:  # all others are probabilities
            checked[name] = validation.check_number(name, value, minimum=0.0)
            if checked[name] > 1.0:
                raise ValueError(f"{name}={value!r} is a probability; it must be from 0 to 1")
    return defaults.replace(**checked)


def _state(game: Any) -> CraftaxState:
    # Some leaves of the classic game are weakly typed, some of them only after `reset`. Left so,
    # the second call of a compiled step would compile it again.
    game = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), game)
    return CraftaxState(time=game.timestep, game=game)


@functools.cache
def _renderer(package: str) -> Callable[[Any], UInt8[Array, "height width 3"]]:
    constants = _import(f"{package}.constants")
    module = _import(f"{package}.renderer")
    # craftax would make its textures in three sizes and write them into its own folder, which may
    # be read-only; one size, in memory, is enough. The first call may come while JAX traces, and
    # the textures must be constants nevertheless.
    with jax.ensure_compile_time_eval():
        textures = {_TILE: constants.load_all_textures_given_size(_TILE)}
    original = module.load_all_textures
    module.load_all_textures = lambda: textures
    try:
        draw = module.make_craftax_pixel_renderer(_TILE)
    finally:
        module.load_all_textures = original

    def frame(game: Any) -> UInt8[Array, "height width 3"]:
        return jnp.clip(jnp.round(draw(game)), 0, 255).astype(jnp.uint8)

    return jax.jit(frame)
