"""LabyrinthEscape and LabyrinthExplore: find the way out of a maze, or see all of it.

The mazes have the distribution of mazelib's hunt-and-kill generator, which the package uses. It
walks at random from cell to cell that is not yet part of the maze, until there is none beside it.
Then it looks for a place to go on: cells drawn at random, as often as the grid has squares, of
which those count that are in the maze and beside a cell that is not. Here the draws in vain are
counted by one geometric number, which leaves one iteration for each cell.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8, UInt32

from agalite import validation
from agalite.envs.popgym.base import POPGymEnvironment, at, one_hots

FREE, OBSTACLE, START, GOAL, HIDDEN = range(5)
LEFT, RIGHT, UP, DOWN, NONE = range(5)
_CELLS, _VIEW = 5, 3


@struct.dataclass
class LabyrinthState(environment.EnvState):
    """The squares row by row, which of them were visited, where the agent is, its last action,
    and how many free squares there were and are left to visit."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    grid: UInt8[Array, " squares"]
    explored: Bool[Array, " squares"]
    y: Int[Array, ""]
    x: Int[Array, ""]
    action: Int[Array, ""]
    free: Int[Array, ""]
    left: Int[Array, ""]


class _Labyrinth(POPGymEnvironment[LabyrinthState]):
    """Movement and sight in a maze of `size`^2 cells, (2 size + 1)^2 squares."""

    def __init__(self, size: int, max_steps: int, observe_state: bool) -> None:
        validation.check_integer_between("size", size, 3, 31)
        validation.check_integer_between("max_steps", max_steps, 2, 2**31 - 1)
        self.size, self.side, self.max_steps = int(size), 2 * int(size) + 1, int(max_steps)
        observation = _VIEW**2 * _CELLS + NONE + 1
        state = (self.side**2) * (2 * _CELLS - 1) + 2 * self.side
        super().__init__(self.max_steps - 1, observation, state, observe_state)

    def start(self, key: PRNGKeyArray) -> LabyrinthState:
        maze_key, side_key, place_key = jax.random.split(key, 3)
        grid = hunt_and_kill(maze_key, self.size)
        start, end = _entrances(side_key, place_key, self.size)
        return self.begin(grid, start, end)

    def begin(
        self,
        grid: UInt8[Array, " squares"],
        start: tuple[Int[Array, ""], Int[Array, ""]],
        end: tuple[Int[Array, ""], Int[Array, ""]],
    ) -> LabyrinthState:
        """The first state in a maze of free squares and obstacles, with its entrance and exit."""
        y, x = start
        square = jnp.arange(self.side**2, dtype=jnp.int32)
        here = square == y * self.side + x
        grid = jnp.where(here, jnp.uint8(START), grid)
        grid = self._mark_exit(grid, square == end[0] * self.side + end[1])
        free = jnp.sum(grid == FREE, dtype=jnp.int32)
        return LabyrinthState(
            time=jnp.int32(0),
            grid=grid,
            explored=here,
            y=jnp.asarray(y, jnp.int32),
            x=jnp.asarray(x, jnp.int32),
            action=jnp.int32(NONE),
            free=free,
            left=free,
        )

    def _mark_exit(
        self, grid: UInt8[Array, " squares"], exit_square: Bool[Array, " squares"]
    ) -> UInt8[Array, " squares"]:
        del exit_square
        return grid

    def advance(
        self, state: LabyrinthState, action: Array, draw: None
    ) -> tuple[LabyrinthState, Float[Array, ""]]:
        del draw
        action = action.astype(jnp.int32)
        x = jnp.clip(state.x + (action == RIGHT) - (action == LEFT), 0, self.side - 1)
        y = jnp.clip(state.y + (action == DOWN) - (action == UP), 0, self.side - 1)
        square = y * self.side + x
        blocked = at(state.grid == OBSTACLE, square)
        y, x = jnp.where(blocked, state.y, y), jnp.where(blocked, state.x, x)
        new = ~blocked & ~at(state.explored, square)
        here = jnp.arange(self.side**2, dtype=jnp.int32) == square
        after = LabyrinthState(
            time=state.time,
            grid=state.grid,
            explored=state.explored | (new & here),
            y=y,
            x=x,
            action=action,
            free=state.free,
            left=state.left - new,
        )
        return after, self._reward(after, new)

    def _reward(self, state: LabyrinthState, new: Bool[Array, ""]) -> Float[Array, ""]:
        raise NotImplementedError

    def observation(self, state: LabyrinthState) -> Float[Array, "50"]:
        """Three by three squares and the last action.

        At the upper and left edges the view begins with the agent's row or column, as in the
        package; what is missing is filled with obstacles at the lower and right ends.
        """
        steps = jnp.arange(_VIEW, dtype=jnp.int32)
        rows = jnp.maximum(state.y - 1, 0) + steps
        columns = jnp.maximum(state.x - 1, 0) + steps
        inside = (rows < jnp.minimum(state.y + 2, self.side))[:, None] & (
            columns < jnp.minimum(state.x + 2, self.side)
        )
        squares = jnp.where(inside, rows[:, None] * self.side + columns, 0)
        view = jnp.where(inside, state.grid[squares], jnp.uint8(OBSTACLE))
        return jnp.concatenate([one_hots(view, _CELLS), one_hots(state.action, NONE + 1)])

    def hidden_state(self, state: LabyrinthState) -> Float[Array, " state_size"]:
        known = jnp.where(state.explored, state.grid, jnp.uint8(HIDDEN))
        return jnp.concatenate(
            [
                one_hots(known, _CELLS),
                one_hots(state.grid, _CELLS - 1),
                one_hots(state.y, self.side),
                one_hots(state.x, self.side),
            ]
        )

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(NONE)


class LabyrinthEscape(_Labyrinth):
    """LabyrinthEscape: obs (50,) float32; actions 0 left, 1 right, 2 up, 3 down.

    The observation is the nine squares around the agent (free, obstacle, entrance, exit, hidden;
    never the last) and the last action, 4 before the first. The agent begins at the entrance, in
    an outer wall; the exit is in the wall opposite. Every step costs 1 / max_steps; the exit
    gives 1 and terminates the episode. Truncated after max_steps - 1.

    The hidden state is the package's, the squares visited so far, and what it lacks: the
    whole maze, and the agent's row and column.

    **Arguments:**

    - `size`: cells along a side; the maze has 2 size + 1 squares along it.
    - `max_steps`: the longest episode has one step less, as in the package.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(
        self, size: int = 5, *, max_steps: int = 1024, observe_state: bool = False
    ) -> None:
        super().__init__(size, max_steps, observe_state)

    def _mark_exit(
        self, grid: UInt8[Array, " squares"], exit_square: Bool[Array, " squares"]
    ) -> UInt8[Array, " squares"]:
        return jnp.where(exit_square, jnp.uint8(GOAL), grid)

    def _reward(self, state: LabyrinthState, new: Bool[Array, ""]) -> Float[Array, ""]:
        del new
        return self._outside(state) - 1 / self.max_steps

    def _outside(self, state: LabyrinthState) -> Bool[Array, ""]:
        return at(state.grid == GOAL, state.y * self.side + state.x)

    def is_terminated(
        self, state: LabyrinthState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return self._outside(state)


class LabyrinthExplore(_Labyrinth):
    """LabyrinthExplore: obs (50,) float32; actions 0 left, 1 right, 2 up, 3 down.

    As `LabyrinthEscape`, but there is no exit. A square visited for the first time gives 1 / (free
    squares); any other step costs 1 / max_steps. Terminated when all were visited.

    **Arguments:**

    - `size`, `max_steps`, `observe_state`: as for `LabyrinthEscape`.
    """

    def __init__(
        self, size: int = 5, *, max_steps: int = 1024, observe_state: bool = False
    ) -> None:
        super().__init__(size, max_steps, observe_state)

    def _reward(self, state: LabyrinthState, new: Bool[Array, ""]) -> Float[Array, ""]:
        return jnp.where(new, 1 / state.free.astype(jnp.float32), -1 / self.max_steps)

    def is_terminated(
        self, state: LabyrinthState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return state.left == 0


def _entrances(
    side_key: PRNGKeyArray, place_key: PRNGKeyArray, size: int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Entrance and exit (y, x), in opposite outer walls, beside a cell each."""
    side = jax.random.randint(side_key, (), 0, 4)
    near, far = 2 * jax.random.randint(place_key, (2,), 0, size) + 1
    last = 2 * size
    wall = jnp.where(side % 2 == 0, 0, last)
    opposite = last - wall
    flat = side < 2  # entrance above or below
    start = jnp.where(flat, wall, near), jnp.where(flat, near, wall)
    end = jnp.where(flat, opposite, far), jnp.where(flat, far, opposite)
    return start, end


def hunt_and_kill(
    key: PRNGKeyArray, size: int, *, hunts: int | None = None
) -> UInt8[Array, " squares"]:
    """A maze of (2 size + 1)^2 squares, 0 free and 1 obstacle.

    `hunts` is how often a place to go on is looked for, None as often as there are squares. With
    few, cells stay outside the maze.

    A row of cells is a word of `size` bits, so that an iteration is a handful of operations on
    `size` words.
    """
    cells, limit = size**2, (2 * size + 1) ** 2 if hunts is None else hunts
    cell_key, draw_key = jax.random.split(key)
    draws = jax.random.uniform(draw_key, (cells - 1, 3))
    first = jax.random.randint(cell_key, (), 0, cells)
    row_number = jnp.arange(size, dtype=jnp.int32)
    one = jnp.uint32(1)
    full = jnp.uint32(2**size - 1)
    bit_number = jnp.arange(size, dtype=jnp.uint32)

    def word(row: Int[Array, ""], column: Int[Array, ""]) -> UInt32[Array, " size"]:
        """All cells but this one are 0. Nothing is set for a cell outside the maze."""
        bit = jnp.where(column >= 0, one << column.astype(jnp.uint32), jnp.uint32(0)) & full
        return jnp.where(row_number == row, bit, jnp.uint32(0))

    def place(words: UInt32[Array, " size"], rank: Int[Array, ""]) -> tuple[Array, Array]:
        """Row and column of the bit that `rank` bits precede."""
        ends = jnp.cumsum(jax.lax.population_count(words).astype(jnp.int32))
        row = jnp.sum(ends <= rank, dtype=jnp.int32)
        here = jnp.sum(jnp.where(row_number == row, words, jnp.uint32(0)))
        before = jnp.max(jnp.where(ends <= rank, ends, 0))
        bits = ((here >> bit_number) & one).astype(jnp.int32)
        column = jnp.sum(jnp.cumsum(bits) <= rank - before, dtype=jnp.int32)
        return row, column

    def around(words: UInt32[Array, " size"]) -> UInt32[Array, " size"]:
        """The neighbours of the cells."""
        nothing = jnp.zeros(1, jnp.uint32)
        above, below = jnp.append(words[1:], nothing), jnp.append(nothing, words[:-1])
        return ((words << one) | (words >> one) | above | below) & full

    def grow(carry: tuple[Array, ...], draw: Float[Array, "3"]) -> tuple[Any, None]:
        maze, right, down, row, column, drawn = carry
        stuck = jnp.all((around(word(row, column)) & ~maze) == 0)
        edge = around(~maze & full) & maze
        num_edge = jnp.sum(jax.lax.population_count(edge).astype(jnp.int32))
        # The number of draws until one of the cells at the edge is hit.
        miss = 1 - num_edge.astype(jnp.float32) / cells
        tries = 1 + jnp.floor(jnp.log1p(-draw[0]) / jnp.log(miss))
        drawn = jnp.where(stuck, drawn + tries, drawn)
        hunted = place(edge, jnp.floor(draw[1] * num_edge).astype(jnp.int32))
        row, column = jnp.where(stuck, hunted[0], row), jnp.where(stuck, hunted[1], column)
        fresh = around(word(row, column)) & ~maze
        num_fresh = jnp.sum(jax.lax.population_count(fresh).astype(jnp.int32))
        to_row, to_column = place(fresh, jnp.floor(draw[2] * num_fresh).astype(jnp.int32))
        go = (num_fresh > 0) & (drawn <= limit)
        wall = word(jnp.minimum(row, to_row), jnp.minimum(column, to_column))
        nothing = jnp.uint32(0)
        maze = maze | jnp.where(go, word(to_row, to_column), nothing)
        right = right | jnp.where(go & (to_row == row), wall, nothing)
        down = down | jnp.where(go & (to_column == column), wall, nothing)
        row, column = jnp.where(go, to_row, row), jnp.where(go, to_column, column)
        return (maze, right, down, row, column, drawn), None

    row, column = first // size, first % size
    empty = jnp.zeros(size, jnp.uint32)
    carry = (word(row, column), empty, empty, row, column, jnp.float32(0))
    (maze, right, down, *_), _ = jax.lax.scan(grow, carry, draws)
    side = 2 * size + 1
    # (size, size) bits of each kind at the odd and even rows and columns of the grid.
    maze, right, down = (
        ((words[:, None] >> bit_number) & one) == 1 for words in (maze, right, down)
    )
    upper = jnp.stack([maze, right], axis=-1).reshape(size, 2 * size)
    lower = jnp.stack([down, jnp.zeros_like(down)], axis=-1).reshape(size, 2 * size)
    inner = jnp.stack([upper, lower], axis=1).reshape(2 * size, 2 * size)
    free = jnp.zeros((side, side), bool).at[1:, 1:].set(inner)
    return jnp.where(free, jnp.uint8(FREE), jnp.uint8(OBSTACLE)).reshape(-1)
