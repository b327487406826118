"""`ops.sparse`: the custom kernels against the dense product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.ops.sparse import sparse_matmul
from modules import assert_close

pytestmark = pytest.mark.skipif(bool(kernels.why_not()), reason=str(kernels.why_not()))


def arrays(rows, inputs, outputs, density, dtype=jnp.float32):
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(a, (rows, inputs), dtype)
    x = jnp.where(jax.random.bernoulli(b, density, x.shape), x, 0)
    w = jax.random.normal(c, (inputs, outputs), dtype)
    return x, w, jax.random.normal(d, (rows, outputs), dtype)


# Below and above the share of zeros at which the kernel turns to a dense product; outputs that do
# and do not fill vectors; inputs in one block and in several.
@pytest.mark.parametrize("density", [0.0, 0.03, 0.6, 1.0])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 7), (9, 5000, 128), (70, 131, 33)])
def test_equals_a_dense_product_with_gradients(density, rows, inputs, outputs):
    x, w, d = arrays(rows, inputs, outputs, density)

    def results(product):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.mean(product(x, w) * d), (0, 1)))(x, w)

    assert_close(results(sparse_matmul), results(lambda x, w: x @ w), 2e-5)


def test_float64():
    with jax.enable_x64(True):
        x, w, _ = arrays(5, 200, 9, 0.1, jnp.float64)
        np.testing.assert_allclose(sparse_matmul(x, w), x @ w, atol=1e-13)


def test_gradients_of_gradients():
    x, w, _ = arrays(4, 60, 8, 0.1)

    def slope(product, w):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(product(x, w))))(w)
        return jnp.sum(jnp.square(gradient))

    found, expected = (jax.grad(lambda w, f=f: slope(f, w))(w) for f in (sparse_matmul, jnp.matmul))
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_is_more_rows_and_a_batch_of_weights_one_after_another(axis):
    x, w, _ = arrays(6, 300, 16, 0.05)
    x = x.reshape(2, 3, 300)
    want = sparse_matmul(x.reshape(6, 300), w).reshape(2, 3, 16)
    np.testing.assert_array_equal(jax.vmap(sparse_matmul, (axis, None), axis)(x, w), want)
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.square(sparse_matmul(x, w))))
    seeds = jnp.stack([w, 2 * w])
    found = jax.vmap(gradient)(seeds, x)
    for i in range(2):
        np.testing.assert_array_equal(found[i], gradient(seeds[i], x[i]))


@pytest.mark.parametrize("density", [0.03, 0.6])
def test_results_do_not_depend_on_the_number_of_threads(density):
    x, w, d = arrays(33, 3000, 128, density)
    run = lambda x, w: jax.vjp(sparse_matmul, x, w)[1](d)  # noqa: E731
    many = jax.jit(lambda x, w: run(x, w))(x, w)
    with kernels.one_thread():
        one = jax.jit(lambda x, w: run(x, w))(x, w)
    jax.tree.map(np.testing.assert_array_equal, many, one)
