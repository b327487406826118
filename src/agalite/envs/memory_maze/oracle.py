"""A policy for Memory Maze that walks the shortest way to the requested object.

`action` computes it from the `info` of an environment made with `extras=True`. Its return is that
of a perfect memory in the same episodes. The published oracle score, `SIZES[size].oracle`, is that
of an agent trained with the way drawn into its observation (`MemoryMaze(oracle=True)`).
"""

import math
from collections import deque
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

Cell = tuple[int, int]

_WAIT, _FORWARD, _LEFT, _RIGHT, _FORWARD_LEFT, _FORWARD_RIGHT = range(6)
_STRAIGHT = 0.18  # radians: less than half of what one step turns
_TURN_WHILE_MOVING = 1.3  # radians: beyond this, turn on the spot
_CLEARANCE = 0.22  # cells that must be free on both sides of a straight line


def action(info: dict[str, Any]) -> int:
    """The index in `ACTIONS` of the action towards the object."""
    ahead = _waypoint(info["maze_layout"], info["agent_pos"], info["target_pos"])
    east, north = ahead - info["agent_pos"]
    forward_east, forward_north = info["agent_dir"]
    turn = math.atan2(
        forward_east * north - forward_north * east, forward_east * east + forward_north * north
    )  # to the left
    if abs(turn) < _STRAIGHT:
        return _FORWARD
    if abs(turn) < _TURN_WHILE_MOVING:
        return _FORWARD_LEFT if turn > 0 else _FORWARD_RIGHT
    return _LEFT if turn > 0 else _RIGHT


def _waypoint(
    layout: UInt8[np.ndarray, "size size"],
    start: Float[np.ndarray, "2"],
    goal: Float[np.ndarray, "2"],
) -> Float[np.ndarray, "2"]:
    """The furthest point of the shortest way that a straight line can reach."""
    way = shortest_way(layout, _cell(start), _cell(goal))
    points = [goal, *(np.array(cell) + 0.5 for cell in reversed(way[1:-1]))]
    return next((point for point in points if _is_free(layout, start, point)), points[-1])


def shortest_way(layout: UInt8[np.ndarray, "size size"], start: Cell, goal: Cell) -> list[Cell]:
    """Cells (x, y) from `start` to `goal`, both included; layout[y, x] is 1 where one can walk."""
    came_from: dict[Cell, Cell] = {start: start}
    waiting = deque([start])
    while waiting and goal not in came_from:
        x, y = waiting.popleft()
        for there in ((x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)):
            if there not in came_from and _walkable(layout, there):
                came_from[there] = (x, y)
                waiting.append(there)
    if goal not in came_from:
        raise ValueError(f"there is no way from {start} to {goal} in this maze")
    way = [goal]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return way[::-1]


def _is_free(layout: Any, start: Float[np.ndarray, "2"], end: Float[np.ndarray, "2"]) -> bool:
    along = end - start
    length = math.hypot(*along)
    if length == 0.0:
        return True
    aside = np.array([-along[1], along[0]]) * (_CLEARANCE / length)
    points = start + np.linspace(0.0, 1.0, 2 + int(8 * length))[:, None] * along
    both = np.concatenate([points + aside, points - aside])
    # The agent may itself stand closer to a wall than this.
    both = both[np.hypot(*(both - start).T) > 2 * _CLEARANCE]
    return all(_walkable(layout, _cell(point)) for point in both)


def _walkable(layout: Any, cell: Cell) -> bool:
    x, y = cell
    return 0 <= y < layout.shape[0] and 0 <= x < layout.shape[1] and bool(layout[y, x])


def _cell(point: Float[np.ndarray, "2"]) -> Cell:
    return int(point[0]), int(point[1])
