"""The benchmark of seeds, with a run that is as small as it can be."""

import json

import pytest

from agalite.bench import seeds
from agalite.cli import main

TINY = (
    *("train", "tmaze", "--memory", "gru", "--corridor", "4", "--steps", "64", "--num-steps", "8"),
    *("--num-envs", "2", "--num-minibatches", "1", "--update-epochs", "1", "--log-every", "16"),
    *("--model.d-model", "4", "--model.hidden-size", "4", "--hidden-size", "4"),
)


@pytest.mark.slow
def test_every_way_trains_as_many_seeds_as_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(seeds, "COMMAND", TINY)
    out = tmp_path / "seeds.json"
    assert main(["bench", "seeds", "--rounds", "1", "--out", str(out)]) == 0
    one, side_by_side, together = json.loads(out.read_text())["ways"]
    cores = len(seeds.available_cores())
    assert [way["seeds"] for way in (one, side_by_side, together)] == [1, cores, cores]
    assert one["cost"] == 1
    for way in (side_by_side, together):
        speedup = way["steps_per_second"] / one["steps_per_second"]
        assert way["cost"] == pytest.approx(cores / speedup)
    assert "a seed on each core" in capsys.readouterr().out


def test_a_run_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(seeds, "COMMAND", ("train", "no-such-env"))
    with pytest.raises(ValueError, match="no-such-env"):
        seeds.train([(seeds.available_cores()[:1], 1)])


def test_one_core_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(seeds.os, "sched_getaffinity", lambda _: {0})
    assert main(["bench", "seeds"]) != 0
    assert "only one" in capsys.readouterr().err
