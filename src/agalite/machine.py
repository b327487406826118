"""What a reader must know of where numbers were made."""

import contextlib
import importlib.metadata
import platform
from collections.abc import Sequence

from agalite.version import __version__


def processor() -> str:
    """Its name, as the system gives it; empty where it has none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
            return next(names, platform.processor())
    except OSError:
        return platform.processor()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of agalite, Python, and those of the packages that are installed."""
    found = {"agalite": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
