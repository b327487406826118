"""What learning rests on: the learner sees what the actor saw, and ends mean what they say."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.agents import rollout
from agalite.agents.a2c import A2C
from agalite.agents.base import make_batch, recompute
from agalite.agents.ppo import PPO
from agalite.agents.returns import gae
from agalite.agents.rollout import when
from agalite.envs import make
from agalite.envs.vector import Vector
from agalite.memory import MODELS
from agalite.networks.actor_critic import ActorCritic

SMALL = {"d_model": 16, "layers": 2, "heads": 2, "head_size": 8, "ffn_size": 16}
OPTIONS = {
    "agalite": {**SMALL, "eta": 2, "r": 3},
    "galite": {**SMALL, "eta": 2},
    "linear": SMALL,
    "transformer": {**SMALL, "context": 6},
    "gtrxl": {**SMALL, "memory": 6},
    "gru": {"d_model": 16, "hidden_size": 16},
    "lstm": {"d_model": 16, "hidden_size": 16},
    "feedforward": {"d_model": 16},
}


def build(memory, world):
    return ActorCritic.make(
        world.observation_space(world.default_params),
        world.action_space(world.default_params),
        memory=memory,
        memory_options=OPTIONS[memory],
        hidden_size=16,
        key=jax.random.key(0),
    )


@functools.cache
def collected(memory, *, steps=48, sequence=12, count=4):
    """Two rollouts, the second from used memories, with many ends of both kinds; once a process."""
    world = make("tmaze", corridor=3, max_steps=7)
    model, vector = build(memory, world), Vector(world, count)

    @eqx.filter_jit
    def run(model):
        place = rollout.init(model, vector, jax.random.key(1))
        place, *_ = rollout.collect_rollout(
            model, vector, place, jax.random.key(2), steps=steps, sequence=sequence
        )
        return place, rollout.collect_rollout(
            model, vector, place, jax.random.key(3), steps=steps, sequence=sequence
        )

    return model, run(model)


@pytest.mark.parametrize("memory", list(MODELS))
def test_before_an_update_the_ratio_is_one_and_values_are_the_acted_ones(memory):
    model, (_, (_, data, starts, _)) = collected(memory)
    assert data.ends.any()
    batch = make_batch(data, starts, jnp.zeros_like(data.values), 12)
    new = eqx.filter_jit(recompute)(model, batch)
    np.testing.assert_allclose(jnp.exp(new.log_probs - batch.log_probs), 1, atol=2e-5)
    np.testing.assert_allclose(new.values, batch.values, atol=2e-5)


def test_sequences_keep_their_steps_and_their_worlds():
    _, (_, (_, data, starts, _)) = collected("gru")
    batch = make_batch(data, starts, data.values, 12)
    assert batch.obs.shape == (12, 16, 16)
    for part in range(4):
        for world in range(4):
            np.testing.assert_array_equal(
                batch.log_probs[:, part * 4 + world],
                data.log_probs[part * 12 : (part + 1) * 12, world],
            )
    np.testing.assert_array_equal(batch.starts[0][5], starts[0][1, 1])


def test_a_reset_takes_effect_with_the_first_observation_of_the_next_episode():
    model, (place, (after, data, _, _)) = collected("agalite")
    np.testing.assert_array_equal(data.resets[0], place.resets)
    np.testing.assert_array_equal(data.resets[1:], data.ends[:-1])
    np.testing.assert_array_equal(after.resets, data.ends[-1])
    # T-Maze shows its cue in the first observation only, and there always.
    np.testing.assert_array_equal(data.obs[..., :2].sum(-1) > 0, data.resets)
    fresh = jax.vmap(jax.vmap(lambda o: model.step(model.initial_state(), o, jnp.array(True))[2]))
    values = jax.jit(fresh)(data.obs)
    np.testing.assert_allclose(values[data.resets], data.values[data.resets], atol=1e-5)


def test_what_is_expected_after_a_step_depends_on_how_it_ended():
    world = make("tmaze", corridor=3, max_steps=7)
    model, (place, (after, data, _, _)) = collected("gru")
    terminated = data.ends & (jnp.abs(data.rewards) > 0.5)  # a turn pays 4 or -1
    truncated = data.ends & ~terminated
    assert terminated.any()
    assert truncated.any()
    assert (data.next_values[terminated] == 0).all()
    going = ~data.ends[:-1]
    np.testing.assert_array_equal(data.next_values[:-1][going], data.values[1:][going])
    look = jax.jit(jax.vmap(model.step))
    _, _, last = look(after.memory, after.obs, after.resets)
    np.testing.assert_allclose(
        data.next_values[-1][~data.ends[-1]], last[~data.ends[-1]], atol=1e-5
    )
    # A truncated step: replay it by hand, and ask the critic about the final observation.
    memory = jax.tree.map(lambda x: x[:], place.memory)
    state = place.world
    move = jax.jit(Vector(world, 4).step)
    keys = jax.random.split(jax.random.key(3), 48)
    for t in range(48):
        memory, _, _ = look(memory, data.obs[t], data.resets[t])
        key = jax.random.split(keys[t])[1]
        _, state, _, _, cut, info = move(key, state, data.actions[t])
        np.testing.assert_array_equal(cut, truncated[t])
        if cut.any():
            going_on = jnp.zeros(4, bool)
            _, _, final = look(memory, info["final_observation"], going_on)
            np.testing.assert_allclose(data.next_values[t][cut], final[cut], atol=1e-5)
            assert (jnp.abs(final[cut]) > 0).all()
            return
    pytest.fail("nothing was truncated")


def test_episodes_are_counted_whole():
    _, (place, (_, data, _, episodes)) = collected("gru")
    returns, count = np.asarray(place.returns).copy(), 0
    total = 0.0
    for t in range(48):
        returns += np.asarray(data.rewards[t])
        done = np.asarray(data.ends[t])
        total, count = total + returns[done].sum(), count + done.sum()
        returns[done] = 0
    assert int(episodes.ended) == count
    np.testing.assert_allclose(float(episodes.returns), total, rtol=1e-4)


def test_only_when_needed_also_for_many():
    def cost(x):
        return {"y": x * 2}

    nothing = {"y": jnp.zeros(3)}
    x = jnp.arange(3.0)
    for needed in (True, False):
        got = when(jnp.array(needed), cost, nothing, x)
        np.testing.assert_array_equal(got["y"], x * 2 if needed else 0 * x)
    some = jnp.array([True, False])
    together = jax.jit(jax.vmap(lambda n: when(n, cost, nothing, x)))(some)
    np.testing.assert_array_equal(together["y"], jnp.stack([x * 2, x * 0]))


@pytest.mark.parametrize("agent", [A2C(), PPO(update_epochs=2, num_minibatches=4)])
def test_an_update_moves_the_policy_towards_what_paid(agent):
    model, (_, (_, data, starts, _)) = collected("gru")
    # Pretend that going right always pays and nothing else does.
    data = data._replace(
        rewards=jnp.where(data.actions == 3, 1.0, 0.0),
        next_values=jnp.zeros_like(data.values),
        values=jnp.zeros_like(data.values),
        ends=jnp.ones_like(data.ends),
    )
    optimiser = agent.optimiser(10)
    memory = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def learn(model, memory, key):
        return agent.learn(model, optimiser, memory, data, starts, 12, key, jnp.ones(()))

    @eqx.filter_jit
    def chance_of_right(model):
        batch = make_batch(data, starts, data.values, 12)
        right = batch._replace(actions=jnp.full_like(batch.actions, 3))
        return jnp.exp(recompute(model, right).log_probs).mean()

    before = float(chance_of_right(model))
    for i in range(5):
        model, memory, metrics = learn(model, memory, jax.random.key(i))
    assert float(chance_of_right(model)) > before
    assert all(np.isfinite(float(x)) for x in metrics.values())


def test_ppo_with_one_epoch_and_no_clipping_is_a2c():
    model, (_, (_, data, starts, _)) = collected("agalite")
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
        optimiser = agent.optimiser(10)
        memory = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        learn = eqx.filter_jit(agent.learn)
        new.append(
            learn(model, optimiser, memory, data, starts, 12, jax.random.key(0), jnp.ones(()))[0]
        )
    for a, b in zip(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in new), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_a_value_clip_stops_the_critic():
    model, (_, (_, data, starts, _)) = collected("gru")
    advantages = gae(
        data.rewards, data.values, data.next_values, data.ends, gamma=0.99, gae_lambda=0.95
    )
    batch = make_batch(data, starts, advantages, 12)
    far = batch._replace(values=batch.values - 10, targets=batch.values + 100)

    def gradient(agent):
        def loss(weights):
            full = eqx.combine(weights, rest)
            return agent.loss(full, far, jnp.zeros(()))[0]

        weights, rest = eqx.partition(model, eqx.is_inexact_array)
        return jax.jit(jax.grad(loss))(weights).critic.bias

    assert float(jnp.abs(gradient(PPO(num_minibatches=1))).max()) > 0
    assert float(jnp.abs(gradient(PPO(num_minibatches=1, vf_clip_coef=0.1))).max()) == 0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (A2C, {"learning_rate": 0.0}, "learning_rate=0.0 must be a finite number > 0"),
        (A2C, {"gamma": 1.5}, "gamma=1.5 must be a finite number >= 0 and <= 1"),
        (A2C, {"ent_coef": -1}, "ent_coef=-1"),
        (PPO, {"update_epochs": 0}, "update_epochs=0"),
        (PPO, {"num_minibatches": 1.5}, "num_minibatches=1.5"),
        (PPO, {"clip_coef": float("nan")}, "clip=nan"),
        (PPO, {"vf_clip_coef": 0}, "vf_clip_coef=0"),
    ],
)
def test_bad_values_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)
