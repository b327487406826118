"""The frames of Mystery Path, equal to Memory Gym's to the pixel: 84 x 84, 7 x 7 tiles.

Frames are indexed [x, y, channel], as Memory Gym's observations are. In drawing order: black, the
goal's tile in green, the origin's in blue, the agent as a disc with two hands, and a red cross if
it left the path.
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

# Sprites are stored with the lowest bit of every byte flipped. No colour contains a 1, so 0 is free
# to mean "transparent", while the zeros of the cross are opaque.
_FLIP = 1
_TRANSPARENT = 0


class Atlas(NamedTuple):
    """All sprites of the agent, as rows of which frames are slices.

    `rows` (2 * 8 * (height + 1), 3 * 2 * 83) has, without and with the cross, for each rotation
    in eighths of a turn, the `height` rows of constant x of a sprite and one transparent row. The
    agent's centre is in the middle of a row, which is wide enough to be sliced for any position
    on the screen. `top` is the first row's distance from the centre.
    """

    rows: UInt8[np.ndarray, "rows width"]
    height: int
    top: int


def radius_of(agent_scale: float) -> int:
    """The agent's radius in pixels."""
    return int(25 * agent_scale)


def atlas(agent_scale: float) -> Atlas:
    reach = SCREEN - 1
    sprites = np.full((2, ROTATIONS, 2 * reach, 2 * reach, 3), _TRANSPARENT, np.uint8)
    for turn in range(ROTATIONS):
        sprites[:, turn] = _agent(agent_scale, turn, reach)
    cross = np.array([[mark == "R" for mark in line] for line in _CROSS.split()])
    around = slice(reach - len(cross) // 2, reach + len(cross) // 2)
    sprites[1, :, around, around][:, cross] = _stored(_RED)

    used = np.flatnonzero((sprites != _TRANSPARENT).any(axis=(0, 1, 3, 4)))
    top, height = int(used[0]), int(used[-1] - used[0] + 1)
    rows = np.pad(sprites[:, :, top : top + height], [(0, 0), (0, 0), (0, 1), (0, 0), (0, 0)])
    return Atlas(rows.reshape(2 * ROTATIONS * (height + 1), -1), height, top - reach)


def draw(
    sprites: Atlas,
    centre: Int[Array, " 2"],
    rotation: Int[Array, ""],
    crossed: Bool[Array, ""],
    origin: tuple[Int[Array, " 2"], Bool[Array, ""]],
    goal: tuple[Int[Array, " 2"], Bool[Array, ""]],
) -> UInt8[Array, "84 84 3"]:
    """Draw one frame.

    **Arguments:**

    - `sprites`: of the agent.
    - `centre`: of the agent, (2,), in pixels.
    - `rotation`: of the agent, in eighths of a turn.
    - `crossed`: whether the agent has the cross.
    - `origin`, `goal`: a tile (2,), and whether it is shown.

    The axes y and channel are one axis of 252 bytes. Every x is one slice of a row of the atlas,
    laid over the tiles. XLA makes a single loop of that, which writes each byte once; pasting a
    sprite with `dynamic_update_slice` takes several times as long under `vmap`.
    """
    x = jnp.arange(SCREEN, dtype=jnp.int32)
    row = x - centre[0] - sprites.top
    row = jnp.where((row >= 0) & (row < sprites.height), row, sprites.height)
    row += (crossed.astype(jnp.int32) * ROTATIONS + rotation) * (sprites.height + 1)
    offset = 3 * (SCREEN - 1 - centre[1])
    rows = jnp.asarray(sprites.rows)
    agent = jax.vmap(lambda r: jax.lax.dynamic_slice(rows, (r, offset), (1, 3 * SCREEN))[0])(row)
    below = _tile(*goal, _GOAL) | _tile(*origin, _ORIGIN)
    frame = jnp.where(agent == _TRANSPARENT, below, agent ^ jnp.uint8(_FLIP))
    return frame.reshape(SCREEN, SCREEN, 3)


def _tile(
    tile: Int[Array, " 2"], shown: Bool[Array, ""], colour: tuple[int, int, int]
) -> UInt8[Array, "84 252"]:
    """A black frame with one tile, if it is `shown`."""
    pixel = np.arange(SCREEN, dtype=np.int32) // TILE
    lines = np.zeros((GRID, SCREEN, 3), np.uint8)
    lines[pixel, np.arange(SCREEN)] = colour
    line = jnp.asarray(lines.reshape(GRID, 3 * SCREEN))[tile[1]]
    here = (jnp.asarray(pixel) == tile[0]) & shown
    return jnp.where(here, jnp.uint8(255), jnp.uint8(0))[:, None] & line[None, :]


def resize(frame: UInt8[Array, "84 84 3"], size: int) -> UInt8[Array, "{size} {size} 3"]:
    """Resize by averaging over the area that each new pixel covers.

    Computed in integers, so exact; halves are rounded up. In units of 1/size pixel, new pixel i
    covers [84 i, 84 (i + 1)) and old pixel k covers [size k, size (k + 1)), and the overlaps sum
    to 84 along each axis. Only the few old pixels that overlap are added, which is five times as
    fast as a product with the matrix of all overlaps.
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
    """The agent in one rotation, with its centre at (reach, reach)."""
    image = np.full((2 * reach, 2 * reach, 3), _TRANSPARENT, np.uint8)
    radius, hand = radius_of(scale), int(10 * scale)
    _disc(image, (reach, reach), radius, _BODY)
    # The original rotates the hands about the centre of a square image of this side, and truncates
    # their positions to pixels there. So opposite diagonals are not mirror images.
    side = 2 * radius + hand + 14
    across, ahead = int(18 * scale), int(12 * scale) + 7 - side // 2
    cos, sin = _unit(ROTATIONS - turn)
    hands = [
        tuple(
            int(value + side // 2) - side // 2 + reach
            for value in (cos * x - sin * ahead, sin * x + cos * ahead)
        )
        for x in (-across, across)
    ]
    outline = int(3 * scale)
    for position in hands:
        _disc(image, position, hand, _HAND if outline else _OUTLINE)
    for position in hands:
        _disc(image, position, hand, _OUTLINE, hollow=bool(outline))
    return image


def _unit(eighths: int) -> tuple[float, float]:
    """Cosine and sine of eighths of a turn, exact for quarter turns."""
    if eighths % 2 == 0:
        return [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)][eighths // 2 % 4]
    return math.cos(eighths * math.pi / 4), math.sin(eighths * math.pi / 4)


def _disc(
    image: UInt8[np.ndarray, "x y 3"],
    centre: tuple[int, ...],
    radius: int,
    colour: tuple[int, int, int],
    *,
    hollow: bool = False,
) -> None:
    """A disc as the midpoint algorithm draws it, 2 * radius wide, centred between pixels.

    Counted from 1 at the centre, the pixel (i, j) with i <= j is inside if
    i^2 + (j - 1/2)^2 < radius^2 + 1/4. The smallest disc is the four pixels around its centre.
    """
    away = np.arange(1, radius + 1)
    near, far = np.minimum.outer(away, away), np.maximum.outer(away, away)
    inside = near**2 + far * (far - 1) < max(radius**2, 2)
    if hollow:
        inside &= near**2 + far * (far + 1) >= radius**2
    whole = np.concatenate([inside[::-1], inside])
    whole = np.concatenate([whole[:, ::-1], whole], axis=1)
    x, y = centre
    image[x - radius : x + radius, y - radius : y + radius][whole] = _stored(colour)


def _stored(colour: tuple[int, int, int]) -> UInt8[np.ndarray, "3"]:
    return np.array(colour, np.uint8) ^ np.uint8(_FLIP)
