"""Not in the paper: the sweeps behind the `tuned` presets, on seeds that are not reported."""

import math
from collections.abc import Mapping
from typing import Any

from agalite.studies.catalogue import cartpole, mystery_path, tmaze
from agalite.studies.declaration import (
    Factor,
    LearningCurves,
    Metric,
    Scale,
    SeedDots,
    Settings,
    Study,
    Training,
)

FIRST_SEED = 100
"""The seeds of the sweeps; results are reported on those from 0."""


def _changes(base: Settings, changes: Mapping[str, Settings]) -> dict[str, Settings]:
    """One level for each change of `base`."""
    return {name: {**base, **change} for name, change in changes.items()}


# CartPole. RL Baselines3 Zoo's numbers for RecurrentPPO.
_ZOO: dict[str, Any] = {
    "num_envs": 8,
    "num_steps": 32,
    "norm_obs": True,
    "separate_critic": False,
    "previous_action": False,
    "actor_gain": 0.01,
    "critic_gain": 1.0,
    "agent.learning_rate": 1e-3,
    "agent.anneal_lr": True,
    "agent.gamma": 0.98,
    "agent.gae_lambda": 0.8,
    "agent.ent_coef": 0.0,
    "agent.vf_coef": 0.5,
    "agent.update_epochs": 20,
    "agent.num_minibatches": 1,
    "agent.anneal_clip_coef": True,
    "agent.max_grad_norm": 0.5,
    "agent.adam_eps": 1e-5,
    "agent.norm_return": False,
}
# One layer of AGaLiTe with them, but for the learning rate and epsilon: then its gates learn too.
_ADAM = {"agent.learning_rate": 5e-4, "agent.adam_eps": 1e-8}
_AGALITE = {
    "memory_options.layers": 1,
    "memory_options.basis": "published",
    "memory_options.embedding_bias": 0.3,
    "memory_options.gate_bias": 0.0,
    **_ADAM,
}
_ACTION, _CRITIC = {"previous_action": True}, {"separate_critic": True}
_RETURN = {"agent.norm_return": True}
_PAPER_GATE = {"memory_options.gate_bias": 2.0}
# Four times the rollout, and four small steps an epoch instead of a large one.
_WIDE = {"num_steps": 128, "agent.update_epochs": 10, "agent.num_minibatches": 4}
_FOUR = {**_PAPER_GATE, **_ACTION, **_CRITIC, **_RETURN}

_CARTPOLE = {
    **_changes(
        {**_ZOO, **_AGALITE},
        {
            "base": {},
            "lr 1e-3": {"agent.learning_rate": 1e-3},
            "lr 3e-4": {"agent.learning_rate": 3e-4},
            "gate 2": _PAPER_GATE,
            "gate -2": {"memory_options.gate_bias": -2.0},
            "embedding 0": {"memory_options.embedding_bias": 0.0},
            "separate critic": _CRITIC,
            "previous action": _ACTION,
            "norm return": _RETURN,
            "slots 4": {"memory_options.basis": "slots", "memory_options.r": 4},
            "10 epochs": {"agent.update_epochs": 10},
            "layers 2": {"memory_options.layers": 2},
            "grad norm 5": {"agent.max_grad_norm": 5.0},
            "terminate": {"agent.time_limit": "terminate"},
            "128 steps 4 minibatches": _WIDE,
            "gate 2, previous action, separate critic": {**_PAPER_GATE, **_ACTION, **_CRITIC},
            "gate 2, previous action, norm return": {**_PAPER_GATE, **_ACTION, **_RETURN},
            "gate 2, previous action, norm return, separate critic": _FOUR,
            "previous action, norm return, 128 steps": {**_ACTION, **_RETURN, **_WIDE},
            "tuned: gate 2, previous action, norm return, separate critic, 128 steps": {
                **_FOUR,
                **_WIDE,
            },
        },
    ),
    **_changes(
        {**_ZOO, "memory": "gru"},
        {
            "gru, zoo": {},
            "gru, zoo, separate critic": _CRITIC,
            "gru, zoo, previous action": _ACTION,
            "gru, as agalite, one critic": {
                **_ADAM,
                **_WIDE,
                **_ACTION,
                **_RETURN,
            },
            "gru, tuned (previous action, lr 3e-4)": {**_ACTION, "agent.learning_rate": 3e-4},
            "gru, as agalite": {
                **_ADAM,
                **_WIDE,
                **_ACTION,
                **_CRITIC,
                **_RETURN,
            },
        },
    ),
    **_changes(
        {**_ZOO, "memory": "lstm"},
        {
            "lstm, zoo": {},
            "lstm, tuned (previous action, lr 3e-4)": {**_ACTION, "agent.learning_rate": 3e-4},
        },
    ),
}

# T-Maze.
_TMAZE_BASE: dict[str, Any] = {
    "algorithm": "ppo",
    "num_envs": 16,
    "num_steps": 256,
    "noise_steps": 1,
    "actor_gain": math.sqrt(2),
    "memory_options.gate_bias": 2.0,
    "agent.learning_rate": 5e-4,
    "agent.ent_coef": 1e-2,
    "agent.vf_coef": 1.0,
    "agent.update_epochs": 4,
    "agent.num_minibatches": 4,
    "agent.max_grad_norm": 0.5,
    "agent.adam_eps": 1e-8,
    "agent.time_limit": "terminate",
}
_GATE_0 = {"memory_options.gate_bias": 0.0}
_A2C = {
    "algorithm": "a2c",
    "num_envs": 8,
    "num_steps": 256,
    "noise_steps": 1,
    "actor_gain": math.sqrt(2),
    "memory_options.gate_bias": 2.0,
    "agent.learning_rate": 5e-4,
    "agent.ent_coef": 5e-3,
    "agent.vf_coef": 1.0,
    "agent.adam_eps": 1e-8,
    "agent.time_limit": "terminate",
}
_TMAZE = {
    **_changes(
        _TMAZE_BASE,
        {
            "ppo": {},
            "ppo, gate 0": _GATE_0,
            "ppo, gate 0, 8 x 512": {**_GATE_0, "num_envs": 8, "num_steps": 512},
            "ppo, gate 0, 16 x 512": {
                **_GATE_0,
                "num_steps": 512,
                "agent.num_minibatches": 8,
            },
            "ppo, gate 0, separate critic": {**_GATE_0, **_CRITIC},
            "ppo, gate 0, slots 2": {
                **_GATE_0,
                "memory_options.basis": "slots",
                "memory_options.r": 2,
            },
            "ppo, gate 0, lr 1e-3": {**_GATE_0, "agent.learning_rate": 1e-3},
        },
    ),
    **_changes(
        _A2C,
        {"a2c": {}, "a2c, gate 0, entropy 1e-2": {**_GATE_0, "agent.ent_coef": 1e-2}},
    ),
}

# Changes of the preset itself, with eight seeds: three were too few to choose by. The learning rate
# does not fall, as in the first 100K steps of a long run.
_CONSTANT = {"agent.anneal_lr": False, "agent.anneal_clip_coef": False}
_ANNEALED = {"agent.anneal_lr": True, "agent.anneal_clip_coef": True}
_OLD = {"memory_options.basis": "published", "memory_options.embedding_bias": 0.3}
_NEAR = {"agent.gamma": 0.98, "agent.gae_lambda": 0.8}
_FAR = {"agent.gamma": 0.99, "agent.gae_lambda": 0.95}
_SLOW = {"agent.learning_rate": 3e-4}
_PAPER_BASIS = {"memory_options.basis": "paper"}
_SLOTS = {"memory_options.basis": "slots", "memory_options.r": 4}
# A positive bias of the embedding: fewer of its units are off.
_OPEN = {"memory_options.embedding_bias": 1.0}
# GRU's settings: RL Baselines3 Zoo's, with the previous action and this learning rate.
_AS_GRU = {
    **_SLOW,
    "num_steps": 32,
    "separate_critic": False,
    "agent.update_epochs": 20,
    "agent.num_minibatches": 1,
    "agent.adam_eps": 1e-5,
    "agent.norm_return": False,
}
_BEST = {**_PAPER_BASIS, **_OPEN}
_CARTPOLE_AGAIN = {
    **_changes(
        {**_CONSTANT, **_NEAR},
        {
            "start": _OLD,
            "gamma 0.99, lambda 0.95": {**_OLD, **_FAR},
            "lr 3e-4": {**_OLD, **_SLOW},
            "paper's basis, embedding 1, lr 3e-4": {**_BEST, **_SLOW},
            "paper's basis, embedding 1, as GRU": {**_BEST, **_AS_GRU},
        },
    ),
    **_changes(
        {**_ANNEALED, **_NEAR, **_OPEN},
        {
            "annealed, paper's basis, embedding 1": _PAPER_BASIS,
            "tuned: annealed, paper's basis, embedding 1, gamma 0.99, lambda 0.95": {
                **_PAPER_BASIS,
                **_FAR,
            },
        },
    ),
}

# T-Maze again, with the demo's corridor.
_TMAZE_START = {
    "num_envs": 16,
    "noise_steps": 1,
    "actor_gain": math.sqrt(2),
    "agent.ent_coef": 1e-2,
    "agent.vf_coef": 1.0,
    "agent.num_minibatches": 8,
}
_HELD = {"noise_steps": 16, "actor_gain": 0.01, "agent.ent_coef": 3e-2}
_FEW = {"num_envs": 4, "agent.num_minibatches": 4}
_QUIET = {"agent.vf_coef": 0.25}
_TMAZE_AGAIN = _changes(
    _TMAZE_START,
    {
        "start": {},
        "noise held 16 steps, uniform at first, entropy 3e-2": _HELD,
        "the same, 4 environments": {**_HELD, **_FEW},
        "tuned: the same, value coefficient 0.25": {**_HELD, **_FEW, **_QUIET},
        "tuned, paper's basis": {**_HELD, **_FEW, **_QUIET, **_PAPER_BASIS},
        "tuned, slots 2": {**_HELD, **_FEW, **_QUIET, **_SLOTS, "memory_options.r": 2},
    },
)


def _study(
    name: str,
    title: str,
    base: Settings,
    levels: Mapping[str, Settings],
    metric: Metric,
    smoke: Settings,
    seeds: int = 3,
) -> Study:
    return Study(
        name=name,
        title=title,
        paper="ours",
        kind=Training(preset="tuned"),
        base={"memory": "agalite", **base},
        factors=(Factor("change", levels),),
        metrics=(metric,),
        figures=(SeedDots(rows="change"),),
        scales={
            "smoke": Scale(
                model_size="tiny",
                settings=smoke,
                factors=(Factor("change", {next(iter(levels)): {}}),),
            ),
            "cpu": Scale(seeds=seeds, first_seed=FIRST_SEED),
        },
    )


_CARTPOLE_BASE = {
    "env": "masked-cartpole",
    "total_timesteps": 100_000,
    "log_every": 10_000,
    "checkpoint_every": 100_000,
}
_CARTPOLE_METRIC = Metric(
    column="charts/episodic_return",
    name="episodic return, last 20K steps",
    last_steps=20_000,
)

# Which basis, at equal state. A head's state has r // 2 + 1 vectors with cosines and r with slots.
_BASES = {
    "paper, 1 vector": {"memory_options.basis": "paper", "memory_options.r": 1},
    "published, 1 vector": {"memory_options.basis": "published", "memory_options.r": 1},
    "paper, 2 vectors": {"memory_options.basis": "paper", "memory_options.r": 3},
    "published, 2 vectors": {"memory_options.basis": "published", "memory_options.r": 3},
    "slots, 2 vectors": {"memory_options.basis": "slots", "memory_options.r": 2},
}
_BASIS_TASKS: dict[str, Settings] = {
    "T-Maze 100": {
        "env": "tmaze",
        "env_options.corridor": 100,
        "total_timesteps": 300_000,
    },
    "masked CartPole": {"env": "masked-cartpole"},
    "noisy masked CartPole": {"env": "noisy-masked-cartpole", "total_timesteps": 100_000},
    "RepeatPrevious 4": {"env": "repeat-previous", "total_timesteps": 300_000},
}
_BASIS = Study(
    name="tuning-basis",
    title="Sweep: AGaLiTe's bases at equal state, in four tasks",
    paper="ours",
    kind=Training(preset="tuned"),
    base={"memory": "agalite"},
    factors=(Factor("task", _BASIS_TASKS), Factor("basis", _BASES)),
    metrics=(
        Metric(
            column="charts/episodic_return",
            name="episodic return, last 20K steps",
            last_steps=20_000,
        ),
    ),
    figures=(LearningCurves(lines="basis", panels="task"),),
    scales={
        "smoke": Scale(
            model_size="tiny",
            settings={**cartpole.SMOKE, "env_options.corridor": 4},
            factors=(
                Factor("task", {"T-Maze 100": {"env": "tmaze"}}),
                Factor("basis", {"slots, 2 vectors": {}}),
            ),
        ),
        "cpu": Scale(seeds=4, first_seed=FIRST_SEED),
    },
)

# Mystery Path's encoders, at the same number of steps.
_ENCODERS = Study(
    name="tuning-encoder",
    title="Sweep: AGaLiTe's encoders of frames in Mystery Path Grid, 1M steps",
    paper="ours",
    kind=Training(preset="tuned"),
    base={"env": "mystery-path-grid", "memory": "agalite", "total_timesteps": 1_000_000},
    factors=(
        Factor("encoder", {name: {"encoder": name} for name in ("patch", "patch-large", "atari")}),
    ),
    metrics=(
        Metric(column="charts/success", name="success, last 200K steps", last_steps=200_000),
        Metric(
            column="charts/episodic_return",
            name="episodic return, last 200K steps",
            last_steps=200_000,
        ),
    ),
    figures=(LearningCurves(lines="encoder"),),
    scales={
        "smoke": Scale(
            model_size="tiny",
            settings=mystery_path.SMOKE,
            factors=(Factor("encoder", {"patch": {"encoder": "patch"}}),),
        ),
        "cpu": Scale(model_size="small", seeds=3, first_seed=FIRST_SEED, seeds_per_run=1),
    },
)

STUDIES = (
    _BASIS,
    _ENCODERS,
    _study(
        "tuning-cartpole",
        "Sweep: masked CartPole, 100K steps, mostly AGaLiTe",
        _CARTPOLE_BASE,
        _CARTPOLE,
        _CARTPOLE_METRIC,
        cartpole.SMOKE,
    ),
    _study(
        "tuning-cartpole-again",
        "Sweep: AGaLiTe in masked CartPole, 100K steps, eight seeds",
        _CARTPOLE_BASE,
        _CARTPOLE_AGAIN,
        _CARTPOLE_METRIC,
        cartpole.SMOKE,
        seeds=8,
    ),
    _study(
        "tuning-tmaze",
        "Sweep: AGaLiTe in T-Maze, a corridor of 160, 1M steps",
        {"env": "tmaze", "total_timesteps": 1_000_000},
        _TMAZE,
        tmaze.SUCCESS,
        tmaze.TUNED_SMOKE,
    ),
    _study(
        "tuning-tmaze-again",
        "Sweep: AGaLiTe in T-Maze, a corridor of 100, 300K steps, four seeds",
        {"env": "tmaze", "env_options.corridor": 100, "total_timesteps": 300_000},
        _TMAZE_AGAIN,
        tmaze.SUCCESS,
        tmaze.TUNED_SMOKE,
        seeds=4,
    ),
    _study(
        "tuning-precision",
        "Products in float32 and in bfloat16: AGaLiTe in T-Maze, a corridor of 100, 300K steps",
        {"env": "tmaze", "env_options.corridor": 100, "total_timesteps": 300_000},
        {name: {"precision": name} for name in ("float32", "bfloat16")},
        tmaze.SUCCESS,
        tmaze.TUNED_SMOKE,
        seeds=4,
    ),
)
