"""`agalite bench stream`: steps per second of streaming agents on one core, and a long stream.

Every step acts, learns and is forgotten (`agents/stream.py`). The task is CartPole without
velocities, whose own cost is small. The first table is the speed by the width of the network. The
long stream is one run of the default width: memory, speed and weights must be the same at its end
as at its beginning.
"""

import os
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from agalite.agents.stream import StreamAC, StreamAgent, StreamQ
from agalite.bench.report import at_least, at_most, show_targets, write_results
from agalite.bench.timing import progress_bar
from agalite.training.config import TrainConfig
from agalite.training.presets import configure
from agalite.training.train import Trainer

ENV = "masked-cartpole"
WIDTHS = (32, 64, 128, 256)
TARGET_WIDTH, TARGET = 64, 3700.0  # steps a second
LONG_WIDTH, PARTS = 64, 10
_CHUNK = 500

AGENTS: dict[str, tuple[StreamAgent, str]] = {
    "stream-q, rtrl": (StreamQ(), "rtrl"),
    "stream-q, one step": (StreamQ(), "bptt"),
    "stream-ac, rtrl": (StreamAC(), "rtrl"),
}


def run(*, rounds: int, steps: int, out: Path | None, widths: tuple[int, ...] = WIDTHS) -> None:
    """Measures, prints and writes speed and memory.

    **Arguments:**

    - `rounds`: how often each agent is timed; all are interleaved.
    - `steps`: of the long stream; 0: none.
    - `out`: a JSON file to write; None writes nothing.
    - `widths`: of the networks.
    """
    with _one_core(), progress_bar() as progress:
        task = progress.add_task("streaming", total=len(widths) * len(AGENTS) * (rounds + 1))
        speeds = [Speed(name, width) for width in widths for name in AGENTS]
        for speed in speeds:
            speed.time()  # also compiles
            progress.advance(task)
            speed.rates.clear()
        for _ in range(rounds):
            for speed in speeds:
                speed.time()
                progress.advance(task)
        parts = _long_stream(steps, progress) if steps else []
    rows = [speed.row for speed in speeds]
    _show(rows, parts)
    targets = [
        at_least(f"steps/s, {row['agent']}, width {TARGET_WIDTH}", row["steps_per_second"], TARGET)
        for row in rows
        if row["width"] == TARGET_WIDTH
    ]
    if parts:
        first, last = parts[0], parts[-1]
        grown = last["megabytes"] / first["megabytes"]
        targets.append(at_most(f"memory after {steps:,} steps, of that after a tenth", grown, 1.05))
        targets.append(at_most("weights that are not finite", last["not_finite"], 0))
    show_targets(targets)
    if out is not None:
        results = {"benchmark": "stream", "speeds": rows, "long": parts, "targets": targets}
        write_results(out, results)


class Speed:
    """Steps per second of one agent with a network of one width."""

    def __init__(self, agent: str, width: int) -> None:
        self.agent, self.width, self.rates = agent, width, list[float]()
        self.trainer = make_trainer(*AGENTS[agent], width)
        self._advance = jax.jit(self.trainer.advance, donate_argnums=0)
        self._state = jax.jit(self.trainer.init)(np.uint32(0))

    def time(self, updates: int = 4) -> None:
        """Runs so many times `_CHUNK` steps."""
        began = time.perf_counter()
        self._state, _ = jax.block_until_ready(self._advance(self._state, np.int32(updates)))
        self.rates.append(updates * _CHUNK / (time.perf_counter() - began))

    @property
    def row(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "width": self.width,
            "parameters": self.trainer.parameter_count,
            "steps_per_second": float(np.median(self.rates)),
            "best": max(self.rates),
        }


def make_trainer(agent: StreamAgent, gradient: str, width: int) -> Trainer:
    """The trainer of a streaming agent in CartPole, its network as wide as given."""
    options = {"d_model": width, "head_size": width // 2, "ffn_size": width}
    config = configure(
        "tuned",
        {
            "env": ENV,
            "agent": agent,
            "gradient": gradient,
            "memory_options": options,
            "hidden_size": width,
            "num_steps": _CHUNK,
            "total_timesteps": 10**9,
        },
    )
    assert isinstance(config, TrainConfig)
    return Trainer(config)


def _long_stream(steps: int, progress: Any) -> list[dict[str, float]]:
    """A row for each tenth of a stream."""
    trainer = make_trainer(StreamQ(), "rtrl", LONG_WIDTH)
    advance = jax.jit(trainer.advance, donate_argnums=0)
    state = jax.jit(trainer.init)(np.uint32(0))
    state, _ = advance(state, np.int32(1))
    updates = max(1, steps // PARTS // _CHUNK)
    rows = []
    task = progress.add_task(f"a stream of {steps:,} steps", total=PARTS)
    for part in range(1, PARTS + 1):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(advance(state, np.int32(updates)))
        weights = [np.asarray(x) for x in jax.tree.leaves(state.weights)]
        rows.append(
            {
                "steps": part * updates * _CHUNK,
                "steps_per_second": updates * _CHUNK / (time.perf_counter() - began),
                "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "weight_norm": float(np.sqrt(sum(np.sum(np.square(w)) for w in weights))),
                "not_finite": int(sum((~np.isfinite(w)).sum() for w in weights)),
                "return": float(metrics["charts/episodic_return"]),
            }
        )
        progress.advance(task)
    return rows


def _show(rows: list[dict[str, Any]], parts: list[dict[str, float]]) -> None:
    table = Table(title=f"Streaming in {ENV} on one core: steps per second")
    widths = sorted({row["width"] for row in rows})
    table.add_column("agent")
    for width in widths:
        table.add_column(f"width {width}", justify="right")
    for name in AGENTS:
        own = {row["width"]: row["steps_per_second"] for row in rows if row["agent"] == name}
        table.add_row(name, *(f"{own[width]:,.0f}" for width in widths))
    Console().print(table)
    if not parts:
        return
    table = Table(title=f"One stream, stream-q with rtrl, width {LONG_WIDTH}")
    for column in ("steps", "steps/s", "peak memory, MB", "norm of the weights", "return"):
        table.add_column(column, justify="right")
    for part in parts:
        numbers = (f"{part[k]:,.1f}" for k in ("megabytes", "weight_norm", "return"))
        table.add_row(f"{part['steps']:,}", f"{part['steps_per_second']:,.0f}", *numbers)
    Console().print(table)


class _one_core:
    """Keeps the process on one of its cores, where the system can; before JAX starts threads."""

    def __enter__(self) -> None:
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        if self._cores is not None:
            os.sched_setaffinity(0, {min(self._cores)})

    def __exit__(self, *_: object) -> None:
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)
