"""The report of a study: page, figures, numbers; and what it does with damaged files."""

import html
import json
import re
from dataclasses import replace

import pytest

from agalite.studies import page, report, runner, verdicts
from agalite.studies.declaration import (
    Better,
    Between,
    Claim,
    Metric,
    Scale,
    Selection,
    vary,
)
from agalite.studies.results import load
from agalite.studies.trials import expand
from chromium import needs_chromium, open_page
from studies.small_study import TRAINED, measured_study


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    better = Better(a={"r": "4", "gate": "0.5"}, b={"r": "1", "gate": "0.5"})
    study = measured_study(
        claims=(
            Claim(says="More <b>is</b> better", where="there", tests=(better,), scales=("smoke",)),
        ),
        factors=(vary("r", "r", (1, 2, 4)), vary("mode", "mode", ("good", "bad"))),
    )
    runner.run(expand(study, "smoke", out), quiet=True, command="agalite study run small")
    return study, out, report.write(study, "smoke", out)


def test_numbers_are_those_of_the_folders(written):
    study, out, page = written
    results = load(study, "smoke", out)
    assert len(results.points) == 6  # three finished trials, two gates each
    found = json.loads((page.parent / "numbers.json").read_text())
    for point, row in zip(results.points, found["points"], strict=True):
        assert row["levels"] == point.levels
        assert row["error"]["values"] == pytest.approx(point.values["error"], rel=1e-5)
        assert row["error"]["mean"] == point.values["error"].mean()
    assert found["claims"][0]["verdict"] == "agrees"
    assert found["sessions"][0]["command"] == "agalite study run small"
    for name in ("1-heatmap", "2-line-plot", "3-seeds"):
        png = (page.parent / "figures" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")


def test_the_page_is_one_html_file_without_references(written):
    text = written[2].read_text()
    assert text.count("<figure ") == text.count("<svg") == 3
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)  # nothing is fetched
    for table in ("claims", "results", "improvement", "failures", "sessions"):
        assert f'<table class="sortable" id="{table}">' in text
    claims = text.split('id="claims"')[1].split("</table>")[0]
    assert "More &lt;b&gt;is&lt;/b&gt; better" in claims
    assert '<span class="word agrees">agrees</span>' in claims
    assert "this one cannot be measured" in text
    # A cell carries the number that its table is sorted by.
    cells = re.findall(r'<td class=number data-value="([^"]*)">([^<]*)</td>', text)
    assert cells
    for value, shown in cells:
        assert float(value) == pytest.approx(float(shown.replace(",", "")), rel=1e-3)


@pytest.mark.slow
@needs_chromium
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
        assert visible == ["visible"] * 3
        # Lines are drawn where they can be seen, and labelled.
        assert page.evaluate("document.querySelectorAll('figure svg path').length") > 20
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


def test_a_training_study_has_learning_curves_and_says_what_was_averaged(trained, monkeypatch):
    monkeypatch.setattr(page, "commit", lambda: "abc1234+")
    text = report.write(TRAINED, "smoke", trained).read_text()
    results = load(TRAINED, "smoke", trained)
    (point,) = results.points
    assert len(point.values["charts/success"]) == 2  # the seeds of two runs
    assert text.count("<svg") == 2
    assert "environment steps" in text
    fifth = point.summary["steps"] // 5
    assert f"averaged over their last {fifth:,} steps" in text
    assert "last 100K steps: standard error" in text
    # The commit of the session, and the one that wrote the page.
    assert f"<td>{results.sessions[0]['commit'] or ''}</td>" in text
    assert "written at commit abc1234+" in text


def test_a_report_of_an_unfinished_study_says_so(tmp_path):
    study = measured_study(figures=())
    runner.run(expand(study, "smoke", tmp_path)[:1], quiet=True)
    text = report.write(study, "smoke", tmp_path).read_text()
    assert "3 trials: 1 finished, 2 not started." in text


def _cut(path):
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


def _cut_lines(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))


@pytest.mark.parametrize(
    ("name", "damage"),
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
def test_a_damaged_trial_is_listed_and_the_page_is_written(name, damage, trained):
    study = replace(TRAINED, figures=())
    hurt, whole = expand(study, "smoke", trained)
    damage(hurt.folder / name)
    text = html.unescape(report.write(study, "smoke", trained).read_text())
    assert "2 trials: 1 finished, 1 failed." in text
    failures = text.split("<h2>Failures</h2>")[1].split("</table>")[0]
    assert name in failures
    assert f"remove the folder {hurt.folder} and run the study again" in failures
    assert whole.name not in failures


def test_a_damaged_session_is_named_and_left_out(tmp_path):
    study = measured_study(figures=())
    runner.run(expand(study, "smoke", tmp_path), quiet=True)
    (session,) = (tmp_path / "small/smoke/sessions").iterdir()
    _cut(session)
    text = report.write(study, "smoke", tmp_path).read_text()
    assert f"{session} cannot be read" in text


def test_intervals_are_explained_where_there_are_any(tmp_path, written):
    assert "bootstrap intervals over repetitions" in written[2].read_text()
    between = Between(a={"r": "1", "gate": "0.5"}, low=0.0, high=1.0)
    study = measured_study(
        "exact",
        metrics=(Metric(column="error", name="error", exact=True),),
        base={},
        claims=(Claim(says="It is", where="here", tests=(between,), scales=("smoke",)),),
        scales={"smoke": Scale(seeds=1)},
        figures=(),
    )
    runner.run(expand(study, "smoke", tmp_path), quiet=True)
    assert "bootstrap intervals" not in report.write(study, "smoke", tmp_path).read_text()


def test_a_sweep_states_its_rule_and_writes_its_choice(tmp_path):
    study = measured_study(
        factors=(vary("agent", "mode", ("good",)), vary("r", "r", (1, 2))),
        selection=Selection(("r",), ("agent",)),
        figures=(),
    )
    runner.run(expand(study, "smoke", tmp_path), quiet=True)
    path = report.write(study, "smoke", tmp_path)
    rule = "For each agent: the r with the lowest mean of error, over all seeds"
    assert rule in path.read_text()
    assert json.loads((path.parent / "chosen.json").read_text()) == {"good": {"r": 2}}


def test_a_verdict_says_of_how_many_trials_it_is(tmp_path, monkeypatch):
    claim = Claim(
        says="More vectors are better.",
        where="here",
        tests=(Better(a={"r": "4"}, b={"r": "1"}),),
        scales=("smoke",),
    )
    study = measured_study("partial", claims=(claim,), figures=())
    monkeypatch.setattr(verdicts, "studies", lambda: {"partial": study})
    trials = expand(study, "smoke", tmp_path)
    runner.run(trials[::2], quiet=True)  # r=1 and r=4
    report.write(study, "smoke", tmp_path)
    (row,) = verdicts.claim_rows(tmp_path, "smoke")
    assert (row.verdict, row.seeds) == ("agrees", "5 (2 of 3 trials)")
    runner.run(trials, quiet=True)
    report.write(study, "smoke", tmp_path)
    assert verdicts.claim_rows(tmp_path, "smoke")[0].seeds == "5"
