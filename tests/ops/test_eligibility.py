"""Eligibility traces: the kernels and XLA give what NumPy gives."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.ops.eligibility import LANES, accumulate, group_bounds, join, move, split

SHAPES = [[(3, 50), (7,)], [(40,), (2, 3, 5)]]
BATCH = 2


def arrays(key, batch=()):
    keys = iter(jax.random.split(key, 4))
    return [[jax.random.normal(next(keys), (*batch, *s)) for s in group] for group in SHAPES]


def test_split_is_the_inverse_of_join():
    weights = arrays(jax.random.key(0))
    joined = join(weights)
    assert joined.shape == (group_bounds([157, 70])[-1][1],) == (3 * LANES,)
    for group, back in zip(weights, split(joined, weights), strict=True):
        for a, b in zip(group, back, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("custom", [True, False], ids=["kernels", "xla"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("absolute", [False, True])
def test_steps_of_a_trace(custom, groups, absolute):
    if custom and kernels.why_not(bits=64) is not None:
        pytest.skip("no custom kernels here")
    with jax.enable_x64(True), contextlib.ExitStack() as stack:
        if not custom:
            stack.enter_context(kernels.switched_off())
        gradients = arrays(jax.random.key(1), (BATCH,))[:groups]
        weights = arrays(jax.random.key(2))[:groups]
        old = jnp.array(join(arrays(jax.random.key(3), (BATCH,))[:groups], (BATCH,)))
        decay = jnp.array([0.9, 0.0])
        step = jax.jit(lambda *args: accumulate(*args, absolute=absolute))
        z, norms = step(old, decay, gradients)
        g = np.asarray(join(gradients, (BATCH,)))
        expected = np.asarray(decay)[:, None] * np.asarray(old) + g
        np.testing.assert_allclose(z, expected, rtol=1e-12)
        size = np.abs if absolute else np.square
        scales = jnp.array([[0.5, -2.0], [3.0, 0.25]])[:, :groups]
        moved = jax.jit(move)(weights, z, scales)
        changes = split(jnp.asarray(expected), weights)
        for i, (a, b) in enumerate(group_bounds([157, 70])[:groups]):
            np.testing.assert_allclose(norms.square[:, i], np.square(g[:, a:b]).sum(-1), rtol=1e-12)
            np.testing.assert_allclose(
                norms.length[:, i], size(expected[:, a:b]).sum(-1), rtol=1e-12
            )
            for new, w, z_ in zip(moved[i], weights[i], changes[i], strict=True):
                change = np.tensordot(np.asarray(scales)[:, i], np.asarray(z_), 1)
                np.testing.assert_allclose(new, w + change, rtol=1e-12)


def test_an_infinite_trace_is_forgotten():
    gradients = arrays(jax.random.key(1), (BATCH,))
    old = jnp.full((BATCH, 3 * LANES), jnp.inf)
    z, norms = jax.jit(accumulate)(old, jnp.zeros(BATCH), gradients)
    np.testing.assert_array_equal(z, join(gradients, (BATCH,)))
    assert np.isfinite(norms.length).all()
