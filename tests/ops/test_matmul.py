"""The models' one matrix product, against einsum, whatever is batched and differentiated."""

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
    x_shape, w_shape, outputs, formula = CASES[case]
    rng = np.random.default_rng(0)
    lead = () if batch is None else (batch,)
    x = jnp.asarray(rng.normal(size=(*lead, *x_shape)), jnp.float32)
    w = jnp.asarray(rng.normal(size=w_shape), jnp.float32)
    return x, w, outputs, formula


def _close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_einsum(case):
    x, w, outputs, formula = _arrays(case)

    def ours(x, w):
        return jnp.sum(jnp.sin(matmul(x, w, outputs=outputs)))

    def theirs(x, w):
        return jnp.sum(jnp.sin(jnp.einsum(formula, x, w)))

    _close(matmul(x, w, outputs=outputs), jnp.einsum(formula, x, w))
    _close(jax.jit(jax.grad(ours, (0, 1)))(x, w), jax.grad(theirs, (0, 1))(x, w))
    _close(jax.hessian(ours)(x, w), jax.hessian(theirs)(x, w))


@pytest.mark.parametrize("rows", [2, 64, 65])
def test_few_rows_and_a_large_weight(rows):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 700)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(LARGE // 700 + 1, 700)) / 30, jnp.float32)

    def value(f):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(x, w)

    _close(matmul(x, w), x @ w.T)
    _close(jax.vmap(lambda x: matmul(x, w))(x), x @ w.T)
    _close(value(matmul), value(lambda x, w: x @ w.T))


@pytest.mark.parametrize("case", CASES)
def test_a_turned_weight_looks_and_multiplies_like_itself(case):
    x, w, outputs, formula = _arrays(case, batch=6)
    t = TransposedWeight(w, outputs=outputs)
    assert (t.shape, t.dtype) == (w.shape, w.dtype)
    np.testing.assert_array_equal(t[1:, ::2], w[1:, ::2])
    got = jax.vmap(lambda x: matmul(x, t, outputs=outputs))(x)
    _close(got, jax.vmap(lambda x: jnp.einsum(formula, x, w))(x))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_is_more_rows_wherever_it_lies(case, axis):
    x, w, outputs, formula = _arrays(case, batch=6)
    x = jnp.moveaxis(x, 0, min(axis, x.ndim - 1))
    axis = min(axis, x.ndim - 1)

    def loss(f):
        def of(w, x):
            y = jax.vmap(f, (axis, None), 0)(x, w)
            return jnp.sum(jnp.sin(y))

        return of

    ours, theirs = (
        loss(f)
        for f in (
            lambda x, w: matmul(x, w, outputs=outputs),
            lambda x, w: jnp.einsum(formula, x, w),
        )
    )
    _close(ours(w, x), theirs(w, x))
    _close(jax.grad(ours, (0, 1))(w, x), jax.grad(theirs, (0, 1))(w, x))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_each_example_stay_apart(case):
    x, w, outputs, formula = _arrays(case, batch=6)

    def each(f):
        return jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.sin(f(x, w)))), (None, 0))(w, x)

    got = each(lambda x, w: matmul(x, w, outputs=outputs))
    _close(got, each(lambda x, w: jnp.einsum(formula, x, w)))


def test_a_batch_of_weights():
    x, w, outputs, formula = _arrays("into heads")
    ws = jnp.stack([w, 2 * w, -w])
    got = jax.vmap(lambda w: matmul(x, w, outputs=outputs))(ws)
    _close(got, jax.vmap(lambda w: jnp.einsum(formula, x, w))(ws))


def test_narrow_inputs_are_widened_to_the_weights():
    x, w, _, formula = _arrays("dense")
    got = matmul(x.astype(jnp.bfloat16), w)
    assert got.dtype == jnp.float32
    _close(got, jnp.einsum(formula, x.astype(jnp.bfloat16).astype(jnp.float32), w))
