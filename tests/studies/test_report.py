"""Statistics, the paper's claims, and the page in a real browser. About 20 s."""

import html
import json
import math
import shutil

import jax
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from test_studies import small

from agalite.ops import delta_approximation
from agalite.studies import catalogue, claims, measurements, page, report, results, runner
from agalite.studies.declaration import (
    Alike,
    Better,
    Between,
    Claim,
    Metric,
    Ratio,
    Scale,
    Selection,
    over,
)
from agalite.studies.results import Point, Results, load
from agalite.studies.trials import expand
from browser import chromium, open_page

numbers = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)


# Statistics.


@given(numbers)
@settings(deadline=None, max_examples=50)
def test_interquartile_mean_is_scipys_trimmed_mean(values):
    ours = results.interquartile_mean(np.array(values))
    assert ours == pytest.approx(scipy.stats.trim_mean(values, 0.25), abs=1e-9)


@given(numbers, numbers)
@settings(deadline=None, max_examples=50)
def test_probability_of_improvement_counts_pairs(x, y):
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in x for b in y]
    ours = results.probability_of_improvement(np.array(x), np.array(y))
    assert ours == pytest.approx(sum(pairs) / len(pairs))


def test_summary_of_seeds():
    values = np.array([1.0, 2.0, 3.0, 6.0, np.nan])
    s = results.summarise(values)
    assert (s.seeds, s.mean, s.middle) == (4, 3.0, 2.5)
    assert s.error == pytest.approx(scipy.stats.sem(values[:4]))
    assert s.low < 3.0 < s.high
    one = results.summarise(np.array([2.0]))
    assert (one.seeds, one.mean, one.low, one.high) == (1, 2.0, 2.0, 2.0)
    assert math.isnan(one.error)
    assert results.summarise(np.array([np.nan])).seeds == 0


def _table():
    """Two seeds, six lines each; the episodes differ in number."""
    step = np.repeat(np.arange(100, 700, 100), 2)
    seed = np.tile([0, 1], 6)
    rng = np.random.default_rng(0)
    episodes = rng.integers(0, 5, 12).astype(float)
    success = np.where(episodes > 0, rng.random(12), np.nan)
    return {"step": step, "seed": seed, "charts/episodes": episodes, "charts/success": success}


def test_last_steps_are_a_mean_over_episodes():
    table = _table()
    ours = results.last_steps(table, "charts/success", 250)
    for seed in (0, 1):
        total = count = 0.0
        for i in range(12):
            if table["seed"][i] == seed and table["step"][i] > 350 and table["charts/episodes"][i]:
                count += table["charts/episodes"][i]
                total += table["charts/episodes"][i] * table["charts/success"][i]
        assert ours[seed] == pytest.approx(total / count)


def test_bins_hold_what_falls_into_them():
    table = _table()
    ends, curves = results.binned(table, "charts/success", 3)
    np.testing.assert_array_equal(ends, [200, 400, 600])
    for seed in (0, 1):
        for i, end in enumerate(ends):
            mine = (table["seed"] == seed) & (table["step"] > end - 200) & (table["step"] <= end)
            weights = table["charts/episodes"][mine]
            if weights.sum():
                want = np.nansum(weights * table["charts/success"][mine]) / weights.sum()
                assert curves[seed, i] == pytest.approx(want)
            else:
                assert np.isnan(curves[seed, i])


def test_difference_interval_covers_the_truth():
    rng = np.random.default_rng(1)
    hits = 0
    for i in range(200):
        x, y = rng.normal(1.0, 1.0, 20), rng.normal(0.0, 2.0, 30)
        low, high = results.difference_interval(x, y, resamples=400, seed=i)
        hits += low <= 1.0 <= high
    assert 175 <= hits <= 200  # 95%, a little less for a bootstrap of few samples


# Claims and selection, on numbers made up for them.


def _results(tmp_path, points, *tests, scale="cpu", scales=("cpu",), **options):
    claim = Claim(says="so it is", where="here", tests=tests, scales=scales)
    study = small(claims=(claim,), **options)
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
    assert judged([LOW], other).measured == ("8/16: not part of this scale, 4: 1 (0.925 to 1.08)")
    assert judged([], Between(a={"gate": "9"}, low=0, high=1)).measured == ("9: nothing finished")


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
    factors = (over("agent", "mode", ("a", "b")), over("rate", "r", (1, 2)), over("n", "n", (1, 2)))
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
    chosen = {c.within["agent"]: c for c in results.choose(results)}
    assert chosen["a"].chosen == {"rate": "2"}  # 0.6 beats the mean of 0.9 and 0.1
    assert chosen["a"].mean == pytest.approx(0.6)
    assert chosen["b"].chosen == {"rate": "1"}  # a seed without an episode is no success
    assert chosen["b"].settings == {"r": 1}


# What the approximation error study measures.


@pytest.mark.parametrize("basis", ["paper", "published", "slots"])
@pytest.mark.parametrize("r", [1, 4, 7])
def test_the_approximation_error_is_that_of_the_definition(basis, r):
    """In float64, from the sums that define C and C~ (Appendix B), term by term."""
    gate, width, steps, seeds = 0.3, 5, 20, 2
    rows = measurements.measure(
        seeds=seeds, basis=basis, r=(r,), gates=(gate,), width=width, steps=steps
    )
    k, v = np.asarray(jax.random.normal(jax.random.key(0), (2, steps, seeds, width)), np.float64)
    decay = (1 - gate) ** (steps - 1 - np.arange(steps))
    own = r if basis != "slots" else r // 2 + 1
    t = np.arange(1, steps + 1)
    delta = delta_approximation(t[:, None], t[None, :], own, basis)
    for seed in range(seeds):
        left, right = (gate * decay[:, None] * x[:, seed] for x in (v, k))
        exact, near = left.T @ right, left.T @ delta @ right
        error = np.linalg.norm(exact - near)
        assert rows[0]["values"]["error"][seed] == pytest.approx(error, rel=1e-4, abs=1e-5)
        relative = error / np.linalg.norm(exact)
        assert rows[0]["values"]["relative_error"][seed] == pytest.approx(relative, rel=1e-3)


# The page.


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    better = Better(a={"r": "4", "gate": "0.5"}, b={"r": "1", "gate": "0.5"})
    study = small(
        claims=(
            Claim(says="More <b>is</b> better", where="there", tests=(better,), scales=("smoke",)),
        ),
        factors=(over("r", "r", (1, 2, 4)), over("mode", "mode", ("good", "bad"))),
    )
    runner.run(expand(study, "smoke", out), quiet=True, command="agalite study run small")
    return study, out, report.write(study, "smoke", out)


def test_numbers_are_those_of_the_folders(written):
    study, out, page = written
    results = load(study, "smoke", out)
    assert len(results.points) == 6  # three finished trials, two gates each
    found = json.loads((page.parent / "numbers.json").read_text())
    for point, row in zip(results.points, found["settings"], strict=True):
        assert row["levels"] == point.levels
        assert row["error"]["values"] == pytest.approx(point.values["error"], rel=1e-5)
        assert row["error"]["mean"] == point.values["error"].mean()
    assert found["claims"][0]["verdict"] == "agrees"
    assert found["sessions"][0]["command"] == "agalite study run small"
    for name in ("1-map", "2-against"):
        png = (page.parent / "figures" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")


@chromium
def test_the_page_works_in_a_browser(written, tmp_path):
    _, _, path = written
    with open_page(path) as page:
        assert page.console_errors == []
        assert page.requests == [path.resolve().as_uri()]  # nothing else is fetched
        assert "http-equiv" not in page.dom
        visible = page.evaluate(
            "[...document.querySelectorAll('figure svg')].map(svg => {"
            " const box = svg.getBoundingClientRect();"
            " return box.width > 300 && box.height > 150 && getComputedStyle(svg).visibility;})"
        )
        assert visible == ["visible", "visible"]
        # Lines are drawn where they can be seen, and labelled.
        assert page.evaluate("document.querySelectorAll('figure svg path').length") > 20
        assert "error (Frobenius" not in page.dom
        claim = page.evaluate("document.querySelector('#claims tbody').innerText")
        assert "More <b>is</b> better" in claim  # escaped
        assert "agrees" in claim
        assert "this one cannot be measured" in page.evaluate("document.body.innerText")
        # Tables sort by number, both ways.
        column = (
            "[...document.querySelectorAll('#results tbody tr')].map(r => r.cells[4].innerText)"
        )
        head = "document.querySelectorAll('#results th')[4]"
        assert page.evaluate(f"{head}.innerText") == "error"
        page.evaluate(f"{head}.click()")
        up = [float(x) for x in page.evaluate(column)]
        page.evaluate(f"{head}.click()")
        down = [float(x) for x in page.evaluate(column)]
        assert up == sorted(up) == down[::-1]
        assert len(set(up)) > 3
        assert page.evaluate(f"{head}.getAttribute('aria-sort')") == "descending"
        page.screenshot(tmp_path / "page.png")
        assert page.console_errors == []
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_a_report_of_an_unfinished_study_says_so(tmp_path):
    study = small(scales={"smoke": Scale(seeds=2)})
    trials = expand(study, "smoke", tmp_path)
    runner.run(trials[:1], quiet=True)
    text = report.write(study, "smoke", tmp_path).read_text()
    assert "3 trials: 1 finished, 2 not begun." in text


# Damaged files.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The smoke T-Maze study, of two trials: agents gru and agalite."""
    out = tmp_path_factory.mktemp("trained")
    runner.run(expand(catalogue.find("tmaze"), "smoke", out), quiet=True)
    return out


def _cut(path):
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


def _cut_lines(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("summary.json", _cut),
        ("summary.json", lambda path: path.write_text("[]")),
        ("summary.json", lambda path: path.write_text("{}")),
        ("metrics.csv", _cut_lines),
        ("metrics.csv", lambda path: path.write_text(path.read_text().replace(",", ";", 30))),
        ("metrics.csv", lambda path: path.write_text(path.read_text().splitlines()[0] + "\n")),
        ("metrics.csv", lambda path: path.write_text("")),
        ("metrics.csv", lambda path: path.unlink()),
        ("config.json", _cut),
    ],
)
def test_a_damaged_trial_is_listed_and_the_page_is_written(name, harm, trained, tmp_path):
    out = tmp_path / "studies"
    shutil.copytree(trained, out)
    study = catalogue.find("tmaze")
    hurt, whole = expand(study, "smoke", out)
    harm(hurt.folder / name)
    text = html.unescape(report.write(study, "smoke", out).read_text())
    assert "2 trials: 1 finished, 1 failed." in text
    failures = text.split("<h2>Failures</h2>")[1].split("</table>")[0]
    assert name in failures
    assert f"remove the folder {hurt.folder} and run the study again" in failures
    assert whole.name not in failures


def test_a_damaged_measurement_is_not_finished_and_is_not_measured_over(tmp_path):
    study = small()
    trials = expand(study, "smoke", tmp_path)
    runner.run(trials, quiet=True)
    _cut(trials[0].rows_path)
    assert [trial.state() for trial in trials] == ["failed", "finished", "finished"]
    assert str(trials[0].rows_path) in trials[0].failure()
    assert "3 trials: 2 finished, 1 failed." in report.write(study, "smoke", tmp_path).read_text()
    (outcome,) = runner.run(trials, quiet=True)
    assert outcome.state == "failed"
    assert f"remove the folder {trials[0].folder}" in outcome.message
    shutil.rmtree(trials[0].folder)
    assert [o.state for o in runner.run(trials, quiet=True)] == ["finished"]
    assert [trial.state() for trial in trials] == ["finished"] * 3


def test_a_damaged_session_is_said_and_left_out(tmp_path):
    study = small()
    runner.run(expand(study, "smoke", tmp_path), quiet=True)
    (session,) = (tmp_path / "small/smoke/sessions").iterdir()
    _cut(session)
    text = report.write(study, "smoke", tmp_path).read_text()
    assert f"{session} cannot be read" in text


def test_the_page_says_how_much_was_averaged_and_which_commit(trained, monkeypatch):
    monkeypatch.setattr(page, "commit", lambda: "abc1234+")
    text = report.write(catalogue.find("tmaze"), "smoke", trained).read_text()
    table = load(catalogue.find("tmaze"), "smoke", trained)
    fifth = table.points[0].summary["steps"] // 5
    assert f"averaged over their last {fifth:,} steps" in text
    assert "last 100K steps: standard error" in text
    # The session's own: the tree may have changed since it ran.
    assert f"<td>{table.sessions[0]['commit'] or ''}</td>" in text
    assert "written at commit abc1234+" in text


def test_intervals_are_explained_where_there_are_any(tmp_path, written):
    assert "bootstrap intervals over repetitions" in written[2].read_text()
    between = Between(a={"r": "1", "gate": "0.5"}, low=0.0, high=1.0)
    study = small(
        "exact",
        metrics=(Metric(column="error", name="error", exact=True),),
        base={},
        claims=(Claim(says="It is", where="here", tests=(between,), scales=("smoke",)),),
        scales={"smoke": Scale(seeds=1)},
    )
    runner.run(expand(study, "smoke", tmp_path), quiet=True)
    assert "bootstrap intervals" not in report.write(study, "smoke", tmp_path).read_text()


def test_a_sweep_states_its_rule(tmp_path):
    study = small(
        factors=(over("agent", "mode", ("good",)), over("r", "r", (1, 2))),
        selection=Selection(("r",), ("agent",)),
    )
    runner.run(expand(study, "smoke", tmp_path), quiet=True)
    text = report.write(study, "smoke", tmp_path).read_text()
    assert "For each agent: the r with the lowest mean of error, over all seeds" in text
