"""Presets: named hyperparameters for every environment, as data.

- `tuned` (the default): the strongest settings known, on a small machine.
- `paper`: the paper's tables, and its published code where the text is silent. Where it swept
  a value, the one in its code or the middle of the range.
- `published`: what the published code does, where it departs from the paper.

A preset is a row of `PAPER`, for the other two with their row over it, and options of the memory
model. `configure` makes a configuration of a preset and of what the caller sets. `docs/training.md`
shows all three side by side.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agalite import validation
from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.agents.ppo import PPO
from agalite.agents.pqn import PQN
from agalite.agents.stream import StreamAC, StreamAgent
from agalite.envs.registry import ENVIRONMENTS, GYMNASIUM, on_host
from agalite.memory.block import BlockConfig
from agalite.memory.registry import BLOCKS, DIAGONAL, MODELS, SMALL, has_option, models_with_traces
from agalite.training import run
from agalite.training.config import AnyAgent, Config, HostConfig, TrainConfig

PRESETS = ("tuned", "paper", "published")
FAMILIES = (
    *("tmaze", "cartpole", "repeat-previous", "memory-chain", "popgym", "mystery-path"),
    *("craftax", "memory-maze", "gym"),
)

_SQRT2 = math.sqrt(2)

# The paper does not mention these; they are its code's. All layers have a gain of sqrt(2), the last
# ones too: with 0.01 the first policy is uniform, and a uniform walk never leaves a long corridor.
# After clipping, half of all gradients are below 1e-5: a larger epsilon freezes the gates.
_CODE_HEADS = {"actor_gain": _SQRT2, "critic_gain": _SQRT2}
_CODE_AGENT: dict[str, Any] = {"adam_eps": 1e-8, "time_limit": "terminate"}

PAPER: dict[str, dict[str, Any]] = {
    "tmaze": {
        # The code's value loss is twice this library's.
        "agent": A2C(learning_rate=1e-4, ent_coef=1e-3, vf_coef=1.0, **_CODE_AGENT),
        "num_envs": 8,
        "num_steps": 256,
        "total_timesteps": 5_000_000,
        **_CODE_HEADS,
    },
    "cartpole": {
        "agent": PPO(
            learning_rate=1e-3,
            gae_lambda=0.9,
            ent_coef=0.0,
            vf_coef=1.0,
            update_epochs=10,
            num_minibatches=1,
            max_grad_norm=0.5,
            **_CODE_AGENT,
        ),
        "num_envs": 1,
        "num_steps": 1024,
        "total_timesteps": 1_000_000,
        **_CODE_HEADS,
    },
    "mystery-path": {
        "agent": PPO(**_CODE_AGENT),
        "num_envs": 128,
        "num_steps": 128,
        "hidden_size": 256,
        "total_timesteps": 100_000_000,
        **_CODE_HEADS,
    },
    "craftax": {
        "agent": PPO(
            learning_rate=3e-4,
            gamma=0.999,
            gae_lambda=0.8,
            ent_coef=1e-3,
            update_epochs=4,
            max_grad_norm=1.0,
            anneal_lr=True,
            vf_clip_coef=0.2,
            **_CODE_AGENT,
        ),
        "num_envs": 1024,
        "num_steps": 128,
        "hidden_gain": 2.0,
        "activation": "relu",
        "total_timesteps": 1_000_000_000,
        **_CODE_HEADS,
    },
    "memory-maze": {
        # Sample Factory's value loss is twice this library's.
        "agent": APPO(vf_coef=1.0, adam_eps=1e-6, norm_return=True, vtrace=False),
        "num_workers": 32,
        "envs_per_worker": 2,
        "num_steps": 200,
        "seq_len": 100,
        "batch_size": 3200,
        "encoder": "impala",
        "hidden_size": 512,
        "total_timesteps": 100_000_000,
    },
    # Not in the paper.
    "repeat-previous": {
        "agent": PPO(
            learning_rate=5e-4,
            ent_coef=1e-2,
            update_epochs=4,
            num_minibatches=8,
            max_grad_norm=0.5,
            **_CODE_AGENT,
        ),
        "num_envs": 16,
        "num_steps": 256,
        "total_timesteps": 1_000_000,
    },
    # Not in the paper. As POPGym's own baselines, with the previous action as an input.
    "popgym": {
        "agent": PPO(
            learning_rate=5e-4,
            ent_coef=1e-2,
            update_epochs=4,
            num_minibatches=8,
            max_grad_norm=0.5,
            adam_eps=1e-8,
        ),
        "num_envs": 16,
        "num_steps": 256,
        "previous_action": True,
        "total_timesteps": 1_000_000,
    },
    "memory-chain": {
        "agent": PPO(
            learning_rate=5e-4,
            gamma=0.999,
            ent_coef=1e-2,
            update_epochs=4,
            num_minibatches=8,
            max_grad_norm=0.5,
            **_CODE_AGENT,
        ),
        "num_envs": 16,
        "num_steps": 256,
        "total_timesteps": 500_000,
    },
    # Not in the paper: what learned CartPole, on processes; small models, for a laptop.
    "gym": {
        "agent": APPO(
            learning_rate=5e-4,
            anneal_lr=True,
            ent_coef=1e-3,
            update_epochs=10,
            num_minibatches=4,
            clip_coef=0.2,
            vf_clip_coef=None,
            max_grad_norm=0.5,
            adam_eps=1e-8,
            norm_return=True,
            vtrace=False,
        ),
        "num_workers": 4,
        "envs_per_worker": 2,
        "num_steps": 128,
        "norm_obs": True,
        "previous_action": True,
        # Without, some seeds of Pendulum and MountainCar end at full force in one direction.
        "bounded_mean": True,
        "total_timesteps": 500_000,
        "log_every": 10_000,
        "checkpoint_every": 50_000,
    },
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "mystery-path": {
        "agent": PPO(ent_coef=3e-4, max_grad_norm=5.0, **_CODE_AGENT),
        "total_timesteps": 150_000_000,
    },
    "craftax": {
        "agent": dataclasses.replace(
            PAPER["craftax"]["agent"], learning_rate=4e-4, ent_coef=1e-2, gamma=0.99
        ),
    },
}

# Found by the sweeps `tuning-tmaze` and `tuning-cartpole` (`docs/training.md`).
TUNED: dict[str, dict[str, Any]] = {
    "tmaze": {
        "agent": PPO(
            learning_rate=5e-4,
            ent_coef=3e-2,
            vf_coef=0.25,
            update_epochs=4,
            num_minibatches=4,
            max_grad_norm=0.5,
            **_CODE_AGENT,
        ),
        # Few environments: many small updates learned more than a few large ones.
        "num_envs": 4,
        # Two of three episodes of 160 steps are in one rollout whole, with their cue.
        "num_steps": 512,
        # A policy that is uniform at first and keeps its direction for 64 steps walks to the
        # junction of 160 in every second episode; with fresh noise it never does.
        "actor_gain": 0.01,
        "noise_steps": 64,
        "total_timesteps": 2_000_000,
    },
    "cartpole": {
        "agent": PPO(
            learning_rate=5e-4,
            anneal_lr=True,
            gamma=0.99,
            gae_lambda=0.95,
            ent_coef=0.0,
            vf_coef=0.5,
            update_epochs=10,
            num_minibatches=4,
            anneal_clip_coef=True,
            max_grad_norm=0.5,
            adam_eps=1e-8,
            norm_return=True,
        ),
        "num_envs": 8,
        "num_steps": 128,
        "norm_obs": True,
        "separate_critic": True,
        "previous_action": True,
        "actor_gain": 0.01,
        "critic_gain": 1.0,
        "log_every": 5_000,
        "checkpoint_every": 50_000,
    },
    "mystery-path": {
        "agent": PPO(adam_eps=1e-8),
        "num_envs": 32,
        # It learned no less than the Atari network in as many steps, and is five times as fast
        # (study tuning-encoder).
        "encoder": "patch",
        "total_timesteps": 2_000_000,
    },
    "craftax": {"num_envs": 64, "total_timesteps": 1_000_000},
    # The paper's agent has 22 million parameters and learns from 64 mazes. On two cores its ResNet
    # costs more than the maze; with the smaller network the maze is the limit.
    "memory-maze": {
        "agent": APPO(norm_return=True),
        "num_workers": 8,
        "envs_per_worker": 1,
        "num_steps": 100,
        "batch_size": 800,
        "hidden_size": 128,
        "encoder": "atari",
        "total_timesteps": 5_000_000,
        "log_every": 4_000,
        "checkpoint_every": 40_000,
    },
}

# As RL Baselines3 Zoo's RecurrentPPO, but with the previous action and a lower learning rate.
_CARTPOLE_OF_GRU: dict[str, Any] = {
    "agent": dataclasses.replace(
        TUNED["cartpole"]["agent"],
        learning_rate=3e-4,
        gamma=0.98,
        gae_lambda=0.8,
        update_epochs=20,
        num_minibatches=1,
        adam_eps=1e-5,
        norm_return=False,
    ),
    "num_steps": 32,
    "separate_critic": False,
}

# Environments of Gymnasium that need other values, by a part of their id. As in RL Baselines3 Zoo,
# Pendulum has a short horizon. Its minibatches are single sequences, and it learns more when
# their advantages are not normalised; MountainCar and CartPole do not.
_GYM_VALUES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Pendulum": (
        {
            "learning_rate": 1e-3,
            "gamma": 0.9,
            "ent_coef": 0.0,
            "num_minibatches": 8,
            "norm_adv": False,
        },
        {"total_timesteps": 100_000, "noise_steps": 4},
    ),
    "MountainCarContinuous": (
        {"learning_rate": 3e-4, "gamma": 0.999, "ent_coef": 0.0, "clip_coef": 0.1},
        # One push does little: fresh noise at every step never reaches the goal, and noise that
        # lasts 16 steps reaches it in 95 of 100 episodes before anything is learned.
        {"total_timesteps": 300_000, "noise_steps": 16},
    ),
}

# T-Maze: the published code has other values for these models than for AGaLiTe.
_TMAZE_VALUES: dict[str, dict[str, float]] = {
    "gtrxl": {"learning_rate": 5e-4, "ent_coef": 1e-3},
    "gru": {"learning_rate": 5e-4, "ent_coef": 1e-2},
}

# PQN in every preset: layer norm is what it has instead of a target network.
_PQN: dict[str, Any] = {
    "hidden_norm": True,
    "activation": "relu",
    "actor_gain": 1.0,
    "separate_critic": False,
}

# Streaming agents, whatever the preset: one environment, a network of one layer.
_STREAM: dict[str, Any] = {
    "num_envs": 1,
    "num_steps": 500,
    "hidden_size": 64,
    "hidden_norm": True,
    "total_timesteps": 500_000,
}
_STREAM_AGENTS: dict[str, dict[str, Any]] = {
    # A reward that comes once, after all the steps.
    "memory-chain": {"gamma": 0.999},
    "tmaze": {"gamma": 0.999},
}
# Of AGaLiTe's projections, separate ones start larger, so that more gates tell the cue from what
# follows it. With these two a chain of 64 was learned sooner (docs/streaming.md).
_STREAM_ACTORS: dict[str, dict[str, Any]] = {"memory-chain": {"actor_step_size": 0.2}}
_STREAM_MEMORIES: dict[tuple[str, str], dict[str, Any]] = {
    ("memory-chain", "agalite"): {"projection_init": "separate"},
}
_STREAM_SIZES = {
    **{name: {"layers": 1} for name in (*BLOCKS, *DIAGONAL)},
    **{name: {"d_model": 64, "hidden_size": 64} for name in ("gru", "lstm")},
}

_LARGE = {"d_model": 512, "layers": 4, "heads": 8, "head_size": 64, "ffn_size": 512}
_MEMORY_MAZE_OPTIONS: dict[str, dict[str, Any]] = {
    "agalite": {**_LARGE, "eta": 4, "r": 7},
    "gtrxl": {**_LARGE, "memory": 256},
}

# The paper writes down its attentions; their initialisation is its code's.
_PAPER_OPTIONS: dict[str, dict[str, Any]] = {
    "agalite": {"basis": "paper", "projection_init": "fused"},
    "galite": {"projection_init": "fused"},
    "gtrxl": {"init": "lecun"},
}
_PUBLISHED_OPTIONS: dict[str, dict[str, Any]] = {
    "agalite": {"basis": "published", "projection_init": "fused"},
    "galite": {"decay": "published", "projection_init": "fused"},
    "gtrxl": {"init": "lecun"},
    "gru": {"embedding": False, "hidden_size": 680},
    "lstm": {"embedding": False, "hidden_size": 600},
}

# Gates that start with a time constant of two steps hardly ever learn a longer one. With this, all
# models that have a `horizon` start with time constants spread from 2 to 512 steps.
_SPREAD = {"horizon": (2.0, 512.0)}


def preset(
    name: str, env: str, memory: str, algorithm: type[AnyAgent] | None = None
) -> dict[str, Any]:
    """Arguments of `TrainConfig` or `HostConfig` for an environment and a memory model.

    **Arguments:**

    - `name`: one of `PRESETS`.
    - `env`, `memory`: names, as in a configuration.
    - `algorithm`: of `AGENTS`, if it is not the preset's own. Streaming agents have settings of
        their own, the same in all presets; PQN has its own network, and the preset's discount;
        other algorithms keep the rest of the preset.
    """
    validation.check_one_of("preset", name, PRESETS)
    family = _family(env)
    if algorithm is not None and issubclass(algorithm, StreamAgent) and not on_host(env):
        return _stream_preset(family, memory, algorithm)
    start = _rollout_preset(name, family, env, memory)
    if algorithm is PQN and not on_host(env):
        gamma, num_envs = start["agent"].gamma, start["num_envs"]
        agent = PQN(gamma=gamma, num_minibatches=math.gcd(PQN.num_minibatches, num_envs))
        return {**start, **_PQN, "agent": agent}
    if algorithm is not None and algorithm is not type(start["agent"]):
        start["agent"] = algorithm()
    return start


def _stream_preset(family: str, memory: str, algorithm: type[StreamAgent]) -> dict[str, Any]:
    options = {**_tuned_options(family, memory), **_STREAM_SIZES.get(memory, {})}
    options |= _STREAM_MEMORIES.get((family, memory), {})
    values = dict(_STREAM_AGENTS.get(family, {}))
    if issubclass(algorithm, StreamAC):
        values |= _STREAM_ACTORS.get(family, {})
    agent = algorithm(**values)
    return {
        **_STREAM,
        "agent": agent,
        "gradient": "rtrl" if memory in models_with_traces() else "bptt",
        "norm_obs": family not in ("mystery-path", "craftax"),  # vectors of numbers
        # A bound for each: with a shared memory the critic's gradient decides the actor's step.
        "separate_critic": agent.epsilon is None,
        "memory_options": options,
    }


def _rollout_preset(name: str, family: str, env: str, memory: str) -> dict[str, Any]:
    rows = {"tuned": TUNED, "paper": {}, "published": PUBLISHED}[name]
    settings = {**PAPER[family], **rows.get(family, {})}
    for part, (of_agent, others) in _GYM_VALUES.items():
        if family == "gym" and part in env:
            agent = dataclasses.replace(settings["agent"], **of_agent)
            settings |= {"agent": agent, **others}
    if name == "tuned" and family == "cartpole":
        settings |= _CARTPOLE_OF_GRU if memory in ("gru", "lstm") else {}
        settings["total_timesteps"] = 500_000 if env.startswith("noisy") else 100_000
    if name == "tuned" or family == "gym":
        return {**settings, "memory_options": _tuned_options(family, memory)}
    if family == "tmaze":
        agent = dataclasses.replace(settings["agent"], **_TMAZE_VALUES.get(memory, {}))
        settings["agent"] = agent
    options = dict((_PUBLISHED_OPTIONS if name == "published" else _PAPER_OPTIONS).get(memory, {}))
    if family == "memory-maze":
        options |= _MEMORY_MAZE_OPTIONS.get(memory, {})
    if family == "craftax" and name == "published" and memory in ("agalite", "galite"):
        options["eta"] = 8
    return {**settings, "memory_options": options}


def _family(env: str) -> str:
    """The row of the tables for an environment."""
    if env.startswith(GYMNASIUM):
        return "gym"
    if env.startswith("popgym-"):
        return "popgym"
    families = (
        "tmaze",
        "cartpole",
        "repeat-previous",
        "memory-chain",
        "mystery-path",
        "memory-maze",
    )
    return next((family for family in families if family in env), "craftax")


def _tuned_options(family: str, memory: str) -> dict[str, Any]:
    """Options of the memory model."""
    in_block = issubclass(MODELS[memory].config, BlockConfig)
    # About 190k parameters: a ninth of the paper's learns its longest corridor in minutes.
    options = {} if family in ("mystery-path", "craftax") else dict(SMALL.get(memory, {}))
    if memory == "agalite":
        options["projection_init"] = "fused"
        # From the study `tuning-basis`, whose numbers are beside `AGaLiTeConfig.basis`. In T-Maze
        # the bases did not differ, and its bar was measured with this one.
        options["basis"] = "published" if family == "tmaze" else "paper"
        if family in (
            "repeat-previous",
            "popgym",
        ):  # recall by content: a query needs more than one vector
            options |= {"basis": "slots", "r": 2}
    # Control needs only a short memory, so the gates start as the paper's do.
    if family not in ("cartpole", "gym"):
        options |= _SPREAD if has_option(memory, "horizon") else {}
    elif memory in ("gru", "lstm"):
        options |= {"d_model": 64, "hidden_size": 64}
    elif in_block:
        # Of a few numbers a layer norm would leave the direction only.
        options |= {"layers": 1, "embedding_bias": 1.0}
    # Half of a block's output is new from the start: what is remembered shows.
    if family in ("tmaze", "memory-chain", "gym") and in_block:
        options |= {"gate_bias": 0.0}
    return options


def configure(preset_name: str, settings: Mapping[str, Any]) -> TrainConfig | HostConfig:
    """A configuration from a preset and from what the caller sets.

    **Arguments:**

    - `preset_name`: one of `PRESETS`.
    - `settings`: fields of `TrainConfig`, or for an environment of Gymnasium of `HostConfig`, by
        name. `env` is required. `memory_options` are added to those of the preset.
    """
    env, memory = settings.get("env"), settings.get("memory", Config.memory)
    if not isinstance(env, str):
        raise ValueError(f"env={env!r} must be one of: {', '.join(ENVIRONMENTS)}, or gym:<id>")
    kind = HostConfig if on_host(env) else TrainConfig
    known = [f.name for f in dataclasses.fields(kind)]
    for name in settings:
        validation.check_one_of("setting", name, known)
    validation.check_one_of("memory", memory, MODELS)
    agent = settings.get("agent")
    start = preset(preset_name, env, memory, None if agent is None else type(agent))
    options = {**start.pop("memory_options", {}), **settings.get("memory_options", {})}
    return kind(**{**start, **settings, "memory_options": options})


# Fields that say where and how often things are written, and not how the agent learns.
_NOT_SHOWN = {"seed", "seeds", "log_every", "checkpoint_every", "keep_checkpoints", "env", "memory"}


def preset_rows(family: str, memory: str) -> list[tuple[str, tuple[str, ...]]]:
    """The settings of all presets for an environment and a memory model, side by side.

    **Arguments:**

    - `family`: one of `FAMILIES`.
    - `memory`: name of a memory model.

    **Returns:**

    (setting, its value in each of `PRESETS`), for the settings in which the presets differ from
    each other.
    """
    validation.check_one_of("environment", family, FAMILIES)
    env = _EXAMPLES[family]
    configs = [configure(name, {"env": env, "memory": memory}) for name in PRESETS]

    def flat(config: Config) -> dict[str, Any]:
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        values["algorithm"] = type(config.agent).__name__
        values |= dataclasses.asdict(values.pop("agent"))
        model = MODELS[memory].config
        options = {f.name: getattr(model(), f.name) for f in dataclasses.fields(model)}
        options |= values.pop("memory_options")
        return values | {f"model.{name}": value for name, value in options.items()}

    tables = [flat(config) for config in configs]
    names = sorted(set().union(*tables) - _NOT_SHOWN - {"env_options"})
    rows = [(name, tuple(_text(table.get(name)) for table in tables)) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


_EXAMPLES = {
    "tmaze": "tmaze",
    "cartpole": "masked-cartpole",
    "repeat-previous": "repeat-previous",
    "memory-chain": "memory-chain",
    "popgym": "popgym-repeat-first-easy",
    "mystery-path": "mystery-path-grid",
    "craftax": "craftax-symbolic",
    "memory-maze": "memory-maze-9x9",
    "gym": "gym:CartPole-v1",
}


def _text(value: Any) -> str:
    match value:
        case bool() | None:
            return {True: "yes", False: "no", None: "-"}[value]
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case tuple():
            return " to ".join(_text(x) for x in value)
    return str(value)


def preset_table(memory: str = "agalite") -> str:
    """All presets as Markdown, a table for each family of environments; `docs/training.md`."""
    parts = []
    for family in FAMILIES:
        rows = preset_rows(family, memory)
        if not rows:
            continue
        lines = [f"| {family} | {' | '.join(PRESETS)} |", f"|---{'|---:' * len(PRESETS)}|"]
        lines += [f"| `{name}` | {' | '.join(values)} |" for name, values in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def new_folder(config: Config) -> Path:
    """A folder for a run that the caller gave none for."""
    return run.new_folder(config.env, config.memory)
