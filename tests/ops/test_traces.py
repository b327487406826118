"""Traces of diagonal recurrences, against the derivative of the unrolled recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.ops.features import Outer
from agalite.ops.traces import (
    RowTrace,
    Slopes,
    advance,
    agalite_trace,
    empty_agalite_trace,
    empty_trace,
    previous_states,
    with_past,
)

T, N, D = 9, 4, 3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem(seed=0):
    """Rows of a gate and a content, their constants, inputs and resets."""
    rng = np.random.default_rng(seed)
    rows = {
        name: RowTrace(jnp.asarray(rng.normal(size=(D, N))), jnp.asarray(rng.normal(size=N)))
        for name in ("gate", "content")
    }
    resets = jnp.asarray(np.arange(T) == 3) if seed else jnp.zeros(T, bool)
    return rows, jnp.asarray(rng.normal(size=(T, D))), resets


def activations(rows, xs):
    z = {name: xs @ row.weight + row.bias for name, row in rows.items()}
    return jax.nn.sigmoid(z["gate"]), jnp.tanh(z["content"])


def last_state(rows, xs, resets):
    """h_t = (1 - g_t) h_{t-1} + g_t u_t, step by step."""
    h = jnp.zeros(N)
    for g, u, reset in zip(*activations(rows, xs), resets, strict=True):
        h = (1 - g) * jnp.where(reset, 0, h) + g * u
    return h


def advanced(rows, xs, resets, lengths):
    trace = {name: empty_trace((N,), D, jnp.float64) for name in rows}
    h, at = jnp.zeros(N), 0
    for length in lengths:
        part = slice(at, at + length)
        g, u = activations(rows, xs[part])
        before = previous_states(1 - g, g * u, h, resets[part])
        derivatives = {"gate": (u - before) * g * (1 - g), "content": g * (1 - u**2)}
        trace = advance(trace, 1 - g, derivatives, xs[part], resets[part])
        h, at = before[-1] * (1 - g[-1]) + (g * u)[-1], at + length
    return h, trace


@pytest.mark.parametrize("seed", [0, 1])
def test_a_trace_is_the_derivative_of_the_state(seed):
    rows, xs, resets = problem(seed)
    expected = jax.jacrev(last_state)(rows, xs, resets)
    for lengths in ((T,), (1,) * T, (2, 1, 6)):
        h, trace = advanced(rows, xs, resets, lengths)
        np.testing.assert_allclose(h, last_state(rows, xs, resets), rtol=1e-12)
        for name in rows:
            # (N, D, N) and (N, N): an element has rows of its own, so only the diagonal counts.
            weight = jnp.einsum("ndn->dn", expected[name].weight)
            bias = jnp.diagonal(expected[name].bias)
            np.testing.assert_allclose(trace[name].weight, weight, atol=1e-14)
            np.testing.assert_allclose(trace[name].bias, bias, atol=1e-14)


def test_the_form_with_several_rows_for_each_element():
    """decay (T, N, 1), derivatives (T, N, P): the same numbers as with a name for each row."""
    rows, xs, resets = problem(1)
    _, named = advanced(rows, xs, resets, (T,))
    g, u = activations(rows, xs)
    before = previous_states(1 - g, g * u, jnp.zeros(N), resets)
    derivatives = jnp.stack([(u - before) * g * (1 - g), g * (1 - u**2)], axis=-1)
    start = empty_trace((N, 2), D, jnp.float64)
    found = advance(start, (1 - g)[..., None], derivatives, xs, resets)
    for p, name in enumerate(("gate", "content")):
        np.testing.assert_allclose(found.weight[..., p], named[name].weight, atol=1e-14)
        np.testing.assert_allclose(found.bias[..., p], named[name].bias, atol=1e-14)


def test_decays_of_zero_and_one_are_exact():
    decay = jnp.asarray([[0.0, 1.0]] * 3)
    trace = RowTrace(jnp.full((1, 2), 7.0), jnp.full(2, 7.0))
    found = advance(trace, decay, jnp.ones((3, 2)), jnp.full((3, 1), 2.0), jnp.zeros(3, bool))
    np.testing.assert_array_equal(found.weight, [[2.0, 13.0]])
    np.testing.assert_array_equal(found.bias, [1.0, 10.0])


def test_a_gradient_reaches_the_past_of_a_complex_state():
    """h_t = a h_{t-1} + (w . x_t) with a complex decay: only the imaginary part is read."""
    a = jnp.asarray([0.9 * jnp.exp(1j), 0.5 * jnp.exp(2j)])
    _, xs, resets = problem()
    w = jnp.asarray(np.random.default_rng(2).normal(size=(D, 2)))

    def full(w):
        h = jnp.zeros(2, jnp.complex128)
        for x in xs:
            h = a * h + x @ w
        return jnp.sum(jnp.imag(h) ** 2), h

    expected, h = jax.grad(full, has_aux=True)(w)
    trace = advance(
        empty_trace((2,), D, jnp.complex128),
        jnp.broadcast_to(a, (T, 2)),
        jnp.ones((T, 2), jnp.complex128),
        xs.astype(jnp.complex128),
        resets,
    )

    def traced(w):
        h_0 = with_past(h, RowTrace(w, jnp.zeros(2)), trace)
        return jnp.sum(jnp.imag(h_0) ** 2)

    np.testing.assert_allclose(jax.grad(traced)(w), expected, rtol=1e-12)


# Widths: less than a vector, several blocks, and a block that is not full; with decays that vanish.
@pytest.mark.parametrize(
    ("narrow", "wide", "head", "steps", "push"),
    [(2, 3, 5, 7, 0.0), (3, 40, 33, 5, 0.0), (1, 16, 16, 40, 9.0)],
)
def test_the_kernel_computes_the_same(narrow, wide, head, steps, push):
    if kernels.why_not(bits=64) is not None:
        pytest.skip("there are no kernels here")
    rng = np.random.default_rng(0)
    heads, key_vectors, vectors, width, batch = 2, 2, 1, 5, 3
    widths = (wide, wide, head, head, wide, narrow, narrow, narrow)
    columns = jnp.asarray(rng.normal(size=(batch, steps, heads, sum(widths))))
    _, k, v, beta, gamma, p1, _, p3 = jnp.split(columns + push, np.cumsum(widths)[:-1], axis=-1)
    inputs = jnp.asarray(rng.normal(size=(batch, steps, width)))
    resets = jnp.asarray(rng.random((batch, steps)) < 0.2)
    cosines = jnp.asarray(rng.normal(size=(batch, steps, key_vectors)))
    shapes = (heads, key_vectors, narrow, wide), (heads, vectors, head)
    keys, values = (jnp.asarray(rng.normal(size=(batch, *s))) for s in shapes)
    names = ("p1", "k", "p3", "gamma", "v", "beta")
    empty = empty_agalite_trace(*shapes, names, width, jnp.float64)
    trace = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(batch, *x.shape))), empty)

    def run(trace, keys, values, k, v, beta, gamma, p1, p3, cosines, inputs, resets, columns):
        k = Outer(jax.nn.relu(p1), jax.nn.relu(k))
        slopes = Slopes(*((x > 0).astype(x.dtype) for x in k))
        gamma = Outer(jax.nn.sigmoid(p3), jax.nn.sigmoid(gamma))
        args = (trace, keys, values, k, slopes, gamma, v, jax.nn.sigmoid(beta))
        return agalite_trace(*args, cosines, inputs, resets, columns=columns)

    args = (trace, keys, values, k, v, beta, gamma, p1, p3, cosines, inputs, resets)
    found = jax.jit(jax.vmap(run))(*args, columns + push)
    expected = jax.jit(jax.vmap(lambda *args: run(*args, None)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), found, expected)
