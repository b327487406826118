"""Long Range Arena: ListOps and Text."""

from agalite.studies.catalogue.agents import agents
from agalite.studies.declaration import (
    Better,
    Between,
    Claim,
    LearningCurves,
    Metric,
    Scale,
    Study,
    Supervised,
)

_ACCURACY = Metric(column="summary:test_accuracy", name="test accuracy")
_SMOKE = {
    "total_timesteps": 1536,
    "rows": 2,
    "row_length": 64,
    "max_length": 30,
    "embedding": 16,
    "hidden_size": 16,
    "train_examples": 200,
    "validation_examples": 40,
    "test_examples": 40,
    "log_every": 512,
    "evaluate_every": 768,
    "checkpoint_every": 1536,
}
_CPU = {"evaluate_every": 5_000_000, "log_every": 1_000_000, "keep_checkpoints": 1}
# Tokens. ListOps has Long Range Arena's number of examples (160,000), Text three epochs.
_CPU_TOKENS = {"listops": 160_000_000, "text": 100_000_000}


def _study(task: str, smoke: dict, score: float, error: float, others: dict[str, float]) -> Study:
    return Study(
        name=f"lra-{task}",
        title=f"Long Range Arena: {task}",
        paper="Appendix D",
        note="A step is one token. The paper quotes its baselines, of larger models, from Tay et "
        "al. (2021); here all models are trained alike.",
        kind=Supervised(preset="paper"),
        base={"task": task},
        factors=(agents("linear", "transformer", "agalite-8"),),
        metrics=(_ACCURACY,),
        figures=(
            LearningCurves(
                lines="agent",
                columns="charts/validation_accuracy",
                title="validation accuracy while training",
            ),
        ),
        scales={
            "smoke": Scale(
                seeds=1, model_size="tiny", settings=smoke, factors=(agents("agalite-8"),)
            ),
            "cpu": Scale(
                seeds=2,
                seeds_per_run=1,
                model_size="small",
                settings={**_CPU, "total_timesteps": _CPU_TOKENS[task]},
                factors=(agents("agalite-8", "linear", "gru", "transformer"),),
                note=f"{_CPU_TOKENS[task] // 10**6}M tokens, small models.",
            ),
            "paper": Scale(seeds=10, seeds_per_run=1),
        },
        claims=(
            Claim(
                says=f"AGaLiTe scores {100 * score:.2f} +- {100 * error:.2f}% over 10 seeds.",
                where="Appendix D, table",
                tests=(
                    Between(
                        a={"agent": "agalite-8"}, low=score - 2 * error, high=score + 2 * error
                    ),
                ),
                scales=("paper", "cpu"),
            ),
            *(
                Claim(
                    says=f"AGaLiTe outperforms the {agent} ({100 * value:.2f}%, as reported by "
                    "Tay et al., 2021).",
                    where="Appendix D, table",
                    tests=(
                        Between(a={"agent": "agalite-8"}, low=value, high=1.0),
                        Better(a={"agent": "agalite-8"}, b={"agent": agent}),
                    ),
                    scales=("paper", "cpu"),
                )
                for agent, value in others.items()
            ),
        ),
    )


STUDIES = (
    _study(
        "listops",
        {**_SMOKE, "min_length": 3},
        0.3933,
        0.0034,
        {"linear": 0.1613, "transformer": 0.3637},
    ),
    _study("text", _SMOKE, 0.7983, 0.013, {"linear": 0.659, "transformer": 0.6427}),
)
