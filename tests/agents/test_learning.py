"""A2C and PPO: batches of sequences, losses, and what an update does."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.agents.a2c import A2C
from agalite.agents.base import (
    Evaluation,
    advance_traces,
    evaluate_actions,
    from_sequences,
    make_batch,
    to_sequences,
)
from agalite.agents.ppo import PPO


@pytest.mark.parametrize(
    "memory", ["agalite", pytest.param("gtrxl", marks=pytest.mark.slow), "gru"]
)
def test_before_an_update_the_learner_computes_what_the_actor_did(memory, collected):
    model, _, _, data, initial_states, _ = collected(memory)
    assert data.ends.any()
    batch = make_batch(data, initial_states, jnp.zeros_like(data.values), 12)
    new = eqx.filter_jit(evaluate_actions)(model, batch)
    np.testing.assert_allclose(jnp.exp(new.log_probs - batch.log_probs), 1, atol=2e-5)
    np.testing.assert_allclose(new.values, batch.values, atol=2e-5)


def test_sequences_keep_their_steps_and_environments(collected):
    _, _, _, data, initial_states, _ = collected("gru")
    batch = make_batch(data, initial_states, data.values, 12)
    assert batch.obs.shape == (12, 16, 16)
    for part in range(4):
        for env in range(4):
            np.testing.assert_array_equal(
                batch.log_probs[:, part * 4 + env],
                data.log_probs[part * 12 : (part + 1) * 12, env],
            )
    np.testing.assert_array_equal(batch.initial_states[0][5], initial_states[0][1, 1])
    again = from_sequences(to_sequences(data.log_probs, 4), 4)
    np.testing.assert_array_equal(again, data.log_probs)


def test_an_update_makes_rewarded_actions_more_likely(collected):
    agent = PPO(update_epochs=2, num_minibatches=4)
    model, _, _, data, initial_states, _ = collected("gru")
    # As if action 3, and nothing else, were rewarded.
    data = data._replace(
        rewards=jnp.where(data.actions == 3, 1.0, 0.0),
        next_values=jnp.zeros_like(data.values),
        values=jnp.zeros_like(data.values),
        ends=jnp.ones_like(data.ends),
    )
    optimizer = agent.make_optimizer(10)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def learn(model, opt_state, key):
        return agent.learn(model, optimizer, opt_state, data, initial_states, 12, key, jnp.ones(()))

    @eqx.filter_jit
    def probability(model):
        batch = make_batch(data, initial_states, data.values, 12)
        right = batch._replace(actions=jnp.full_like(batch.actions, 3))
        return jnp.exp(evaluate_actions(model, right).log_probs).mean()

    before = float(probability(model))
    for i in range(5):
        model, opt_state, metrics = learn(model, opt_state, jax.random.key(i))
    assert float(probability(model)) > before
    assert all(np.isfinite(float(x)) for x in metrics.values())


def test_ppo_with_one_gradient_step_and_no_clipping_is_a2c(collected):
    model, _, _, data, initial_states, _ = collected("gru")
    ppo = PPO(
        update_epochs=1,
        num_minibatches=1,
        norm_adv=False,
        learning_rate=1e-3,
        ent_coef=0.01,
        max_grad_norm=0.5,
        gae_lambda=0.9,
        clip_coef=100.0,
    )
    a2c = A2C(learning_rate=1e-3, ent_coef=0.01, gae_lambda=0.9)
    new = []
    for agent in (ppo, a2c):
        optimizer = agent.make_optimizer(10)
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        learn = eqx.filter_jit(agent.learn)
        args = (data, initial_states, 12, jax.random.key(0), jnp.ones(()))
        new.append(learn(model, optimizer, opt_state, *args)[0])
    for a, b in zip(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in new), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_a_value_clip_stops_the_gradient_of_the_critic(collected):
    _, _, _, data, initial_states, _ = collected("gru")
    batch = make_batch(data, initial_states, data.values, 12)
    far = batch._replace(values=batch.values - 10, targets=batch.values + 100)

    def gradient(agent):
        def loss(values):
            new = Evaluation(batch.log_probs, jnp.zeros_like(values), values)
            return agent._clipped_loss(new, far, jnp.zeros(()), agent.clip_coef, 1.0)[0]

        return jax.jit(jax.grad(loss))(batch.values)

    assert float(jnp.abs(gradient(PPO())).max()) > 0
    assert float(jnp.abs(gradient(PPO(vf_clip_coef=0.1))).max()) == 0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (A2C, {"learning_rate": 0.0}, "learning_rate=0.0 must be a finite number > 0"),
        (A2C, {"gamma": 1.5}, "gamma=1.5 must be a finite number >= 0 and <= 1"),
        (A2C, {"ent_coef": -1}, "ent_coef=-1"),
        (PPO, {"update_epochs": 0}, "update_epochs=0"),
        (PPO, {"num_minibatches": 1.5}, "num_minibatches=1.5"),
        (PPO, {"clip_coef": float("nan")}, "clip_coef=nan"),
        (PPO, {"vf_clip_coef": 0}, "vf_clip_coef=0"),
    ],
)
def test_bad_values_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_short_sequences_with_traces_have_the_gradient_of_whole_rollouts(collected):
    """One layer, the weights that acted: what the recurrence reads its input with is exact."""
    model, _, _, data, initial_states, _ = collected("agalite")
    assert data.resets[1:].any()
    agent = A2C()

    def own(batch):
        def loss(model):
            return agent.loss(model, batch, jnp.float32(0.01))[0]

        attention = eqx.filter_grad(loss)(model).memory.blocks[0].attention
        return attention.project.inputs.weight, attention.project.bias, attention.norm.scale

    @jax.jit
    def gradients(data, initial_states):
        trace = model.initial_trace(data.resets.shape[1])
        traces, _ = advance_traces(model, trace, data, initial_states, 12)
        first = jax.tree.map(lambda x: x[:1], initial_states)
        advantages = jnp.cos(jnp.arange(48.0))[:, None] * jnp.ones_like(data.values)
        whole = own(make_batch(data, first, advantages, 48))
        return whole, *(
            own(make_batch(data, initial_states, advantages, 12, t)) for t in (traces, None)
        )

    whole, traced, truncated = gradients(data, initial_states)
    for a, b, c in zip(whole, traced, truncated, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-4 * np.abs(a).max())
        assert np.abs(c - a).max() > 5e-3 * np.abs(a).max()
