"""Asynchronous PPO: without lag it is PPO; with lag it is V-trace, computed here by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.agents.appo import APPO
from agalite.agents.base import evaluate_actions, from_sequences, make_batch
from agalite.agents.ppo import PPO
from returns_oracle import vtrace_oracle

NUM_STEPS, SEQ_LEN, NUM_ENVS = 48, 12, 4  # of the fixture `collected`


def after(agent, model, data, initial_states):
    """The weights and the losses after one update."""
    optimizer = agent.make_optimizer(10)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def learn(*args):
        return agent.learn(*args, SEQ_LEN, jax.random.key(7), jnp.float32(0.5))

    model, _, metrics = learn(model, optimizer, opt_state, data, initial_states)
    return eqx.filter(model, eqx.is_inexact_array), metrics


@pytest.mark.slow  # its sisters: with lag, below; without V-trace, test_agent_settings.py
@pytest.mark.parametrize(
    ("memory", "update_epochs", "num_minibatches"), [("gru", 1, 1), ("gtrxl", 2, 4)]
)
def test_without_lag_an_update_is_that_of_ppo(memory, update_epochs, num_minibatches, collected):
    model, _, _, data, initial_states, _ = collected(memory)
    settings = {
        "update_epochs": update_epochs,
        "num_minibatches": num_minibatches,
        "vf_clip_coef": 1.0,
        "clip_coef": 0.1,
        "learning_rate": 1e-3,
        "anneal_ent_coef": True,
    }
    weights, losses = after(APPO(**settings), model, data, initial_states)
    expected, expected_losses = after(PPO(**settings), model, data, initial_states)
    assert losses.keys() == expected_losses.keys()
    for name, value in expected_losses.items():
        np.testing.assert_allclose(losses[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    moved = 0.0
    for new, want, old in zip(
        jax.tree.leaves(weights),
        jax.tree.leaves(expected),
        jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)),
        strict=True,
    ):
        # Adam's first steps have the size of the learning rate however small the gradient is, so
        # that rounding decides the direction where the gradient is almost zero.
        close = np.isclose(new, want, atol=3e-5)
        assert close.mean() > 0.99, f"{1 - close.mean()} differ"
        moved = max(moved, float(jnp.abs(new - old).max()))
    assert moved > 5e-4


def test_with_lag_advantages_and_targets_are_those_of_vtrace(collected):
    """The learner's weights are not the actor's: every number from the definitions, in float64."""
    acted, _, _, data, initial_states, _ = collected("gru")
    model = jax.tree.map(lambda x: 1.1 * x if eqx.is_inexact_array(x) else x, acted)
    agent = APPO(gamma=0.97, gae_lambda=0.9, clip_rho=1.1, clip_c=0.9)
    parts = NUM_STEPS // SEQ_LEN
    batch = make_batch(data, initial_states, jnp.zeros_like(data.values), SEQ_LEN)

    @eqx.filter_jit
    def corrected(model):
        new = evaluate_actions(model, batch)
        return new, *agent._vtrace(new, batch, data, parts)

    new, advantages, targets = corrected(model)
    ratios = np.asarray(from_sequences(new.log_probs - batch.log_probs, parts))
    assert np.abs(ratios).max() > 0.05
    values = np.asarray(from_sequences(new.values, parts))
    ends = np.asarray(data.ends)
    following = np.concatenate([values[1:], np.asarray(data.next_values)[-1:]])
    next_values = np.where(ends, data.next_values, following)
    assert not np.allclose(next_values, data.next_values, atol=1e-3)
    for b in range(NUM_ENVS):
        want_targets, weighted = vtrace_oracle(
            ratios[:, b],
            np.asarray(data.rewards)[:, b],
            values[:, b],
            next_values[:, b],
            ends[:, b],
            0.97,
            0.9,
            1.1,
            0.9,
        )
        np.testing.assert_allclose(targets[:, b], want_targets, atol=1e-4)
        rho = np.minimum(1.1, np.exp(ratios[:, b].astype(float)))
        np.testing.assert_allclose(advantages[:, b], weighted / rho, atol=1e-4)


def test_a_policy_that_went_too_far_in_the_lag_is_not_pushed_further(collected):
    """Actions had a far lower probability when acting: every ratio is clipped, nothing moves.

    Rewards are such that every advantage is positive.
    """
    model, _, _, data, initial_states, _ = collected("gru")
    data = data._replace(
        log_probs=data.log_probs - 1.0,
        rewards=jnp.ones_like(data.rewards),
        ends=jnp.zeros_like(data.ends),
    )
    agent = APPO(norm_adv=False, ent_coef=0.0, vf_coef=0.0)
    weights, losses = after(agent, model, data, initial_states)
    assert float(losses["losses/clipfrac"]) == 1.0
    assert float(losses["losses/grad_norm"]) == 0.0
    for new, old in zip(
        jax.tree.leaves(weights),
        jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)),
        strict=True,
    ):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("name", ["clip_rho", "clip_c"])
def test_bad_clips_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0.0 must be a finite number > 0"):
        APPO(**{name: 0.0})
