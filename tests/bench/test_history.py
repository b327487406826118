"""`agalite bench history`: ratios over versions."""

import json

import pytest

from agalite import cli


def result(path, commit, value, cpu="A", limit=">= 1"):
    path.write_text(
        json.dumps(
            {
                "machine": {"agalite": "0.1.0", "commit": commit, "cpu": cpu},
                "targets": [{"what": "speed", "value": value, "limit": limit, "holds": True}],
            }
        )
    )
    return str(path)


def history(tmp_path, *files):
    assert cli.main(["bench", "history", *files, "--out", str(tmp_path / "out")]) == 0
    return (tmp_path / "out" / "history.md").read_text()


def test_a_regression_on_the_same_processor_is_marked(tmp_path):
    file = tmp_path / "models.json"
    for commit, value, cpu in (("a", 2.0, "A"), ("b", 1.5, "B"), ("c", 1.5, "A"), ("d", 1.45, "A")):
        page = history(tmp_path, result(file, commit, value, cpu))
    assert "## models" in page
    assert "| speed | >= 1 | 2 | 1.5 | **1.5** | 1.45 |" in page


def test_less_is_better_where_the_target_is_an_upper_limit(tmp_path):
    file = tmp_path / "models.json"
    history(tmp_path, result(file, "a", 2.0, limit="<= 3"))
    history(tmp_path, result(file, "b", 1.0, limit="<= 3"))
    assert "| 2 | 1 | **2** |" in history(tmp_path, result(file, "c", 2.0, limit="<= 3"))


def test_a_commit_measured_again_replaces_its_entry(tmp_path):
    file = tmp_path / "models.json"
    history(tmp_path, result(file, "a", 2.0))
    assert "| speed | >= 1 | 3 |\n" in history(tmp_path, result(file, "a", 3.0))


def test_a_benchmark_that_says_its_name_is_found_under_it(tmp_path):
    file = tmp_path / "mine.json"
    stored = json.loads((result(file, "a", 2.0) and file).read_text())
    file.write_text(json.dumps({**stored, "benchmark": "start"}))
    page = history(tmp_path, str(file))
    assert "## start" in page
    assert "mine" not in page


@pytest.mark.parametrize(
    "target",
    [
        {"what": 1, "value": 2.0, "limit": ">= 1"},
        {"what": "a", "value": "x", "limit": ">= 1"},
        {"what": "a", "value": float("nan"), "limit": ">= 1"},
        {"what": "a", "value": 2.0, "limit": None},
    ],
)
def test_targets_that_cannot_be_shown_are_refused_and_not_kept(target, tmp_path, capsys):
    out = tmp_path / "out"
    history(tmp_path, result(tmp_path / "good.json", "a", 2.0))
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"machine": {}, "targets": [target]}))
    before = (out / "history.json").read_bytes()
    assert cli.main(["bench", "history", str(bad), "--out", str(out)]) == 2
    assert str(bad) in capsys.readouterr().err
    assert (out / "history.json").read_bytes() == before
    (out / "history.json").write_text('{"entries": [{"benchmark": 3}]}')
    assert cli.main(["bench", "history", "--out", str(out)]) == 2
    assert "history.json is damaged" in capsys.readouterr().err


def test_an_empty_history_is_refused(tmp_path, capsys):
    assert cli.main(["bench", "history", "--out", str(tmp_path / "none")]) == 2
    assert "name result files" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("text", ["{}", "[1]", "{", '{"machine": {}, "targets": []}'])
def test_files_without_targets_are_refused(text, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(text)
    assert cli.main(["bench", "history", str(file), "--out", str(tmp_path)]) == 2
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "history.json").exists()
