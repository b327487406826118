"""The folder of a training run.

runs/NAME/
  config.json     the configuration, the folder's format and the versions of the packages
  metrics.csv     one line for each log interval and seed        (logging.py)
  tensorboard/    the same for TensorBoard, a subfolder per seed (logging.py)
  wandb/          the same for Weights & Biases, with --wandb    (logging.py)
  checkpoints/    the last few training states and the best one  (checkpoint.py)
  curve.png       the learning curve                             (plots.py)
  summary.json    results, written when the run ends
  run.log         events with their times
"""

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import platform
import re
import shutil
import time
import weakref
from pathlib import Path
from typing import Any, Self

from agalite import files
from agalite.system import versions
from agalite.version import __version__

FORMAT = 2
_ADDED = {"format", "versions"}  # keys of config.json that are no part of the configuration
SPACE_NEEDED = 200_000_000  # bytes: a few checkpoints of a large agent, and the metrics
_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "optax", "orbax-checkpoint", "gymnax", "craftax")


def new_folder(task: str, memory: str) -> Path:
    """The default folder of a run, which does not exist yet: runs/TASK-MEMORY-TIME."""
    task = re.sub(r"[:/]", "-", task)  # gym:ALE/Pong-v5
    default = Path("runs") / f"{task}-{memory}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([default], (Path(f"{default}-{i}") for i in itertools.count(2)))
    return next(path for path in names if not path.exists())


class Run:
    """The folder of one run: `Run.create` makes a new one, `Run.open` opens an existing one.

    `config` is the contents of config.json: the configuration with "format" and "versions" added.
    A run that is open for writing holds a lock until `close`, the end of a `with` block, or the end
    of the process, also if that is killed.
    """

    folder: Path
    config: dict[str, Any]

    def __init__(self, folder: Path, config: dict[str, Any], lock: "_Lock | None"):
        self.folder, self.config, self._lock = folder, config, lock

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration alone, as JSON stores it."""
        return {name: value for name, value in self.config.items() if name not in _ADDED}

    @classmethod
    def create(cls, folder: str | os.PathLike[str], config: dict[str, Any]) -> "Run":
        """Make a new run, open for writing.

        **Arguments:**

        - `folder`: must not exist or be empty, and be on a disk with enough space.
        - `config`: the configuration, as JSON can store it.
        """
        folder = Path(folder)
        if reserved := _ADDED & config.keys():
            raise ValueError(f"config has {sorted(reserved)}, which the run adds by itself")
        _refuse_occupied(folder)
        _make_writable(folder)
        lock = _Lock(folder)
        try:
            _refuse_occupied(folder)  # again: another process may have been first
            _require_space(folder)
            whole = {"format": FORMAT, "versions": versions(_PACKAGES), **config}
            # Subfolders first: a folder with a config.json is complete.
            run = cls(folder, {}, lock)
            run.tensorboard_folder.mkdir(exist_ok=True)
            run.checkpoints_folder.mkdir(exist_ok=True)
            files.write_json(run.config_path, whole)
            # Read back, so that a new run and an opened one have the same config.
            run.config = _read_config(folder)
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, write: bool = False) -> "Run":
        """Open an existing run.

        **Arguments:**

        - `folder`: the run's folder. One written in an older format is refused.
        - `write`: open it to continue training; only one process at a time can. Otherwise the run
            can only be read.
        """
        folder = Path(folder)
        config = _read_config(folder)
        if not write:
            return cls(folder, config, None)
        _make_writable(folder)
        lock = _Lock(folder)
        try:
            _require_space(folder)
        except BaseException:
            lock.release()
            raise
        # What a process that was killed in `files.write` left; with the lock no other is writing.
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        return cls(folder, config, lock)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def config_path(self) -> Path:
        return self.folder / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.csv"

    @property
    def tensorboard_folder(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def checkpoints_folder(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def curve_path(self) -> Path:
        return self.folder / "curve.png"

    @property
    def summary_path(self) -> Path:
        return self.folder / "summary.json"

    @property
    def log_path(self) -> Path:
        return self.folder / "run.log"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json. Arrays become lists; NaN and infinity become null."""
        self.require_writing()
        files.write_json(self.summary_path, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """The contents of summary.json; None if the run has not ended."""
        try:
            return json.loads(self.summary_path.read_text())
        except FileNotFoundError:
            return None

    def log(self, text: str) -> None:
        """Add lines to run.log, each with the time."""
        self.require_writing()
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        lines = "".join(f"{now}  {line}\n" for line in text.splitlines() or [""])
        with open(self.log_path, "a") as file:
            file.write(lines)

    def require_writing(self) -> None:
        if self._lock is None:
            raise ValueError(f"{self.folder} is open for reading; open it with write=True")

    def close(self) -> None:
        """Release the lock. The run can still be read."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Lock:
    """Lets at most one process write to a folder.

    The kernel releases the lock when the process ends, so a killed run can be resumed at once. The
    process id in the file is for the error message only.
    """

    def __init__(self, folder: Path):
        self._handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._handle, 100, 0).decode(errors="replace").strip()
            os.close(self._handle)
            raise BlockingIOError(
                f"{folder} is being written by {holder or 'another process'}; "
                "wait until it has ended, or choose another folder"
            ) from None
        except BaseException:
            os.close(self._handle)
            raise
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        _HELD_LOCKS.add(self)

    def release(self) -> None:
        # Closing the file releases the lock, since no child has it open: see `_release_in_child`.
        if self in _HELD_LOCKS:
            _HELD_LOCKS.discard(self)
            os.close(self._handle)


_HELD_LOCKS: "weakref.WeakSet[_Lock]" = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child inherits the open file, and would hold the lock as long as it lives."""
    for lock in list(_HELD_LOCKS):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def _refuse_occupied(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; a run needs a folder")
    if (folder / "config.json").exists():
        raise FileExistsError(
            f"{folder} already holds a run; continue it with `agalite resume {folder}`, "
            "or choose another folder"
        )
    if not folder.exists():
        return
    # A process that is killed in `create` leaves hidden files and empty subfolders.
    subfolders = {"tensorboard", "checkpoints"}
    for path in folder.iterdir():
        empty = path.name in subfolders and not any(path.iterdir())
        if not path.name.startswith(".") and not empty:
            raise FileExistsError(
                f"{folder} is not empty (it has {path.name!r}) and is no run; choose another folder"
            )


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror or error}") from error


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < SPACE_NEEDED:
        raise OSError(
            f"only {free / 1e6:.0f} MB are free on the disk of {folder}; "
            f"a run needs at least {SPACE_NEEDED / 1e6:.0f} MB"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a run: there is no such folder")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is not a run: it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    number = config.get("format") if isinstance(config, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f'{path} is not the config of a run: it has no number "format"')
    if number < FORMAT:
        raise ValueError(
            f"{folder} was written by an older version of agalite (format {number}; this is "
            f"{FORMAT}); train it again"
        )
    if number > FORMAT:
        versions = config.get("versions")
        maker = versions.get("agalite", "unknown") if isinstance(versions, dict) else "unknown"
        raise ValueError(
            f"{folder} was written by a newer version of agalite ({maker}; format {number}; this "
            f"is {__version__}, format {FORMAT}); upgrade with pip install --upgrade agalite"
        )
    return config
