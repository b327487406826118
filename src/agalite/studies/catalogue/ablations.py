"""The three parts of AGaLiTe, each taken away or replaced: gates, feature map, approximation."""

from agalite.studies.catalogue import mystery_path, tmaze
from agalite.studies.catalogue.agents import LONG_HORIZON
from agalite.studies.declaration import (
    Better,
    Claim,
    Factor,
    LearningCurves,
    Metric,
    Scale,
    Settings,
    Study,
    Training,
)

_AGALITE: dict[str, Settings] = {
    "agalite": {},
    "no gating": {"memory_options.gating": False},
    "elu+1": {"memory_options.feature": "elu1"},
    "dpfp": {"memory_options.feature": "dpfp"},
    "rank-1 trick": {"memory_options.basis": "rank1"},
}
# Gates that start long: with the paper's initialisation small models often stay at chance, and the
# ablations would compare failures.
_CPU = {**tmaze.CPU_SETTINGS, "memory_options.horizon": LONG_HORIZON}


def _variants(*names: str) -> Factor:
    return Factor("variant", {name: _AGALITE[name] for name in names})


def _in_tmaze(name: str, title: str, others: tuple[str, ...], says: str) -> Study:
    base: Settings = {
        "env": "tmaze",
        "memory": "agalite",
        "memory_options.eta": 4,
        "memory_options.r": 1,
    }
    return Study(
        name=name,
        title=title,
        paper="Section 6",
        kind=Training(preset="paper"),
        base={**base, "env_options.corridor": 200},
        factors=(_variants("agalite", *others),),
        metrics=(tmaze.SUCCESS, tmaze.WHOLE_SUCCESS),
        figures=(LearningCurves(lines="variant", bins=100),),
        seed_failures=tmaze.SEED_FAILURES,
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings={**tmaze.SMOKE, "env_options.corridor": 4},
                factors=(_variants(others[0]),),
            ),
            "cpu": Scale(
                seeds=10,
                seeds_per_run=1,
                preset="published",
                model_size="small",
                settings=_CPU,
                note=tmaze.cpu_note(tmaze.LONG_GATES),
            ),
            "paper": Scale(seeds=50, seeds_per_run=10, settings={"total_timesteps": 5_000_000}),
        },
        claims=(
            Claim(
                says=says,
                where="Section 6",
                # By the mean over the run: an ablation that only learns more slowly counts too.
                tests=tuple(
                    Better(
                        a={"variant": "agalite"},
                        b={"variant": other},
                        metric=tmaze.WHOLE_SUCCESS.column,
                    )
                    for other in others
                ),
                scales=("paper", "cpu"),
            ),
        ),
    )


STUDIES = (
    Study(
        name="ablation-gating",
        title="Ablation: AGaLiTe without its gates, in Mystery Path Grid",
        paper="Section 6",
        kind=Training(preset="paper"),
        base={
            "env": "mystery-path-grid",
            "memory": "agalite",
            "memory_options.eta": 4,
            "memory_options.r": 1,
        },
        factors=(_variants("agalite", "no gating"),),
        metrics=(
            Metric(
                column="charts/success", name="success rate, last 1M steps", last_steps=1_000_000
            ),
            Metric(column="charts/episodic_return", name="episodic return", last_steps=1_000_000),
        ),
        figures=(LearningCurves(lines="variant", bins=100),),
        error_bands="95% interval",
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=mystery_path.SMOKE,
                factors=(_variants("no gating"),),
            ),
            "cpu": Scale(
                seeds=5,
                seeds_per_run=1,
                preset="tuned",
                model_size="small",
                settings=mystery_path.CPU,
                note=mystery_path.CPU_NOTE,
            ),
            "paper": Scale(seeds=15, seeds_per_run=5, settings={"total_timesteps": 100_000_000}),
        },
        claims=(
            Claim(
                says="The gating mechanism significantly outperforms an AGaLiTe without it.",
                where="Section 6",
                tests=(Better(a={"variant": "agalite"}, b={"variant": "no gating"}),),
                scales=("paper", "cpu"),
            ),
        ),
    ),
    _in_tmaze(
        "ablation-feature-map",
        "Ablation: other feature maps (ELU+1, DPFP), in T-Maze",
        ("elu+1", "dpfp"),
        "The proposed feature map outperforms both ELU+1 and DPFP.",
    ),
    _in_tmaze(
        "ablation-approximation",
        "Ablation: the rank-1 trick instead of cosines, in T-Maze",
        ("rank-1 trick",),
        "The proposed approximation (r = 1) outperforms the rank-1 trick.",
    ),
)
