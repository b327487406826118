"""Not in the paper: how well agents learn with default settings, `agalite train ENV --memory M`."""

from collections.abc import Mapping
from typing import Any

from agalite.studies.catalogue import cartpole, tmaze
from agalite.studies.declaration import (
    Factor,
    LearningCurves,
    Metric,
    Scale,
    Study,
    Training,
)


def _tasks(tasks: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]]) -> Factor:
    """A level for each task and memory, from (environment, other settings, memories) of a task."""
    return Factor(
        "task/memory",
        {
            f"{task}/{memory}": {"env": env, "memory": memory, **settings}
            for task, (env, settings, memories) in tasks.items()
            for memory in memories
        },
    )


_FOUR = ("gru", "lstm", "gtrxl", "agalite")
_CARTPOLE = {
    "masked-cartpole": ("masked-cartpole", {}, _FOUR),
    "noisy-masked-cartpole": ("noisy-masked-cartpole", {}, _FOUR),
    "masked-cartpole 500K": ("masked-cartpole", {"total_timesteps": 500_000}, ("agalite",)),
}
_NO_VELOCITY = "gym:agalite/{}NoVelocity-v0"
_GYM = {
    "CartPole": ("gym:CartPole-v1", {"total_timesteps": 100_000}, ("agalite", "gru")),
    "Pendulum": (_NO_VELOCITY.format("Pendulum"), {}, ("agalite", "gru")),
    "MountainCar": (_NO_VELOCITY.format("MountainCarContinuous"), {}, ("agalite", "gru")),
}
_TMAZE = {"tmaze": ("tmaze", {}, ("agalite", "gru", "gtrxl"))}

_RETURN = Metric(
    column="charts/episodic_return", name="episodic return, last 10K steps", last_steps=10_000
)

_PUBLISHED = Factor(
    "agent",
    {
        "agalite": {"memory": "agalite"},
        "gtrxl-256": {"memory": "gtrxl", "memory_options.memory": 256},
        "gtrxl-128": {"memory": "gtrxl", "memory_options.memory": 128},
    },
)


def _study(
    name: str,
    title: str,
    tasks: Mapping[str, Any],
    metric: Metric,
    smoke: Mapping[str, Any],
    first_seed: int = 0,
) -> Study:
    first, (env, _, _) = next(iter(tasks.items()))
    return Study(
        name=name,
        title=title,
        paper="ours",
        kind=Training(preset="tuned"),
        factors=(_tasks(tasks),),
        metrics=(metric,),
        figures=(LearningCurves(lines="memory", panels="task"),),
        scales={
            "smoke": Scale(
                model_size="tiny",
                settings=smoke,
                factors=(_tasks({first: (env, {}, ("gru",))}),),
            ),
            "cpu": Scale(seeds=5, first_seed=first_seed),
        },
    )


STUDIES = (
    _study(
        "bars-cartpole",
        "Default settings in CartPole without velocities: return over training",
        _CARTPOLE,
        _RETURN,
        cartpole.SMOKE,
    ),
    _study(
        "bars-tmaze",
        "Default settings in T-Maze, a corridor of 160: success over training",
        _TMAZE,
        tmaze.SUCCESS,
        tmaze.TUNED_SMOKE,
        first_seed=10,  # `noise_steps` was changed after seeds 0 to 4 had been seen
    ),
    _study(
        "bars-gym",
        "Default settings in Gymnasium's classic control: return over training",
        _GYM,
        _RETURN,
        {
            "total_timesteps": 1024,
            "num_workers": 1,
            "num_steps": 64,
            "agent.update_epochs": 1,
            "agent.num_minibatches": 1,
            "log_every": 256,
            "checkpoint_every": 1024,
        },
        first_seed=20,  # settings were changed after seeds 0 to 14 had been seen
    ),
    Study(
        name="bars-published",
        title="The published code's settings and sizes in T-Maze: success over training",
        paper="ours",
        kind=Training(preset="published"),
        base={"env": "tmaze"},
        factors=(tmaze.corridor(120, 200), _PUBLISHED),
        metrics=(tmaze.SUCCESS,),
        figures=(LearningCurves(lines="agent", panels="corridor"),),
        scales={
            "smoke": Scale(
                model_size="tiny",
                settings=tmaze.SMOKE,
                factors=(tmaze.corridor(4), Factor("agent", {"agalite": {}})),
            ),
            "cpu": Scale(seeds=5, seeds_per_run=1),
        },
    ),
)
