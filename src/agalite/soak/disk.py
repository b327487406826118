"""`agalite soak disk`: a disk that fills up, becomes read-only or is slow under a run.

The disk is a tmpfs that is mounted for each case, which only root may do; where that is not
permitted the part says so. It is filled to the last byte at the moment that a case names, or the
run's folder is covered by a read-only mount of itself. The run must end with a message of one line
and a code other than 0, and leave its last complete checkpoint: once there is space again, the run
is resumed and must end as one that was never disturbed.

The slow disk is a library that is loaded before libc and sleeps in every fsync; it needs a C
compiler.
"""

import contextlib
import ctypes
import errno
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agalite.bench.timing import progress_bar
from agalite.kernels.build import compilers
from agalite.soak import campaign
from agalite.soak.campaign import Figure, Program, Record
from agalite.soak.kills import AGENT
from agalite.training.checkpoint import Checkpoints
from agalite.training.logging import read_metrics
from agalite.training.run import SPACE_NEEDED

_SIZE = SPACE_NEEDED + 60_000_000  # of the disk: a run refuses to begin with less free
_LIMIT = 600.0  # seconds for a program to end
_POLL = 0.0002
_STEPS = 3840  # of the run
# Metrics for every update, so that they are also written between two checkpoints.
_WORDS = [*AGENT, "--log-every", "32"]
_FSYNC_DELAY = 0.2  # seconds, on the slow disk
_SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int fsync(int file) {
    usleep(DELAY);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
"""

_libc = ctypes.CDLL(None, use_errno=True)
_READ_ONLY, _REMOUNT, _BIND, _DETACH = 1, 32, 4096, 2


def _mount(source: str, target: Path, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [x.encode() if x is not None else None for x in (source, str(target), kind, data)]
    if _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def _unmount(target: Path) -> None:
    _libc.umount2(str(target).encode(), _DETACH)


def why_not(folder: Path) -> str | None:
    """Why disks cannot be mounted here, as a phrase; None if they can."""
    if not hasattr(_libc, "mount"):
        return "this system has no mount(2)"
    try:
        with disk(folder / "probe"):
            return None
    except OSError as error:
        return f"mounting a tmpfs: {error.strerror}"


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """An empty disk of `_SIZE` bytes, mounted on a new folder."""
    folder.mkdir()
    _mount("tmpfs", folder, "tmpfs", 0, f"size={_SIZE}")
    try:
        yield folder
    finally:
        _unmount(folder)


def _fill(folder: Path) -> None:
    """Fills the disk of a folder to the last byte."""
    handle = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        at, size = 0, 2**28
        while size >= 4096:  # pages of a tmpfs
            try:
                os.posix_fallocate(handle, at, size)
                at += size
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
    finally:
        os.close(handle)


def _names(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _writing(run: Path) -> bool:
    return any(name.startswith(".writing-") for name in _names(run / "checkpoints"))


def _saved(run: Path) -> bool:
    """There is a checkpoint, and none is being written."""
    names = _names(run / "checkpoints")
    return any(x.startswith("step_") for x in names) and not _writing(run)


def _at_end(run: Path) -> bool:
    return f"step_{_STEPS:012d}" in _names(run / "checkpoints")


# What happens to the disk, and when.
CASES: dict[str, tuple[Callable[[Path], bool], bool]] = {
    "full during a checkpoint": (_writing, False),
    "full between checkpoints (metrics)": (_saved, False),
    "full before the summary": (_at_end, False),
    "read-only during a checkpoint": (_writing, True),
    "read-only between checkpoints": (_saved, True),
    "read-only before the summary": (_at_end, True),
}


def run(record: Record, rounds: int) -> None:
    """Runs every case `rounds` times and fills the record."""
    with campaign.workspace() as work, progress_bar() as progress:
        reason = why_not(work)
        if reason is not None:
            record.not_run.append(f"full and read-only disks ({reason}); run it as root")
        count = 0 if reason else rounds * len(CASES)
        task = progress.add_task("disk", total=count + 1)
        cache, errors, reference = work / "cache", work / "errors", work / "undisturbed"
        campaign.complete([*_WORDS, "--out", str(reference)], cache, errors)
        rng = random.Random(record.seed)
        for name in CASES if count else ():
            good = 0
            for _ in range(rounds):
                row = _case(name, work / f"disk-{len(record.rows)}", cache, reference, rng)
                record.rows.append(row)
                good += not row["problems"]
                for what in row["problems"]:
                    record.fail(f"{name}: {what}")
                progress.advance(task)
            record.figures.append(Figure(f"{name}: clean stops, resumed alike", good, "=", rounds))
        slow = _slow(work, cache, reference)
        record.rows.append(slow)
        if "not_run" in slow:
            record.not_run.append(slow["not_run"])
        else:
            record.figures.append(
                Figure("slow disk (fsync 0.2 s): runs that differ", len(slow["problems"]), "=", 0)
            )
        progress.advance(task)


def _case(
    name: str, folder: Path, cache: Path, reference: Path, rng: random.Random
) -> dict[str, Any]:
    moment, read_only = CASES[name]
    problems = list[str]()
    with disk(folder):
        run, errors = folder / "run", folder.parent / "errors"
        program = campaign.start([*_WORDS, "--out", str(run)], cache, errors)
        struck = _strike(program, run, moment, read_only, rng)
        code, said = program.wait(_LIMIT), program.said
        saved = Checkpoints(run / "checkpoints").latest()
        if not struck:
            problems.append(f"the run ended before its disk was disturbed: {program.message}")
        elif code is None:
            problems.append(f"it did not end within {_LIMIT:g} s")
        elif code == 0:
            problems += _problems_of_success(run, said)
        else:
            problems += _problems_of(said)
        if read_only:
            _unmount(run)
        (folder / "filler").unlink(missing_ok=True)
        again = campaign.start(["resume", str(run)], cache, errors)
        if again.wait(_LIMIT) != 0:
            problems.append(f"it could not be resumed: {again.message}")
        else:
            problems += campaign.differences(run, reference)
        log = (run / "run.log").read_text()
        if saved is not None and struck and f"resumed from step {saved}" not in log:
            problems.append(f"it was not resumed from step {saved}, its last checkpoint")
    return {
        "what": name,
        "exit_code": code,
        "message": said.strip().splitlines()[-1:] if said else [],
        "saved": saved,
        "problems": problems,
    }


def _strike(
    program: Program,
    run: Path,
    moment: Callable[[Path], bool],
    read_only: bool,
    rng: random.Random,
) -> bool:
    """Disturbs the disk at the moment; false if the run ended before."""
    passed = rng.choice((0, 1, 3)) if moment is not _at_end else 0
    held = False
    while program.process.poll() is None:
        now = moment(run)
        if now and not held:
            if passed == 0:
                if read_only:
                    # The folder over itself, read-only: files that are open stay writable.
                    _mount(str(run), run, None, _BIND, None)
                    _mount("none", run, None, _REMOUNT | _BIND | _READ_ONLY, None)
                else:
                    _fill(run.parent)
                return True
            passed -= 1
        held = now
        time.sleep(_POLL)
    return False


def _problems_of(said: str) -> list[str]:
    """What is wrong with the stderr of a run that had to stop."""
    lines = [line for line in said.splitlines() if line.strip()]
    messages = [line for line in lines if line.startswith("agalite")]
    # Beside the message there are lines of progress and warnings.
    other = [
        line
        for line in lines
        if not line.startswith(("agalite", "training into", "warning:")) and " steps/s" not in line
    ]
    out = []
    if len(messages) != 1:
        out.append(f"it ended with {len(messages)} messages: {messages}")
    if "Traceback" in said:
        out.append(f"it printed a stack trace: {lines[-1]}")
    elif other:
        out.append(f"it printed {other[0]!r}")
    if any("this is a bug" in line for line in messages):
        out.append(messages[0])
    return out


def _problems_of_success(run: Path, said: str) -> list[str]:
    """A run may end well if all it had to write was written before."""
    out = ["it printed a stack trace"] if "Traceback" in said else []
    if not (run / "summary.json").exists():
        out.append("it ended with 0, but wrote no summary")
    if read_metrics(run)["step"][-1] != _STEPS:
        out.append("it ended with 0, but metrics are missing")
    return out


def _slow(work: Path, cache: Path, reference: Path) -> dict[str, Any]:
    """A run whose every fsync takes `_FSYNC_DELAY` seconds longer."""
    found, name = compilers(), "slow disk"
    if not found:
        return {"what": name, "not_run": "slow disk: there is no C compiler"}
    source, library = work / "slow.c", work / "slow.so"
    source.write_text(_SLOW.replace("DELAY", str(int(_FSYNC_DELAY * 1e6))))
    words = [*found[0], "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    built = subprocess.run(words, capture_output=True, text=True, check=False)
    if built.returncode:
        return {"what": name, "not_run": f"slow disk: the compiler said {built.stderr[:200]}"}
    run = work / "slow"
    began = time.perf_counter()
    program = campaign.start(
        [*_WORDS, "--out", str(run)], cache, work / "errors", LD_PRELOAD=str(library)
    )
    code = program.wait(_LIMIT)
    problems = (
        campaign.differences(run, reference)
        if code == 0
        else [f"it ended with {code}: {program.message}"]
    )
    seconds = round(time.perf_counter() - began, 1)
    shutil.rmtree(run, ignore_errors=True)
    return {"what": name, "exit_code": code, "seconds": seconds, "problems": problems}
