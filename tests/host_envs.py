"""Gymnasium environments for tests: `gym:host_envs:Diary-v0` and so on.

Worker processes import this file, so at its top it imports nothing but Gymnasium and NumPy.
"""

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


def small_config(**changes):
    """A small asynchronous run. Tests share its shapes, and with them the compiled programs."""
    from agalite.training.config import HostConfig

    settings = {
        "env": "gym:host_envs:Diary-v0",
        "memory": "gru",
        "memory_options": {"d_model": 16, "hidden_size": 16},
        "hidden_size": 16,
        "num_steps": 16,
        "num_workers": 2,
        "envs_per_worker": 2,
        "processes": False,
        "total_timesteps": 640,
        "log_every": 64,
        "checkpoint_every": 640,
    }
    return HostConfig(**{**settings, **changes})


class Diary(gym.Env):
    """Observations tell what happened: [env's number, episode, time, last action]; reward: time.

    Episodes last 2 to 6 steps and end alternately with termination and truncation.
    """

    observation_space = Box(-1.0, 1e6, (4,), np.float32)
    action_space = Discrete(3)

    def __init__(self) -> None:
        self.episode, self.number = -1, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        if seed is not None:
            self.number = float(self.np_random.integers(1000))
            self.episode = -1
        self.episode += 1
        self.time, self.action = 0, -1
        self.length = int(self.np_random.integers(2, 7))
        return self._obs(), {}

    def step(self, action):
        self.time, self.action = self.time + 1, int(action)
        over, odd = self.time == self.length, self.episode % 2 == 1
        info = {"odd": float(odd)}
        return self._obs(), float(self.time), over and not odd, over and odd, info

    def _obs(self):
        # Of order one, so that a network distinguishes them.
        return np.array(
            [self.number / 1000, self.episode / 8, self.time / 4, self.action / 2], np.float32
        )


class Faulty(Diary):
    """Fails in the way `how` at its `at`-th step, `times` times over all processes.

    Each failure adds a file to `folder`, by which the processes count them.
    """

    def __init__(self, how: str, folder: str, at: int = 5, times: int = 1) -> None:
        super().__init__()
        self.how, self.folder, self.at, self.times, self.steps = how, Path(folder), at, times, 0

    def reset(self, *, seed=None, options=None):
        if self.how == "reset" and self.steps and self._count_failure():
            raise RuntimeError("no new beginning")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        obs, *rest = super().step(action)
        if self.how != "reset" and self.steps >= self.at and self._count_failure():
            match self.how:
                case "raise":
                    raise ZeroDivisionError("a bad day")
                case "exit":
                    os._exit(7)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    self._fall_asleep()
                case "nan":
                    obs = obs * np.float32("nan")
                case "reward":
                    rest[0] = float("nan")
                case "shape":
                    obs = obs[:3]
        return obs, *rest

    def _count_failure(self) -> bool:
        try:
            number = len(list(self.folder.iterdir()))
            if number >= self.times:
                return False
            (self.folder / str(number)).touch(exist_ok=False)
        except FileExistsError:  # another environment was faster
            return False
        return True

    def _fall_asleep(self) -> None:
        time.sleep(1000)


class Recall(gym.Env):
    """One of two cues in the first observation; the action three steps later must repeat it."""

    observation_space = Box(0.0, 1.0, (3,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.cue, self.time = int(self.np_random.integers(2)), 0
        return np.array([self.cue == 0, self.cue == 1, 0], np.float32), {}

    def step(self, action):
        self.time += 1
        over = self.time == 4
        right = over and int(action) == self.cue
        obs = np.array([0, 0, self.time == 3], np.float32)
        return obs, float(right), over, False, {"success": float(right)}


class Slow(Diary):
    """A step takes `seconds`, as a simulator's would; its begin and end go to the file `log`."""

    def __init__(self, seconds: float, log: str) -> None:
        super().__init__()
        self.seconds, self.log = seconds, log

    def step(self, action):
        began = time.monotonic()
        time.sleep(self.seconds)
        with open(self.log, "a") as lines:
            lines.write(f"{os.getpid()} {began} {time.monotonic()}\n")
        return super().step(action)


for env in (Diary, Faulty, Recall, Slow):
    if f"{env.__name__}-v0" not in gym.registry:
        gym.register(f"{env.__name__}-v0", f"host_envs:{env.__name__}")
