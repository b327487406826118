"""Labelled token sequences of many lengths, and their place on the disk between two runs."""

import functools
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from agalite import files

CACHE = files.cache("lra")


@dataclass(frozen=True)
class Examples:
    """E sequences: tokens (N,) one after the other, starts (E + 1,), labels (E,).

    Sequence i is `tokens[starts[i] : starts[i + 1]]`; none is empty.
    """

    tokens: UInt8[np.ndarray, " N"]
    starts: Int[np.ndarray, " E+1"]
    labels: UInt8[np.ndarray, " E"]

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.labels) + 1:
            raise ValueError(
                f"starts has {len(self.starts)} entries; expected one more than the "
                f"{len(self.labels)} labels"
            )
        if self.starts[0] != 0 or self.starts[-1] != len(self.tokens):
            raise ValueError(
                f"starts goes from {self.starts[0]} to {self.starts[-1]}; expected 0 to "
                f"{len(self.tokens)}, the number of tokens"
            )
        if len(self) and self.lengths.min() < 1:
            raise ValueError(f"sequence {int(self.lengths.argmin())} is empty")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> UInt8[np.ndarray, " T"]:
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, " E"]:
        return np.diff(self.starts)

    def take(self, which: Int[np.ndarray, " n"]) -> "Examples":
        """Some of them, in the order asked for."""
        return Examples.of([self[i] for i in which], self.labels[which])

    def slice(self, first: int, last: int) -> "Examples":
        """Those from `first` up to `last`, without copying their tokens."""
        low, high = self.starts[first], self.starts[last]
        return Examples(
            self.tokens[low:high], self.starts[first : last + 1] - low, self.labels[first:last]
        )

    def cut(self, limit: int) -> tuple["Examples", int]:
        """Sequences with at most their first `limit` tokens, and how many were longer."""
        longer = int((self.lengths > limit).sum())
        if not longer:
            return self, 0
        within = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)
        lengths = np.minimum(self.lengths, limit)
        return Examples(self.tokens[within < limit], _bounds(lengths), self.labels), longer

    def require(self, vocabulary: int, classes: int) -> None:
        """Tokens and labels must be ones that a model for them knows."""
        for name, values, count in (
            ("token", self.tokens, vocabulary),
            ("label", self.labels, classes),
        ):
            if len(values) and int(values.max()) >= count:
                i = int(values.argmax())
                example = (
                    i if name == "label" else int(np.searchsorted(self.starts, i, "right")) - 1
                )
                raise ValueError(
                    f"{name} {int(values[i])} of example {example} must be from 0 to {count - 1}"
                )

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], labels: Sequence[int] | np.ndarray) -> "Examples":
        lengths = np.array([len(x) for x in sequences], np.int64)
        tokens = np.concatenate(sequences) if len(sequences) else np.zeros(0, np.uint8)
        return cls(
            tokens.astype(np.uint8, copy=False), _bounds(lengths), np.array(labels, np.uint8)
        )

    @classmethod
    def join(cls, parts: Sequence["Examples"]) -> "Examples":
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            _bounds(lengths),
            np.concatenate([part.labels for part in parts]),
        )


def _bounds(lengths: Int[np.ndarray, " E"]) -> Int[np.ndarray, " E+1"]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def stored(path: Path, make: Callable[[], Examples]) -> Examples:
    """What is in the file; if there is none, or a damaged one, what `make` makes, kept there."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Examples(arrays["tokens"], arrays["starts"], arrays["labels"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        path.unlink()  # it can be made again, and will be
    examples = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    np.savez(data, tokens=examples.tokens, starts=examples.starts, labels=examples.labels)
    files.write(path, data.getvalue())
    return examples
