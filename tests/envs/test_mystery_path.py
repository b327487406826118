"""Mystery Path's rules, one by one, on paths made for the purpose."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.envs.mystery_path import (
    MysteryPath,
    MysteryPathGrid,
    MysteryPathParams,
    generator,
    pixels,
)
from agalite.envs.vector import VectorEnv

KEY = jax.random.key(0)
NOOP, LEFT, RIGHT, FORWARD = range(4)
# The continuous variant's actions, 3 h + v.
STAY, UP, DOWN, WEST, EAST = 0, 1, 2, 3, 6
RED = (255, 0, 0)

GRID = MysteryPathGrid()
FREE = MysteryPath()


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def straight(env: Any) -> Any:
    """A path along y = 3 from the left to the right."""
    on_path = np.zeros((7, 7), bool)
    on_path[:, 3] = True
    return env.state_from_path((0, 3), (6, 3), on_path)


STEPS: dict[Any, Any] = {}


def step_of(env: Any) -> Any:
    """The compiled `step_env(state, action, params)`, one for all tests."""
    return STEPS.setdefault(env, jax.jit(lambda s, a, p: env.step_env(KEY, s, a, p)))


def play(env: Any, actions: list[Any], params: MysteryPathParams | None = None) -> list[Any]:
    """Steps from the beginning of the straight path, as (obs, state, reward, done, info)."""
    state, steps = straight(env), []
    for action in actions:
        steps.append(step_of(env)(state, jnp.int32(action), params or env.default_params))
        state = steps[-1][1]
    return steps


def rewards(steps: list[Any]) -> list[float]:
    return [round(float(step[2]), 6) for step in steps]


def red_pixels(obs: Any) -> int:
    return int((np.asarray(obs) == RED).all(axis=-1).sum())


def test_walking_the_path_pays_each_new_tile_and_the_goal() -> None:
    steps = play(GRID, [RIGHT] + [FORWARD] * 6)
    assert rewards(steps) == [0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 1.0]
    assert [bool(step[3]) for step in steps] == [False] * 6 + [True]
    assert [float(step[4]["success"]) for step in steps] == [0.0] * 6 + [1.0]
    assert [int(step[4]["num_fails"]) for step in steps] == [0] * 7
    assert steps[-1][1].centre.tolist() == [78, 42]
    assert bool(GRID.is_terminated(steps[-1][1], GRID.default_params))


def test_a_tile_pays_once_and_the_origin_never() -> None:
    there_and_back = [RIGHT, FORWARD, RIGHT, RIGHT, FORWARD, LEFT, LEFT, FORWARD, FORWARD]
    assert rewards(play(GRID, there_and_back)) == [0, 0.1, 0, 0, 0, 0, 0, 0, 0.1]


def test_a_fall_costs_a_step_whose_action_is_ignored() -> None:
    params = GRID.default_params.replace(reward_fall_off=-0.5)
    steps = play(GRID, [RIGHT, FORWARD, LEFT, FORWARD, FORWARD, NOOP, RIGHT, FORWARD], params)
    assert rewards(steps) == [0, 0.1, 0, -0.5, 0, 0, 0, 0], "marks survive the fall"
    fallen, returned = steps[3], steps[4]
    assert fallen[1].centre.tolist() == [18, 30]
    assert bool(fallen[1].off_path)
    assert int(fallen[4]["num_fails"]) == 1
    assert not bool(fallen[3])
    assert returned[1].centre.tolist() == [6, 42]
    assert not bool(returned[1].off_path)
    assert int(returned[4]["num_fails"]) == 1
    turned = play(GRID, [FORWARD, RIGHT])[-1][1]
    assert int(turned.rotation) == 0, "an ignored turn turns nothing"
    assert red_pixels(fallen[0]) == 52
    assert red_pixels(returned[0]) == 0


def test_a_second_fall_counts_again() -> None:
    steps = play(GRID, [FORWARD, NOOP, FORWARD, NOOP])
    assert [int(step[4]["num_fails"]) for step in steps] == [1, 1, 2, 2]
    assert [bool(step[1].off_path) for step in steps] == [True, False, True, False]


def test_turns_go_all_the_way_round() -> None:
    assert [int(s[1].rotation) for s in play(GRID, [LEFT] * 4)] == [2, 4, 6, 0]
    assert [int(s[1].rotation) for s in play(GRID, [RIGHT] * 4)] == [6, 4, 2, 0]


def test_the_border_stops_the_agent() -> None:
    grid = play(GRID, [LEFT, FORWARD])[-1]
    assert grid[1].centre.tolist() == [6, 42]
    assert not bool(grid[1].off_path)
    free = play(FREE, [WEST] * 3)[-1]
    assert free[1].centre.tolist() == [6, 42]
    corner = np.ones((7, 7), bool)
    state = FREE.state_from_path((6, 6), (0, 0), corner)
    for action in (EAST, DOWN, EAST + DOWN):
        after = step_of(FREE)(state, jnp.int32(action), FREE.default_params)[1]
        assert after.centre.tolist() == [78, 78]


@pytest.mark.parametrize(
    ("action", "shift", "rotation"),
    [
        (STAY, (0, 0), 6),
        (UP, (0, -3), 0),
        (DOWN, (0, 3), 4),
        (WEST, (-3, 0), 2),
        (WEST + UP, (-2, -2), 1),
        (WEST + DOWN, (-2, 2), 3),
        (EAST, (3, 0), 6),
        (EAST + UP, (2, -2), 7),
        (EAST + DOWN, (2, 2), 5),
    ],
)
def test_free_movement(action: int, shift: tuple[int, int], rotation: int) -> None:
    before, after = (step[1] for step in play(FREE, [EAST, action]))
    moved = after.centre - before.centre
    assert moved.tolist() == list(shift)
    assert int(after.rotation) == rotation


def test_free_movement_to_the_goal_and_off_the_path() -> None:
    steps = play(FREE, [EAST] * 22)
    paid = [0.1 if x % 12 < 3 else 0.0 for x in range(9, 72, 3)] + [1.0]
    assert rewards(steps) == pytest.approx(paid)
    assert [bool(step[3]) for step in steps] == [False] * 21 + [True]
    steps = play(FREE, [UP, UP, UP, EAST])
    assert [bool(step[1].off_path) for step in steps] == [False, False, True, False]
    assert steps[3][1].centre.tolist() == [6, 42]
    assert int(steps[3][1].rotation) == 0


@pytest.mark.parametrize("env", [GRID, FREE], ids=["grid", "free"])
@pytest.mark.parametrize("action", [-1, -3, 9, 1000])
def test_an_unknown_action_does_nothing(env: Any, action: int) -> None:
    before, after = (step[1] for step in play(env, [NOOP, action]))
    assert after.centre.tolist() == before.centre.tolist()
    assert int(after.rotation) == int(before.rotation)


def test_pairs_are_the_same_actions() -> None:
    paired = MysteryPath(multi_discrete=True)
    state = straight(FREE)
    for action in range(9):
        single = step_of(FREE)(state, jnp.int32(action), FREE.default_params)
        halves = jnp.int32([action // 3, action % 3])
        pair = step_of(paired)(state, halves, paired.default_params)
        jax.tree.map(np.testing.assert_array_equal, single, pair)
    space = paired.action_space()
    drawn = np.asarray(jax.vmap(space.sample)(jax.random.split(KEY, 100)))
    assert drawn.shape == (100, 2)
    assert sorted(set(drawn.ravel().tolist())) == [0, 1, 2]
    assert bool(space.contains(jnp.int32([2, 0])))
    assert not bool(space.contains(jnp.int32([3, 0])))
    for wrong, action in ((FREE, jnp.int32([1, 1])), (paired, jnp.int32(1))):
        with pytest.raises(ValueError, match="action has shape"):
            wrong.step_env(KEY, state, action, wrong.default_params)


def ends(env: Any, actions: list[int], max_steps: int) -> list[tuple[bool, bool]]:
    """(terminated, truncated) of each step."""
    params = env.default_params.replace(max_steps_in_episode=max_steps)
    steps = play(env, actions, params)
    return [(bool(step[3]), bool(env.is_truncated(step[1], params))) for step in steps]


@pytest.mark.parametrize("env", [GRID, FREE], ids=["grid", "free"])
def test_running_out_of_time_truncates_and_never_terminates(env: Any) -> None:
    assert ends(env, [NOOP] * 3, 3) == [(False, False), (False, False), (False, True)]


def test_the_goal_in_the_last_step_terminates_and_does_not_truncate() -> None:
    found = ends(GRID, [RIGHT] + [FORWARD] * 6, 7)
    assert found == [(False, False)] * 6 + [(True, False)]


def test_what_is_shown() -> None:
    state = straight(GRID)
    fallen = state.replace(off_path=jnp.bool_(True))

    def seen(state: Any, **options: Any) -> np.ndarray:
        return np.asarray(MysteryPathGrid(**options).get_obs(state))

    plain = seen(state)
    assert (plain[72:, 36:48] == (0, 255, 0)).all()
    assert (plain[0, 36] == (0, 0, 255)).all()
    # The agent stands on the origin and faces up: the middle of its back is the body's colour.
    assert (plain[6, 47] == (250, 204, 153)).all()
    assert (plain[1, 38] == (50, 50, 50)).all()
    assert not seen(state, show_goal=False)[72:].any()
    assert not (seen(state, show_origin=False) == (0, 0, 255)).all(axis=-1).any()
    assert red_pixels(seen(fallen)) == 52
    np.testing.assert_array_equal(seen(fallen, visual_feedback=False), plain)
    np.testing.assert_array_equal(GRID.render(state), plain.transpose(1, 0, 2))
    np.testing.assert_array_equal(MysteryPathGrid(size=20).render(state), GRID.render(state))


@pytest.mark.parametrize("size", [7, 42, 64, 83])
def test_a_smaller_picture_is_the_mean_colour(size: int) -> None:
    env = MysteryPath(size=size)
    state = straight(FREE).replace(off_path=jnp.bool_(True), rotation=jnp.int32(3))
    large = np.asarray(FREE.get_obs(state)).astype(np.int64)
    for axis in (0, 1):
        parts = np.split(large.repeat(size, axis), size, axis)
        large = np.stack([part.sum(axis) for part in parts], axis)
    small = jax.jit(env.get_obs)(state)
    np.testing.assert_array_equal(small, (large + 84 * 42) // 84**2)
    assert small.shape == env.observation_space().shape == (size, size, 3)
    assert small.dtype == jnp.uint8


def test_spaces() -> None:
    for env, actions in ((GRID, 4), (FREE, 9)):
        space = env.observation_space()
        assert (space.shape, space.dtype) == ((84, 84, 3), jnp.uint8)
        assert env.action_space().n == env.num_actions == actions
        assert env.costly_reset


@pytest.mark.parametrize("env", [GRID, FREE], ids=["grid", "free"])
def test_no_leaf_changes_type_between_steps(env: Any) -> None:
    """Weak types would compile a step again for the second state."""
    params = env.default_params
    _, first = jax.eval_shape(env.reset_env, KEY, params)
    _, second, *_ = jax.eval_shape(env.step_env, KEY, first, jnp.int32(0), params)
    for leaf, after in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (after.dtype, after.weak_type) == (leaf.dtype, False)


@pytest.mark.slow
@pytest.mark.parametrize("env", [MysteryPathGrid(max_steps=6), MysteryPath(max_steps=6)])
def test_together_is_as_one_by_one(env: Any) -> None:
    """A batch, `vmap`, and single steps give the same bits, across the ends of episodes."""
    count = 5
    batch = VectorEnv(env, count)
    several = jax.jit(jax.vmap(env.step))
    _, state = batch.reset(KEY)
    # One is a step from its goal; the others end at different times.
    near = straight(env).replace(centre=jnp.int32([71, 42]), rotation=jnp.int32(6))
    state = jax.tree.map(lambda many, one: many.at[0].set(one), state, near)
    state = state.replace(time=jnp.arange(count, dtype=jnp.int32))
    fast, ended = jax.jit(batch.step), 0
    forward = FORWARD if env.num_actions == 4 else EAST
    for key in jax.random.split(KEY, 8):
        actions = jax.random.randint(key, (count,), 0, env.num_actions).at[0].set(forward)
        keys = jax.random.split(key, count)
        expected = several(keys, state, actions)
        jax.tree.map(np.testing.assert_array_equal, fast(key, state, actions), expected)
        host, all_ = jax.tree.map(np.asarray, (state, expected))  # whose parts cost no program
        for row in range(count):
            one = env.step(keys[row], jax.tree.map(lambda x, r=row: x[r], host), actions[row])
            jax.tree.map(lambda a, b, r=row: np.testing.assert_array_equal(a, b[r]), one, all_)
        state, over = expected[1], np.asarray(expected[3] | expected[4])
        ended += over.sum()
        final, obs = (np.asarray(x) for x in (expected[5]["final_observation"], expected[0]))
        assert (final[over] != obs[over]).any() == over.any()
        np.testing.assert_array_equal(final[~over], obs[~over])
    assert ended >= count


def test_the_draws_are_fair() -> None:
    """Each number as often as the original's generator draws it, within 4.5 standard errors."""
    count = 5_000
    keys = jax.random.split(jax.random.key(9), count)
    draws = jax.jit(jax.vmap(lambda key: generator.draws(key, jnp.arange(4))))(keys)
    draws = jax.tree.map(np.asarray, draws)

    def check(values: np.ndarray, chances: dict[int, float]) -> None:
        assert set(np.unique(values)) <= set(chances)
        for value, chance in chances.items():
            share = (values == value).mean(axis=0)
            assert (np.abs(share - chance) < 4.5 * (chance * (1 - chance) / count) ** 0.5).all()

    check(draws.side, dict.fromkeys(range(4), 1 / 4))
    check(draws.along, dict.fromkeys(range(7), 1 / 7))
    check(draws.interior, {0: 0.67, 1: 0.33})
    check(draws.number, {4: 0.5, 8: 0.5})
    check(draws.costs, dict.fromkeys(range(1, 9), 1 / 8))
    check(draws.shuffle.argmin(axis=1), dict.fromkeys(range(49), 1 / 49))
    apart = np.diff(np.sort(draws.shuffle.astype(np.int64), axis=1), axis=1)
    assert apart.min() > 0, "no two are equal"


def test_paths_join_opposite_sides() -> None:
    keys = jax.random.split(jax.random.key(3), 400)
    reset = jax.jit(jax.vmap(lambda k, p: GRID.reset_env(k, p)[1], in_axes=(0, None)))
    for sides in ((0, 1, 2, 3), (0,), (1,), (2,), (3,), (3, 0, 0)):
        # Named over and over, to the same length, so that one program does for all.
        often = sides * (12 // len(sides))
        state = reset(keys, MysteryPathGrid(cardinal_origin_choice=often).default_params)
        start, end, on_path = (np.asarray(x) for x in (state.start, state.end, state.on_path))
        used = set()
        for (sx, sy), (ex, ey), tiles in zip(start, end, on_path, strict=True):
            assert (abs(sx - ex) == 6) or (abs(sy - ey) == 6)
            here, reached = {(sx, sy)}, set()
            while here:
                reached |= here
                here = {
                    (x + dx, y + dy)
                    for x, y in here
                    for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1))
                    if 0 <= x + dx < 7 and 0 <= y + dy < 7 and tiles[x + dx, y + dy]
                } - reached
            assert (ex, ey) in reached
            assert len(reached) == tiles.sum() >= 7
        for side, (axis, value) in enumerate(((0, 0), (0, 6), (1, 0), (1, 6))):
            crosses = (start[:, axis] == value) & (end[:, axis] == 6 - value)
            # A corner to the opposite corner crosses both ways.
            clear = crosses & (np.abs(start - end).min(axis=1) < 6)
            used |= {side} if clear.any() else set()
        assert used == set(sides)
        if sides == (3, 0, 0):
            share = ((start[:, 0] == 0) & (end[:, 0] == 6)).mean()
            assert 0.55 < share < 0.78, "a side named twice comes twice as often"


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**31 - 1),
    limit=st.integers(1, 30),
    shown=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    pay=st.tuples(*[st.floats(-2, 2, width=32)] * 4),
    free=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_whatever_the_options(
    seed: int, limit: int, shown: tuple[bool, ...], pay: tuple[float, ...], free: bool
) -> None:
    """Thirty random steps: rewards are sums of what is paid, and all stays in range."""
    env = FREE if free else GRID
    made = type(env)(
        max_steps=limit,
        show_origin=shown[0],
        show_goal=shown[1],
        visual_feedback=shown[2],
        reward_goal=pay[0],
        reward_fall_off=pay[1],
        reward_step=pay[2],
        reward_path_progress=pay[3],
    )
    obs, state, reward, terminated, truncated, info = _random_walk(env)(
        jax.random.key(seed), made.default_params
    )
    goal, fall, step, progress = (np.float32(x) for x in pay)
    expected = np.array([step, step + goal, step + fall, step + progress])
    assert np.isclose(np.asarray(reward)[:, None], expected[None], atol=1e-5).any(axis=1).all()
    assert not (terminated & truncated).any()
    np.testing.assert_array_equal(terminated, info["success"] == 1)
    assert (np.asarray(state.time) < limit).all()
    assert np.asarray(state.centre).min() >= 6
    assert np.asarray(state.centre).max() <= 78
    if not shown[2]:
        assert red_pixels(obs) == 0
    if not shown[1]:
        assert not (np.asarray(obs) == (0, 255, 0)).all(axis=-1).any()


WALKS: dict[Any, Any] = {}


def _random_walk(env: Any) -> Any:
    def walk(key: Any, params: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            action = env.action_space().sample(key)
            obs, state, *rest = env.step(key, state, action, params)
            return state, (obs, state, *rest)

        return jax.lax.scan(step, env.reset(key, params)[1], jax.random.split(key, 30))[1]

    return WALKS.setdefault(env, jax.jit(walk))


@pytest.mark.parametrize("kind", [MysteryPathGrid, MysteryPath])
@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("max_steps", 0, "whole number from 1"),
        ("max_steps", 2.5, "whole number from 1"),
        ("max_steps", 2**31, "whole number from 1"),
        ("size", 6, "from 7 to 84"),
        ("size", 85, "from 7 to 84"),
        ("agent_scale", 0.48, "at least 0.04 and less than 0.48"),
        ("agent_scale", 0.03, "at least 0.04 and less than 0.48"),
        ("agent_scale", "big", "finite number"),
        ("cardinal_origin_choice", (), "sides 0, 1, 2 and 3"),
        ("cardinal_origin_choice", (0, 4), "sides 0, 1, 2 and 3"),
        ("cardinal_origin_choice", 1, "sides 0, 1, 2 and 3"),
        ("cardinal_origin_choice", "01", "sides 0, 1, 2 and 3"),
        ("show_origin", 1, "True or False"),
        ("show_goal", None, "True or False"),
        ("visual_feedback", "yes", "True or False"),
        ("reward_goal", float("nan"), "finite number"),
        ("reward_fall_off", float("inf"), "finite number"),
        ("reward_step", "1", "finite number"),
        ("reward_path_progress", True, "finite number"),
    ],
)
def test_bad_options_are_named(kind: Any, option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r}")) as caught:
        kind(**{option: value})
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"), [("agent_speed", -1.0), ("agent_speed", "x"), ("multi_discrete", 2)]
)
def test_bad_options_of_the_free_variant(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r}")):
        MysteryPath(**{option: value})


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("start", ((0, 3, 1), (6, 3), np.ones((7, 7)))),
        ("end", ((0, 3), 6, np.ones((7, 7)))),
        ("on_path", ((0, 3), (6, 3), np.ones((7, 6)))),
    ],
)
def test_bad_paths_are_named(name: str, path: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"{name} has shape"):
        GRID.state_from_path(*path)


def test_a_fast_agent_stops_at_the_border_and_a_slow_one_stays() -> None:
    state = straight(FREE)
    for speed, centre in ((1e9, [78, 42]), (0.9, [6, 42]), (2.0, [8, 42])):
        env = MysteryPath(agent_speed=speed)
        after = env.step_env(KEY, state, EAST, env.default_params)[1]
        assert after.centre.tolist() == centre


def test_the_sprites_fit_their_atlas() -> None:
    sprites = pixels.atlas(0.25)
    assert sprites.rows.shape == (2 * 8 * (sprites.height + 1), 3 * 2 * 83)
    picture = sprites.rows.reshape(2, 8, sprites.height + 1, 166, 3)
    assert not picture[:, :, -1].any(), "the last row of every sprite is clear"
    assert (
        picture[0, 0, -sprites.top - 6 : -sprites.top + 6, 83 - 6 : 83 + 6].any(axis=-1).sum() > 100
    )
