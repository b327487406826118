"""Frames into a file that people can look at."""

import io
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Shaped, UInt8

from agalite import extras, files

SMALLEST = 320  # what the longer side of a small frame is enlarged to, about
FORMATS = (".mp4", ".gif", ".png")
_HOLD = 1.0  # seconds that the last frame stays, so that one sees how it ended

Frame = UInt8[np.ndarray, "height width 3"]


def check_path(out: Path, name: str = "out") -> None:
    """Before any work is done: can a picture be written there? `name` is what the caller has."""
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{name}={str(out)!r} must end in {', '.join(FORMATS[:-1])} or .png")
    if out.suffix.lower() == ".mp4":
        require()
    files.check_writable(name, out)


def write(frames: Sequence[Frame], out: Path, *, fps: float) -> None:
    """A film (.mp4 or .gif), or for .png the first to last frames as a strip of at most eight."""
    check_path(out)
    _check_frames(frames)
    # Whole multiples, so that pixels stay square and sharp.
    scale = max(1, round(SMALLEST / max(frames[0].shape[:2])))
    match out.suffix.lower():
        case ".mp4":
            data = encode(frames, fps=fps, scale=scale, hold=_HOLD)
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


# --- Frames into an .mp4 that browsers play: H.264, 4:2:0, even sides -----------------------------


def require() -> None:
    """Before any work is done: is there an ffmpeg?"""
    extras.require("an .mp4", ["imageio_ffmpeg"], "video")


def encode(
    frames: Sequence[UInt8[np.ndarray, "height width 3"]], *, fps: float, scale: int, hold: float
) -> bytes:
    """Each pixel as scale x scale of them; the last frame stays for `hold` more seconds."""
    require()
    import imageio_ffmpeg

    height, width, _ = frames[0].shape
    filters = [
        # Enlarged in RGB, before the colours are halved in number: pixels keep their own.
        f"scale={width * scale}:{height * scale}:flags=neighbor",
        "pad=ceil(iw/2)*2:ceil(ih/2)*2",
        f"tpad=stop_mode=clone:stop_duration={hold}",
        # Said as well as done: without, players guess, some of them wrongly.
        "scale=out_color_matrix=bt709:out_range=tv",
        "format=yuv420p",
        "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv",
    ]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.mp4", Path(folder) / "log"
        command = [
            imageio_ffmpeg.get_ffmpeg_exe(),
            "-loglevel",
            "error",
            "-f",
            "rawvideo",
            "-pix_fmt",
            "rgb24",
            "-s",
            f"{width}x{height}",
            "-r",
            f"{fps:g}",
            "-i",
            "pipe:0",
            "-vf",
            ",".join(filters),
            "-c:v",
            "libx264",
            "-crf",
            "18",
            "-movflags",
            "+faststart",
            str(out),
        ]
        with (
            open(log, "wb") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
            ) as process,
        ):
            try:
                _pour(process, frames)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
            raise OSError(f"ffmpeg could not write an .mp4: {said[0]}")
        return out.read_bytes()


def _pour(process: subprocess.Popen[bytes], frames: Sequence[UInt8[np.ndarray, "..."]]) -> None:
    assert process.stdin is not None
    try:
        for frame in frames:
            process.stdin.write(np.ascontiguousarray(frame).data)
        process.stdin.close()
    except BrokenPipeError:
        pass  # ffmpeg has given up, and says why


# --- One episode of a world, frame by frame, for people to look at --------------------------------

LONGEST = 1000  # steps, where nobody says how many
_SLOWEST = 8.0  # frames a second; a world's own speed is for people who play it

# act(key, memory, obs, first) -> memory, action; first is true with an episode's first observation.
Act = Callable[[Array, Any, Shaped[Array, "..."], Bool[Array, ""]], tuple[Any, Array]]


class Episode(NamedTuple):
    frames: list[UInt8[np.ndarray, "height width 3"]]
    total: float
    """The sum of the rewards."""
    why: str
    """How it ended, in words."""


def speed(world: Any) -> float:
    """Frames a second to show it at."""
    return max(_SLOWEST, getattr(world, "frames_a_second", 30.0))


def play(world: Any, act: Act, memory: Any, *, seed: int, steps: Iterable[int]) -> Episode:
    """Until it ends or `steps` (0, 1, 2, ...) run out."""
    params = world.default_params

    @jax.jit
    def begin(key: Array) -> Any:
        obs, state = world.reset_env(key, params)
        return obs, state, world.render(state, params)

    @jax.jit
    def step(key: Array, memory: Any, obs: Array, state: Any, first: Array) -> Any:
        choose, move = jax.random.split(key)
        memory, action = act(choose, memory, obs, first)
        obs, state, reward, terminated, _ = world.step_env(move, state, action, params)
        truncated = world.is_truncated(state, params)
        return memory, obs, state, world.render(state, params), reward, terminated, truncated

    key = jax.random.key(seed)
    obs, state, frame = begin(jax.random.fold_in(key, 0))
    frames, total, why = [np.asarray(frame)], 0.0, "stopped before its end"
    for i in steps:
        memory, obs, state, frame, reward, terminated, truncated = step(
            jax.random.fold_in(key, i + 1), memory, obs, state, np.asarray(i == 0)
        )
        frames.append(np.asarray(frame))
        total += float(reward)
        if terminated or truncated:
            why = "ended" if terminated else "stopped by the time limit"
            break
    return Episode(frames, total, why)
