"""Frames into an .mp4 that browsers play: H.264, 4:2:0, even sides.

ffmpeg does it, in a process of its own; the package imageio-ffmpeg brings one along.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from agalite import extras


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
            imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error",
            "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}",
            "-i", "pipe:0", "-vf", ",".join(filters), "-c:v", "libx264", "-crf", "18",
            "-movflags", "+faststart", str(out),
        ]  # fmt: skip
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
