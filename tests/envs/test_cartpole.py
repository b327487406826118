"""CartPole: step by step against Gymnasium's, in both precisions; what is seen of it, and noise."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.envs.cartpole import CartPoleState, MaskedCartPole, NoisyMaskedCartPole

MASKED, NOISY = MaskedCartPole(), NoisyMaskedCartPole()
LIMITS = np.array([2.4, np.inf, 12 * 2 * np.pi / 360, np.inf])


def random_action(rng, _state):
    return int(rng.integers(2))


def balancing_action(rng, state):
    """Keeps the pole up for 500 steps and more; now and then a random push."""
    x, x_dot, theta, theta_dot = state
    if rng.random() < 0.1:
        return random_action(rng, state)
    return int(theta + 0.3 * theta_dot + 0.02 * x + 0.05 * x_dot > 0)


def sideways_action(_rng, state):
    """Balances a pole that leans to the right, so that the cart leaves the track."""
    return int(state[2] + 0.3 * state[3] > 0.05)


@pytest.fixture(scope="module")
def episodes():
    """Of Gymnasium's CartPole-v1: states (T + 1, 4), actions, rewards, terminated, truncated."""
    env, rng, found = gymnasium.make("CartPole-v1"), np.random.default_rng(0), []
    for number in range(300):
        policy = (random_action, balancing_action, sideways_action)[
            min(number // 260 + number // 290, 2)
        ]
        env.reset(seed=number)
        states, rows, done = [env.unwrapped.state], [], False
        while not done:
            action = policy(rng, states[-1])
            _, reward, terminated, truncated, _ = env.step(action)
            states.append(env.unwrapped.state)
            rows.append((action, reward, terminated, truncated))
            done = terminated or truncated
        found.append((np.array(states), *(np.array(column) for column in zip(*rows, strict=True))))
    return found


def stacked(states, dtype, time):
    return CartPoleState(jnp.asarray(time, jnp.int32), *jnp.asarray(states, dtype).T)


def as_array(state):
    return np.stack([state.x, state.x_dot, state.theta, state.theta_dot], axis=-1)


def one_step(states, actions, times, dtype):
    key = jax.random.key(0)
    params = MASKED.default_params
    step = jax.jit(jax.vmap(lambda s, a: MASKED.step_env(key, s, a, params)))
    obs, after, reward, terminated, _ = step(stacked(states, dtype, times), jnp.asarray(actions))
    return obs, after, reward, terminated, jax.vmap(lambda s: MASKED.is_truncated(s, params))(after)


@pytest.mark.parametrize(("precision", "error"), [("float32", 1e-6), ("float64", 1e-14)])
def test_every_step_is_gymnasiums(episodes, precision, error):
    """From the same state, the same next state, reward and end: 22,734 steps of 300 episodes."""
    before = np.concatenate([states[:-1] for states, *_ in episodes])
    after = np.concatenate([states[1:] for states, *_ in episodes])
    times = np.concatenate([np.arange(len(actions)) for _, actions, *_ in episodes])
    actions, rewards, terminated, truncated = (
        np.concatenate([episode[i] for episode in episodes]) for i in range(1, 5)
    )
    with jax.enable_x64(precision == "float64"):
        obs, state, reward, ended, late = one_step(before, actions, times, precision)
        found = as_array(state)
    assert found.dtype == precision
    np.testing.assert_allclose(found, after, rtol=error, atol=error)
    assert np.array_equal(reward, rewards)
    assert reward.dtype == obs.dtype == jnp.float32
    np.testing.assert_allclose(obs, after[:, [0, 2]], rtol=1e-6, atol=1e-6)
    # Rounding may move a state across a limit it is next to, and nowhere else.
    clear = np.all(np.abs(np.abs(after) - LIMITS) > 10 * error, axis=1)
    assert clear.mean() > 0.999
    assert np.array_equal(np.asarray(ended)[clear], terminated[clear])
    # Gymnasium reports both at once when the pole falls at the very limit; we never do.
    assert np.array_equal(np.asarray(late)[clear], (truncated & ~terminated)[clear])
    # All three ends have been seen.
    assert np.any(np.abs(after[terminated, 0]) > LIMITS[0])
    assert np.any(np.abs(after[terminated, 2]) > LIMITS[2])
    assert np.any(truncated)


def test_whole_episodes_are_gymnasiums(episodes):
    """Only the first state and the actions given, in float64.

    For 100 steps at most: an error grows by e every quarter of a second, or 12 steps.
    """
    with jax.enable_x64(True):
        step = jax.jit(lambda s, a: MASKED.step_env(jax.random.key(0), s, a, MASKED.default_params))
        for states, actions, _, terminated, _ in [*episodes[:10], *episodes[260:264], episodes[-1]]:
            state = stacked(states[0], "float64", 0)
            found, ends = [], []
            for action in actions[:100]:
                _, state, _, end, _ = step(state, int(action))
                found.append(as_array(state))
                ends.append(bool(end))
            np.testing.assert_allclose(np.array(found), states[1:101], rtol=1e-9, atol=1e-11)
            assert ends == terminated[:100].tolist()
            assert int(state.time) == min(len(actions), 100)


@jax.jit
def rollout(key, actions, env_params):
    obs, state = NOISY.reset(key, env_params)

    def one(carry, action):
        key, state = carry
        key, now = jax.random.split(key)
        obs, state, reward, terminated, truncated, info = NOISY.step(now, state, action, env_params)
        seen = (obs, state, reward, terminated, truncated, info["final_observation"])
        return (key, state), seen

    return (obs, state), jax.lax.scan(one, (key, state), actions)[1]


@settings(max_examples=20, deadline=None)
@given(noise=st.floats(0, 2), max_steps=st.integers(1, 60), seed=st.integers(0, 2**31 - 1))
def test_episodes_begin_end_and_stay_in_their_space(noise, max_steps, seed):
    env = NoisyMaskedCartPole(noise, max_steps=max_steps)
    actions = jnp.asarray(np.random.default_rng(seed).integers(2, size=200), jnp.int32)
    (first, _), out = rollout(jax.random.key(seed), actions, env.default_params)
    obs, state, reward, terminated, truncated, final = jax.tree.map(np.asarray, out)
    high = np.asarray(env.observation_space(env.default_params).high)
    for seen in (first[None], obs, final):
        assert seen.dtype == np.float32
        assert np.all(np.abs(seen) <= high)
    assert np.all(reward == 1.0)
    done = terminated | truncated
    assert not np.any(terminated & truncated)
    # A new state starts near the origin, and the clock with it.
    assert np.all(np.abs(as_array(state)[done]) <= 0.05)
    time = 0
    for t in range(200):
        time += 1
        assert truncated[t] == (time == max_steps and not terminated[t])
        time = 0 if done[t] else time
        assert state.time[t] == time


def test_start_is_gymnasiums():
    keys = jax.random.split(jax.random.key(0), 20_000)
    for env in (MASKED, NOISY):
        start = as_array(jax.vmap(env.reset)(keys)[1])
        assert np.abs(start).max() <= 0.05
        # Of a uniform distribution on (-0.05, 0.05): mean, deviation and independence.
        assert start.mean(axis=0) == pytest.approx([0] * 4, abs=0.0015)
        assert start.std(axis=0) == pytest.approx([0.1 / np.sqrt(12)] * 4, rel=0.02)
        assert np.abs(np.corrcoef(start, rowvar=False) - np.eye(4)).max() < 0.04


def test_velocities_are_removed():
    for env in (MASKED, NoisyMaskedCartPole(0.0)):
        obs, state = env.reset(jax.random.key(1))
        assert obs.tolist() == [state.x, state.theta]
        obs, state, *_ = env.step(jax.random.key(2), state, 1)
        assert obs.tolist() == [state.x, state.theta]
        assert env.observation_space(env.default_params).high == pytest.approx([4.8, 0.41887903])


def test_noise():
    """Normal, of the deviation asked for, its own for each feature, step and episode."""
    keys = jax.random.split(jax.random.key(0), 20_000)
    for deviation in (0.1, 0.5):
        env = NoisyMaskedCartPole(deviation)
        first, start = jax.vmap(env.reset)(keys)
        later, state, *_ = jax.vmap(lambda k, s, env=env: env.step(k, s, 1))(keys, start)
        noise = np.concatenate(
            [
                first - np.stack([start.x, start.theta], axis=1),
                later - np.stack([state.x, state.theta], axis=1),
            ],
            axis=1,
        )
        assert noise.mean(axis=0) == pytest.approx([0] * 4, abs=0.05 * deviation)
        assert noise.std(axis=0) == pytest.approx([deviation] * 4, rel=0.02)
        shares = [0.3173, 0.0455, 0.0027]
        for k, share in enumerate(shares, 1):
            slack = 5 * np.sqrt(share / noise.size)
            assert np.mean(np.abs(noise) > k * deviation) == pytest.approx(share, abs=slack)
        both = np.concatenate([noise, as_array(start)], axis=1)
        assert np.abs(np.corrcoef(both, rowvar=False) - np.eye(8)).max() < 0.04


def test_largest_noise_fits_the_space():
    """The extremes of the uniform numbers that the noise is made of."""
    low = np.nextafter(np.float32(-1), np.float32(0))
    ends = jnp.asarray([low, -low])
    assert float(jnp.abs(jnp.sqrt(2.0) * jax.lax.erf_inv(ends)).max()) < 6.0


def test_noise_is_only_in_what_is_seen():
    actions = jnp.asarray(np.random.default_rng(0).integers(2, size=200), jnp.int32)
    quiet, loud = (
        rollout(jax.random.key(5), actions, NoisyMaskedCartPole(noise).default_params)
        for noise in (0.0, 0.3)
    )
    for a, b in zip(jax.tree.leaves(quiet[1][1]), jax.tree.leaves(loud[1][1]), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(quiet[1][0], loud[1][0])
    assert rollout._cache_size() == 1


def test_same_key_same_episode():
    actions = jnp.zeros(200, jnp.int32)
    one, two, other = (
        rollout(jax.random.key(seed), actions, NOISY.default_params) for seed in (1, 1, 2)
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(one[1][0], other[1][0])


def test_strict_types_and_ranks():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for env in (MaskedCartPole(), NoisyMaskedCartPole()):
            keys = jax.random.split(jax.random.key(0), 3)
            _, state = jax.vmap(env.reset)(keys)
            step = jax.jit(jax.vmap(env.step))
            for _ in range(2):
                _, state, *_ = step(keys, state, jnp.ones(3, jnp.int32))
            assert step._cache_size() == 1


@pytest.mark.parametrize("noise", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_bad_noise(noise):
    with pytest.raises(ValueError, match=r"noise=.* must be a finite number >= 0"):
        NoisyMaskedCartPole(noise)


@pytest.mark.parametrize("kind", [MaskedCartPole, NoisyMaskedCartPole])
def test_bad_limit(kind):
    for limit in (0, 2**31):
        with pytest.raises(ValueError, match=rf"max_steps={limit} must be a whole number from 1"):
            kind(max_steps=limit)


def test_picture():
    draw = jax.jit(MASKED.render)
    pole = (202, 152, 101)

    def middle(frame, colour):
        return np.argwhere((frame == colour).all(axis=2)).mean(axis=0)

    upright, aside, fallen = (
        np.asarray(draw(stacked(np.array([x, 0, theta, 0]), "float32", 0)))
        for x, theta in ((0, 0), (1, 0), (0, 0.2))
    )
    assert upright.shape == (200, 300, 3)
    assert upright.dtype == np.uint8
    assert middle(upright, pole)[1] == pytest.approx(149.5, abs=0.5)
    assert middle(aside, pole)[1] - middle(upright, pole)[1] == pytest.approx(62.5, abs=1)
    assert middle(fallen, pole)[1] > middle(upright, pole)[1] + 3
