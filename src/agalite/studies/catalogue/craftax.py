"""Craftax: an open world that is seen only in part."""

from agalite.studies.catalogue.agents import agents
from agalite.studies.declaration import (
    Against,
    Better,
    Between,
    Claim,
    Curves,
    Metric,
    Scale,
    Selection,
    Study,
    Training,
    over,
)

_RETURN = Metric(column="charts/episodic_return", name="episodic return, last 1M steps",
                 last=1_000_000)  # fmt: skip
# The smaller game: the larger one takes a minute to compile.
_SMOKE = {
    "env": "craftax-classic-symbolic", "steps": 512, "environments": 2, "rollout": 16,
    "agent.epochs": 1, "agent.minibatches": 1, "hidden": 16, "env_options.max_steps": 32,
    "log_every": 128, "checkpoint_every": 512,
}  # fmt: skip
_CPU = {
    "environments": 64, "rollout": 64, "steps": 1_000_000, "log_every": 20_000,
    "checkpoint_every": 100_000, "keep": 1,
}  # fmt: skip
_PPO_RNN = 0.153 * 226  # what its authors report after 1B steps, of a highest return of 226

STUDIES = (
    Study(
        name="craftax",
        title="Craftax symbolic: return over training, and every achievement",
        paper="Section 5, figure on Craftax; Appendix J",
        work=Training(preset="paper"),
        base={"env": "craftax-symbolic"},
        factors=(agents("gtrxl-128", "agalite-8"),),
        metrics=(_RETURN,),
        figures=(
            Curves(lines="agent", bins=100),
            Curves(lines="agent", columns="charts/Achievements/*", title="achievements, percent of "
                   "episodes"),
        ),
        bands="95% interval",
        scales={
            "smoke": Scale(
                seeds=1, size="tiny", changes=_SMOKE, factors=(agents("agalite-8"),),
            ),
            "cpu": Scale(
                seeds=2, size="small", changes=_CPU, factors=(agents("gtrxl-64", "agalite-8"),),
                note="1M steps of 64 environments instead of 1B of 1024; small models.",
            ),
            "paper": Scale(seeds=15, together=1, changes={"steps": 1_000_000_000}),
        },
        claims=(
            Claim(
                says="AGaLiTe achieves a higher reward than GTrXL-128.",
                where="Section 5, Craftax",
                tests=(Better(a={"agent": "agalite-8"}, b={"agent": "gtrxl-128"}),),
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
        work=Training(preset="paper"),
        base={"env": "craftax-symbolic"},
        factors=(
            agents("gtrxl-128", "agalite-8"),
            over("learning_rate", "agent.learning_rate", (2e-4, 3e-4, 4e-4)),
            over("entropy", "agent.entropy", (0.0, 1e-2, 1e-3)),
        ),
        metrics=(_RETURN,),
        selection=Selection(choose=("learning_rate", "entropy"), within=("agent",)),
        figures=(Against(x="learning_rate", lines="entropy", panels="agent"),),
        scales={
            "smoke": Scale(
                seeds=1, size="tiny", changes=_SMOKE,
                factors=(
                    agents("agalite-8"),
                    over("learning_rate", "agent.learning_rate", (3e-4,)),
                    over("entropy", "agent.entropy", (1e-3,)),
                ),
            ),
            "cpu": Scale(
                seeds=1, size="small", changes={**_CPU, "steps": 300_000},
                factors=(
                    agents("gtrxl-64", "agalite-8"),
                    over("learning_rate", "agent.learning_rate", (3e-4, 1e-3)),
                    over("entropy", "agent.entropy", (1e-2, 1e-3)),
                ),
                note="300K steps of 64 environments instead of 100M of 1024; small models.",
            ),
            "paper": Scale(seeds=5, together=1, changes={"steps": 100_000_000}),
        },
    ),
)  # fmt: skip
