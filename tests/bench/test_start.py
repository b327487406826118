"""The benchmark of starts, with a run that is as small as it can be."""

import json

import pytest

from agalite.bench import start
from agalite.cli import main

TINY = (
    *("train", "tmaze", "--memory", "gru", "--corridor", "4", "--steps", "16", "--num-steps", "8"),
    *("--num-envs", "2", "--num-minibatches", "1", "--update-epochs", "1"),
    *("--model.d-model", "4", "--model.hidden-size", "4", "--hidden-size", "4"),
)


@pytest.mark.slow
def test_parts_add_up_and_a_second_start_compiles_less(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "COMMAND", TINY)
    out = tmp_path / "start.json"
    assert main(["bench", "start", "--rounds", "1", "--out", str(out)]) == 0
    cold, warm = json.loads(out.read_text())["starts"]
    for row in (cold, warm):
        assert min(row["parts"].values()) > 0
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"][0])
    compiling = "compiling, or reading the cache"
    assert warm["parts"][compiling] < cold["parts"][compiling]
    assert "seconds, warm caches" in capsys.readouterr().out


def test_a_run_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "COMMAND", ("train", "no-such-env"))
    with pytest.raises(ValueError, match="no-such-env"):
        start.time_start(tmp_path, "cold")
