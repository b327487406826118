"""Atomic writes: a file has its old or its new contents, also after a crash or a power cut."""

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def cache(name: str) -> Path:
    """The cache folder `name`, by the XDG rules; it need not exist yet.

    A relative or empty XDG_CACHE_HOME is ignored: what is loaded from the cache must not depend on
    the working directory.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "agalite" / name


def check_writable(name: str, path: Path) -> None:
    """Raise `ValueError` unless a file can be written to `path`; `name` is the argument's."""
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
    """Replace the contents of `path` atomically, and sync them to the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            # mkstemp makes files that only their owner can read.
            os.fchmod(file.fileno(), 0o666 & ~_UMASK)
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
    """Write `plain(value)` as JSON, atomically."""
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
    write(path, f"{text}\n".encode())


def sync(path: Path) -> None:
    """Wait until the file, or the folder's list of entries, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays become lists, paths text, NaN and infinity None."""
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


# The umask can only be read by setting it, which is not safe once there are threads. It is read
# while this module is imported.
_UMASK = os.umask(0o022)
os.umask(_UMASK)
