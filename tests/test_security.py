"""docs/security.md: a test for each of its sentences that no other file of tests has."""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from agalite.studies import report, runner
from agalite.studies.trials import expand
from agalite.supervised.examples import Examples, cached
from agalite.training.run import Run
from agalite.watch.page import make_page
from host_envs import small_config
from studies.small_study import measured_study

ROOT = Path(__file__).parent.parent
SOURCES = {path: ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")}
HOSTILE = "\"'><script>alert(1)</script><!--<script><img src=x onerror=alert(1)>"


def calls():
    """All calls in the package: the file, the name of the function, the keywords."""
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path, ast.unparse(node.func), {k.arg: k.value for k in node.keywords}


def test_no_shell_is_called():
    found = [(path, name) for path, name, keywords in calls() if "shell" in keywords]
    found += [
        (path, name)
        for path, name, _ in calls()
        if re.fullmatch(r"os\.(system|popen|spawn\w*)|subprocess\.get(status)?output", name)
    ]
    assert not found
    assert any(name == "subprocess.run" for _, name, _ in calls())  # they are seen


def test_nothing_that_is_read_is_unpickled_or_evaluated():
    unsafe = r"(pickle|marshal|shelve|dill|cloudpickle)\.(load|loads|Unpickler|open)|eval|exec"
    found = {path.name for path, name, _ in calls() if re.fullmatch(unsafe, name)}
    assert found == {"flops.py"}  # its own formulas, without builtins
    loads = [k for _, name, k in calls() if name in ("np.load", "numpy.load")]
    assert loads
    assert all(ast.unparse(k["allow_pickle"]) == "False" for k in loads)


def test_nothing_listens_without_ray():
    """No code of the package opens a socket; Ray's own opens its ports in programs of its own."""
    opened = re.compile(r"\.(listen|create_server|start_server|serve_forever)$|Listener|Server$")
    assert not [(path, name) for path, name, _ in calls() if opened.search(f".{name}")]
    imported = {name for tree in SOURCES.values() for name in _imports(tree)}
    assert not imported & {"socketserver", "http.server", "xmlrpc.server", "asyncio"}
    sockets = {name for _, name, _ in calls() if name.startswith("socket.")}
    assert sockets == {"socket.create_connection"}  # to a cluster of Ray


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_the_cache_of_examples_is_not_opened(tmp_path):
    path, mark = tmp_path / "set.npz", tmp_path / "mark"
    rows = np.array([_Touch(mark)], object)
    np.savez(path, tokens=rows, starts=np.array([0, 1]), labels=np.array([0]), allow_pickle=True)
    good = Examples.from_sequences([np.array([1], np.uint8)], [0])
    assert cached(path, lambda: good).tokens.tolist() == [1]
    assert not mark.exists()


def test_no_module_of_a_runs_folder_is_imported(tmp_path):
    folder = tmp_path / "run"
    config = small_config(env="gym:evil:X-v0").to_dict()
    with Run.create(folder, config):
        pass
    (folder / "evil.py").write_text("import pathlib; pathlib.Path('mark').touch()")
    command = Path(sys.executable).parent / "agalite"
    done = subprocess.run(
        [command, "eval", "."], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "the package 'evil' of 'evil:X-v0' cannot be imported" in done.stderr
    assert not (folder / "mark").exists()


def hostile(value):
    """JSON with every string made hostile."""
    if isinstance(value, dict):
        return {name: hostile(x) for name, x in value.items()}
    if isinstance(value, list):
        return [hostile(x) for x in value]
    return value + HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("pattern", ["sessions/*.json", "failures/*.json", "*/rows.json", "**/*"])
def test_a_report_escapes_every_string_of_the_files_it_reads(pattern, tmp_path):
    from agalite.studies.declaration import vary

    study = measured_study("small", vary("mode", "mode", ("good", "bad")), figures=())
    runner.run(expand(study, "smoke", tmp_path), quiet=True)
    home = tmp_path / "small/smoke"
    changed = 0
    for path in home.rglob(Path(pattern).name):
        if path.suffix == ".json" and (pattern == "**/*" or path.match(pattern)):
            path.write_text(json.dumps(hostile(json.loads(path.read_text()))))
            changed += 1
    if not changed:
        pytest.fail(f"no file is {pattern}: {[str(x) for x in home.rglob('*.json')]}")
    page = report.write(study, "smoke", tmp_path).read_text()
    assert page.count("<script>") == page.count("</script>") == 1
    for bad in ("<!--", "<img", "alert(1)</script>"):
        assert bad not in page
    if pattern != "*/rows.json":
        assert "&lt;script&gt;alert(1)" in page  # it is shown


def test_the_page_of_an_episode_escapes_every_string():
    made = make_page({"about": {"title": HOSTILE}, "layers": [{"name": HOSTILE}]})
    assert made.count("</script>") == 2
    assert "<script>alert" not in made
    assert made.count("<!--") == make_page({"about": {"title": ""}}).count("<!--")
    begin = made.index('<script id="record" type="application/json">') + 44
    record = json.loads(made[begin : made.index("</script>", begin)])
    assert record["about"]["title"] == HOSTILE  # it comes out as it went in
    script = (ROOT / "src/agalite/watch/page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_the_report_of_studies_writes_no_html_in_the_browser():
    page = (ROOT / "src/agalite/studies/page.py").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", page)


def test_the_page_names_a_test_for_every_promise():
    text = (ROOT / "docs/security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    for row in rows:
        assert row.startswith("| what |") or "tests/" in row.split("|")[3], row
    assert len(rows) >= 18
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


@pytest.mark.slow
@pytest.mark.ray
def test_a_cluster_that_is_started_here_needs_its_token():
    pytest.importorskip("ray", reason="Ray is not installed")
    code = """
        import os, subprocess, sys
        import ray
        from agalite.training.asynchronous.ray import connect
        assert connect(ray, "auto")
        address = ray.get_runtime_context().gcs_address
        visitor = (
            "import ray, sys; "
            "ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False); "
            "print('inside')"
        )
        for home, mode in ((os.environ["HOME"], "token"), (os.environ["OTHER_HOME"], "disabled")):
            try:
                done = subprocess.run(
                    [sys.executable, "-c", visitor, address],
                    env={**os.environ, "RAY_AUTH_MODE": mode, "HOME": home},
                    capture_output=True, text=True, timeout=60 if mode == "token" else 20,
                )
                print(mode, "inside" in done.stdout)
            except subprocess.TimeoutExpired:  # Ray tries again and again
                print(mode, False)
        ray.shutdown()
    """
    with tempfile.TemporaryDirectory(prefix="r") as short:  # Ray's sockets need a short path
        home, other = Path(short, "a"), Path(short, "b")
        home.mkdir()
        other.mkdir()
        variables = {
            "HOME": str(home),
            "OTHER_HOME": str(other),
            "RAY_TMPDIR": short,
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**kept, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["token True", "disabled False"]
