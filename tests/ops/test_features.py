"""Feature maps."""

import jax.numpy as jnp
import numpy as np
import pytest

from agalite.ops import Outer, dpfp, elu1, relu


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp_is_the_published_loop(nu):
    """Schlag et al. (2021), Appendix: x_i x_(i - j) of x = relu([k, -k]), j = 1 .. nu."""
    k = np.random.default_rng(0).normal(size=(4, 2, 5)).astype(np.float32)
    x = np.maximum(np.concatenate([k, -k], axis=-1), 0)
    want = np.zeros((4, 2, 2 * nu * 5), np.float32)
    for j in range(1, nu + 1):
        for i in range(10):
            want[..., (j - 1) * 10 + i] = x[..., i] * x[..., (i - j) % 10]
    np.testing.assert_allclose(dpfp(jnp.asarray(k), nu), want, rtol=1e-6)


def test_elu1_is_positive_and_relu_is_not_negative():
    x = np.linspace(-15, 15, 301).astype(np.float32)
    assert (elu1(x) > 0).all()
    assert (np.diff(elu1(x)) >= 0).all()
    np.testing.assert_allclose(elu1(x), np.where(x > 0, x + 1, np.exp(x)), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(relu(x), np.maximum(x, 0))


def test_outer_is_f_of_the_outer_product():
    a, b = np.arange(6.0).reshape(1, 2, 3), np.arange(8.0).reshape(1, 2, 4)
    want = np.stack([np.outer(a[0, h], b[0, h]).ravel() for h in range(2)])[None]
    np.testing.assert_array_equal(Outer(a, b).expand(), want)


@pytest.mark.parametrize("nu", [0, 1.5])
def test_bad_nu_is_named(nu):
    with pytest.raises(ValueError, match=f"nu={nu!r} must be a whole number >= 1"):
        dpfp(np.zeros((2, 3), np.float32), nu)
