"""Helpers for tests of Equinox modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def assert_close(got, want, tolerance=1e-5):
    """Trees of arrays, compared leaf by leaf."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want
    )


def random_weights(make, seed=0):
    """The module that `make(key)` makes, with NumPy's random numbers as its weights and biases.

    Orthogonal initialisation compiles programs for every shape, which takes seconds. This compiles
    nothing, for tests that work with any weights.
    """
    generator = np.random.default_rng(seed)

    def draw(shape):
        assert jnp.issubdtype(shape.dtype, jnp.floating), shape
        scale = 0.1 if len(shape.shape) < 2 else shape.shape[-1] ** -0.5
        return jnp.asarray(scale * generator.normal(size=shape.shape), shape.dtype)

    return jax.tree.map(draw, eqx.filter_eval_shape(make, jax.random.key(0)))
