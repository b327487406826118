"""What a run is made of: everything that decides its outcome, and nothing else.

A configuration is plain data: it goes to `config.json` and comes back the same.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import UInt32

from agalite import errors
from agalite.agents.a2c import A2C
from agalite.agents.ppo import PPO
from agalite.envs.registry import ENVIRONMENTS, GYMNASIUM
from agalite.memory.registry import MODELS

AGENTS: dict[str, type[A2C] | type[PPO]] = {"a2c": A2C, "ppo": PPO}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is done, and how it is cut up."""

    steps: int = 1_000_000
    """Environment steps in all, of each seed; the last rollout is finished."""
    environments: int = 8
    """How many act side by side."""
    rollout: int = 256
    """Steps that each of them acts between two updates."""
    sequence: int | None = None
    """Steps that a gradient reaches back, at most; None: the whole rollout."""
    hidden: int = 128
    """Width of the actor's and of the critic's hidden layer."""
    encoder: str = "auto"
    """How observations become vectors: auto, vector, atari, impala, symbolic."""
    seed: int = 0
    """The first seed."""
    seeds: int = 1
    """How many runs, with seeds from `seed` on, are trained together."""
    log_every: int = 20_000
    """Steps between two rows of metrics, about."""
    checkpoint_every: int = 200_000
    """Steps between two checkpoints, about."""
    keep: int = 2
    """Checkpoints that stay, besides the best."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    env: str
    """A name that `agalite envs` lists."""
    env_options: dict[str, Any] = field(default_factory=dict)
    memory: str = "agalite"
    """A name that `agalite models` lists."""
    memory_options: dict[str, Any] = field(default_factory=dict)
    agent: A2C | PPO = field(default_factory=A2C)

    def __post_init__(self) -> None:
        if self.env.startswith(GYMNASIUM):
            raise ValueError(
                f"env={self.env!r}: training in Gymnasium environments is not built yet; "
                f"choose one of: {', '.join(ENVIRONMENTS)}"
            )
        errors.one_of("env", self.env, ENVIRONMENTS)
        errors.one_of("memory", self.memory, MODELS)
        for name in ("steps", "environments", "rollout", "hidden", "seeds", "log_every", "keep"):
            errors.integer(name, getattr(self, name), minimum=1)
        errors.integer("checkpoint_every", self.checkpoint_every, minimum=1)
        errors.integer("seed", self.seed, minimum=0)
        if self.seed + self.seeds > 2**32:
            raise ValueError(f"seed={self.seed} must be below 2**32, with all of its seeds")
        if self.sequence is not None:
            errors.integer("sequence", self.sequence, minimum=1)
            if self.rollout % self.sequence:
                raise ValueError(
                    f"sequence={self.sequence} must divide rollout={self.rollout} evenly"
                )
        if isinstance(self.agent, PPO) and self.sequences % self.agent.minibatches:
            raise ValueError(
                f"minibatches={self.agent.minibatches} must divide the {self.sequences} sequences "
                f"of a rollout (environments={self.environments} times rollout / sequence)"
            )

    @property
    def seed_numbers(self) -> UInt32[np.ndarray, " seeds"]:
        return np.arange(self.seed, self.seed + self.seeds, dtype=np.uint32)

    @property
    def sequence_length(self) -> int:
        return self.sequence or self.rollout

    @property
    def sequences(self) -> int:
        return self.environments * (self.rollout // self.sequence_length)

    @property
    def steps_per_update(self) -> int:
        return self.environments * self.rollout

    @property
    def updates(self) -> int:
        return -(-self.steps // self.steps_per_update)

    def in_updates(self, steps: int) -> int:
        """An interval in steps as a whole number of updates, at least one."""
        return max(1, round(steps / self.steps_per_update))

    def to_dict(self) -> dict[str, Any]:
        agent = next(name for name, kind in AGENTS.items() if type(self.agent) is kind)
        values = dataclasses.asdict(self)
        return {**values, "algorithm": agent}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        values = dict(values)
        try:
            agent = AGENTS[values.pop("algorithm")](**values.pop("agent"))
            return cls(**values, agent=agent)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not the configuration of a run: {error}") from error
