"""Play T-Maze with an exported agent: onnxruntime and NumPy, and nothing else.

agalite export runs/demo/agalite --onnx policy.onnx
python examples/onnx_tmaze.py policy.onnx --episodes 100
"""

import argparse
import json
from typing import Any

import numpy as np
import onnxruntime

UP, DOWN, LEFT, RIGHT = range(4)


class TMaze:
    """The cue is in the first observation only; it says which way to turn at the far end."""

    def __init__(self, corridor: int, generator: np.random.Generator) -> None:
        self.corridor, self.generator = corridor, generator

    def reset(self) -> np.ndarray:
        self.position, self.time = 0, 0
        self.cue = int(self.generator.integers(2))  # UP or DOWN
        return self._observation()

    def step(self, action: int) -> tuple[np.ndarray, bool, bool]:
        """The observation, whether the episode has ended, and whether with the correct turn."""
        self.time += 1
        at_junction = self.position == self.corridor - 1
        turned = at_junction and action in (UP, DOWN)
        if not at_junction:
            self.position = max(self.position + (action == RIGHT) - (action == LEFT), 0)
        return (
            self._observation(),
            turned or self.time >= 1000,
            turned and action == self.cue,
        )

    def _observation(self) -> np.ndarray:
        cue = [0, 0] if self.time else ([0, 1] if self.cue == UP else [1, 0])
        gray = self.position ^ (self.position >> 1)
        position = [gray >> bit & 1 for bit in reversed(range(8))]
        distractors = self.generator.integers(0, 2, 6) * (self.time > 0)
        return np.array([*cue, *position, *distractors], np.float32)


class Agent:
    """The exported policy. Its memory state is an input and an output of every call."""

    def __init__(self, path: str) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.about = json.loads(self.session.get_modelmeta().custom_metadata_map["agalite"])
        tensors = {x["name"]: x for x in self.about["inputs"]}
        self.memory_state = {
            x["input"]: np.zeros(tensors[x["input"]]["shape"], tensors[x["input"]]["dtype"])
            for x in self.about["state"]
        }

    def act(self, observation: np.ndarray, reset: bool) -> int:
        """The likeliest action; `reset` is true when an episode begins with this observation."""
        given = {"observation": observation[None], "reset": np.array([reset]), **self.memory_state}
        names = [x.name for x in self.session.get_outputs()]
        arrays: Any = self.session.run(None, given)
        found = dict(zip(names, arrays, strict=True))
        self.memory_state = {x["input"]: found[x["output"]] for x in self.about["state"]}
        return int(found["logits"][0].argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description="Play T-Maze with an exported agent.")
    parser.add_argument("policy", help="what `agalite export --onnx` wrote")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    agent = Agent(chosen.policy)
    corridor = agent.about["run"].get("env_options", {}).get("corridor", 160)
    maze = TMaze(corridor, np.random.default_rng(chosen.seed))
    successes = 0
    for _ in range(chosen.episodes):
        observation, first, ended, right = maze.reset(), True, False, False
        while not ended:
            observation, ended, right = maze.step(agent.act(observation, first))
            first = False
        successes += right
    rate = successes / chosen.episodes
    print(f"corridor {corridor}: {successes} of {chosen.episodes} episodes, success {rate:.3f}")


if __name__ == "__main__":
    main()
