"""Sequences of many lengths laid one after another into rows of one length.

A batch is B rows of T tokens. A row holds whole sequences, as many as fit; each begins with a
reset, so the memory knows nothing of its neighbour, and a program for one shape serves every
length. What is left over at the ends of rows is the only padding there is.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, UInt8, UInt32

from agalite import validation
from agalite.supervised.examples import Examples

_MOST_SLOTS = 32  # sequences in one row


class Batch(NamedTuple):
    """Of NumPy's arrays or of JAX's. Slot s of row b is tokens[starts[b, s] : ends[b, s], b];
    an unused one is empty.
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
        """As many slots as the shortest sequences could fill, within reason."""
        validation.integer("rows", rows, minimum=1)
        longest = max(int(part.lengths.max()) for part in parts)
        shortest = min(int(part.lengths.min()) for part in parts)
        validation.integer("row_length", length, minimum=longest)
        return cls(rows, length, min(_MOST_SLOTS, length // shortest))

    def epoch(self, examples: Examples, order: Int[np.ndarray, " E"]) -> list[list[int]]:
        """Every example once, in rows: the longest first, each where it leaves the least room.

        `order` decides between examples of the same length.
        """
        lengths = examples.lengths
        by_length = order[np.argsort(-lengths[order], kind="stable")]
        rows: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # room left and number of each row that takes more
        for i in by_length.tolist():
            need = int(lengths[i])
            place = bisect.bisect_left(rooms, (need, -1))
            if place < len(rooms):
                room, row = rooms.pop(place)
            else:
                room, row = self.length, len(rows)
                rows.append([])
            rows[row].append(i)
            if room > need and len(rows[row]) < self.slots:
                bisect.insort(rooms, (room - need, row))
        return rows

    def shuffled(self, examples: Examples, seed: int, epoch: int) -> list[list[list[int]]]:
        """Batches of rows of examples: all of them, in an order that the two numbers decide."""
        rng = np.random.default_rng([seed, epoch])
        rows = self.epoch(examples, rng.permutation(len(examples)))
        mixed = [rows[i] for i in rng.permutation(len(rows))]
        return [mixed[i : i + self.rows] for i in range(0, len(mixed), self.rows)]

    def in_order(self, examples: Examples) -> Iterator[Batch]:
        """All examples once, for scoring."""
        rows = self.epoch(examples, np.arange(len(examples)))
        for i in range(0, len(rows), self.rows):
            yield self.batch(examples, rows[i : i + self.rows])

    def batch(self, examples: Examples, rows: list[list[int]]) -> Batch:
        tokens = np.zeros((self.length, self.rows), np.uint8)
        resets = np.zeros((self.length, self.rows), bool)
        starts, ends, labels = np.zeros((3, self.rows, self.slots), np.int32)
        for b, row in enumerate(rows):
            place = 0
            for s, i in enumerate(row):
                end = place + int(examples.lengths[i])
                tokens[place:end, b] = examples[i]
                resets[place, b] = True
                starts[b, s], ends[b, s], labels[b, s] = place, end, examples.labels[i]
                place = end
        return Batch(tokens, resets, starts, ends, labels)


# --- The batches of a run, one after the other, for all seeds; a place in them can be saved -------


class RunnerState(NamedTuple):
    """The next batch of each seed. Seeds pack their epochs differently, into more or fewer."""

    epoch: Int64[np.ndarray, " seeds"]
    batch: Int64[np.ndarray, " seeds"]

    @classmethod
    def beginning(cls, seeds: int) -> "RunnerState":
        return cls(np.zeros(seeds, np.int64), np.zeros(seeds, np.int64))


class Feed:
    """`next()` gives arrays with a first axis for the seeds, and moves `place`."""

    def __init__(
        self,
        examples: Examples,
        packing: Packing,
        seeds: UInt32[np.ndarray, " seeds"],
        place: RunnerState,
    ) -> None:
        self.place = RunnerState(place.epoch.copy(), place.batch.copy())
        self._examples, self._packing, self._seeds = examples, packing, seeds
        self._plans = [self._plan(i) for i in range(len(seeds))]

    def next(self) -> Batch:
        batches = [self._next(i) for i in range(len(self._seeds))]
        return Batch(*(np.stack(arrays) for arrays in zip(*batches, strict=True)))

    def _next(self, i: int) -> Batch:
        if self.place.batch[i] == len(self._plans[i]):
            self.place.epoch[i] += 1
            self.place.batch[i] = 0
            self._plans[i] = self._plan(i)
        rows = self._plans[i][self.place.batch[i]]
        self.place.batch[i] += 1
        return self._packing.batch(self._examples, rows)

    def _plan(self, i: int) -> list[list[list[int]]]:
        seed, epoch = int(self._seeds[i]), int(self.place.epoch[i])
        return self._packing.shuffled(self._examples, seed, epoch)
