"""The command line as a user meets it, in processes of its own."""

import subprocess
import sys

import pytest

import agalite
from agalite.cli import COMMANDS, main


def run(*arguments):
    command = [sys.executable, "-m", "agalite.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_alone_it_says_what_there_is(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("agalite models", "agalite bench throughput", "--help"):
        assert command in out
    assert set(COMMANDS) == {"models", "envs", "train", "resume", "eval", "plot", "bench"}


def test_help_and_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == agalite.__version__
    assert main(["bench", "--help"]) == 0
    assert "throughput" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["models", "--help"])
    assert stop.value.code == 0


def test_models_prints_the_table():
    done = run("models", "--input-size", "16")
    assert done.returncode == 0, done.stderr
    for text in ("1,740,608", "5,120", "agalite", "gtrxl", "feedforward"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob"], "unknown command 'frob'; known: models, envs, train"),
        (["bench", "frob"], "unknown command 'frob'; known: throughput"),
        (["models", "--input-size", "0"], "input_size=0 must be a whole number >= 1"),
        (
            ["bench", "throughput", "--models", "--rounds", "0"],
            "rounds=0 must be a whole number >= 1",
        ),
        (["bench", "throughput"], "choose one part to measure"),
        (["envs", "sow"], "unknown command 'sow'; known: show"),
        (
            ["bench", "throughput", "--envs", "--out", "/nowhere/x.json"],
            "'/nowhere' does not exist",
        ),
    ],
)
def test_bad_input_is_answered_with_a_message_and_a_code(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
