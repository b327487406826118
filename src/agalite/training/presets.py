"""Named settings: the paper's, and ours where they learn faster on a small machine."""

from typing import Any

from agalite import errors
from agalite.agents.a2c import A2C
from agalite.agents.ppo import PPO

PRESETS = ("tuned", "paper")

# Findings, section 8: gates that start with a memory of two steps hardly ever learn a longer one.
_SPREAD = {name: {"horizon": (2.0, 512.0)} for name in ("agalite", "galite", "gru", "lstm")}


def preset(name: str, env: str, memory: str) -> dict[str, Any]:
    """Arguments of `TrainConfig` for this environment and memory model."""
    errors.one_of("preset", name, PRESETS)
    paper = _paper(env, memory)
    if name == "paper":
        return paper
    return {**paper, "memory_options": _SPREAD.get(memory, {}), **_TUNED.get(env, {})}


def _paper(env: str, memory: str) -> dict[str, Any]:
    """Where the paper swept a value, the one in the middle, or what its code was shipped with."""
    match env:
        case "tmaze":
            rate, entropy = _SHIPPED.get(memory, (1e-4, 1e-3))
            agent = A2C(learning_rate=rate, entropy=entropy)
            return {"agent": agent, "environments": 8, "rollout": 256, "steps": 5_000_000}
        case "masked-cartpole" | "noisy-masked-cartpole":
            agent = PPO(
                learning_rate=1e-3, lam=0.9, entropy=0.0, value=1.0, epochs=10, minibatches=1,
                max_gradient_norm=0.5,
            )  # fmt: skip
            return {"agent": agent, "environments": 1, "rollout": 1024, "steps": 1_000_000}
        case "mystery-path-grid" | "mystery-path":
            return {
                "agent": PPO(), "environments": 128, "rollout": 128, "hidden": 256,
                "steps": 100_000_000,
            }  # fmt: skip
        case _:
            agent = PPO(
                learning_rate=3e-4, discount=0.999, lam=0.8, entropy=1e-3, epochs=4,
                max_gradient_norm=1.0,
            )  # fmt: skip
            return {"agent": agent, "environments": 1024, "rollout": 128, "steps": 1_000_000_000}


_SHIPPED = {"gtrxl": (5e-4, 1e-3), "gru": (5e-4, 1e-2)}  # learning rate, entropy

_TUNED: dict[str, dict[str, Any]] = {
    "tmaze": {
        "agent": A2C(learning_rate=5e-4, entropy=1e-2),
        "environments": 32,
        "rollout": 64,
    },
    "masked-cartpole": {
        "agent": PPO(
            learning_rate=3e-4, entropy=0.0, epochs=4, minibatches=4, max_gradient_norm=0.5
        ),
        "environments": 8,
        "rollout": 128,
    },
    "mystery-path-grid": {"environments": 32, "steps": 2_000_000},
    "mystery-path": {"environments": 32, "steps": 2_000_000},
    "craftax-symbolic": {"environments": 64, "steps": 1_000_000},
    "craftax-classic-symbolic": {"environments": 64, "steps": 1_000_000},
}
_TUNED["noisy-masked-cartpole"] = _TUNED["masked-cartpole"]
