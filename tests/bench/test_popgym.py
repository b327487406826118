"""The benchmark of POPGym beside the package, as small as it can be."""

import json

import pytest

from agalite.cli import main

pytest.importorskip("popgym")


@pytest.mark.slow
def test_both_are_timed(tmp_path, capsys):
    out = tmp_path / "popgym.json"
    options = ["--families", "RepeatFirst", "--num-envs", "8", "--num-steps", "4", "--rounds", "2"]
    assert main(["bench", "popgym", *options, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    (row,) = found["environments"].values()
    assert len(row["steps_per_second"]) == len(row["package"]) == 2
    assert min(row["steps_per_second"] + row["package"]) > 0
    assert [t["what"] for t in found["targets"]] == ["popgym-repeat-first-easy / popgym"]
    assert "popgym-repeat-first-easy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--difficulties", "trivial"], "difficulty='trivial' is unknown"),
        (["--families", "Repeat"], "family='Repeat' is unknown"),
        (["--rounds", "0"], "rounds=0 must be a whole number >= 1"),
    ],
)
def test_bad_options_are_explained(options, words, capsys):
    assert main(["bench", "popgym", *options]) == 2
    assert words in capsys.readouterr().err
