"""Scores over several tasks, for made-up results."""

import numpy as np
import pytest

from agalite.studies import catalogue, figures, page
from agalite.studies.aggregate import aggregates, gap_closed
from agalite.studies.declaration import LEARNED, SCORE, Ranking, Score, Training
from agalite.studies.results import Point, Results
from agalite.studies.trials import expand
from studies.small_study import measured_study

SCORES = {"easy": Score("charts/episodic_return", -1.0, 1.0), "hard": Score("charts/success", 0, 1)}


def results(tmp_path, rows):
    """`rows`: (memory, task) -> scores of the seeds."""
    study = measured_study(
        figures=(Ranking(),), scores=SCORES, compared="memory", gap=("all", "blind")
    )
    points = [
        Point(
            {"memory": memory, "task": task},
            {
                SCORE: np.array(values, float),
                "learned at": np.where(np.array(values) >= LEARNED, 1000.0, np.nan),
                "charts/SPS": np.full(len(values), 10.0 if task == "easy" else 1000.0),
            },
            summary={"parameters": 7, "state": 3},
        )
        for (memory, task), values in rows.items()
    ]
    return Results(study, "cpu", tmp_path, [], points, [])


ROWS = {
    ("blind", "easy"): [0.2, 0.2, 0.2, 0.2],
    ("blind", "hard"): [0.5, 0.5, 0.5, 0.5],
    ("good", "easy"): [0.8, 1.0, 1.0, 1.0],
    ("good", "hard"): [0.5, 0.7, 0.9, np.nan],
    ("all", "easy"): [1.0, 1.0, 1.0, 1.0],
}


def test_scores_of_tasks_are_joined(tmp_path):
    found = {a.label: a for a in aggregates(results(tmp_path, ROWS))}
    assert list(found) == ["good", "blind", "all"]  # with all tasks first, then the best
    good = found["good"]
    # Of 0, 0.5, 0.7, 0.8, 0.9, 1, 1, 1 without two at each end; a seed without an episode is 0.
    assert good.mean == pytest.approx((0.7 + 0.8 + 0.9 + 1.0) / 4)
    assert good.low < good.mean < good.high
    assert good.tasks == pytest.approx({"easy": 0.95, "hard": 0.525})
    assert good.sooner == {"easy": 1000.0, "hard": np.inf}
    assert good.speed == pytest.approx(100.0)
    assert (good.parameters, good.state) == (7, 3)
    assert (found["blind"].low, found["blind"].high) == (0.35, 0.35)  # each task on its own


def test_the_gap_is_over_tasks_that_have_one(tmp_path):
    found = aggregates(results(tmp_path, ROWS))
    assert gap_closed(found, "all", "blind") == pytest.approx(
        {"good": (0.95 - 0.2) / 0.8, "blind": 0.0, "all": 1.0}
    )
    assert gap_closed(found, "everything", "blind") == {}
    narrow = {**ROWS, ("all", "easy"): [0.25, 0.25, 0.25, 0.25]}
    assert gap_closed(aggregates(results(tmp_path, narrow)), "all", "blind") == {}


def test_scores_stay_within_their_limits():
    assert SCORES["easy"].of(np.array([-3.0, 0.0, 3.0])).tolist() == [0.0, 0.5, 1.0]


def test_the_page_has_a_row_for_each_and_a_figure(tmp_path):
    made = results(tmp_path, ROWS)
    (figure,) = figures.draw(made)
    assert "interquartile mean" in figure.svg
    assert "all (1)" in figure.svg  # has one task, and is not comparable
    text = page._together(made)
    assert text.count("<tr>") == 2 * (1 + 3)
    assert "never" in text
    assert page._together(Results(measured_study(), "cpu", tmp_path, [], [], [])) == ""


def test_every_task_of_the_study_has_a_score(tmp_path):
    study = catalogue.find("memory-models")
    assert isinstance(study.kind, Training)
    for scale in study.scales:
        tasks = {trial.levels["task"] for trial in expand(study, scale, tmp_path)}
        assert tasks <= set(study.scores)
    counts = [t.levels["memory"] for t in expand(study, "cpu", tmp_path, ["seed=0"])]
    assert counts.count("agalite") == len(study.scores) == 7
    assert counts.count("sees the state") == 4
