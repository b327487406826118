"""Softmax attention and Transformer-XL's against the loops of numpy_attention.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpy_attention
from agalite.ops import softmax_attention, xl_attention
from attention_cases import H, V, assert_close, assert_finite, cast


@pytest.mark.parametrize(
    # 1,100 steps are as many blocks as there can be.
    ("steps", "window"),
    [(1, None), (9, 0), (9, 3), (70, None), (130, 5), (130, 500), (1100, 20)],
)
def test_softmax_equals_numpy(steps, window):
    rng = np.random.default_rng(steps)
    q, k, v = 2 * rng.normal(size=(3, steps, H, V))
    resets = rng.uniform(size=steps) < 0.03
    run = jax.jit(functools.partial(softmax_attention, window=window))
    single = [a.astype(np.float32) for a in (q, k, v)]
    with jax.enable_x64(True):
        out = run(q, k, v, resets)
    _, want = numpy_attention.per_head(
        numpy_attention.softmax_attention, q, k, v, resets, window=window
    )
    assert_close(out, want, 1e-9)
    if steps < 100:
        _, want = numpy_attention.per_head(
            numpy_attention.softmax_attention, *single, resets, window=window
        )
        assert_close(run(*single, resets), want, 1e-5)


def xl_inputs(steps, before, longest, seed=0):
    rng = np.random.default_rng([seed, steps, before, longest])
    q = rng.normal(size=(steps, H, V))
    k, v = rng.normal(size=(2, before + steps, H, V))
    relative = rng.normal(size=(longest + 1, H, V))
    u, w = rng.normal(size=(2, H, V))
    begin, starts = 0 if before == 0 else int(rng.integers(0, before)), []
    for t in range(steps):
        begin = before + t if rng.uniform() < 0.05 else begin
        starts.append(begin)
    return q, k, v, relative, u, w, np.array(starts, np.int32)


@pytest.mark.parametrize(
    ("steps", "before", "longest"),
    [(1, 0, 0), (1, 4, 4), (9, 4, 4), (9, 2, 4), (9, 30, 4), (70, 64, 64), (130, 8, 8), (5, 0, 40)],
)
def test_xl_equals_numpy(steps, before, longest):
    inputs = xl_inputs(steps, before, longest)
    want = numpy_attention.xl_attention(*inputs)
    run = jax.jit(xl_attention)
    with jax.enable_x64(True):
        assert_close(run(*inputs), want, 1e-9)
    assert_close(run(*(cast(a, np.float32) for a in inputs)), want, 1e-5)


def test_xl_chunking_is_a_sliding_window():
    """Two halves, the second with the first's last M keys before it, are the whole."""
    q, k, v, relative, u, w, starts = cast(xl_inputs(20, 0, 6), np.float32)
    run = jax.jit(xl_attention)
    whole = run(q, k, v, relative, u, w, starts)
    first = run(q[:9], k[:9], v[:9], relative, u, w, starts[:9])
    second = run(q[9:], k[3:], v[3:], relative, u, w, np.maximum(starts[9:] - 3, 0))
    assert_close(np.concatenate([first, second]), whole, 1e-5)


@pytest.mark.parametrize("which", ["softmax", "xl"])
def test_windowed_gradient_is_numpys_slope(which):
    rng = np.random.default_rng(4)
    *inputs, starts = xl_inputs(70, 0 if which == "softmax" else 6, 5)
    weights = rng.normal(size=inputs[0].shape)
    if which == "softmax":
        resets = rng.uniform(size=70) < 0.05
        inputs = inputs[:3]

        def run(*a):
            return softmax_attention(*a, resets, window=5)

        def reference(*a):
            return numpy_attention.per_head(
                numpy_attention.softmax_attention, *a, resets, window=5
            )[1]
    else:

        def run(*a):
            return xl_attention(*a, starts)

        def reference(*a):
            return numpy_attention.xl_attention(*a, starts)

    with jax.enable_x64(True):
        slopes = jax.jit(jax.grad(lambda a: jnp.vdot(run(*a), weights)))(tuple(inputs))
    direction = [rng.normal(size=a.shape) for a in inputs]
    up, down = (
        np.vdot(reference(*(a + s * d for a, d in zip(inputs, direction, strict=True))), weights)
        for s in (1e-6, -1e-6)
    )
    found = [np.vdot(g, d) for g, d in zip(slopes, direction, strict=True)]
    assert abs(sum(found) - (up - down) / 2e-6) < 1e-6 * np.abs(found).max()
    assert_finite(slopes)


def test_softmax_of_enormous_scores_is_finite():
    q = np.full((9, H, V), 1e15, np.float32)
    v = np.random.default_rng(0).normal(size=q.shape).astype(np.float32)
    # Compiled, a score may be computed twice, and rounded in two ways.
    both = jax.jit(jax.value_and_grad(lambda a: softmax_attention(a, a, v).sum()))
    assert_finite(both(q))
    assert_finite(both(q * np.random.default_rng(1).normal(size=q.shape).astype(q.dtype)))
