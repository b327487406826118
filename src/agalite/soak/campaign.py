"""What the parts of `agalite soak` share: their records, the table made of them, processes.

A part writes one JSON file when it has ended, so that a later part or Ctrl-C loses nothing. The
table `reliability.md` is written anew from all of them after every part.
"""

import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from agalite import files, validation
from agalite.bench.report import check_folder, command_line
from agalite.bench.timing import load_average
from agalite.system import commit, processor, versions
from agalite.training.checkpoint import Checkpoints
from agalite.training.logging import read_metrics

PARTS = ("kills", "disk", "asynchronous", "input", "stream")
FORMAT = 1
_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "orbax-checkpoint", "gymnasium", "ray")
_TIMES = {"charts/SPS"}  # metrics that differ from run to run
_EXAMPLES = 20  # failures that a record describes; all are counted


@dataclass
class Figure:
    """A row of the table: something counted or measured, and what is wanted of it."""

    what: str
    value: float
    relation: Literal["=", "<=", ">=", ""] = ""
    """How the value must compare with `wanted`; empty: it is only reported."""
    wanted: float = 0.0
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is as wanted; a figure without a limit always is."""
        match self.relation:
            case "=":
                return self.value == self.wanted
            case "<=":
                return self.value <= self.wanted
            case ">=":
                return self.value >= self.wanted
        return True

    @property
    def limit(self) -> str:
        """What is wanted, for the table."""
        if not self.relation:
            return ""
        sign = "" if self.relation == "=" else f"{self.relation} "
        return f"{sign}{_number(self.wanted)}"


@dataclass
class Record:
    """What a part of the campaign found."""

    part: str
    seed: int
    options: dict[str, Any]
    """The sizes it was run with."""
    figures: list[Figure] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Details, one for each run, fault or group of cases."""
    failures: list[str] = field(default_factory=list)
    """Sentences about what must not happen and did."""
    not_run: list[str] = field(default_factory=list)
    """Sentences about what this machine does not permit."""

    def fail(self, what: str) -> None:
        """Add a failure; the first `_EXAMPLES` are kept, and the number of the others."""
        if len(self.failures) < _EXAMPLES:
            self.failures.append(what)

    @property
    def holds(self) -> bool:
        return not self.failures and all(figure.holds for figure in self.figures)


def run_part(part: Callable[[Record], None], record: Record, out: Path) -> bool:
    """Runs a part, writes its record and the table, and shows it.

    **Arguments:**

    - `part`: fills the record.
    - `record`: an empty one, with the part's options.
    - `out`: the folder of all records; the table is `out` with the suffix .md.

    **Returns:**

    Whether everything is as wanted.
    """
    validation.check_integer_between("seed", record.seed, 0, 2**32 - 1)
    check_folder(out)
    files.check_writable("out", _table_path(out))
    began, start = datetime.datetime.now(datetime.UTC), time.perf_counter()
    load = load_average()
    with _stop_on_sigterm():
        part(record)
    path = out / f"{record.part}.json"
    files.write_json(
        path,
        {
            "format": FORMAT,
            "part": record.part,
            "command": command_line(),
            "seed": record.seed,
            "options": record.options,
            "holds": record.holds,
            "figures": [
                {
                    "what": f.what,
                    "value": f.value,
                    "wanted": f.limit,
                    "unit": f.unit,
                    "holds": f.holds,
                }
                for f in record.figures
            ],
            "failures": record.failures,
            "not_run": record.not_run,
            "rows": record.rows,
            "commit": commit(),
            "versions": versions(_PACKAGES),
            "machine": {
                "cpu": processor(),
                "cores": os.cpu_count(),
                "system": f"{platform.system()} {platform.release()}",
                "load": load,
            },
            "began": began.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - start, 1),
        },
    )
    _show(record)
    files.write(_table_path(out), table(out).encode())
    Console().print(f"written to {path} and {_table_path(out)}", highlight=False, soft_wrap=True)
    return record.holds


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Leaves the part at SIGTERM as at Ctrl-C: no process and no folder of it is left over."""

    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` signals the process, then its group
        print("agalite soak: stopped by SIGTERM; parts that had ended are kept", file=sys.stderr)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _table_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.md")


def _show(record: Record) -> None:
    shown = Table(title=f"soak {record.part}")
    for column in ("what", "measured", "wanted", ""):
        shown.add_column(column, justify="left" if column in ("what", "") else "right")
    for f in record.figures:
        word = "" if not f.relation else "holds" if f.holds else "missed"
        shown.add_row(f.what, _measured(f.value, f.unit), f.limit, word)
    console = Console(highlight=False)
    console.print(shown)
    for line in record.failures:
        console.print(f"failure: {line}", markup=False, soft_wrap=True)
    for line in record.not_run:
        console.print(f"not run: {line}", markup=False, soft_wrap=True)


def table(out: Path) -> str:
    """The page of all records in a folder, as Markdown."""
    records = [
        json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        for name in PARTS
        if (out / f"{name}.json").exists()
    ]
    lines = [
        "# Reliability",
        "",
        "Written by `agalite soak`; docs/reliability.md says what each part does.",
        "",
        "| part | what | measured | wanted | |",
        "|---|---|---:|---:|---|",
    ]
    for r in records:
        for f in r["figures"]:
            word = "" if not f["wanted"] else "holds" if f["holds"] else "**missed**"
            measured = _measured(f["value"], f["unit"])
            lines.append(f"| {r['part']} | {f['what']} | {measured} | {f['wanted']} | {word} |")
    lines += [
        "",
        "| part | command | seed | commit | began | minutes |",
        "|---|---|---|---|---|--:|",
    ]
    lines += [
        f"| {r['part']} | `{r['command']}` | {r['seed']} | {r['commit']} | {r['began']} "
        f"| {r['seconds'] / 60:.1f} |"
        for r in records
    ]
    missing = [name for name in PARTS if name not in {r["part"] for r in records}]
    notes = [f"{name}: not run." for name in missing]
    for r in records:
        notes += [f"{r['part']}, not run: {text}." for text in r["not_run"]]
        notes += [f"{r['part']}, failure: {text}" for text in r["failures"]]
    if notes:
        lines += ["", *(f"- {_cell(note)}" for note in notes)]
    for where in dict.fromkeys(_machine(r) for r in records):
        lines += ["", where]
    return "\n".join(lines) + "\n"


def _machine(record: Mapping[str, Any]) -> str:
    m = record["machine"]
    names = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{m['cores']} cores of {m['cpu']}, {m['system']}; {names}."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _measured(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{_number(value)} {unit}".strip()


def _number(value: float) -> str:
    return f"{value:,}" if float(value).is_integer() else f"{value:,.4g}"


# --- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder for the runs of a part, with an empty compilation cache.

    The programs that a part starts get the cache through their environment (`start`). If the part
    is left in the middle, those that still run are killed before the folder is removed.
    """
    with tempfile.TemporaryDirectory(prefix="agalite-soak-", ignore_cleanup_errors=True) as name:
        try:
            yield Path(name)
        except BaseException:
            kill_all(descendants(os.getpid()))
            raise


def environment(cache: Path) -> dict[str, str]:
    """The environment of a program that keeps compiled programs in `cache`, however small."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class Program:
    """A command of agalite in a process group of its own."""

    process: subprocess.Popen[bytes]
    errors: Path
    """The file with its stderr."""

    def kill(self) -> None:
        """SIGKILL to the process and all that it started."""
        started = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
        kill_all(started)
        self.process.wait()

    def wait(self, seconds: float) -> int | None:
        """The exit code; None, and the program is killed, if it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    @property
    def said(self) -> str:
        """Its stderr so far."""
        return self.errors.read_text(errors="replace")

    @property
    def message(self) -> str:
        """The last line of its stderr."""
        return (self.said.strip().splitlines() or [""])[-1]


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs; oldest first."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in brackets, may hold anything; the state and the parent follow it.
                text = Path(entry.path, "stat").read_text(errors="replace")
                state, parent = text.rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += sorted(children.get(one, []))
    return found[1:]


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to every process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def workers(pid: int) -> list[int]:
    """The Python processes that `multiprocessing` has started for a process."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def start(
    words: Sequence[str],
    cache: Path,
    errors: Path,
    folder: Path | None = None,
    **variables: str,
) -> Program:
    """Starts `agalite WORDS` as a user would.

    **Arguments:**

    - `words`: the words after `agalite`.
    - `cache`: its compilation cache.
    - `errors`: the file that gets its stderr.
    - `folder`: its working directory.
    - `variables`: more environment variables.
    """
    with open(errors, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "agalite", *words],
            env={**environment(cache), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            cwd=folder,
            start_new_session=True,
        )
    return Program(process, errors)


def complete(words: Sequence[str], cache: Path, errors: Path, seconds: float = 600.0) -> Program:
    """Runs a command to its end; ValueError if it fails, since the part needs its result."""
    program = start(words, cache, errors)
    try:
        code = program.wait(seconds)
    except BaseException:
        program.kill()
        raise
    if code != 0:
        raise ValueError(f"`agalite {' '.join(words)}` ended with {code}: {program.message}")
    return program


# --- comparison -----------------------------------------------------------------------------------


def differences(folder: Path, reference: Path) -> list[str]:
    """What differs between two runs that should be the same, as phrases; empty if nothing does.

    Compared are the newest checkpoints bit for bit, the rows of metrics.csv but for the speed, and
    what TensorBoard shows.

    **Arguments:**

    - `folder`: of the run that was disturbed.
    - `reference`: of the run that was not.
    """
    out = []
    (step, got), (wanted_step, wanted) = (
        Checkpoints(x / "checkpoints").leaves() for x in (folder, reference)
    )
    if step != wanted_step or got.keys() != wanted.keys():
        out.append(f"its checkpoint is of step {step}, not {wanted_step}")
    else:
        wrong = [name for name in wanted if not _same_bits(got[name], wanted[name])]
        if wrong:
            out.append(f"{len(wrong)} of {len(wanted)} leaves differ, the first is {wrong[0]}")
    metrics, wanted_metrics = read_metrics(folder), read_metrics(reference)
    if metrics.keys() != wanted_metrics.keys():
        out.append("metrics.csv has other columns")
    else:
        wrong = [
            name
            for name in wanted_metrics
            if name not in _TIMES
            and not np.array_equal(metrics[name], wanted_metrics[name], equal_nan=True)
        ]
        if wrong:
            out.append(f"metrics.csv differs in {wrong[0]}")
    boards, wanted_boards = tensorboard_values(folder), tensorboard_values(reference)
    if _without_times(boards) != _without_times(wanted_boards):
        out.append("TensorBoard shows other values")
    return out


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _without_times(values: Mapping[tuple[str, str, int], float]) -> dict[Any, float]:
    return {key: value for key, value in values.items() if key[1] not in _TIMES}


def tensorboard_values(run: Path) -> dict[tuple[str, str, int], float]:
    """What TensorBoard shows of a run: the value of every seed folder, tag and step.

    A session that begins at a step replaces what earlier ones wrote from there on, and a torn
    record ends its file, as in TensorBoard.
    """
    from tensorboardX.proto import event_pb2

    pb: Any = event_pb2  # its names are made when it is imported
    out: dict[tuple[str, str, int], float] = {}
    for board in sorted((run / "tensorboard").iterdir()):
        for path in sorted(board.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            for record in _records(path.read_bytes()):
                event = pb.Event.FromString(record)
                if event.session_log.status == pb.SessionLog.START:
                    out = {k: x for k, x in out.items() if k[0] != board.name or k[2] < event.step}
                for value in event.summary.value:
                    out[board.name, value.tag, event.step] = value.simple_value
    return out


def _records(data: bytes) -> Iterator[bytes]:
    """The records of an event file: length (8), its checksum (4), event, its checksum (4)."""
    at = 0
    while at + 12 < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        if at + 16 + length > len(data):
            return
        yield data[at + 12 : at + 12 + length]
        at += 16 + length
