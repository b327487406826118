"""Not in the paper: gradients past the rollout (docs/rtrl.md), in T-Maze with short rollouts."""

from agalite.studies.catalogue import tmaze
from agalite.studies.declaration import (
    Factor,
    LearningCurves,
    LinePlot,
    Metric,
    Scale,
    Study,
    Training,
)

_GRADIENT = Factor("gradient", {"bptt": {"gradient": "bptt"}, "rtrl": {"gradient": "rtrl"}})

# How long the first memory is. Gates with long time constants keep the cue before anything is
# learned, and what reads it learns without gradients from the past.
_HORIZON = Factor(
    "horizon",
    {
        "none": {"memory_options.horizon": None},
        "2 to 32": {"memory_options.horizon": (2.0, 32.0)},
        "2 to 512": {"memory_options.horizon": (2.0, 512.0)},
    },
)

_BASE = {
    "env": "tmaze",
    "memory": "agalite",
    "algorithm": "a2c",
    "agent.learning_rate": 3e-4,
    "agent.ent_coef": 1e-2,
    "agent.adam_eps": 1e-8,
    "agent.time_limit": "terminate",
}

# As many steps in an update with long rollouts as with short ones.
_LONG_ROLLOUT = {"num_envs": 8, "num_steps": 256, "gradient": "bptt"}
_SHORT_ROLLOUT = {"num_envs": 32, "num_steps": 64}

STUDIES = (
    Study(
        name="rtrl-tmaze",
        title="T-Maze, a corridor of 60 with rollouts of 16: gradients past the rollout or not",
        paper="ours",
        kind=Training(preset="tuned"),
        base={
            **_BASE,
            "env_options.corridor": 60,
            "num_envs": 32,
            "num_steps": 16,
            # A direction is kept for a whole rollout: fresh noise would never reach the junction.
            "noise_steps": 16,
            "total_timesteps": 1_500_000,
        },
        factors=(_GRADIENT, _HORIZON),
        metrics=(
            tmaze.SUCCESS,
            Metric(column="charts/SPS", name="steps a second", last_steps=1_000_000),
        ),
        figures=(LearningCurves(lines="gradient", panels="horizon"),),
        scales={
            "smoke": Scale(
                model_size="tiny",
                settings={**tmaze.SMOKE, "env_options.corridor": 4},
                factors=(
                    Factor("gradient", {"rtrl": {"gradient": "rtrl"}}),
                    Factor("horizon", {"none": _HORIZON.levels["none"]}),
                ),
            ),
            # The settings were chosen with seed 0.
            "cpu": Scale(seeds=5, first_seed=10, seeds_per_run=1),
        },
    ),
    Study(
        name="rtrl-tmaze-long",
        title="T-Maze 160 and 200: rollouts of 64 with traces and without, and of 256",
        paper="ours",
        kind=Training(preset="tuned"),
        base={
            **_BASE,
            "noise_steps": 64,
            "total_timesteps": 3_000_000,
            "stop_at_success": 0.99,
            "log_every": 20_000,
            "checkpoint_every": 500_000,
            "keep_checkpoints": 1,
        },
        factors=(
            tmaze.corridor(160, 200),
            Factor(
                "gradient/rollout",
                {
                    "rtrl/64": {**_SHORT_ROLLOUT, "gradient": "rtrl"},
                    "bptt/64": {**_SHORT_ROLLOUT, "gradient": "bptt"},
                    "bptt/256": _LONG_ROLLOUT,
                },
            ),
        ),
        metrics=(
            tmaze.SUCCESS,
            Metric(column="charts/SPS", name="steps a second", last_steps=1_000_000),
        ),
        figures=(
            LearningCurves(lines="gradient", panels="rollout"),
            LinePlot(x="corridor", lines="gradient", panels="rollout"),
        ),
        seed_failures=tmaze.SEED_FAILURES,
        scales={
            "smoke": Scale(
                model_size="tiny",
                settings={**tmaze.SMOKE, "noise_steps": 4, "stop_at_success": None},
                factors=(
                    tmaze.corridor(4),
                    Factor("gradient/rollout", {"rtrl/32": {"gradient": "rtrl"}}),
                ),
            ),
            "cpu": Scale(
                seeds=5,
                first_seed=10,
                seeds_per_run=1,
                note="A run whose success rate over 200K steps reaches 99% ends there.",
            ),
        },
    ),
)
