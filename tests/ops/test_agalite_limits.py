"""AGaLiTe's approximation: folding, its limits as r grows, and random signs."""

import functools

import jax
import numpy as np
import pytest

import numpy_attention
from agalite.ops import agalite_attention
from agalite.ops.agalite import attend
from agalite.ops.delta import make_basis
from agalite.ops.features import EPSILON
from attention_cases import (
    KEY,
    OPS,
    H,
    V,
    agalite,
    assert_close,
    assert_state,
    assert_trees,
    cast,
    dense,
    expected,
    make,
    quick_jit,
)

# --- folding and limits ---------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["paper", "published"])
@pytest.mark.parametrize("r", range(1, 9))
def test_folding_changes_nothing(basis, r):
    op = agalite(basis, r)
    x, resets = make(op, 40, seed=r)
    run = quick_jit(functools.partial(op.run, method="sequential"))
    with jax.enable_x64(True):
        state, out = run(x, resets, None)
    states, want = expected(op, x, resets)
    assert state.values.shape == (H, r // 2 + 1, V)
    np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-10)
    assert_state(op, state, states, 1e-10)


@pytest.mark.parametrize("method", ["sequential", "associative", "chunked"])
@pytest.mark.parametrize(("basis", "r"), [("paper", 4), ("published", 3)])
def test_unfolded_is_algorithm_4_to_the_letter(basis, r, method):
    op = agalite(basis, r)
    x, resets = make(op, 40)
    unfolded = make_basis(basis, r, fold=False)
    with jax.enable_x64(True):
        run = quick_jit(lambda *a: attend(*a, basis=unfolded, method=method))
        state, out = jax.tree.map(np.asarray, run(*x, resets))
    states, want = expected(op, x, resets)
    np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-10)
    for h in range(H):
        assert_close(state.values[h], states[h][0], 1e-10)
        assert_close(state.keys[h], np.concatenate([states[h][1], states[h][2][None]]), 1e-10)


def test_at_r_1_the_papers_attention_ignores_the_query():
    """Findings 1.3: a_t = v~_t (s . q) / (s . q), a moving average of the values."""
    op = agalite("paper", 1)
    x, resets = make(op, 40)
    other = x._replace(q=make(op, 40, seed=8)[0].q)
    with jax.enable_x64(True):
        run = quick_jit(functools.partial(op.run, method="auto"))
        outs = [run(a, resets, None)[1] for a in (x, other)]
    average = np.zeros((40, H, V))
    for t in range(40):
        before = 0 if resets[t] or t == 0 else average[t - 1]
        average[t] = (1 - x.beta[t]) * before + x.beta[t] * x.v[t]
    lowest = min(np.abs(normaliser(a, resets)).min() for a in (x, other))
    assert lowest > 1e-3  # or EPSILON would be no small change
    for out in outs:
        assert (
            np.abs(np.asarray(out) - average).max()
            <= EPSILON / (2 * lowest) * np.abs(average).max()
        )
    slots = agalite("slots", 2)
    with jax.enable_x64(True):
        run = quick_jit(functools.partial(slots.run, method="auto"))
        a, b = (np.asarray(run(y, resets, None)[1]) for y in (x, other))
    assert np.abs(a - b).max() > 0.01  # where it does not ignore it


def normaliser(x, resets):
    """s_t . q_t (T, H)."""
    x = dense(x)
    s = numpy_attention.linear_recurrence(1 - x.gamma, x.gamma * x.k, None, resets)
    return np.einsum("thk,thk->th", s, x.q)


@pytest.mark.parametrize("method", ["sequential", "chunked"])
def test_slots_that_cover_the_stream_are_galite(method):
    steps = 12
    x, resets = make(OPS["galite"], steps, resets=0.1)
    _, galite = expected(OPS["galite"], x, resets)
    with jax.enable_x64(True):
        out, fewer = (
            np.asarray(
                quick_jit(functools.partial(agalite("slots", r).run, method=method))(
                    x, resets, None
                )[1]
            )
            for r in (steps, 5)
        )
    np.testing.assert_allclose(out, galite, rtol=1e-9, atol=1e-12)
    assert np.abs(fewer - galite).max() > 1e-3


def test_the_papers_limit_is_a_quarter_of_galite():
    """Findings 1.5: for r > 2 T delta^ is delta + 2/r, but a_t divides by 2r, not r/2."""
    r, steps = 128, 40
    op = agalite("paper", r)
    x, resets = make(op, steps)
    with jax.enable_x64(True):
        _, out = quick_jit(functools.partial(op.run, method="auto"))(x, resets, None)
    _, galite = expected(OPS["galite"], x, resets)
    mean = numpy_attention.linear_recurrence(1 - x.beta, x.beta * x.v, None, resets)  # v~^0
    want = galite + 2 / r * mean
    error = 4 * np.asarray(out) - want
    assert np.abs(error).max() <= 2 * EPSILON / normaliser(x, resets).min() * np.abs(want).max()


# --- rank1 ----------------------------------------------------------------------------------------


def test_rank1_needs_a_key_and_keeps_it():
    x, _ = cast(make(OPS["rank1"], 5), np.float32)
    with pytest.raises(ValueError, match=r"rank1.*key"):
        agalite_attention(*x, basis="rank1", r=2)
    run = jax.jit(lambda key: agalite_attention(*x, basis="rank1", r=2, key=key))
    typed, raw = run(jax.random.key(5)), run(jax.random.PRNGKey(5))
    assert_trees(typed, raw, 0)
    np.testing.assert_array_equal(typed[0].signs, KEY)
    _, other = run(jax.random.key(6))
    assert np.abs(np.asarray(other) - np.asarray(typed[1])).max() > 1e-3


def test_rank1_is_galite_on_average():
    x, resets = cast(make(OPS["rank1"], 6, resets=0), np.float32)
    keys = np.random.default_rng(0).integers(2**32, size=(1500, 2), dtype=np.uint32)
    run = jax.jit(jax.vmap(lambda key: agalite_attention(*x, r=4, basis="rank1", key=key)[1]))
    outs = np.asarray(run(keys), np.float64)
    _, galite = expected(OPS["galite"], x, resets)
    standard_error = outs.std(0) / np.sqrt(len(outs))
    assert (np.abs(outs.mean(0) - galite) < 6 * standard_error + 1e-5).all()
    assert standard_error.max() < 0.05 * np.abs(galite).max()
