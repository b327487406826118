"""How Mystery Path's paths come about: walls, then a search that is meant to wander.

Cells are numbered 7 x + y. A path is what the search leaves behind: the walls are forgotten.
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
# Every place in the open list is below _LATER, and stays below _UNSEEN when that is added.
_LATER, _UNSEEN, _CLOSED = np.int32(1 << 14), np.int32(1 << 20), np.int32(1 << 21)


class Path(NamedTuple):
    start: Int[Array, " 2"]
    end: Int[Array, " 2"]
    on_path: Bool[Array, "7 7"]


class Chance(NamedTuple):
    """Everything random in a path, drawn beforehand.

    `side`, 0 to 3, and `along`, 0 to 6, place the two ends. `interior` marks the cells that
    become walls if they are interior ones. `number` border cells, 4 or 8, become walls, those
    with the lowest `turn` first; no two turns are equal. `costs`, 1 to 8, is the price of
    leaving a cell by each side: a cell is left at most once, so one draw for each is enough.
    """

    side: Int[Array, ""]
    along: Int[Array, " 2"]
    interior: Bool[Array, " 49"]
    number: Int[Array, ""]
    turn: UInt[Array, " 49"]
    costs: Int[Array, "49 4"]


def chance(key: Array, cardinal_origin_choice: Int[Array, " n"]) -> Chance:
    keys = jax.random.split(key, 6)
    # The cell's number in the last digits keeps any two turns apart.
    cell = jnp.arange(_CELLS, dtype=jnp.uint32)
    digits = jax.random.bits(keys[5], (_CELLS, 1), jnp.uint32) >> jnp.uint32([[0, 3, 6, 9]])
    return Chance(
        side=jax.random.choice(keys[0], cardinal_origin_choice),
        along=jax.random.randint(keys[1], (2,), 0, GRID, jnp.int32),
        interior=jax.random.bernoulli(keys[2], 0.33, (_CELLS,)),
        number=jnp.where(jax.random.bernoulli(keys[3]), jnp.int32(4), jnp.int32(8)),
        turn=jax.random.bits(keys[4], (_CELLS,), jnp.uint32) // 64 * 64 + cell,
        costs=1 + (digits % 8).astype(jnp.int32),
    )


def path(draw: Chance) -> Path:
    """A path from one side of the grid to the opposite one."""
    start, end = ends(draw.side, draw.along)
    begin, goal = GRID * start[0] + start[1], GRID * end[0] + end[1]
    wall = walls(begin, goal, draw.interior, draw.number, draw.turn)
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
    turn: UInt[Array, " 49"],
) -> Bool[Array, " 49"]:
    """Interior walls, and `number` on the border, or as many as qualify.

    A border wall touches no interior wall, not even at a corner, nor does it stand beside
    either end: so walls cannot close off the end, and the search always arrives.
    """
    interior &= jnp.asarray(_INTERIOR)
    cell, beside = jnp.arange(_CELLS), jnp.asarray(_BESIDE)
    near_ends = (cell == begin) | (cell == goal) | beside[begin] | beside[goal]
    near_wall = jnp.any(jnp.asarray(_AROUND) & interior[None, :], axis=1)
    allowed = jnp.asarray(_BORDER) & ~near_ends & ~near_wall
    # Picking one after another without putting back is taking the first of a shuffle.
    earlier = jnp.sum((turn[None, :] < turn[:, None]) & allowed[None, :], axis=1)
    return interior | (allowed & (earlier < number))


class _Search(NamedTuple):
    """`place` is where a cell stands in the open list, or one of _UNSEEN and _CLOSED.

    The list is in the order of opening. A place is 64 times a rank plus the cell, so that the
    smallest place names its cell too.
    """

    current: Int[Array, ""]
    expanded: Int[Array, ""]
    place: Int[Array, " 49"]
    cost: Float[Array, " 49"]
    parent: Int[Array, " 49"]


def search(
    begin: Int[Array, ""],
    goal: Int[Array, ""],
    wall: Bool[Array, " 49"],
    costs: Int[Array, "49 4"],
) -> Bool[Array, " 49"]:
    """The cells of a path from `begin` to `goal`.

    A* with two oddities of the original that shape its paths: the cell taken next is the first
    in the list that beats the head of the list, not the best; and a cheaper way to an open cell
    changes where it is reached from, but not its cost.
    """
    cell = jnp.arange(_CELLS, dtype=jnp.int32)
    remaining = jnp.asarray(_DISTANCE)[goal]

    def expand(s: _Search) -> _Search:
        side = jnp.asarray(_SIDE)[s.current]
        price = costs[s.current].astype(jnp.float32)
        reached = s.cost[s.current] + jnp.select(
            [side == k for k in range(3)], list(price[:3]), price[3]
        )
        place = jnp.where(cell == s.current, _CLOSED, s.place)
        new = (side < 4) & (place == _UNSEEN)
        cheaper = (side < 4) & (place < _UNSEEN) & (reached < s.cost)
        parent = jnp.where(new | cheaper, s.current, s.parent)
        cost = jnp.where(new, reached, s.cost)
        place = jnp.where(new, 64 * (4 * s.expanded + side) + cell, place)
        estimate = cost + remaining
        head = jnp.min(place) % 64
        beaten = jnp.where(estimate < estimate[head], place, place + _LATER)
        return _Search(jnp.min(beaten) % 64, s.expanded + 1, place, cost, parent)

    found = jax.lax.while_loop(
        lambda s: (s.current != goal) & (s.expanded < _CELLS),
        expand,
        _Search(
            current=begin,
            expanded=jnp.int32(0),
            place=jnp.where(wall, _CLOSED, _UNSEEN),
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
