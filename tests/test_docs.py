"""What README and docs print is run, or at least parsed, as it is printed; and the site builds.

Python blocks of a page share one namespace and a temporary folder. An HTML comment before a block
says what else to do with it: `<!-- file: NAME -->` writes it to that file, for later blocks to
import; `<!-- not run: REASON -->` leaves it alone. Lines of sh blocks, and inline code, that begin
with `agalite` must be accepted by the command line's own parser; the cheap ones are run.
"""

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from agalite import help
from agalite.cli import COMMANDS, Train, main
from agalite.envs import ENVIRONMENTS
from agalite.memory import MODELS
from agalite.supervised import command as lra

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")

_BLOCK = re.compile(r"(?:<!--\s*([^>]*?)\s*-->\n)?```(\w+)\n(.*?)```", flags=re.DOTALL)
CHEAP = [["agalite"], ["agalite", "--version"], ["agalite", "models"], ["agalite", "bench", "-h"]]


def blocks(page, language):
    """(comment, code) of each block; "not run" must say why."""
    found = [(note, code) for note, kind, code in _BLOCK.findall(PAGES[page]) if kind == language]
    for note, code in found:
        assert not note.startswith("not run") or len(note) > len("not run: ..."), code
    return found


# README's are run by tests/test_readme.py, each by itself.
WITH_PYTHON = [page for page in PAGES if page != "README.md" and blocks(page, "python")]


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """A folder to be in, and everything that the pages register forgotten afterwards."""
    import gymnasium

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = [(table, dict(table)) for table in (MODELS, ENVIRONMENTS, gymnasium.registry)]
    modules = set(sys.modules)
    yield tmp_path
    for table, old in before:
        table.clear()
        table.update(old)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run_as_printed(page, clean):
    namespace = {"__name__": page}
    for note, code in blocks(page, "python"):
        if note.startswith("file: "):
            (clean / note.removeprefix("file: ")).write_text(code, encoding="utf-8")
        elif not note.startswith("not run"):
            exec(compile(code, page, "exec"), namespace)  # our own text, in our own test


# --- command lines --------------------------------------------------------------------------------


def parse(words):
    """Raises, or exits with another code than 0, unless the command line would accept this."""
    import tyro

    from agalite.supervised import command as lra_options
    from agalite.training import command as options

    assert words.pop(0) == "agalite"
    if words[:1] == ["--debug"]:
        words = words[1:]
    found, path = COMMANDS, ["agalite"]
    while isinstance(found, dict):
        if not words or words[0].startswith("-"):
            assert "" in found or words in ([], ["--help"], ["-h"], ["--version"]), words
            if "" not in found:
                return
            found = found[""]
        else:
            assert words[0] in found, f"{' '.join(path)} has no command {words[0]!r}"
            found = found[words[0]]
            path.append(words.pop(0))
    name = " ".join(path)
    with _help_is_fine(" ".join([name, *words])):
        if found is Train:
            options.parse(words, name)
        elif found in (lra.ListOps, lra.Text):
            lra_options.parse(found.task, words, name)
        else:
            assert not hasattr(found, "main"), f"say here how {name} is parsed"
            tyro.cli(found, args=words, prog=name)


@contextlib.contextmanager
def _help_is_fine(line):
    """tyro ends the program after --help, with 0, and after a mistake, with another code."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise ValueError(f"not accepted: {line}") from end


def lines(text):
    """Command lines of a sh block, as words: continued lines joined, variables filled in, comments
    and pipes cut off."""
    values = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$(\w+)", lambda found: values.get(found[1], found[0]), line)
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            name, _, values[name] = words.pop(0).partition("=")
        for stop in (">", "|", "&&"):
            words = words[: words.index(stop)] if stop in words else words
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def inline(text):
    """Whole commands in inline code; placeholders are filled in, patterns like a|b left out."""
    text = _BLOCK.sub("", text)
    for code in re.findall(r"(?<!`)`(agalite [^`]+)`(?!`)", text):
        words = " ".join(code.split()).split(" [")[0].split()
        names = {"ENV": "tmaze", "M": "agalite", "RUN": "runs/NAME", "NAME": "tmaze"}
        words = [names.get(word, word) for word in words]
        if not any(mark in code for mark in ("|", "...", "COMMAND", "STUDY")) or "[" in code:
            yield words


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_are_accepted(page, capsys):
    commands = [words for _, code in blocks(page, "sh") for words in lines(code)]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for words in commands:
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        if words[0] == "agalite":
            parse(list(words))
    for words in inline(PAGES[page]):
        if len(words) > 2 or words[1] not in COMMANDS or not isinstance(COMMANDS[words[1]], dict):
            _complete(words)
    capsys.readouterr()


def _complete(words):
    """Inline code names a command more often than it gives all its arguments."""
    name = " ".join(word for word in words[:3] if not word.startswith("-"))
    commands = {path for path, _ in help.leaves(COMMANDS, ["agalite"])}
    matching = [path for path in commands if name.startswith(path)]
    if not any(words == path.split() for path in matching):
        parse(list(words))


def test_the_parser_of_this_test_refuses(capsys):
    parse(["agalite", "train", "tmaze", "--memory", "gru", "--model.hidden-size", "8"])
    for bad in (
        "agalite trian tmaze",
        "agalite train tmaze --memory gru --model.heads 8",
        "agalite train tmase",
        "agalite eval runs/NAME --episode 3",
        "agalite lra text --memory gru --model.eta 2",
        "agalite lra",
        "agalite --frob",
    ):
        with pytest.raises((AssertionError, ValueError)):
            parse([*bad.split(), *([] if bad != "agalite lra" else ["frob"])])
    capsys.readouterr()


@pytest.mark.parametrize("name", [name for name, _ in help.leaves(COMMANDS, ["agalite"])])
def test_every_command_has_examples_that_are_accepted(name, capsys):
    assert help.EXAMPLES.get(name), f"agalite.help.EXAMPLES lacks {name}"
    for example in help.EXAMPLES[name]:
        (words,) = lines(example)
        assert " ".join(words).startswith(name)
        parse(words)
    capsys.readouterr()


@pytest.mark.parametrize("words", CHEAP, ids=" ".join)
def test_cheap_commands_run(words, capsys):
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip()


# --- the site -------------------------------------------------------------------------------------


def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("latex2mathml")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)  # raises at a warning
    reference = (tmp_path / "commands.html").read_text(encoding="utf-8")
    for name, _ in help.leaves(COMMANDS, ["agalite"]):
        assert f'id="{name.replace(" ", "-")}"' in reference
    plain = re.sub(r"<[^>]+>", "", reference)
    for text in ("--model.horizon", "--input-size", "agalite eval runs/NAME --greedy"):
        assert text in plain
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in ("agalite.ops.attention.agalite_attention", "agalite.interop.flax.NNXMemory"):
        assert f'id="{name}"' in api
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert {Path(page).stem for page in PAGES if page != "README.md"} <= pages
    for report in (ROOT / "results/studies").glob("*/report.html"):
        assert (tmp_path / report.relative_to(ROOT)).read_bytes() == report.read_bytes()
    # Nothing is fetched from elsewhere, and the equations are drawn without a script.
    foreign = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)')
    for page in tmp_path.glob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not foreign.findall(html), page.name
        assert "arithmatex" not in html, page.name
    identities = (tmp_path / "identities.html").read_text(encoding="utf-8")
    assert identities.count("<math") > 50
    assert "$" not in re.sub(r"<(script|pre|code).*?</\1>", "", identities, flags=re.DOTALL)
