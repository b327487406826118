"""MineSweeper: uncover all squares without a mine, told only the count of the last square."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.envs.popgym.base import POPGymEnvironment, at, one_hots

CLEAR, MINE, VIEWED = range(3)
_MOST_SEEN = 9  # mines in a square and its neighbours


@struct.dataclass
class MineSweeperState(environment.EnvState):
    """The squares row by row, how many mines are in and around the last one, and what is left."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    mines: Bool[Array, " squares"]
    viewed: Bool[Array, " squares"]
    count: Int[Array, ""]
    left: Int[Array, ""]
    exploded: Bool[Array, ""]


class MineSweeper(POPGymEnvironment[MineSweeperState]):
    """MineSweeper: obs (min(mines + 1, 10),) float32; actions 0 to board^2 - 1, a square.

    The observation is how many mines are in the square that was uncovered and its eight
    neighbours, and 0 at the start. There are L squares without a mine: each gives 1 / L. A square
    uncovered before costs 0.5 / (L - 2). A mine costs 0.5 + 1 / L and terminates the episode, as
    the last square without a mine does. Truncated after L steps: to win, no step may be wasted.

    The hidden state (3 board^2,) is what each square is: covered, a mine, or uncovered.

    **Arguments:**

    - `board`: side of the board.
    - `mines`: how many mines, at most board^2 - 3.
    - `observe_state`: whether the hidden state follows the observation.
    """

    # Episodes are short: at every step some end in every block.
    costly_reset: ClassVar[bool] = False

    def __init__(self, board: int = 4, *, mines: int = 2, observe_state: bool = False) -> None:
        validation.check_integer_between("board", board, 2, 100)
        validation.check_integer_between("mines", mines, 1, board**2 - 3)
        self.board, self.mines = int(board), int(mines)
        self.clear = self.board**2 - self.mines
        self.counts = min(self.mines, _MOST_SEEN) + 1
        super().__init__(self.clear, self.counts, 3 * self.board**2, observe_state)

    def start(self, key: PRNGKeyArray) -> MineSweeperState:
        squares = self.board**2
        mines = _choose(key, squares, self.mines)
        return MineSweeperState(
            time=jnp.int32(0),
            mines=mines,
            viewed=jnp.zeros(squares, bool),
            count=jnp.int32(0),
            left=jnp.int32(self.clear),
            exploded=jnp.bool_(False),
        )

    def advance(
        self, state: MineSweeperState, action: Array, draw: None
    ) -> tuple[MineSweeperState, Float[Array, ""]]:
        del draw
        square = jnp.arange(self.board**2, dtype=jnp.int32)
        row, column = square // self.board, square % self.board
        action = action.astype(jnp.int32)
        near = (jnp.abs(row - action // self.board) <= 1) & (
            jnp.abs(column - action % self.board) <= 1
        )
        mine, again = at(state.mines, action), at(state.viewed, action)
        fresh = ~mine & ~again
        worth = 1 / self.clear
        waste = -0.5 / (self.clear - 2)
        after = MineSweeperState(
            time=state.time,
            mines=state.mines,
            viewed=state.viewed | (fresh & (square == action)),
            count=jnp.sum(state.mines & near, dtype=jnp.int32),
            left=state.left - fresh,
            exploded=mine,
        )
        return after, jnp.where(mine, -0.5 - worth, jnp.where(again, waste, worth))

    def observation(self, state: MineSweeperState) -> Float[Array, " size"]:
        return one_hots(state.count, self.counts)

    def hidden_state(self, state: MineSweeperState) -> Float[Array, " state_size"]:
        squares = jnp.where(state.mines, MINE, jnp.where(state.viewed, VIEWED, CLEAR))
        return one_hots(squares, 3)

    def is_terminated(
        self, state: MineSweeperState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return state.exploded | (state.left == 0)

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(self.board**2)


def _choose(key: PRNGKeyArray, size: int, count: int) -> Bool[Array, " size"]:
    """`count` of `size` places, all sets of them equally likely: Floyd's algorithm.

    The i-th draw is among the first size - count + i + 1 places. If it is chosen already, the
    last of these places is taken, which cannot have been chosen.
    """
    draws = jax.random.uniform(key, (count,))
    chosen: list[Int[Array, ""]] = []
    for i in range(count):
        last = size - count + i
        place = (draws[i] * (last + 1)).astype(jnp.int32)
        taken = jnp.any(jnp.stack([place == other for other in chosen])) if chosen else False
        chosen.append(jnp.where(taken, last, place))
    return jnp.any(jnp.arange(size, dtype=jnp.int32)[:, None] == jnp.stack(chosen), axis=1)
