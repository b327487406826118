"""The Craftax adapter against the `craftax` package.

Compiling Craftax takes a minute or more, so the quick tests trace the programs without compiling
them, and what runs them is slow.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("craftax")

from craftax.craftax_classic.constants import Achievement, BlockType
from craftax.craftax_classic.envs.craftax_symbolic_env import CraftaxClassicSymbolicEnvNoAutoReset

from agalite.envs.craftax import Craftax, CraftaxClassic
from agalite.envs.vector import VectorEnv
from agalite.ops.bits import pack, unpack

COUNT = 4
LIMIT = 120  # random play dies after 145 steps or so: this gives both kinds of end
EXTRA = {"terminated", "truncated", "final_observation"}


class Classic:
    """The programs that all tests of the classic game share: each compiles once."""

    def __init__(self) -> None:
        self.env = CraftaxClassic(max_steps=LIMIT)
        self.vector = VectorEnv(self.env, COUNT)
        package = CraftaxClassicSymbolicEnvNoAutoReset()
        limited = package.default_params.replace(max_timesteps=LIMIT)

        def plain(key, state, actions):
            """`jax.vmap(env.step)`, and the package's own step from the same state."""
            keys = jax.random.split(key, COUNT)
            halves = jax.vmap(jax.random.split)(keys)
            theirs = jax.vmap(lambda k, s, a: package.step(k, s, a, limited))(
                halves[:, 0], state.game, actions
            )
            return jax.vmap(self.env.step)(keys, state, actions), theirs

        self.reset = jax.jit(self.vector.reset)
        self.step = jax.jit(self.vector.step)
        self.plain = jax.jit(plain)


@pytest.fixture(scope="module")
def classic() -> Classic:
    return Classic()


@pytest.mark.parametrize(
    ("kind", "features", "actions", "achievements"),
    [(CraftaxClassic, 1345, 17, 22), (Craftax, 8268, 43, 67)],
)
def test_shapes_names_and_ends(kind, features, actions, achievements) -> None:
    """What can be told without compiling; ends are computed from a state made of zeros."""
    env = kind(max_steps=LIMIT)
    params, key = env.default_params, jax.random.key(0)
    obs, state = jax.eval_shape(lambda k: env.reset_env(k, params), key)
    assert (obs.shape, obs.dtype) == (env.observation_space().shape, jnp.float32)
    assert obs.shape == (features,)
    assert env.num_actions == env.action_space().n == actions
    after = jax.eval_shape(lambda k, s: env.step_env(k, s, jnp.int32(0), params), key, state)
    their_obs, their_state, reward, terminated, info = after
    assert (their_obs.shape, reward.dtype, terminated.dtype) == (obs.shape, jnp.float32, jnp.bool_)
    assert sum(name.startswith("Achievements/") for name in info) == achievements
    assert "discount" not in info
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(their_state), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert [leaf.weak_type, other.weak_type] == [False] * 2, "a step would compile twice"

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    health = zeros.game.player_health.dtype
    for alive, time, expected in (
        (True, 7, (False, False)),
        (False, 7, (True, False)),
        (True, LIMIT, (False, True)),
        (False, LIMIT, (True, False)),
    ):
        game = zeros.game.replace(
            timestep=jnp.int32(time), player_health=jnp.asarray(alive, health)
        )
        here = zeros.replace(time=jnp.int32(time), game=game)
        ends = env.is_terminated(here, params), env.is_truncated(here, params)
        assert tuple(map(bool, ends)) == expected


def actions_at(key, number: int):
    return jax.random.randint(key, (COUNT,), 0, number)


def assert_equal(ours, theirs) -> None:
    """The same structure, dtypes and bits."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.array_equal(a, b)


@pytest.mark.slow
def test_classic_plays_as_the_package_and_says_why_episodes_end(classic) -> None:
    key = jax.random.key(0)
    obs, state = classic.reset(key)
    assert obs.shape == (COUNT, 1345)
    assert obs.dtype == jnp.float32
    deaths = limits = 0
    for here in jax.random.split(key, 250):
        actions = actions_at(here, 17)
        ours = classic.step(here, state, actions)
        plain, theirs = classic.plain(here, state, actions)
        assert_equal(ours, plain)
        obs, state, reward, terminated, truncated, info = ours
        their_obs, their_state, their_reward, their_done, their_info = theirs

        assert np.array_equal(info["final_observation"], their_obs)
        assert np.array_equal(reward, their_reward)
        assert np.array_equal(terminated | truncated, their_done)
        their_info.pop("discount")
        assert set(info) == set(their_info) | EXTRA
        assert_equal({name: info[name] for name in their_info}, their_info)

        dead = np.asarray(their_state.player_health <= 0)
        late = np.asarray(their_state.timestep == LIMIT)
        assert np.array_equal(terminated, dead)
        assert np.array_equal(truncated, late & ~dead)
        assert np.array_equal(state.time, np.where(dead | late, 0, their_state.timestep))
        assert 0.0 <= float(obs.min()) <= float(obs.max()) <= 1.0
        assert set(np.unique(obs[:, : 1345 - 22])) <= {0.0, 1.0}
        deaths += int(dead.sum())
        limits += int((late & ~dead).sum())
    assert deaths > 0
    assert limits > 0
    # One program each, though the first state came from `reset` and the others from `step`.
    assert classic.step._cache_size() == 1
    assert classic.plain._cache_size() == 1


@pytest.mark.slow
def test_end_by_death_by_time_by_both_and_not_at_all(classic) -> None:
    """Row 0 goes on, row 1 dies, row 2 comes to the limit, row 3 does both at once."""
    _, state = classic.reset(jax.random.key(1))
    game = state.game
    late = jnp.array([7, 7, LIMIT - 1, LIMIT - 1], jnp.int32)
    health = jnp.array([9, -9, 9, -9], jnp.int32)
    achievements = game.achievements.at[:, Achievement.COLLECT_COAL.value].set(True)
    game = game.replace(timestep=late, player_health=health, achievements=achievements)
    state = state.replace(time=late, game=game)
    obs, after, _, terminated, truncated, info = classic.step(
        jax.random.key(2), state, jnp.zeros(COUNT, jnp.int32)
    )
    np.testing.assert_array_equal(terminated, [False, True, False, True])
    np.testing.assert_array_equal(truncated, [False, False, True, False])
    np.testing.assert_array_equal(after.time, [8, 0, 0, 0])
    reached = info["Achievements/collect_coal"]
    np.testing.assert_array_equal(reached, np.float32([0, 100, 100, 100]))
    assert (np.asarray(info["score"]) > 0).tolist() == [False, True, True, True]
    # Three new maps, all different; the one that goes on is untouched.
    assert len({np.asarray(after.game.map[i]).tobytes() for i in range(COUNT)}) == COUNT
    np.testing.assert_array_equal(after.game.map[0], game.map[0])
    np.testing.assert_array_equal(obs[0], info["final_observation"][0])
    assert not np.array_equal(obs[2], info["final_observation"][2])
    assert not after.game.achievements[1:].any()
    assert len([name for name in info if name.startswith("Achievements/")]) == 22


@pytest.mark.slow
def test_same_key_same_game(classic) -> None:
    first, again, other = (classic.reset(jax.random.key(seed)) for seed in (5, 5, 6))
    assert_equal(first, again)
    assert not np.array_equal(first[1].game.map, other[1].game.map)
    # Each of the batch has a map of its own.
    assert not np.array_equal(first[1].game.map[0], first[1].game.map[1])


@pytest.mark.slow
def test_the_full_game() -> None:
    """One program, since compiling it is slow: reset, and steps with all kinds of end."""
    env = Craftax(max_steps=25)
    vector = VectorEnv(env, 2)

    @jax.jit
    def play(key):
        obs, state = vector.reset(key)
        # The second environment is about to die.
        health = state.game.player_health.at[1].set(-5)
        state = state.replace(game=state.game.replace(player_health=health))

        def step(carry, key):
            obs, state = carry
            actions = jax.random.randint(key, (2,), 0, env.num_actions)
            obs, state, *rest = vector.step(key, state, actions)
            return (obs, state), (obs, state.time, *rest)

        (_, state), history = jax.lax.scan(step, (obs, state), jax.random.split(key, 30))
        return history, jax.tree.map(lambda x: x[0], state)

    (obs, time, reward, terminated, truncated, info), state = play(jax.random.key(0))
    assert obs.shape == (30, 2, 8268)
    assert obs.dtype == reward.dtype == jnp.float32
    assert env.num_actions == env.action_space().n == 43
    np.testing.assert_array_equal(np.argwhere(terminated), [[0, 1]])
    np.testing.assert_array_equal(np.argwhere(truncated), [[24, 0], [25, 1]])
    np.testing.assert_array_equal(time[:26, 0], [*range(1, 25), 0, 1])
    names = [name for name in info if name.startswith("Achievements/")]
    assert len(names) == 67
    assert set(info) == {*names, *EXTRA}
    ended = np.asarray(terminated | truncated)
    for name in names:
        assert set(np.unique(info[name])) <= {0.0, 100.0}
        assert not np.asarray(info[name])[~ended].any()
    same = (np.asarray(obs) == np.asarray(info["final_observation"])).all(-1)
    np.testing.assert_array_equal(same, ~ended)
    space = env.observation_space()
    assert space.shape == (8268,)
    # Mana is (6 + 3 intelligence) / 10, and intelligence goes up to 5.
    assert space.high == pytest.approx(2.1)
    assert float(obs.min()) >= space.low
    assert float(obs.max()) <= space.high
    assert space.binary == 9 * 11 * 83  # what is on each tile of the view
    np.testing.assert_array_equal(unpack(pack(obs, space.binary), 8268), obs)
    frame = env.render(state)
    assert frame.shape == (208, 176, 3)
    assert frame.dtype == jnp.uint8
    assert len(np.unique(np.asarray(frame).reshape(-1, 3), axis=0)) > 20


@pytest.mark.slow
def test_the_classic_picture_shows_where_the_player_is(classic) -> None:
    _, state = classic.reset(jax.random.key(3))
    one = jax.tree.map(lambda x: x[0], state)
    frame = np.asarray(jax.jit(classic.env.render)(one))  # textures are read while tracing
    assert frame.shape == (144, 144, 3)
    assert frame.dtype == np.uint8
    np.testing.assert_array_equal(frame, classic.env.render(one))
    # The tile above the player, turned to water, changes there and nowhere else.
    row, column = np.asarray(one.game.player_position)
    flooded = one.game.replace(map=one.game.map.at[row - 1, column].set(BlockType.WATER.value))
    changed = (np.asarray(classic.env.render(one.replace(game=flooded))) != frame).any(-1)
    rows, columns = np.nonzero(changed)
    assert 32 <= rows.min() <= rows.max() < 48
    assert 64 <= columns.min() <= columns.max() < 80


def test_options_reach_the_game() -> None:
    env = CraftaxClassic(max_steps=50, spawn_cow_chance=0.5, always_diamond=False, day_length=100)
    params = env.default_params
    assert params.max_steps_in_episode == 50
    assert params.game.spawn_cow_chance == 0.5
    assert params.game.always_diamond is False
    assert params.game.day_length == 100
    assert CraftaxClassic().default_params.max_steps_in_episode == 10_000
    assert Craftax().default_params.max_steps_in_episode == 100_000


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CraftaxClassic, {"max_steps": 0}, r"max_steps=0 must be a whole number from 1 to"),
        (Craftax, {"max_steps": 1.5}, r"max_steps=1\.5 must be a whole number from 1 to"),
        (Craftax, {"gods": True}, r"option='gods' is unknown; choose one of: .*god_mode.*max_step"),
        (Craftax, {"max_timesteps": 9}, r"option='max_timesteps' is unknown"),
        (Craftax, {"god_mode": 1}, r"god_mode=1 must be True or False"),
        (CraftaxClassic, {"day_length": 0}, r"day_length=0 must be a whole number >= 1"),
        (CraftaxClassic, {"spawn_cow_chance": 1.5}, r"spawn_cow_chance=1\.5 .* from 0 to 1"),
        (CraftaxClassic, {"spawn_cow_chance": "often"}, r"spawn_cow_chance='often'"),
    ],
)
def test_bad_options_are_named(kind, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_a_missing_package_says_what_to_install(monkeypatch) -> None:
    module = "craftax.craftax_classic.envs.craftax_symbolic_env"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "agalite\[envs,craftax\]"'):
        CraftaxClassic()
