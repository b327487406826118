"""Action distributions, and the heads that make them."""

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

from agalite.envs.mystery_path import Directions
from agalite.networks.heads import (
    Categorical,
    DiagonalNormal,
    EpsilonGreedy,
    MultiCategorical,
    make_action_head,
)
from modules import assert_close

KEY = jax.random.key(0)


def test_categorical_against_counts_of_samples():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2, 1e-9]))[None].repeat(20_000, 0)
    policy = Categorical(logits + 3.0)
    actions = policy.sample(KEY)
    assert actions.shape == (20_000,)
    assert actions.dtype == jnp.int32
    counts = np.bincount(actions, minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2, 0], atol=0.015)
    assert_close(policy.log_prob(actions), logits[0][actions])
    p = np.array([0.5, 0.3, 0.2, 1e-9])
    assert_close(policy.entropy()[0], -(p * np.log(p)).sum())
    assert (policy.mode() == 0).all()


EXTREME = [
    [0, 0, 0],
    [3e38, -3e38, 0],
    [1e30, 1e30, -1e30],
    [-jnp.inf, 0, 1],
    [-3e38, -3e38, -3e38],
]


def test_extreme_logits_give_no_nan():
    def numbers(x):
        policy = Categorical(x)
        log_probs = [policy.log_prob(jnp.int32(a)) for a in range(3)]
        return jnp.stack([*log_probs, policy.entropy(), policy.log_prob(policy.sample(KEY))])

    logits = jnp.array(EXTREME, jnp.float32)
    values, jacobian = jax.jit(jax.vmap(lambda x: (numbers(x), jax.jacobian(numbers)(x))))(logits)
    assert np.isfinite(values).all()
    assert np.isfinite(jacobian).all()
    assert_close(np.exp(values[:, :3]).sum(-1), np.ones(len(EXTREME)))
    assert_close(values[:, 3], [np.log(3), 0, np.log(2), 0.582203, np.log(3)])
    assert (values[:, 4] > -5).all()  # impossible actions are not sampled


def test_multi_categorical_is_independent_categoricals():
    @jax.jit
    def compare(logits):
        policy = MultiCategorical(logits, (2, 3, 4))
        parts = [Categorical(x) for x in (logits[:, :2], logits[:, 2:5], logits[:, 5:])]
        actions = policy.sample(KEY)
        log_probs = sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts))
        entropy = sum(p.entropy() for p in parts)
        modes = jnp.stack([p.mode() for p in parts], -1)
        ours = (policy.log_prob(actions), policy.entropy(), policy.mode())
        # The parts are sampled with different keys.
        coins = MultiCategorical(jnp.zeros((500, 4)), (2, 2)).sample(KEY)
        return actions, ours, (log_probs, entropy, modes), coins

    actions, ours, theirs, coins = compare(np.random.default_rng(0).normal(size=(6, 9)))
    assert actions.shape == (6, 3)
    assert (np.asarray(actions) < [2, 3, 4]).all()
    assert_close(ours, theirs)
    assert 0.3 < np.mean(coins[:, 0] == coins[:, 1]) < 0.7


def test_diagonal_normal_against_its_formula_and_samples():
    mean, log_std = jnp.array([1.0, -2.0]), jnp.array([0.5, -1.0])
    policy = DiagonalNormal(*(jnp.broadcast_to(x, (50_000, 2)) for x in (mean, log_std)))
    actions = policy.sample(KEY)
    np.testing.assert_allclose(actions.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(actions.std(0), np.exp(log_std), rtol=0.02)
    # Minus the mean log-probability is the entropy.
    np.testing.assert_allclose(-policy.log_prob(actions).mean(), policy.entropy()[0], atol=0.02)
    std = np.exp(np.array([0.5, -1.0]))
    density = np.prod(np.exp(-0.5 * (np.array([0.2, 0.3]) / std) ** 2) / (std * np.sqrt(2 * np.pi)))
    one = DiagonalNormal(mean, log_std)
    assert_close(one.log_prob(mean + jnp.array([0.2, 0.3])), np.log(density))
    np.testing.assert_array_equal(one.mode(), mean)


def test_extreme_standard_deviations_give_no_nan():
    def numbers(log_std):
        policy = DiagonalNormal(jnp.zeros(2), log_std)
        return policy.log_prob(jnp.array([0.0, 1.0])) + policy.entropy()

    for log_std in (-1e6, 1e6):
        value, gradient = jax.value_and_grad(numbers)(jnp.full(2, log_std))
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


HEADS = {
    "gymnax discrete": (spaces.Discrete(4), Categorical, ()),
    "gymnasium discrete from 1": (gym.spaces.Discrete(3, start=1), Categorical, ()),
    "directions": (Directions(), MultiCategorical, (2,)),
    "multidiscrete": (gym.spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiCategorical, (4,)),
    "whole numbers": (gym.spaces.Box(-2, 3, (2,), np.int32), MultiCategorical, (2,)),
    "box": (gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 10])), DiagonalNormal, (2,)),
    "box of a shape": (gym.spaces.Box(-1, 1, (2, 3), np.float32), DiagonalNormal, (6,)),
    "box of one": (gym.spaces.Box(-1, 1, (), np.float32), DiagonalNormal, (1,)),
}


@pytest.mark.parametrize("name", HEADS)
def test_actions_are_in_the_action_space(name):
    space, kind, shape = HEADS[name]
    head = make_action_head(space, 8, key=KEY)
    features = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)

    @jax.jit
    def act(features):
        policy = head(features)
        actions, best = policy.sample(KEY), policy.mode()
        likely = policy.log_prob(best), head(0 * features).log_prob(best)
        numbers = policy.log_prob(actions), policy.entropy()
        for_env = head.to_env(actions), jax.vmap(head.to_env)(actions)
        return policy, actions, likely, numbers, for_env

    policy, actions, likely, numbers, for_env = act(features)
    assert type(policy) is kind
    assert actions.shape == (300, *shape)
    assert [x.shape for x in numbers] == [(300,), (300,)]
    given = np.asarray(for_env[0])
    assert given.shape == (300, *space.shape)
    np.testing.assert_array_equal(*for_env)
    for action in given.astype(space.dtype):
        inside = bool(space.contains(np.asarray(action)))
        assert inside, action
    if kind is not DiagonalNormal:  # the first and the last choice both occur
        ends = (given.min(0), given.max(0))
        low = getattr(space, "low", getattr(space, "start", 0))
        sizes = getattr(space, "nvec", getattr(space, "n", None))
        high = space.high if sizes is None else low + sizes - 1
        want = [np.broadcast_to(x, space.shape) for x in (low, high)]
        np.testing.assert_array_equal(ends, want)
    # At initialisation all actions are almost equally likely.
    assert_close(*likely, 0.2)
    weight = np.asarray(head.linear.weight)
    gram = weight @ weight.T if len(weight) <= 8 else weight.T @ weight
    assert_close(gram, 1e-4 * np.eye(len(gram)), 1e-8)


def test_box_actions_are_scaled_and_clipped_for_the_environment_only():
    low, high = np.array([-2, 0, -np.inf, 1]), np.array([2, 10, np.inf, np.inf])
    head = make_action_head(gym.spaces.Box(low, high, dtype=np.float64), 4, key=KEY)
    actions = jnp.array([[-1.0] * 4, [0.0] * 4, [1.0] * 4, [3.0] * 4, [-3.0] * 4])
    want = [[-2, 0, -1, 1], [0, 5, 0, 1], [2, 10, 1, 1], [2, 10, 3, 3], [-2, 0, -3, 1]]
    np.testing.assert_allclose(head.to_env(actions), want)
    log_probs = head(jnp.zeros((5, 4))).log_prob(actions)
    assert log_probs[3] < log_probs[2]  # beyond the limit, and still less likely


def test_the_limits_of_a_box_are_not_trained():
    head = make_action_head(HEADS["box"][0], 8, key=KEY)
    leaves = jax.tree.leaves(eqx.filter(head, eqx.is_inexact_array))
    assert sorted(x.shape for x in leaves) == [(2,), (2,), (2, 8)]


def test_the_standard_deviation_at_the_start():
    head = make_action_head(HEADS["box"][0], 8, log_std_init=-0.5, key=KEY)
    policy = head(jnp.zeros((2000, 8)))
    assert policy.sample(KEY).std() == pytest.approx(np.exp(-0.5), rel=0.05)


def test_a_bounded_mean_stays_within_the_limits_that_there_are():
    low, high = np.array([-2.0, 0.0, -np.inf]), np.array([2.0, 10.0, np.inf])
    space = gym.spaces.Box(low, high, dtype=np.float64)
    plain, bounded = (
        make_action_head(space, 4, bounded_mean=bound, key=KEY) for bound in (False, True)
    )
    features = 1e3 * jax.random.normal(KEY, (50, 4))
    far, near = plain(features).mode(), bounded(features).mode()
    assert (jnp.abs(far) > 1).any(axis=0).all()
    np.testing.assert_allclose(near[:, :2], jnp.tanh(far[:, :2]), rtol=1e-6)
    np.testing.assert_array_equal(near[:, 2], far[:, 2])  # this number has no limits


def test_unsuitable_action_spaces_are_refused():
    with pytest.raises(ValueError, match="supported are Discrete, MultiDiscrete and Box"):
        make_action_head(gym.spaces.Tuple([gym.spaces.Discrete(2)]), 4, key=KEY)
    with pytest.raises(ValueError, match="supported are"):
        make_action_head(gym.spaces.MultiBinary(3), 4, key=KEY)
    with pytest.raises(ValueError, match="must have low < high"):
        make_action_head(spaces.Box(1.0, 1.0, (2,)), 4, key=KEY)
    with pytest.raises(ValueError, match=r"65536 whole numbers .* at most 4096"):
        make_action_head(gym.spaces.Box(0, 65535, (2,), np.uint16), 4, key=KEY)


def test_an_epsilon_greedy_policy_takes_the_best_action():
    policy = EpsilonGreedy(jnp.array([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]]), 0.3)
    np.testing.assert_array_equal(policy.mode(), [1, 0])  # the first of equals
    np.testing.assert_allclose(jnp.exp(policy.logits), [[0.1, 0.8, 0.1], [0.8, 0.1, 0.1]])
    np.testing.assert_allclose(policy.log_prob(jnp.array([1, 2])), np.log([0.8, 0.1]), rtol=1e-5)
    greedy = EpsilonGreedy(jnp.array([0.0, 3.0]), 0.0)
    samples = jax.vmap(greedy.sample)(jax.random.split(jax.random.key(0), 20))
    assert (samples == 1).all()


def test_action_values_need_a_discrete_space():
    box = gym.spaces.Box(-1, 1, (2,))
    with pytest.raises(ValueError, match=r"has no action values; they need a Discrete space"):
        make_action_head(box, 4, epsilon=0.1, key=jax.random.key(0))
    head = make_action_head(gym.spaces.Discrete(3), 4, epsilon=0.1, key=jax.random.key(0))
    assert head(jnp.ones((5, 4))).values.shape == (5, 3)
