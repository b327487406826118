"""Craftax with symbolic observations, full and Classic: the `craftax` package as a World.

The package's own environment says only that an episode is done, and begins the next one by
building a new world for every environment at every step. Here an end says why, and only those
who need a new world pay for it (`costly_reset`, see `vector.Vector`).
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
from agalite.envs.base import World

_FOREVER = np.iinfo(np.int32).max
_TILE = 16  # pixels along a tile's side: the size in which craftax's pictures are drawn

# Set by `max_steps`, or of no use to anybody outside craftax's world generator.
_NOT_OPTIONS = ("max_timesteps", "fractal_noise_angles")


@struct.dataclass
class CraftaxState(environment.EnvState):
    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    game: Any  # craftax's own state


@struct.dataclass
class CraftaxParams(environment.EnvParams):
    max_steps_in_episode: int = 10_000
    game: Any = None  # craftax's own parameters; their time limit is not used


class _Symbolic(World[CraftaxState, CraftaxParams]):
    """What the two games have in common. `_package` holds the modules of one of them."""

    costly_reset = True
    frames_a_second: ClassVar[int] = 10

    _package: ClassVar[str]
    _game_class: ClassVar[str]

    def __init__(self, max_steps: int, options: dict[str, Any]) -> None:
        validation.integer_between("max_steps", max_steps, 1, 2**31 - 1)
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
        """The player died or, in the full game, beat the boss: craftax's own rule, without
        the time limit that it mixes in."""
        endless = params.game.replace(max_timesteps=_FOREVER)
        return jnp.asarray(self._game.is_terminal(state.game, endless), bool)

    @property
    def num_actions(self) -> int:
        return int(self._game.num_actions)

    def action_space(self, params: CraftaxParams | None = None) -> spaces.Discrete:  # noqa: ARG002
        return spaces.Discrete(self.num_actions)

    def observation_space(self, params: CraftaxParams | None = None) -> spaces.Box:
        box = self._game.observation_space((params or self._params).game)
        return spaces.Box(0.0, self._highest(params or self._params), tuple(box.shape), jnp.float32)

    def _highest(self, params: CraftaxParams) -> float:  # noqa: ARG002
        """The largest number that an observation can hold."""
        return 1.0

    def render(
        self,
        state: CraftaxState,
        params: CraftaxParams | None = None,  # noqa: ARG002
    ) -> UInt8[Array, "height width 3"]:
        """state -> what the player of the game sees, 16 pixels a tile, with the inventory below.

        The first call reads craftax's pictures (a few seconds) and compiles.
        """
        return _renderer(self._package)(state.game)


class Craftax(_Symbolic):
    """obs (8268,) float32; 43 actions (`craftax.craftax.constants.Action`).

    An episode is terminated by the player's death or the boss's, and truncated after
    `max_steps` steps. `info["Achievements/<name>"]` holds, for each of the 67 achievements,
    100 at the last step of an episode in which it was reached and 0 at every other: the names
    and values of the package. `options` are fields of craftax's `EnvParams`, for example
    `god_mode=True` or `day_length=300`.
    """

    _package = "craftax.craftax"
    _game_class = "CraftaxSymbolicEnvNoAutoReset"

    def __init__(self, *, max_steps: int = 100_000, **options: Any) -> None:
        super().__init__(max_steps, options)

    def _highest(self, params: CraftaxParams) -> float:
        # The package says 1; but mana is shown in tenths, and it goes up to 6 and three more for
        # every point of intelligence: more than any other entry.
        return max(1.0, (6 + 3 * params.game.max_attribute) / 10)


class CraftaxClassic(_Symbolic):
    """obs (1345,) float32; 17 actions (`craftax.craftax_classic.constants.Action`).

    As `Craftax`, with 22 achievements; `info["score"]` is the package's score of the episode,
    given at its last step. Ends by death (lava included). `options`: craftax's `EnvParams` of
    the classic game, for example `spawn_cow_chance=0.1`.
    """

    _package = "craftax.craftax_classic"
    _game_class = "CraftaxClassicSymbolicEnvNoAutoReset"

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
    """craftax's parameters with `options` in place; each must be of its default's kind."""
    known = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    known = {name: value for name, value in known.items() if name not in _NOT_OPTIONS}
    checked = {}
    for name, value in options.items():
        validation.one_of("option", name, ["max_steps", *known])
        default = known[name]
        if isinstance(default, bool):
            validation.boolean(name, value)
            checked[name] = bool(value)
        elif isinstance(default, int):
            validation.integer(name, value, minimum=1)
            checked[name] = int(value)
        else:  # the rest are chances
            checked[name] = validation.number(name, value, minimum=0.0)
            if checked[name] > 1.0:
                raise ValueError(f"{name}={value!r} is a chance; it must be from 0 to 1")
    return defaults.replace(**checked)


def _state(game: Any) -> CraftaxState:
    # Some leaves of the classic game come weakly typed, some of them only from `reset`: left so,
    # the second call of a compiled step would compile it again.
    game = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), game)
    return CraftaxState(time=game.timestep, game=game)


@functools.cache
def _renderer(package: str) -> Callable[[Any], UInt8[Array, "height width 3"]]:
    constants = _import(f"{package}.constants")
    module = _import(f"{package}.renderer")
    # craftax would draw its textures in three sizes and write them among its own files, which
    # need not be writable; one size, kept in memory, is enough. The first frame may be asked for
    # while JAX traces: the textures must be numbers all the same.
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
