"""`agalite lra` on the command line."""

import json
import shlex
import subprocess
import sys

import pytest

from agalite import cli
from agalite.supervised import data, report
from agalite.supervised.baselines import Baselines
from agalite.supervised.command import parse

WORDS = shlex.split("""
    lra listops --memory feedforward --min-length 3 --max-length=20 --train-examples 100
    --test-examples 50 --validation-examples 50 --rows 2 --row-length 64 --steps 512
    --model.layers 1 --model.d-model 16 --embedding 8 --hidden-size 8
""")


def test_steps_is_short_for_total_timesteps_and_the_preset_knows_the_length():
    choices, config = parse("text", ["--memory", "gru", "--steps", "70000"], "agalite lra text")
    assert (choices.memory, config.total_timesteps) == ("gru", 70_000)
    assert config.memory_options["horizon"] == (2.0, 4096.0)
    words = ["--max-length", "300", "--row-length", "300", "--total-timesteps", "9"]
    _, config = parse("text", words, "agalite lra text")
    assert config.total_timesteps == 9
    assert config.memory_options["horizon"] == (2.0, 300.0)
    _, config = parse("text", ["--preset", "paper", "--model.eta", "2"], "agalite lra text")
    assert (config.memory_options["horizon"], config.memory_options["eta"]) == (None, 2)


@pytest.mark.slow  # its sister: tests/supervised/test_train.py
def test_a_run_is_trained_resumed_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    # `test_train.py` fits the baselines.
    monkeypatch.setattr(report, "baselines", lambda _: Baselines(0.123, 0.234, 1.0))
    folder = str(tmp_path / "run")
    words = [*WORDS, "--out", folder]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "test accuracy" in out
    assert "100 for train, 50 for validation, 50 for test" in out
    assert cli.main(["resume", folder]) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert cli.main(words) == 2
    assert "already holds a run" in capsys.readouterr().err

    assert cli.main(["eval", folder]) == 2
    assert "is a run of `agalite lra listops`: a classifier" in capsys.readouterr().err

    page = tmp_path / "page.md"
    assert cli.main(["lra", "report", folder, "--out", str(page)]) == 0
    written = page.read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"| 1 | 512 | {summary['epochs'][0]:.2f} |" in written
    assert f"| {100 * summary['test_accuracy_mean']:.2f} |" in written
    assert "commonest class | | | | | 12.30 |" in written
    assert "39.33" in written
    assert page.with_suffix(".png").stat().st_size > 1000
    assert cli.main(["lra", "report", folder, "--out", str(tmp_path / "page.txt")]) == 2
    (tmp_path / "run" / "summary.json").unlink()
    capsys.readouterr()
    assert cli.main(["lra", "report", folder, "--out", str(page)]) == 2
    assert "has not ended" in capsys.readouterr().err


def test_parsing_leaves_the_devices_of_jax_uninitialised():
    """`--devices` and `--seeds` set the number of CPU devices after the command line is parsed."""
    code = (
        "from agalite.supervised.command import parse; import agalite.training.command, jax; "
        "parse('listops', ['--seeds', '2'], 'x'); "
        "jax.config.update('jax_num_cpu_devices', 2); assert len(jax.devices()) == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
