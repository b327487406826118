"""`agalite bench latency`: what a step, a sequence and a gradient take, at the paper's sizes.

The paper's appendix measures the forward pass of GTrXL and AGaLiTe, 12 layers, 8 heads, V = 64,
d = 256: one element of a stream against the context length, and a whole sequence against its
length, 100 runs each. Here are the same two figures for every model, and two more: many streams
side by side, and forward and backward. All models of a figure take turns in one run.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from agalite import errors, files
from agalite.bench import bounds, latency_report, programs
from agalite.bench.report import write_results
from agalite.bench.subjects import REFERENCE, SIZE, SUBJECTS, build
from agalite.bench.timing import Program, progress_bar
from agalite.bench.turns import take_turns
from agalite.memory import Memory
from agalite.training.session import remember_programs

# With a whole sequence or a gradient, how GTrXL keeps its memory between steps plays no role; the
# paper draws GTrXL with 128 and 512.
_SEQUENCES = (
    REFERENCE, "agalite(8,1)", "agalite(16,1)", "agalite(4,7)", "galite(4)", "linear",
    "gtrxl-128", "gtrxl-512", "gru", "lstm",
)  # fmt: skip
_BATCHES = (
    REFERENCE, "agalite(16,7)", "galite(4)", "linear", "gtrxl-128", "gtrxl-128, cached",
    "gtrxl-512, cached", "gru", "lstm",
)  # fmt: skip
_GRADIENTS = (REFERENCE, "galite(4)", "linear", "gtrxl-128", "gtrxl-512", "gru")
_QUICK = (REFERENCE, "galite(4)", "gtrxl-128", "gtrxl-128, cached", "gru")
# Beyond it a batch's state is not tried: GTrXL's of 512 streams would not fit into most machines.
_LARGEST_STATE = 2 * 10**9
# One run may take so many times the time that a program has; longer sequences are not tried.
_PATIENCE = 5


@dataclass(frozen=True)
class Part:
    """A figure: what is on its x axis and which models are in it."""

    title: str
    xs: tuple[int, ...]
    x: str
    models: tuple[str, ...]
    make: Callable[[str, Memory, int], Program]
    bound: Callable[[Memory, int], Program]


PARTS: dict[str, Part] = {
    "stream": Part(
        "One step of a stream", (1,), "streams", tuple(SUBJECTS),
        lambda name, memory, _: programs.stream(name, memory),
        lambda memory, _: bounds.read_weights(memory),
    ),
    "sequence": Part(
        "A whole sequence, forward", (128, 512, 2048, 4096), "steps", _SEQUENCES,
        programs.sequence, bounds.products,
    ),
    "batch": Part(
        "One step of many streams", (1, 8, 64, 512), "streams", _BATCHES,
        lambda name, memory, n: programs.stream(name, memory, batch=n),
        lambda memory, n: bounds.products(memory, n, turned=True),
    ),
    "gradient": Part(
        "A whole sequence, forward and backward", (128, 512, 2048), "steps", _GRADIENTS,
        programs.gradient, bounds.products_of_training,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to measure; checked before anything is built."""

    parts: Sequence[str] = ()
    models: Sequence[str] = ()
    runs: int = 100
    seconds: float = 2.0
    quick: bool = False

    def __post_init__(self) -> None:
        for part in self.parts:
            errors.one_of("parts", part, PARTS)
        for model in self.models:
            errors.one_of("models", model, SUBJECTS)
        errors.integer("runs", self.runs, minimum=1)
        errors.number("seconds", self.seconds, minimum=0, above=True)

    def chosen(self) -> dict[str, tuple[Part, list[str], tuple[int, ...]]]:
        """By part: its models, of which one is always the reference, and its places on x."""
        out = {}
        for name in self.parts or PARTS:
            part = PARTS[name]
            choice = self.models or (_QUICK if self.quick else part.models)
            wanted = [m for m in part.models if m in choice]
            if not wanted:
                continue
            labels = list(dict.fromkeys([REFERENCE, *wanted]))
            out[name] = part, labels, part.xs[:2] if self.quick else part.xs
        if not out:
            raise ValueError(
                f"models={list(self.models)} are in none of the parts {list(self.parts)}; "
                f"the parts and their models: "
                + "; ".join(f"{name}: {' '.join(p.models)}" for name, p in PARTS.items())
            )
        return out

    @property
    def size(self) -> dict[str, Any]:
        return SIZE | {"layers": 2} if self.quick else SIZE


@dataclass
class Measured:
    """One part: by place on x and model the times; and what was left out, with the reason."""

    part: Part
    programs: dict[int, dict[str, Program]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def run(plan: Plan, out: Path | None) -> None:
    chosen = plan.chosen()
    if out is not None:
        check_folder(out)
    remember_programs()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    memories: dict[str, Memory] = {}
    measured: dict[str, Measured] = {}
    with progress_bar() as progress:
        wanted = list(dict.fromkeys(m for _, labels, _ in chosen.values() for m in labels))
        task = progress.add_task("drawing weights", total=len(wanted))
        for label in wanted:
            memories[label] = build(SUBJECTS[label], plan.size)
            progress.advance(task)
        progress.remove_task(task)
        for name, (part, labels, xs) in chosen.items():
            measured[name] = measure(part, {m: memories[m] for m in labels}, xs, plan, progress)
    results = latency_report.results(measured, memories, SUBJECTS)
    if plan.quick:  # the targets are of the full size
        results["targets"] = []
    latency_report.show(results, plan.size)
    if out is not None:
        about = {"benchmark": "latency", "command": command(), "load_before": load}
        settings = {"size": plan.size, "runs": plan.runs, "seconds_for_each": plan.seconds}
        write_results(out / "latency.json", about | {"settings": settings} | results)
        latency_report.write(results, plan.size, out)


def measure(
    part: Part, memories: dict[str, Memory], xs: Sequence[int], plan: Plan, progress: Progress
) -> Measured:
    found = Measured(part)
    pace: dict[str, float] = {}  # seconds for each step or stream, at the last place on x
    for x in xs:
        longest = _PATIENCE * plan.seconds
        labels = [m for m in memories if _fits(found, m, memories[m], x, pace, longest)]
        task = progress.add_task(f"{part.title}, {x}: compiling", total=1 + len(labels))
        made = {}
        for label in labels:
            made[label] = part.make(label, memories[label], x)
            progress.advance(task)
        if REFERENCE in made:
            made["bound"] = part.bound(memories[REFERENCE], x)
        progress.remove_task(task)
        turns = list(made.values())
        take_turns(
            turns, progress, f"{part.title}, {x}: timing", runs=plan.runs, seconds=plan.seconds
        )
        for label, program in made.items():
            # What is compiled holds memory, and later parts need it.
            program.call = _gone
            if label != "bound":
                pace[label] = min(program.seconds) / x
        found.programs[x] = made
    return found


def _fits(
    found: Measured, label: str, memory: Memory, x: int, pace: dict[str, float], longest: float
) -> bool:
    expected = pace.get(label, 0) * x
    if expected > longest:
        found.left_out.append(f"{label} at {x}: one run would take about {expected:.0f} s")
        return False
    state = 4 * memory.state_size * (x if found.part.x == "streams" else 1)
    if state > _LARGEST_STATE:
        found.left_out.append(f"{label} at {x}: its state alone takes {state / 1e9:.1f} GB")
        return False
    return True


def _gone() -> None:
    raise RuntimeError("this program has been timed and given up")


def check_folder(out: Path) -> None:
    """Results go into a folder, which is made if its own folder is there."""
    if not out.parent.is_dir():
        raise ValueError(f"out={str(out)!r}: the folder {str(out.parent)!r} does not exist")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; name a folder")
    out.mkdir(exist_ok=True)
    files.check_writable("out", out / "results.json")


def command() -> str:
    return shlex.join(["agalite", *sys.argv[1:]])
