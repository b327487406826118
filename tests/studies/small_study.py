"""Small studies for tests: one that measures a cheap function, one that trains a tiny agent."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from agalite.studies.catalogue import tmaze
from agalite.studies.catalogue.agents import agents
from agalite.studies.declaration import (
    Heatmap,
    LearningCurves,
    LinePlot,
    Measurement,
    Metric,
    Scale,
    SeedDots,
    Study,
    Training,
    vary,
)


def measure(*, seeds, mode="good", r=1, noise=0.0, folder=None):
    """What `measured_study` measures; `mode` selects how it fails."""
    if mode == "bad":
        raise ValueError("this one cannot be measured")
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "sleep":
        Path(folder, f"started-{r}").touch()
        time.sleep(60)
    rng = np.random.default_rng(0)
    return [
        {"levels": {"gate": gate}, "values": {"error": gate / r + noise * rng.normal(size=seeds)}}
        for gate in (0.1, 0.5)
    ]


def measured_study(name="small", *factors, **options):
    """Three trials of `measure` unless `factors` says otherwise; `options` are fields of Study."""
    return Study(
        **{
            "name": name,
            "title": "A small study",
            "paper": "ours",
            "factors": factors or (vary("r", "r", (1, 2, 4)),),
            "kind": Measurement("studies.small_study:measure"),
            "base": {"noise": 0.01},
            "metrics": (Metric(column="error", name="error", higher_is_better=False),),
            "figures": (
                Heatmap(x="r", y="gate"),
                LinePlot(x="r", lines="gate"),
                SeedDots(rows="r"),
            ),
            "scales": {"smoke": Scale(seeds=5), "cpu": Scale(seeds=3)},
            **options,
        }
    )


TRAINED = Study(
    name="trained",
    title="A tiny agent in a short T-Maze",
    paper="ours",
    kind=Training(preset="paper"),
    base={"env": "tmaze"},
    factors=(agents("gru"), tmaze.corridor(4)),
    metrics=(
        Metric(column="charts/success", name="success rate, last 100K steps", last_steps=100_000),
    ),
    figures=(LinePlot(x="corridor", lines="agent"), LearningCurves(lines="agent")),
    # Two runs of one seed each: both use the same compiled program.
    scales={"smoke": Scale(seeds=2, seeds_per_run=1, model_size="tiny", settings=tmaze.SMOKE)},
)
