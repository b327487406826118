"""Packing sequences into rows, and the stream of training batches."""

import numpy as np
import pytest

from agalite.supervised.batches import BatchStream, Cursor, Packing
from agalite.supervised.listops import generate
from supervised.random_examples import random_examples


def test_every_example_is_packed_once_and_comes_out_as_it_went_in():
    examples = random_examples(np.random.default_rng(1).integers(1, 60, 500))
    packing = Packing.fit(4, 64, examples)
    assert packing.slots == 32  # sixty-four sequences of one token would be too many
    seen = []
    for rows in packing.shuffled(examples, seed=3, epoch=2):
        batch = packing.batch(examples, rows)
        assert batch.tokens.shape == (64, 4)
        expected_resets = np.zeros((64, 4), bool)
        for b in range(4):
            numbers = rows[b] if b < len(rows) else []
            used = np.flatnonzero(batch.ends[b] > batch.starts[b])
            assert len(used) == len(numbers) <= packing.slots
            for s, i in zip(used, numbers, strict=True):
                tokens = batch.tokens[batch.starts[b, s] : batch.ends[b, s], b]
                np.testing.assert_array_equal(tokens, examples[i])
                assert batch.labels[b, s] == examples.labels[i]
                expected_resets[batch.starts[b, s], b] = True
            seen += numbers
        np.testing.assert_array_equal(batch.resets, expected_resets)
    assert sorted(seen) == list(range(500))


def test_listops_fills_the_rows():
    examples = generate(3000, seed=0)
    packing = Packing.fit(8, 4096, examples)
    rows = packing.pack(examples, np.arange(3000))
    assert len(examples.tokens) / (len(rows) * 4096) > 0.96


def test_the_order_is_decided_by_seed_and_epoch():
    examples = random_examples([5] * 40 + [9] * 30)
    packing = Packing.fit(2, 20, examples)
    orders = [packing.shuffled(examples, s, e) for s, e in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


def test_a_row_must_hold_the_longest_sequence():
    with pytest.raises(ValueError, match="row_length=8 must be a whole number >= 9"):
        Packing.fit(2, 8, random_examples([9, 3]))


def test_a_stream_resumes_from_any_position():
    examples = random_examples([7, 9, 11, 13] * 10)
    packing = Packing.fit(2, 32, examples)
    seeds = np.array([4, 5], np.uint32)
    whole = BatchStream(examples, packing, seeds, Cursor.start(2))
    first = [whole.next() for _ in range(5)]
    resumed = BatchStream(examples, packing, seeds, whole.cursor)
    rest = [whole.next() for _ in range(12)]  # into the next epoch and beyond
    again = [resumed.next() for _ in range(12)]
    assert whole.cursor.epoch.min() >= 1
    for a, b in zip(rest, again, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    assert first[0].tokens.shape == (2, 32, 2)
    assert any((a.tokens != b.tokens).any() for a, b in zip(first, rest, strict=False))
