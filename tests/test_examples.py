"""The scripts in examples/, in one process: importing JAX takes long."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ELSEWHERE = {"onnx_tmaze"}  # tests/export/test_export.py


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(name):
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow  # README's example streams too: tests/test_readme.py
def test_streaming(run):
    out = run("streaming")
    assert "2,560 floats of state" in out


@pytest.mark.slow
def test_plain_jax(run):
    assert "attention: (64, 2, 8)" in run("plain_jax")


@pytest.mark.slow  # its sister: check_memory of a user's model, tests/memory/test_contract.py
def test_custom_memory(run):
    before, after = map(float, re.findall(r"loss (\S+) -> (\S+)", run("custom_memory"))[0])
    assert after < 0.9 * before


@pytest.mark.slow  # README's example trains from Python too: tests/test_readme.py
def test_train_from_python(run):
    won = re.findall(r"(\d+) of 20 new episodes", run("train_from_python"))
    assert int(won[0]) >= 16  # without memory it is 10, on average


@pytest.mark.slow  # its sister: tests/training/test_asynchronous.py
def test_gymnasium_environment(run):
    out = run("gymnasium_environment")
    assert float(re.findall(r"'charts/episodic_return': ([\d.]+)", out)[0]) > 0.8


def test_each_example_is_run_somewhere():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested | ELSEWHERE
