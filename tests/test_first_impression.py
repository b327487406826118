"""The command line before it does anything: overview, errors, completion, a quick start."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

from agalite import cli, completion, help
from agalite.cli import COMMANDS, main


def run(*arguments, **options):
    command = [sys.executable, "-m", "agalite", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )


def test_alone_it_says_where_to_begin(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.index("agalite demo") < out.index("agalite train tmaze --memory agalite")
    assert out.index("agalite train tmaze --memory agalite") < out.index("agalite models")
    for name, command in help.leaves(COMMANDS, ["agalite"]):
        assert name in out
        assert help.summary(command), name
    assert main(["bench"]) == 0
    assert "Begin with" not in capsys.readouterr().out


def test_help_comes_at_once():
    """What takes a second to import is not imported; the time itself depends on the machine."""
    program = (
        "import sys; from agalite.cli import main; main(['--help']); "
        "heavy = {'jax', 'equinox', 'numpy', 'gymnax', 'gymnasium', 'matplotlib', 'optax'}; "
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    start = os.times()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    end = os.times()
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    used = end.children_user + end.children_system - start.children_user - start.children_system
    assert used < 0.5, f"{used:.2f} s of processor time"


def test_every_help_ends_with_examples(capsys):
    for words in (["models"], ["envs", "show"], ["train"], ["bench", "cost"]):
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        assert end.value.code == 0
        name = " ".join(["agalite", *words])
        assert capsys.readouterr().out.rstrip().endswith(help.EXAMPLES[name][-1])


class Broken:
    """Fails in a way that nobody foresaw."""

    @staticmethod
    def main(words, _name):
        if words == ["value"]:
            raise ValueError("depth=-1 must be a whole number >= 0")
        raise TypeError("no such thing\nand more")


@pytest.mark.parametrize("debug", [False, True])
def test_an_unforeseen_error_is_one_line_and_says_so(capsys, monkeypatch, debug):
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
def test_a_foreseen_error_is_the_user_s(capsys, monkeypatch, debug):
    monkeypatch.setitem(COMMANDS, "broken", Broken)
    after = ["--debug"] if debug else []  # before the command or after it
    assert main(["broken", "value", *after]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == "agalite broken: depth=-1 must be a whole number >= 0"
    assert ("Traceback" in error) == debug


def test_nobody_reads_on():
    """As `agalite models --help | head -1`: no complaint."""
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
    assert cli.main(["broken"]) == 2
    assert "Broken pipe" in capsys.readouterr().err


# --- completion -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        (folder / shell).write_text(completion.script(shell, COMMANDS), encoding="utf-8")
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(scripts):
    cases = {
        "tra": ["train"],
        "train tm": ["tmaze"],
        "train tmaze --mem": ["--memory"],
        "train tmaze --memory gr": ["gru"],
        "train tmaze --model.con": ["--model.context"],
        "envs ": ["show"],
        "--debug ev": ["eval"],
        "eval runs/NAME --gr": ["--greedy"],
        "completion ": ["bash", "zsh"],
        "bench throughput --memory-m": ["--memory-maze"],
        "plot ru": [],  # then bash itself completes names of files
    }
    program = [f"source {scripts / 'bash'}"]
    for typed in cases:
        words = " ".join(f"'{word}'" for word in typed.split(" "))
        count = len(typed.split(" "))
        program.append(f"COMP_WORDS=(agalite {words}); COMP_CWORD={count}; _agalite")
        program.append('echo "${COMPREPLY[@]}"')
    done = subprocess.run(
        ["bash", "-c", "\n".join(program)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == list(cases.values())


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(scripts):
    """In a terminal of its own, by the tab key."""
    terminal, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", "PS1": "$ "},
    )
    os.close(theirs)

    def until(text):
        out, end = "", time.monotonic() + 60
        while text not in out and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                out += os.read(terminal, 65536).decode(errors="replace")
        assert text in out, out

    try:
        source = f"autoload -U compinit; compinit -D; source {scripts / 'zsh'}; echo rea''dy\n"
        os.write(terminal, source.encode())
        until("ready")
        for typed, completed in (
            ("agalite tra", "train"),
            (" tm", "tmaze"),
            (" --mem", "--memory"),
            (" gt", "gtrxl"),
        ):
            os.write(terminal, f"{typed}\t".encode())
            until(completed)
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def test_completion_without_the_extras(monkeypatch):
    """Without them `train` has no options to tell; all the rest is completed."""

    def missing(what, *_):
        raise ValueError(f"{what} needs optax")

    monkeypatch.setattr("agalite.extras.require_training", missing)
    script = completion.script("bash", {"train": COMMANDS["train"], "models": COMMANDS["models"]})
    assert "--input-size" in script
    assert "--corridor" not in script
