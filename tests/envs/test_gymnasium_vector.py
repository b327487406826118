"""`GymnasiumVector` against stepping the same environments one by one."""

import copy
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Text, Tuple
from gymnax.environments import spaces as gymnax_spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.envs.gymnasium import spaces
from agalite.envs.gymnasium.vector import Step, from_gymnasium, seeds

# The environments below go to the workers whole: importing this file, and with it JAX, would take
# each of them seconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BOTH_WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class Counter(gym.Env):
    """obs: [episode, time, last action, a random number]; an episode lasts 2 to 5 steps.

    It ends as `end` says, and on purpose every observation is the same array, written anew.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, end: str = "terminate", render_mode: str | None = None) -> None:
        self.observation_space = Box(-10.0, 1e6, (4,), np.float32)
        self.action_space = Discrete(3, start=-1)
        self.render_mode = render_mode
        self.end = end
        self.episode = -1
        self.board = np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.episode += 1
        self.time = 0
        self.length = int(self.np_random.integers(2, 6))
        self.board[:] = [self.episode, 0, 0, self.np_random.random()]
        return self.board, {"fresh": 1.0, "note": "text is left out"}

    def step(self, action):
        assert action in (-1, 0, 1)
        self.time += 1
        self.board[1:] = [self.time, action, self.np_random.random()]
        over = self.time == self.length
        info = {"success": over, "everywhere": self.time, "picture": np.zeros((2, 2))}
        terminated = over and self.end in ("terminate", "both")
        truncated = over and self.end in ("truncate", "both")
        return self.board, self.time + 0.5, terminated, truncated, info

    def render(self):
        return np.full((4, 6, 3), 10 * self.episode + self.time, np.uint8)


class Showcase(gym.Env):
    """Observations are samples of a given space; it never ends and takes given actions."""

    def __init__(self, observation: gym.Space, action: gym.Space) -> None:
        self.observation_space = copy.deepcopy(observation)  # a space draws from its own generator
        self.action_space = action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}


class Failing(gym.Env):
    """Action 1, or making it in a worker, fails in the given way."""

    def __init__(self, how: str, parent: int) -> None:
        self.observation_space = Box(0.0, 1.0, (2,), np.float32)
        self.action_space = Discrete(2)
        self.how = how
        if how == "construction" and os.getpid() != parent:
            raise RuntimeError("no such luck")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        class Odd(Exception):
            """Cannot be pickled, being defined here."""

        if action == 1:
            if self.how == "exit":
                os._exit(3)
            if self.how == "sleep":
                time.sleep(100)
            if self.how == "exception":
                raise Odd("a strange state")
        return np.zeros(2, np.float32), 0.0, False, False, {}


gym.register("agalite-test/Counter-v0", Counter)
gym.register("agalite-test/Limited-v0", Counter, max_episode_steps=3, kwargs={"end": "terminate"})


@contextmanager
def at_most(limit: int):
    """A hang is a failure, not a night's wait."""

    def late(*_):
        raise AssertionError(f"still waiting after {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class ByHand:
    """One environment, stepped as the bridge should."""

    def __init__(self, env: gym.Env, seed: int) -> None:
        self.env = env
        self.obs = np.array(env.reset(seed=seed)[0])
        self.total, self.length = 0.0, 0

    def step(self, action) -> tuple:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        final = obs = np.array(obs)
        self.total += reward
        self.length += 1
        total, length = self.total, self.length
        if terminated or truncated:
            obs = np.array(self.env.reset()[0])
            self.total, self.length = 0.0, 0
        truncated = truncated and not terminated
        return obs, np.float32(reward), terminated, truncated, final, np.float32(total), length


CASES = {
    "ends by termination": (lambda: Counter("terminate"), {}, -1),
    "ends by truncation": (lambda: Counter("truncate"), {}, -1),
    "says both": (lambda: Counter("both"), {}, -1),
    "agalite-test/Counter-v0": (None, {"end": "truncate"}, -1),
    "agalite-test/Limited-v0": (None, {}, -1),
    "CartPole-v1": (None, {"max_episode_steps": 20}, 0),
    "Pendulum-v1": (None, {"max_episode_steps": 7}, 0),
}


@pytest.mark.parametrize(
    ("case", "asynchronous"),
    [
        *[(case, False) for case in CASES],
        *[
            (case, True)
            for case in ("ends by truncation", "agalite-test/Limited-v0", "CartPole-v1")
        ],
    ],
)
def test_equals_environments_stepped_by_hand(case, asynchronous) -> None:
    make, kwargs, start = CASES[case]
    count = 3
    with from_gymnasium(
        make or case, count, seed=11, asynchronous=asynchronous, **kwargs
    ) as vector:
        make = make or (lambda: gym.make(case, **kwargs))
        hands = [ByHand(make(), seed) for seed in seeds(11, count)]
        obs = vector.reset()
        assert np.array_equal(obs, [hand.obs for hand in hands])
        assert obs.dtype == vector.observation_space.dtype
        rng = np.random.default_rng(0)
        ends = {"terminated": 0, "truncated": 0}
        for _ in range(60):
            if isinstance(vector.action_space, Discrete):
                actions = rng.integers(0, int(vector.action_space.n), count)
            else:
                actions = rng.uniform(-2, 2, (count, 1)).astype(np.float32)
            got = vector.step(actions)
            assert isinstance(got, Step)
            want = [hand.step(action + start) for hand, action in zip(hands, actions, strict=True)]
            columns = [np.array(column) for column in zip(*want, strict=True)]
            info = got.info
            found = (
                *got[:4],
                info["final_observation"],
                info["episode_return"],
                info["episode_length"],
            )
            for have, expected in zip(found, columns, strict=True):
                np.testing.assert_array_equal(have, expected)
            assert got.reward.dtype == np.float32
            assert got.terminated.dtype == got.truncated.dtype == np.bool_
            assert not (got.terminated & got.truncated).any()
            assert np.array_equal(info["terminated"], got.terminated)
            assert np.array_equal(info["truncated"], got.truncated)
            ends["terminated"] += int(got.terminated.sum())
            ends["truncated"] += int(got.truncated.sum())
        expected_ends = {
            "ends by termination": {"terminated"},
            "ends by truncation": {"truncated"},
            "says both": {"terminated"},
            "agalite-test/Counter-v0": {"truncated"},
            "agalite-test/Limited-v0": {"terminated", "truncated"},
            "CartPole-v1": {"terminated", "truncated"},
            "Pendulum-v1": {"truncated"},
        }
        assert {kind for kind, times in ends.items() if times} == expected_ends[case]


@BOTH_WAYS
def test_numbers_of_the_environment_reach_info(asynchronous) -> None:
    """At an end it is the last info of the episode that counts; text and arrays are left out."""
    with from_gymnasium(Counter, 2, seed=0, asynchronous=asynchronous) as vector:
        vector.reset()
        for _ in range(12):
            step = vector.step(np.ones(2, np.int32))
            info = step.info
            assert {"success", "everywhere"} <= set(info)
            assert not {"note", "picture", "final_info", "final_obs"} & set(info)
            np.testing.assert_array_equal(info["success"], step.terminated)
            np.testing.assert_array_equal(info["everywhere"], info["episode_length"])
            assert info["success"].dtype == np.float32
            # Only a reset says "fresh", and what it says belongs to the next episode.
            assert np.isnan(info.get("fresh", np.full(2, np.nan))).all()


def test_seeds_decide_everything_and_do_not_overlap() -> None:
    def play(vector, **kwargs):
        history = [vector.reset(**kwargs)]
        history += [vector.step(np.zeros(2, int)).obs for _ in range(9)]
        return np.stack(history)

    with from_gymnasium("CartPole-v1", 2, seed=3) as one:
        first = play(one)
        later = play(one)  # without a seed: new episodes
        assert not np.array_equal(first, later)
        assert np.array_equal(first, play(one, seed=3))
        assert not np.array_equal(first, play(one, seed=4))
    with from_gymnasium("CartPole-v1", 2, seed=3) as two:
        assert np.array_equal(first, play(two))
    drawn = [seed for run in range(50) for seed in seeds(run, 20)]
    assert len(set(drawn)) == len(drawn)


OBSERVATIONS = [
    (Box(-1, 1, (3, 2), np.float64), (3, 2), np.float64, lambda x: x),
    (Box(0, 255, (4, 4, 3), np.uint8), (4, 4, 3), np.uint8, lambda x: x),
    (Discrete(5), (5,), np.float32, lambda x: np.eye(5)[x]),
    (Discrete(3, start=-4), (3,), np.float32, lambda x: np.eye(3)[x + 4]),
    (MultiBinary(4), (4,), np.float32, lambda x: x),
    (MultiBinary((2, 3)), (2, 3), np.float32, lambda x: x),
    (
        MultiDiscrete([3, 2, 4], start=[0, 5, -1]),
        (9,),
        np.float32,
        lambda x: np.concatenate([np.eye(3)[x[0]], np.eye(2)[x[1] - 5], np.eye(4)[x[2] + 1]]),
    ),
    (
        MultiDiscrete([[2, 3], [1, 2]]),
        (8,),
        np.float32,
        lambda x: np.concatenate(
            [np.eye(2)[x[0, 0]], np.eye(3)[x[0, 1]], np.eye(1)[x[1, 0]], np.eye(2)[x[1, 1]]]
        ),
    ),
]


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "expected", "asynchronous"),
    [*((*case, False) for case in OBSERVATIONS), (*OBSERVATIONS[6], True)],
)
def test_observation_spaces(space, shape, dtype, expected, asynchronous) -> None:
    def make():
        return Showcase(space, Discrete(2))

    with from_gymnasium(make, 2, seed=5, asynchronous=asynchronous) as vector:
        hands = [make() for _ in range(2)]
        raw = [env.reset(seed=seed)[0] for env, seed in zip(hands, seeds(5, 2), strict=True)]
        assert isinstance(vector.observation_space, Box)
        assert vector.observation_space.shape == shape
        assert vector.observation_space.dtype == dtype
        obs = vector.reset()
        for _ in range(5):
            assert obs.shape == (2, *shape)
            assert obs.dtype == dtype
            np.testing.assert_array_equal(obs, [expected(x) for x in raw])
            assert all(vector.observation_space.contains(row) for row in obs)
            obs = vector.step([0, 1]).obs
            raw = [env.step(0)[0] for env in hands]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_one_hots_tell_every_observation_apart(data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    start = data.draw(st.lists(st.integers(-3, 3), min_size=len(sizes), max_size=len(sizes)))
    space = MultiDiscrete(sizes, start=start)
    seen, convert = spaces.observations(space, "x")
    values = np.array(
        [[data.draw(st.integers(s, s + n - 1)) for n, s in zip(sizes, start, strict=True)]] * 2
    )
    encoded = convert(values)
    assert encoded.shape == (2, sum(sizes)) == (2, *seen.shape)
    parts = np.split(encoded, np.cumsum(sizes)[:-1], axis=1)
    for i, part in enumerate(parts):
        assert np.array_equal(part.sum(1), [1, 1])
        assert np.array_equal(part.argmax(1) + start[i], values[:, i])
    # And actions are the way back: counted from nothing, shifted to the start.
    _, act = spaces.actions(space, "x", 2)
    assert np.array_equal(act(values - start), values)


ACTIONS = [
    (Discrete(3), [0, 2], [0, 2]),
    (Discrete(3, start=7), [0, 2], [7, 9]),
    (MultiDiscrete([2, 3], start=[0, 1]), [[1, 2], [0, 0]], [4, 1]),
    (Box(-2, 2, (2,), np.float32), [[0.5, 1.0], [-2.0, 2.0]], [1.5, 0.0]),
    (Box(np.array([0.0, 0.0]), np.array([0.1, 0.3]), dtype=np.float64), [[0, 0], [0.1, 0.3]], None),
    (Box(-3, 3, (1,), np.int8), [[-3], [2]], [-3, 2]),
]


@pytest.mark.parametrize(("space", "actions", "sums"), ACTIONS)
def test_action_spaces(space, actions, sums) -> None:
    with from_gymnasium(lambda: Showcase(Discrete(2), space), 2, seed=0) as vector:
        vector.reset()
        if isinstance(space, Box) and space.dtype.kind == "f":
            actions = np.array(actions, np.float32)  # a float32 0.3 is more than a float64 one
        reward = vector.step(actions).reward
        if sums is not None:
            np.testing.assert_array_equal(reward, np.float32(sums))
        # What the bridge says it takes, it takes.
        for sample in [vector.action_space.sample() for _ in range(5)]:
            vector.step(np.stack([sample, sample]))


def test_actions_are_taken_by_async_workers_too() -> None:
    space = MultiDiscrete([2, 3], start=[0, 1])
    make = lambda: Showcase(Discrete(2), space)  # noqa: E731
    with from_gymnasium(make, 2, seed=0, asynchronous=True) as vector:
        vector.reset()
        assert vector.step([[1, 2], [0, 0]]).reward.tolist() == [4.0, 1.0]


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [
        (Discrete(3), [0, 3], r"actions\[1\]=3 is out of range for make: from 0 to 2"),
        (Discrete(3, start=7), [-1, 0], r"actions\[0\]=-1 is out of range for make: from 0 to 2"),
        (Discrete(3), [0], r"actions have shape \(1,\); make wants \(2,\)"),
        (Discrete(3), [0.0, 1.0], r"actions have dtype float64; make wants whole numbers"),
        (Discrete(3), [True, False], r"actions have dtype bool; make wants whole numbers"),
        (MultiDiscrete([2, 3]), [[0, 0], [2, 0]], r"actions\[1, 0\]=2 is out .* from 0 to 1"),
        (MultiDiscrete([2, 3]), [0, 0], r"actions have shape \(2,\); make wants \(2, 2\)"),
        (Box(-1, 2, (1,)), [[0.0], [2.5]], r"actions\[1, 0\]=2\.5 is out .* from -1\.0 to 2\.0"),
        (Box(-1, 2, (1,)), [[0.0], [np.nan]], r"actions\[1, 0\]=nan is out of range"),
        (Box(-1, 2, (1,), np.int8), [[0.5], [1.0]], r"actions have dtype float64; .* int8"),
    ],
)
def test_bad_actions_are_refused_and_do_no_harm(space, actions, message) -> None:
    def make():
        return Showcase(Discrete(2), space)

    with from_gymnasium(make, 2, seed=0) as vector:
        vector.reset()
        with pytest.raises(ValueError, match=message):
            vector.step(actions)
        vector.step(np.stack([vector.action_space.sample()] * 2))


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (
            Dict({"a": Discrete(2)}),
            Discrete(2),
            r"the observation space of make is Dict, .*supported are Box, Discrete, .*Flatten",
        ),
        (Tuple([Discrete(2)]), Discrete(2), r"the observation space of make is Tuple"),
        (Text(5), Discrete(2), r"the observation space of make is Text"),
        (Box(0, 1, (0,)), Discrete(2), r"space of make has shape \(0,\), which holds no numbers"),
        (Graph(Discrete(2), None), Discrete(2), r"the observation space of make is Graph"),
        (Discrete(2), Dict({"a": Discrete(2)}), r"the action space of make is Dict, .*supported"),
        (Discrete(2), MultiBinary(3), r"the action space of make is MultiBinary"),
        (Discrete(2), Box(-np.inf, 1, (2,)), r"the action space of make is Box.*without limits"),
    ],
)
def test_unsupported_spaces_are_named(observation, action, message) -> None:
    def make():
        return Showcase(observation, action)

    with pytest.raises(ValueError, match=message):
        from_gymnasium(make, 2, seed=0)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("CartPol-v1", 2), {}, r"unknown Gymnasium environment 'CartPol-v1'; .*CartPole-v1"),
        (("cartpole-v1", 2), {}, r"unknown Gymnasium environment 'cartpole-v1'; .*CartPole-v1"),
        (("CartPole-v99", 2), {}, r"unknown Gymnasium environment 'CartPole-v99'; .*CartPole-v1"),
        (("Nowhere/Pong-v5", 2), {}, r"unknown Gymnasium environment 'Nowhere/Pong-v5'"),
        (
            ("no_such_module:Env-v0", 2),
            {},
            r"the package 'no_such_module' of .* cannot be imported \(No module .*PYTHONPATH=\.",
        ),
        (("a:b:c", 2), {}, r"the package 'a:b' of 'a:b:c' cannot be imported"),
        (("Pong-v9", 2), {}, r"gym:PACKAGE:Pong-v9 imports it first, .* --import PACKAGE"),
        (("math:CartPol-v1", 2), {}, r"CartPole-v1.*math was imported and does not register it"),
        (("", 2), {}, r"unknown Gymnasium environment ''"),
        ((3, 2), {}, r"env=3 must be a Gymnasium id or a function"),
        (("CartPole-v1", 0), {}, r"num_envs=0 must be a whole number >= 1"),
        (("CartPole-v1", 2), {"seed": -1}, r"seed=-1 must be a whole number >= 0"),
        (("CartPole-v1", 2), {"asynchronous": 1}, r"asynchronous=1 must be True or False"),
        (("CartPole-v1", 2), {"wheels": 3}, r"CartPole-v1 cannot be made .*'wheels'"),
        ((lambda: 5, 2), {}, r"made a int, not a gymnasium\.Env"),
    ],
)
def test_bad_requests_are_named(args, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        from_gymnasium(*args, **{"seed": 0, **kwargs})


def test_a_missing_dependency_says_so() -> None:
    def make():
        raise gym.error.DependencyNotInstalled('run `pip install "gymnasium[box2d]"`')

    with pytest.raises(ModuleNotFoundError, match=r"make needs another package: .*box2d"):
        from_gymnasium(make, 1, seed=0)


def test_the_module_of_an_id_is_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "late_registration.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Late-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with from_gymnasium("late_registration:Late-v0", 1, seed=0) as vector:
        assert vector.reset().shape == (1, 4)


@BOTH_WAYS
def test_render_shows_the_first_environment(asynchronous) -> None:
    with from_gymnasium(
        "agalite-test/Counter-v0", 2, seed=0, asynchronous=asynchronous, render_mode="rgb_array"
    ) as vector:
        with pytest.raises(RuntimeError, match=r"call reset\(\) before render"):
            vector.render()
        vector.reset()
        for _ in range(7):
            episode, clock = vector.step([1, 1]).obs[0, :2]
            frame = vector.render()
            assert frame.shape == (4, 6, 3)
            assert frame.dtype == np.uint8
            assert (frame == 10 * episode + clock).all()


def test_render_needs_the_mode() -> None:
    with from_gymnasium("CartPole-v1", 1, seed=0) as vector:
        vector.reset()
        with pytest.raises(ValueError, match=r'render_mode=None; make it with render_mode="rgb_a'):
            vector.render()


@BOTH_WAYS
def test_order_and_closing(asynchronous) -> None:
    vector = from_gymnasium(Counter, 2, seed=0, asynchronous=asynchronous)
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step\(\)"):
        vector.step([0, 0])
    vector.reset()
    vector.close()
    vector.close()
    for use in (vector.reset, lambda: vector.step([0, 0]), vector.render):
        with pytest.raises(RuntimeError, match=r"Counter is closed"):
            use()
    if asynchronous:
        assert not any(process.is_alive() for process in vector._envs.processes)
        assert all(process.exitcode == 0 for process in vector._envs.processes)


def failing(how: str):
    parent = os.getpid()
    return lambda: Failing(how, parent)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exception", r"(?s)environment 1 of <lambda> failed: .*Odd: a strange state.*Traceback"),
        ("exit", r"the worker process of environment 1 died \(exit code 3\) during step"),
    ],
)
def test_a_worker_that_fails_is_an_error_and_no_wait(how, message) -> None:
    with at_most(300):
        vector = from_gymnasium(failing(how), 3, seed=0, asynchronous=True)
        vector.reset()
        vector.step([0, 0, 0])
        with pytest.raises(RuntimeError, match=message):
            vector.step([0, 1, 0])
        assert not any(process.is_alive() for process in vector._envs.processes)
        with pytest.raises(RuntimeError, match="is closed"):
            vector.step([0, 0, 0])


def test_a_failure_in_this_process_is_the_same_error() -> None:
    vector = from_gymnasium(failing("exception"), 2, seed=0)
    vector.reset()
    with pytest.raises(RuntimeError, match=r"<lambda>: Odd: a strange state") as caught:
        vector.step([0, 1])
    assert type(caught.value.__cause__).__name__ == "Odd"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_workers_stand_back_from_whoever_acts_for_them() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with at_most(300):
        vector = from_gymnasium(failing("never"), 2, seed=0, asynchronous=True)
        vector.reset()
        for process in vector._envs.processes:
            assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
            assert os.getpriority(os.PRIO_PROCESS, process.pid) > ours
        vector.close()


def test_a_worker_killed_from_outside() -> None:
    with at_most(300):
        vector = from_gymnasium(failing("never"), 2, seed=0, asynchronous=True)
        vector.reset()
        os.kill(vector._envs.processes[0].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"environment 0 died \(SIGKILL\) during step"):
            vector.step([0, 0])
        assert not any(process.is_alive() for process in vector._envs.processes)


def test_a_worker_that_cannot_start() -> None:
    message = r"the worker process of environment \d died \(exit code 1\) while starting"
    with at_most(300), pytest.raises(RuntimeError, match=message):
        from_gymnasium(failing("construction"), 2, seed=0, asynchronous=True)


SCRIPT = """
    import os, sys, time
    import gymnasium as gym, numpy as np
    from agalite.envs.gymnasium.vector import from_gymnasium

    class Slow(gym.Env):
        observation_space = gym.spaces.Discrete(2)
        action_space = gym.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            return 0, {}
        def step(self, action):
            time.sleep(100)

    def main():
        vector = from_gymnasium(Slow, 2, seed=0, asynchronous=True)
        vector.reset()
        print(*[process.pid for process in vector._envs.processes], flush=True)
        vector.step([0, 0])
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")
def test_ctrl_c_ends_the_workers(tmp_path) -> None:
    script = tmp_path / "script.py"
    # Whoever runs the tests in the background may have told all children to ignore Ctrl-C.
    listen = "    import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    guard = f'\nif __name__ == "__main__":\n{listen}    main()\n'
    script.write_text(textwrap.dedent(SCRIPT) + guard)
    with at_most(300):
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as under a terminal
        )
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate()
        assert process.returncode != 0
        assert err.count("KeyboardInterrupt") == 1  # and no worker adds its own
        assert not any(alive(pid) for pid in workers)


def test_a_script_without_a_guard_is_told(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + "\nmain()\n")
    with at_most(300):
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode != 0
    assert 'under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (Box(0, 255, (84, 84, 3), np.uint8), "Box(84x84x3) uint8, 0 to 255"),
        (Box(-np.inf, np.inf, (4,), np.float32), "Box(4) float32"),
        (Box(np.array([-1, -2]), np.array([1, 1]), dtype=np.float64), "Box(2) float64"),
        (Discrete(4), "Discrete(4)"),
        (Discrete(4, start=1), "Discrete(4) from 1"),
        (MultiDiscrete([3, 2]), "MultiDiscrete(3, 2)"),
        (MultiBinary(5), "MultiBinary(5)"),
        (MultiBinary((2, 3)), "MultiBinary(2x3)"),
        (Dict({"a": Discrete(2)}), "Dict"),
        (gymnax_spaces.Discrete(3), "Discrete(3)"),
        (gymnax_spaces.Box(0.0, 1.0, (16,)), "Box(16) float32, 0 to 1"),
    ],
)
def test_describe(space, text) -> None:
    assert spaces.describe(space) == text


def test_classic_control_without_velocities():
    for name, kept in (("Pendulum-v1", [0, 1]), ("MountainCarContinuous-v0", [0])):
        short = name.partition("-")[0]
        env = gym.make(f"agalite/{short}NoVelocity-v0")
        whole = gym.make(name)
        assert env.observation_space.shape == (len(kept),)
        obs, other = env.reset(seed=3)[0], whole.reset(seed=3)[0]
        np.testing.assert_array_equal(obs, other[kept])
        step, step_of_whole = env.step(np.array([0.5])), whole.step(np.array([0.5]))
        np.testing.assert_array_equal(step[0], step_of_whole[0][kept])
        assert step[1] == step_of_whole[1]
