"""`agalite soak kills`: programs killed at random moments, continued, and compared.

Every run is killed with SIGKILL one to three times and continued after each, as a user would: by
`agalite resume`, or by the first command if it was killed before there was a run. Some kills come
at any moment, others when a certain file appears or changes (`AIMS`). The end must be that of a run
that was never disturbed.

In the power-cut version the run is killed, and then the files of its checkpoints that were written
last are cut short or removed. What is left must lead to the same end, or be refused in a sentence.
"""

import contextlib
import os
import random
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agalite.bench.timing import progress_bar
from agalite.soak import campaign
from agalite.soak.campaign import Figure, Program, Record
from agalite.training.checkpoint import Checkpoints

# Small enough to end in a second of computing, with many checkpoints.
AGENT = shlex.split(
    "train tmaze --algorithm a2c --corridor 3 --num-envs 4 --num-steps 8 --hidden-size 16 "
    "--memory agalite --model.d-model 16 --model.layers 1 --model.heads 1 --model.head-size 8 "
    "--model.ffn-size 16 --log-every 64 --checkpoint-every 128 --steps 3840"
)
CLASSIFIER = shlex.split(
    "lra listops --memory agalite --min-length 3 --max-length 20 --train-examples 100 "
    "--test-examples 50 --validation-examples 50 --rows 2 --row-length 64 --steps 4096 "
    "--model.layers 1 --model.d-model 16 --model.heads 1 --model.head-size 8 --model.ffn-size 16 "
    "--embedding 8 --hidden-size 8 --log-every 256 --checkpoint-every 512"
)
STUDY = shlex.split("study run tmaze --scale smoke --jobs 2")

_POLL = 0.0002  # seconds between two looks at a folder
_LIMIT = 600.0  # seconds for a program to end: it hangs otherwise
_MOST_KILLS = 3  # of a run
_ATTEMPTS = 8  # to kill a run that ends before its kill


@dataclass(frozen=True)
class Sizes:
    """How many runs of each kind."""

    agents: int
    classifiers: int
    studies: int
    power_cuts: int


@dataclass(frozen=True)
class _Subject:
    """A program to kill, and its folders to compare."""

    name: str
    words: list[str]
    resumes: bool
    """It is continued by `agalite resume`; otherwise by the same command."""

    def command(self, folder: Path) -> list[str]:
        return [*self.words, "--out", str(folder)]

    def runs(self, folder: Path) -> list[Path]:
        """The folders of its runs."""
        return sorted(path.parent for path in folder.rglob("config.json"))

    def continued(self, folder: Path) -> list[str]:
        if self.resumes and (folder / "config.json").exists():
            return ["resume", str(folder)]
        return self.command(folder)


SUBJECTS = {
    "agents": _Subject("agent in T-Maze", AGENT, True),
    "classifiers": _Subject("classifier (ListOps)", CLASSIFIER, True),
    "studies": _Subject("study with two workers", STUDY, False),
}


def _names(folder: Path) -> list[str]:
    """The names in a folder, without what checkpoints consist of: quick enough to be polled."""
    names = []
    for _, folders, found in os.walk(folder):
        names += folders + found
        folders[:] = [x for x in folders if not x.startswith((".", "step_", "tensorboard"))]
    return names


def _count(pattern: str) -> Callable[[Path], int]:
    return lambda folder: sum(pattern in name for name in _names(folder))


def _metrics_size(folder: Path) -> int:
    size = 0
    for where, folders, found in os.walk(folder):
        folders[:] = [x for x in folders if x not in ("checkpoints", "tensorboard")]
        if "metrics.csv" in found:
            size += os.stat(os.path.join(where, "metrics.csv")).st_size
    return size


# What is watched, and killed when its value changes for the n-th time.
AIMS: dict[str, Callable[[Path], int] | None] = {
    "any moment": None,
    "compiling": None,
    "checkpoint being written": _count(".writing-"),
    "checkpoint renamed": _count("step_"),
    "checkpoint being deleted": _count(".deleting-"),
    "line of metrics written": _metrics_size,
    "file being replaced": _count(".tmp"),
    "summary": _count("summary.json"),
}


def run(record: Record, sizes: Sizes) -> None:
    """Kills runs of every kind and fills the record."""
    total = sizes.agents + sizes.classifiers + sizes.studies + sizes.power_cuts
    with campaign.workspace() as work, progress_bar() as progress:
        task = progress.add_task("kills: undisturbed", total=total)
        for kind, subject in SUBJECTS.items():
            count = getattr(sizes, kind)
            cuts = sizes.power_cuts if kind == "agents" else 0
            if not count + cuts:
                continue
            progress.update(task, description=f"kills: {subject.name}")
            killer = _Killer(subject, work / kind, record.seed)
            rows = []
            for number in range(count):
                rows.append(killer.kill(number))
                _note(record, rows[-1])
                progress.advance(task)
            if rows:
                equal = sum(not row["differences"] for row in rows)
                record.figures += [
                    Figure(f"{subject.name}: runs that end as if undisturbed", equal, "=", count),
                    Figure(f"{subject.name}: kills", sum(len(row["kills"]) for row in rows)),
                ]
            if cuts:
                progress.update(task, description="kills: power cuts")
                found = []
                for number in range(cuts):
                    found.append(killer.cut_power(number))
                    _note(record, found[-1])
                    progress.advance(task)
                good = sum(not row["differences"] for row in found)
                refused = sum(row["refused"] for row in found)
                record.figures += [
                    Figure("power cuts: end as if undisturbed, or refused", good, "=", cuts),
                    Figure("power cuts: refused, nothing usable was left", refused),
                    Figure(
                        "power cuts: resumed from an earlier checkpoint",
                        sum(row["skipped"] for row in found),
                    ),
                ]


def _note(record: Record, row: dict[str, Any]) -> None:
    record.rows.append(row)
    for what in row["differences"]:
        record.fail(f"{row['what']} number {row['number']}, killed at {row['kills']}: {what}")


class _Killer:
    """Kills one subject again and again, and compares with its undisturbed run."""

    def __init__(self, subject: _Subject, work: Path, seed: int) -> None:
        work.mkdir()
        self._subject, self._work, self._seed = subject, work, seed
        self._cache = work / "cache"
        self._reference = work / "undisturbed"
        command = subject.command(self._reference)
        if not subject.resumes:
            campaign.complete(command, self._cache, work / "errors")
        else:
            # The first fills the cache; the second is timed.
            campaign.complete(subject.command(work / "first"), self._cache, work / "errors")
        began = time.perf_counter()
        if subject.resumes:
            campaign.complete(command, self._cache, work / "errors")
            if found := campaign.differences(self._reference, work / "first"):
                raise ValueError(f"two undisturbed runs of {subject.name} differ: {found[0]}")
        else:
            campaign.complete(subject.command(work / "again"), self._cache, work / "errors")
        self._life = time.perf_counter() - began

    def kill(self, number: int) -> dict[str, Any]:
        """One run, killed up to `_MOST_KILLS` times and continued to its end."""
        random_ = random.Random(f"{self._seed} {self._subject.name} {number}")
        folder, kills = self._work / f"run-{number}", list[str]()
        names = list(AIMS)
        # Every aim in turn for the first kill, so that a short campaign has them all.
        aims = [names[number % len(names)]]
        aims += random_.choices(names, k=random_.randint(0, _MOST_KILLS - 1))
        cache = self._cache
        if "compiling" in aims:  # with nothing compiled yet
            cache = self._work / f"cache-{number}"
        for _ in range(_ATTEMPTS):
            for aim in aims:
                program = self._start(self._subject.continued(folder), cache)
                if self._shoot(program, folder, aim, random_):
                    kills.append(aim)
                elif program.process.returncode:
                    return self._row(number, kills, [f"it ended with an error: {program.message}"])
                else:
                    break
            if kills:
                break
            shutil.rmtree(folder)  # it ended before it was killed: once more
            aims = [random_.choice(["any moment", "line of metrics written"])]
        else:
            return self._row(number, kills, [f"it ended {_ATTEMPTS} times before it was killed"])
        found = self._finish(folder, cache)
        if cache != self._cache:
            shutil.rmtree(cache, ignore_errors=True)
        return self._row(number, kills, found)

    def cut_power(self, number: int) -> dict[str, Any]:
        """One run, killed while it writes; then the files that were written last are damaged."""
        random_ = random.Random(f"{self._seed} power {number}")
        folder = self._work / f"cut-{number}"
        aims = ["checkpoint being written", "checkpoint renamed", "any moment"]
        for _ in range(_ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            program = self._start(self._subject.command(folder), self._cache)
            aim = random_.choice(aims)
            shot = self._shoot(program, folder, aim, random_)
            if shot and list((folder / "checkpoints").glob("[.s]*")):
                break
        else:
            row = self._row(number, [], ["it could not be killed after a checkpoint"])
            return {**row, "refused": False, "skipped": False}
        damaged = damage_newest(folder / "checkpoints", random_)
        usable = Checkpoints(folder / "checkpoints")
        left = _undamaged(usable)
        program = self._start(self._subject.continued(folder), self._cache)
        code, found, refused = program.wait(_LIMIT), list[str](), False
        skipped = "is skipped" in program.said
        if code == 0:
            found = campaign.differences(folder, self._reference)
        elif code is None:
            found = [f"it did not end within {_LIMIT:g} s"]
        elif left is not None:
            found = [f"step {left} is undamaged, and yet: {program.message}"]
        else:
            refused = True
            if "are damaged" not in program.message or "step_" not in program.message:
                found = [f"the refusal does not name the checkpoint: {program.message}"]
        shutil.rmtree(folder)
        row = self._row(number, [aim], found)
        return {
            **row,
            "what": "power cut",
            "damaged": damaged,
            "refused": refused,
            "skipped": skipped,
        }

    def _row(self, number: int, kills: list[str], found: list[str]) -> dict[str, Any]:
        return {
            "what": self._subject.name,
            "number": number,
            "kills": list(kills),
            "differences": found,
        }

    def _start(self, words: list[str], cache: Path) -> Program:
        return campaign.start(words, cache, self._work / "errors")

    def _shoot(self, program: Program, folder: Path, aim: str, random_: random.Random) -> bool:
        """Kills the program at a moment of this kind; false if it ended before."""
        watched, began = AIMS[aim], time.perf_counter()
        share = 0.5 if aim == "compiling" else 1.0
        moment = began + random_.uniform(0, share * self._life)
        nth = random_.choice((1, 1, 2, 3, 5))
        late = random_.choice((0.0, 0.0, random_.uniform(0, 0.02)))
        before = _look(watched, folder) if watched else 0
        try:
            while program.process.poll() is None:
                now = time.perf_counter()
                if watched is None and now >= moment:
                    return self._hit(program, random_)
                if watched is not None:
                    value = _look(watched, folder)
                    # Files that vanish count as well, unless their number alone matters.
                    nth -= value > before
                    before = value
                    if nth <= 0:
                        time.sleep(late)
                        return self._hit(program, random_)
                if now - began > _LIMIT:
                    break
                time.sleep(_POLL)
        finally:
            program.kill()
        return False

    def _hit(self, program: Program, random_: random.Random) -> bool:
        """SIGKILL to the program; of a study to all of it, its main process or one worker."""
        workers = [] if self._subject.resumes else campaign.workers(program.process.pid)
        match random_.choice(("all", "main", "worker")) if workers else "all":
            case "all":
                program.kill()
            case "main":
                started = campaign.descendants(program.process.pid)
                program.process.kill()
                program.process.wait()
                # Its workers save their runs and end; until then the folders are locked.
                deadline = time.perf_counter() + _LIMIT
                while any(map(campaign.is_alive, started)) and time.perf_counter() < deadline:
                    time.sleep(0.05)
            case "worker":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(random_.choice(workers), signal.SIGKILL)
                # The others go on; then it says that a trial failed.
                return program.wait(_LIMIT) not in (0, None)
        return program.process.returncode < 0

    def _finish(self, folder: Path, cache: Path) -> list[str]:
        """Continues a run to its end; what differs there."""
        program = self._start(self._subject.continued(folder), cache)
        code = program.wait(_LIMIT)
        if code != 0:
            how = f"did not end within {_LIMIT:g} s" if code is None else f"ended with {code}"
            return [f"continued, it {how}: {program.message}"]
        runs, wanted = self._subject.runs(folder), self._subject.runs(self._reference)
        names = [
            [str(x.relative_to(where)) for x in found]
            for found, where in ((runs, folder), (wanted, self._reference))
        ]
        if names[0] != names[1]:
            return [f"it has the runs {names[0]}, not {names[1]}"]
        found = [
            f"{run.name}: {what}" if len(wanted) > 1 else what
            for run, reference in zip(runs, wanted, strict=True)
            for what in campaign.differences(run, reference)
        ]
        if not found:
            shutil.rmtree(folder)
        return found


def _look(watched: Callable[[Path], int], folder: Path) -> int:
    try:
        return watched(folder)
    except FileNotFoundError:  # it vanished meanwhile
        return 0


def damage_newest(checkpoints: Path, random_: random.Random) -> list[str]:
    """Cuts short, empties or removes the files of a folder that were written last.

    **Arguments:**

    - `checkpoints`: the folder of the checkpoints.
    - `random_`: decides how many, and what happens to each.

    **Returns:**

    The names of the files.
    """
    paths = [path for path in checkpoints.rglob("*") if path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime_ns)
    damaged = []
    for path in reversed(paths[-random_.choice((1, 2, 5, 10, 40)) :]):
        data = path.read_bytes()
        how = random_.choice(("drop", "empty", "cut", "cut", "zeros"))
        match how:
            case "drop":
                path.unlink()
            case "empty":
                path.write_bytes(b"")
            case "cut":
                path.write_bytes(data[: random_.randrange(max(1, len(data)))])
            case "zeros":  # what some file systems leave of blocks that were never written
                at = random_.randrange(max(1, len(data)))
                path.write_bytes(data[:at] + bytes(len(data) - at))
        damaged.append(f"{how} {path.relative_to(checkpoints)}")
    return damaged


def _undamaged(checkpoints: Checkpoints) -> int | None:
    try:
        return checkpoints.leaves()[0]
    except FileNotFoundError:
        return None
