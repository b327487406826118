"""Filled shapes on RGB frames (height, width, 3) uint8, as pure functions that JAX can trace.

Coordinates are pixels, x to the right and y downwards, and may be traced. The pixel in row i and
column j is painted if its centre (j + 0.5, i + 0.5) lies in the shape; shapes are clipped to the
frame.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

Frame = UInt8[Array, "height width 3"]
Number = float | Float[Array, ""]
Colour = tuple[int, int, int] | UInt8[Array, "3"]


def blank(height: int, width: int, colour: Colour) -> Frame:
    """A frame of one colour."""
    return jnp.broadcast_to(_pixel(colour), (height, width, 3))


def rectangle(
    frame: Frame, left: Number, top: Number, right: Number, bottom: Number, colour: Colour
) -> Frame:
    """A filled rectangle; `right` and `bottom` are outside it."""
    ys, xs = _centres(frame)
    inside = (xs >= left) & (xs < right) & (ys >= top) & (ys < bottom)
    return _paint(frame, inside, colour)


def line(
    frame: Frame, x0: Number, y0: Number, x1: Number, y1: Number, width: Number, colour: Colour
) -> Frame:
    """A line from (x0, y0) to (x1, y1) with round ends; the two points may coincide."""
    ys, xs = _centres(frame)
    dx, dy = jnp.asarray(x1 - x0, jnp.float32), jnp.asarray(y1 - y0, jnp.float32)
    # The position of the nearest point along the line, 0 to 1. Not 0 / 0 for a single point.
    length_squared = jnp.maximum(dx * dx + dy * dy, jnp.finfo(jnp.float32).tiny)
    along = jnp.clip(((xs - x0) * dx + (ys - y0) * dy) / length_squared, 0.0, 1.0)
    distance_squared = (xs - (x0 + along * dx)) ** 2 + (ys - (y0 + along * dy)) ** 2
    return _paint(frame, distance_squared <= (width / 2) ** 2, colour)


def circle(frame: Frame, x: Number, y: Number, radius: Number, colour: Colour) -> Frame:
    """A filled circle around (x, y)."""
    ys, xs = _centres(frame)
    return _paint(frame, (xs - x) ** 2 + (ys - y) ** 2 <= radius**2, colour)


def _centres(frame: Frame) -> tuple[Float[Array, "height 1"], Float[Array, "1 width"]]:
    height, width, _ = frame.shape
    ys = jnp.arange(height, dtype=jnp.float32)[:, None] + 0.5
    xs = jnp.arange(width, dtype=jnp.float32)[None, :] + 0.5
    return ys, xs


def _pixel(colour: Colour) -> UInt8[Array, "1 1 3"]:
    return jnp.asarray(colour, jnp.uint8).reshape(1, 1, 3)


def _paint(frame: Frame, where: Bool[Array, "height width"], colour: Colour) -> Frame:
    return jnp.where(where[:, :, None], _pixel(colour), frame)
