"""The settings of the network: gains, activation, previous inputs, statistics, critic."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from agalite.bench.programs import equations
from agalite.memory import make_memory
from agalite.networks.actor_critic import ActorCritic, Inputs
from agalite.networks.normalisation import RunningStatistics
from agalite.ops.matmul import precision

VECTOR = Box(-1.0, 1.0, (5,), np.float32)
GRU = {"d_model": 6, "hidden_size": 7}


def make(actions=None, **options):
    return ActorCritic.make(
        VECTOR,
        actions or Discrete(3),
        memory="gru",
        memory_options=GRU,
        hidden_size=10,
        key=jax.random.key(0),
        **options,
    )


def test_gains_scale_the_layers():
    model = make(hidden_gain=2.0, actor_gain=0.5, critic_gain=3.0)

    def gains(weight):
        return np.linalg.svd(np.asarray(weight), compute_uv=False)

    np.testing.assert_allclose(gains(model.hidden.weight[:10]), 2.0, rtol=1e-5)
    np.testing.assert_allclose(gains(model.actor.linear.weight), 0.5, rtol=1e-5)
    np.testing.assert_allclose(gains(model.critic.weight), 3.0, rtol=1e-5)


def test_activation_of_the_heads():
    features = np.random.default_rng(0).normal(size=(1, 7)).astype(np.float32)
    values = {}
    for name, function in (("tanh", np.tanh), ("relu", lambda x: np.maximum(x, 0))):
        model = make(activation=name)
        hidden = function(features @ np.asarray(model.hidden.weight).T)[:, 10:]
        values[name] = hidden @ np.asarray(model.critic.weight)[0]
        np.testing.assert_allclose(model._heads(features)[1], values[name], rtol=1e-4)
    assert values["tanh"] != values["relu"]
    with pytest.raises(ValueError, match="activation='gelu' is unknown"):
        make(activation="gelu")


@pytest.mark.parametrize(
    ("actions", "taken", "encoded"),
    [
        (Discrete(3, start=2), 1, [0, 1, 0]),
        (MultiDiscrete([2, 3]), [1, 0], [0, 1, 1, 0, 0]),
        (Box(-2.0, 2.0, (2,), np.float32), [0.5, -3.0], [0.5, -1.0]),
    ],
    ids=["discrete", "multidiscrete", "box"],
)
def test_previous_action_and_reward_are_inputs_that_a_reset_clears(actions, taken, encoded):
    model = make(actions, previous_action=True, previous_reward=True)
    obs = jnp.ones(5)
    inputs = model.inputs(obs, jnp.asarray(taken), jnp.float32(0.25))
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], inputs)
    read, cleared = (model.encode(batch, jnp.array([r]))[0] for r in (False, True))
    np.testing.assert_allclose(read, [1] * 5 + encoded + [0.25])
    np.testing.assert_allclose(cleared, [1] * 5 + [0] * (len(encoded) + 1))
    # Before an episode's first observation there is neither.
    first = jax.tree.map(jnp.zeros_like, inputs._replace(obs=None))
    assert eqx.tree_equal(model.inputs(obs)._replace(obs=None), first)


def test_a_sequence_with_previous_actions_equals_its_steps():
    model = make(previous_action=True, separate_critic=True, norm_obs=True, norm_return=True)
    generator = np.random.default_rng(0)
    obs = generator.normal(size=(6, 5)).astype(np.float32)
    actions = generator.integers(0, 3, 6)
    model = model.update_statistics(3 * obs[:, None] + 1, 7 * obs[:, :1] + 5)
    inputs = model.inputs(jnp.asarray(obs), jnp.asarray(actions))
    assert isinstance(inputs, Inputs)
    assert inputs.previous_reward is None
    resets = np.arange(6) == 3
    _, policy, values = eqx.filter_jit(model.scan)(model.initial_state(), inputs, resets)
    state, step = model.initial_state(), eqx.filter_jit(model.step)
    for t in range(6):
        state, one, value = step(state, jax.tree.map(lambda x, t=t: x[t], inputs), resets[t])
        np.testing.assert_allclose(one.logits, policy.logits[t], atol=1e-6)
        np.testing.assert_allclose(value, values[t], atol=1e-5)
    with pytest.raises(ValueError, match=r"use model\.inputs"):
        model.scan(model.initial_state(), jnp.asarray(obs), resets)


def test_a_separate_critic_does_not_use_the_actors_memory():
    model = make(separate_critic=True)
    assert model.parameter_count > 1.5 * make().parameter_count

    def value(model):
        _, _, values = model.scan(model.initial_state(), jnp.ones((3, 5)))
        return values.sum()

    gradient = eqx.filter_jit(eqx.filter_grad(value))(model)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(gradient.memory))
    assert any((np.asarray(x) != 0).any() for x in jax.tree.leaves(gradient.critic_memory))


def test_running_statistics_are_those_of_all_samples():
    samples = np.random.default_rng(0).normal(3, 2, (100, 4)).astype(np.float32)
    statistics = RunningStatistics((4,))
    np.testing.assert_allclose(statistics.normalise(samples), samples, rtol=1e-6)
    for part in np.split(samples, [10, 11, 60]):
        statistics = statistics.update(part)
    np.testing.assert_allclose(statistics.mean, samples.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(statistics.variance, samples.var(axis=0), rtol=1e-4)
    normal = statistics.normalise(samples)
    np.testing.assert_allclose(normal.std(axis=0), 1, rtol=1e-4)
    assert float(statistics.normalise(1e9 * samples).max()) == 10


def test_new_statistics_of_returns_leave_values_as_they_were():
    model = make(norm_return=True)
    obs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)

    def values(model):
        return eqx.filter_jit(model.scan)(model.initial_state(), obs)[2]

    before = values(model)
    returns = jnp.asarray(np.random.default_rng(1).normal(50, 20, (8, 2)), jnp.float32)
    after = model.update_statistics(obs[:, None], returns)
    np.testing.assert_allclose(after.value_scale, returns.std(), rtol=1e-5)
    np.testing.assert_allclose(values(after), before, atol=1e-4)


def test_statistics_are_not_trained_and_are_for_vectors():
    model = make(norm_obs=True, norm_return=True)
    gradient = eqx.filter_grad(lambda m: m.scan(m.initial_state(), jnp.ones((2, 5)))[2].sum())(
        model
    )
    for statistics in (gradient.obs_statistics, gradient.return_statistics):
        assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(statistics))
    assert model.parameter_count == make().parameter_count
    with pytest.raises(ValueError, match="norm_obs=True is for observations that are vectors"):
        ActorCritic.make(
            Discrete(4),
            Discrete(3),
            memory="gru",
            memory_options=GRU,
            norm_obs=True,
            key=jax.random.key(0),
        )


@pytest.mark.parametrize("memory", ["agalite", "galite", "gtrxl", "gru"])
def test_bfloat16_rounds_products_and_nothing_else(memory):
    options = {"d_model": 16, **({} if memory == "gru" else {"layers": 1, "heads": 2})}
    make_model = partial(
        ActorCritic.make, VECTOR, Discrete(3), memory=memory, memory_options=options
    )
    exact, rounded = (
        make_model(precision=name, key=jax.random.key(0)) for name in ("float32", "bfloat16")
    )
    obs = jnp.asarray(np.random.default_rng(0).normal(size=(20, 5)), jnp.float32)

    def features(model, obs):
        return model.scan(model.initial_state(), obs)

    (_, _, found), (_, _, expected) = (eqx.filter_jit(features)(m, obs) for m in (rounded, exact))
    assert found.dtype == jnp.float32
    error = float(jnp.abs(found - expected).max() / jnp.abs(expected).max())
    assert 1e-6 < error < 0.05
    # A step, which an agent acts with, rounds as the sequence that it learns from.
    step, state = eqx.filter_jit(rounded.step), rounded.initial_state()
    assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(state))
    for t in range(20):
        state, _, value = step(state, obs[t])
        np.testing.assert_allclose(value, found[t], atol=0.02 * float(jnp.abs(found).max()))
    gradients = [
        eqx.filter_jit(eqx.filter_grad(lambda m: features(m, obs)[2].sum()))(m)
        for m in (rounded, exact)
    ]
    one, other = (
        jnp.concatenate([x.ravel() for x in jax.tree.leaves(g) if x.dtype == jnp.float32])
        for g in gradients
    )
    assert float(one @ other / jnp.linalg.norm(one) / jnp.linalg.norm(other)) > 0.98


@pytest.mark.parametrize("memory", ["agalite", "galite", "gru", "lstm"])
def test_bfloat16_products_backwards(memory):
    """The memories' own rules of gradients are traced outside of the context of the precision."""
    size = {"d_model": 12} if memory in ("gru", "lstm") else {"d_model": 12, "layers": 1}
    model = make_memory(memory, 5, **size)
    weights, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(weights):
        model = eqx.combine(weights, rest)
        with precision("bfloat16"):
            _, ys = model.scan(model.initial_state(), jnp.ones((20, 5)))
        return ys.sum()

    program = jax.make_jaxpr(jax.grad(loss))(weights)
    products = [e for e in equations(program.jaxpr) if e.primitive.name == "row_product"]
    assert len(products) > 4
    assert {x.aval.dtype for e in products for x in e.invars} == {jnp.dtype(jnp.bfloat16)}


def test_jax_own_setting_is_not_the_networks_precision():
    model = make()
    with jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(lambda x: model.scan(model.initial_state(), x)[2])(
            jnp.ones((4, 5))
        )
    assert "bf16" not in str(program)


def test_a_precision_that_does_not_exist():
    with pytest.raises(ValueError, match="choose one of: bfloat16, float32"):
        make(precision="float16")
