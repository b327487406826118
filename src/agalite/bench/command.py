"""`agalite bench`: speed, cost and memory. Nothing heavy is imported until it is run."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro.conf

from agalite import extras, files, validation


@dataclass(frozen=True)
class Throughput:
    """Measure speed and memory, as ratios taken in one run."""

    models: bool = False
    """The memory models: forward and backward over sequences, and one streaming step."""
    envs: bool = False
    """The environments: steps a second of random actions."""
    training: bool = False
    """Training in T-Maze at the paper's settings: steps a second, share of the product rate."""
    lra: bool = False
    """Classifiers of sequences of 2048 and 4096 tokens: forward and backward."""
    asynchronous: Annotated[bool, tyro.conf.arg(name="async", aliases=["--asynchronous"])] = False
    """Acting and learning side by side against one after the other, in a slow environment."""
    memory_maze: bool = False
    """AGaLiTe and GTrXL-256 at the paper's size for Memory Maze: frames a second and memory."""
    craftax: bool = False
    """With --envs: Craftax too, which compiles for minutes."""
    rounds: int = 20
    """How often each is timed; they take turns, so that a busy machine slows all alike."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:

        parts = [name for name in PARTS if getattr(self, name)]
        options = {"craftax": self.craftax} if self.envs else {}
        run(parts, rounds=self.rounds, out=self.out, **options)


@dataclass(frozen=True)
class Latency:
    """Time a step, a sequence and a gradient of every model, as the paper's appendix does."""

    parts: tuple[str, ...] = ()
    """Of: stream sequence batch gradient; all of them if not given."""
    models: tuple[str, ...] = ()
    """Only these, for example: --models "agalite(4,1)" gtrxl-512 gru."""
    runs: int = 100
    """How often each program is timed at most; all programs of a figure take turns."""
    seconds: float = 2.0
    """Time that each program has for it; long ones have fewer runs, or one."""
    quick: bool = False
    """Two layers instead of twelve, few models, short sequences: to see that it works."""
    out: Path | None = None
    """Also write latency.json, latency.csv and a figure of each part into this folder."""

    def run(self) -> None:
        extras.require_training("agalite bench latency")
        from agalite.bench import latency

        latency.run(
            latency.Plan(self.parts, self.models, self.runs, self.seconds, self.quick), self.out
        )


@dataclass(frozen=True)
class Cost:
    """Count operations and memory: formulas, the compiled programs, the paper's ratios."""

    seconds: float = 1.0
    """Time that each program of the scaling figure has."""
    stream: int = 10_000
    """Steps of the stream whose every step is timed: at least 1000."""
    quick: bool = False
    """One layer instead of four, few sizes, a short stream: to see that it works."""
    out: Path | None = None
    """Also write cost.json, cost.csv and the figure into this folder."""

    def run(self) -> None:
        extras.require_training("agalite bench cost")
        from agalite.bench import cost

        cost.run(seconds=self.seconds, stream=self.stream, quick=self.quick, out=self.out)


@dataclass(frozen=True)
class Compare:
    """Put two result files of one benchmark side by side, with the change and its noise."""

    before: tyro.conf.Positional[Path]
    """A JSON file that a benchmark wrote."""
    after: tyro.conf.Positional[Path]
    """Another of the same benchmark."""
    by: str | None = None
    """Divide by this measurement, of each file its own, for example: --by "weights read once"."""

    def run(self) -> None:
        from agalite.bench import compare

        compare.run(self.before, self.after, by=self.by)


COMMANDS = {"throughput": Throughput, "latency": Latency, "cost": Cost, "compare": Compare}


# --- `agalite bench throughput`: how fast the parts are, each against the machine's own limit -----

PARTS = {
    "models": "agalite.bench.models",
    "envs": "agalite.bench.environments",
    "training": "agalite.bench.training",
    "lra": "agalite.bench.lra",
    "asynchronous": "agalite.bench.asynchronous",
    "memory_maze": "agalite.bench.memory_maze",
}
"""What can be measured, and the module whose `run(rounds=, out=, ...)` does it."""


def run(parts: list[str], *, rounds: int, out: Path | None, **options: Any) -> None:
    """parts: the ones asked for, of which there must be one."""
    validation.integer("rounds", rounds, minimum=1)
    if len(parts) != 1:
        known = ", ".join("--" + name.replace("_", "-") for name in PARTS)
        raise ValueError(f"choose one part to measure: {known}")
    if out is not None:
        files.check_writable("out", out)
    importlib.import_module(PARTS[parts[0]]).run(rounds=rounds, out=out, **options)
