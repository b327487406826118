"""Craftax: an open-ended game that is observed only in part."""

from agalite.studies.catalogue.agents import agents
from agalite.studies.declaration import (
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

_RETURN = Metric(
    column="charts/episodic_return", name="episodic return, last 1M steps", last_steps=1_000_000
)
# The smaller game: the larger one takes a minute to compile.
_SMOKE = {
    "env": "craftax-classic-symbolic",
    "total_timesteps": 512,
    "num_envs": 2,
    "num_steps": 16,
    "agent.update_epochs": 1,
    "agent.num_minibatches": 1,
    "hidden_size": 16,
    "env_options.max_steps": 32,
    "log_every": 128,
    "checkpoint_every": 512,
}
_CPU = {
    "num_envs": 64,
    "num_steps": 64,
    "total_timesteps": 5_000_000,
    "log_every": 100_000,
    "checkpoint_every": 100_000,
    "keep_checkpoints": 1,
}
_PPO_RNN = 0.153 * 226  # what its authors report after 1B steps, of a highest return of 226

STUDIES = (
    Study(
        name="craftax",
        title="Craftax symbolic: return over training, and every achievement",
        paper="Section 5, figure on Craftax; Appendix J",
        kind=Training(preset="paper"),
        base={"env": "craftax-symbolic"},
        factors=(agents("gtrxl-128", "agalite-8"),),
        metrics=(_RETURN,),
        figures=(
            LearningCurves(lines="agent", bins=100),
            LearningCurves(
                lines="agent",
                columns="charts/Achievements/*",
                title="achievements, percent of episodes",
            ),
        ),
        sweep="craftax-sweep",
        error_bands="95% interval",
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=_SMOKE,
                factors=(agents("agalite-8"),),
            ),
            "cpu": Scale(
                seeds=5,
                seeds_per_run=1,
                model_size="small",
                settings=_CPU,
                factors=(agents("gru", "gtrxl-128", "agalite-8"),),
                note="5M steps of 64 environments instead of 1B of 1024; small models.",
            ),
            "paper": Scale(seeds=15, seeds_per_run=1, settings={"total_timesteps": 1_000_000_000}),
        },
        claims=(
            Claim(
                says="AGaLiTe achieves a higher reward than GTrXL-128.",
                where="Section 5, Craftax",
                tests=(Better(a={"agent": "agalite-8"}, b={"agent": "gtrxl-128"}),),
                scales=("paper", "cpu"),
            ),
            Claim(
                says="AGaLiTe achieves a higher reward than the PPO+RNN baseline (15.3% of 226).",
                where="Section 5, Craftax",
                tests=(Between(a={"agent": "agalite-8"}, low=_PPO_RNN, high=226),),
            ),
            Claim(
                says="AGaLiTe achieves higher scores in several of the achievements.",
                where="Section 5, Craftax; Appendix J",
            ),
        ),
    ),
    Study(
        name="craftax-sweep",
        title="Craftax symbolic: the sweep that chooses learning rate and entropy coefficient",
        paper="Appendix G.5, tuning strategy",
        kind=Training(preset="paper"),
        base={"env": "craftax-symbolic"},
        factors=(
            agents("gtrxl-128", "agalite-8"),
            vary("learning_rate", "agent.learning_rate", (2e-4, 3e-4, 4e-4)),
            vary("ent_coef", "agent.ent_coef", (0.0, 1e-2, 1e-3)),
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
                    agents("agalite-8"),
                    vary("learning_rate", "agent.learning_rate", (3e-4,)),
                    vary("ent_coef", "agent.ent_coef", (1e-3,)),
                ),
            ),
            "cpu": Scale(
                seeds=1,
                model_size="small",
                settings={**_CPU, "total_timesteps": 300_000},
                factors=(
                    agents("gtrxl-64", "agalite-8"),
                    vary("learning_rate", "agent.learning_rate", (3e-4, 1e-3)),
                    vary("ent_coef", "agent.ent_coef", (1e-2, 1e-3)),
                ),
                note="300K steps of 64 environments instead of 100M of 1024; small models.",
            ),
            "paper": Scale(seeds=5, seeds_per_run=1, settings={"total_timesteps": 100_000_000}),
        },
    ),
)
