"""GAE, lambda-returns and V-trace against sums written out in float64, straight from the papers."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from agalite.agents.returns import gae, lambda_returns, vtrace
from returns_oracle import lambda_oracle, vtrace_oracle

T = 9
NUMBERS = st.floats(-10, 10, width=32)
SHARE = st.floats(0, 1, width=32)
CLIPS = {"clip_rho": 1.3, "clip_c": 0.9}


@st.composite
def streams(draw):
    """Rewards, values and ends; next values as a trainer makes them."""

    def numbers(count):
        return np.array(draw(st.lists(NUMBERS, min_size=count, max_size=count)), np.float32)

    def flags():
        return np.array(draw(st.lists(st.booleans(), min_size=T, max_size=T)))

    rewards, values, finals, log_ratios = numbers(T), numbers(T + 1), numbers(T), numbers(T) / 5
    terminated, truncated = flags(), flags()
    next_values = np.where(truncated, finals, values[1:])
    next_values = np.where(terminated, np.float32(0), next_values)
    return rewards, values[:-1], next_values, terminated | truncated, log_ratios


@jax.jit
def _all(rewards, values, next_values, ends, log_ratios, gamma, gae_lambda):
    share = {"gamma": gamma, "gae_lambda": gae_lambda}
    return {
        "gae": gae(rewards, values, next_values, ends, **share),
        "returns": lambda_returns(rewards, next_values, ends, **share),
        "vtrace": vtrace(log_ratios, rewards, values, next_values, ends, **share, **CLIPS),
        "on-policy": vtrace(0 * log_ratios, rewards, values, next_values, ends, **share),
    }


def _close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(streams(), SHARE, SHARE)
def test_equal_the_sums_written_out(stream, gamma, gae_lambda):
    rewards, values, next_values, ends, log_ratios = stream
    got = _all(*stream, gamma, gae_lambda)
    returns = lambda_oracle(rewards, next_values, ends, gamma, gae_lambda)
    _close(got["returns"], returns)
    _close(got["gae"], returns - values)
    targets = vtrace_oracle(
        log_ratios, rewards, values, next_values, ends, gamma, gae_lambda, *CLIPS.values()
    )
    _close(got["vtrace"][0], targets[0])
    _close(got["vtrace"][1], targets[1])
    _close(got["on-policy"][0], returns)
    _close(got["on-policy"][1], returns - values)


def _batch():
    rng = np.random.default_rng(0)
    numbers = [jnp.asarray(rng.normal(size=(T, 3)), jnp.float32) for _ in range(4)]
    return *numbers[:3], jnp.asarray(rng.random((T, 3)) < 0.3), numbers[3], 0.97, 0.9


def test_a_batch_in_one_call_equals_vmap():
    args = _batch()
    apart = jax.vmap(_all, (1,) * 5 + (None, None), 1)(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), apart, _all(*args)
    )


def test_an_end_cuts_off_all_that_follows():
    rewards, values, next_values, _, log_ratios, *share = _batch()
    ends = jnp.zeros((T, 3), bool).at[4].set(True)
    before = _all(rewards, values, next_values, ends, log_ratios, *share)
    changed = (x.at[5:].add(100.0) for x in (rewards, values, next_values))
    after = _all(*changed, ends, log_ratios, *share)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:5], b[:5]), before, after)
    assert not np.allclose(before["gae"][5:], after["gae"][5:])


def test_termination_and_truncation_differ_by_the_final_value():
    one, true = jnp.ones(1), jnp.ones(1, bool)
    kept = {"gamma": 0.5, "gae_lambda": 0.9}
    np.testing.assert_allclose(lambda_returns(one, 0 * one, true, **kept), [1.0])
    np.testing.assert_allclose(lambda_returns(one, 4 * one, true, **kept), [3.0])
    np.testing.assert_allclose(gae(one, 2 * one, 4 * one, true, **kept), [1.0])


def test_extreme_ratios_stay_finite():
    rewards, values, next_values, ends, *_ = _batch()
    log_ratios = jnp.full((T, 3), 1e30).at[::2].set(-1e30)
    out = vtrace(log_ratios, rewards, values, next_values, ends, gamma=0.99)
    assert all(np.isfinite(x).all() for x in out)


def test_targets_pass_no_gradient_on():
    rewards, values, next_values, ends, log_ratios, *share = _batch()

    def total(*numbers):
        parts = _all(*numbers[:3], ends, numbers[3], *share)
        return sum(x.sum() for x in jax.tree.leaves(parts))

    gradients = jax.grad(total, (0, 1, 2, 3))(rewards, values, next_values, log_ratios)
    assert all(np.all(g == 0) for g in gradients)


def test_bad_arguments_are_named():
    x, ends = jnp.ones(4), jnp.zeros(4, bool)
    share = {"gamma": 0.9, "gae_lambda": 0.9}
    with pytest.raises(ValueError, match=r"values has shape \(3,\); expected \(4,\)"):
        gae(x, x[:3], x, ends, **share)
    with pytest.raises(ValueError, match=r"ends has shape \(5,\); expected \(4,\)"):
        lambda_returns(x, x, jnp.zeros(5, bool), **share)
    with pytest.raises(ValueError, match="ends has dtype float32"):
        lambda_returns(x, x, x, **share)
    with pytest.raises(ValueError, match=r"rewards has shape \(\)"):
        lambda_returns(x[0], x[0], ends[0], **share)
    with pytest.raises(ValueError, match="rewards has length 0"):
        lambda_returns(x[:0], x[:0], ends[:0], **share)
    with pytest.raises(ValueError, match=r"gamma=1.1 must be"):
        gae(x, x, x, ends, gamma=1.1, gae_lambda=0.9)
    with pytest.raises(ValueError, match="gae_lambda=nan must be"):
        gae(x, x, x, ends, gamma=0.9, gae_lambda=math.nan)
    for name in ("clip_rho", "clip_c"):
        with pytest.raises(ValueError, match=f"{name}=0 must be"):
            vtrace(x, x, x, x, ends, **share, **{name: 0})
