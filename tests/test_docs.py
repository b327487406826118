"""README, CONTRIBUTING and docs: what they print runs or parses, and what they name exists.

Python blocks of a page share one namespace and a temporary folder (slow). An HTML comment before a
block says what else to do with it: `<!-- file: NAME -->` writes it to that file, for later blocks
to import; `<!-- not run: REASON -->` skips it; `<!-- output -->` before a text block compares it
with what the blocks before it printed. Lines of sh blocks, and inline code, that begin with
`agalite` must be accepted by the parser of the command line.
"""

import contextlib
import importlib
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

import agalite
from agalite import cli
from agalite.cli import COMMANDS, Train
from agalite.supervised import command as lra

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/agalite"
PAGES = {path.name: path for path in sorted(ROOT.glob("docs/*.md"))}
PAGES |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}

_BLOCK = re.compile(r"(?:<!--\s*([^>]*?)\s*-->\n)?```(\w*)\n(.*?)```", flags=re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES)


def blocks(page, *languages):
    """(comment, language, code) of each block in one of the languages."""
    return [block for block in _BLOCK.findall(TEXTS[page]) if block[1] in languages]


def inline_code(page):
    """The code between single backticks, outside blocks."""
    text = _BLOCK.sub("", TEXTS[page])
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


# --- Python blocks --------------------------------------------------------------------------------

# README's are run by test_readme.py.
WITH_PYTHON = [page for page in PAGES if page != "README.md" and blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_compile(page):
    for note, _, code in blocks(page, "python"):
        assert not note.startswith("not run") or len(note) > len("not run: ..."), code
        compile(code, page, "exec")


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """A folder to be in; whatever the pages register is removed afterwards."""
    import gymnasium

    from agalite.envs import ENVIRONMENTS
    from agalite.memory import MODELS

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


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run_as_printed(page, clean, capsys):
    namespace = {"__name__": page}
    for note, language, code in blocks(page, "python", "text"):
        if note == "output":
            assert capsys.readouterr().out.split() == code.split()  # the page wraps lines
        elif note.startswith("file: "):
            (clean / note.removeprefix("file: ")).write_text(code, encoding="utf-8")
        elif language == "python" and not note.startswith("not run"):
            exec(compile(code, page, "exec"), namespace)


# --- command lines --------------------------------------------------------------------------------


def parse(words):
    """Raises, or exits with another code than 0, unless the command line would accept this."""
    import tyro

    from agalite.training import command

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
            command.parse(words, name)
        elif found in (lra.ListOps, lra.Text):
            lra.parse(found.task, words, name)
        else:
            assert not hasattr(found, "main"), f"say here how {name} is parsed"
            tyro.cli(found, args=words, prog=name)


@cache
def parse_once(line):
    parse(shlex.split(line))


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


def whole_commands(page):
    """Commands in inline code that have all their arguments, as words.

    Placeholders are filled in; patterns like a|b and names of commands alone are left out.
    """
    names = {"ENV": "tmaze", "M": "agalite", "RUN": "runs/NAME", "NAME": "tmaze"}
    commands = {path for path, _ in cli.all_commands(COMMANDS, ["agalite"])}
    for code in inline_code(page):
        if not code.startswith("agalite "):
            continue
        words = [names.get(word, word) for word in code.split(" [")[0].split()]
        pattern = any(mark in code for mark in ("|", "...", "COMMAND", "STUDY"))
        alone = " ".join(words) in commands or isinstance(COMMANDS.get(words[-1]), dict)
        if not alone and (not pattern or "[" in code):
            yield words


@every_page
def test_command_lines_are_accepted(page, capsys):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [words for _, _, code in blocks(page, "sh") for words in lines(code)]
    commands += [code.split() for code in inline_code(page) if code.startswith("make ")]
    commands += whole_commands(page)
    for words in commands:
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        if words[0] == "agalite":
            parse_once(shlex.join(words))
    capsys.readouterr()


def test_the_parser_of_this_test_refuses(capsys):
    parse(["agalite", "train", "tmaze", "--memory", "gru", "--model.hidden-size", "8"])
    for bad in (
        "agalite trian tmaze",
        "agalite train tmaze --memory gru --model.heads 8",
        "agalite train tmase",
        "agalite eval runs/NAME --episode 3",
        "agalite lra text --memory gru --model.eta 2",
        "agalite lra frob",
        "agalite --frob",
    ):
        with pytest.raises((AssertionError, ValueError)):
            parse(bad.split())
    capsys.readouterr()


def test_every_command_has_examples_that_are_accepted(capsys):
    for name, _ in cli.all_commands(COMMANDS, ["agalite"]):
        assert cli.EXAMPLES.get(name), f"agalite.cli.EXAMPLES lacks {name}"
        for example in cli.EXAMPLES[name]:
            (words,) = lines(example)
            assert " ".join(words).startswith(name)
            parse_once(shlex.join(words))
    capsys.readouterr()


# --- names, paths and links -----------------------------------------------------------------------

HISTORY = {"CHANGELOG.md"}  # it names what is gone
REPOSITORY = [
    path for folder in ("src", "tests", "examples") for path in ROOT.glob(f"{folder}/**/*")
]


def resolve(path):
    """The file or folder that a page means by `path`; None if there is none."""
    for root in (ROOT, ROOT / "src", PACKAGE, ROOT / "docs"):
        if (root / path).exists():
            return root / path
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_paths_exist(page):
    text = TEXTS[page]
    names = {path.name for path in REPOSITORY}
    # Files that the page itself writes: a comment, or `path`: and a block.
    new = re.findall(r"<!-- file: (\S+) -->", text) + re.findall(r"`(\S+\.py)`:\n\n```", text)
    code = [*inline_code(page), *(code for _, _, code in blocks(page, ""))]
    paths = [path for part in code for path in re.findall(r"[\w./-]+\.(?:py|h|c)\b", part)]
    paths += [path for part in code for path in re.findall(r"^(?:src|tests|docs)/[\w./-]*", part)]
    paths += re.findall(r"(?<![\w/])(?:src|tests|examples)/[\w./-]+\.py", text)
    paths += re.findall(r"(?<![\w/])results/[\w./-]*\w", "".join(_BLOCK.split(text)[::4]))
    for path in paths:
        known = path in names if "/" not in path else resolve(path)
        fine = known or Path(path).name in {Path(x).name for x in new} or "NAME" in path
        assert fine, f"{page}: {path} does not exist"


@every_page
def test_names_in_files_exist(page):
    """`path.py`, `name`: the file defines the name."""
    for path, name in re.findall(r"`([\w/.]+\.py)`, `([\w.]+)`", TEXTS[page]):
        found = resolve(path)
        if found is None or name.endswith(".py"):
            continue
        text = found.read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"\b(?:def|class) {part}\b|^{part}\b.*=", text, flags=re.MULTILINE), (
                f"{page}: {path} does not define {part}"
            )


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_dotted_names_exist(page):
    names = [name for code in inline_code(page) for name in re.findall(r"^agalite(?:\.\w+)+", code)]
    names += re.findall(r"^::: (\S+)", TEXTS[page], flags=re.MULTILINE)
    for name in names:
        assert exists(name), f"{page}: {name} does not exist"


@cache
def exists(name):
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@every_page
def test_links_resolve(page):
    text = _BLOCK.sub("", TEXTS[page])
    text = re.sub(r"`[^`]*`", "", text)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for target in targets:
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (PAGES[page].parent / name).resolve() if name else PAGES[page]
        assert path.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page}: {target}"


def slug(heading):
    """The anchor of a heading, on GitHub and on the site."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w-]+\.md)$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("docs/*.md"))


def test_direction_of_dependence():
    """Imports, lazy ones included, go only the way that architecture.md says."""
    order = ["ops", "memory", "networks", "agents", "training", "supervised"]
    last = ["studies", "bench", "export", "watch"]
    allowed = {name: {*order[: i + 1], "envs"} for i, name in enumerate(order)}
    for name in ("ops", "memory", "networks"):
        allowed[name].remove("envs")
    allowed |= {name: {*order, "envs", name} for name in last}
    allowed["envs"] = {"envs"}
    allowed["soak"] = {*allowed, "soak"}  # it disturbs all of them
    for name, fine in allowed.items():
        for path in (PACKAGE / name).rglob("*.py"):
            found = set(re.findall(r"^\s*from agalite\.(\w+)", path.read_text(), re.MULTILINE))
            assert not found & {*allowed, "cli", "api"} - fine, path


# --- numbers --------------------------------------------------------------------------------------


def stored(name):
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def test_performance_is_short_and_says_what_was_measured():
    page = TEXTS["performance.md"]
    assert len(page.split()) <= 800
    rows = []
    for row in stored("throughput-training.json")["training"]:
        share = f"{row['share_of_product_rate']:.0%}"
        speed = f"{row['steps_per_second']:,.0f}"
        rows.append(f"| {row['name']} | {row['parameters']:,} | {speed} | {share} |")
    models = stored("throughput-models.json")["training"]
    named = {"agalite's matrix products": "products"}
    for name in re.findall(r"^\| (.*?) \| [\d.]+ \| \d+ \|$", page, flags=re.MULTILINE):
        row = models[named.get(name, name)]
        megabytes = row["temporary_bytes"] / 1e6
        rows.append(f"| {name} | {row['milliseconds']:.1f} | {megabytes:.0f} |")
    steps = {row["model"]: row for row in stored("latency/latency.json")["parts"]["stream"]["rows"]}
    for name in re.findall(r"^\| (.*?) \| [\d.]+ \| [\d]+\.\d+ \|$", page, flags=re.MULTILINE):
        row = steps[name]
        rows.append(f"| {name} | {row['milliseconds']:.2f} | {row['by_reference']:.2f} |")
    assert len(rows) == 7 + 5 + 5
    for row in rows:
        assert row in page


def test_pixels_says_what_was_measured():
    page = TEXTS["pixels.md"]
    for row in stored("throughput-pixels.json")["training"]:
        speed = f"{row['steps_per_second']:,.0f}"
        assert speed in page, row["name"]
        if "share_of_product_rate" in row:
            share = f"{row['share_of_product_rate']:.0%}"
            assert f"| {row['name']} | {row['parameters']:,} | {speed} | {share} |" in page


def test_every_environment_is_on_its_page():
    from agalite.envs import ENVIRONMENTS

    for name in ENVIRONMENTS:
        if name.startswith("popgym-"):  # a family is one row of its own page
            family = name.rsplit("-", 1)[0]
            assert f"`{family}-" in TEXTS["popgym.md"], family
            continue
        size = re.sub(r"^memory-maze", "", name)  # "`memory-maze-9x9`, `-11x11`"
        assert f"`{name}`" in TEXTS["environments.md"] or f"`{size}`" in TEXTS["environments.md"]


# --- files for the repository ---------------------------------------------------------------------


def test_citation():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # the format's own
    assert citation["version"] == agalite.__version__
    (paper,) = citation["references"]
    assert {"type", "title", "authors", "year", "journal"} <= set(paper)
    assert paper["authors"][0]["family-names"] == "Pramanik"


def test_workflow_and_hooks_parse():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert any(".ci/run" in step.get("run", "") for step in steps)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert {"ruff-check", "ruff-format"} <= {
        hook["id"] for repository in hooks["repos"] for hook in repository["hooks"]
    }


# --- the site -------------------------------------------------------------------------------------


@pytest.mark.slow
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
    for name, _ in cli.all_commands(COMMANDS, ["agalite"]):
        assert f'id="{name.replace(" ", "-")}"' in reference
    plain = re.sub(r"<[^>]+>", "", reference)
    for text in ("--model.horizon", "--input-size", "agalite eval runs/NAME --greedy"):
        assert text in plain
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in re.findall(r"^::: (\S+)", TEXTS["api.md"], flags=re.MULTILINE):
        assert f'id="{name}"' in api
    assert "<strong>Arguments:</strong>" in api
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert {path.stem for path in ROOT.glob("docs/*.md")} <= pages
    for report in (ROOT / "results/studies").glob("*/*/report.html"):
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
