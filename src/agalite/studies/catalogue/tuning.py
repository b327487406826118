"""Not in the paper: the sweeps behind the `tuned` presets, on seeds that are not reported."""

from typing import Any

from agalite.studies.catalogue import cartpole, tmaze
from agalite.studies.declaration import (
    Factor,
    LearningCurves,
    Metric,
    Scale,
    Settings,
    Study,
    Training,
)

FIRST_SEED = 100
_LR, _GATE, _EMB = (
    "agent.learning_rate",
    "memory_options.gate_bias",
    "memory_options.embedding_bias",
)
_B = {"memory_options.layers": 1, _EMB: 0.3, _GATE: 0.0, _LR: 5e-4, "agent.adam_eps": 1e-8}


def _levels() -> dict[str, Settings]:
    out: dict[str, Settings] = {}

    def add(name: str, **change: Any) -> None:
        out[name] = {**_B, **{k.replace("__", "."): v for k, v in change.items()}}

    add("base")
    add("lr 1e-3", agent__learning_rate=1e-3)
    add("lr 3e-4", agent__learning_rate=3e-4)
    add("gate 2", memory_options__gate_bias=2.0)
    add("gate -2", memory_options__gate_bias=-2.0)
    add("embedding 0", memory_options__embedding_bias=0.0)
    add("kl 0.02", agent__target_kl=0.02)
    add("separate critic", separate_critic=True)
    add("previous action", previous_action=True)
    add("slots 4", **{"memory_options__basis": "slots", "memory_options__r": 4})
    add("10 epochs", agent__update_epochs=10)
    add("layers 2", memory_options__layers=2)
    add("grad norm 5", agent__max_grad_norm=5.0)
    add("terminate", agent__time_limit="terminate")
    add("norm return", agent__norm_return=True)
    add("128 steps 4 minibatches", num_steps=128, agent__num_minibatches=4, agent__update_epochs=10)
    two = {"memory_options__gate_bias": 2.0, "previous_action": True, "separate_critic": True}
    add("both", **two)
    add("both, gate 0", **{**two, "memory_options__gate_bias": 0.0})
    add("both, kl 0.02", agent__target_kl=0.02, **two)
    add("both, lr 1e-3", agent__learning_rate=1e-3, **two)
    add("both, 10 epochs", agent__update_epochs=10, **two)
    add("both, 64 steps 2 minibatches", num_steps=64, agent__num_minibatches=2, **two)
    add("both, layers 2", memory_options__layers=2, **two)
    add("both, constant clip", agent__anneal_clip_coef=False, **two)
    return out


_PPO = {
    "algorithm": "ppo",
    "agent.learning_rate": 5e-4,
    "agent.ent_coef": 1e-2,
    "agent.vf_coef": 1.0,
    "agent.update_epochs": 4,
    "agent.num_minibatches": 4,
    "agent.max_grad_norm": 0.5,
    "agent.adam_eps": 1e-8,
    "agent.time_limit": "terminate",
    "num_envs": 16,
}
_TMAZE: dict[str, Settings] = {
    "ppo": _PPO,
    "ppo, gate 0": {**_PPO, _GATE: 0.0},
    "ppo, lr 3e-4": {**_PPO, _LR: 3e-4},
    "ppo, lr 1e-3": {**_PPO, _LR: 1e-3},
    "a2c": {},
    "a2c, entropy 1e-2": {"agent.ent_coef": 1e-2},
    "a2c, lr 1e-3, entropy 1e-2": {"agent.ent_coef": 1e-2, _LR: 1e-3},
    "a2c, gate 0, entropy 1e-2": {"agent.ent_coef": 1e-2, _GATE: 0.0},
    "a2c, 4 envs": {"num_envs": 4},
}

STUDIES = (
    Study(
        name="tuning-tmaze",
        title="Sweep: AGaLiTe in T-Maze, a corridor of 160",
        paper="ours",
        kind=Training(preset="tuned"),
        base={"env": "tmaze", "memory": "agalite", "total_timesteps": 1_000_000},
        factors=(Factor("change", _TMAZE),),
        metrics=(
            Metric(
                column="charts/success", name="success rate, last 100K steps", last_steps=100_000
            ),
        ),
        figures=(LearningCurves(lines="change"),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=tmaze.SMOKE,
                factors=(Factor("change", {"a2c": {}}),),
            ),
            "cpu": Scale(seeds=3, first_seed=FIRST_SEED),
        },
    ),
    Study(
        name="tuning-cartpole",
        title="Sweep: AGaLiTe in masked CartPole, one setting changed at a time",
        paper="ours",
        kind=Training(preset="tuned"),
        base={"env": "masked-cartpole", "memory": "agalite", "total_timesteps": 100_000},
        factors=(Factor("change", _levels()),),
        metrics=(
            Metric(
                column="charts/episodic_return",
                name="episodic return, last 20K steps",
                last_steps=20_000,
            ),
        ),
        figures=(LearningCurves(lines="change"),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=cartpole.SMOKE,
                factors=(Factor("change", {"base": {}}),),
            ),
            "cpu": Scale(seeds=3, first_seed=FIRST_SEED),
        },
    ),
)
