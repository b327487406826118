"""Episodes as frames, and frames as files: .mp4, .gif, or a strip of pictures in a .png."""

import io
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped, UInt8

from agalite import extras, files

FORMATS = (".mp4", ".gif", ".png")
MAX_STEPS = 1000
"""Steps after which an episode is cut short, unless the caller says otherwise."""
TARGET_SIDE = 320
"""Pixels to which the longer side of a small frame is enlarged, approximately."""

_MIN_FPS = 8.0
_LAST_FRAME_SECONDS = 1.0  # the last frame is held, so that the outcome can be seen
_STRIP_FRAMES = 8

Frame = UInt8[np.ndarray, "height width 3"]

Act = Callable[
    [Array, Any, Shaped[Array, "..."], Float[Array, ""], Bool[Array, ""]], tuple[Any, Array]
]
"""A policy: `act(key, memory_state, obs, reward, first) -> memory_state, action`. `reward` is that
of the step before; `first` is true with the first observation of an episode."""


class Episode(NamedTuple):
    """One episode as it is shown."""

    frames: list[Frame]
    """One for the reset and one for every step."""
    episode_return: float
    """The undiscounted sum of the rewards."""
    outcome: str
    """How it ended, for messages."""


def render_fps(env: Any) -> float:
    """Frames per second to show `env` at: its own `render_fps`, and at least 8."""
    return max(_MIN_FPS, getattr(env, "render_fps", 30.0))


def play(env: Any, act: Act, memory_state: Any, *, seed: int, steps: Iterable[int]) -> Episode:
    """Play one episode of a JAX environment and draw every step.

    **Arguments:**

    - `env`: a `JaxEnvironment`.
    - `act`: the policy.
    - `memory_state`: what `act` starts from.
    - `seed`: of the environment and the policy.
    - `steps`: 0, 1, 2, ...: when it is exhausted the episode is cut short.

    **Returns:**

    An `Episode`.
    """
    params = env.default_params

    @jax.jit
    def reset(key: Array) -> Any:
        obs, env_state = env.reset_env(key, params)
        return obs, env_state, env.render(env_state, params)

    @jax.jit
    def step(
        key: Array, memory_state: Any, obs: Array, reward: Array, env_state: Any, first: Array
    ) -> Any:
        act_key, step_key = jax.random.split(key)
        memory_state, action = act(act_key, memory_state, obs, reward, first)
        obs, env_state, reward, terminated, _ = env.step_env(step_key, env_state, action, params)
        truncated = env.is_truncated(env_state, params)
        frame = env.render(env_state, params)
        return memory_state, obs, env_state, frame, reward, terminated, truncated

    key = jax.random.key(seed)
    obs, env_state, frame = reset(jax.random.fold_in(key, 0))
    frames, total, outcome = [np.asarray(frame)], 0.0, "stopped before its end"
    reward = np.float32(0)
    for i in steps:
        memory_state, obs, env_state, frame, reward, terminated, truncated = step(
            jax.random.fold_in(key, i + 1), memory_state, obs, reward, env_state, np.asarray(i == 0)
        )
        frames.append(np.asarray(frame))
        total += float(reward)
        if terminated or truncated:
            outcome = "ended" if terminated else "stopped by the time limit"
            break
    return Episode(frames, total, outcome)


def check_path(out: Path, name: str = "out") -> None:
    """Raise a `ValueError` if no picture can be written to `out`. `name` is the argument's."""
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{name}={str(out)!r} must end in {', '.join(FORMATS[:-1])} or .png")
    if out.suffix.lower() == ".mp4":
        _require_ffmpeg()
    files.check_writable(name, out)


def write(frames: Sequence[Frame], out: Path, *, fps: float) -> None:
    """Write frames to a file.

    **Arguments:**

    - `frames`: one or more, (height, width, 3) uint8, all of one size.
    - `out`: .mp4 or .gif for a film, .png for a strip of at most eight of the frames.
    - `fps`: frames per second of a film.
    """
    check_path(out)
    _check_frames(frames)
    # An integer factor, so that pixels stay square and sharp.
    scale = max(1, round(TARGET_SIDE / max(frames[0].shape[:2])))
    match out.suffix.lower():
        case ".mp4":
            data = _mp4(frames, fps, scale)
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

    first, *rest = (Image.fromarray(_enlarge(frame, scale)) for frame in frames)
    durations = [round(1000 / fps)] * len(rest) + [round(1000 * _LAST_FRAME_SECONDS)]
    file = io.BytesIO()
    first.save(file, format="GIF", save_all=True, append_images=rest, duration=durations, loop=0)
    return file.getvalue()


def _strip(frames: Sequence[Frame], scale: int) -> bytes:
    from PIL import Image

    spread = np.linspace(0, len(frames) - 1, _STRIP_FRAMES).round().astype(int)
    strip = np.concatenate([_enlarge(frames[i], scale) for i in np.unique(spread)], axis=1)
    file = io.BytesIO()
    Image.fromarray(strip).save(file, format="PNG")
    return file.getvalue()


def _enlarge(frame: Frame, scale: int) -> Frame:
    return np.ascontiguousarray(frame.repeat(scale, axis=0).repeat(scale, axis=1))


def _require_ffmpeg() -> None:
    extras.require("an .mp4", ["imageio_ffmpeg"], "video")


def _mp4(frames: Sequence[Frame], fps: float, scale: int) -> bytes:
    """An .mp4 that browsers play: H.264, 4:2:0, even sides."""
    _require_ffmpeg()
    import imageio_ffmpeg

    height, width, _ = frames[0].shape
    filters = [
        # Enlarged in RGB, before the colours are subsampled: every pixel keeps its own.
        f"scale={width * scale}:{height * scale}:flags=neighbor",
        "pad=ceil(iw/2)*2:ceil(ih/2)*2",
        f"tpad=stop_mode=clone:stop_duration={_LAST_FRAME_SECONDS}",
        # The colour space is declared as well as used: some players guess it wrongly.
        "scale=out_color_matrix=bt709:out_range=tv",
        "format=yuv420p",
        "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv",
    ]
    raw_input = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}"]
    h264 = ["-c:v", "libx264", "-crf", "18", "-movflags", "+faststart"]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.mp4", Path(folder) / "log"
        command = [
            *(imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error"),
            *(*raw_input, "-i", "pipe:0"),
            *("-vf", ",".join(filters)),
            *(*h264, str(out)),
        ]
        with (
            open(log, "wb") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
            ) as process,
        ):
            try:
                _feed(process, frames)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
            raise OSError(f"ffmpeg could not write an .mp4: {last[0]}")
        return out.read_bytes()


def _feed(process: subprocess.Popen[bytes], frames: Sequence[Frame]) -> None:
    assert process.stdin is not None
    try:
        for frame in frames:
            process.stdin.write(np.ascontiguousarray(frame).data)
        process.stdin.close()
    except BrokenPipeError:
        pass  # ffmpeg has ended early; its log says why
