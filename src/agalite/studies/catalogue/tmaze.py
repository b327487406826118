"""T-Maze: how long a corridor each agent can carry the cue through."""

from agalite.studies.catalogue.agents import agents
from agalite.studies.declaration import (
    Alike,
    Better,
    Between,
    Claim,
    LearningCurves,
    LinePlot,
    Metric,
    Scale,
    Selection,
    Study,
    Training,
    vary,
)

_AGENTS = ("lstm", "gru", "gtrxl-128", "gtrxl-256", "linear", "galite", "agalite")
_LENGTHS = (120, 140, 160, 180, 200)
_LONG = tuple(str(n) for n in _LENGTHS[1:])
SUCCESS = Metric(column="charts/success", name="success rate, last 100K steps", last_steps=100_000)
SMOKE = {
    "total_timesteps": 2048,
    "num_envs": 4,
    "num_steps": 32,
    "log_every": 512,
    "checkpoint_every": 2048,
}
# For the tuned preset, whose agent is PPO: one minibatch, and a corridor that random steps pass.
TUNED_SMOKE = {**SMOKE, "agent.num_minibatches": 1, "env_options.corridor": 4}
# The settings that were found to learn short corridors quickly on two cores (docs/training.md).
CPU = {
    "num_envs": 32,
    "num_steps": 64,
    "agent.learning_rate": 1e-3,
    "agent.ent_coef": 1e-2,
    "log_every": 10_000,
    "checkpoint_every": 100_000,
    "keep_checkpoints": 1,
}


def corridor(*lengths: int):
    return vary("corridor", "env_options.corridor", lengths)


STUDIES = (
    Study(
        name="tmaze",
        title="T-Maze: success against corridor length, seven agents",
        paper="Section 5, figure on T-Maze; Appendix G.1",
        kind=Training(preset="paper"),
        base={"env": "tmaze"},
        factors=(agents(*_AGENTS), corridor(*_LENGTHS)),
        metrics=(
            SUCCESS,
            Metric(column="charts/episodic_return", name="episodic return", last_steps=100_000),
        ),
        figures=(
            LinePlot(x="corridor", lines="agent"),
            LearningCurves(lines="agent", panels="corridor"),
        ),
        scales={
            "smoke": Scale(
                seeds=2,
                model_size="tiny",
                settings=SMOKE,
                factors=(agents("gru", "agalite"), corridor(4)),
            ),
            "cpu": Scale(
                seeds=4,
                model_size="small",
                settings={**CPU, "total_timesteps": 600_000},
                factors=(
                    agents(
                        "lstm",
                        "gru",
                        "gtrxl-16",
                        "gtrxl-64",
                        "linear",
                        "galite",
                        "agalite",
                        long_horizon=True,
                    ),
                    corridor(20, 40),
                ),
                note="Corridors of 20 and 40 instead of 120 to 200, windows of GTrXL shorter and "
                "longer than they are; small models; gates that start with long memories.",
            ),
            "paper": Scale(seeds=50, seeds_per_run=10, settings={"total_timesteps": 5_000_000}),
        },
        claims=(
            Claim(
                says="GTrXL-128 fails for corridor lengths greater than 120.",
                where="Section 5, Diagnostic MDP",
                tests=(Between(a={"agent": "gtrxl-128", "corridor": _LONG}, low=0.35, high=0.65),),
            ),
            Claim(
                says="A GTrXL whose window is shorter than the corridor fails (chance is 0.5).",
                where="the same claim, at a reduced length",
                tests=(Between(a={"agent": "gtrxl-16", "corridor": "40"}, low=0.35, high=0.65),),
                scales=("cpu",),
            ),
            Claim(
                says="GTrXL-256 works well across all corridor lengths.",
                where="Section 5, Diagnostic MDP",
                tests=(Between(a={"agent": "gtrxl-256"}, low=0.8, high=1.0),),
            ),
            Claim(
                says="GaLiTe and AGaLiTe match the performance of GTrXL-256 without having the "
                "whole episode as input.",
                where="Section 5, Diagnostic MDP",
                tests=(
                    Alike(a={"agent": "galite"}, b={"agent": "gtrxl-256"}, within=0.1),
                    Alike(a={"agent": "agalite"}, b={"agent": "gtrxl-256"}, within=0.1),
                ),
            ),
            Claim(
                says="AGaLiTe performs close to GaLiTe even with r = 1.",
                where="Section 5, Diagnostic MDP",
                tests=(Alike(a={"agent": "agalite"}, b={"agent": "galite"}, within=0.1),),
                scales=("paper", "cpu"),
            ),
            Claim(
                says="GRU and linear transformer outperform LSTM.",
                where="Section 5, Diagnostic MDP",
                tests=(
                    Better(a={"agent": "gru"}, b={"agent": "lstm"}),
                    Better(a={"agent": "linear"}, b={"agent": "lstm"}),
                ),
                scales=("paper", "cpu"),
            ),
            Claim(
                says="The performance of GRU and linear transformer drops in the longest "
                "corridors.",
                where="Section 5, Diagnostic MDP",
                tests=(
                    Better(
                        a={"agent": "gru", "corridor": "120"}, b={"agent": "gru", "corridor": "200"}
                    ),
                    Better(
                        a={"agent": "linear", "corridor": "120"},
                        b={"agent": "linear", "corridor": "200"},
                    ),
                ),
            ),
        ),
    ),
    Study(
        name="tmaze-sweep",
        title="T-Maze: the sweep that chooses learning rate and entropy coefficient",
        paper="Appendix G.1, tuning strategy",
        kind=Training(preset="paper"),
        base={"env": "tmaze"},
        factors=(
            agents(*_AGENTS),
            corridor(*_LENGTHS),
            vary("learning_rate", "agent.learning_rate", (1e-3, 5e-4, 1e-4, 5e-5, 1e-5)),
            vary("ent_coef", "agent.ent_coef", (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)),
        ),
        metrics=(SUCCESS,),
        selection=Selection(choose=("learning_rate", "ent_coef"), within=("agent",)),
        figures=(LinePlot(x="learning_rate", lines="ent_coef", panels="agent"),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=SMOKE,
                factors=(
                    agents("agalite"),
                    corridor(4),
                    vary("learning_rate", "agent.learning_rate", (1e-3, 1e-4)),
                    vary("ent_coef", "agent.ent_coef", (1e-2,)),
                ),
            ),
            "cpu": Scale(
                seeds=2,
                model_size="small",
                settings={**CPU, "total_timesteps": 300_000},
                factors=(
                    agents("gru", "gtrxl-64", "linear", "galite", "agalite", long_horizon=True),
                    corridor(20),
                    vary("learning_rate", "agent.learning_rate", (1e-3, 3e-4)),
                    vary("ent_coef", "agent.ent_coef", (1e-2, 1e-3)),
                ),
                note="One corridor of 20, four settings of each agent, small models.",
            ),
            "paper": Scale(seeds=5, settings={"total_timesteps": 5_000_000}),
        },
        claims=(),
    ),
)
