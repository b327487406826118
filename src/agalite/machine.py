"""What a reader must know of where numbers were made."""

import contextlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agalite.version import __version__


def processor() -> str:
    """Its name, as the system gives it; empty where it has none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
            return next(names, platform.processor())
    except OSError:
        return platform.processor()


def commit() -> str | None:
    """Of the checkout that this package is imported from, with a + where files are changed; None
    where it is installed without one."""
    here = Path(__file__).parent
    try:
        said = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude", "*"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
        known = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True, timeout=5,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    # A package inside somebody else's repository is not of its commit.
    return said.stdout.strip() if known.returncode == 0 else None


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of agalite, Python, and those of the packages that are installed."""
    found = {"agalite": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
