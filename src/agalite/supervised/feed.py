"""The batches of a run, one after the other, for all seeds; a place in them can be saved."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32

from agalite.supervised.examples import Examples
from agalite.supervised.packing import Batch, Packing


class Place(NamedTuple):
    """The next batch of each seed. Seeds pack their epochs differently, into more or fewer."""

    epoch: Int64[np.ndarray, " seeds"]
    batch: Int64[np.ndarray, " seeds"]

    @classmethod
    def beginning(cls, seeds: int) -> "Place":
        return cls(np.zeros(seeds, np.int64), np.zeros(seeds, np.int64))


class Feed:
    """`next()` gives arrays with a first axis for the seeds, and moves `place`."""

    def __init__(
        self,
        examples: Examples,
        packing: Packing,
        seeds: UInt32[np.ndarray, " seeds"],
        place: Place,
    ) -> None:
        self.place = Place(place.epoch.copy(), place.batch.copy())
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
