"""Not in the paper: every memory model of this library in seven tasks, at equal parameters."""

from typing import Any

from agalite.memory.registry import MODELS
from agalite.studies.catalogue import cartpole
from agalite.studies.declaration import (
    SCORE,
    Factor,
    LearningCurves,
    Metric,
    Ranking,
    Scale,
    Score,
    Settings,
    Study,
    Training,
)

_BLIND, _SEES = "feedforward", "sees the state"
# `memax` is about twenty models of another package.
_MODELS: dict[str, Settings] = {name: {"memory": name} for name in MODELS if name != "memax"}

_RETURN = "charts/episodic_return"
_POPGYM = {"total_timesteps": 1_000_000}
# Of each task: its settings, what counts as 0 and as 1, and what shows the hidden state.
_TASKS: dict[str, tuple[Settings, Score, Settings | None]] = {
    "T-Maze 100": (
        {"env": "tmaze", "env_options.corridor": 100, "total_timesteps": 400_000},
        Score("charts/success", 0.5, 1.0),
        None,
    ),
    "masked CartPole": (
        {"env": "masked-cartpole", "total_timesteps": 100_000},
        Score(_RETURN, 20.0, 500.0),
        None,
    ),
    "noisy CartPole": (
        {"env": "noisy-masked-cartpole", "total_timesteps": 200_000},
        Score(_RETURN, 20.0, 500.0),
        None,
    ),
    **{
        title: (
            {"env": f"popgym-{name}-easy", **_POPGYM},
            Score(_RETURN, low, 1.0),
            {"env_options.observe_state": True},
        )
        for title, name, low in (
            ("RepeatPrevious", "repeat-previous", -0.5),
            ("CountRecall", "count-recall", -1.0),
            ("Concentration", "concentration", -1.0),
            ("Autoencode", "autoencode", -0.5),
        )
    },
}


def _levels(models: dict[str, Settings], tasks: dict[str, Any]) -> Factor:
    """A level for each model in each task; and without memory, but with the hidden state."""
    levels: dict[str, Settings] = {}
    for task, (settings, _, shown) in tasks.items():
        for name, model in models.items():
            levels[f"{name}/{task}"] = {**settings, **model}
        if shown is not None and _BLIND in models:
            levels[f"{_SEES}/{task}"] = {**settings, **shown, "memory": _BLIND}
    return Factor("memory/task", levels)


# Without their numbers of steps, which are the scale's.
_EXAMPLES = {
    name: ({"env": settings["env"]}, score, shown)
    for name, (settings, score, shown) in _TASKS.items()
    if name in ("masked CartPole", "CountRecall")
}

STUDIES = (
    Study(
        name="memory-models",
        title="Every memory model in seven tasks, at equal parameters",
        paper="ours",
        note="About 190k parameters each; the state is as large as each model has it at that size. "
        "Every model has the tuned preset of the task, which was made with AGaLiTe, GRU and LSTM: "
        "a sweep for each model might move the others up.",
        kind=Training(preset="tuned"),
        base={"checkpoint_every": 1_000_000, "keep_checkpoints": 1, "log_every": 10_000},
        factors=(_levels(_MODELS, _TASKS),),
        metrics=(
            Metric(column=SCORE, name="score", limits=(0.0, 1.0)),
            Metric(column="charts/SPS", name="steps a second"),
        ),
        figures=(Ranking(), LearningCurves(lines="memory", panels="task", bins=40)),
        scores={task: score for task, (_, score, _) in _TASKS.items()},
        compared="memory",
        gap=(_SEES, _BLIND),
        scales={
            "smoke": Scale(
                seeds=2,
                model_size="tiny",
                settings={**cartpole.SMOKE, "num_steps": 32},
                factors=(_levels({"gru": _MODELS["gru"], _BLIND: _MODELS[_BLIND]}, _EXAMPLES),),
            ),
            "cpu": Scale(seeds=5, seeds_per_run=1, model_size="small"),
        },
    ),
)
