"""The configuration of a training run: everything that decides its outcome.

A configuration is plain data. `to_dict` and `config_from_dict` take it to `config.json` and back.
The description under each field is also its help on the command line.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from jaxtyping import UInt32

from agalite import validation
from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.agents.ppo import PPO
from agalite.agents.pqn import PQN
from agalite.agents.stream import StreamAC, StreamAgent, StreamQ
from agalite.envs import registry
from agalite.memory.registry import MODELS
from agalite.networks.actor_critic import ACTIVATIONS
from agalite.ops.matmul import PRECISIONS

AnyAgent = A2C | PPO | PQN | StreamAgent

AGENTS: dict[str, type[AnyAgent]] = {
    "a2c": A2C,
    "ppo": PPO,
    "appo": APPO,
    "pqn": PQN,
    "stream-ac": StreamAC,
    "stream-q": StreamQ,
}

GRADIENTS = ("bptt", "rtrl")

LARGEST_UPDATE = 2**28
"""Most steps in an update of one seed: their rewards alone take a gigabyte."""


class UpdateSchedule:
    """Counts the updates of a configuration that has `total_timesteps`."""

    total_timesteps: int

    @property
    def steps_per_update(self) -> int:
        raise NotImplementedError

    @property
    def updates(self) -> int:
        """Updates in the run; the last one is not cut short."""
        return -(-self.total_timesteps // self.steps_per_update)

    def check_length(self, gradient_steps: int = 1) -> None:
        """Refuses a run with more gradient steps than compiled programs count.

        **Arguments:**

        - `gradient_steps`: of an update.
        """
        count = self.updates * gradient_steps
        if count > validation.LARGEST_INTEGER:
            raise ValueError(
                f"total_timesteps={self.total_timesteps} are {count:,} gradient steps, and at most "
                f"{validation.LARGEST_INTEGER:,} can be counted: take a smaller total_timesteps"
            )

    def in_updates(self, steps: int) -> int:
        """An interval in environment steps as a whole number of updates, at least one."""
        return max(1, round(steps / self.steps_per_update))


class SeedRange:
    """The seeds `seed`, `seed + 1`, ... of a configuration that trains `seeds` of them at once."""

    seed: int
    seeds: int

    def check_seeds(self) -> None:
        if self.seed + self.seeds > 2**32:
            raise ValueError(f"seed={self.seed} must be below 2**32, with all of its seeds")

    @property
    def seed_numbers(self) -> UInt32[np.ndarray, " seeds"]:
        return np.arange(self.seed, self.seed + self.seeds, dtype=np.uint32)


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings of every run."""

    total_timesteps: int = 1_000_000
    """Environment steps of each seed in total (rounded up to whole updates)."""
    num_steps: int = 256
    """Steps per environment and rollout; streaming agents, which learn at every step, only log and
    save after so many."""
    seq_len: int | None = None
    """Steps that a gradient reaches back at most (truncated backpropagation through time); it must
    divide num_steps; None: the whole rollout."""
    gradient: str = "bptt"
    """How gradients reach back in time: bptt (to the beginning of a sequence) or rtrl (real-time
    recurrent learning: to the beginning of the episode, for memory models with traces)."""
    hidden_size: int = 128
    """Width of the hidden layers of actor and critic."""
    hidden_gain: float = math.sqrt(2)
    """Gain of the orthogonal weights of those layers."""
    activation: str = "tanh"
    """Activation of those layers: tanh or relu."""
    hidden_norm: bool = False
    """Layer norm before that activation, as streaming agents need it."""
    actor_gain: float = 0.01
    """Gain of the actor's last layer: with 0.01 the first policy is uniform, with 1.41 it already
    prefers some actions."""
    log_std_init: float = 0.0
    """Logarithm of the standard deviation of continuous actions at the start; the limits of the
    action space are -1 and 1."""
    bounded_mean: bool = False
    """Keep the means of continuous actions within the limits of the action space, by a tanh; other
    actions have no means, and nothing changes."""
    critic_gain: float = 1.0
    """Gain of the critic's last layer."""
    separate_critic: bool = False
    """Give the critic a memory of its own."""
    previous_action: bool = False
    """Let the memory read the previous action beside the observation."""
    previous_reward: bool = False
    """Let the memory read the previous reward beside the observation."""
    noise_steps: int = 1
    """Steps for which the randomness of the actions stays the same; fresh noise at every step
    cancels out where one action does little."""
    norm_obs: bool = False
    """Normalise observations by running statistics; for vectors of numbers."""
    encoder: str = "auto"
    """Network before the memory: auto, vector (none), symbolic (dense layer), atari (convolutions),
    impala (residual network), patch (patches that do not overlap: the fastest for pixels) or
    patch-large."""
    patch_size: int | None = None
    """Side of a patch in pixels, which divides those of the frame; None: at most 12."""
    precision: str = "float32"
    """Matrix products of encoder and memory: float32, or bfloat16, which is for accelerators."""
    seed: int = 0
    """Random seed (the first one, if several are trained)."""
    log_every: int = 20_000
    """Environment steps between two rows of metrics (rounded to whole updates)."""
    checkpoint_every: int = 200_000
    """Environment steps between two checkpoints (rounded to whole updates)."""
    keep_checkpoints: int = 2
    """Latest checkpoints to keep; the best one is always kept."""


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """Settings of runs in JAX environments, which are part of the compiled program."""

    num_envs: int = 8
    """Parallel environments."""
    stop_at_success: float | None = None
    """End the run early when the success rate of every seed over the last 200K steps (a tenth of
    the run if that is less) is at least this; None: never. For environments with a success."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(CommonSettings):
    """Settings of runs in Gymnasium environments, which are stepped by processes on the host."""

    num_workers: int = 4
    """Workers: groups of environments that are started, and restarted after a fault, together."""
    envs_per_worker: int = 2
    """Environments per worker, each in its own process."""
    num_actors: int = 1
    """Actors that run the policy, each with an equal share of the workers: threads, or Ray actors
    with --ray."""
    batch_size: int | None = None
    """Environment steps per update, a multiple of num_steps; None: one rollout of every
    environment."""
    queue_size: int = 1
    """Batches that may wait for the learner before the actors pause."""
    synchronous: bool = False
    """Act and learn alternately, so that the policy that acts is always the newest."""
    processes: bool = True
    """Run every environment in its own process; without, those of a worker share the actor's
    process, which is faster for very cheap environments."""
    timeout: float = 60.0
    """Seconds that a step or a reset of an environment may take; only with --processes."""
    restarts: int = 20
    """Faults of environments per actor before the run stops."""


@dataclass(frozen=True, kw_only=True)
class Config(CommonSettings, UpdateSchedule):
    """What the configurations of both kinds of runs share."""

    env: str
    """Name of an environment that `agalite envs` lists, or gym:<id>."""
    env_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    memory: str = "agalite"
    """Name of a memory model that `agalite models` lists."""
    memory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the memory model."""
    agent: AnyAgent
    """Algorithm and its hyperparameters."""

    def __post_init__(self) -> None:
        validation.check_one_of("memory", self.memory, MODELS)
        for name in ("env_options", "memory_options"):
            validation.check_options(name, getattr(self, name))
        for name in ("total_timesteps", "log_every", "checkpoint_every"):
            validation.check_integer(
                name, getattr(self, name), minimum=1, maximum=validation.LARGEST_COUNT
            )
        for name in (
            "num_steps",
            "noise_steps",
            "hidden_size",
            "keep_checkpoints",
        ):
            validation.check_integer(name, getattr(self, name), minimum=1)
        for name in ("hidden_gain", "actor_gain", "critic_gain"):
            validation.check_number(name, getattr(self, name), minimum=0.0, above=True)
        validation.check_number("log_std_init", self.log_std_init, minimum=-10.0, maximum=10.0)
        for name in (
            *("separate_critic", "previous_action", "previous_reward", "norm_obs"),
            *("hidden_norm", "bounded_mean"),
        ):
            validation.check_boolean(name, getattr(self, name))
        validation.check_one_of("gradient", self.gradient, GRADIENTS)
        validation.check_one_of("activation", self.activation, ACTIVATIONS)
        validation.check_one_of("precision", self.precision, PRECISIONS)
        validation.check_integer_between("seed", self.seed, 0, 2**32 - 1)
        if self.seq_len is not None:
            validation.check_integer("seq_len", self.seq_len, minimum=1)
            if self.num_steps % self.seq_len:
                raise ValueError(
                    f"seq_len={self.seq_len} must be at most num_steps={self.num_steps}, and "
                    "divide it evenly"
                )

    @property
    def network_options(self) -> dict[str, Any]:
        """Arguments of `ActorCritic.make`, besides the spaces and the key."""
        return {
            **{name: getattr(self, name) for name in _NETWORK_FIELDS},
            "norm_return": self.agent.norm_return,
            "epsilon": self.agent.epsilon,
        }

    @property
    def num_seeds(self) -> int:
        """Seeds that are trained at once."""
        return 1

    @property
    def rollouts(self) -> int:
        """Rollouts per update, each of one environment."""
        raise NotImplementedError

    @property
    def sequence_length(self) -> int:
        """`seq_len`, or the whole rollout."""
        return self.seq_len or self.num_steps

    @property
    def sequences(self) -> int:
        """Sequences per update."""
        return self.rollouts * (self.num_steps // self.sequence_length)

    @property
    def steps_per_update(self) -> int:
        return self.rollouts * self.num_steps

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `config.json`."""
        algorithm = next(name for name, kind in AGENTS.items() if type(self.agent) is kind)
        return {**dataclasses.asdict(self), "algorithm": algorithm}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        values = dict(values)
        try:
            kind = AGENTS[values.pop("algorithm")]
            agent = values.pop("agent")
            validation.check_options("agent", agent)
            _refuse_older_format(cls, values)
            _refuse_older_format(kind, agent)
            return cls(**values, agent=kind(**agent))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not the configuration of a run: {error}") from error


_NETWORK_FIELDS = (
    *("memory", "memory_options", "encoder", "patch_size", "separate_critic"),
    *("hidden_size", "hidden_gain", "activation", "hidden_norm", "actor_gain", "log_std_init"),
    *("critic_gain", "bounded_mean"),
    *("previous_action", "previous_reward", "norm_obs", "precision"),
)

# Fields of configurations of agalite before its first release.
_OLDER_FIELDS = {
    *("steps", "rollout", "sequence", "hidden", "keep", "environments"),
    *("workers", "actors", "batch", "queue"),
    *("discount", "lam", "entropy", "value", "max_gradient_norm"),
    *("anneal_learning_rate", "anneal_entropy"),
    *("epochs", "minibatches", "clip", "value_clip", "normalise_advantages"),
}


def _refuse_older_format(kind: type, values: dict[str, Any]) -> None:
    known = {f.name for f in dataclasses.fields(kind)}
    if older := sorted(_OLDER_FIELDS & (values.keys() - known)):
        raise ValueError(
            f"this run was written by an older version of agalite (its configuration has "
            f"{older[0]!r}) and cannot be resumed or loaded by this one; train it again"
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config, Settings, SeedRange):
    """The configuration of a run in a JAX environment.

    Values that do not fit together are refused here, before anything is compiled.

    **Arguments:** the fields of this class, by keyword. `env` is required.
    `agalite.training.presets.configure` fills in the others from a preset.
    """

    seeds: int = 1
    """Number of seeds, from `seed` on, that are trained at once."""
    agent: AnyAgent = field(default_factory=A2C)

    def __post_init__(self) -> None:
        if registry.on_host(self.env):
            raise ValueError(
                f"env={self.env!r} is an environment of Gymnasium; its configuration is a "
                "HostConfig"
            )
        validation.check_one_of("env", self.env, registry.ENVIRONMENTS)
        for name in ("num_envs", "seeds"):
            validation.check_integer(name, getattr(self, name), minimum=1)
        super().__post_init__()
        self.check_seeds()
        if self.stop_at_success is not None:
            validation.check_number(
                "stop_at_success", self.stop_at_success, minimum=0.0, maximum=1.0, above=True
            )
        if self.steps_per_update > LARGEST_UPDATE:
            raise ValueError(
                f"num_envs={self.num_envs} times num_steps={self.num_steps} is more than "
                f"the {LARGEST_UPDATE:,} steps that an update can hold; take fewer"
            )
        if isinstance(self.agent, StreamAgent):
            if self.seq_len is not None:
                raise ValueError(
                    f"seq_len={self.seq_len} is for agents that learn from rollouts; how far back "
                    "the gradient of a streaming agent reaches is its truncation"
                )
            if self.gradient == "rtrl" and self.agent.truncation != 1:
                raise ValueError(
                    f"truncation={self.agent.truncation} is for gradient='bptt'; with 'rtrl' "
                    "nothing is truncated, leave it out"
                )
        if self.agent.epsilon is not None and self.separate_critic:
            name = next(name for name, kind in AGENTS.items() if type(self.agent) is kind)
            raise ValueError(f"separate_critic=True: {name} has no critic, leave it out")
        if isinstance(self.agent, (PPO, PQN)) and self.sequences % self.agent.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.agent.num_minibatches} must divide the {self.sequences} "
                f"sequences of a rollout (num_envs={self.num_envs} times num_steps / seq_len)"
            )
        if isinstance(self.agent, StreamAgent):
            self.check_length(self.num_steps)  # one at every step
        else:
            self.check_length(self.agent.gradient_steps)

    @property
    def num_seeds(self) -> int:
        return self.seeds

    @property
    def rollouts(self) -> int:
        return self.num_envs


@dataclass(frozen=True, kw_only=True)
class HostConfig(Config, HostSettings):
    """The configuration of a run in a Gymnasium environment (`agalite.training.asynchronous`).

    **Arguments:** the fields of this class, by keyword. `env` is required.
    """

    agent: APPO = field(default_factory=APPO)

    def __post_init__(self) -> None:
        if not registry.on_host(self.env):
            raise ValueError(f"env={self.env!r} must be gym:<id>, or one that runs on the host")
        super().__post_init__()
        if self.gradient != "bptt":
            raise ValueError(
                f"gradient={self.gradient!r} is for JAX environments: the actors of {self.env} act "
                "with older weights than the learner's, and carry no traces; use bptt"
            )
        for name in ("num_workers", "envs_per_worker", "num_actors", "queue_size"):
            validation.check_integer(name, getattr(self, name), minimum=1)
        validation.check_integer("restarts", self.restarts, minimum=0)
        validation.check_number("timeout", self.timeout, minimum=0.0, above=True)
        for name in ("synchronous", "processes"):
            validation.check_boolean(name, getattr(self, name))
        if self.num_workers % self.num_actors:
            raise ValueError(
                f"num_actors={self.num_actors} must divide num_workers={self.num_workers} evenly"
            )
        if not isinstance(self.agent, APPO):
            raise ValueError(
                f"algorithm={type(self.agent).__name__.lower()!r} cannot learn from policies that "
                "are older than the learner's; environments of Gymnasium are trained with 'appo'"
            )
        if self.batch_size is not None:
            validation.check_integer("batch_size", self.batch_size, minimum=1)
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
        self.check_length(self.agent.gradient_steps)

    @property
    def num_envs(self) -> int:
        return self.num_workers * self.envs_per_worker

    @property
    def rollouts(self) -> int:
        return self.num_envs if self.batch_size is None else self.batch_size // self.num_steps


def config_from_dict(values: dict[str, Any]) -> TrainConfig | HostConfig:
    """The configuration of which `to_dict` made `values`."""
    host = registry.on_host(values.get("env", ""))
    return (HostConfig if host else TrainConfig).from_dict(values)
