"""Frames as files: films that browsers play, and strips."""

import importlib.util
import os
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from agalite.cli import main
from agalite.envs import rendering

COLOURS = np.array([[200, 30, 40], [20, 160, 60], [40, 60, 220]], np.uint8)


os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"  # its reader forks otherwise; JAX objects


def film(path):
    """What ffmpeg says of it, and its frames (N, height, width, 3)."""
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    return meta, np.stack([np.frombuffer(x, np.uint8).reshape(height, width, 3) for x in reader])


def test_it_is_h264_of_even_size_and_the_frames_are_those_given(tmp_path):
    # Three blocks of colour, in another order in every frame, 7 x 5 pixels: odd, and tiny.
    frames = [np.roll(np.repeat(COLOURS, [2, 3, 2], axis=0), i, axis=0) for i in range(6)]
    frames = [np.broadcast_to(row[None], (5, 7, 3)) for row in frames]
    out = tmp_path / "film.mp4"
    rendering.write(frames, out, fps=12.0)
    meta, got = film(out)
    assert meta["codec"] == "h264"
    assert meta["pix_fmt"].startswith("yuv420p(tv, bt709")
    assert meta["fps"] == 12.0
    assert meta["duration"] == pytest.approx(6 / 12 + 1, abs=0.1), "the last frame stays a second"
    assert got.shape[0] == 6 + 12
    scale = round(rendering.TARGET_SIDE / 7)
    assert got.shape[1:] == (5 * scale + 5 * scale % 2, 7 * scale + 7 * scale % 2, 3)
    middle = slice(scale // 2, None, scale)
    for i, frame in enumerate(frames):
        centres = got[i, middle, middle][:5, :7].astype(int)
        assert np.abs(centres - frame).max() <= 12, "the same colours, where they were"
    np.testing.assert_allclose(got[-1].astype(int), got[5].astype(int), atol=6)
    assert list(tmp_path.iterdir()) == [out]
    head = out.read_bytes()
    assert head.index(b"moov") < head.index(b"mdat"), "it plays before all of it is there"


def test_an_episode_becomes_a_film(tmp_path, capsys):
    out = tmp_path / "maze.MP4"
    assert main(["envs", "show", "tmaze", "--out", str(out), "--steps", "12", "--fps", "8"]) == 0
    meta, frames = film(out)
    assert (meta["codec"], meta["fps"]) == ("h264", 8.0)
    assert len(np.unique(frames[0])) > 1
    assert "steps of random actions" in capsys.readouterr().out


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    out = tmp_path / "film.mp4"
    out.write_bytes(b"the old one")
    frames = [np.zeros((64, 64, 3), np.uint8)] * 100
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "/bin/false")
    with pytest.raises(OSError, match=r"ffmpeg could not write an \.mp4"):
        rendering.write(frames, out, fps=10)
    assert out.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [out]


def test_without_the_package_it_says_what_to_install_before_any_work(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "imageio_ffmpeg" else find(n, *a)
    )
    message = 'an .mp4 needs imageio_ffmpeg: pip install "agalite[video]"'
    assert main(["envs", "show", "tmaze", "--out", str(tmp_path / "x.mp4")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x.mov", "video='x.mov' must end in .mp4, .gif or .png"),
        ("/nowhere/x.mp4", "video='/nowhere/x.mp4': the folder '/nowhere' does not exist"),
        ("/proc/x.mp4", "video='/proc/x.mp4' cannot be written"),
    ],
)
def test_a_path_that_cannot_be_written(path, message):
    with pytest.raises(ValueError, match=message):
        rendering.check_path(Path(path), "video")


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "there are no frames"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], r"frames\[1\] is \(4, 5"),
        ([np.zeros((4, 4, 3), np.float32)], r"frames\[0\] is \(4, 4, 3\) float32; expected"),
        ([np.zeros((4, 4), np.uint8)], r"frames\[0\] is \(4, 4\) uint8"),
    ],
)
@pytest.mark.parametrize("suffix", rendering.FORMATS)
def test_what_are_no_frames_is_refused(frames, message, suffix, tmp_path):
    with pytest.raises(ValueError, match=message):
        rendering.write(frames, tmp_path / f"x{suffix}", fps=10)
    assert not list(tmp_path.iterdir())
