"""Not in the paper: gates that start with a memory of two steps, and with long ones."""

from agalite.studies.catalogue import tmaze
from agalite.studies.catalogue.agents import GATED, LONG_HORIZON, agents
from agalite.studies.declaration import (
    Better,
    Claim,
    Factor,
    LearningCurves,
    LinePlot,
    Scale,
    Study,
    Training,
)

_HORIZON = Factor(
    "horizon",
    {"none": {"memory_options.horizon": None}, "spread": {"memory_options.horizon": LONG_HORIZON}},
)

STUDIES = (
    Study(
        name="horizon",
        title="Where the gates start (none against spread), all gated models, in T-Maze",
        paper="ours",
        kind=Training(preset="paper"),
        base={"env": "tmaze"},
        factors=(agents(*GATED), _HORIZON, tmaze.corridor(120)),
        metrics=(tmaze.SUCCESS,),
        figures=(
            LinePlot(x="horizon", lines="agent", panels="corridor"),
            LearningCurves(lines="horizon", panels="agent"),
        ),
        seed_failures=tmaze.SEED_FAILURES,
        sweep="tmaze-sweep",
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=tmaze.SMOKE,
                factors=(
                    agents("lstm"),
                    tmaze.corridor(4),
                    Factor("horizon", {"spread": _HORIZON.levels["spread"]}),
                ),
            ),
            "cpu": Scale(
                seeds=5,
                seeds_per_run=1,
                preset="published",
                model_size="small",
                settings=tmaze.CPU_SETTINGS,
                factors=(tmaze.corridor(120, 200),),
                note=tmaze.cpu_note("two initialisations of the gates"),
            ),
            "paper": Scale(
                seeds=50,
                seeds_per_run=10,
                settings={"total_timesteps": 5_000_000, "agent.learning_rate": 3e-4},
            ),
        },
        claims=(
            *(
                Claim(
                    says=f"(ours) Spread time constants are the difference between chance and "
                    f"success: {agent}.",
                    where="findings, section 8",
                    tests=(
                        Better(
                            a={"agent": agent, "horizon": "spread"},
                            b={"agent": agent, "horizon": "none"},
                        ),
                    ),
                    scales=("paper", "cpu"),
                )
                for agent in GATED
            ),
        ),
    ),
)
