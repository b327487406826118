"""The process and the machine: memory pages, cores, devices, signals, versions.

Imported by the command line before anything else, so JAX is imported only where it is needed.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agalite.version import __version__

# Huge pages; and freed memory is kept for the next call, of whatever thread, instead of being
# returned to the system, which would clear it.
_KEEP = 4 * 2**30
_TUNABLES = (
    "glibc.malloc.hugetlb=1",
    f"glibc.malloc.mmap_threshold={_KEEP}",
    f"glibc.malloc.trim_threshold={_KEEP}",
    "glibc.malloc.arena_max=1",
)


def with_huge_pages() -> None:
    """Restart this command with huge memory pages, if the system has them and it is not done yet.

    XLA allocates its working memory anew for every call, and with pages of 4 kB the system spends a
    fifth of a training step providing them (docs/performance.md). glibc reads these settings only
    when a process starts. AGALITE_HUGE_PAGES=0 turns this off.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    done = "glibc.malloc.hugetlb" in tunables
    if done or sys.platform != "linux" or os.environ.get("AGALITE_HUGE_PAGES") == "0":
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, *_TUNABLES]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def cores() -> int:
    """The number of CPU cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def keep_niceness() -> None:
    """Gives a process that has just begun a session the share of the cores that its nice asks for.

    Linux shares the cores between sessions first, all of them equally, and the niceness of their
    processes counts only inside (autogroups, sched(7)).
    """
    with contextlib.suppress(OSError):  # no Linux, or one without autogroups
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))


def use_devices(devices: int | None, seeds: int, *, uneven: bool = True) -> None:
    """Set the number of CPU devices of JAX, before JAX is initialised.

    **Arguments:**

    - `devices`: how many; None for one for each core, but no more than `seeds`.
    - `seeds`: how many seeds are trained together.
    - `uneven`: whether devices may have different numbers of seeds; if not, the largest divisor of
        `seeds` up to the number of cores.
    """
    import jax

    from agalite import validation

    if devices is not None:
        validation.check_integer("devices", devices, minimum=1)
    elif os.environ.get("JAX_PLATFORMS", "cpu") != "cpu" or seeds == 1:
        return
    most = min(cores(), seeds)
    count = devices or (most if uneven else max(n for n in range(1, most + 1) if seeds % n == 0))
    jax.config.update("jax_num_cpu_devices", count)


class Stopped(Exception):
    """A signal stopped the work after everything was saved. `code` is the exit code."""

    def __init__(self, number: int, folder: object = None) -> None:
        """`number` is the signal's; `folder` is that of the run, for `agalite resume`."""
        again = "" if folder is None else f": agalite resume {folder}"
        super().__init__(f"stopped by {signal.Signals(number).name}; all is saved{again}")
        self.code = 128 + number


def available_memory() -> int | None:
    """Bytes that new programs can use without swapping; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return None


def processor() -> str:
    """The name of the CPU; empty if it is not known.

    Virtual machines often name a family of processors only ("AMD EPYC"), so its numbers follow.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    first = text.split("\n\n")[0]
    facts = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*?)\s*$", first, re.MULTILINE))
    name = facts.get("model name", platform.processor())
    numbers = [f"{x.split()[-1]} {facts[x]}" for x in ("cpu family", "model") if x in facts]
    return f"{name} ({' '.join(numbers)})" if numbers else name


def commit() -> str | None:
    """The git commit of the checkout that this package is imported from.

    It ends with + if files are changed. None if the package is not imported from a checkout.
    """
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude", "*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        tracked = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # Installed inside another project's checkout, this file is not tracked there.
    return described.stdout.strip() if tracked.returncode == 0 else None


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of agalite, Python and the installed ones of `packages`."""
    found = {"agalite": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
