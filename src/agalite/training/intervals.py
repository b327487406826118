"""What every configuration of a run counts alike: its updates, and its seeds."""

import numpy as np
from jaxtyping import UInt32


class InUpdates:
    """Of a configuration with `steps` in all."""

    steps: int

    @property
    def steps_per_update(self) -> int:
        raise NotImplementedError

    @property
    def updates(self) -> int:
        return -(-self.steps // self.steps_per_update)

    def in_updates(self, steps: int) -> int:
        """An interval in steps as a whole number of updates, at least one."""
        return max(1, round(steps / self.steps_per_update))


class SeveralSeeds:
    """Of a configuration with the first `seed` and the number of `seeds`."""

    seed: int
    seeds: int

    def check_seeds(self) -> None:
        if self.seed + self.seeds > 2**32:
            raise ValueError(f"seed={self.seed} must be below 2**32, with all of its seeds")

    @property
    def seed_numbers(self) -> UInt32[np.ndarray, " seeds"]:
        return np.arange(self.seed, self.seed + self.seeds, dtype=np.uint32)
