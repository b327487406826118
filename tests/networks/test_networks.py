"""Encoders, action distributions and heads, and the actor-critic made of them."""

from functools import partial

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.num_envs import spaces

from agalite.envs.mystery_path.env import Directions
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.encoders import (
    AtariConv,
    Convolution,
    ImpalaResNet,
    SymbolicEncoder,
    VectorEncoder,
    make_encoder,
    max_pool,
)
from agalite.networks.heads import Categorical, DiagonalNormal, MultiCategorical, make_action_head

KEY = jax.random.key(0)
VECTOR = spaces.Box(-1.0, 1.0, (5,), jnp.float32)
PIXELS = spaces.Box(0, 255, (84, 84, 3), jnp.uint8)


def _images(*shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, shape), jnp.uint8)


def _close(got, want, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want
    )


def _jitter(module):
    """Random numbers added to all weights, so that no bias is zero by accident."""
    weights, rest = eqx.partition(module, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    leaves = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


# Convolutions


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [
        (8, 4, "VALID", (17, 14)),
        (4, 2, "VALID", (9, 8)),
        (3, 1, "SAME", (5, 7)),
        (3, 1, "VALID", (5, 7)),
    ],
)
def test_patches_equal_the_direct_convolution_and_its_gradients(kernel, stride, padding, size):
    layer = _jitter(Convolution(3, 6, kernel, stride, padding, scale=0.5, key=KEY))
    images = jax.random.normal(jax.random.key(1), (4, *size, 3))

    def loss(patches, layer, images):
        out = jax.vmap(partial(layer, patches=patches))(images)
        return jnp.sum(jnp.sin(out)), out

    a, b = (
        jax.jit(jax.value_and_grad(partial(loss, p), (0, 1), has_aux=True))(layer, images)
        for p in (True, False)
    )
    _close(a, b, 2e-5)


def test_a_convolution_is_a_convolution():
    """Position, scale and bias by hand: a kernel with one weight looks at one pixel."""
    layer = Convolution(1, 1, 4, 2, scale=10.0, key=KEY)
    one = jnp.zeros((1, 2, 2, 2, 2, 1)).at[0, 1, 0, 1, 1, 0].set(1.0)  # row 2+1, column 0+1
    layer = eqx.tree_at(lambda c: c.dense.weight, layer, one.reshape(1, 16))
    layer = eqx.tree_at(lambda c: c.dense.bias, layer, jnp.array([7.0]))
    image = jnp.arange(64.0).reshape(8, 8, 1)
    want = 7 + 10 * image[3::2, 1::2][:3, :3]
    for patches in (True, False):
        _close(layer(image, patches=patches), want)


@pytest.mark.parametrize("size", [(8, 8), (7, 8), (5, 9)])
def test_max_pool_is_the_largest_of_every_window(size):
    def windows(image):
        return jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (3, 3, 1), (2, 2, 1), "SAME")

    def with_gradient(pool):
        return jax.jit(lambda x: (pool(x), jax.grad(lambda y: jnp.sum(jnp.sin(pool(y))))(x)))

    image = np.random.default_rng(0).normal(size=(*size, 2)).astype(np.float32)
    _close(with_gradient(max_pool)(image), with_gradient(windows)(image))


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_all_environments_share_one_product_per_convolution():
    encoder = make_encoder("atari", PIXELS, key=KEY)
    weights, rest = eqx.partition(encoder, eqx.is_array)
    obs = jax.ShapeDtypeStruct((2, 7, 84, 84, 3), jnp.uint8)

    def features(weights, obs):
        return jax.vmap(eqx.combine(weights, rest).over_time, 1, 1)(obs)

    found = _equations(jax.make_jaxpr(features)(weights, obs).jaxpr)
    shapes = [[v.aval.shape for v in e.invars] for e in found if e.primitive.name == "row_product"]
    assert shapes == [
        [(7, 20, 20, 192), (32, 192)],
        [(7, 9, 9, 512), (64, 512)],
        [(7, 7, 7, 576), (64, 576)],
    ]
    # The gradient of a weight must not exist once for every environment before they are summed.
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.square(features(w, x))))
    sizes = {tuple(w.shape) for w in jax.tree.leaves(weights) if w.ndim == 2}
    for equation in _equations(jax.make_jaxpr(gradient)(weights, obs).jaxpr):
        for out in equation.outvars:
            shape = tuple(out.aval.shape)
            assert not (len(shape) > 2 and shape[-2:] in sizes and 7 in shape[:-2]), equation


# Encoders


@pytest.mark.parametrize(
    ("space", "kind", "size"),
    [
        (VECTOR, VectorEncoder, 5),
        (spaces.Box(0, 1, (10, 10, 4), jnp.bool_), VectorEncoder, 400),
        (spaces.Discrete(7), VectorEncoder, 7),
        (gym.spaces.Box(-np.inf, np.inf, (), np.float64), VectorEncoder, 1),
        (gym.spaces.Box(0.0, 1.0, (1345,), np.float32), SymbolicEncoder, 128),
        (PIXELS, AtariConv, 3136),
        (gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), AtariConv, 1024),
    ],
)
def test_auto_chooses_by_the_space(space, kind, size):
    encoder = make_encoder("auto", space, key=KEY)
    assert type(encoder) is kind
    assert encoder.output_size == size
    dtype = jnp.uint8 if kind is AtariConv else jnp.int32 if hasattr(space, "n") else jnp.float32
    out = jax.eval_shape(lambda x: encoder(x), jax.ShapeDtypeStruct(space.shape, dtype))
    assert (out.shape, out.dtype) == ((size,), jnp.float32)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("vector", (5,), jnp.float32),
        ("vector", (2, 3), jnp.int32),
        ("symbolic", (6,), jnp.float32),
        ("atari", (36, 40, 3), jnp.uint8),
        ("impala", (9, 16, 2), jnp.uint8),
    ],
)
def test_over_time_equals_one_by_one(name, shape, dtype):
    space = spaces.Box(0, 255, shape, dtype)
    encoder = _jitter(make_encoder(name, space, key=KEY))
    obs = _images(3, 2, *shape).astype(dtype)
    together = jax.jit(lambda x: jax.vmap(encoder.over_time, 1, 1)(x))(obs)
    apart = jax.jit(lambda x: jax.vmap(jax.vmap(lambda y: encoder(y)))(x))(obs)
    assert together.shape == (3, 2, encoder.output_size)
    assert together.dtype == jnp.float32
    _close(together, apart, 1e-4 * float(jnp.abs(apart).max()))
    # Different observations, different features.
    assert not np.allclose(together[0, 0], together[1, 1])


def test_a_vector_is_passed_on_as_it_is():
    obs = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    np.testing.assert_array_equal(VectorEncoder((2, 3))(obs), np.arange(6.0))
    one_hot = make_encoder("vector", spaces.Discrete(4), key=KEY)
    np.testing.assert_array_equal(one_hot(jnp.int32(2)), [0, 0, 1, 0])


@pytest.mark.parametrize("name", ["atari", "impala"])
def test_pixels_count_from_0_to_1_in_whatever_form_they_come(name):
    image = _images(40, 40, 3)
    in_bytes, in_floats, in_units = (
        make_encoder(name, spaces.Box(0, high, (40, 40, 3), dtype), key=KEY)
        for high, dtype in ((255, jnp.uint8), (255.0, jnp.float32), (1.0, jnp.float32))
    )
    run = jax.jit(lambda encoder, image: encoder(image))
    want = run(in_units, image.astype(jnp.float32) / 255)
    _close(run(in_bytes, image), want, 1e-4)
    _close(run(in_floats, image.astype(jnp.float32)), want, 1e-4)
    assert 0.01 < float(jnp.abs(want).mean()) < 10


def test_impala_has_the_size_of_the_paper_and_a_gradient_everywhere():
    encoder = ImpalaResNet((64, 64, 3), key=KEY)
    convolutions = 3 * 9 * 16 + 4 * 144 * 16 + 16 * 9 * 32 + 4 * 288 * 32 + 5 * 288 * 32
    biases = 5 * 16 + 5 * 32 + 5 * 32
    leaves = jax.tree.leaves(eqx.filter(encoder, eqx.is_array))
    assert sum(x.size for x in leaves) == convolutions + biases + 8 * 8 * 32 * 512 + 512

    small = ImpalaResNet((16, 16, 3), width=32, key=KEY)
    gradient = eqx.filter_grad(lambda e, x: jnp.sum(jnp.square(e.over_time(x))))
    gradients = jax.tree.leaves(eqx.filter_jit(gradient)(small, _images(3, 16, 16, 3)))
    assert all(np.isfinite(g).all() and np.any(g != 0) for g in gradients)


@pytest.mark.parametrize("name", ["atari", "impala", "symbolic"])
def test_weights_start_orthogonal(name):
    encoder = make_encoder(name, spaces.Box(0, 255, (36, 36, 3), jnp.uint8), key=KEY)
    for w in jax.tree.leaves(eqx.filter(encoder, lambda x: eqx.is_array(x) and x.ndim == 2)):
        w = np.asarray(w)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        _close(gram, 2 * np.eye(len(gram)), 1e-4)


def test_encoders_refuse_what_they_cannot_read():
    with pytest.raises(ValueError, match="encoder='atary' is unknown"):
        make_encoder("atary", PIXELS, key=KEY)
    with pytest.raises(ValueError, match=r"observation_space has shape \(5,\); this encoder"):
        make_encoder("atari", VECTOR, key=KEY)
    with pytest.raises(ValueError, match=r"\(20, 84, 3\); this encoder .* x and y >= 36"):
        make_encoder("atari", spaces.Box(0, 255, (20, 84, 3), jnp.uint8), key=KEY)
    with pytest.raises(ValueError, match="channel first"):
        make_encoder("auto", gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), key=KEY)
    with pytest.raises(ValueError, match="supported are Box and Discrete"):
        make_encoder("auto", gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), key=KEY)
    with pytest.raises(ValueError, match="cannot read Discrete"):
        make_encoder("symbolic", spaces.Discrete(3), key=KEY)
    with pytest.raises(ValueError, match=r"obs has shape \(T, 4\)|obs has shape \(1, 4\)"):
        make_encoder("auto", VECTOR, key=KEY)(jnp.zeros(4))


# Distributions


def test_categorical_against_counting():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2, 1e-9]))[None].repeat(20_000, 0)
    policy = Categorical(logits + 3.0)
    actions = policy.sample(KEY)
    assert actions.shape == (20_000,)
    assert actions.dtype == jnp.int32
    counts = np.bincount(actions, minlength=4) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2, 0], atol=0.015)
    _close(policy.log_prob(actions), logits[0][actions])
    p = np.array([0.5, 0.3, 0.2, 1e-9])
    _close(policy.entropy()[0], -(p * np.log(p)).sum())
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
    _close(np.exp(values[:, :3]).sum(-1), np.ones(len(EXTREME)))
    _close(values[:, 3], [np.log(3), 0, np.log(2), 0.582203, np.log(3)])
    assert (values[:, 4] > -5).all()  # what cannot happen is not sampled


def test_several_choices_are_independent_ones():
    @jax.jit
    def compare(logits):
        policy = MultiCategorical(logits, (2, 3, 4))
        parts = [Categorical(x) for x in (logits[:, :2], logits[:, 2:5], logits[:, 5:])]
        actions = policy.sample(KEY)
        log_probs = sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts))
        entropy = sum(p.entropy() for p in parts)
        modes = jnp.stack([p.mode() for p in parts], -1)
        ours = (policy.log_prob(actions), policy.entropy(), policy.mode())
        # The parts' samples do not come from one and the same random number.
        coins = MultiCategorical(jnp.zeros((500, 4)), (2, 2)).sample(KEY)
        return actions, ours, (log_probs, entropy, modes), coins

    actions, ours, theirs, coins = compare(np.random.default_rng(0).normal(size=(6, 9)))
    assert actions.shape == (6, 3)
    assert (np.asarray(actions) < [2, 3, 4]).all()
    _close(ours, theirs)
    assert 0.3 < np.mean(coins[:, 0] == coins[:, 1]) < 0.7


def test_normal_against_its_formula_and_its_samples():
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
    _close(one.log_prob(mean + jnp.array([0.2, 0.3])), np.log(density))
    np.testing.assert_array_equal(one.mode(), mean)


def test_an_extreme_deviation_gives_no_nan():
    def numbers(log_std):
        policy = DiagonalNormal(jnp.zeros(2), log_std)
        return policy.log_prob(jnp.array([0.0, 1.0])) + policy.entropy()

    for log_std in (-1e6, 1e6):
        value, gradient = jax.value_and_grad(numbers)(jnp.full(2, log_std))
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


# Heads


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
def test_a_head_gives_actions_of_its_space(name):
    space, kind, shape = HEADS[name]
    head = make_action_head(space, 8, key=KEY)
    features = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)

    @jax.jit
    def act(features):
        policy = head(features)
        actions, best = policy.sample(KEY), policy.mode()
        likely = policy.log_prob(best), head(0 * features).log_prob(best)
        numbers = policy.log_prob(actions), policy.entropy()
        worlds = head.to_world(actions), jax.vmap(head.to_world)(actions)
        return policy, actions, likely, numbers, worlds

    policy, actions, likely, numbers, worlds = act(features)
    assert type(policy) is kind
    assert actions.shape == (300, *shape)
    assert [x.shape for x in numbers] == [(300,), (300,)]
    given = np.asarray(worlds[0])
    assert given.shape == (300, *space.shape)
    np.testing.assert_array_equal(*worlds)
    for action in given.astype(space.dtype):
        inside = bool(space.contains(np.asarray(action)))
        assert inside, action
    if kind is not DiagonalNormal:  # every choice is open, and its two ends are there
        ends = (given.min(0), given.max(0))
        low = getattr(space, "low", getattr(space, "start", 0))
        sizes = getattr(space, "nvec", getattr(space, "n", None))
        high = space.high if sizes is None else low + sizes - 1
        want = [np.broadcast_to(x, space.shape) for x in (low, high)]
        np.testing.assert_array_equal(ends, want)
    # The policy begins almost indifferent.
    _close(*likely, 0.2)
    weight = np.asarray(head.linear.weight)
    gram = weight @ weight.T if len(weight) <= 8 else weight.T @ weight
    _close(gram, 1e-4 * np.eye(len(gram)), 1e-8)


def test_a_box_is_reached_from_end_to_end_and_clipped_only_for_the_world():
    low, high = np.array([-2, 0, -np.inf, 1]), np.array([2, 10, np.inf, np.inf])
    head = make_action_head(gym.spaces.Box(low, high, dtype=np.float64), 4, key=KEY)
    actions = jnp.array([[-1.0] * 4, [0.0] * 4, [1.0] * 4, [3.0] * 4, [-3.0] * 4])
    want = [[-2, 0, -1, 1], [0, 5, 0, 1], [2, 10, 1, 1], [2, 10, 3, 3], [-2, 0, -3, 1]]
    np.testing.assert_allclose(head.to_world(actions), want)
    log_probs = head(jnp.zeros((5, 4))).log_prob(actions)
    assert log_probs[3] < log_probs[2]  # beyond the limit, and still less likely


def test_a_box_trains_its_deviation_and_nothing_of_its_limits():
    head = make_action_head(HEADS["box"][0], 8, key=KEY)
    leaves = jax.tree.leaves(eqx.filter(head, eqx.is_inexact_array))
    assert sorted(x.shape for x in leaves) == [(2,), (2,), (2, 8)]


def test_heads_refuse_what_they_cannot_act_in():
    with pytest.raises(ValueError, match="supported are Discrete, MultiDiscrete and Box"):
        make_action_head(gym.spaces.Tuple([gym.spaces.Discrete(2)]), 4, key=KEY)
    with pytest.raises(ValueError, match="supported are"):
        make_action_head(gym.spaces.MultiBinary(3), 4, key=KEY)
    with pytest.raises(ValueError, match="must have low < high"):
        make_action_head(spaces.Box(1.0, 1.0, (2,)), 4, key=KEY)
    with pytest.raises(ValueError, match=r"65536 whole numbers .* at most 4096"):
        make_action_head(gym.spaces.Box(0, 65535, (2,), np.uint16), 4, key=KEY)


# The whole

SMALL = {"d_model": 6, "layers": 2, "heads": 2, "head_size": 4, "ffn_size": 5}
MODELS = {
    "agalite": SMALL | {"eta": 2, "r": 3},
    "gtrxl": SMALL | {"memory": 4},
    "gru": {"d_model": 6, "hidden_size": 7},
}


@pytest.mark.parametrize(
    ("name", "actions"),
    [(name, "gymnax discrete") for name in MODELS] + [("gru", "directions"), ("gru", "box")],
)
def test_scan_equals_steps(name, actions):
    model = _jitter(
        ActorCritic.make(
            VECTOR,
            HEADS[actions][0],
            memory=name,
            memory_options=MODELS[name],
            hidden_size=10,
            key=KEY,
        )
    )
    t, b = 11, 3
    obs = jax.random.normal(jax.random.key(1), (t, b, 5))
    resets = jax.random.bernoulli(jax.random.key(2), 0.2, (t, b))
    start = jax.tree.map(lambda x: jnp.broadcast_to(x, (b, *x.shape)), model.initial_state())

    @jax.jit
    def by_scan(start):
        return jax.vmap(model.scan, (0, 1, 1), (0, 1, 1))(start, obs, resets)

    @jax.jit
    def by_steps(start):
        def one(state, now):
            state, policy, value = jax.vmap(model.step)(state, *now)
            return state, (policy, value)

        state, (policy, values) = jax.lax.scan(one, start, (obs, resets))
        return state, policy, values

    once, again = by_scan(start), by_steps(start)
    assert once[2].shape == (t, b)
    assert once[1].entropy().shape == (t, b)
    _close(once[1:], again[1:], 1e-5)
    # And from a state in the middle, where memory matters.
    _close(by_scan(once[0])[1:], by_steps(again[0])[1:], 1e-5)
    assert not np.allclose(by_scan(once[0])[2][0], once[2][0])


def test_pixels_train_through_the_whole_network():
    space = spaces.Box(0, 255, (36, 36, 3), jnp.uint8)
    model = ActorCritic.make(
        space,
        spaces.Discrete(3),
        memory="gru",
        memory_options=MODELS["gru"],
        hidden_size=9,
        key=KEY,
    )
    model = _jitter(model)
    obs = _images(4, 2, 36, 36, 3)
    start = jax.tree.map(lambda x: jnp.stack([x, x]), model.initial_state())

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        run = jax.vmap(model.scan, (0, 1, 1), (0, 1, 1))
        _, policy, values = run(start, obs, jnp.zeros((4, 2), bool))
        chosen = policy.log_prob(jnp.ones((4, 2), jnp.int32))
        return jnp.sum(jnp.square(values) - chosen) + policy.entropy().sum()

    for path, g in jax.tree_util.tree_leaves_with_path(gradient(model)):
        where = jax.tree_util.keystr(path)
        assert np.isfinite(g).all(), where
        assert np.any(g != 0), where


def test_actor_and_critic_start_as_in_the_paper():
    model = ActorCritic.make(
        spaces.Box(0.0, 1.0, (16,)), spaces.Discrete(4), memory="agalite", key=KEY
    )
    assert model.hidden.weight.shape == (256, 128)
    for half in jnp.split(model.hidden.weight, 2):
        _close(half @ half.T, 2 * np.eye(128), 1e-4)
    _close(model.critic.weight @ model.critic.weight.T, np.eye(1))
    assert model.parameter_count == 1_774_277  # the paper says 1.7 million
    shapes = eqx.filter_eval_shape(
        lambda k: ActorCritic.make(VECTOR, HEADS["box"][0], memory="gru", key=k), KEY
    )
    real = ActorCritic.make(VECTOR, HEADS["box"][0], memory="gru", key=KEY)
    assert shapes.parameter_count == real.parameter_count


def test_refresh_and_initial_state_are_the_memorys():
    model = ActorCritic.make(
        VECTOR, spaces.Discrete(2), memory="gtrxl", memory_options=MODELS["gtrxl"], key=KEY
    )
    state, *_ = jax.jit(lambda x: model.scan(model.initial_state(), x))(jnp.ones((6, 5)))
    other = _jitter(model)
    _close(other.refresh(state), other.memory.refresh(state))
    leaves = zip(jax.tree.leaves(other.refresh(state)), jax.tree.leaves(state), strict=True)
    assert any(not np.allclose(a, b) for a, b in leaves)


def test_the_actor_critic_names_what_is_wrong():
    make = partial(ActorCritic.make, VECTOR, spaces.Discrete(2), key=KEY)
    with pytest.raises(ValueError, match="hidden_size=0 must be"):
        make(memory="gru", hidden_size=0)
    with pytest.raises(ValueError, match="memory='grew' is unknown"):
        make(memory="grew")
    with pytest.raises(ValueError, match="gru has no option heads=2"):
        make(memory="gru", memory_options={"heads": 2})
