"""The random paths of Mystery Path: random walls, then a noisy A* search around them.

Cells are numbered 7 x + y. Only the path is kept; the walls are not part of the task.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from agalite.envs.mystery_path.pixels import GRID

_CELLS = GRID * GRID
_X, _Y = np.divmod(np.arange(_CELLS, dtype=np.int32), GRID)
_BORDER = (_X % (GRID - 1) == 0) | (_Y % (GRID - 1) == 0)
# The original stops one short of the far border: x and y of 5 never hold a wall.
_INTERIOR = (_X >= 1) & (_X <= GRID - 3) & (_Y >= 1) & (_Y <= GRID - 3)
_APART_X, _APART_Y = np.abs(_X[:, None] - _X), np.abs(_Y[:, None] - _Y)
_BESIDE = _APART_X + _APART_Y == 1
_AROUND = np.maximum(_APART_X, _APART_Y) == 1
_DISTANCE = np.sqrt(_APART_X**2 + _APART_Y**2).astype(np.float32)
# _SIDE[a, b] is the side of a on which b lies, in the order of the search: x + 1, x - 1, y + 1,
# y - 1; 4 for cells that do not touch.
_SIDE = np.full((_CELLS, _CELLS), 4, np.int32)
for _side, (_dx, _dy) in enumerate(((1, 0), (-1, 0), (0, 1), (0, -1))):
    _SIDE[(_X[:, None] + _dx == _X) & (_Y[:, None] + _dy == _Y)] = _side
# Every order in the open list is below _LATER, and stays below _UNSEEN when that is added.
_LATER, _UNSEEN, _CLOSED = np.int32(1 << 14), np.int32(1 << 20), np.int32(1 << 21)


class Path(NamedTuple):
    start: Int[Array, " 2"]
    end: Int[Array, " 2"]
    on_path: Bool[Array, "7 7"]


class Draws(NamedTuple):
    """The random numbers of a path."""

    side: Int[Array, ""]  # of the start, 0 to 3
    along: Int[Array, " 2"]  # where on their sides start and end are, 0 to 6
    interior: Bool[Array, " 49"]  # the cells that become walls, if they are interior ones
    number: Int[Array, ""]  # of border cells that become walls, 4 or 8
    shuffle: UInt[Array, " 49"]  # the order in which they do; no two are equal
    # The cost of leaving a cell by each side, 1 to 8. A cell is left at most once.
    costs: Int[Array, "49 4"]


def draws(key: Array, cardinal_origin_choice: Int[Array, " n"]) -> Draws:
    keys = jax.random.split(key, 6)
    # The cell's number in the low digits makes all of `shuffle` different.
    cell = jnp.arange(_CELLS, dtype=jnp.uint32)
    digits = jax.random.bits(keys[5], (_CELLS, 1), jnp.uint32) >> jnp.uint32([[0, 3, 6, 9]])
    return Draws(
        side=jax.random.choice(keys[0], cardinal_origin_choice),
        along=jax.random.randint(keys[1], (2,), 0, GRID, jnp.int32),
        interior=jax.random.bernoulli(keys[2], 0.33, (_CELLS,)),
        number=jnp.where(jax.random.bernoulli(keys[3]), jnp.int32(4), jnp.int32(8)),
        shuffle=jax.random.bits(keys[4], (_CELLS,), jnp.uint32) // 64 * 64 + cell,
        costs=1 + (digits % 8).astype(jnp.int32),
    )


def path(draw: Draws) -> Path:
    """A path from one side of the grid to the opposite one."""
    start, end = ends(draw.side, draw.along)
    begin, goal = GRID * start[0] + start[1], GRID * end[0] + end[1]
    wall = walls(begin, goal, draw.interior, draw.number, draw.shuffle)
    return Path(start, end, search(begin, goal, wall, draw.costs).reshape(GRID, GRID))


def ends(
    side: Int[Array, ""], along: Int[Array, " 2"]
) -> tuple[Int[Array, " 2"], Int[Array, " 2"]]:
    """The first and the last tile. Sides 0, 1, 2, 3 are x = 0, x = 6, y = 0, y = 6."""
    first = jnp.where(side % 2 == 0, jnp.int32(0), jnp.int32(GRID - 1))
    across = jnp.stack([first, GRID - 1 - first])
    x, y = jnp.where(side < 2, across, along), jnp.where(side < 2, along, across)
    return jnp.stack([x[0], y[0]]), jnp.stack([x[1], y[1]])


def walls(
    begin: Int[Array, ""],
    goal: Int[Array, ""],
    interior: Bool[Array, " 49"],
    number: Int[Array, ""],
    shuffle: UInt[Array, " 49"],
) -> Bool[Array, " 49"]:
    """Interior walls, and `number` on the border or as many as are allowed.

    A border wall touches no interior wall, not even at a corner, and is not beside the start or
    the end. So walls cannot enclose the end, and the search always reaches it.
    """
    interior &= jnp.asarray(_INTERIOR)
    cell, beside = jnp.arange(_CELLS), jnp.asarray(_BESIDE)
    near_ends = (cell == begin) | (cell == goal) | beside[begin] | beside[goal]
    near_wall = jnp.any(jnp.asarray(_AROUND) & interior[None, :], axis=1)
    allowed = jnp.asarray(_BORDER) & ~near_ends & ~near_wall
    # Sampling without replacement is taking the first cells of a shuffle.
    earlier = jnp.sum((shuffle[None, :] < shuffle[:, None]) & allowed[None, :], axis=1)
    return interior | (allowed & (earlier < number))


class _Search(NamedTuple):
    """The state of the search.

    `order` is a cell's position in the open list, which is sorted by time of opening, or one of
    _UNSEEN and _CLOSED. It is 64 times a rank plus the cell's number, so that the smallest order
    gives its cell too.
    """

    current: Int[Array, ""]
    expanded: Int[Array, ""]
    order: Int[Array, " 49"]
    cost: Float[Array, " 49"]
    parent: Int[Array, " 49"]


def search(
    begin: Int[Array, ""],
    goal: Int[Array, ""],
    wall: Bool[Array, " 49"],
    costs: Int[Array, "49 4"],
) -> Bool[Array, " 49"]:
    """The cells of a path from `begin` to `goal`.

    A* with two peculiarities of the original that shape its paths: the cell expanded next is the
    first in the open list that is better than the head of the list, not the best one; and a
    cheaper way to an open cell changes its parent but not its cost.
    """
    cell = jnp.arange(_CELLS, dtype=jnp.int32)
    remaining = jnp.asarray(_DISTANCE)[goal]

    def expand(s: _Search) -> _Search:
        side = jnp.asarray(_SIDE)[s.current]
        price = costs[s.current].astype(jnp.float32)
        reached = s.cost[s.current] + jnp.select(
            [side == k for k in range(3)], list(price[:3]), price[3]
        )
        order = jnp.where(cell == s.current, _CLOSED, s.order)
        new = (side < 4) & (order == _UNSEEN)
        cheaper = (side < 4) & (order < _UNSEEN) & (reached < s.cost)
        parent = jnp.where(new | cheaper, s.current, s.parent)
        cost = jnp.where(new, reached, s.cost)
        order = jnp.where(new, 64 * (4 * s.expanded + side) + cell, order)
        estimate = cost + remaining
        head = jnp.min(order) % 64
        beaten = jnp.where(estimate < estimate[head], order, order + _LATER)
        return _Search(jnp.min(beaten) % 64, s.expanded + 1, order, cost, parent)

    found = jax.lax.while_loop(
        lambda s: (s.current != goal) & (s.expanded < _CELLS),
        expand,
        _Search(
            current=begin,
            expanded=jnp.int32(0),
            order=jnp.where(wall, _CLOSED, _UNSEEN),
            cost=jnp.zeros(_CELLS, jnp.float32),
            parent=cell,
        ),
    )

    def back(carry: tuple[Int[Array, ""], Bool[Array, " 49"]]) -> tuple[Array, Array]:
        here, on_path = carry
        return found.parent[here], on_path | (cell == here)

    # Only the first cell is its own parent.
    first, on_path = jax.lax.while_loop(
        lambda carry: found.parent[carry[0]] != carry[0], back, (goal, cell < 0)
    )
    return on_path | (cell == first)
