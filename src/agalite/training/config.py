"""What a run is made of: everything that decides its outcome, and nothing else.

A configuration is plain data: it goes to `config.json` and comes back the same.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from jaxtyping import UInt32

from agalite import validation
from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.agents.ppo import PPO
from agalite.envs import registry
from agalite.memory.registry import MODELS

# --- What every configuration of a run counts alike: its updates, and its seeds -------------------


class InUpdates:
    """Of a configuration with `total_timesteps`."""

    total_timesteps: int

    @property
    def steps_per_update(self) -> int:
        raise NotImplementedError

    @property
    def updates(self) -> int:
        return -(-self.total_timesteps // self.steps_per_update)

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


LARGEST_UPDATE = 2**28
"""Steps in an update of one seed: their rewards alone are a gigabyte."""

AGENTS: dict[str, type[A2C] | type[PPO]] = {"a2c": A2C, "ppo": PPO, "appo": APPO}


@dataclass(frozen=True, kw_only=True)
class Basics:
    """How much is done, and how it is cut up, wherever the environments run."""

    total_timesteps: int = 1_000_000
    """Environment steps in all, of each seed; the last rollout is finished."""
    num_steps: int = 256
    """Steps that each environment acts between two updates."""
    seq_len: int | None = None
    """Steps that a gradient reaches back, at most; None: the whole rollout."""
    hidden_size: int = 128
    """Width of the actor's and of the critic's hidden layer."""
    encoder: str = "auto"
    """How observations become vectors: auto, vector, atari, impala, symbolic."""
    seed: int = 0
    """The first seed."""
    log_every: int = 20_000
    """Steps between two rows of metrics, about."""
    checkpoint_every: int = 200_000
    """Steps between two checkpoints, about."""
    keep_checkpoints: int = 2
    """Checkpoints that stay, besides the best."""


@dataclass(frozen=True, kw_only=True)
class Settings(Basics):
    """Of runs whose environments are part of the compiled program."""

    num_envs: int = 8
    """How many act side by side."""
    seeds: int = 1
    """How many runs, with seeds from `seed` on, are trained together."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(Basics):
    """Of runs whose environments are programs of their own: Gymnasium's."""

    num_workers: int = 4
    """Sets of environments; each is begun, and after a fault begun again, as one."""
    envs_per_worker: int = 2
    """Environments in each, every one in a process of its own."""
    num_actors: int = 1
    """Loops that act, each with its share of the workers: threads here, or actors of Ray."""
    batch_size: int | None = None
    """Steps in an update, a multiple of the rollout; None: a rollout of every environment."""
    queue_size: int = 1
    """Batches that may wait for the learner; when they do, the actors wait too."""
    synchronous: bool = False
    """Act, then learn, by turns; no policy is ever old."""
    processes: bool = True
    """Without, a worker's environments share the actor's process: for very cheap ones."""
    timeout: float = 60.0
    """Seconds that an environment may take for a step or a reset; without `processes` nobody can
    stop one that takes longer."""
    restarts: int = 20
    """Faults of environments, for each actor, before the run is stopped."""


@dataclass(frozen=True, kw_only=True)
class Config(Basics, InUpdates):
    env: str
    """A name that `agalite envs` lists, or gym:<id>."""
    env_options: dict[str, Any] = field(default_factory=dict)
    memory: str = "agalite"
    """A name that `agalite models` lists."""
    memory_options: dict[str, Any] = field(default_factory=dict)
    agent: A2C | PPO

    def __post_init__(self) -> None:
        validation.one_of("memory", self.memory, MODELS)
        for name in (
            "total_timesteps",
            "num_steps",
            "hidden_size",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("seed", self.seed, minimum=0)
        if self.seq_len is not None:
            validation.integer("seq_len", self.seq_len, minimum=1)
            if self.num_steps % self.seq_len:
                raise ValueError(
                    f"seq_len={self.seq_len} must be at most num_steps={self.num_steps}, and "
                    "divide it evenly"
                )

    @property
    def seeds_in_all(self) -> int:
        return 1

    @property
    def rollouts(self) -> int:
        """How many an update learns from, each of one environment."""
        raise NotImplementedError

    @property
    def sequence_length(self) -> int:
        return self.seq_len or self.num_steps

    @property
    def sequences(self) -> int:
        return self.rollouts * (self.num_steps // self.sequence_length)

    @property
    def steps_per_update(self) -> int:
        return self.rollouts * self.num_steps

    def to_dict(self) -> dict[str, Any]:
        agent = next(name for name, kind in AGENTS.items() if type(self.agent) is kind)
        values = dataclasses.asdict(self)
        return {**values, "algorithm": agent}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        try:
            agent = AGENTS[values.pop("algorithm")](**values.pop("agent"))
            return cls(**values, agent=agent)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not the configuration of a run: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config, Settings, SeveralSeeds):
    """A run in a JAX environment."""

    agent: A2C | PPO = field(default_factory=A2C)

    def __post_init__(self) -> None:
        if registry.on_host(self.env):
            raise ValueError(
                f"env={self.env!r} is an environment of Gymnasium; its configuration is a "
                "HostConfig"
            )
        validation.one_of("env", self.env, registry.ENVIRONMENTS)
        for name in ("num_envs", "seeds"):
            validation.integer(name, getattr(self, name), minimum=1)
        super().__post_init__()
        self.check_seeds()
        if self.steps_per_update > LARGEST_UPDATE:
            raise ValueError(
                f"num_envs={self.num_envs} times num_steps={self.num_steps} is more than "
                f"the {LARGEST_UPDATE:,} steps that an update can hold; take fewer"
            )
        if isinstance(self.agent, PPO) and self.sequences % self.agent.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.agent.num_minibatches} must divide the {self.sequences} "
                f"sequences of a rollout (num_envs={self.num_envs} times num_steps / seq_len)"
            )

    @property
    def seeds_in_all(self) -> int:
        return self.seeds

    @property
    def rollouts(self) -> int:
        return self.num_envs


@dataclass(frozen=True, kw_only=True)
class HostConfig(Config, HostSettings):
    """A run in an environment of Gymnasium: actors, a queue, a learner (`asynchronous.py`)."""

    agent: A2C | PPO = field(default_factory=APPO)

    def __post_init__(self) -> None:
        if not registry.on_host(self.env):
            raise ValueError(f"env={self.env!r} must be gym:<id>, or one that runs on the host")
        super().__post_init__()
        for name in ("num_workers", "envs_per_worker", "num_actors", "queue_size"):
            validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("restarts", self.restarts, minimum=0)
        validation.number("timeout", self.timeout, minimum=0.0, above=True)
        for name in ("synchronous", "processes"):
            validation.boolean(name, getattr(self, name))
        validation.integer_between("seed", self.seed, 0, 2**32 - 1)
        if self.num_workers % self.num_actors:
            raise ValueError(
                f"num_actors={self.num_actors} must divide num_workers={self.num_workers} evenly"
            )
        if not isinstance(self.agent, APPO):
            raise ValueError(
                f"algorithm={type(self.agent).__name__.lower()!r} knows nothing of policies that "
                "are older than the learner's; environments of Gymnasium are trained with 'appo'"
            )
        if self.batch_size is not None:
            validation.integer("batch_size", self.batch_size, minimum=1)
            if self.batch_size % self.num_steps:
                raise ValueError(
                    f"batch_size={self.batch_size} must be a multiple of num_steps={self.num_steps}"
                )
        if self.synchronous and self.rollouts != self.num_envs:
            raise ValueError(
                f"batch_size={self.batch_size} must be a rollout of every environment, "
                f"{self.num_envs * self.num_steps}, or left out, for synchronous=True"
            )
        if self.sequences % self.agent.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.agent.num_minibatches} must divide the {self.sequences} "
                f"sequences of a batch of {self.steps_per_update} steps"
            )

    @property
    def num_envs(self) -> int:
        return self.num_workers * self.envs_per_worker

    @property
    def rollouts(self) -> int:
        return self.num_envs if self.batch_size is None else self.batch_size // self.num_steps


def config_from(values: dict[str, Any]) -> TrainConfig | HostConfig:
    """The configuration that `to_dict` made."""
    host = registry.on_host(str(values.get("env")))
    return (HostConfig if host else TrainConfig).from_dict(values)
