"""Gymnasium's classic control without velocities, as RL Baselines3 Zoo has them.

An agent must estimate the velocities from what it saw before.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

# Of each environment, the numbers of its observation that are no velocities.
KEPT = {
    "Pendulum": ("Pendulum-v1", (0, 1)),
    "MountainCarContinuous": ("MountainCarContinuous-v0", (0,)),
}


class NoVelocity(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Keeps some of the numbers of the observation."""

    def __init__(self, env: gymnasium.Env[np.ndarray, Any], kept: tuple[int, ...]):
        super().__init__(env)
        self._kept = list(kept)
        space = env.observation_space
        assert isinstance(space, Box)
        self.observation_space = Box(space.low[self._kept], space.high[self._kept])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self._kept]


def make(name: str, **options: Any) -> NoVelocity:
    """One of `KEPT`; `options` are those of `gymnasium.make`."""
    env_id, kept = KEPT[name]
    return NoVelocity(gymnasium.make(env_id, **options), kept)


def register() -> None:
    """Registers each of `KEPT` as `agalite/<name>NoVelocity-v0`."""
    for name in KEPT:
        env_id = f"agalite/{name}NoVelocity-v0"
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                f"{__name__}:make",
                kwargs={"name": name},
                disable_env_checker=True,
                order_enforce=False,
            )
