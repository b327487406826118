"""The command line as a user meets it, in processes of its own."""

import os
import signal
import subprocess
import sys
import time

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
    assert set(COMMANDS) == {
        "models",
        "envs",
        "train",
        "resume",
        "eval",
        "plot",
        "demo",
        "lra",
        "bench",
        "watch",
        "export",
        "study",
        "completion",
    }


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
def test_bad_input_is_answered_with_a_message_and_a_code(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_code_is_that_of_the_process():
    done = run("frob")
    assert done.returncode == 2
    assert "unknown command 'frob'" in done.stderr


# Started by Python, so that Ctrl-C is heard even where these tests run in the background.
START = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.orig_argv[1:] = ['-m', 'agalite', 'models']; sys.argv[1:] = ['models']; "
    "from agalite.__main__ import main; print('begun', flush=True); sys.exit(main())"
)


@pytest.mark.parametrize(
    ("pages", "delays"),
    [("0", (0.0, 0.1, 0.5)), ("1", (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8))],
)
def test_ctrl_c_is_answered_at_any_moment(pages, delays):
    """While this starts, starts itself again for larger pages, imports JAX, and computes."""
    for delay in delays:
        process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "AGALITE_HUGE_PAGES": pages, "GLIBC_TUNABLES": ""},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
        assert (process.returncode, error) == (130, "agalite: interrupted\n") or (
            # Later than the imports, the command itself answers; or it was done already.
            error in ("agalite models: interrupted\n", "") and process.returncode in (130, 0)
        ), f"after {delay} s"
