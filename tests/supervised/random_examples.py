"""Random examples for tests."""

import numpy as np

from agalite.supervised.examples import Examples


def random_examples(lengths, seed=0):
    """A sequence of each length, of 12 tokens and 4 classes."""
    rng = np.random.default_rng(seed)
    return Examples.from_sequences(
        [rng.integers(0, 12, n).astype(np.uint8) for n in lengths], rng.integers(0, 4, len(lengths))
    )
