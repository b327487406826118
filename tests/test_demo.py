"""`agalite demo`, which `make train` runs."""

import json

import pytest

from agalite import cli, demo
from agalite.training import presets

TINY = ["--corridor", "2", "--steps", "4096", "--seeds", "1"]


SIZES = {
    "agalite": {"d_model": 16, "layers": 1, "heads": 1, "head_size": 8, "ffn_size": 16},
    "feedforward": {"d_model": 16, "layers": 1, "ffn_size": 16},
}


@pytest.fixture(scope="module", autouse=True)
def small_models():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "SMALL", SIZES)
        patch.setattr(demo, "EPISODES", 64)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "here"
    assert cli.main(["demo", "--out", str(out), *TINY]) == 0
    return out


def test_both_agents_are_scored_and_shown(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert [agent["memory"] for agent in summary["agents"]] == ["agalite", "feedforward"]
    for agent in summary["agents"]:
        assert 0 <= agent["success"][0] <= 1
        assert agent["steps"] == 4096
    assert (folder / "curve.png").stat().st_size > 1000
    assert (folder / "episode.gif").read_bytes().startswith(b"GIF")


def test_a_second_call_trains_nothing(folder, capsys):
    before = (folder / "agalite" / "metrics.csv").stat().st_mtime_ns
    assert cli.main(["demo", "--out", str(folder), *TINY]) == 0
    assert (folder / "agalite" / "metrics.csv").stat().st_mtime_ns == before
    assert "already trained" in capsys.readouterr().out


def test_other_settings_in_the_same_folder_are_refused(folder, capsys):
    assert cli.main(["demo", "--out", str(folder), *TINY, "--seed", "7"]) == 2
    assert "other settings; remove it" in capsys.readouterr().err


def test_both_agents_get_the_same_settings():
    ours, control = (demo.config(name, 20, 1000, 2, 0).to_dict() for name in demo.AGENTS)
    for name in ours.keys() - {"memory", "memory_options"}:
        assert ours[name] == control[name], name
