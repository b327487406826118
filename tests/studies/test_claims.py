"""Verdicts on claims, and the choice of a sweep, for made-up results."""

import math

import numpy as np
import pytest

from agalite.studies import catalogue, claims
from agalite.studies.declaration import (
    Alike,
    Better,
    Between,
    Claim,
    Metric,
    Ratio,
    SeedFailure,
    Selection,
    vary,
)
from agalite.studies.results import Point, Results, choose, count_failures
from studies.small_study import measured_study


def _results(tmp_path, points, *tests, scale="cpu", scales=("cpu",), **options):
    claim = Claim(says="so it is", where="here", tests=tests, scales=scales)
    study = measured_study(claims=(claim,), **options)
    made = [Point(levels, {"error": np.array(values, float)}) for levels, values in points]
    return Results(study, scale, tmp_path, [], made, [])


LOW, HIGH = ({"r": "4"}, [1.0, 1.1, 0.9, 1.0]), ({"r": "1"}, [2.0, 2.1, 1.9, 2.0])
ODD = ({"r": "2"}, [0.5, 2.5, 0.6, 2.2])


@pytest.mark.parametrize(
    ("test", "word"),
    [
        (Better(a={"r": "4"}, b={"r": "1"}), "agrees"),  # less is better here
        (Better(a={"r": "1"}, b={"r": "4"}), "disagrees"),
        (Better(a={"r": "4"}, b={"r": "1"}, margin=2.0), "disagrees"),
        (Better(a={"r": "2"}, b={"r": "1"}), "undecided"),
        (Alike(a={"r": "4"}, b={"r": "1"}, within=1.5), "agrees"),
        (Alike(a={"r": "4"}, b={"r": "1"}, within=0.5), "disagrees"),
        (Alike(a={"r": "4"}, b={"r": "2"}, within=0.5), "undecided"),
        (Between(a={"r": "4"}, low=0.8, high=1.2), "agrees"),
        (Between(a={"r": "4"}, low=1.5, high=2.0), "disagrees"),
        (Between(a={"r": "2"}, low=1.4, high=3.0), "undecided"),
        (Ratio(a={"r": "1"}, b={"r": "4"}, low=1.5, high=2.5), "agrees"),
        (Ratio(a={"r": "1"}, b={"r": "4"}, low=3, high=4), "disagrees"),
        (Better(a={"r": "4"}, b={"r": "9"}), "not tested at this scale"),
    ],
)
def test_a_claim_is_judged_by_the_whole_interval(test, word, tmp_path):
    (verdict,) = claims.judge(_results(tmp_path, [LOW, HIGH, ODD], test))
    assert verdict.word == word, verdict


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ([1.0, 1.0, 0.99], [0.99, 0.99, 1.0], "not separated here"),  # both at the top
        ([0.50, 0.51, 0.50], [0.51, 0.50, 0.50], "not separated here"),  # both at chance
        ([1.0, 1.0, 1.0], [0.95, 0.95, 0.96], "agrees"),
        ([0.50, 0.51, 0.50], [1.0, 0.99, 1.0], "disagrees"),
    ],
)
def test_two_sides_at_the_same_limit_are_not_separated(a, b, word, tmp_path):
    metric = Metric(column="error", name="success", limits=(0.5, 1.0))
    test = Better(a={"r": "4"}, b={"r": "1"})
    points = [({"r": "4"}, a), ({"r": "1"}, b)]
    (verdict,) = claims.judge(_results(tmp_path, points, test, metrics=(metric,)))
    assert verdict.word == word
    assert "difference" in verdict.measured[0], "the numbers are shown all the same"


def test_seeds_count_for_the_first_way_in_which_they_fail():
    ways = (
        SeedFailure(name="lost", column="reached", below=0.5),
        SeedFailure(name="forgot", column="success", below=0.75),
    )
    values = {
        "reached": np.array([0.1, 1.0, 1.0, np.nan]),
        "success": np.array([0.0, 0.5, 1.0, np.nan]),
    }
    assert count_failures(Point({}, values), ways) == {"lost": 2, "forgot": 1}
    assert count_failures(Point({}, {"error": np.ones(3)}), ways) == {}


def test_a_claim_about_another_scale_is_not_judged(tmp_path):
    test = Better(a={"r": "4"}, b={"r": "1"})
    (verdict,) = claims.judge(_results(tmp_path, [LOW, HIGH], test, scales=("paper",)))
    assert verdict.word == "not tested at this scale"
    assert "difference -1" in verdict.measured[0]
    one_seed = [(levels, values[:1]) for levels, values in (LOW, HIGH)]
    one_seed = [(levels, [value + 0.5 for value in values]) for levels, values in one_seed]
    (verdict,) = claims.judge(_results(tmp_path, one_seed, test))
    assert verdict.word == "not tested at this scale"


def test_a_claim_that_is_not_tested_says_why_and_shows_what_there_is(tmp_path):
    def judged(points, test, **options):
        (verdict,) = claims.judge(_results(tmp_path, points, test, **options))
        assert verdict.word == "not tested at this scale"
        return verdict

    test = Better(a={"r": "4"}, b={"r": "1"})
    verdict = judged([LOW, HIGH], test, scales=("paper", "smoke"))
    assert verdict.why == "it is about the scales paper and smoke"
    assert judged([LOW, HIGH], test, scales=("paper",)).why == "it is about scale paper"
    assert judged([LOW], test).measured == ("4: 1 (0.925 to 1.08), 1: nothing finished",)
    other = Better(a={"r": ("8", "16")}, b={"r": "4"})
    assert judged([LOW], other).measured == ("8/16: not part of this scale, 4: 1 (0.925 to 1.08)",)
    assert judged([], Between(a={"gate": "9"}, low=0, high=1)).measured == ("9: nothing finished",)


def test_what_is_tested_stands_beside_what_we_measured(tmp_path):
    ratio = Ratio(a={"r": "1"}, b={"r": "4"}, low=1.5, high=math.inf)
    between = Between(a={"r": "4"}, low=0.8, high=1.2)
    (verdict,) = claims.judge(_results(tmp_path, [LOW, HIGH], ratio, between))
    assert verdict.measured[0].endswith("ratio 2; tested: at least 1.5")
    assert verdict.measured[1].endswith("; tested: 0.8 to 1.2")
    assert not any("within" in claim.says for claim in catalogue.find("cost").claims)


def test_one_test_of_several_is_enough_to_disagree(tmp_path):
    good, bad = Better(a={"r": "4"}, b={"r": "1"}), Better(a={"r": "1"}, b={"r": "4"})
    (verdict,) = claims.judge(_results(tmp_path, [LOW, HIGH], good, bad))
    assert verdict.word == "disagrees"
    assert len(verdict.measured) == 2


def test_a_sweep_chooses_the_best_mean_over_the_other_factors(tmp_path):
    factors = (vary("agent", "mode", ("a", "b")), vary("rate", "r", (1, 2)), vary("n", "n", (1, 2)))
    numbers = {  # agent, rate, n
        ("a", "1", "1"): [0.9, 0.9],
        ("a", "1", "2"): [0.1, 0.1],
        ("a", "2", "1"): [0.6, 0.6],
        ("a", "2", "2"): [0.6, 0.6],
        ("b", "1", "1"): [0.5, 0.7],
        ("b", "1", "2"): [0.5, 0.5],
        ("b", "2", "1"): [0.9, np.nan],
        ("b", "2", "2"): [0.9, 0.9],
    }
    points = [(dict(zip(("agent", "rate", "n"), k, strict=True)), v) for k, v in numbers.items()]
    results = _results(
        tmp_path,
        points,
        factors=factors,
        selection=Selection(("rate",), ("agent",)),
        metrics=(Metric(column="error", name="success"),),
    )
    chosen = {c.within["agent"]: c for c in choose(results)}
    assert chosen["a"].chosen == {"rate": "2"}  # 0.6 beats the mean of 0.9 and 0.1
    assert chosen["a"].mean == pytest.approx(0.6)
    assert chosen["b"].chosen == {"rate": "1"}  # a seed without an episode is no success
    assert chosen["b"].settings == {"r": 1}


def test_a_sweep_prefers_what_learns_sooner_among_equals(tmp_path):
    factors = (vary("agent", "mode", ("a",)), vary("rate", "r", (1, 2, 3)))
    ends = {"1": 0.9, "2": 0.99, "3": 1.0}
    points = [({"agent": "a", "rate": rate}, [end]) for rate, end in ends.items()]
    results = _results(
        tmp_path,
        points,
        factors=factors,
        selection=Selection(("rate",), ("agent",), between_equals="whole"),
        metrics=(Metric(column="error", name="end"), Metric(column="whole", name="whole")),
    )
    for point, whole in zip(results.points, (0.9, 0.8, 0.7), strict=True):
        point.values["whole"] = np.array([whole])
    (choice,) = choose(results)
    assert choice.chosen == {"rate": "2"}  # within 2% of the best end, and sooner
    assert choice.mean == 0.99
