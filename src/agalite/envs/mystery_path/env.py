"""Mystery Path: find an invisible path across a 7 x 7 grid, and remember where it is.

A port of Memory Gym's `MysteryPath-Grid-v0` and `MysteryPath-v0` (Pleines et al., 2023) with equal
observations, rewards and ends. The options have the original's names. Their defaults are the
AGaLiTe paper's: the origin and the goal are shown, and every new tile of the path pays 0.1. An
agent that leaves the path is shown with a red cross, and the next step returns it to the origin,
whatever its action. The one difference: the time limit is a truncation here and a termination in
the original.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, ArrayLike, Bool, Float, Int, UInt8

from agalite import validation
from agalite.envs.base import JaxEnvironment
from agalite.envs.mystery_path import generator, pixels
from agalite.envs.mystery_path.pixels import GRID, ROTATIONS, SCREEN, TILE


@struct.dataclass
class MysteryPathState(environment.EnvState):
    """Tiles and pixels are in [x, y] order."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    start: Int[Array, " 2"]  # the origin's tile
    end: Int[Array, " 2"]  # the goal's tile
    on_path: Bool[Array, "7 7"]
    visited: Bool[Array, "7 7"]  # tiles that have paid `reward_path_progress`
    centre: Int[Array, " 2"]  # of the agent, in pixels
    rotation: Int[Array, ""]  # in eighths of a turn, anticlockwise from up
    off_path: Bool[Array, ""]  # the next step returns the agent to the origin
    num_fails: Int[Array, ""]


@struct.dataclass
class MysteryPathParams(environment.EnvParams):
    """The time limit, the rewards, and what an observation shows."""

    max_steps_in_episode: int = 128
    cardinal_origin_choice: tuple[int, ...] = (0, 1, 2, 3)
    show_origin: bool = True
    show_goal: bool = True
    visual_feedback: bool = True
    reward_goal: float = 1.0
    reward_fall_off: float = 0.0
    reward_step: float = 0.0
    reward_path_progress: float = 0.1


_SCALE = 0.25
# Forward when facing up, left, down and right.
_FORWARD = np.array([[0, -1], [-1, 0], [0, 1], [1, 0]], np.int32)
# The direction of 0, 1 and 2 along either axis.
_DIRECTION = np.array([0, -1, 1], np.int32)
# The rotation after action [h, v]; -1 leaves it unchanged.
_ROTATION = np.array([[-1, 0, 4], [2, 1, 3], [6, 7, 5]], np.int32)


class _MysteryPath(JaxEnvironment[MysteryPathState, MysteryPathParams]):
    """What the two variants share: everything but `_move`."""

    costly_reset: ClassVar[bool] = True

    def __init__(self, params: MysteryPathParams, agent_scale: float, size: int) -> None:
        super().__init__(params)
        validation.check_integer_between("size", size, GRID, SCREEN)
        self.size = int(size)
        self._radius = pixels.radius_of(agent_scale)
        self._sprites = pixels.atlas(agent_scale)

    def reset_env(
        self, key: Array, params: MysteryPathParams
    ) -> tuple[UInt8[Array, "size size 3"], MysteryPathState]:
        choice = jnp.asarray(params.cardinal_origin_choice, jnp.int32)
        state = self.state_from_path(*generator.path(generator.draws(key, choice)))
        return self.get_obs(state, params), state

    def state_from_path(
        self,
        start: ArrayLike | Sequence[int],
        end: ArrayLike | Sequence[int],
        on_path: ArrayLike,
    ) -> MysteryPathState:
        """The initial state of an episode on a given path.

        **Arguments:**

        - `start`, `end`: tiles (2,), in [x, y] order.
        - `on_path`: (7, 7) bool, indexed [x, y].
        """
        for name, value, shape in (("start", start, (2,)), ("end", end, (2,))):
            validation.check_shape(name, value, shape)
        validation.check_shape("on_path", on_path, (GRID, GRID))
        first = jnp.asarray(start, jnp.int32)
        return MysteryPathState(
            time=jnp.int32(0),
            start=first,
            end=jnp.asarray(end, jnp.int32),
            on_path=jnp.asarray(on_path, bool),
            visited=jnp.zeros((GRID, GRID), bool),
            centre=self._tile_centre(first),
            rotation=jnp.int32(0),
            off_path=jnp.zeros((), bool),
            num_fails=jnp.int32(0),
        )

    def step_env(
        self,
        key: Array,  # noqa: ARG002
        state: MysteryPathState,
        action: Any,
        params: MysteryPathParams,
    ) -> tuple[
        UInt8[Array, "size size 3"],
        MysteryPathState,
        Float[Array, ""],
        Bool[Array, ""],
        dict[str, Array],
    ]:
        shift, rotation = self._move(state.rotation, action)
        centre = jnp.where(state.off_path, self._tile_centre(state.start), state.centre + shift)
        centre = jnp.clip(centre, self._radius, SCREEN - self._radius)
        rotation = jnp.where(state.off_path, state.rotation, rotation)

        tile = centre // TILE
        here = _at_tile(tile)
        success = jnp.all(tile == state.end)
        safe = success | jnp.any(state.on_path & here)
        fresh = ~success & ~jnp.all(tile == state.start) & ~jnp.any(state.visited & here) & safe
        reward = (
            _float(params.reward_step)
            + jnp.where(success, _float(params.reward_goal), 0.0)
            + jnp.where(fresh, _float(params.reward_path_progress), 0.0)
            + jnp.where(safe, 0.0, _float(params.reward_fall_off))
        )
        state = state.replace(  # pyright: ignore[reportAttributeAccessIssue]
            time=state.time + 1,
            visited=state.visited | (here & fresh),
            centre=centre,
            rotation=rotation,
            off_path=~safe,
            num_fails=state.num_fails + (~safe).astype(jnp.int32),
        )
        info = {"success": success.astype(jnp.float32), "num_fails": state.num_fails}
        return self.get_obs(state, params), state, reward, success, info

    def _move(
        self, rotation: Int[Array, ""], action: Any
    ) -> tuple[Int[Array, " 2"], Int[Array, ""]]:
        """The action's movement in pixels [x, y], and the rotation after it."""
        raise NotImplementedError

    def _tile_centre(self, tile: Int[Array, " 2"]) -> Int[Array, " 2"]:
        return TILE * tile + self._radius

    def is_terminated(self, state: MysteryPathState, params: MysteryPathParams) -> Bool[Array, ""]:
        del params
        return jnp.all(state.centre // TILE == state.end)

    def get_obs(
        self,
        state: MysteryPathState,
        params: MysteryPathParams | None = None,
        key: Array | None = None,
    ) -> UInt8[Array, "size size 3"]:
        """The observation of `state`, indexed [x, y, channel] as in the original."""
        del key
        return pixels.resize(self._frame(state, params), self.size)

    def render(
        self, state: MysteryPathState, params: MysteryPathParams | None = None
    ) -> UInt8[Array, "84 84 3"]:
        """The observation in full size, as an image: indexed [y, x, channel]."""
        return self._frame(state, params).transpose(1, 0, 2)

    def _frame(
        self, state: MysteryPathState, params: MysteryPathParams | None
    ) -> UInt8[Array, "84 84 3"]:
        chosen: MysteryPathParams = self.default_params if params is None else params
        return pixels.draw(
            self._sprites,
            state.centre,
            state.rotation,
            state.off_path & jnp.asarray(chosen.visual_feedback, bool),
            origin=(state.start, jnp.asarray(chosen.show_origin, bool)),
            goal=(state.end, jnp.asarray(chosen.show_goal, bool)),
        )

    def observation_space(self, params: MysteryPathParams | None = None) -> spaces.Box:
        del params
        return spaces.Box(0, 255, (self.size, self.size, 3), jnp.uint8)


def _at_tile(tile: Int[Array, " 2"]) -> Bool[Array, "7 7"]:
    """True at `tile`. Under `vmap`, masks are cheaper than indexing."""
    along = jnp.arange(GRID, dtype=jnp.int32)
    return (along == tile[0])[:, None] & (along == tile[1])[None, :]


def _float(value: float | Array) -> Float[Array, ""]:
    return jnp.asarray(value, jnp.float32)


def _check_scale(agent_scale: float) -> float:
    scale = validation.check_number("agent_scale", agent_scale, minimum=0.0)
    if not 1 <= pixels.radius_of(scale) < TILE:
        raise ValueError(
            f"agent_scale={agent_scale!r} must be at least 0.04 and less than 0.48, so that the "
            "agent is visible and starts on the first tile of its path"
        )
    return scale


def _params(
    max_steps: int, cardinal_origin_choice: Sequence[int], **options: Any
) -> MysteryPathParams:
    validation.check_integer_between("max_steps", max_steps, 1, 2**31 - 1)
    sides = _sides(cardinal_origin_choice)
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name.startswith("reward_"):
            checked[name] = validation.check_finite_number(name, value)
        else:
            validation.check_boolean(name, value)
            checked[name] = bool(value)
    return MysteryPathParams(int(max_steps), sides, **checked)


def _sides(cardinal_origin_choice: Sequence[int]) -> tuple[int, ...]:
    """A side that is repeated is likelier, as in the original."""
    try:
        sides = tuple(cardinal_origin_choice)
        for side in sides:
            validation.check_integer_between("side", side, 0, 3)
    except (TypeError, ValueError):
        sides = ()
    if not sides:
        raise ValueError(
            f"cardinal_origin_choice={cardinal_origin_choice!r} must be one or more of the sides "
            "0, 1, 2 and 3, for example (0, 1, 2, 3)"
        )
    return tuple(int(side) for side in sides)


class MysteryPathGrid(_MysteryPath):
    """Mystery Path with moves from tile to tile: obs (size, size, 3) uint8.

    Actions: 0 nothing, 1 turn left, 2 turn right, 3 forward by one tile. `info` has `success`,
    1.0 at the step that reaches the goal, and `num_fails`, how often the agent left the path.

    **Arguments:**

    - `max_steps`: the episode is truncated after so many.
    - `agent_scale`: without effect on the grid, as in the original.
    - `cardinal_origin_choice`: the sides on which the origin may be: 0 left, 1 right, 2 top,
      3 bottom. The goal is on the opposite side.
    - `show_origin`, `show_goal`: whether their tiles are drawn.
    - `visual_feedback`: whether a red cross is drawn on an agent that left the path.
    - `reward_goal`, `reward_fall_off`, `reward_step`: for reaching the goal, for leaving the path
      and for every step.
    - `reward_path_progress`: for every tile of the path that is visited for the first time.
    - `size`: pixels along each side of an observation, 7 to 84; below 84 the frame is resized by
      averaging over areas.
    """

    render_fps: ClassVar[int] = 3

    def __init__(
        self,
        *,
        max_steps: int = 128,
        agent_scale: float = _SCALE,
        cardinal_origin_choice: Sequence[int] = (0, 1, 2, 3),
        show_origin: bool = True,
        show_goal: bool = True,
        visual_feedback: bool = True,
        reward_goal: float = 1.0,
        reward_fall_off: float = 0.0,
        reward_step: float = 0.0,
        reward_path_progress: float = 0.1,
        size: int = SCREEN,
    ) -> None:
        params = _params(
            max_steps,
            cardinal_origin_choice,
            show_origin=show_origin,
            show_goal=show_goal,
            visual_feedback=visual_feedback,
            reward_goal=reward_goal,
            reward_fall_off=reward_fall_off,
            reward_step=reward_step,
            reward_path_progress=reward_path_progress,
        )
        _check_scale(agent_scale)
        super().__init__(params, _SCALE, size)

    def _move(
        self, rotation: Int[Array, ""], action: Int[Array, ""] | int
    ) -> tuple[Int[Array, " 2"], Int[Array, ""]]:
        action = jnp.asarray(action, jnp.int32)
        quarter = ROTATIONS // 4
        turn = jnp.where(action == 1, quarter, jnp.where(action == 2, -quarter, 0))
        forward = jnp.asarray(_FORWARD)[rotation // quarter]
        return jnp.where(action == 3, TILE * forward, 0), (rotation + turn) % ROTATIONS

    @property
    def num_actions(self) -> int:
        return 4

    def action_space(self, params: MysteryPathParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(4)


class MysteryPath(_MysteryPath):
    """Mystery Path with smooth motion: obs (size, size, 3) uint8.

    The action is 3 h + v, where h is 1 for left and 2 for right, v is 1 for up and 2 for down, and
    0 is neither. `info` is that of `MysteryPathGrid`.

    **Arguments:**

    As for `MysteryPathGrid`, and:

    - `agent_scale`: the agent's radius is int(25 * agent_scale) pixels, 1 to 11. (The original
      draws others too, but radius 0 is invisible and radius 12 does not start on its path.)
    - `agent_speed`: pixels per step. A diagonal step has this length too; fractions of a pixel
      are dropped on each axis.
    - `multi_discrete`: the action is the pair [h, v], as in the original.
    """

    render_fps: ClassVar[int] = 25

    def __init__(
        self,
        *,
        max_steps: int = 512,
        agent_scale: float = _SCALE,
        agent_speed: float = 3.0,
        cardinal_origin_choice: Sequence[int] = (0, 1, 2, 3),
        show_origin: bool = True,
        show_goal: bool = True,
        visual_feedback: bool = True,
        reward_goal: float = 1.0,
        reward_fall_off: float = 0.0,
        reward_step: float = 0.0,
        reward_path_progress: float = 0.1,
        multi_discrete: bool = False,
        size: int = SCREEN,
    ) -> None:
        params = _params(
            max_steps,
            cardinal_origin_choice,
            show_origin=show_origin,
            show_goal=show_goal,
            visual_feedback=visual_feedback,
            reward_goal=reward_goal,
            reward_fall_off=reward_fall_off,
            reward_step=reward_step,
            reward_path_progress=reward_path_progress,
        )
        super().__init__(params, _check_scale(agent_scale), size)
        validation.check_boolean("multi_discrete", multi_discrete)
        self.multi_discrete = bool(multi_discrete)
        speed = validation.check_number("agent_speed", agent_speed, minimum=0.0)
        # In double precision, as in the original: single would round some speeds to other pixels.
        # Faster than the screen is wide makes no difference, since the border stops the agent.
        self._straight = int(min(speed, SCREEN))
        self._diagonal = int(min(speed * (1 / math.sqrt(2)), SCREEN))

    def _move(
        self, rotation: Int[Array, ""], action: Any
    ) -> tuple[Int[Array, " 2"], Int[Array, ""]]:
        action = jnp.asarray(action, jnp.int32)
        if self.multi_discrete:
            validation.check_shape("action", action, (2,))
            valid = jnp.where((action >= 0) & (action < 3), action, 0)
        else:
            validation.check_shape("action", action, ())
            valid = jnp.where((action >= 0) & (action < 9), action, 0)
            valid = jnp.stack([valid // 3, valid % 3])
        new_rotation = jnp.asarray(_ROTATION)[valid[0], valid[1]]
        distance = jnp.where(jnp.all(valid > 0), self._diagonal, self._straight)
        shift = distance * jnp.asarray(_DIRECTION)[valid]
        return shift, jnp.where(new_rotation < 0, rotation, new_rotation)

    @property
    def num_actions(self) -> int:
        return 9

    def action_space(
        self, params: MysteryPathParams | None = None
    ) -> "spaces.Discrete | Directions":
        del params
        return Directions() if self.multi_discrete else spaces.Discrete(9)


class Directions(spaces.Box):
    """The space of [h, v]: (2,) int32, each 0, 1 or 2.

    gymnax has no multi-discrete space, and its Box would never sample a 2.
    """

    def __init__(self) -> None:
        super().__init__(0, 2, (2,), jnp.int32)

    def sample(self, key: Array) -> Int[Array, " 2"]:
        return jax.random.randint(key, self.shape, 0, 3, self.dtype)
