"""Named settings: the paper's, and ours where they learn faster on a small machine."""

from typing import Any

from agalite import validation
from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.agents.ppo import PPO
from agalite.memory.registry import SMALL

PRESETS = ("tuned", "paper")

# Findings, section 8: gates that start with a memory of two steps hardly ever learn a longer one.
_SPREAD = {name: {"horizon": (2.0, 512.0)} for name in ("agalite", "galite", "gru", "lstm")}


def preset(name: str, env: str, memory: str) -> dict[str, Any]:
    """Arguments of `TrainConfig` for this environment and memory model."""
    validation.one_of("preset", name, PRESETS)
    if env.startswith("gym:"):
        return {"memory_options": {} if name == "paper" else _SPREAD.get(memory, {}), **_GYMNASIUM}
    paper = _paper(env, memory)
    if name == "paper":
        return paper
    # The paper does not say how large its models for CartPole were, and those for Memory Maze are
    # too much for two cores.
    small = env.endswith("cartpole") or env.startswith("memory-maze")
    # What CartPole must remember is short: there the gates start as the paper's do.
    spread = {} if env.endswith("cartpole") else _SPREAD.get(memory, {})
    options = {**(SMALL.get(memory, {}) if small else {}), **spread}
    return {**paper, "memory_options": options, **_TUNED.get(env, {})}


def _paper(env: str, memory: str) -> dict[str, Any]:
    """Where the paper swept a value, the one in the middle, or what its code was shipped with."""
    match env:
        case "tmaze":
            rate, ent_coef = _SHIPPED.get(memory, (1e-4, 1e-3))
            agent = A2C(learning_rate=rate, ent_coef=ent_coef)
            return {"agent": agent, "num_envs": 8, "num_steps": 256, "total_timesteps": 5_000_000}
        case "masked-cartpole" | "noisy-masked-cartpole":
            agent = PPO(
                learning_rate=1e-3,
                gae_lambda=0.9,
                ent_coef=0.0,
                vf_coef=1.0,
                update_epochs=10,
                num_minibatches=1,
                max_grad_norm=0.5,
            )
            return {"agent": agent, "num_envs": 1, "num_steps": 1024, "total_timesteps": 1_000_000}
        case "mystery-path-grid" | "mystery-path":
            return {
                "agent": PPO(),
                "num_envs": 128,
                "num_steps": 128,
                "hidden_size": 256,
                "total_timesteps": 100_000_000,
            }
        case maze if maze.startswith("memory-maze"):
            return {
                "agent": APPO(),
                "num_workers": 32,
                "envs_per_worker": 2,
                "num_steps": 200,
                "seq_len": 100,
                "batch_size": 3200,
                "encoder": "impala",
                "hidden_size": 512,
                "total_timesteps": 100_000_000,
                "memory_options": _MEMORY_MAZE.get(memory, {}),
            }
        case _:
            agent = PPO(
                learning_rate=3e-4,
                gamma=0.999,
                gae_lambda=0.8,
                ent_coef=1e-3,
                update_epochs=4,
                max_grad_norm=1.0,
            )
            return {
                "agent": agent,
                "num_envs": 1024,
                "num_steps": 128,
                "total_timesteps": 1_000_000_000,
            }


# The paper's own experiments have none of these; small enough for a laptop.
_GYMNASIUM: dict[str, Any] = {
    "agent": APPO(
        learning_rate=1e-3,
        ent_coef=3e-3,
        update_epochs=4,
        num_minibatches=2,
        clip_coef=0.2,
        vf_clip_coef=None,
        max_grad_norm=1.0,
    ),
    "num_workers": 4,
    "envs_per_worker": 2,
    "num_steps": 64,
    "total_timesteps": 500_000,
    "log_every": 10_000,
    "checkpoint_every": 50_000,
}
_LARGE = {"d_model": 512, "layers": 4, "heads": 8, "head_size": 64, "ffn_size": 512}
_MEMORY_MAZE: dict[str, dict[str, Any]] = {
    "agalite": {**_LARGE, "eta": 4, "r": 7},
    "gtrxl": {**_LARGE, "memory": 256},
}

_SHIPPED = {"gtrxl": (5e-4, 1e-3), "gru": (5e-4, 1e-2)}  # learning rate, entropy

_TUNED: dict[str, dict[str, Any]] = {
    "tmaze": {
        "agent": A2C(learning_rate=5e-4, ent_coef=1e-2),
        "num_envs": 32,
        "num_steps": 64,
    },
    "masked-cartpole": {
        "agent": PPO(
            learning_rate=5e-4, ent_coef=0.0, update_epochs=4, num_minibatches=4, max_grad_norm=0.5
        ),
        "num_envs": 8,
        "num_steps": 128,
    },
    "mystery-path-grid": {"num_envs": 32, "total_timesteps": 2_000_000},
    "mystery-path": {"num_envs": 32, "total_timesteps": 2_000_000},
    "craftax-symbolic": {"num_envs": 64, "total_timesteps": 1_000_000},
    "craftax-classic-symbolic": {"num_envs": 64, "total_timesteps": 1_000_000},
}
# On two cores: the paper's agent is 22M parameters, and learns 3200 steps at a time from 64 mazes.
# Its ResNet alone costs more than the maze; with a smaller network the maze is the limit.
_SMALL_MAZE: dict[str, Any] = {
    "num_workers": 8,
    "envs_per_worker": 1,
    "num_steps": 100,
    "batch_size": 800,
    "hidden_size": 128,
    "encoder": "atari",
    "total_timesteps": 5_000_000,
    "log_every": 4_000,
    "checkpoint_every": 40_000,
}
_TUNED.update({f"memory-maze-{n}x{n}": _SMALL_MAZE for n in (9, 11, 13, 15)})
_TUNED["noisy-masked-cartpole"] = _TUNED["masked-cartpole"]
