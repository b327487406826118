"""Labelled token sequences of many lengths, and their cache on disk."""

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
"""Where data sets that can be made or downloaded again are kept."""


@dataclass(frozen=True)
class Examples:
    """E labelled sequences in three arrays. Sequence i is `tokens[starts[i] : starts[i + 1]]`.

    **Arguments:**

    - `tokens`: (N,) the tokens of all sequences, one after another.
    - `starts`: (E + 1,) where each sequence starts, and N. No sequence is empty.
    - `labels`: (E,) the class of each sequence.
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
        """The examples with these indices, in this order."""
        return Examples.from_sequences([self[i] for i in which], self.labels[which])

    def slice(self, first: int, last: int) -> "Examples":
        """The examples from `first` up to, not including, `last`; tokens are not copied."""
        low, high = self.starts[first], self.starts[last]
        return Examples(
            self.tokens[low:high], self.starts[first : last + 1] - low, self.labels[first:last]
        )

    def truncate(self, limit: int) -> tuple["Examples", int]:
        """The examples with at most their first `limit` tokens, and how many were longer."""
        longer = int((self.lengths > limit).sum())
        if not longer:
            return self, 0
        position = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)
        lengths = np.minimum(self.lengths, limit)
        return Examples(self.tokens[position < limit], _bounds(lengths), self.labels), longer

    def check(self, vocabulary: int, classes: int) -> None:
        """Refuses tokens and labels outside of these numbers of them."""
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
    def from_sequences(
        cls, sequences: Sequence[np.ndarray], labels: Sequence[int] | np.ndarray
    ) -> "Examples":
        """Examples from one array per sequence."""
        lengths = np.array([len(x) for x in sequences], np.int64)
        tokens = np.concatenate(sequences) if len(sequences) else np.zeros(0, np.uint8)
        return cls(
            tokens.astype(np.uint8, copy=False), _bounds(lengths), np.array(labels, np.uint8)
        )

    @classmethod
    def join(cls, parts: Sequence["Examples"]) -> "Examples":
        """All examples of several parts."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            _bounds(lengths),
            np.concatenate([part.labels for part in parts]),
        )


def _bounds(lengths: Int[np.ndarray, " E"]) -> Int[np.ndarray, " E+1"]:
    """`Examples.starts` for sequences of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def cached(path: Path, make: Callable[[], Examples]) -> Examples:
    """The examples stored in a file; if it is missing or damaged, they are made and stored."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Examples(arrays["tokens"], arrays["starts"], arrays["labels"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        path.unlink()  # damaged; it is made again
    examples = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    np.savez(data, tokens=examples.tokens, starts=examples.starts, labels=examples.labels)
    files.write(path, data.getvalue())
    return examples
