"""Not in the paper: how long a chain an agent learns to remember from a single stream."""

from agalite.studies.declaration import (
    Factor,
    LearningCurves,
    LinePlot,
    Metric,
    Scale,
    Study,
    Training,
    vary,
)

_LENGTHS = (16, 32, 64, 128, 256)
_RETURN = Metric(
    column="charts/episodic_return",
    name="episodic return, last 50K steps",
    last_steps=50_000,
)
_AGENTS = Factor(
    "agent",
    {
        "agalite, rtrl": {"memory": "agalite", "gradient": "rtrl"},
        "agalite, one step": {"memory": "agalite", "gradient": "bptt"},
    },
)

STUDIES = (
    Study(
        name="stream-memory-chain",
        title="MemoryChain from one stream of 500K steps: return against the chain's length",
        paper="ours",
        kind=Training(preset="tuned"),
        base={
            "env": "memory-chain",
            "algorithm": "stream-ac",
            "total_timesteps": 500_000,
            "log_every": 10_000,
            "checkpoint_every": 250_000,
            "keep_checkpoints": 1,
        },
        factors=(_AGENTS, vary("length", "env_options.length", _LENGTHS)),
        metrics=(_RETURN,),
        figures=(
            LinePlot(x="length", lines="agent"),
            LearningCurves(lines="agent", panels="length"),
        ),
        scales={
            "smoke": Scale(
                model_size="tiny",
                settings={
                    "total_timesteps": 1000,
                    "num_steps": 100,
                    "log_every": 200,
                    "checkpoint_every": 1000,
                },
                factors=(vary("length", "env_options.length", (4,)),),
            ),
            "cpu": Scale(seeds=5, first_seed=10),
        },
    ),
)
