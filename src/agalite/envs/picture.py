"""Frames into a file that people can look at."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from agalite import files

SMALLEST = 320  # what the longer side of a small frame is enlarged to, about
FORMATS = (".gif", ".png")


def check_path(out: Path) -> None:
    """Before any work is done: can a picture be written there?"""
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"out={str(out)!r} must end in {' or '.join(FORMATS)}")
    files.check_writable("out", out)


def write(frames: Sequence[UInt8[np.ndarray, "height width 3"]], out: Path, *, fps: float) -> None:
    """An animation (.gif), or for .png the first to last frames as a strip of at most eight."""
    from PIL import Image

    check_path(out)
    if len(frames) == 0:
        raise ValueError("there are no frames to write")
    large = [_enlarge(frame) for frame in frames]
    drawn = io.BytesIO()
    if out.suffix.lower() == ".png":
        Image.fromarray(_strip(large)).save(drawn, format="PNG")
    else:
        first, *rest = (Image.fromarray(frame) for frame in large)
        # The last frame stays for a second, so that one sees how it ended.
        times = [round(1000 / fps)] * len(rest) + [1000]
        first.save(drawn, format="GIF", save_all=True, append_images=rest, duration=times, loop=0)
    files.write(out, drawn.getvalue())


def _enlarge(frame: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "height width 3"]:
    """Whole multiples, so that pixels stay square and sharp."""
    factor = max(1, round(SMALLEST / max(frame.shape[:2])))
    return np.ascontiguousarray(frame.repeat(factor, axis=0).repeat(factor, axis=1))


def _strip(frames: Sequence[np.ndarray]) -> np.ndarray:
    chosen: Iterable[int] = np.unique(np.linspace(0, len(frames) - 1, 8).round().astype(int))
    return np.concatenate([frames[i] for i in chosen], axis=1)
