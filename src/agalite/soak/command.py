"""`agalite soak`: faults, load and bad input. Heavy modules are imported when a part runs."""

import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from agalite import extras

OUT = Path("results/reliability")


@dataclass(frozen=True)
class _Part:
    """Options that every part has."""

    seed: int = 0
    """Random seed: of the moments, the faults or the cases."""
    out: Path = OUT
    """Folder of the records, one for each part; the table is written beside it, as OUT.md."""

    name: ClassVar[str]

    def work(self, record: Any) -> None:
        """Does the part and fills the record."""
        raise NotImplementedError

    def run(self) -> None:
        extras.require_training(f"agalite soak {self.name}")
        if not self.done():
            raise SystemExit(1)

    def done(self) -> bool:
        """Runs the part; whether everything is as wanted."""
        from agalite.soak.campaign import Record, run_part

        sizes = {k: v for k, v in asdict(self).items() if k not in ("seed", "out")}
        return run_part(self.work, Record(self.name, self.seed, sizes), self.out)


def _check_sizes(minimum: int, **sizes: int) -> None:
    from agalite import validation

    for name, size in sizes.items():
        validation.check_integer(name, size, minimum=minimum, maximum=validation.LARGEST_COUNT)


@dataclass(frozen=True)
class Kills(_Part):
    """Kill training at random moments, continue it, and compare it with an undisturbed run."""

    name: ClassVar[str] = "kills"
    runs: int = 50
    """Agents in T-Maze to kill, one to three times each."""
    classifiers: int = 10
    """Runs of `agalite lra` to kill."""
    studies: int = 10
    """Studies with two workers to kill."""
    power_cuts: int = 50
    """Agents to kill and then to damage the files of the checkpoints written last."""

    def work(self, record: Any) -> None:
        from agalite.soak import kills

        _check_sizes(0, **record.options)
        sizes = kills.Sizes(self.runs, self.classifiers, self.studies, self.power_cuts)
        kills.run(record, sizes)


@dataclass(frozen=True)
class Disk(_Part):
    """Fill the disk of a run, make it read-only, or slow it down, and resume the run after that."""

    name: ClassVar[str] = "disk"
    rounds: int = 5
    """How often each case is tried. Mounting a disk needs root."""

    def work(self, record: Any) -> None:
        from agalite.soak import disk

        _check_sizes(1, rounds=self.rounds)
        disk.run(record, self.rounds)


@dataclass(frozen=True)
class Asynchronous(_Part):
    """Kill, stop and confuse environments, actors and Ray nodes while an agent is trained."""

    name: ClassVar[str] = "asynchronous"
    minutes: float = 30.0
    """Minutes with faults, half by threads and half on Ray; a quarter is added without faults."""
    every: float = 20.0
    """Seconds between two faults."""

    def work(self, record: Any) -> None:
        from agalite import validation
        from agalite.soak import asynchronous

        validation.check_number("minutes", self.minutes, minimum=0.0, above=True)
        validation.check_number("every", self.every, minimum=0.0, above=True)
        places = ("threads", "ray") if find_spec("ray") is not None else ("threads",)
        if "ray" not in places:
            record.not_run.append('actors on Ray: pip install "agalite[ray]"')
        asynchronous.run(record, minutes=self.minutes, every=self.every, places=places)


@dataclass(frozen=True)
class Input(_Part):
    """Mutate command lines, configurations, checkpoints and tables, and look for stack traces."""

    name: ClassVar[str] = "input"
    cases: int = 10_000
    """Mutated inputs of all kinds together."""

    def work(self, record: Any) -> None:
        from agalite.soak import input as mutated

        _check_sizes(1, cases=self.cases)
        mutated.run(record, self.cases)


@dataclass(frozen=True)
class Stream(_Part):
    """Stream many steps through a small AGaLiTe: exact phase, bounded state, flat memory."""

    name: ClassVar[str] = "stream"
    steps: int = 100_000_000
    """Steps of the stream."""

    def work(self, record: Any) -> None:
        from agalite.soak import stream

        _check_sizes(10_000, steps=self.steps)
        stream.run(record, self.steps)


@dataclass(frozen=True)
class All:
    """Run all parts, one after another; each writes its record when it has ended."""

    share: float = 1.0
    """Share of the full sizes: 0.02 is a look at every part."""
    seed: int = 0
    """Random seed of every part."""
    out: Path = OUT
    """Folder of the records; the table is written beside it, as OUT.md."""

    def run(self) -> None:
        from agalite import validation

        extras.require_training("agalite soak all")
        validation.check_number("share", self.share, minimum=0.0, above=True)
        missed = [part.name for part in self.parts() if not part.done()]
        if missed:
            print(f"not everything is as wanted in: {', '.join(missed)}", file=sys.stderr)
            raise SystemExit(1)

    def parts(self) -> list[_Part]:
        """The parts at their shares of the full sizes."""

        def size(full: int, least: int = 1) -> int:
            return max(least, round(full * self.share))

        where: dict[str, Any] = {"seed": self.seed, "out": self.out}
        # The shortest ones first: a mistake in the machine's setup shows early.
        return [
            Stream(**where, steps=size(Stream.steps, 1_000_000)),
            Input(**where, cases=size(Input.cases, 100)),
            Disk(**where, rounds=size(Disk.rounds)),
            Asynchronous(**where, minutes=max(1.0, Asynchronous.minutes * self.share)),
            Kills(
                **where,
                runs=size(Kills.runs),
                classifiers=size(Kills.classifiers),
                studies=size(Kills.studies),
                power_cuts=size(Kills.power_cuts),
            ),
        ]


COMMANDS: dict[str, Any] = {
    "kills": Kills,
    "disk": Disk,
    "asynchronous": Asynchronous,
    "input": Input,
    "stream": Stream,
    "all": All,
}
