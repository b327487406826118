"""Mystery Path: find an invisible path across a 7 x 7 grid, and remember where it was not.

A port of Memory Gym's `MysteryPath-Grid-v0` and `MysteryPath-v0` (Pleines et al., 2023), equal
to it in observations, rewards and ends. Options and their names are the original's; where not
given they are those of the AGaLiTe paper, which shows the origin and the goal and pays 0.1 for
every new tile of the path. Stepping off the path is shown by a red cross, and the next step
puts the agent back at the origin, whatever its action. The one difference: running out of
time is a truncation here, while the original calls it a termination.
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
from agalite.envs.base import World
from agalite.envs.mystery_path import generator, pixels
from agalite.envs.mystery_path.pixels import GRID, ROTATIONS, SCREEN, TILE


@struct.dataclass
class MysteryPathState(environment.EnvState):
    """`centre` is the agent's place in pixels; `rotation` counts eighths of a turn to the left."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    start: Int[Array, " 2"]
    end: Int[Array, " 2"]
    on_path: Bool[Array, "7 7"]
    visited: Bool[Array, "7 7"]
    centre: Int[Array, " 2"]
    rotation: Int[Array, ""]
    off_path: Bool[Array, ""]
    num_fails: Int[Array, ""]


@struct.dataclass
class MysteryPathParams(environment.EnvParams):
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
# Facing up, left, down and right: rotations count to the left.
_FORWARD = np.array([[0, -1], [-1, 0], [0, 1], [1, 0]], np.int32)
# What 0, 1 and 2 mean along either axis.
_HEADING = np.array([0, -1, 1], np.int32)
# Rotation after [h, v]; -1 leaves it as it was.
_TURNED = np.array([[-1, 0, 4], [2, 1, 3], [6, 7, 5]], np.int32)


class _MysteryPath(World[MysteryPathState, MysteryPathParams]):
    """What the grid and the continuous variant share: all but how an action moves the agent."""

    costly_reset: ClassVar[bool] = True

    def __init__(self, params: MysteryPathParams, agent_scale: float, size: int) -> None:
        super().__init__(params)
        validation.integer_between("size", size, GRID, SCREEN)
        self.size = int(size)
        self._radius = pixels.radius_of(agent_scale)
        self._looks = pixels.atlas(agent_scale)

    def reset_env(
        self, key: Array, params: MysteryPathParams
    ) -> tuple[UInt8[Array, "size size 3"], MysteryPathState]:
        """key -> obs (size, size, 3), state."""
        choice = jnp.asarray(params.cardinal_origin_choice, jnp.int32)
        state = self.state_from_path(*generator.path(generator.chance(key, choice)))
        return self.get_obs(state, params), state

    def state_from_path(
        self,
        start: ArrayLike | Sequence[int],
        end: ArrayLike | Sequence[int],
        on_path: ArrayLike,
    ) -> MysteryPathState:
        """start (2,), end (2,), on_path (7, 7), all in [x, y] order -> a new episode on it."""
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
            centre=self._place(first),
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
        """-> obs (size, size, 3), state, reward, terminated, info (`success`, `num_fails`)."""
        shift, rotation = self._move(state.rotation, action)
        centre = jnp.where(state.off_path, self._place(state.start), state.centre + shift)
        centre = jnp.clip(centre, self._radius, SCREEN - self._radius)
        rotation = jnp.where(state.off_path, state.rotation, rotation)

        tile = centre // TILE
        here = _one_tile(tile)
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
        """-> by how many pixels the action moves the agent in x and y, and its new rotation."""
        raise NotImplementedError

    def _place(self, tile: Int[Array, " 2"]) -> Int[Array, " 2"]:
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
        """state -> obs (size, size, 3), indexed [x, y, channel] as the original's."""
        del key
        return pixels.resized(self._frame(state, params), self.size)

    def render(
        self, state: MysteryPathState, params: MysteryPathParams | None = None
    ) -> UInt8[Array, "84 84 3"]:
        """state -> frame (84, 84, 3), indexed [y, x, channel] as images are."""
        return self._frame(state, params).transpose(1, 0, 2)

    def _frame(
        self, state: MysteryPathState, params: MysteryPathParams | None
    ) -> UInt8[Array, "84 84 3"]:
        chosen: MysteryPathParams = self.default_params if params is None else params
        return pixels.draw(
            self._looks,
            state.centre,
            state.rotation,
            state.off_path & jnp.asarray(chosen.visual_feedback, bool),
            origin=(state.start, jnp.asarray(chosen.show_origin, bool)),
            goal=(state.end, jnp.asarray(chosen.show_goal, bool)),
        )

    def observation_space(self, params: MysteryPathParams | None = None) -> spaces.Box:
        del params
        return spaces.Box(0, 255, (self.size, self.size, 3), jnp.uint8)


def _one_tile(tile: Int[Array, " 2"]) -> Bool[Array, "7 7"]:
    """True there, False elsewhere; comparing is cheaper than looking up under `vmap`."""
    along = jnp.arange(GRID, dtype=jnp.int32)
    return (along == tile[0])[:, None] & (along == tile[1])[None, :]


def _float(value: float | Array) -> Float[Array, ""]:
    return jnp.asarray(value, jnp.float32)


def _check_scale(agent_scale: float) -> float:
    scale = validation.number("agent_scale", agent_scale, minimum=0.0)
    if not 1 <= pixels.radius_of(scale) < TILE:
        raise ValueError(
            f"agent_scale={agent_scale!r} must be at least 0.04 and less than 0.48, so that the "
            "agent is seen and begins on the first tile of its path"
        )
    return scale


def _checked(
    max_steps: int, cardinal_origin_choice: Sequence[int], **options: Any
) -> MysteryPathParams:
    validation.integer_between("max_steps", max_steps, 1, 2**31 - 1)
    sides = _sides(cardinal_origin_choice)
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name.startswith("reward_"):
            checked[name] = validation.finite_number(name, value)
        else:
            validation.boolean(name, value)
            checked[name] = bool(value)
    return MysteryPathParams(int(max_steps), sides, **checked)


def _sides(cardinal_origin_choice: Sequence[int]) -> tuple[int, ...]:
    """Repeating a side makes it likelier, as in the original."""
    try:
        sides = tuple(cardinal_origin_choice)
        for side in sides:
            validation.integer_between("side", side, 0, 3)
    except (TypeError, ValueError):
        sides = ()
    if not sides:
        raise ValueError(
            f"cardinal_origin_choice={cardinal_origin_choice!r} must be one or more of the sides "
            "0, 1, 2 and 3, for example (0, 1, 2, 3)"
        )
    return tuple(int(side) for side in sides)


class MysteryPathGrid(_MysteryPath):
    """obs (size, size, 3) uint8; actions: 0 nothing, 1 turn left, 2 turn right, 3 forward one tile.

    `agent_scale` is accepted because the original accepts it, and is without effect on the
    grid, there as here. `size` below 84 gives the mean colours of a smaller picture.
    """

    frames_a_second: ClassVar[int] = 3

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
        params = _checked(
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
    """obs (size, size, 3) uint8; action 3 h + v: h 1 left, 2 right; v 1 up, 2 down; 0 neither.

    With `multi_discrete` an action is the pair [h, v] itself, as in the original. A step moves
    the agent by `agent_speed` pixels, or by that length along a diagonal, less any fraction of
    a pixel on each axis. `agent_scale` times 25, without its fraction, is the agent's radius in
    pixels; the original would draw other radii than 1 to 11 too, but an agent of radius 0 is
    not to be seen, and one of 12 or more does not begin on the first tile of its path.
    `size` below 84 gives the mean colours of a smaller picture.
    """

    frames_a_second: ClassVar[int] = 25

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
        params = _checked(
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
        validation.boolean("multi_discrete", multi_discrete)
        self.multi_discrete = bool(multi_discrete)
        speed = validation.number("agent_speed", agent_speed, minimum=0.0)
        # In double precision, as the original: single would round some speeds to other pixels.
        # Beyond the screen's width the border stops the agent, however fast it is.
        self._straight = int(min(speed, SCREEN))
        self._diagonal = int(min(speed * (1 / math.sqrt(2)), SCREEN))

    def _move(
        self, rotation: Int[Array, ""], action: Any
    ) -> tuple[Int[Array, " 2"], Int[Array, ""]]:
        action = jnp.asarray(action, jnp.int32)
        if self.multi_discrete:
            validation.check_shape("action", action, (2,))
            known = jnp.where((action >= 0) & (action < 3), action, 0)
        else:
            validation.check_shape("action", action, ())
            known = jnp.where((action >= 0) & (action < 9), action, 0)
            known = jnp.stack([known // 3, known % 3])
        turned = jnp.asarray(_TURNED)[known[0], known[1]]
        stride = jnp.where(jnp.all(known > 0), self._diagonal, self._straight)
        shift = stride * jnp.asarray(_HEADING)[known]
        return shift, jnp.where(turned < 0, rotation, turned)

    @property
    def num_actions(self) -> int:
        return 9

    def action_space(
        self, params: MysteryPathParams | None = None
    ) -> "spaces.Discrete | Directions":
        del params
        return Directions() if self.multi_discrete else spaces.Discrete(9)


class Directions(spaces.Box):
    """(2,) int32, each 0, 1 or 2. (gymnax has no such space; its Box would never draw a 2.)"""

    def __init__(self) -> None:
        super().__init__(0, 2, (2,), jnp.int32)

    def sample(self, key: Array) -> Int[Array, " 2"]:
        return jax.random.randint(key, self.shape, 0, 3, self.dtype)
