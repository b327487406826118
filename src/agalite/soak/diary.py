"""An environment whose observations tell what happened, for `agalite soak asynchronous`.

Its processes import this file alone. `gym:agalite.soak.diary:SoakDiary-v0` is its name for `agalite
train`. With a folder, each process adds a file there named by its process id, so that it can be
found and disturbed, and returns NaN once after SIGUSR2.
"""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

ACTIONS = 3
NUMBERS = 2**20  # environments that are told apart
# Powers of two: what is divided by them is exact in float32, and of order one for a network.
SCALE = np.array([NUMBERS, 2**12, 2**5, 2**2], np.float32)


class Diary(gym.Env):
    """Observations (4,): the environment's number, its episode, the time in it, the last action.

    Each is a whole number divided by its `SCALE`; -1 is no action. The reward is the time. Episodes
    last 2 to 40 steps and end alternately with termination and truncation.

    **Arguments:**

    - `folder`: where the process makes its file; None makes none.
    """

    observation_space = Box(-1.0, 1e9, (4,), np.float32)
    action_space = Discrete(ACTIONS)

    def __init__(self, folder: str | None = None) -> None:
        self._episode, self._number, self._broken = -1, 0, False
        # The main process makes one too, to read its spaces.
        if folder is not None and multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGUSR2, self._break)
            Path(folder, str(os.getpid())).touch()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._number, self._episode = int(self.np_random.integers(NUMBERS)), -1
        self._episode += 1
        self._time, self._action = 0, -1
        self._length = int(self.np_random.integers(2, 41))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._time, self._action = self._time + 1, int(action)
        over, odd = self._time == self._length, self._episode % 2 == 1
        return self._observe(), float(self._time), over and not odd, over and odd, {}

    def _observe(self) -> np.ndarray:
        broken, self._broken = self._broken, False
        numbers = [self._number, self._episode, self._time, self._action]
        obs = np.array(numbers, np.float32) / SCALE
        return obs * np.float32("nan") if broken else obs

    def _break(self, *_: Any) -> None:
        self._broken = True


def torn(
    obs: np.ndarray, resets: np.ndarray, actions: np.ndarray, rewards: np.ndarray, ends: np.ndarray
) -> str | None:
    """Why T steps of one environment are not what happened in it, as a phrase; None if they are.

    **Arguments:**

    - `obs`: (T, 4), the observations acted on.
    - `resets`, `actions`, `rewards`, `ends`: (T,).
    """
    number, _, time, last = (obs * SCALE).T
    if not np.isfinite(obs).all():
        return "an observation is not finite"
    if (number != number[0]).any():
        return "steps of two environments"
    if not np.array_equal(resets, time == 0):
        return "an episode boundary without a reset, or a reset inside an episode"
    if not np.array_equal(rewards, time + 1):
        return "a reward of another step"
    if not np.array_equal(ends[:-1], resets[1:]):
        return "an end that no reset follows"
    if not all(follows(obs[t], obs[t + 1], bool(resets[t + 1])) for t in range(len(obs) - 1)):
        return "steps are missing or repeated"
    if not np.array_equal(last[1:], np.where(ends[:-1], -1, actions[:-1])):
        return "an action of another step"
    return None


def follows(before: np.ndarray, after: np.ndarray, begins: bool) -> bool:
    """Whether an observation (4,) is the next of the same environment.

    **Arguments:**

    - `begins`: whether it is the first of an episode.
    """
    (_, episode, time, _), (_, next_episode, next_time, _) = before * SCALE, after * SCALE
    if begins:
        return bool(next_episode == episode + 1 and next_time == 0)
    return bool(next_episode == episode and next_time == time + 1)


if "SoakDiary-v0" not in gym.registry:
    gym.register("SoakDiary-v0", "agalite.soak.diary:Diary")
