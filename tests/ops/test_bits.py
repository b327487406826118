"""`ops.bits`: packing is exact, and the custom kernels equal the dense product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.ops.bits import Bits, bits_matmul, pack, unpack
from modules import assert_close

needs_kernels = pytest.mark.skipif(bool(kernels.why_not()), reason=str(kernels.why_not()))


def arrays(shape, binary, others, outputs, density=0.1, dtype=jnp.float32):
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    first = jax.random.bernoulli(a, density, (*shape, binary)).astype(dtype)
    x = jnp.concatenate([first, jax.random.normal(b, (*shape, others), dtype)], axis=-1)
    w = jax.random.normal(c, (binary + others, outputs), dtype)
    return x, w, jax.random.normal(d, (*shape, outputs), dtype)


# Words that are full and that are not, with and without other numbers, one row and none.
@pytest.mark.parametrize(("binary", "others"), [(64, 3), (33, 0), (5, 7), (31, 1)])
@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
def test_packing_is_exact(binary, others, shape):
    x, _, _ = arrays(shape, binary, others, 1, 0.5)
    packed = pack(x, binary)
    assert packed.bits.shape == (*shape, -(-binary // 32))
    np.testing.assert_array_equal(unpack(packed, binary + others), x)
    if binary == 33:
        assert int(pack(x.at[..., :].set(0).at[..., 32].set(1), 33).bits.reshape(-1, 2)[0, 1]) == 1


@needs_kernels
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
@pytest.mark.parametrize(
    ("rows", "binary", "others", "outputs"), [(1, 40, 3, 7), (9, 5001, 51, 128), (70, 131, 0, 33)]
)
def test_equals_a_dense_product_with_gradients(density, rows, binary, others, outputs):
    x, w, d = arrays((rows,), binary, others, outputs, density)

    def results(product):
        return jax.jit(jax.value_and_grad(lambda w: jnp.mean(product(w) * d)))(w)

    assert_close(results(lambda w: bits_matmul(pack(x, binary), w)), results(lambda w: x @ w), 2e-5)


def test_without_kernels_the_rows_are_unpacked():
    x, w, _ = arrays((5,), 70, 4, 9)
    with kernels.switched_off():
        np.testing.assert_allclose(bits_matmul(pack(x, 70), w), x @ w, atol=1e-5)


@needs_kernels
def test_float64_and_gradients_of_gradients():
    with jax.enable_x64(True):
        x, w, _ = arrays((5,), 200, 6, 9, dtype=jnp.float64)
        packed = pack(x, 200)
        np.testing.assert_allclose(bits_matmul(packed, w), x @ w, atol=1e-12)

        def slope(product, w):
            gradient = jax.grad(lambda w: jnp.sum(jnp.sin(product(w))))(w)
            return jnp.sum(jnp.square(gradient))

        products = (lambda w: bits_matmul(packed, w), lambda w: x @ w)
        found, expected = (jax.grad(lambda w, f=f: slope(f, w))(w) for f in products)
        assert_close(found, expected, 1e-10)


@needs_kernels
@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_is_more_rows_and_a_batch_of_weights_one_after_another(axis):
    x, w, _ = arrays((2, 3), 300, 4, 16)
    packed = pack(x, 300)
    want = bits_matmul(packed, w)
    np.testing.assert_array_equal(jax.vmap(bits_matmul, (axis, None), axis)(packed, w), want)
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.square(bits_matmul(x, w))))
    seeds = jnp.stack([w, 2 * w])
    found = jax.vmap(gradient)(seeds, packed)
    for i in range(2):
        one = gradient(seeds[i], Bits(packed.bits[i], packed.rest[i]))
        np.testing.assert_array_equal(found[i], one)


@needs_kernels
def test_results_do_not_depend_on_the_number_of_threads():
    x, w, d = arrays((33,), 3000, 51, 128)
    packed = pack(x, 3000)
    run = lambda w: (bits_matmul(packed, w), jax.vjp(lambda w: bits_matmul(packed, w), w)[1](d))  # noqa: E731
    many = jax.jit(lambda w: run(w))(w)
    with kernels.one_thread():
        one = jax.jit(lambda w: run(w))(w)
    jax.tree.map(np.testing.assert_array_equal, many, one)
