"""Frames into a file that people can look at."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from agalite import files
from agalite.envs import video

SMALLEST = 320  # what the longer side of a small frame is enlarged to, about
FORMATS = (".mp4", ".gif", ".png")
_HOLD = 1.0  # seconds that the last frame stays, so that one sees how it ended

Frame = UInt8[np.ndarray, "height width 3"]


def check_path(out: Path, name: str = "out") -> None:
    """Before any work is done: can a picture be written there? `name` is what the caller has."""
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{name}={str(out)!r} must end in {', '.join(FORMATS[:-1])} or .png")
    if out.suffix.lower() == ".mp4":
        video.require()
    files.check_writable(name, out)


def write(frames: Sequence[Frame], out: Path, *, fps: float) -> None:
    """A film (.mp4 or .gif), or for .png the first to last frames as a strip of at most eight."""
    check_path(out)
    _check_frames(frames)
    # Whole multiples, so that pixels stay square and sharp.
    scale = max(1, round(SMALLEST / max(frames[0].shape[:2])))
    match out.suffix.lower():
        case ".mp4":
            data = video.encode(frames, fps=fps, scale=scale, hold=_HOLD)
        case ".gif":
            data = _gif(frames, fps, scale)
        case _:
            data = _strip(frames, scale)
    files.write(out, data)


def _check_frames(frames: Sequence[Frame]) -> None:
    if len(frames) == 0:
        raise ValueError("there are no frames to write")
    first = frames[0].shape
    for i, frame in enumerate(frames):
        if (
            frame.shape != first
            or frame.ndim != 3
            or frame.shape[2] != 3
            or frame.dtype != np.uint8
        ):
            raise ValueError(
                f"frames[{i}] is {frame.shape} {frame.dtype}; "
                f"expected (height, width, 3) uint8, all of one size (frames[0] is {first})"
            )


def _gif(frames: Sequence[Frame], fps: float, scale: int) -> bytes:
    from PIL import Image

    first, *rest = (Image.fromarray(_enlarged(frame, scale)) for frame in frames)
    times = [round(1000 / fps)] * len(rest) + [round(1000 * _HOLD)]
    drawn = io.BytesIO()
    first.save(drawn, format="GIF", save_all=True, append_images=rest, duration=times, loop=0)
    return drawn.getvalue()


def _strip(frames: Sequence[Frame], scale: int) -> bytes:
    from PIL import Image

    chosen: Iterable[int] = np.unique(np.linspace(0, len(frames) - 1, 8).round().astype(int))
    drawn = io.BytesIO()
    strip = np.concatenate([_enlarged(frames[i], scale) for i in chosen], axis=1)
    Image.fromarray(strip).save(drawn, format="PNG")
    return drawn.getvalue()


def _enlarged(frame: Frame, scale: int) -> Frame:
    return np.ascontiguousarray(frame.repeat(scale, axis=0).repeat(scale, axis=1))
