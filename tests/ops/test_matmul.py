"""`matmul` against einsum, whatever is batched and differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.ops.matmul import LARGE, TransposedWeight, matmul

CASES = {  # shapes of x and w, how many axes of w are outputs, einsum
    "dense": ((5, 4), (3, 4), 1, "ti,oi->to"),
    "into heads": ((5, 4), (2, 3, 4), 2, "ti,hni->thn"),
    "out of heads": ((5, 2, 3), (4, 2, 3), 1, "thv,dhv->td"),
    "one row": ((1, 4), (3, 4), 1, "ti,oi->to"),
    "one row into heads": ((1, 4), (2, 3, 4), 2, "ti,hni->thn"),
    "no rows": ((4,), (3, 4), 1, "i,oi->o"),
}


def _arrays(case, *, batch=None):
    x_shape, w_shape, _, _ = CASES[case]
    rng = np.random.default_rng(0)
    lead = () if batch is None else (batch,)
    x = rng.normal(size=(*lead, *x_shape)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.normal(size=w_shape).astype(np.float32))


def _close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def both(f, case):
    """A compiled `f(product)` for our product and for einsum: (ours, theirs)."""
    _, _, outputs, formula = CASES[case]
    products = (
        lambda x, w: matmul(x, w, outputs=outputs),
        lambda x, w: jnp.einsum(formula, x, w),
    )
    return jax.jit(lambda *args: tuple(f(product)(*args) for product in products))


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_einsum(case):
    x, w = _arrays(case)

    def values(product):
        def loss(x, w):
            y = product(x, w)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, (0, 1), has_aux=True)

    _close(*both(values, case)(x, w))


@pytest.mark.parametrize("case", ["into heads", "one row"])
def test_second_derivatives_equal_einsum(case):
    x, w = _arrays(case)
    hessian = both(lambda product: jax.hessian(lambda x, w: jnp.sum(jnp.sin(product(x, w)))), case)
    _close(*hessian(x, w))


@pytest.mark.parametrize("rows", [2, 65])
def test_few_rows_and_a_large_weight(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 700)).astype(np.float32)
    w = (rng.normal(size=(LARGE // 700 + 1, 700)) / 30).astype(np.float32)

    @jax.jit
    def values(x, w):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(matmul(x, w))), (0, 1))(x, w), matmul(x, w)

    (by_x, by_w), y = values(x, w)
    want = x @ w.T
    _close(y, want)
    _close((by_x, by_w), (np.cos(want) @ w, np.cos(want).T @ x))
    _close(jax.jit(jax.vmap(matmul, (0, None)))(x, w), want)


@pytest.mark.parametrize("case", CASES)
def test_transposed_weight_looks_and_multiplies_like_itself(case):
    x, w = _arrays(case, batch=6)
    _, _, outputs, formula = CASES[case]
    t = TransposedWeight(w, outputs=outputs)
    assert (t.shape, t.dtype) == (w.shape, w.dtype)
    np.testing.assert_array_equal(t[1:, ::2], w[1:, ::2])
    got = jax.jit(jax.vmap(lambda x: matmul(x, t, outputs=outputs)))(x)
    _close(got, np.stack([np.einsum(formula, a, w) for a in x]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axis", [0, 1])
def test_batch_is_more_rows_whichever_axis_it_is(case, axis):
    x, w = _arrays(case, batch=6)
    axis = min(axis, x.ndim - 1)
    x = jnp.asarray(np.moveaxis(x, 0, axis))

    def values(product):
        def loss(x, w):
            y = jax.vmap(product, (axis, None))(x, w)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, (0, 1), has_aux=True)

    _close(*both(values, case)(x, w))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_each_example_stay_apart(case):
    x, w = _arrays(case, batch=6)

    def each(product):
        of_weight = jax.grad(lambda w, x: jnp.sum(jnp.sin(product(x, w))))
        return lambda x, w: jax.vmap(of_weight, (None, 0))(w, x)

    _close(*both(each, case)(x, w))


def test_batch_of_weights():
    x, w = _arrays("into heads")
    ws = np.stack([w, 2 * w, -w])
    _close(*both(lambda product: jax.vmap(product, (None, 0)), "into heads")(x, ws))


def test_narrow_inputs_are_widened_to_the_weights():
    x, w = _arrays("dense")
    got = matmul(x.astype(jnp.bfloat16), w)
    assert got.dtype == jnp.float32
    _close(got, np.asarray(x.astype(jnp.bfloat16), np.float32) @ np.asarray(w).T)
