"""Memory Maze: three-dimensional mazes whose objects must be found again and again."""

from agalite.studies.declaration import (
    Alike,
    Claim,
    Factor,
    LearningCurves,
    LinePlot,
    Metric,
    Scale,
    Selection,
    Settings,
    Study,
    Training,
    vary,
)

_RETURN = Metric(
    column="charts/episodic_return", name="episodic return, last 1M steps", last_steps=1_000_000
)
_SMOKE = {
    "total_timesteps": 192,
    "num_workers": 1,
    "envs_per_worker": 2,
    "num_steps": 16,
    "seq_len": 16,
    "batch_size": 32,
    "hidden_size": 16,
    "encoder": "atari",
    "env_options.max_steps": 24,
    "log_every": 64,
    "checkpoint_every": 128,
}
# Two cores make about a hundred frames a second.
_CPU = {
    "total_timesteps": 250_000,
    "num_workers": 8,
    "envs_per_worker": 1,
    "num_steps": 100,
    "batch_size": 800,
    "hidden_size": 128,
    "log_every": 4_000,
    "checkpoint_every": 20_000,
    "keep_checkpoints": 1,
}
_NOTE = (
    "The environments are simulated on the host: every seed is a run of its own, and after a kill "
    "it is what was learned that goes on, not the episodes."
)
# Sizes are the preset's for Memory Maze (d = 512, 4 layers, 8 heads of 64).
_AGENTS: dict[str, Settings] = {
    **{f"gtrxl-{m}": {"memory": "gtrxl", "memory_options.memory": m} for m in (16, 64, 128, 256)},
    "agalite": {"memory": "agalite", "memory_options.eta": 4, "memory_options.r": 7},
}


def _agents(*names: str) -> Factor:
    return Factor("agent", {name: _AGENTS[name] for name in names})


def _mazes(*sizes: int) -> Factor:
    return Factor("maze", {f"{n}x{n}": {"env": f"memory-maze-{n}x{n}"} for n in sizes})


STUDIES = (
    Study(
        name="memory-maze",
        title="Memory Maze in four sizes: return over training",
        paper="Section 5, figure on Memory Maze; Appendix H",
        note=_NOTE,
        kind=Training(preset="paper"),
        factors=(_agents("gtrxl-256", "agalite"), _mazes(9, 11, 13, 15)),
        metrics=(_RETURN,),
        figures=(LearningCurves(lines="agent", panels="maze", bins=100),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=_SMOKE,
                factors=(_agents("agalite"), _mazes(9)),
            ),
            "cpu": Scale(
                seeds=1,
                model_size="small",
                settings=_CPU,
                factors=(_agents("gtrxl-64", "agalite"), _mazes(9, 11)),
                note="The two smaller mazes, 250K steps instead of 100M, small models, a window "
                "of 64 for GTrXL.",
            ),
            "paper": Scale(seeds=3, settings={"total_timesteps": 100_000_000}),
        },
        claims=(
            Claim(
                says="The asymptotic performance of the agents is similar in 15x15.",
                where="Section 5, Memory Maze",
                tests=(
                    Alike(
                        a={"agent": "agalite", "maze": "15x15"},
                        b={"agent": "gtrxl-256", "maze": "15x15"},
                        within=5.0,
                    ),
                ),
            ),
            Claim(
                says="The GTrXL-based agent exhibits faster learning early on.",
                where="Section 5, Memory Maze",
            ),
        ),
    ),
    Study(
        name="memory-maze-window",
        title="Memory Maze 13x13: GTrXL with memories of 64, 128 and 256",
        paper="Appendix I",
        note=_NOTE,
        kind=Training(preset="paper"),
        factors=(_agents("gtrxl-64", "gtrxl-128", "gtrxl-256", "agalite"), _mazes(13)),
        metrics=(_RETURN,),
        figures=(LearningCurves(lines="agent", bins=100),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=_SMOKE,
                factors=(_agents("gtrxl-16"), _mazes(9)),
            ),
            "cpu": Scale(
                seeds=1,
                model_size="small",
                settings=_CPU,
                factors=(_agents("gtrxl-16", "gtrxl-64", "agalite"), _mazes(9)),
                note="In 9x9, with memories of 16 and 64, 250K steps, small models.",
            ),
            "paper": Scale(seeds=3, settings={"total_timesteps": 100_000_000}),
        },
        claims=(
            Claim(
                says="Asymptotically, all four agents achieve similar performance.",
                where="Appendix I",
                tests=tuple(
                    Alike(a={"agent": f"gtrxl-{m}"}, b={"agent": "agalite"}, within=4.0)
                    for m in (64, 128, 256)
                ),
            ),
            Claim(
                says="GTrXL-64 is slower to converge than GTrXL-128 and GTrXL-256.",
                where="Appendix I",
            ),
        ),
    ),
    Study(
        name="memory-maze-sweep",
        title="Memory Maze 11x11: the sweep that chooses learning rate and entropy coefficient",
        paper="Appendix G.4, tuning strategy",
        note=_NOTE,
        kind=Training(preset="paper"),
        factors=(
            _agents("gtrxl-256", "agalite"),
            _mazes(11),
            vary("learning_rate", "agent.learning_rate", (2.5e-3, 2.5e-4, 2.5e-5)),
            vary("ent_coef", "agent.ent_coef", (3e-2, 3e-3, 3e-4)),
        ),
        metrics=(_RETURN,),
        selection=Selection(choose=("learning_rate", "ent_coef"), within=("agent",)),
        figures=(LinePlot(x="learning_rate", lines="ent_coef", panels="agent"),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=_SMOKE,
                factors=(
                    _agents("agalite"),
                    _mazes(9),
                    vary("learning_rate", "agent.learning_rate", (2.5e-4,)),
                    vary("ent_coef", "agent.ent_coef", (3e-3,)),
                ),
            ),
            "cpu": Scale(
                seeds=1,
                model_size="small",
                settings={**_CPU, "total_timesteps": 100_000},
                factors=(
                    _agents("gtrxl-64", "agalite"),
                    _mazes(9),
                    vary("learning_rate", "agent.learning_rate", (2.5e-3, 2.5e-4)),
                    vary("ent_coef", "agent.ent_coef", (3e-2, 3e-3)),
                ),
                note="In 9x9, 100K steps instead of 15M, small models.",
            ),
            "paper": Scale(seeds=3, settings={"total_timesteps": 15_000_000}),
        },
    ),
)
