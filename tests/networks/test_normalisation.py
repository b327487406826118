"""Running statistics, sample by sample."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from agalite.networks.normalisation import RunningStatistics


def test_sample_by_sample_they_are_those_of_all_samples():
    samples = 5 + 2 * jax.random.normal(jax.random.key(0), (300, 3))
    statistics, _ = jax.lax.scan(lambda s, x: (s.add(x), None), RunningStatistics((3,)), samples)
    np.testing.assert_allclose(statistics.mean, samples.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics.variance, samples.var(0), rtol=1e-4)
    assert statistics.count == 300


def test_in_a_long_stream_they_stay_where_they_are():
    """As after 2^24 samples, where the count of float32 ends."""
    many = eqx.tree_at(lambda s: s.count, RunningStatistics(()), jnp.float32(2**24))
    samples = jax.random.normal(jax.random.key(0), (20_000,))
    after, _ = jax.lax.scan(lambda s, x: (s.add(x), None), many, samples)
    assert after.count == 2**24
    assert abs(float(after.variance) - 1) < 0.01
    assert abs(float(after.mean)) < 0.01
