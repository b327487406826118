"""T-Maze (appendix "T-Maze" of the paper): remember a cue to the end of a corridor.

    start                        junction
                                     | up
      0 - 1 - 2 - ... - corridor - 1 +
                                     | down

The observation has 16 bits:

    bits   what                          value
    0-1    the cue                       01 (turn up) or 10 (turn down) at the first step, then 00
    2-9    the position, in Gray code    highest bit first; 0 at the start
    10-15  distractors                   random at every step

The reward is -0.1 at every non-terminal step, and +4 for the correct turn or -1 for the wrong one.

Where the paper's text and its published code differ, this is the code's task: the distractors of
the first observation are zero (`distractors_at_start` makes them random), and an agent at the
junction cannot go back.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8, UInt32

from agalite import validation
from agalite.envs import drawing
from agalite.envs.base import JaxEnvironment

UP, DOWN, LEFT, RIGHT = range(4)

CUE_BITS, POSITION_BITS, DISTRACTOR_BITS = 2, 8, 6
OBS_BITS = CUE_BITS + POSITION_BITS + DISTRACTOR_BITS

_STEP_REWARD, _CORRECT_REWARD, _WRONG_REWARD = -0.1, 4.0, -1.0

# One random word serves a whole step: its low bits are the distractors and, at a reset, its top
# bit is the cue.
_CUE_SHIFT = 31


@struct.dataclass
class TMazeState(environment.EnvState):
    """Where the agent is, and the turn that it must remember."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    position: Int[Array, ""]  # 0 (start) to corridor - 1 (junction)
    cue: Int[Array, ""]  # the correct turn: UP or DOWN
    turned: Bool[Array, ""]  # whether the episode has ended with a turn
    turn: Int[Array, ""]  # which one, UP or DOWN; 0 before


@struct.dataclass
class TMazeParams(environment.EnvParams):
    """The arguments of `TMaze`."""

    max_steps_in_episode: int = 1000
    corridor: int = 160
    distractors_at_start: bool = False


class TMaze(JaxEnvironment[TMazeState, TMazeParams]):
    """T-Maze: obs (16,) float32 of zeros and ones; actions 0 up, 1 down, 2 left, 3 right.

    Left and right move by one position, up and down do nothing before the junction. At the
    junction up or down ends the episode, and left and right do nothing. Other actions than 0 to 3
    do nothing. `info["success"]` is 1.0 at the step of a correct turn and 0.0 at all others.

    The corridor's length is a number in the parameters: one compiled program serves all lengths,
    and `jax.vmap` may run over it.

    **Arguments:**

    - `corridor`: positions from the start to the junction, both included, 2 to 256. The shortest
      episode has `corridor` steps.
    - `max_steps`: the episode is truncated after so many.
    - `distractors_at_start`: whether the first observation has random distractors, as in the
      paper's text; otherwise they are zero there, as in its code.
    """

    render_fps: ClassVar[int] = 20

    def __init__(
        self,
        corridor: int = 160,
        *,
        max_steps: int = 1000,
        distractors_at_start: bool = False,
    ) -> None:
        validation.check_integer_between("corridor", corridor, 2, 2**POSITION_BITS)
        validation.check_integer_between("max_steps", max_steps, 1, 2**31 - 1)
        validation.check_boolean("distractors_at_start", distractors_at_start)
        super().__init__(TMazeParams(int(max_steps), int(corridor), bool(distractors_at_start)))

    def reset_env(
        self, key: PRNGKeyArray, params: TMazeParams
    ) -> tuple[Float[Array, "16"], TMazeState]:
        random_word = jax.random.bits(key, dtype=jnp.uint32)
        zero = jnp.int32(0)
        state = TMazeState(
            time=zero,
            position=zero,
            cue=(random_word >> _CUE_SHIFT).astype(jnp.int32),
            turned=jnp.bool_(False),
            turn=zero,
        )
        return _observe(random_word, state, params), state

    def step_env(
        self,
        key: PRNGKeyArray,
        state: TMazeState,
        action: Int[Array, ""] | int | float,
        params: TMazeParams,
    ) -> tuple[Float[Array, "16"], TMazeState, Float[Array, ""], Bool[Array, ""], dict[str, Array]]:
        action = jnp.asarray(action, jnp.int32)
        at_junction = state.position == params.corridor - 1
        turned = at_junction & ((action == UP) | (action == DOWN))
        correct = turned & (action == state.cue)
        move = (action == RIGHT).astype(jnp.int32) - (action == LEFT).astype(jnp.int32)
        state = TMazeState(
            time=state.time + 1,
            position=jnp.where(at_junction, state.position, jnp.maximum(state.position + move, 0)),
            cue=state.cue,
            turned=turned,
            turn=jnp.where(turned, action, 0),
        )
        turn_reward = jnp.where(correct, _CORRECT_REWARD, _WRONG_REWARD)
        reward = jnp.where(turned, turn_reward, _STEP_REWARD).astype(jnp.float32)
        obs = _observe(jax.random.bits(key, dtype=jnp.uint32), state, params)
        # An agent that never turns has not found the junction; one that turns wrongly has, and has
        # not remembered the cue.
        info = {"success": correct.astype(jnp.float32), "reached": turned.astype(jnp.float32)}
        return obs, state, reward, turned, info

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
        return spaces.Box(0.0, 1.0, (OBS_BITS,), jnp.float32)

    def render(
        self, state: TMazeState, params: TMazeParams | None = None
    ) -> UInt8[Array, "96 320 3"]:
        """The maze from above, in the same width for every length.

        The correct arm is green and the other red. Two lamps at the start show the cue: bright at
        the first step, when it is in the observation, and dim afterwards.
        """
        return _draw(state, self.default_params if params is None else params)


def _observe(
    random_word: UInt32[Array, ""], state: TMazeState, params: TMazeParams
) -> Float[Array, "16"]:
    """The features as one word, then its bits, highest first."""
    first = state.time == 0
    cue = jnp.where(first, jnp.where(state.cue == UP, 0b01, 0b10), 0)
    gray_code = state.position ^ (state.position >> 1)
    distractors = (random_word & (2**DISTRACTOR_BITS - 1)).astype(jnp.int32)
    distractors = jnp.where(jnp.logical_not(first) | params.distractors_at_start, distractors, 0)
    word = (cue << (POSITION_BITS + DISTRACTOR_BITS)) | (gray_code << DISTRACTOR_BITS) | distractors
    shifts = jnp.arange(OBS_BITS - 1, -1, -1, dtype=jnp.int32)
    return ((word[None] >> shifts) & 1).astype(jnp.float32)


_FLOOR, _WALL, _AGENT = (225, 225, 225), (40, 44, 52), (33, 102, 204)
_CORRECT_ARM, _WRONG_ARM = (60, 170, 90), (200, 80, 70)
_BRIGHT, _DIM, _OFF = (255, 200, 0), (150, 125, 50), (85, 88, 95)


def _draw(state: TMazeState, params: TMazeParams) -> UInt8[Array, "96 320 3"]:
    start, junction, middle, half = 48.0, 296.0, 48.0, 9.0  # pixels
    arms = jnp.asarray([18.0, 78.0], jnp.float32)  # y of the ends of UP's and DOWN's arm
    cue_up = state.cue == UP

    def choose(condition: Array, yes: tuple[int, int, int], no: tuple[int, int, int]) -> Array:
        return jnp.where(condition, jnp.asarray(yes, jnp.uint8), jnp.asarray(no, jnp.uint8))

    frame = drawing.blank(96, 320, _WALL)
    frame = drawing.rectangle(frame, start - half, middle - half, junction, middle + half, _FLOOR)
    frame = drawing.rectangle(
        frame, junction - half, arms[0] - half, junction + half, arms[1] + half, _FLOOR
    )
    lamp = choose(state.time == 0, _BRIGHT, _DIM)
    for arm, correct in ((UP, cue_up), (DOWN, jnp.logical_not(cue_up))):
        frame = drawing.rectangle(
            frame,
            junction - half,
            arms[arm] - half,
            junction + half,
            arms[arm] + half,
            choose(correct, _CORRECT_ARM, _WRONG_ARM),
        )
        frame = drawing.circle(
            frame,
            20.0,
            middle + (-14.0 if arm == UP else 14.0),
            9.0,
            jnp.where(correct, lamp, jnp.asarray(_OFF, jnp.uint8)),
        )
    fraction = state.position.astype(jnp.float32) / (params.corridor - 1)
    x = start + fraction * (junction - start)
    y = jnp.where(state.turned, arms[state.turn], middle)
    return drawing.circle(frame, x, y, 7.0, _AGENT)
