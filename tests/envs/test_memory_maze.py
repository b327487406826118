"""Memory Maze against the `memory-maze` package, frame by frame.

The quick tests play a handful of frames in the smallest maze.
"""

import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from PIL import Image

from agalite.cli import main
from agalite.envs import ENVIRONMENTS, command, make, registry
from agalite.envs.memory_maze import SIZES, MemoryMaze, headless

NAME = "memory-maze-9x9"


def _obstacle() -> str:
    """Why Memory Maze cannot run here, if it cannot."""
    if ENVIRONMENTS[NAME].missing_packages():
        return f"needs {ENVIRONMENTS[NAME].install_hint}"
    try:
        headless.select_backend()
    except RuntimeError as error:
        return str(error)
    return ""


OBSTACLE = _obstacle()
real = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)
slow = pytest.mark.slow


def _package(size, **options):
    """The package's own environment, with nothing of ours in it."""
    from agalite.envs.memory_maze.engine import tasks

    return getattr(tasks(), f"memory_maze_{size}x{size}")(**options)


def _towards(info, step):
    """Mostly to the object, so that some are found; now and then anywhere."""
    from agalite.envs.memory_maze import oracle

    return oracle.action(info) if step % 7 else step % 6


def _inner(env):
    while hasattr(env, "env"):
        env = env.env
    return env


EXTRAS = {"agent_pos", "agent_dir", "targets_pos", "targets_vec", "target_pos", "target_vec"}
EXTRAS |= {"target_color", "maze_layout"}


@real
@pytest.mark.parametrize(
    ("size", "steps", "found", "options"),
    [
        (9, (5,), 0, {}),
        pytest.param(9, (110, 10), 3, {}, marks=slow),  # the package makes 20 steps a second
        pytest.param(11, (15,), 0, {"oracle": True}, marks=slow),
        pytest.param(13, (15,), 0, {"good_visibility": True}, marks=slow),
        pytest.param(15, (15, 6), 0, {"randomize_colors": True}, marks=slow),
    ],
)
def test_everything_is_the_packages_bit_for_bit(size, steps, found, options):
    theirs_too = {"show_path" if name == "oracle" else name: x for name, x in options.items()}
    theirs = _package(size, seed=size, global_observables=True, **theirs_too)
    ours = MemoryMaze(size, extras=True, **options)
    plain = MemoryMaze(size, **options)  # computes less on the way
    rewards = 0.0
    drawn, there = [], 0
    for episode, count in enumerate(steps):
        seed = size if episode == 0 else None
        obs, info = ours.reset(seed=seed)
        np.testing.assert_array_equal(plain.reset(seed=seed)[0], obs)
        expected = theirs.reset().observation
        for step in itertools.count():
            assert set(info) == EXTRAS
            for name, value in {"image": obs, **info}.items():
                np.testing.assert_array_equal(value, expected[name], err_msg=f"{name}, {step}")
                assert value.dtype == expected[name].dtype
            mine, other = _inner(ours._env), _inner(theirs)
            np.testing.assert_array_equal(mine.physics.data.qpos, other.physics.data.qpos)
            np.testing.assert_array_equal(mine.physics.data.qvel, other.physics.data.qvel)
            assert mine.task._current_target_ix == other.task._current_target_ix
            drawn.append(mine._observation_updater._camera.scene.ngeom)
            there = int((mine._observation_updater._culling._groups < 3).sum())
            if step == count:
                break
            action = _towards(info, step)
            same, gain, *_ = plain.step(action)
            now = theirs.step(action)
            obs, reward, terminated, truncated, info = ours.step(action)
            np.testing.assert_array_equal(same, obs, err_msg=f"without extras, {step}")
            assert gain == reward
            state = _inner(plain._env).physics.data.qpos
            np.testing.assert_array_equal(state, _inner(ours._env).physics.data.qpos)
            expected = now.observation
            assert (reward, terminated, truncated) == (now.reward, False, False)
            rewards += reward
    assert rewards >= found
    assert np.mean(drawn) < 0.6 * there, "what the camera does not see is not drawn"
    for env in (ours, plain, theirs):
        env.close()


@real
@slow
def test_without_extras_the_picture_is_the_packages_image_only_one():
    theirs = _package(9, seed=5, image_only_obs=True)
    ours = MemoryMaze(9)
    obs, info = ours.reset(seed=5)
    np.testing.assert_array_equal(obs, theirs.reset().observation)
    for action in (1, 4, 1, 5, 2, 3, 0, 1):
        obs, *_, info = ours.step(action)
        np.testing.assert_array_equal(obs, theirs.step(action).observation)
        assert info == {}
    ours.close()
    theirs.close()


@real
@slow
def test_an_episode_is_truncated_at_the_packages_limit_and_the_oracle_does_well():
    from agalite.envs.memory_maze import oracle

    env = MemoryMaze(9, extras=True)
    _, info = env.reset(seed=0)
    total, steps, truncated = 0.0, 0, False
    while not truncated:
        _, reward, terminated, truncated, info = env.step(oracle.action(info))
        assert not terminated
        total, steps = total + reward, steps + 1
    assert steps == SIZES[9].max_steps == 1000
    assert 0.7 * SIZES[9].oracle < total < 1.4 * SIZES[9].oracle
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.close()


@real
@slow
def test_a_seed_fixes_this_episode_and_the_next():
    def play(env, seed):
        frames = []
        for start in (seed, None):
            obs, _ = env.reset(seed=start)
            frames += [obs, *(env.step(action)[0] for action in (1, 1, 4))]
        return np.stack(frames)

    env = MemoryMaze(9)
    first, again, other = play(env, 3), play(env, 3), play(env, 4)
    env.close()
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[:4] != first[4:]).any(), "the second episode is another maze"


@real
def test_a_few_steps_through_gymnasium():
    env = gymnasium.make("agalite/MemoryMaze-9x9-v0", max_steps=3)
    obs, _ = env.reset(seed=0)
    for step in range(3):
        before = obs
        obs, _, terminated, truncated, info = env.step(1)
        assert env.observation_space.contains(obs)
        assert (obs != before).any()
        assert (terminated, truncated, info) == (False, step == 2, {})
    env.close()


@real
@slow
def test_it_is_a_gymnasium_environment_and_can_be_looked_at():
    env = gymnasium.make("agalite/MemoryMaze-9x9-v0", render_mode="rgb_array", max_steps=5)
    check_env(env.unwrapped, skip_close_check=True)
    obs, _ = env.reset(seed=0)
    before = env.render()
    assert before.shape == (192, 384, 3)
    assert before.dtype == np.uint8
    for step in range(5):
        obs, _, terminated, truncated, _ = env.step(1)
        assert (terminated, truncated) == (False, step == 4)
    assert (env.render() != before).any()
    # The larger buffer that pictures need changes no observation, nor does having drawn one.
    plain = MemoryMaze(9)
    plain.reset(seed=0)
    for _ in range(5):
        same = plain.step(1)[0]
    np.testing.assert_array_equal(obs, same)
    plain.close()
    env.close()


@real
@slow
def test_made_or_begun_again_and_again_it_keeps_no_memory():
    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    made, begun = [], []
    for seed in range(5):
        env = MemoryMaze(9)
        env.reset(seed=seed)
        env.step(1)
        env.close()
        env.close()
        made.append(resident())
    for _ in range(6):
        env.reset()
        begun.append(resident())
    env.close()
    # Each has 60 MB of textures.
    assert made[-1] - made[2] < 60e6, made
    assert begun[-1] - begun[2] < 60e6, begun


@real
@slow
def test_workers_give_what_one_process_gives():
    results = []
    for asynchronous in (False, True):
        with make(NAME, num_envs=2, seed=1, asynchronous=asynchronous, max_steps=4) as vector:
            seen = [vector.reset()]
            for step in range(6):
                result = vector.step(np.array([1, 4]))
                assert result.truncated.all() == (step == 3)
                assert not result.terminated.any()
                seen += [result.obs, result.info["final_observation"]]
            results.append(np.stack(seen))
    np.testing.assert_array_equal(*results)
    assert results[0].shape == (13, 2, 64, 64, 3)
    assert (results[0][0, 0] != results[0][0, 1]).any(), "each has its own maze"


@real
@slow
def test_a_program_that_never_closes_it_ends_quietly():
    code = (
        "from agalite.envs.memory_maze.env import MemoryMaze\n"
        "import gymnasium, mujoco, sys\n"
        "env = MemoryMaze(9); env.reset(seed=0); env.step(1)\n"
        "assert 'gym' not in sys.modules and 'memory_maze' not in sys.modules\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert done.stderr == ""


@real
def test_the_command_line_shows_one(tmp_path, capsys):
    out = tmp_path / "maze.gif"
    assert main(["envs", "show", NAME, "--out", str(out), "--steps", "4"]) == 0
    assert "4 steps of random actions" in capsys.readouterr().out
    with Image.open(out) as image:
        assert image.n_frames == 5


def test_the_table_knows_the_four_sizes(monkeypatch):
    for size, facts in SIZES.items():
        name = f"memory-maze-{size}x{size}"
        assert registry.on_host(name)
        assert f"{facts.objects} objects" in ENVIRONMENTS[name].summary
        if not ENVIRONMENTS[name].missing_packages():
            row = command._describe_gymnasium(ENVIRONMENTS[name].gymnasium_id)
            limit = str(facts.max_steps)
            assert row == ("Box(64x64x3) uint8, 0 to 255", "Discrete(6)", limit)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda _: None)
    missing = r'labmaze are not installed: pip install "agalite\[envs,memory-maze\]"'
    with pytest.raises(ValueError, match=missing):
        make(NAME)
    monkeypatch.setattr(registry.sys, "version_info", (3, 13, 0))
    with pytest.raises(ValueError, match=r"Python 3.12 or older; this is 3.13"):
        make(NAME)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 10}, "size=10 must be one of 9, 11, 13, 15"),
        ({"size": 9, "max_steps": 1001}, "max_steps=1001 must be a whole number from 1 to 1000"),
        ({"size": 9, "oracle": "yes"}, "oracle='yes' must be True or False"),
        ({"size": 9, "render_mode": "human"}, "render_mode='human' is unknown"),
    ],
)
def test_bad_options_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryMaze(**options)


@real
def test_what_cannot_be_done_is_explained():
    with pytest.raises(ValueError, match="memory-maze-9x9 has no option 'size'; it has: max_steps"):
        make(NAME, size=11)
    env = MemoryMaze(9)
    with pytest.raises(ResetNeeded):
        env.step(0)
    with pytest.raises(ValueError, match="seed=-1 must be a whole number from 0"):
        env.reset(seed=-1)
    env.reset(seed=0)
    for action in (6, -1, 0.5, None):
        with pytest.raises(ValueError, match=r"action=.* must be a whole number from 0 to 5"):
            env.step(action)
    env.step(np.int64(1))
    env.close()


def test_without_opengl_the_packages_to_install_are_named(monkeypatch):
    monkeypatch.delenv(headless.VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "dm_control._render", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")

    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(headless.ctypes, "CDLL", absent)
    with pytest.raises(RuntimeError, match=r"apt-get install -y libegl1 libgl1 .*libosmesa6"):
        headless.select_backend()
    with pytest.raises(RuntimeError, match=r"egl: libEGL.so.1 cannot be loaded; osmesa: libOSMesa"):
        headless.select_backend()
    assert headless.VARIABLE not in os.environ
    monkeypatch.setenv(headless.VARIABLE, "glfw")
    headless.select_backend()
    assert os.environ[headless.VARIABLE] == "glfw", "what the user has set stays"


@real
@slow
def test_a_wrong_choice_of_the_users_is_explained():
    code = (
        "from agalite.envs.memory_maze.env import MemoryMaze\n"
        "try: MemoryMaze(9).reset()\n"
        "except RuntimeError as error: print(error)"
    )
    environment = {**os.environ, headless.VARIABLE: "nonsense"}
    environment.pop("PYOPENGL_PLATFORM", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "Memory Maze cannot start" in done.stdout
    assert "nonsense" in done.stdout
    assert "apt-get install -y libegl1 libgl1" in done.stdout
