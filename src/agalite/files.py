"""Files that are either there whole or not at all, whatever kills the process or the machine."""

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def cache(name: str) -> Path:
    """The folder for what can be made again, by the usual rules; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agalite" / name


def check_writable(name: str, path: Path) -> None:
    """Before hours of work are done for it: can a file be written there?"""
    if not path.parent.is_dir():
        raise ValueError(f"{name}={str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if path.is_dir():
        raise ValueError(f"{name}={str(path)!r} is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r} cannot be written: {error.strerror}") from error


def write(path: Path, data: bytes) -> None:
    """Replace the contents of `path` at once: a reader sees the old ones or the new ones."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            # mkstemp makes files that only their owner can read; this one is to be like any other.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
    write(path, f"{text}\n".encode())


def sync(path: Path) -> None:
    """Wait until the file, or the folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plain(value: Any) -> Any:
    """What JSON can hold; NaN and infinity, which it cannot, become null."""
    if isinstance(value, dict):
        return {str(name): plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy and JAX
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# The only way to read the umask is to set it, which is not safe once there are threads: here, while
# the module is imported, is as early as can be.
_UMASK = os.umask(0o022)
os.umask(_UMASK)


def _umask() -> int:
    return _UMASK
