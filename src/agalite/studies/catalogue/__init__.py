"""The studies, declared in one short file per experiment of the paper.

To add one, write a file with a tuple `STUDIES` and name it in `_FILES`; docs/studies.md has a
worked example.
"""

import importlib

from agalite import validation
from agalite.studies.declaration import Study

_FILES = (
    "tmaze",
    "cartpole",
    "tuning",
    "bars",
    "mystery_path",
    "craftax",
    "memory_maze",
    "ablations",
    "approximation_error",
    "bases",
    "horizon",
    "gtrxl_window",
    "lra",
    "latency",
    "cost",
)


def studies() -> dict[str, Study]:
    """All studies by name, in the order of the paper."""
    found: dict[str, Study] = {}
    for file in _FILES:
        module = importlib.import_module(f"{__name__}.{file}")
        found.update((study.name, study) for study in module.STUDIES)
    return found


def find(name: str) -> Study:
    """The study of this name; ValueError with the known names if there is none."""
    known = studies()
    validation.check_one_of("study", name, known)
    return known[name]
