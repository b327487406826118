"""A Gymnasium environment whose step takes a fixed time and hardly any CPU, as if it ran elsewhere.

Worker processes import this module, so it imports nothing but Gymnasium and NumPy.
"""

import time
from typing import Any

import gymnasium as gym
import numpy as np

ID = "agalite-bench/Sleep-v0"


class SleepEnv(gym.Env):
    """16 random numbers, 4 actions, no reward; an episode lasts 200 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (16,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, seconds: float = 0.005) -> None:
        self._seconds, self._time = seconds, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self._time = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        del action
        time.sleep(self._seconds)
        self._time += 1
        return self._obs(), 0.0, False, self._time == 200, {}

    def _obs(self) -> np.ndarray:
        return self.np_random.standard_normal(16).astype(np.float32)


if ID not in gym.registry:
    gym.register(ID, "agalite.bench.sleep_env:SleepEnv")
