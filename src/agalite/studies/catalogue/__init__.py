"""Every study there is: one short file each, in this folder. To add one, write the file and name it
here (docs/studies.md has a worked example)."""

import importlib

from agalite import validation
from agalite.studies.declaration import Study

_FILES = (
    "tmaze",
    "cartpole",
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
    """By name, in the order of the paper."""
    found: dict[str, Study] = {}
    for file in _FILES:
        module = importlib.import_module(f"{__name__}.{file}")
        found.update((study.name, study) for study in module.STUDIES)
    return found


def find(name: str) -> Study:
    known = studies()
    validation.one_of("study", name, known)
    return known[name]
