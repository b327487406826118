"""T-Maze: the rules, restated in plain Python, against the compiled environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.envs import drawing
from agalite.envs.tmaze import DOWN, LEFT, RIGHT, UP, TMaze, TMazeParams

ENV = TMaze()
STEPS = 80


@jax.jit
def rollout(key, actions, params):
    """The first observation, and all that follows from the actions, new episodes included."""
    first, state = ENV.reset(key, params)

    def one(carry, action):
        key, state = carry
        key, now = jax.random.split(key)
        position, cue = state.position, state.cue
        obs, state, *rest = ENV.step(now, state, action, params)
        return (key, state), (position, cue, obs, state.position, *rest)

    _, out = jax.lax.scan(one, (key, state), actions)
    return first, out


def gray(position):
    digits = f"{position:08b}"
    return [int(digit != before) for before, digit in zip("0" + digits[:-1], digits, strict=True)]


def check_first(obs, distractors_allowed):
    assert obs[:2].tolist() in ([0, 1], [1, 0])
    assert obs[2:10].tolist() == [0] * 8
    if not distractors_allowed:
        assert obs[10:].tolist() == [0] * 6


def check_rules(corridor, max_steps, distractors_at_start, first, out, actions):
    """Follow the episodes with nothing but the paper's rules and the cues that were shown."""
    out = jax.tree.map(np.asarray, out)
    check_first(first, distractors_at_start)
    position, time = 0, 0
    pays = UP if first[:2].tolist() == [0, 1] else DOWN
    _, _, obs, positions, rewards, terminated, truncated, info = out
    for t, action in enumerate(actions):
        time += 1
        turned = position == corridor - 1 and action in (UP, DOWN)
        if turned:
            reward = 4.0 if action == pays else -1.0
        else:
            reward = -0.1
            if position < corridor - 1:
                position = max(0, position + {LEFT: -1, RIGHT: 1}.get(action, 0))
        assert rewards[t] == np.float32(reward)
        assert terminated[t] == turned
        assert truncated[t] == (time == max_steps and not turned)
        assert info["success"][t] == float(turned and action == pays)
        final = info["final_observation"][t]
        assert final[:2].tolist() == [0, 0]
        assert final[2:10].tolist() == gray(position)
        if turned or time == max_steps:
            check_first(obs[t], distractors_at_start)
            pays = UP if obs[t][:2].tolist() == [0, 1] else DOWN
            position, time = 0, 0
        else:
            assert np.array_equal(obs[t], final)
        assert positions[t] == position


def run(env, seed, actions):
    return rollout(jax.random.key(seed), jnp.asarray(actions, jnp.int32), env.default_params)


@settings(max_examples=25, deadline=None)
@given(
    corridor=st.integers(2, 60),
    max_steps=st.integers(1, 100),
    distractors_at_start=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
    eager=st.floats(0.0, 1.0),
)
def test_rules(corridor, max_steps, distractors_at_start, seed, eager):
    env = TMaze(corridor, max_steps=max_steps, distractors_at_start=distractors_at_start)
    rng = np.random.default_rng(seed)
    actions = np.where(rng.random(STEPS) < eager, RIGHT, rng.integers(4, size=STEPS))
    first, out = run(env, seed, actions)
    check_rules(corridor, max_steps, distractors_at_start, np.asarray(first), out, actions.tolist())


def test_every_branch():
    """Each way an episode can go, spelled out; corridor 3, so the junction is position 2."""
    # Not before the junction up and down, nor left of the start; no way back from the junction.
    actions = [UP, DOWN, LEFT, RIGHT, LEFT, RIGHT, RIGHT, LEFT, RIGHT, UP]
    expected = [0, 0, 0, 1, 0, 1, 2, 2, 2]
    padded = actions + [LEFT] * (STEPS - len(actions))
    for seed in range(4):
        _, (_, cue, _, positions, reward, terminated, truncated, info) = run(TMaze(3), seed, padded)
        assert positions[:9].tolist() == expected
        assert positions[9] == 0
        assert np.flatnonzero(terminated).tolist() == [9]
        assert not np.any(truncated)
        assert reward[9] == (4.0 if cue[9] == UP else -1.0)
        assert info["success"][9] == float(cue[9] == UP)
        assert np.all(np.delete(np.asarray(reward), 9) == np.float32(-0.1))


def test_turning_at_the_limit_is_no_truncation():
    actions = [RIGHT, RIGHT, DOWN] + [LEFT] * (STEPS - 3)
    _, (*_, terminated, truncated, _) = run(TMaze(3, max_steps=3), 0, actions)
    assert (bool(terminated[2]), bool(truncated[2])) == (True, False)
    assert (bool(terminated[5]), bool(truncated[5])) == (False, True)


def test_shortest_episode_has_corridor_steps_and_the_code_tells_all_positions_apart():
    @jax.jit
    def walk(key, params):
        def one(state, key):
            obs, state, reward, done, _ = ENV.step_env(key, state, RIGHT, params)
            return state, (obs, reward, done)

        _, state = ENV.reset_env(key, params)
        state, out = jax.lax.scan(one, state, jax.random.split(key, 255))
        return state, out, ENV.step_env(key, state, state.cue, params)

    key = jax.random.key(0)
    state, (obs, reward, done), last = walk(key, TMaze(256).default_params)
    codes = np.concatenate([np.zeros((1, 8)), np.asarray(obs)[:, 2:10]])
    assert codes.tolist() == [gray(position) for position in range(256)]
    assert np.abs(np.diff(codes, axis=0)).sum(axis=1).tolist() == [1] * 255
    assert len({tuple(code) for code in codes.tolist()}) == 256
    assert not np.any(done)
    assert int(state.position) == 255
    assert (float(last[2]), bool(last[3]), float(last[4]["success"])) == (4.0, True, 1.0)
    assert np.asarray(reward).sum() + last[2] == pytest.approx(4.0 - 25.5, abs=1e-4)
    # One program for every corridor: the length is an argument.
    short, _, _ = walk(key, TMaze(2).default_params)
    assert int(short.position) == 1
    assert walk._cache_size() == 1


@pytest.mark.parametrize("at_start", [False, True])
def test_cues_and_distractors_are_fair(at_start):
    env, count = TMaze(2, distractors_at_start=at_start), 20_000
    keys = jax.random.split(jax.random.key(3), count)
    first, state = jax.vmap(env.reset)(keys)
    later, *_ = jax.vmap(env.step)(keys, state, jnp.full(count, LEFT))
    assert set(np.unique(first)) | set(np.unique(later)) == {0.0, 1.0}
    # Six standard deviations of a mean of coin tosses.
    slack = 6 * 0.5 / np.sqrt(count)
    assert np.mean(first, axis=0)[:2] == pytest.approx([0.5, 0.5], abs=slack)
    assert np.all(first[:, 0] + first[:, 1] == 1)
    assert np.mean(later, axis=0)[10:] == pytest.approx([0.5] * 6, abs=slack)
    if at_start:
        together = np.concatenate([first[:, 1:2], first[:, 10:], later[:, 10:]], axis=1)
    else:
        assert not np.any(first[:, 10:])
        together = np.concatenate([first[:, 1:2], later[:, 10:]], axis=1)
    apart = np.corrcoef(together, rowvar=False) - np.eye(together.shape[1])
    assert np.abs(apart).max() < 6 / np.sqrt(count)


def test_same_key_same_episode():
    actions = np.random.default_rng(0).integers(4, size=STEPS)
    one, two, other = (run(TMaze(5), seed, actions) for seed in (7, 7, 8))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(one[1][2], other[1][2])


def test_many_corridors_at_once():
    """`jax.vmap` over the parameters, strict about types and ranks."""
    corridors = jnp.arange(2, 12)
    params = TMazeParams(1000, corridors, False)
    axes = TMazeParams(None, 0, None)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        keys = jax.random.split(jax.random.key(0), 10)
        _, state = jax.vmap(ENV.reset_env, in_axes=(0, axes))(keys, params)
        step = jax.jit(jax.vmap(ENV.step_env, in_axes=(0, 0, None, axes)))
        for _ in range(11):
            _, state, *_ = step(keys, state, jnp.int32(RIGHT), params)
    assert state.position.tolist() == (corridors - 1).tolist()
    assert step._cache_size() == 1


def test_spaces():
    assert ENV.num_actions == ENV.action_space().n == 4
    space = ENV.observation_space(ENV.default_params)
    assert (space.shape, space.dtype) == ((16,), jnp.float32)


@pytest.mark.parametrize("corridor", [1, 0, -5, 257, 10**9, 2.0, "160", None, True])
def test_bad_corridor(corridor):
    with pytest.raises(ValueError, match=r"corridor=.* must be a whole number from 2 to 256"):
        TMaze(corridor)


@pytest.mark.parametrize(
    "options", [{"max_steps": 0}, {"max_steps": 1.5}, {"distractors_at_start": 1}]
)
def test_bad_options(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TMaze(**options)


def test_picture():
    env = TMaze(4)
    draw = jax.jit(env.render)
    _, state = env.reset(jax.random.key(0))
    frames = [np.asarray(draw(state))]
    for action in (RIGHT, RIGHT, RIGHT, int(state.cue)):
        (*_,) = out = env.step_env(jax.random.key(1), state, action, env.default_params)
        state = out[1]
        frames.append(np.asarray(draw(state)))
    assert all(frame.shape == (96, 320, 3) and frame.dtype == np.uint8 for frame in frames)
    agent = [np.argwhere((frame == (33, 102, 204)).all(axis=2)).mean(axis=0) for frame in frames]
    rows, columns = np.array(agent).T
    assert np.all(np.diff(columns)[:3] > 70)
    assert columns[4] == columns[3]
    assert rows[:4].tolist() == [rows[0]] * 4
    assert (rows[4] < rows[0]) == (state.cue == UP)
    # The lamp is lit only while the cue is seen; the agent ends on the green tile.
    lit = [(frame == (255, 200, 0)).all(axis=2).sum() for frame in frames]
    assert lit[0] > 100
    assert lit[1:] == [0] * 4
    green = [(frame == (60, 170, 90)).all(axis=2).sum() for frame in frames]
    assert green[4] < green[3]


def test_shapes():
    """Painted are the pixels whose centres lie inside; what lies outside the frame is cut."""
    paper, ink = drawing.blank(6, 8, (0, 0, 0)), (9, 8, 7)

    def painted(frame):
        assert frame.shape == paper.shape
        assert frame.dtype == jnp.uint8
        assert set(map(tuple, np.asarray(frame).reshape(-1, 3))) <= {(0, 0, 0), ink}
        return {tuple(at) for at in np.argwhere(np.asarray(frame).any(axis=2)).tolist()}

    box = painted(drawing.rectangle(paper, 1, 2, 3, 4, ink))
    assert box == {(2, 1), (2, 2), (3, 1), (3, 2)}
    assert painted(drawing.rectangle(paper, -5, -5, 1, 1, ink)) == {(0, 0)}
    assert painted(drawing.circle(paper, 2.5, 2.5, 1.0, ink)) == {
        (2, 2),
        (1, 2),
        (3, 2),
        (2, 1),
        (2, 3),
    }
    assert painted(drawing.line(paper, 0.5, 3.5, 20.0, 3.5, 1.0, ink)) == {(3, x) for x in range(8)}
    steep = painted(drawing.line(paper, 0.5, 0.5, 5.5, 5.5, 0.5, ink))
    assert steep == {(i, i) for i in range(6)}
    point = painted(drawing.line(paper, 4.5, 2.5, 4.5, 2.5, 2.0, ink))
    assert point == painted(drawing.circle(paper, 4.5, 2.5, 1.0, ink))
