"""What Mystery Path looks like, to the pixel: 84 x 84 frames of 7 x 7 tiles.

Frames are indexed [x, y, channel], as Memory Gym's observations are. A frame is black; on it
the goal's tile in green and the origin's in blue; on that the agent, a disc with two hands;
on that a red cross where the agent left the path.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8

SCREEN = 84
GRID = 7
TILE = SCREEN // GRID
ROTATIONS = 8

_BODY = (250, 204, 153)
_HAND = (250, 250, 250)
_OUTLINE = (50, 50, 50)
_GOAL = (0, 255, 0)
_ORIGIN = (0, 0, 255)
_RED = (255, 0, 0)
_CROSS = """
RR......RR
RRR....RRR
.RRR..RRR.
..RRRRRR..
...RRRR...
...RRRR...
..RRRRRR..
.RRR..RRR.
RRR....RRR
RR......RR
"""

# Sprites are kept with the lowest bit of every byte flipped, since the cross has zeros that must
# show: no colour has a 1 in it, which leaves 0 to mean "nothing here".
_FLIP = 1
_CLEAR = 0


class Atlas(NamedTuple):
    """Every look of the agent, as rows that a frame is cut from.

    `rows` (2 * 8 * (height + 1), 3 * 2 * 83): without and with the cross, for each rotation
    in eighths of a turn, a sprite's `height` rows of constant x, then one clear row. A row has
    the agent's centre in its middle and is wide enough to be cut at any place on the screen.
    `top` is the first row's distance from the centre.
    """

    rows: UInt8[np.ndarray, "looks width"]
    height: int
    top: int


def radius_of(agent_scale: float) -> int:
    """The agent's radius in pixels."""
    return int(25 * agent_scale)


def atlas(agent_scale: float) -> Atlas:
    reach = SCREEN - 1
    looks = np.full((2, ROTATIONS, 2 * reach, 2 * reach, 3), _CLEAR, np.uint8)
    for turn in range(ROTATIONS):
        looks[:, turn] = _agent(agent_scale, turn, reach)
    cross = np.array([[mark == "R" for mark in line] for line in _CROSS.split()])
    around = slice(reach - len(cross) // 2, reach + len(cross) // 2)
    looks[1, :, around, around][:, cross] = _stored(_RED)

    used = np.flatnonzero((looks != _CLEAR).any(axis=(0, 1, 3, 4)))
    top, height = int(used[0]), int(used[-1] - used[0] + 1)
    rows = np.pad(looks[:, :, top : top + height], [(0, 0), (0, 0), (0, 1), (0, 0), (0, 0)])
    return Atlas(rows.reshape(2 * ROTATIONS * (height + 1), -1), height, top - reach)


def draw(
    looks: Atlas,
    centre: Int[Array, " 2"],
    rotation: Int[Array, ""],
    crossed: Bool[Array, ""],
    origin: tuple[Int[Array, " 2"], Bool[Array, ""]],
    goal: tuple[Int[Array, " 2"], Bool[Array, ""]],
) -> UInt8[Array, "84 84 3"]:
    """One frame. `rotation` is in eighths of a turn; origin and goal: a tile, and if it shows.

    The y and channel axes are drawn as one of 252 bytes, and every value of x is one cut from
    a row of the atlas laid over the tiles. XLA makes one loop of that, which writes each byte
    once; a sprite pasted with `dynamic_update_slice` takes several times as long under `vmap`.
    """
    x = jnp.arange(SCREEN, dtype=jnp.int32)
    row = x - centre[0] - looks.top
    row = jnp.where((row >= 0) & (row < looks.height), row, looks.height)
    row += (crossed.astype(jnp.int32) * ROTATIONS + rotation) * (looks.height + 1)
    cut = 3 * (SCREEN - 1 - centre[1])
    rows = jnp.asarray(looks.rows)
    agent = jax.vmap(lambda r: jax.lax.dynamic_slice(rows, (r, cut), (1, 3 * SCREEN))[0])(row)
    below = _tile(*goal, _GOAL) | _tile(*origin, _ORIGIN)
    frame = jnp.where(agent == _CLEAR, below, agent ^ jnp.uint8(_FLIP))
    return frame.reshape(SCREEN, SCREEN, 3)


def _tile(
    tile: Int[Array, " 2"], shown: Bool[Array, ""], colour: tuple[int, int, int]
) -> UInt8[Array, "84 252"]:
    """A frame that is black but for one tile."""
    pixel = np.arange(SCREEN, dtype=np.int32) // TILE
    lines = np.zeros((GRID, SCREEN, 3), np.uint8)
    lines[pixel, np.arange(SCREEN)] = colour
    line = jnp.asarray(lines.reshape(GRID, 3 * SCREEN))[tile[1]]
    here = (jnp.asarray(pixel) == tile[0]) & shown
    return jnp.where(here, jnp.uint8(255), jnp.uint8(0))[:, None] & line[None, :]


def resized(frame: UInt8[Array, "84 84 3"], size: int) -> UInt8[Array, "{size} {size} 3"]:
    """The mean over the area each new pixel covers, rounded half up; in whole numbers, so exact.

    In units of 1/size pixel, new pixel i covers [84 i, 84 (i + 1)) and old pixel k covers
    [size k, size (k + 1)); the overlaps sum to 84 along each axis. Only the few old pixels
    that overlap are added up: five times as fast as products with the matrix of all overlaps.
    """
    if size == SCREEN:
        return frame
    new, old = SCREEN * np.arange(size)[:, None], size * np.arange(SCREEN)[None, :]
    overlap = np.maximum(np.minimum(new + SCREEN, old + size) - np.maximum(new, old), 0)
    taps = int((overlap > 0).sum(axis=1).max())
    first = np.minimum((overlap > 0).argmax(axis=1), SCREEN - taps)

    columns = jnp.zeros((size, 3 * SCREEN), jnp.uint16)  # at most 84 * 255
    total = jnp.zeros((size, size, 3), jnp.int32)
    for at in (first + tap for tap in range(taps)):
        weight = jnp.asarray(overlap[np.arange(size), at], jnp.uint16)
        columns += weight[:, None] * frame.reshape(SCREEN, 3 * SCREEN)[at].astype(jnp.uint16)
    for at in (first + tap for tap in range(taps)):
        weight = jnp.asarray(overlap[np.arange(size), at], jnp.int32)
        total += weight[None, :, None] * columns.reshape(size, SCREEN, 3)[:, at].astype(jnp.int32)
    return ((total + SCREEN**2 // 2) // SCREEN**2).astype(jnp.uint8)


def _agent(scale: float, turn: int, reach: int) -> UInt8[np.ndarray, "x y 3"]:
    """One rotation of the agent with its centre at (reach, reach)."""
    picture = np.full((2 * reach, 2 * reach, 3), _CLEAR, np.uint8)
    radius, hand = radius_of(scale), int(10 * scale)
    _disc(picture, (reach, reach), radius, _BODY)
    # The original turns the hands about the centre of a square picture of this side, and cuts
    # their places to whole pixels there: opposite diagonals are not mirror images.
    side = 2 * radius + hand + 14
    across, ahead = int(18 * scale), int(12 * scale) + 7 - side // 2
    cos, sin = _unit(ROTATIONS - turn)
    places = [
        tuple(
            int(value + side // 2) - side // 2 + reach
            for value in (cos * x - sin * ahead, sin * x + cos * ahead)
        )
        for x in (-across, across)
    ]
    outline = int(3 * scale)
    for place in places:
        _disc(picture, place, hand, _HAND if outline else _OUTLINE)
    for place in places:
        _disc(picture, place, hand, _OUTLINE, hollow=bool(outline))
    return picture


def _unit(eighths: int) -> tuple[float, float]:
    """Cosine and sine; quarter turns are exact."""
    if eighths % 2 == 0:
        return [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)][eighths // 2 % 4]
    return math.cos(eighths * math.pi / 4), math.sin(eighths * math.pi / 4)


def _disc(
    picture: UInt8[np.ndarray, "x y 3"],
    centre: tuple[int, ...],
    radius: int,
    colour: tuple[int, int, int],
    *,
    hollow: bool = False,
) -> None:
    """A disc as the midpoint algorithm draws it, 2 * radius wide, centred between pixels.

    Counting pixels from the centre outwards from 1, the one at (i, j) with i <= j belongs to it
    when its far side in i and its middle in j are inside: i^2 + (j - 1/2)^2 < radius^2 + 1/4.
    The smallest disc is the four pixels around its centre.
    """
    away = np.arange(1, radius + 1)
    near, far = np.minimum.outer(away, away), np.maximum.outer(away, away)
    inside = near**2 + far * (far - 1) < max(radius**2, 2)
    if hollow:
        inside &= near**2 + far * (far + 1) >= radius**2
    whole = np.concatenate([inside[::-1], inside])
    whole = np.concatenate([whole[:, ::-1], whole], axis=1)
    x, y = centre
    picture[x - radius : x + radius, y - radius : y + radius][whole] = _stored(colour)


def _stored(colour: tuple[int, int, int]) -> UInt8[np.ndarray, "3"]:
    return np.array(colour, np.uint8) ^ np.uint8(_FLIP)
