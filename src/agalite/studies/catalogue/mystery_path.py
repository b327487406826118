"""Mystery Path: remembering where an invisible path runs."""

from agalite.studies.catalogue.agents import agents
from agalite.studies.declaration import (
    Alike,
    Better,
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

_AGENTS = ("gtrxl-32", "gtrxl-64", "gtrxl-128", "agalite", "agalite-8")
_METRICS = (
    Metric(column="charts/success", name="success rate, last 1M steps", last_steps=1_000_000),
    Metric(column="charts/episodic_return", name="episodic return", last_steps=1_000_000),
)
SMOKE = {
    "total_timesteps": 512,
    "num_envs": 2,
    "num_steps": 16,
    "agent.update_epochs": 1,
    "agent.num_minibatches": 1,
    "hidden_size": 16,
    "env_options.max_steps": 16,
    "log_every": 128,
    "checkpoint_every": 512,
}
CPU = {
    "total_timesteps": 10_000_000,
    "log_every": 100_000,
    "checkpoint_every": 200_000,
    "keep_checkpoints": 1,
}
CPU_NOTE = (
    "10M steps of 32 environments instead of 100M of 128; the patch encoder instead of "
    "convolutions; small models; the tuned preset, in which gates start long."
)
_WHERE = "Section 5, Mystery Path"
# Two cores carry the variant on a grid; the other has twice the steps an episode.
_SCALES = {"mystery-path-grid": ("paper", "cpu"), "mystery-path": ("paper",)}


def _study(name: str, title: str, seeds: int) -> Study:
    return Study(
        name=name,
        title=title,
        paper="Section 5, figure on Mystery Path; Appendix G.3",
        kind=Training(preset="paper"),
        base={"env": name},
        factors=(agents(*_AGENTS),),
        metrics=_METRICS,
        figures=(LearningCurves(lines="agent", bins=100),),
        sweep="mystery-path-sweep",
        error_bands="95% interval",
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=SMOKE,
                factors=(agents("gtrxl-8" if name.endswith("grid") else "agalite"),),
            ),
            "cpu": Scale(
                seeds=5,
                seeds_per_run=1,
                preset="tuned",
                model_size="small",
                settings=CPU,
                note=CPU_NOTE,
            ),
            "paper": Scale(seeds=seeds, seeds_per_run=5, settings={"total_timesteps": 100_000_000}),
        },
        claims=(
            Claim(
                says="AGaLiTe matches the performance of GTrXL-128 when eta = 4.",
                where=_WHERE,
                tests=(Alike(a={"agent": "agalite"}, b={"agent": "gtrxl-128"}, within=0.1),),
                scales=_SCALES[name],
            ),
            Claim(
                says="AGaLiTe surpasses GTrXL-128 in mean performance when eta = 8.",
                where=_WHERE,
                tests=(Better(a={"agent": "agalite-8"}, b={"agent": "gtrxl-128"}),),
                scales=_SCALES[name],
            ),
            Claim(
                says="Reducing the memory size of GTrXL drastically impacts its performance.",
                where=_WHERE,
                tests=(Better(a={"agent": "gtrxl-128"}, b={"agent": "gtrxl-32"}, margin=0.1),),
                scales=_SCALES[name],
            ),
        ),
    )


STUDIES = (
    _study("mystery-path-grid", "Mystery Path Grid: success over training, five agents", 15),
    _study("mystery-path", "Mystery Path: success over training, five agents", 5),
    Study(
        name="mystery-path-sweep",
        title="Mystery Path Grid: the sweep that chooses learning rate and entropy coefficient",
        paper="Appendix G.3, tuning strategy",
        kind=Training(preset="paper"),
        base={"env": "mystery-path-grid"},
        factors=(
            agents(*_AGENTS),
            vary("learning_rate", "agent.learning_rate", (2.5e-3, 2.5e-4, 2.5e-5)),
            vary("ent_coef", "agent.ent_coef", (3e-2, 3e-3, 3e-4, 3e-5)),
        ),
        # The paper chooses by reward here.
        metrics=_METRICS[::-1],
        selection=Selection(choose=("learning_rate", "ent_coef"), within=("agent",)),
        figures=(LinePlot(x="learning_rate", lines="ent_coef", panels="agent"),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=SMOKE,
                factors=(
                    agents("agalite"),
                    vary("learning_rate", "agent.learning_rate", (2.5e-4,)),
                    vary("ent_coef", "agent.ent_coef", (3e-3,)),
                ),
            ),
            "cpu": Scale(
                seeds=1,
                model_size="small",
                settings={**CPU, "total_timesteps": 1_000_000},
                factors=(
                    agents("gtrxl-128", "agalite"),
                    vary("learning_rate", "agent.learning_rate", (2.5e-3, 2.5e-4)),
                    vary("ent_coef", "agent.ent_coef", (3e-2, 3e-3)),
                ),
                preset="tuned",
                first_seed=100,
                note="1M steps of 32 environments instead of 60M of 128; small models.",
            ),
            "paper": Scale(seeds=3, settings={"total_timesteps": 60_000_000}),
        },
    ),
)
