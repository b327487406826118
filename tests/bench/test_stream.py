"""`agalite bench stream`: the speed of streaming agents and a long stream."""

import json

import numpy as np
import pytest

from agalite.bench import stream
from agalite.bench.command import Stream


def test_bad_options_are_explained():
    with pytest.raises(ValueError, match="rounds=0"):
        Stream(rounds=0).run()
    with pytest.raises(ValueError, match="steps=-1"):
        Stream(steps=-1).run()
    with pytest.raises(ValueError, match=r"widths=\(64, 33\) must be even"):
        Stream(widths=(64, 33)).run()


@pytest.mark.slow
def test_it_measures_speed_and_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stream, "LONG_WIDTH", 8)
    out = tmp_path / "stream.json"
    stream.run(rounds=1, steps=10_000, out=out, widths=(8,))
    results = json.loads(out.read_text())
    assert [row["agent"] for row in results["speeds"]] == list(stream.AGENTS)
    assert all(row["steps_per_second"] > 0 for row in results["speeds"])
    assert all(row["steps_per_core_second"] > 0 for row in results["speeds"])
    assert [part["steps"] for part in results["long"]] == list(range(1000, 10_001, 1000))
    assert all(part["not_finite"] == 0 for part in results["long"])
    norms = np.array([part["weight_norm"] for part in results["long"]])
    assert ((norms > 0) & (norms < 1000)).all()  # without the count of observations
    assert "width 8" in capsys.readouterr().out
