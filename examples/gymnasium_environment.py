"""Train on an environment of your own, written for Gymnasium.

    python examples/gymnasium_environment.py

The agent sees a colour once, waits, and must then name it. `gym:MODULE:ID` imports the module that
registers the environment; here that module is this file.
"""

import sys
import tempfile
from pathlib import Path

import gymnasium
import numpy as np

COLOURS, WAIT = 2, 3


class Recall(gymnasium.Env[np.ndarray, int]):
    """First the colour, then nothing for WAIT steps; the last answer counts: 1 if right."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (COLOURS + 1,), np.float32)
    action_space = gymnasium.spaces.Discrete(COLOURS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.colour, self.time = int(self.np_random.integers(COLOURS)), 0
        return self._observe(), {}

    def step(self, action):
        self.time += 1
        over = self.time > WAIT
        reward = float(over and action == self.colour)
        return self._observe(), reward, over, False, {}

    def _observe(self):
        obs = np.zeros(COLOURS + 1, np.float32)
        obs[self.colour if self.time == 0 else COLOURS] = 1.0
        return obs


if "examples/Recall-v0" not in gymnasium.registry:
    gymnasium.register("examples/Recall-v0", Recall)


def main() -> None:
    import agalite

    sys.path.insert(0, str(Path(__file__).parent))
    run = agalite.train(
        f"gym:{Path(__file__).stem}:examples/Recall-v0",
        f"{tempfile.mkdtemp()}/run",
        memory="gru",
        memory_options={"d_model": 16, "hidden_size": 16},
        hidden_size=16,
        total_timesteps=8_000,
        log_every=2_000,
        num_steps=16,
        num_workers=2,
        envs_per_worker=4,
        processes=False,  # the environment is too cheap to need processes
    )
    summary = run.read_summary() or {}
    print("mean of the last tenth of training:", summary["last_tenth"])


if __name__ == "__main__":
    main()
