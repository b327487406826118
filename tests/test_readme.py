"""The README: its length, its example as printed, and its table of models."""

import json
import re
from pathlib import Path

import pytest

from agalite.memory.registry import model_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS_PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
PAPER = ("agalite", "galite", "linear", "transformer", "gtrxl", "gru", "lstm", "feedforward")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
TIMED = {  # our name -> the row of results/latency/latency.json
    "agalite": "agalite(4,1)",
    "galite": "galite(4)",
    "linear": "linear",
    "gtrxl": "gtrxl-128, cached",
    "gru": "gru",
    "lstm": "lstm",
}


def test_length():
    assert len(README.split()) <= 900


def test_example_runs_as_printed(capsys):
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 15
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    difference, floats = capsys.readouterr().out.splitlines()
    assert float(difference.split()[-1]) < 1e-5
    assert int(floats.split()[-1]) == 5120


@pytest.mark.slow
def test_other_examples_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them trains, into runs/
    assert len(BLOCKS) > 1
    for block in BLOCKS[1:]:
        exec(compile(block, "README.md", "exec"), {})


def test_table_of_models():
    stored = json.loads((ROOT / "results/latency/latency.json").read_text(encoding="utf-8"))
    times = {row["model"]: row for row in stored["parts"]["stream"]["rows"]}
    rows = {name: (parameters, state) for name, parameters, state, *_ in model_rows(16)}
    for name, (parameters, state) in rows.items():
        if name not in PAPER:  # the README names them, their table is on a page of its own
            assert f"`{name}`" in README
            assert f"| `{name}` | {parameters:,} | {state:,} |" in MODELS_PAGE
            continue
        step = f"{times[TIMED[name]]['by_reference']:.2f} " if name in TIMED else ""
        assert f"| `{name}` | {parameters:,} | {state:,} | {step}|" in README
    assert f"AGaLiTe's {times['agalite(4,1)']['milliseconds']:.2f} ms" in README
    assert f"{times['gtrxl-128']['by_reference']:.2f} without" in README
