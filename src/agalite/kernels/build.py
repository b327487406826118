"""Builds the C sources into a shared library for each type of numbers, once, and loads it.

A library is built on first use for the present processor and kept in the user's cache folder. Its
name is a digest of the sources, the compiler and the processor.

What is loaded runs with the user's rights, so a library is taken from the cache only if its folder
and the file belong to the user and nobody else can write to them. Otherwise it is built for this
process alone, in a private temporary folder, with a warning.
"""

import atexit
import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import jax

from agalite import files

SOURCES = Path(__file__).parent
HANDLERS = (
    "product",
    "agalite_forward",
    "agalite_backward",
    "agalite_trace",
    "agalite_trace_gradient",
    "eligibility",
    "eligibility_update",
    "galite_forward",
    "galite_backward",
    "stack",
    "convolution_forward",
    "convolution_images",
    "convolution_weights",
    "sparse_forward",
    "sparse_weights",
    "bits_forward",
    "bits_weights",
)
# No -ffast-math: it lets compilers assume that there are no infinities, and when it is linked some
# of them switch denormals off for the whole process.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
)
_SECONDS = 120


class Unavailable(RuntimeError):
    """There are no kernels; the message is the reason, as a sentence."""


def compilers() -> list[list[str]]:
    """Commands that compile C in order of preference: $CC, the system's, PyPI's ziglang."""
    found = [os.environ["CC"].split()] if os.environ.get("CC") else []
    found += [[path] for name in ("gcc", "clang", "cc") if (path := shutil.which(name))]
    if find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def load(bits: int = 32, folder: Path | None = None) -> ctypes.CDLL:
    """Loads the library, or builds it first.

    **Arguments:**

    - `bits`: 32 for the kernels of float32, 64 for those of float64.
    - `folder`: where libraries are kept; None is the user's cache.
    """
    if sys.platform == "win32":
        raise Unavailable("the kernels are written for Linux and macOS")
    commands = compilers()
    if not commands:
        raise Unavailable("there is no C compiler (gcc, clang, or: pip install 'agalite[native]')")
    folder = cache_folder() if folder is None else folder
    if (why := not_private(folder)) is not None:
        warnings.warn(
            f"the kernels are built for this process only: {why}; make it yours alone "
            "(chmod go-w) or name another cache with XDG_CACHE_HOME",
            stacklevel=2,
        )
        folder = _temporary_folder()
    complaints = []
    for command in commands:
        try:
            return _opened(_found(command, bits, folder) or _built(command, bits, folder))
        except (OSError, subprocess.SubprocessError, Unavailable) as error:
            complaints.append(f"{' '.join(command)}: {error}")
    raise Unavailable("no C compiler could build them: " + "; ".join(complaints))


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in HANDLERS:
        if not hasattr(library, f"agalite_{name}"):
            raise Unavailable(f"{path} has no agalite_{name}")
    return library


def cache_folder() -> Path:
    """Where libraries are kept."""
    return files.cache("native")


def not_private(path: Path) -> str | None:
    """Why another user may have changed a file or folder, as a phrase; None if nobody else can.

    It must belong to the user, and neither its group nor others may write to it. The folders above
    it may be root's as well; others may write to one only if it has the sticky bit, as /tmp does,
    which keeps them from replacing what is not theirs.
    """
    user, target = os.getuid(), Path(os.path.realpath(path))
    for one in (path.absolute(), *path.absolute().parents, target, *target.parents):
        try:
            found = os.lstat(one)
        except (FileNotFoundError, NotADirectoryError):
            continue
        itself = one == target
        if found.st_uid != user and (itself or found.st_uid != 0):
            return f"{one} belongs to user {found.st_uid}, not to you ({user})"
        if stat.S_ISLNK(found.st_mode):  # its own mode means nothing
            continue
        if itself and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"other users can write to {one}"
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"other users can write to {one}"
    return None


def _fingerprint(command: list[str], bits: int) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(repr((command, bits, _FLAGS, jax.__version__, _processor())).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What -march=native depends on: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _found(command: list[str], bits: int, folder: Path) -> Path | None:
    """An existing library, if its digest is right: loading a damaged file would end the process."""
    for path in folder.glob(f"kernels-{_fingerprint(command, bits)}-*.so"):
        if path.is_symlink() or not_private(path) is not None:
            continue
        if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _built(command: list[str], bits: int, folder: Path) -> Path:
    """Compiles into a temporary file and renames it: other processes may build at the same time."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not_private(folder) is not None:  # another user made it meanwhile
            raise PermissionError(folder)
        for old in folder.glob("building-*"):  # of a process that ended while it built
            if time.time() - old.stat().st_mtime > 10 * _SECONDS:
                old.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix="building-", suffix=".so")
    except OSError:  # the folder cannot be written: build for this process only
        folder = _temporary_folder()
        handle, name = tempfile.mkstemp(dir=folder, prefix="building-", suffix=".so")
    os.close(handle)
    try:
        _compile(command, bits, name)
        _opened(Path(name))  # fails if the compiler wrote nothing
        content = Path(name).read_bytes()
        path = folder / f"kernels-{_fingerprint(command, bits)}-{_digest(content)}.so"
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def _temporary_folder() -> Path:
    """A folder that only the user can enter, until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="agalite-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(command: list[str], bits: int, name: str) -> None:
    line = [*command, *_FLAGS, f"-DREAL_BITS={bits}", f"-I{jax.ffi.include_dir()}"]
    done = subprocess.run(
        [*line, str(SOURCES / "kernels.c"), "-lm", "-o", name],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line]
        raise Unavailable(said[0] if said else f"exit code {done.returncode}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]
