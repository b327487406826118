"""JAX environments through Gymnasium's interface."""

import copy
import subprocess
import sys
import textwrap
import warnings

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnax.environments import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.envs.cartpole import NoisyMaskedCartPole
from agalite.envs.gymnasium import GymnasiumWrapper, register, wrapper
from agalite.envs.mystery_path import MysteryPathGrid
from agalite.envs.tmaze import DOWN, LEFT, RIGHT, TMaze

register()

SMALL = ["agalite/TMaze-v0", "agalite/MaskedCartPole-v0", "agalite/NoisyMaskedCartPole-v0"]
PIXELS = ["agalite/MysteryPathGrid-v0", "agalite/MysteryPath-v0"]


@pytest.mark.parametrize("name", SMALL + PIXELS)
def test_gymnasium_finds_no_fault(name):
    env = gymnasium.make(name, render_mode="rgb_array").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
    assert env.spec is not None
    assert env.spec.id == name
    frame = env.render()
    assert frame.dtype == np.uint8
    assert frame.ndim == 3


def test_registering_again_changes_nothing():
    before = {name: gymnasium.spec(name) for name in SMALL + PIXELS}
    register()
    assert all(gymnasium.spec(name) is spec for name, spec in before.items())


def test_spaces():
    def found(name, **options):
        env = gymnasium.make(name, **options)
        return env.observation_space, env.action_space

    box, discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete
    assert found("agalite/TMaze-v0") == (box(0, 1, (16,), np.float32), discrete(4))
    edge = np.array([4.8, 24 * np.pi / 180], np.float32)
    assert found("agalite/MaskedCartPole-v0") == (box(-edge, edge, (2,), np.float32), discrete(2))
    pixels = box(0, 255, (84, 84, 3), np.uint8)
    assert found("agalite/MysteryPathGrid-v0") == (pixels, discrete(4))
    assert found("agalite/MysteryPath-v0") == (pixels, discrete(9))
    pairs = gymnasium.spaces.MultiDiscrete([3, 3])
    assert found("agalite/MysteryPath-v0", multi_discrete=True) == (pixels, pairs)


@settings(max_examples=15, deadline=None)
@given(corridor=st.integers(2, 12), max_steps=st.integers(1, 30), seed=st.integers(0, 2**32 - 1))
def test_same_steps_as_the_jax_environment(corridor, max_steps, seed):
    """Wrapped and not, from the same key, to the end of three episodes."""
    env = gymnasium.make("agalite/TMaze-v0", corridor=corridor, max_steps=max_steps)
    params = TMaze(corridor, max_steps=max_steps).default_params
    chance = np.random.default_rng(seed)
    draws, _ = gymnasium.utils.seeding.np_random(seed)
    for episode in range(3):
        obs, info = env.reset(seed=seed if episode == 0 else None)
        key = jax.random.wrap_key_data(draws.integers(2**32, size=2, dtype=np.uint32))
        key, now = SPLIT(key)
        expected, state = RESET(now, params)
        assert np.array_equal(obs, expected)
        assert info == {}
        ended = False
        while not ended:
            action = int(chance.choice([RIGHT, RIGHT, RIGHT, *range(4)]))
            key, now = SPLIT(key)
            expected, state, reward, end, _ = STEP(now, state, action, params)
            obs, got, terminated, truncated, info = env.step(action)
            assert np.array_equal(obs, expected)
            assert (type(got), got) == (float, float(reward))
            assert (terminated, truncated) == (bool(end), bool(ENV.is_truncated(state, params)))
            assert info == {"success": float(got == 4.0), "reached": float(terminated)}
            ended = terminated or truncated


ENV = TMaze()
RESET, STEP, SPLIT = jax.jit(ENV.reset_env), jax.jit(ENV.step_env), jax.jit(jax.random.split)


def episode(env, seed, actions):
    rows = [env.reset(seed=seed)[0]]
    for action in actions:
        obs, _, terminated, truncated, _ = env.step(action)
        rows.append(obs)
        if terminated or truncated:
            rows.append(env.reset()[0])
    return rows


@pytest.mark.parametrize("name", SMALL + PIXELS)
def test_a_seed_fixes_everything(name):
    actions = np.random.default_rng(0).integers(2, size=40)
    env, again = gymnasium.make(name), gymnasium.make(name)
    one, two, other = episode(env, 5, actions), episode(again, 5, actions), episode(env, 6, actions)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=False))


def test_what_comes_out_is_numpy_and_plain():
    env = gymnasium.make("agalite/MysteryPathGrid-v0").unwrapped
    obs, _ = env.reset(seed=0)
    before = obs.copy()
    obs[:] = 7  # the trainer's to write into, and nobody else's
    obs, reward, terminated, truncated, info = env.step(0)
    assert np.array_equal(obs, before)
    obs[:] = 7
    assert np.array_equal(env.step(0)[0], before)
    assert [type(x) for x in (reward, terminated, truncated)] == [float, bool, bool]
    assert {name: type(value) for name, value in info.items()} == {
        "success": float,
        "num_fails": int,
    }


def test_an_end_waits_for_reset():
    env = GymnasiumWrapper(TMaze(2, max_steps=3))
    for call in (lambda: env.step(0), lambda: env.state):
        with pytest.raises(ResetNeeded, match=r"before the first reset\(\)"):
            call()
    env.reset(seed=0)
    env.step(RIGHT)
    *_, terminated, truncated, _ = env.step(DOWN)
    assert (terminated, truncated) == (True, False)
    assert env.state.time == 2
    with pytest.raises(ResetNeeded, match="after the end"):
        env.step(LEFT)
    env.reset()
    ends = [env.step(LEFT)[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    with pytest.raises(ResetNeeded, match="after the end"):
        env.step(LEFT)


def test_closed_is_closed_until_the_next_reset():
    env = GymnasiumWrapper(TMaze(2), render_mode="rgb_array")
    first, _ = env.reset(seed=0)
    env.close()
    env.close()
    for call in (lambda: env.step(0), env.render, lambda: env.state):
        with pytest.raises(ClosedEnvironmentError, match=r"after close\(\)"):
            call()
    again, _ = env.reset(seed=0)
    np.testing.assert_array_equal(again, first)
    env.step(RIGHT)


def test_a_timeout_can_be_called_a_termination():
    for name in ("agalite/TMaze-v0", "agalite/MysteryPathGrid-v0"):
        for option, expected in ((False, (False, True)), (True, (True, False))):
            env = gymnasium.make(name, max_steps=2, timeout_terminates=option)
            env.reset(seed=0)
            assert env.step(0)[2:4] == (False, False)
            assert env.step(0)[2:4] == expected
            with pytest.raises(ResetNeeded):
                env.step(0)


BAD = [-1, 4, 10**30, 1.0, float("nan"), True, "up", None, [0], np.array([1]), np.float32(2)]


@pytest.mark.parametrize("action", BAD, ids=str)
def test_bad_actions(action):
    env = GymnasiumWrapper(TMaze(10))
    env.reset(seed=0)
    before = env.state
    with pytest.raises(ValueError, match=r"action=.* must be a whole number from 0 to 3"):
        env.step(action)
    assert env.state == before


@pytest.mark.parametrize("action", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_good_actions(action):
    env = GymnasiumWrapper(TMaze(10))
    env.reset(seed=0)
    env.step(action)
    assert env.state.position == 1


def test_pairs_of_actions():
    env = gymnasium.make("agalite/MysteryPath-v0", multi_discrete=True).unwrapped
    env.reset(seed=0)
    centre = env.state.centre
    env.step(np.array([0, 0]))
    assert np.array_equal(env.state.centre, centre)
    for action in ([3, 0], [-1, 0], [0], 1, [0.0, 1.0], [[0, 0]]):
        with pytest.raises(ValueError, match=r"must be 2 whole numbers, 0 to \[2, 2\]"):
            env.step(action)


def test_bad_options():
    with pytest.raises(ValueError, match=r"option='length' is unknown; choose one of: corridor,"):
        gymnasium.make("agalite/TMaze-v0", length=3)
    with pytest.raises(ValueError, match=r"corridor=1000 must be a whole number from 2 to 256"):
        gymnasium.make("agalite/TMaze-v0", corridor=1000)
    with pytest.raises(ValueError, match=r"render_mode='ascii' is unknown"):
        GymnasiumWrapper(TMaze(), render_mode="ascii")
    with pytest.raises(ValueError, match=r"timeout_terminates=1 must be True or False"):
        GymnasiumWrapper(TMaze(), timeout_terminates=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="corridor belong to the environment"):
        GymnasiumWrapper(TMaze(), corridor=3)


def test_options_for_one_episode():
    env = gymnasium.make("agalite/TMaze-v0", corridor=4).unwrapped

    def positions(**how):
        env.reset(**how)
        for _ in range(20):
            env.step(RIGHT)
        return env.state.position + 1

    assert positions(options={"corridor": 7}) == 7
    assert positions() == 4
    assert positions(options={}) == 4
    for options, message in (
        ({"length": 3}, r"reset option='length' is unknown; choose one of: corridor"),
        ({"corridor": 1}, r"corridor=1 must be a whole number"),
        ("corridor", r"options='corridor' must be a dict"),
        ([], r"options=\[\] must be a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            env.reset(options=options)
    pixels = gymnasium.make("agalite/MysteryPathGrid-v0").unwrapped
    with pytest.raises(ValueError, match=r"would change Box\(0, 255, \(84, 84, 3\), uint8\) to"):
        pixels.reset(options={"size": 42})
    shown, _ = pixels.reset(seed=0)
    hidden, _ = pixels.reset(seed=0, options={"show_goal": False})
    green = (0, 255, 0)
    assert (shown == green).all(axis=2).any()
    assert not (hidden == green).all(axis=2).any()
    with pytest.raises(ValueError, match="was given as an object"):
        GymnasiumWrapper(TMaze()).reset(options={"corridor": 3})


def test_programs_are_shared():
    """Two lengths of corridor compile once; two sizes of picture cannot."""
    one, two = GymnasiumWrapper(TMaze(10)), GymnasiumWrapper(TMaze(20))
    for env in (one, two):
        env.reset(seed=0)
        env.step(RIGHT)
    assert one._programs is two._programs
    assert one._programs.step._cache_size() == 1
    for env in (one, two):
        for _ in range(18):
            env.step(RIGHT)
    assert (one.state.position, two.state.position) == (9, 19)
    large, small = (wrapper._programs(MysteryPathGrid(size=size)) for size in (84, 42))
    assert large is not small
    assert large is wrapper._programs(MysteryPathGrid(max_steps=9))


class Forgetful(TMaze):
    """Reads its options from itself, which a shared program cannot allow."""

    def step_env(self, key, state, action, params):
        del params
        return super().step_env(key, state, action, self.default_params)


class Fickle(TMaze):
    """Its clock turns into a float."""

    def step_env(self, key, state, action, params):
        obs, state, *rest = super().step_env(key, state, action, params)
        return obs, state.replace(time=state.time.astype(jnp.float32)), *rest


class Tupled(TMaze):
    def action_space(self, params=None):
        del params
        return spaces.Tuple([spaces.Discrete(2)])


class Boxed(TMaze):
    def observation_space(self, params=None):
        del params
        return spaces.Discrete(2)


class Unpicklable(TMaze):
    def __init__(self, corridor):
        super().__init__(corridor)
        self.start = lambda: corridor


def test_environments_that_cannot_be_compared_share_nothing():
    one, two = GymnasiumWrapper(Unpicklable(3)), GymnasiumWrapper(Unpicklable(4))
    for env in (one, two):
        env.reset(seed=0)
        for _ in range(5):
            env.step(RIGHT)
    assert (one.state.position, two.state.position) == (2, 3)
    assert one._programs is not two._programs


def test_environments_that_break_the_contract():
    with pytest.raises(AttributeError, match="_params"):
        GymnasiumWrapper(Forgetful()).reset()
    with pytest.raises(ValueError, match=r"Fickle begins with the state .* and steps to"):
        GymnasiumWrapper(Fickle()).reset()
    with pytest.raises(ValueError, match=r"Tupled acts in Tuple"):
        GymnasiumWrapper(Tupled())
    with pytest.raises(ValueError, match=r"Boxed observes Discrete"):
        GymnasiumWrapper(Boxed())


def test_picture_moves():
    env = GymnasiumWrapper(TMaze(5), render_mode="rgb_array")
    with pytest.raises(ResetNeeded, match="render"):
        env.render()
    env.reset(seed=0)
    first = env.render()
    assert np.array_equal(env.render(), first)
    env.step(RIGHT)
    assert not np.array_equal(env.render(), first)
    assert env.metadata["render_fps"] == TMaze.render_fps
    with pytest.warns(UserWarning, match="without a render_mode"):
        assert GymnasiumWrapper(TMaze()).render() is None


def test_copies_go_their_own_way():
    env = GymnasiumWrapper(NoisyMaskedCartPole())
    env.reset(seed=0)
    env.step(1)
    twin = copy.deepcopy(env)
    assert np.array_equal(twin.step(0)[0], env.step(0)[0])
    env.step(0)
    assert (env.state.time, twin.state.time) == (3, 2)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("name", SMALL)
def test_a_trainers_loop(name, mode):
    """1,000 steps of the kind of loop CleanRL has: its statistics, final observations, ends."""
    count, options = 4, {"corridor": 3} if "TMaze" in name else {}
    options["max_steps"] = 30
    envs = gymnasium.make_vec(
        name,
        count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        wrappers=[RecordEpisodeStatistics],
        **options,
    )
    assert isinstance(envs, SyncVectorEnv)
    envs.action_space.seed(1)
    obs, _ = envs.reset(seed=1)
    returns, running = [], np.zeros(count)
    beginning = np.zeros(count, bool)
    ended = 0
    for _ in range(1000 // count):
        obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
        assert obs in envs.observation_space
        assert not np.any(terminated & truncated)
        running = np.where(beginning, 0.0, running + reward)
        done = terminated | truncated
        ended += done.sum()
        if mode == AutoresetMode.SAME_STEP:
            for i in np.flatnonzero(done):
                returns.append((running[i], info["final_info"]["episode"]["r"][i]))
                assert info["final_obs"][i] in envs.single_observation_space
                running[i] = 0.0
        else:
            returns += [(running[i], info["episode"]["r"][i]) for i in np.flatnonzero(done)]
            beginning = done
    assert ended == len(returns) > 20
    ours, theirs = np.array(returns).T
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    envs.close()


@pytest.mark.slow  # its sister: test_in_a_new_process
def test_workers_of_their_own():
    """A spawned process gives what the same seed gives in this one."""
    make = [lambda: gymnasium.make("agalite.envs:agalite/TMaze-v0", corridor=3)]
    with_workers, here = AsyncVectorEnv(make, context="spawn"), SyncVectorEnv(make)
    try:
        outs = []
        for envs in (with_workers, here):
            envs.action_space.seed(0)
            rows = [envs.reset(seed=[3])[0]]
            rows += [x for _ in range(5) for x in envs.step(envs.action_space.sample())[:4]]
            outs.append(rows)
        assert all(np.array_equal(a, b) for a, b in zip(*outs, strict=True))
    finally:
        with_workers.close()


def test_in_a_new_process():
    """The module prefix registers; a forked worker is told what is wrong instead of hanging."""
    script = """
        import warnings
        import gymnasium
        env = gymnasium.make("agalite.envs:agalite/TMaze-v0", corridor=10)
        env.reset(seed=0)
        print("made", env.unwrapped.jax_env.default_params.corridor)
        warnings.simplefilter("ignore")
        envs = gymnasium.make_vec(
            "agalite/TMaze-v0", 1, vectorization_mode="async", vector_kwargs={"context": "fork"}
        )
        try:
            envs.reset()
        except RuntimeError as error:
            print("refused", error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "made 10" in done.stdout, done.stderr[-2000:]
    assert "refused this process was forked" in done.stdout, done.stderr[-2000:]
    assert 'context="spawn"' in done.stdout
