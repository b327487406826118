"""Gymnasium environments for the tests of actors: `gym:host_worlds:Diary-v0` and so on.

Workers import this file, so it imports nothing but Gymnasium and NumPy.
"""

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Diary(gym.Env):
    """obs: [a number of its own, episode, time, last action]; reward: the time.

    Episodes last 2 to 6 steps and end by turns with termination and truncation.
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
        # Numbers of order one, so that a network can tell them apart.
        return np.array(
            [self.number / 1000, self.episode / 8, self.time / 4, self.action / 2], np.float32
        )


class Faulty(Diary):
    """Fails at its `at`-th step, in the way `how` says, unless `folder` has `times` files already:
    each failure leaves one, so that all processes know of it."""

    def __init__(self, how: str, folder: str, at: int = 5, times: int = 1) -> None:
        super().__init__()
        self.how, self.folder, self.at, self.times, self.steps = how, Path(folder), at, times, 0

    def reset(self, *, seed=None, options=None):
        if self.how == "reset" and self.steps and self._now():
            raise RuntimeError("no new beginning")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        obs, *rest = super().step(action)
        if self.how != "reset" and self.steps >= self.at and self._now():
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

    def _now(self) -> bool:
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
    """A cue of two in the first observation; three steps later the action must be the same."""

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
    """A step takes a fixed time, as a simulator's would; `log` gets the beginning and the end."""

    def __init__(self, seconds: float, log: str) -> None:
        super().__init__()
        self.seconds, self.log = seconds, log

    def step(self, action):
        began = time.monotonic()
        time.sleep(self.seconds)
        with open(self.log, "a") as lines:
            lines.write(f"{os.getpid()} {began} {time.monotonic()}\n")
        return super().step(action)


for world in (Diary, Faulty, Recall, Slow):
    if f"{world.__name__}-v0" not in gym.registry:
        gym.register(f"{world.__name__}-v0", f"host_worlds:{world.__name__}")
