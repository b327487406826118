"""Every study at smoke scale, from its declaration to its page. Minutes; `test_report.py` and
`test_trials.py` take one tiny training study the same way."""

import html
import json

import pytest

from agalite.envs import ENVIRONMENTS
from agalite.envs.memory_maze import headless
from agalite.studies import catalogue, report, runner
from agalite.studies._wording import count_of
from agalite.studies.trials import expand
from chromium import needs_chromium, open_page

pytestmark = pytest.mark.slow


def _obstacle(name):
    """Why this study cannot run here; empty if it can."""
    if name.startswith("memory-maze"):
        spec = ENVIRONMENTS["memory-maze-9x9"]
        if spec.missing_packages():
            return spec.install_hint
        try:
            headless.select_backend()
        except RuntimeError as error:
            return str(error)
    spec = ENVIRONMENTS["craftax-symbolic"]
    if name.startswith("craftax") and spec.missing_packages():
        return spec.install_hint
    return ""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", list(catalogue.studies()))
def test_a_study_runs_and_reports(name, out):
    if obstacle := _obstacle(name):
        pytest.skip(obstacle)
    study = catalogue.find(name)
    trials = expand(study, "smoke", out)
    outcomes = runner.run(trials, quiet=True)
    if any("pip could not download" in outcome.message for outcome in outcomes):
        pytest.skip("the reviews cannot be downloaded here")
    assert [o.state for o in outcomes] == ["finished"] * len(trials), outcomes
    page = report.write(study, "smoke", out)
    text = page.read_text()
    assert f"{count_of(len(trials), 'trial')}: {len(trials)} finished." in text
    assert text.count("<svg") == len(study.figures)
    assert len(list((page.parent / "figures").iterdir())) == len(study.figures)
    for claim in study.claims:
        assert html.escape(claim.where) in text
    found = json.loads((page.parent / "numbers.json").read_text())
    main = study.metrics[0].column
    assert all(row[main]["seeds"] for row in found["points"]), found["points"]
    if study.selection is not None:
        chosen = json.loads((page.parent / "chosen.json").read_text())
        assert set(chosen) == {trial.levels["agent"] for trial in trials}
        assert all("agent.learning_rate" in settings for settings in chosen.values())
    assert runner.run(trials, quiet=True) == []


@needs_chromium
def test_a_page_with_learning_curves_works_in_a_browser(out):
    study = catalogue.find("tmaze")
    runner.run(expand(study, "smoke", out), quiet=True)
    path = report.write(study, "smoke", out)
    with open_page(path) as page:
        sizes = page.evaluate(
            "[...document.querySelectorAll('figure svg')]"
            ".map(s => [s.getBoundingClientRect().width, s.getBoundingClientRect().height])"
        )
        assert len(sizes) == 2
        assert all(width > 400 and height > 250 for width, height in sizes)
        words = page.evaluate("document.querySelector('figure svg').textContent")
        assert "agalite" in words
        assert "corridor" in words
        assert page.requests == [path.resolve().as_uri()]
        assert page.console_errors == []
