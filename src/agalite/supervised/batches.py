"""Batches of sequences of many lengths, packed into rows of one length.

A batch is B rows of T tokens. A row holds as many whole sequences as fit, one after another. Each
sequence starts with a reset, so that the memory carries nothing over from the one before, and one
compiled program serves all lengths. Only the ends of rows are padding.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, UInt8, UInt32

from agalite import validation
from agalite.supervised.examples import Examples

_MAX_SLOTS = 32  # sequences in a row


class Batch(NamedTuple):
    """A batch, as NumPy or JAX arrays.

    Slot s of row b is `tokens[starts[b, s] : ends[b, s], b]`; an unused slot is empty.
    """

    tokens: UInt8[Any, "T B"]
    resets: Bool[Any, "T B"]
    starts: Int32[Any, "B S"]
    ends: Int32[Any, "B S"]
    labels: Int32[Any, "B S"]


@dataclass(frozen=True)
class Packing:
    """The shape of batches: `rows` of `length` tokens with up to `slots` sequences each."""

    rows: int
    length: int
    slots: int

    @classmethod
    def fit(cls, rows: int, length: int, *parts: Examples) -> "Packing":
        """A packing for all of these examples.

        A row has as many slots as the shortest sequence could fill, up to a limit.
        """
        validation.check_integer("rows", rows, minimum=1)
        longest = max(int(part.lengths.max()) for part in parts)
        shortest = min(int(part.lengths.min()) for part in parts)
        validation.check_integer("row_length", length, minimum=longest)
        return cls(rows, length, min(_MAX_SLOTS, length // shortest))

    def pack(self, examples: Examples, order: Int[np.ndarray, " E"]) -> list[list[int]]:
        """Every example once, as rows of indices, by best-fit decreasing bin packing.

        `order` (E,) is the order of examples of the same length.
        """
        lengths = examples.lengths
        by_length = order[np.argsort(-lengths[order], kind="stable")]
        rows: list[list[int]] = []
        free: list[tuple[int, int]] = []  # (free tokens, row) of rows that can take more, sorted
        for i in by_length.tolist():
            length = int(lengths[i])
            best = bisect.bisect_left(free, (length, -1))
            if best < len(free):
                room, row = free.pop(best)
            else:
                room, row = self.length, len(rows)
                rows.append([])
            rows[row].append(i)
            if room > length and len(rows[row]) < self.slots:
                bisect.insort(free, (room - length, row))
        return rows

    def shuffled(self, examples: Examples, seed: int, epoch: int) -> list[list[list[int]]]:
        """The batches of an epoch as rows of indices; `seed` and `epoch` decide the order."""
        rng = np.random.default_rng([seed, epoch])
        rows = self.pack(examples, rng.permutation(len(examples)))
        mixed = [rows[i] for i in rng.permutation(len(rows))]
        return [mixed[i : i + self.rows] for i in range(0, len(mixed), self.rows)]

    def in_order(self, examples: Examples) -> Iterator[Batch]:
        """Batches with every example once, for evaluation."""
        rows = self.pack(examples, np.arange(len(examples)))
        for i in range(0, len(rows), self.rows):
            yield self.batch(examples, rows[i : i + self.rows])

    def batch(self, examples: Examples, rows: list[list[int]]) -> Batch:
        """The batch with these examples in its rows."""
        tokens = np.zeros((self.length, self.rows), np.uint8)
        resets = np.zeros((self.length, self.rows), bool)
        starts, ends, labels = np.zeros((3, self.rows, self.slots), np.int32)
        for b, row in enumerate(rows):
            start = 0
            for s, i in enumerate(row):
                end = start + int(examples.lengths[i])
                tokens[start:end, b] = examples[i]
                resets[start, b] = True
                starts[b, s], ends[b, s], labels[b, s] = start, end, examples.labels[i]
                start = end
        return Batch(tokens, resets, starts, ends, labels)


class Cursor(NamedTuple):
    """The position of each seed in its training data: part of a checkpoint.

    Seeds pack their epochs differently, so that epochs have different numbers of batches.
    """

    epoch: Int64[np.ndarray, " seeds"]
    batch: Int64[np.ndarray, " seeds"]
    """The next batch of the epoch."""

    @classmethod
    def start(cls, seeds: int) -> "Cursor":
        return cls(np.zeros(seeds, np.int64), np.zeros(seeds, np.int64))


class BatchStream:
    """The training batches of all seeds, from a position on.

    **Arguments:**

    - `examples`: the training examples.
    - `packing`: the shape of the batches.
    - `seeds`: (seeds,) the seed of each stream.
    - `cursor`: where to start.
    """

    def __init__(
        self,
        examples: Examples,
        packing: Packing,
        seeds: UInt32[np.ndarray, " seeds"],
        cursor: Cursor,
    ) -> None:
        self.cursor = Cursor(cursor.epoch.copy(), cursor.batch.copy())
        """The position of the next batch."""
        self._examples, self._packing, self._seeds = examples, packing, seeds
        self._epochs = [self._shuffle(i) for i in range(len(seeds))]

    def next(self) -> Batch:
        """The next batch of each seed, as arrays with a first axis of seeds; moves the cursor."""
        batches = [self._next(i) for i in range(len(self._seeds))]
        return Batch(*(np.stack(arrays) for arrays in zip(*batches, strict=True)))

    def _next(self, i: int) -> Batch:
        if self.cursor.batch[i] == len(self._epochs[i]):
            self.cursor.epoch[i] += 1
            self.cursor.batch[i] = 0
            self._epochs[i] = self._shuffle(i)
        rows = self._epochs[i][self.cursor.batch[i]]
        self.cursor.batch[i] += 1
        return self._packing.batch(self._examples, rows)

    def _shuffle(self, i: int) -> list[list[list[int]]]:
        seed, epoch = int(self._seeds[i]), int(self.cursor.epoch[i])
        return self._packing.shuffled(self._examples, seed, epoch)
