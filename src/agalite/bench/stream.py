"""`agalite bench stream`: steps per second of streaming agents on one core, and a long stream.

Every step acts, learns and is forgotten (`agents/stream.py`). The task is CartPole without
velocities, whose own cost is small. The first table is the speed by the width of the network, for
the first agent at all widths and for the others at one. Beside steps a second stand steps a second
of the process's own time on the core: what a core does that nothing else runs on. The long stream
is one run of width 64: memory, speed and the size of weights and states must be the same at its
end as at its beginning.
"""

import dataclasses
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
from agalite.networks.actor_critic import ActorCritic
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
        first, *others = AGENTS
        only = TARGET_WIDTH if TARGET_WIDTH in widths else widths[0]
        pairs = [*((first, width) for width in widths), *((name, only) for name in others)]
        task = progress.add_task("streaming", total=len(pairs) * (rounds + 1))
        speeds = [Speed(name, width) for name, width in pairs]
        for speed in speeds:
            speed.time(1)  # also compiles
            progress.advance(task)
            speed.clear()
        for _ in range(rounds):
            for speed in speeds:
                speed.time()
                progress.advance(task)
        parts = _long_stream(steps, progress) if steps else []
    rows = [speed.row for speed in speeds]
    _show(rows, parts)
    targets = [
        at_least(
            f"steps/s of the core's time, {row['agent']}, width {TARGET_WIDTH}",
            row["steps_per_core_second"],
            TARGET,
        )
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
        self.agent, self.width = agent, width
        self.rates, self.core_rates = list[float](), list[float]()
        self.trainer = make_trainer(*AGENTS[agent], width)
        self._advance = jax.jit(self.trainer.advance, donate_argnums=0)
        self._state = jax.jit(self.trainer.init)(np.uint32(0))

    def time(self, updates: int = 2) -> None:
        """Runs so many times `_CHUNK` steps."""
        began, began_on_core = time.perf_counter(), time.process_time()
        self._state, _ = jax.block_until_ready(self._advance(self._state, np.int32(updates)))
        self.rates.append(updates * _CHUNK / (time.perf_counter() - began))
        self.core_rates.append(updates * _CHUNK / (time.process_time() - began_on_core))

    def clear(self) -> None:
        self.rates.clear()
        self.core_rates.clear()

    @property
    def row(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "width": self.width,
            "parameters": self.trainer.parameter_count,
            "steps_per_second": float(np.median(self.rates)),
            "steps_per_core_second": float(np.median(self.core_rates)),
            "best": max(self.rates),
        }


def make_trainer(agent: StreamAgent, gradient: str, width: int, steps: int = 10**9) -> Trainer:
    """The trainer of a streaming agent in CartPole, its network as wide as given.

    The rate of random actions falls over a part of `steps`.
    """
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
            "total_timesteps": steps,
        },
    )
    assert isinstance(config, TrainConfig)
    return Trainer(config)


def _long_stream(steps: int, progress: Any) -> list[dict[str, float]]:
    """A row after a hundredth and after every tenth of a stream, also printed at once."""
    trainer = make_trainer(StreamQ(), "rtrl", LONG_WIDTH, steps)
    advance = jax.jit(trainer.advance, donate_argnums=0)
    state = jax.jit(trainer.init)(np.uint32(0))
    marks = sorted({m for m in (steps // 100, *_tenths(steps)) if m >= _CHUNK})
    rows, done = list[dict[str, float]](), 0
    task = progress.add_task(f"a stream of {steps:,} steps", total=len(marks))
    for mark in marks:
        updates = max(1, (mark - done) // _CHUNK)
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(advance(state, np.int32(updates)))
        done += updates * _CHUNK
        weights = [np.asarray(x) for x in jax.tree.leaves(state.weights)]
        carried = state.runner_state.memory_state, state.opt_state.trace
        rows.append(
            {
                "steps": done,
                "steps_per_second": updates * _CHUNK / (time.perf_counter() - began),
                "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "weight_norm": _norm(_trained(state.weights)),
                "state_norm": _norm(carried[0]),
                "trace_norm": _norm(carried[1]),
                "not_finite": int(sum((~np.isfinite(w)).sum() for w in weights)),
                "return": float(metrics["charts/episodic_return"]),
            }
        )
        progress.console.print({k: round(v, 1) for k, v in rows[-1].items()})
        progress.advance(task)
    return rows


def _tenths(steps: int) -> list[int]:
    return [steps * part // PARTS for part in range(1, PARTS + 1)]


def _trained(weights: ActorCritic) -> ActorCritic:
    """Without running statistics, whose counts grow with the stream."""
    return dataclasses.replace(weights, obs_statistics=None, return_statistics=None)


def _norm(tree: Any) -> float:
    arrays = [x for x in jax.tree.leaves(tree) if np.issubdtype(x.dtype, np.inexact)]
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in arrays)))


def _show(rows: list[dict[str, Any]], parts: list[dict[str, float]]) -> None:
    table = Table(title=f"Streaming in {ENV} on one core: steps per second")
    widths = sorted({row["width"] for row in rows})
    table.add_column("agent")
    for width in widths:
        table.add_column(f"width {width}", justify="right")
    for name in AGENTS:
        own = {row["width"]: row for row in rows if row["agent"] == name}
        for key, what in (
            ("steps_per_second", ""),
            ("steps_per_core_second", ", of the core's time"),
        ):
            cells = (f"{own[width][key]:,.0f}" if width in own else "" for width in widths)
            table.add_row(name + what, *cells)
    Console().print(table)
    if not parts:
        return
    table = Table(title=f"One stream, stream-q with rtrl, width {LONG_WIDTH}")
    columns = ("steps", "steps/s", "peak memory, MB", "norm of weights", "of states", "of traces")
    for column in (*columns, "return"):
        table.add_column(column, justify="right")
    for part in parts:
        names = ("megabytes", "weight_norm", "state_norm", "trace_norm", "return")
        numbers = (f"{part[k]:,.1f}" for k in names)
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
