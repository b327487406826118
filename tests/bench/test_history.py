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


@pytest.mark.parametrize("text", ["{}", "[1]", "{", '{"machine": {}, "targets": []}'])
def test_files_without_targets_are_refused(text, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(text)
    assert cli.main(["bench", "history", str(file), "--out", str(tmp_path)]) == 2
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "history.json").exists()
