"""`agalite bench`: speed, cost and memory. Heavy modules are imported when a benchmark runs."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro.conf

from agalite import extras

# By field of `Throughput`: the module whose `run(rounds=, out=)` measures it.
_MODULES = {
    "models": "agalite.bench.models",
    "envs": "agalite.bench.environments",
    "training": "agalite.bench.training",
    "lra": "agalite.bench.lra",
    "asynchronous": "agalite.bench.asynchronous",
    "memory_maze": "agalite.bench.memory_maze",
}


@dataclass(frozen=True)
class Throughput:
    """Measure speed and memory of models, environments or training, against lower bounds."""

    models: bool = False
    """The memory models: forward and backward over sequences, and one streaming step."""
    envs: bool = False
    """The environments: steps per second with random actions."""
    training: bool = False
    """Training in T-Maze at the paper's settings: steps per second."""
    lra: bool = False
    """Classifiers of sequences of 2048 and 4096 tokens: forward and backward."""
    asynchronous: Annotated[bool, tyro.conf.arg(name="async", aliases=["--asynchronous"])] = False
    """Asynchronous against synchronous training, in an environment with slow steps."""
    memory_maze: bool = False
    """AGaLiTe and GTrXL-256 at the paper's size for Memory Maze: frames per second and memory."""
    pixels: bool = False
    """With --training: Mystery Path Grid with each encoder, and Craftax where it is installed."""
    craftax: bool = False
    """With --envs: Craftax too, which compiles for minutes."""
    rounds: int = 20
    """How often each program is timed. They are interleaved, so that load affects all of them."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        from agalite import files, validation

        validation.check_integer("rounds", self.rounds, minimum=1)
        parts = [name for name in _MODULES if getattr(self, name)]
        if len(parts) != 1:
            known = ", ".join("--" + name.replace("_", "-") for name in _MODULES)
            raise ValueError(f"choose one part to measure: {known}")
        if self.out is not None:
            files.check_writable("out", self.out)
        if self.pixels and not self.training:
            raise ValueError("--pixels goes with --training")
        options = {"craftax": self.craftax} if self.envs else {}
        module = importlib.import_module(
            "agalite.bench.pixels" if self.pixels else _MODULES[parts[0]]
        )
        module.run(rounds=self.rounds, out=self.out, **options)


@dataclass(frozen=True)
class Latency:
    """Time a step, a sequence and a gradient of every model, as the paper's appendix does."""

    parts: tuple[str, ...] = ()
    """Of: stream sequence batch gradient; all of them if not given."""
    models: tuple[str, ...] = ()
    """Only these, for example: --models "agalite(4,1)" gtrxl-512 gru."""
    runs: int = 100
    """How often each program is timed at most. All programs of a figure are interleaved."""
    seconds: float = 2.0
    """Time limit of each program, which may end it before --runs."""
    quick: bool = False
    """Two layers instead of twelve, few models, short sequences: to see that it works."""
    out: Path | None = None
    """Also write latency.json, latency.csv and a figure of each part into this folder."""

    def run(self) -> None:
        extras.require_training("agalite bench latency")
        from agalite.bench import latency

        plan = latency.Plan(self.parts, self.models, self.runs, self.seconds, self.quick)
        latency.run(plan, self.out)


@dataclass(frozen=True)
class Cost:
    """Count operations and memory: formulas, the compiled programs, the paper's ratios."""

    seconds: float = 1.0
    """Time limit of each program of the scaling figure."""
    stream: int = 10_000
    """Length of the stream of which every step is timed, at least 1000."""
    quick: bool = False
    """One layer instead of four, few sizes, a short stream: to see that it works."""
    out: Path | None = None
    """Also write cost.json, cost.csv and the figure into this folder."""

    def run(self) -> None:
        extras.require_training("agalite bench cost")
        from agalite.bench import cost

        cost.run(seconds=self.seconds, stream=self.stream, quick=self.quick, out=self.out)


@dataclass(frozen=True)
class Start:
    """Time a small run from the command to its first update, with empty and with full caches."""

    rounds: int = 3
    """How often."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        extras.require_training("agalite bench start")
        from agalite import files, validation
        from agalite.bench import start

        validation.check_integer("rounds", self.rounds, minimum=1)
        if self.out is not None:
            files.check_writable("out", self.out)
        start.run(rounds=self.rounds, out=self.out)


@dataclass(frozen=True)
class Seeds:
    """Time several seeds on all cores against one seed on one core."""

    rounds: int = 3
    """How often each way is timed, half a minute each. They are interleaved."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        extras.require_training("agalite bench seeds")
        from agalite import files, validation
        from agalite.bench import seeds

        validation.check_integer("rounds", self.rounds, minimum=1)
        if self.out is not None:
            files.check_writable("out", self.out)
        seeds.run(rounds=self.rounds, out=self.out)


@dataclass(frozen=True)
class Popgym:
    """Time the POPGym environments beside the package popgym, with random actions."""

    difficulties: tuple[str, ...] = ("easy",)
    """Of: easy medium hard."""
    families: tuple[str, ...] = ()
    """Only these, for example: --families RepeatFirst Battleship."""
    num_envs: int = 1024
    """How many environments step together here; the package steps one."""
    num_steps: int = 500
    """Steps of each environment in a round."""
    rounds: int = 5
    """How often each environment is timed."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        from agalite import files, validation

        for name in ("num_envs", "num_steps", "rounds"):
            validation.check_integer(name, getattr(self, name), minimum=1)
        if self.out is not None:
            files.check_writable("out", self.out)
        from agalite.bench import popgym

        popgym.run(
            difficulties=self.difficulties,
            num_envs=self.num_envs,
            steps=self.num_steps,
            rounds=self.rounds,
            out=self.out,
            names=self.families,
        )


@dataclass(frozen=True)
class Traces:
    """Measure gradients past the rollout: what an update with traces costs, and their angles."""

    rounds: int = 20
    """How often each update is timed."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        extras.require_training("agalite bench traces")
        from agalite import files, validation
        from agalite.bench import traces

        validation.check_integer("rounds", self.rounds, minimum=1)
        if self.out is not None:
            files.check_writable("out", self.out)
        traces.run(rounds=self.rounds, out=self.out)


@dataclass(frozen=True)
class Stream:
    """Time agents that learn at every step, by width, on one core; and a long stream."""

    rounds: int = 5
    """How often each agent is timed. They are interleaved, so that load affects all of them."""
    steps: int = 100_000
    """Steps of the long stream, whose memory and weights are watched; 0: none."""
    widths: tuple[int, ...] = (32, 64, 128, 256)
    """Widths of the networks that are timed, even numbers."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        extras.require_training("agalite bench stream")
        from agalite import files, validation
        from agalite.bench import stream

        validation.check_integer("rounds", self.rounds, minimum=1)
        validation.check_integer("steps", self.steps, minimum=0, maximum=validation.LARGEST_COUNT)
        if not self.widths or any(width < 2 or width % 2 for width in self.widths):
            raise ValueError(f"widths={self.widths} must be even numbers, at least 2")
        if self.out is not None:
            files.check_writable("out", self.out)
        stream.run(rounds=self.rounds, steps=self.steps, out=self.out, widths=self.widths)


@dataclass(frozen=True)
class Compare:
    """Compare two result files of one benchmark: the changes and their noise."""

    before: tyro.conf.Positional[Path]
    """A JSON file that a benchmark wrote."""
    after: tyro.conf.Positional[Path]
    """Another of the same benchmark."""
    by: str | None = None
    """In each file, divide by this measurement, for example: --by "weights read once"."""

    def run(self) -> None:
        from agalite.bench import compare

        compare.run(self.before, self.after, by=self.by)


@dataclass(frozen=True)
class History:
    """Show the headline ratios of result files over versions, so that a regression is seen."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files that benchmarks wrote; they are added to the history."""
    out: Path = Path("results")
    """Folder of history.json, which is continued, and of the page history.md."""

    def run(self) -> None:
        from agalite.bench import history

        history.run(self.results, self.out)


COMMANDS = {
    "throughput": Throughput,
    "latency": Latency,
    "cost": Cost,
    "start": Start,
    "seeds": Seeds,
    "popgym": Popgym,
    "traces": Traces,
    "stream": Stream,
    "compare": Compare,
    "history": History,
}
