"""The command line as a user meets it: overview, errors, completion, Ctrl-C."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import agalite
from agalite import cli
from agalite.cli import COMMANDS, main


def run(*arguments):
    command = [sys.executable, "-m", "agalite.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_overview_names_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.index("agalite demo") < out.index("agalite train tmaze --memory agalite")
    assert out.index("agalite train tmaze --memory agalite") < out.index("agalite models")
    for name, command in cli.all_commands(COMMANDS, ["agalite"]):
        assert name in out
        assert cli.summary(command), name
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "throughput" in out
    assert "Start here" not in out


def test_the_overview_imports_nothing_heavy():
    program = (
        "import sys; from agalite.cli import main; main(['--help']); "
        "heavy = {'jax', 'equinox', 'numpy', 'gymnax', 'gymnasium', 'matplotlib', 'optax'}; "
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == agalite.__version__


def test_every_help_ends_with_examples(capsys):
    for words in (["models"], ["envs", "show"], ["train"], ["bench", "cost"]):
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        assert end.value.code == 0
        name = " ".join(["agalite", *words])
        assert capsys.readouterr().out.rstrip().endswith(cli.EXAMPLES[name][-1])


def test_models_prints_the_table():
    done = run("models", "--input-size", "16")
    assert done.returncode == 0, done.stderr
    for text in ("1,740,608", "5,120", "agalite", "gtrxl", "feedforward"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob"], "unknown command 'frob'; known: models, presets, envs, train"),
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
def test_bad_input_is_answered_with_a_message_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


class Broken:
    """A command that fails: with an error of the user, or with a bug."""

    @staticmethod
    def main(words, _name):
        if words == ["value"]:
            raise ValueError("depth=-1 must be a whole number >= 0")
        raise TypeError("no such thing\nand more")


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_reported_in_one_line(capsys, monkeypatch, debug):
    monkeypatch.setitem(COMMANDS, "broken", Broken)
    first = ["--debug"] if debug else []
    assert main([*first, "broken", "type"]) == 1
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith("agalite broken: this is a bug in agalite: TypeError: ")
    assert "agalite --debug broken" in last
    assert ("Traceback" in error) == debug
    assert debug or error.count("\n") == 1


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_of_the_user_is_reported_in_one_line(capsys, monkeypatch, debug):
    monkeypatch.setitem(COMMANDS, "broken", Broken)
    after = ["--debug"] if debug else []  # before the command or after it
    assert main(["broken", "value", *after]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == "agalite broken: depth=-1 must be a whole number >= 0"
    assert ("Traceback" in error) == debug


def test_a_closed_pipe_is_no_error():
    """As in `agalite models --help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "agalite", "models", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_another_broken_pipe_is_an_error(capsys, monkeypatch):
    def fail(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(Broken, "main", staticmethod(fail))
    monkeypatch.setitem(COMMANDS, "broken", Broken)
    assert main(["broken"]) == 2
    assert "Broken pipe" in capsys.readouterr().err


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """tyro's completion scripts, which hold all the words and need no import of agalite."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        done = run("completion", shell)
        assert done.returncode == 0, done.stderr
        (folder / shell).write_text(done.stdout, encoding="utf-8")
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(scripts):
    cases = {
        "tra": ["train"],
        "train tmaze --mem": ["--memory"],
        "envs sh": ["show"],
        "eval runs/NAME --gr": ["--greedy"],
        "bench throughput --memory-m": ["--memory-maze"],
    }
    program = [f"source {scripts / 'bash'}"]
    for typed in cases:
        words = " ".join(f"'{word}'" for word in typed.split(" "))
        count = len(typed.split(" "))
        program.append(f"COMP_WORDS=(agalite {words}); COMP_CWORD={count}; _tyro_agalite")
        program.append('echo "${COMPREPLY[@]}"')
    done = subprocess.run(
        ["bash", "-c", "\n".join(program)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == list(cases.values())


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_the_zsh_script_is_valid(scripts):
    subprocess.run(["zsh", "-n", str(scripts / "zsh")], check=True)


# Started by Python, so that Ctrl-C is heard even where these tests run in the background. Until
# `main` unblocks it, a signal waits: before that it would be Python that answers.
START = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); "
    "sys.orig_argv[1:] = ['-m', 'agalite', 'models']; sys.argv[1:] = ['models']; "
    "from agalite.__main__ import main; print('begun', flush=True); sys.exit(main())"
)


@pytest.mark.parametrize(
    ("pages", "delays"),
    [
        ("0", (0.0, 0.3)),
        pytest.param("0", (0.1, 0.5), marks=pytest.mark.slow),
        pytest.param("1", (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8), marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_is_answered_at_any_moment(pages, delays):
    """While the process starts, restarts itself with large pages, imports JAX, or computes."""
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
            # After the imports the command itself answers, or it has finished.
            error in ("agalite models: interrupted\n", "") and process.returncode in (130, 0)
        ), f"after {delay} s"
