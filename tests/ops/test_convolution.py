"""`ops.convolution`: the custom kernels against XLA's convolution, and how they are batched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.ops.convolution import Window, convolve
from modules import assert_close

pytestmark = pytest.mark.skipif(bool(kernels.why_not()), reason=str(kernels.why_not()))

# One for each tile of the kernels: more and fewer outputs than a vector has lanes, runs below the
# kernel that do not fill vectors, padding, strides; and every layer of the encoders.
CASES = {
    "atari 1": (Window((20, 24, 3), 8, 4, (0, 0), 1 / 255), 32),
    "atari 2": (Window((10, 12, 32), 4, 2, (0, 0), 1.0), 64),
    "atari 3": (Window((9, 9, 64), 3, 1, (0, 0), 1.0), 64),
    "impala": (Window((8, 6, 16), 3, 1, (1, 1), 1.0), 16),
    "patch": (Window((24, 36, 3), 12, 12, (0, 0), 1 / 255), 8),
    "odd": (Window((13, 11, 5), 4, 2, (1, 2), 0.5), 7),
    "wide": (Window((4, 5, 2), 2, 1, (0, 1), 2.0), 83),
    "one pixel": (Window((1, 1, 1), 1, 1, (0, 0), 1.0), 1),
    "48 outputs": (Window((6, 6, 3), 3, 3, (0, 0), 1.0), 48),
}


def xla(images, weights, window):
    """As `convolve`, by XLA."""
    k, s, c = window.kernel, window.stride, window.shape[2]
    w = weights.reshape(-1, k // s, k // s, s, s, c).transpose(1, 3, 2, 4, 5, 0)
    return jax.lax.conv_general_dilated(
        images.astype(weights.dtype) * window.scale,
        w.reshape(k, k, c, -1),
        (s, s),
        [window.padding] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def arrays(window, outputs, images=7, dtype=jnp.float32):
    a, b, c = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(a, (images, *window.shape), dtype)
    w = jax.random.normal(b, (outputs, window.inputs), dtype)
    return x, w, jax.random.normal(c, (images, *window.out, outputs), dtype)


@pytest.mark.parametrize("case", CASES)
def test_equals_xla_with_gradients(case):
    window, outputs = CASES[case]
    x, w, d = arrays(window, outputs)

    def loss(function, x, w):
        y = function(x, w, window)
        return jnp.sum(y * d), y

    found, expected = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1), has_aux=True))(x, w)
        for f in (convolve, xla)
    )
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("case", ["atari 1", "patch", "odd"])
def test_bytes_are_read_as_they_are(case):
    window, outputs = CASES[case]
    _, w, d = arrays(window, outputs, 3)
    x = np.random.default_rng(0).integers(0, 256, (3, *window.shape), dtype=np.uint8)
    loss = lambda f, w: jnp.mean(f(jnp.asarray(x), w, window) * d)  # noqa: E731
    found, expected = (jax.value_and_grad(partial(loss, f))(w) for f in (convolve, xla))
    assert_close(found, expected, 2e-5)


def test_float64():
    with jax.enable_x64(True):
        x, w, _ = arrays(*CASES["odd"], dtype=jnp.float64)
        y = convolve(x, w, CASES["odd"][0])
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, xla(x, w, CASES["odd"][0]), atol=1e-13)


def test_gradients_of_gradients():
    """The convolution and its two gradients are each other's gradients."""
    window, outputs = CASES["odd"]
    x, w, _ = arrays(window, outputs, 2)

    def slope(function, x, w):
        def loss(x, w):
            return jnp.sum(jnp.sin(function(x, w, window)))

        dx, dw = jax.grad(loss, (0, 1))(x, w)
        return jnp.sum(jnp.square(dx)) + jnp.sum(jnp.square(dw))

    found, expected = (jax.grad(partial(slope, f), (0, 1))(x, w) for f in (convolve, xla))
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_is_more_images_and_a_batch_of_weights_one_after_another(axis):
    window, outputs = CASES["impala"]
    x, w, _ = arrays(window, outputs, 6)
    x = x.reshape(2, 3, *window.shape)
    one = lambda x, w: convolve(x, w, window)  # noqa: E731
    flat = one(x.reshape(6, *window.shape), w).reshape(2, 3, *window.out, outputs)
    batched = jax.vmap(one, (axis, None), axis)(x, w)
    np.testing.assert_array_equal(batched, flat)

    seeds = jnp.stack([w, 2 * w])
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.square(one(x, w))))
    found = jax.vmap(gradient)(seeds, x)
    for i in range(2):
        np.testing.assert_array_equal(found[i], gradient(seeds[i], x[i]))


@pytest.mark.parametrize("images", [1, 3, 40])
def test_results_do_not_depend_on_the_number_of_threads(images):
    window, outputs = CASES["atari 2"]
    x, w, d = arrays(window, outputs, images)
    run = lambda x, w: jax.vjp(lambda x, w: convolve(x, w, window), x, w)[1](d)  # noqa: E731
    many = jax.jit(lambda x, w: run(x, w))(x, w)
    with kernels.one_thread():
        one = jax.jit(lambda x, w: run(x, w))(x, w)
    jax.tree.map(np.testing.assert_array_equal, many, one)


def test_infinities_and_nans_stay_where_they_are():
    window, outputs = CASES["atari 3"]
    x, w, _ = arrays(window, outputs, 2)
    x = x.at[1, 4, 4, 0].set(jnp.nan).at[0, 0, 0, 1].set(jnp.inf)
    found, expected = (f(x, w, window) for f in (convolve, xla))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))


@pytest.mark.parametrize("case", ["odd", "wide"])
def test_a_gradient_that_is_not_finite_stays_below_its_window(case):
    window, outputs = CASES[case]
    x, w, d = arrays(window, outputs, 3)
    d = d.at[1, 0, 0].set(jnp.nan)
    found, expected = (jax.vjp(lambda x, f=f: f(x, w, window), x)[1](d)[0] for f in (convolve, xla))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.parametrize(
    ("shape", "dtype", "window", "inputs", "words"),
    [
        ((2, 8, 8, 3), "float32", Window((8, 8, 3), 3, 2, (0, 0), 1.0), 27, "multiple of stride=2"),
        ((2, 8, 7, 3), "float32", Window((8, 8, 3), 3, 1, (0, 0), 1.0), 27, "8, 8, 3"),
        ((2, 2, 2, 3), "float32", Window((2, 2, 3), 3, 1, (0, 0), 1.0), 27, "at least 3 x 3"),
        ((2, 8, 8, 3), "float32", Window((8, 8, 3), 3, 1, (0, 0), 1.0), 26, r"\(out, 27\)"),
        ((2, 8, 8, 3), "int32", Window((8, 8, 3), 3, 1, (0, 0), 1.0), 27, "images are int32"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(shape, dtype, window, inputs, words):
    with pytest.raises(ValueError, match=words):
        convolve(jnp.zeros(shape, dtype), jnp.zeros((4, inputs)), window)


def test_no_images():
    window, outputs = CASES["odd"]
    x, w, d = arrays(window, outputs, 0)
    y, back = jax.vjp(lambda x, w: convolve(x, w, window), x, w)
    assert y.shape == d.shape
    assert not np.any(back(d)[1])
