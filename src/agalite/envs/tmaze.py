"""T-Maze: a cue seen once says which way to turn at the far end of a corridor."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8, UInt32

from agalite import validation
from agalite.envs import drawing
from agalite.envs.base import World

UP, DOWN, LEFT, RIGHT = range(4)

CUE_BITS, PLACE_BITS, DISTRACTOR_BITS = 2, 8, 6
FEATURES = CUE_BITS + PLACE_BITS + DISTRACTOR_BITS

_STEP, _CORRECT, _WRONG = -0.1, 4.0, -1.0

# One 32-bit word holds all the chance of a step: its low bits are the distractors, and where
# an episode begins its top bit is the cue.
_CUE_SHIFT = 31


@struct.dataclass
class TMazeState(environment.EnvState):
    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    place: Int[Array, ""]  # 0 (start) ... corridor - 1 (the junction)
    cue: Int[Array, ""]  # the turn that pays: UP or DOWN
    turned: Bool[Array, ""]  # the episode has ended with a turn ...
    turn: Int[Array, ""]  # ... this one (UP or DOWN; means nothing before)


@struct.dataclass
class TMazeParams(environment.EnvParams):
    max_steps_in_episode: int = 1000
    corridor: int = 160
    distractors_at_start: bool = False


class TMaze(World[TMazeState, TMazeParams]):
    """obs (16,) float32 of zeros and ones; actions 0 up, 1 down, 2 left, 3 right.

    Features 0-1 are the cue: 01 if up is right and 10 if down is, in the first observation of
    an episode; 00 ever after. (Up is the left turn of one who comes along the corridor.)
    Features 2-9 are the Gray code of the place, highest bit first. Features 10-15 are coin
    tosses, made anew at every step; in the first observation they are zero, as in the code
    published with the paper, unless `distractors_at_start` (the paper's text).

    `corridor` counts the places: 0 is the start and corridor - 1 the junction, so the shortest
    episode has `corridor` steps (corridor - 1 to the right and the turn), and 256 is the most
    that eight bits can tell apart. Left and right move by one place and stop at the start; up
    and down do nothing before the junction. At the junction up or down ends the episode, and
    there is no way back: left and right do nothing there, as in the published task.

    The reward is -0.1 for every step that does not end the episode of itself, and for the turn
    alone +4 or -1 (the paper: "-0.1 at each non-terminal timestep"). After `max_steps` steps
    without a turn the episode is truncated. `info["success"]` is 1.0 at the step of a correct
    turn and 0.0 at every other.

    `corridor` is an ordinary number in the parameters: one compiled program serves all
    lengths, and `jax.vmap` may run over it. An action outside 0..3 does nothing.
    """

    frames_a_second: ClassVar[int] = 20

    def __init__(
        self,
        corridor: int = 160,
        *,
        max_steps: int = 1000,
        distractors_at_start: bool = False,
    ) -> None:
        validation.integer_between("corridor", corridor, 2, 2**PLACE_BITS)
        validation.integer_between("max_steps", max_steps, 1, 2**31 - 1)
        validation.boolean("distractors_at_start", distractors_at_start)
        super().__init__(TMazeParams(int(max_steps), int(corridor), bool(distractors_at_start)))

    def reset_env(
        self, key: PRNGKeyArray, params: TMazeParams
    ) -> tuple[Float[Array, "16"], TMazeState]:
        chance = jax.random.bits(key, dtype=jnp.uint32)
        zero = jnp.int32(0)
        state = TMazeState(
            time=zero,
            place=zero,
            cue=(chance >> _CUE_SHIFT).astype(jnp.int32),
            turned=jnp.bool_(False),
            turn=zero,
        )
        return _observe(chance, state, params), state

    def step_env(
        self,
        key: PRNGKeyArray,
        state: TMazeState,
        action: Int[Array, ""] | int | float,
        params: TMazeParams,
    ) -> tuple[Float[Array, "16"], TMazeState, Float[Array, ""], Bool[Array, ""], dict[str, Array]]:
        action = jnp.asarray(action, jnp.int32)
        junction = params.corridor - 1
        here = state.place == junction
        turned = here & ((action == UP) | (action == DOWN))
        correct = turned & (action == state.cue)
        stride = (action == RIGHT).astype(jnp.int32) - (action == LEFT).astype(jnp.int32)
        state = TMazeState(
            time=state.time + 1,
            place=jnp.where(here, state.place, jnp.maximum(state.place + stride, 0)),
            cue=state.cue,
            turned=turned,
            turn=jnp.where(turned, action, 0),
        )
        reward = jnp.where(turned, jnp.where(correct, _CORRECT, _WRONG), _STEP)
        obs = _observe(jax.random.bits(key, dtype=jnp.uint32), state, params)
        info = {"success": correct.astype(jnp.float32)}
        return obs, state, reward.astype(jnp.float32), turned, info

    def observe(
        self, key: PRNGKeyArray, state: TMazeState, action: Any, params: TMazeParams
    ) -> Float[Array, "16"]:
        del action
        return _observe(jax.random.bits(key, dtype=jnp.uint32), state, params)

    def is_terminated(self, state: TMazeState, params: TMazeParams) -> Bool[Array, ""]:
        del params
        return state.turned

    @property
    def num_actions(self) -> int:
        return 4

    def action_space(self, params: TMazeParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(4)

    def observation_space(self, params: TMazeParams | None = None) -> spaces.Box:
        del params
        return spaces.Box(0.0, 1.0, (FEATURES,), jnp.float32)

    def render(
        self, state: TMazeState, params: TMazeParams | None = None
    ) -> UInt8[Array, "96 320 3"]:
        """The maze from above, however long, in the same width.

        Green is the arm that pays and red the other. The two lamps at the start show the cue:
        lit in the first observation, when the agent sees it, and dim afterwards, for us.
        """
        return _picture(state, self.default_params if params is None else params)


def _observe(
    chance: UInt32[Array, ""], state: TMazeState, params: TMazeParams
) -> Float[Array, "16"]:
    """All features as one word, then its bits, highest first."""
    first = state.time == 0
    cue = jnp.where(first, jnp.where(state.cue == UP, 0b01, 0b10), 0)
    gray = state.place ^ (state.place >> 1)
    coins = (chance & (2**DISTRACTOR_BITS - 1)).astype(jnp.int32)
    coins = jnp.where(jnp.logical_not(first) | params.distractors_at_start, coins, 0)
    word = (cue << (PLACE_BITS + DISTRACTOR_BITS)) | (gray << DISTRACTOR_BITS) | coins
    shifts = jnp.arange(FEATURES - 1, -1, -1, dtype=jnp.int32)
    return ((word[None] >> shifts) & 1).astype(jnp.float32)


_FLOOR, _WALL, _AGENT = (225, 225, 225), (40, 44, 52), (33, 102, 204)
_PAYS, _COSTS = (60, 170, 90), (200, 80, 70)
_LIT, _DIM, _OFF = (255, 200, 0), (150, 125, 50), (85, 88, 95)


def _picture(state: TMazeState, params: TMazeParams) -> UInt8[Array, "96 320 3"]:
    start, junction, middle, half = 48.0, 296.0, 48.0, 9.0
    arms = jnp.asarray([18.0, 78.0], jnp.float32)  # the middles of the ends: UP's, DOWN's
    cue_up = state.cue == UP
    seen = state.time == 0

    def colour(choose: Array, yes: tuple[int, int, int], no: tuple[int, int, int]) -> Array:
        return jnp.where(choose, jnp.asarray(yes, jnp.uint8), jnp.asarray(no, jnp.uint8))

    frame = drawing.blank(96, 320, _WALL)
    frame = drawing.rectangle(frame, start - half, middle - half, junction, middle + half, _FLOOR)
    frame = drawing.rectangle(
        frame, junction - half, arms[0] - half, junction + half, arms[1] + half, _FLOOR
    )
    lamp = colour(seen, _LIT, _DIM)
    for arm, cued in ((UP, cue_up), (DOWN, jnp.logical_not(cue_up))):
        frame = drawing.rectangle(
            frame,
            junction - half,
            arms[arm] - half,
            junction + half,
            arms[arm] + half,
            colour(cued, _PAYS, _COSTS),
        )
        frame = drawing.circle(
            frame,
            20.0,
            middle + (-14.0 if arm == UP else 14.0),
            9.0,
            jnp.where(cued, lamp, jnp.asarray(_OFF, jnp.uint8)),
        )
    way = state.place.astype(jnp.float32) / (params.corridor - 1)
    x = start + way * (junction - start)
    y = jnp.where(state.turned, arms[state.turn], middle)
    return drawing.circle(frame, x, y, 7.0, _AGENT)
