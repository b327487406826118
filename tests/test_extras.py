"""Optional packages and imports that are put off."""

import subprocess
import sys

import pytest

from agalite import extras


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(ValueError, match=r'drawing needs not_there: pip install "agalite\[x\]"'):
        extras.require("drawing", ["json", "not_there"], "x")


def run(code, folder):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder
    ).stdout.split()


def test_a_module_is_imported_when_it_is_used(tmp_path):
    package = tmp_path / "slow"
    package.mkdir()
    (package / "__init__.py").write_text("print('package')\n")
    (package / "part.py").write_text("print('part')\n__all__ = ['x']\nx = 3\n")
    code = """
from agalite import extras
for name in ("slow.part", "slow.part", "not_there", "not_there.part"):
    extras.import_on_use(name)
import slow.part
from slow import part
print("imported", slow.part is part)
print(part.x, part.x)
from slow.part import *
print(x, type(part).__name__)
"""
    assert run(code, tmp_path) == ["package", "imported", "True", "part", "3", "3", "3", "module"]


def test_gymnax_is_imported_without_what_it_draws_with(tmp_path):
    code = """
import sys
import agalite.envs.tmaze
print(*(name in sys.modules for name in ("gymnax", "pandas", "scipy.stats")))
import matplotlib, matplotlib.pyplot as plt, seaborn
print(seaborn.__version__ > "0", "figure" in dir(plt), callable(seaborn.lineplot))
print(matplotlib.pyplot is plt)
"""
    assert run(code, tmp_path) == ["True", "False", "False", "True", "True", "True", "True"]


def test_a_module_that_cannot_be_imported_says_why_every_time(tmp_path):
    (tmp_path / "broken.py").write_text("import not_there_at_all\n")
    code = """
from agalite import extras
extras.import_on_use("broken")
import broken
for _ in range(2):
    try:
        broken.x
    except ModuleNotFoundError as error:
        print(error.name)
"""
    assert run(code, tmp_path) == ["not_there_at_all"] * 2
