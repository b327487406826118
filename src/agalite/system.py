"""How this process uses the machine."""

import contextlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agalite.version import __version__

# Large pages; and what is freed is kept for the next call, of whatever thread, instead of being
# handed back to the system and cleared by it.
_KEEP = 4 * 2**30
_TUNABLES = (
    "glibc.malloc.hugetlb=1",
    f"glibc.malloc.mmap_threshold={_KEEP}",
    f"glibc.malloc.trim_threshold={_KEEP}",
    "glibc.malloc.arena_max=1",
)


def with_huge_pages() -> None:
    """Start this command again with large memory pages, if that is possible and not done yet.

    XLA takes its working memory anew for every call, and with pages of 4 kB the system spends a
    fifth of a training step handing them out (docs/performance.md). glibc reads these settings only
    when a process starts. AGALITE_HUGE_PAGES=0 leaves the process as it is.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    done = "glibc.malloc.hugetlb" in tunables
    if done or sys.platform != "linux" or os.environ.get("AGALITE_HUGE_PAGES") == "0":
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, *_TUNABLES]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def cores() -> int:
    """How many this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def use_devices(devices: int | None, seeds: int) -> None:
    """A CPU device for each seed, up to the cores; must come before JAX wakes up."""
    import jax

    from agalite import validation

    if devices is not None:
        validation.integer("devices", devices, minimum=1)
    elif os.environ.get("JAX_PLATFORMS", "cpu") != "cpu" or seeds == 1:
        return
    count = devices or max(n for n in range(1, cores() + 1) if seeds % n == 0)
    jax.config.update("jax_num_cpu_devices", count)


class Stopped(Exception):
    """Somebody asked the work to stop, and all is saved. `code` is for the shell."""

    def __init__(self, number: int, folder: object = None) -> None:
        """`folder`: of the run, where `agalite resume` goes on with it."""
        again = "" if folder is None else f": agalite resume {folder}"
        super().__init__(f"stopped by {signal.Signals(number).name}; all is saved{again}")
        self.code = 128 + number


# --- What a reader must know of where numbers were made -------------------------------------------


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
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        known = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=5,
        )
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
