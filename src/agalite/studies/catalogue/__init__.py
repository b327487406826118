"""The studies, declared in one short file per experiment of the paper.

To add one, write a file with a tuple `STUDIES` and name it in `_FILES`; docs/studies.md has a
worked example.
"""

import importlib

from agalite import validation
from agalite.studies.declaration import Measurement, Study

_FILES = (
    "tmaze",
    "cartpole",
    "tuning",
    "bars",
    "stream",
    "mystery_path",
    "craftax",
    "memory_maze",
    "ablations",
    "approximation_error",
    "bases",
    "horizon",
    "rtrl",
    "gtrxl_window",
    "memory_models",
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


def in_order(scale: str) -> list[Study]:
    """The studies that have a scale, in the order in which `agalite study run --all` runs them.

    Measurements first, which take minutes, then sweeps, whose choices the other studies use, then
    the paper's experiments, and what is not in the paper last.
    """
    found = [study for study in studies().values() if scale in study.scales]

    def rank(study: Study) -> int:
        if isinstance(study.kind, Measurement):
            return 0
        if study.paper == "ours":
            return 3
        return 1 if study.selection is not None else 2

    return sorted(found, key=rank)


def find(name: str) -> Study:
    """The study of this name; ValueError with the known names if there is none."""
    known = studies()
    validation.check_one_of("study", name, known)
    return known[name]
