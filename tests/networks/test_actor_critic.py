"""The actor-critic: encoder, memory, actor and critic together."""

from functools import partial

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

from agalite.networks.actor_critic import ActorCritic, partition_shapes
from modules import assert_close, random_weights

KEY = jax.random.key(0)
VECTOR = spaces.Box(-1.0, 1.0, (5,), jnp.float32)
BOX = gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))
SMALL = {"d_model": 6, "layers": 1, "heads": 2, "head_size": 4, "ffn_size": 5}
MODELS = {
    "agalite": SMALL | {"eta": 2, "r": 3},
    "gtrxl": SMALL | {"memory": 4},
    "gru": {"d_model": 6, "hidden_size": 7},
}


@pytest.mark.parametrize(
    ("name", "action_space"),
    [("agalite", spaces.Discrete(4)), ("gru", BOX)],
    ids=["agalite-discrete", "gru-box"],
)
def test_scan_equals_steps(name, action_space):
    make = partial(
        ActorCritic.make,
        VECTOR,
        action_space,
        memory=name,
        memory_options=MODELS[name],
        hidden_size=10,
    )
    model = random_weights(lambda key: make(key=key))
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
    assert_close(once[1:], again[1:], 1e-5)
    # Again, from a state that is not the initial one.
    assert_close(by_scan(once[0])[1:], by_steps(again[0])[1:], 1e-5)
    assert not np.allclose(by_scan(once[0])[2][0], once[2][0])


def test_every_weight_of_a_network_for_pixels_has_a_gradient():
    space = spaces.Box(0, 255, (36, 36, 3), jnp.uint8)
    make = partial(
        ActorCritic.make,
        space,
        spaces.Discrete(3),
        memory="gru",
        memory_options=MODELS["gru"],
        hidden_size=9,
    )
    model = random_weights(lambda key: make(key=key))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 2, 36, 36, 3))
    obs = jnp.asarray(pixels, jnp.uint8)
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


def test_actor_and_critic_are_initialised_as_in_the_paper():
    make = partial(ActorCritic.make, VECTOR, spaces.Discrete(4), hidden_size=8)
    model = make(memory="gru", memory_options=MODELS["gru"] | {"hidden_size": 8}, key=KEY)
    assert model.hidden.weight.shape == (16, 8)
    for half in jnp.split(model.hidden.weight, 2):
        assert_close(half @ half.T, 2 * np.eye(8), 1e-4)
    assert_close(model.critic.weight @ model.critic.weight.T, np.eye(1))


def test_shapes_without_weights():
    paper = partial(
        ActorCritic.make, spaces.Box(0.0, 1.0, (16,)), spaces.Discrete(4), memory="agalite"
    )
    shapes = eqx.filter_eval_shape(lambda key: paper(key=key), KEY)
    assert shapes.parameter_count == 1_774_277  # the paper says 1.7 million
    small = partial(
        ActorCritic.make, VECTOR, BOX, memory="gru", memory_options=MODELS["gru"], hidden_size=8
    )
    shapes = eqx.filter_eval_shape(lambda key: small(key=key), KEY)
    model = small(key=KEY)
    assert shapes.parameter_count == model.parameter_count
    arrays, static = partition_shapes(shapes)
    weights = eqx.filter(model, eqx.is_array)
    assert jax.tree.structure(arrays) == jax.tree.structure(weights)
    assert eqx.tree_equal(eqx.combine(weights, static), model)


def test_refresh_is_that_of_the_memory():
    options = {"memory": "gtrxl", "memory_options": MODELS["gtrxl"]}

    def make(key):
        return ActorCritic.make(VECTOR, spaces.Discrete(2), **options, key=key)

    model, other = random_weights(make), random_weights(make, seed=1)
    state, *_ = jax.jit(lambda x: model.scan(model.initial_state(), x))(jnp.ones((6, 5)))
    assert_close(other.refresh(state), other.memory.refresh(state))
    leaves = zip(jax.tree.leaves(other.refresh(state)), jax.tree.leaves(state), strict=True)
    assert any(not np.allclose(a, b) for a, b in leaves)


def test_bad_arguments_are_named():
    make = partial(ActorCritic.make, VECTOR, spaces.Discrete(2), key=KEY)
    with pytest.raises(ValueError, match="hidden_size=0 must be"):
        make(memory="gru", hidden_size=0)
    with pytest.raises(ValueError, match="memory='grew' is unknown"):
        make(memory="grew")
    with pytest.raises(ValueError, match="gru has no option heads=2"):
        make(memory="gru", memory_options={"heads": 2})
