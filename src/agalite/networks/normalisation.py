"""Running statistics of observations and of returns.

They are arrays of the network, so that checkpoints, evaluation and exported files have them; no
gradient reaches them, and only `update` changes them.
"""

from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_SMALLEST = 1e-8  # added to variances
_LIMIT = 10.0  # normalised observations are clipped to +-10 standard deviations


class RunningStatistics(eqx.Module):
    """Mean and variance (...) of all samples so far; 0 and 1 before the first."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]
    count: Float[Array, ""]

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.variance, self.count = jnp.zeros(shape), jnp.ones(shape), jnp.zeros(())

    @property
    def std(self) -> Float[Array, "..."]:
        return jnp.sqrt(jax.lax.stop_gradient(self.variance) + _SMALLEST)

    def normalise(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """Zero mean and unit variance, clipped to +-10."""
        return jnp.clip((x - jax.lax.stop_gradient(self.mean)) / self.std, -_LIMIT, _LIMIT)

    def update(self, samples: Float[Array, "N ..."]) -> Self:
        """The statistics with N more samples (Chan et al., 1979)."""
        samples = jax.lax.stop_gradient(samples)
        new = samples.shape[0]
        mean, variance = samples.mean(axis=0), samples.var(axis=0)
        total = self.count + new
        delta = mean - self.mean
        squares = self.variance * self.count + variance * new
        squares += jnp.square(delta) * self.count * new / total
        values = (self.mean + delta * new / total, squares / total, total)
        return eqx.tree_at(lambda s: (s.mean, s.variance, s.count), self, values)

    def add(self, sample: Float[Array, "..."]) -> Self:
        """The statistics with one more sample (Welford, 1962).

        As `update`, but every term is of the size of the statistics themselves, which float32 needs
        in a stream of millions of samples. From 2^24 samples on the count stands still, and the
        statistics are exponential means over that many.
        """
        sample = jax.lax.stop_gradient(sample)
        count = self.count + 1
        delta = sample - self.mean
        mean = self.mean + delta / count
        variance = self.variance + (delta * (sample - mean) - self.variance) / count
        return eqx.tree_at(lambda s: (s.mean, s.variance, s.count), self, (mean, variance, count))
