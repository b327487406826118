"""`agalite bench throughput --async`: asynchronous training against synchronous training.

The environment's step takes 5 ms and hardly any CPU (`sleep_env`). The agent is AGaLiTe with the
preset of `agalite train gym:ID`. Both ways use the same actors, the
same learner and the same processes; synchronously the actors wait while the learner computes. The
two are interleaved in one process.

Memory Maze follows where it is installed: the fraction of time in which its environments wait for
the actor or the learner.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from agalite.bench.report import at_least, at_most, show_targets, write_results
from agalite.bench.sleep_env import ID
from agalite.bench.timing import progress_bar, spread
from agalite.training.asynchronous.learner import Learner, Network
from agalite.training.asynchronous.queue import stack
from agalite.training.asynchronous.threads import ThreadActors
from agalite.training.config import HostConfig
from agalite.training.presets import preset
from agalite.training.session import enable_compilation_cache

SLEEP_ENV = f"gym:agalite.bench.sleep_env:{ID}"
MEMORY_MAZE = "memory-maze-9x9"
MEMORY = "agalite"
UPDATES_PER_ROUND = 5
MIN_SPEEDUP = 1.5
MAX_LAG = 3.0  # updates
MAX_STALLED = 0.1


class Session:
    """Actors and a learner as in a run, without a run folder; `measure` continues them."""

    def __init__(self, name: str, env: str, *, synchronous: bool = False) -> None:
        self.name = name
        settings = {**preset("tuned", env, MEMORY), "total_timesteps": 10**9}
        self.config = HostConfig(env=env, memory=MEMORY, synchronous=synchronous, **settings)
        self._actors = ThreadActors(self.config)
        network = Network(self.config, *self._actors.spaces)
        self._learner = Learner(self.config, network)
        self._state = self._learner.init(np.uint32(0))
        self._actors.start(network, 0, self._state.weights, print)
        self.rates: list[float] = []
        self.lags: list[float] = []
        self.stalled: list[float] = []

    def update(self) -> None:
        """Waits for a batch of rollouts and learns from it."""
        batch = None
        while batch is None:
            batch = self._actors.take(self.config.rollouts, 1.0)
        rollout, starts, versions = stack(batch)
        self.lags.append(float(np.mean(int(self._state.update) - versions)))
        state, _ = self._learner.update(self._state, rollout, starts)
        self._state = jax.block_until_ready(state)
        self._actors.publish(int(state.update), state.weights)

    def measure(self) -> None:
        """Times a few updates, after the rollouts that queued since the last round are used."""
        for _ in range(1 + self.config.queue_size):
            self.update()
        self._actors.pop_stats()
        start = time.perf_counter()
        for _ in range(UPDATES_PER_ROUND):
            self.update()
        seconds = time.perf_counter() - start
        self.rates.append(UPDATES_PER_ROUND * self.config.steps_per_update / seconds)
        news = self._actors.pop_stats()
        self.stalled.append(sum(d.stalled for d in news) / max(sum(d.seconds for d in news), 1e-9))

    def close(self) -> None:
        self._actors.close()


def run(*, rounds: int, out: Path | None) -> None:
    """Measures, prints and writes the rates of both ways.

    **Arguments:**

    - `rounds`: how often each way is timed.
    - `out`: a JSON file to write; None writes nothing.
    """
    enable_compilation_cache()
    ways = _measure(
        rounds,
        lambda: Session("synchronous", SLEEP_ENV, synchronous=True),
        lambda: Session("asynchronous", SLEEP_ENV),
    )
    rows = [_row(session) for session in ways]
    Console().print(_table(f"5 ms per step, {ways[0].config.num_envs} environments", rows))
    ratio = float(np.median(np.divide(ways[1].rates, ways[0].rates)))
    targets = [
        at_least("asynchronous / synchronous, steps per second", ratio, MIN_SPEEDUP),
        at_most("policy lag, asynchronous, in updates", rows[1]["policy_lag"], MAX_LAG),
    ]
    maze = _memory_maze(rounds)
    if maze is not None:
        stalled = maze["environments_stalled"]
        targets.append(at_most(f"{MEMORY_MAZE}, environments wait", stalled, MAX_STALLED))
    show_targets(targets)
    if out is not None:
        write_results(out, {"ways": rows, "memory_maze": maze, "targets": targets})


def _memory_maze(rounds: int) -> dict[str, Any] | None:
    """A row for Memory Maze, or None where it is not installed."""
    try:
        (session,) = _measure(rounds, lambda: Session(MEMORY_MAZE, MEMORY_MAZE))
    except ModuleNotFoundError as error:
        Console().print(f"{MEMORY_MAZE} is left out: {error}")
        return None
    row = _row(session)
    Console().print(_table(f"Memory Maze, {session.config.num_envs} environments", [row]))
    return row


def _measure(rounds: int, *makers: Callable[[], Session]) -> list[Session]:
    """The sessions, interleaved for so many rounds and closed."""
    sessions: list[Session] = []
    try:
        with progress_bar() as progress:
            task = progress.add_task("starting", total=len(makers) * rounds)
            for make in makers:
                sessions.append(make())
                sessions[-1].update()  # compiles
            progress.update(task, description="timing")
            for _ in range(rounds):
                for session in sessions:
                    session.measure()
                    progress.advance(task)
    finally:
        for session in sessions:
            session.close()
    return sessions


def _row(session: Session) -> dict[str, Any]:
    return {
        "name": session.name,
        "steps_per_second": float(np.median(session.rates)),
        "spread": spread(session.rates),
        "policy_lag": float(np.mean(session.lags)),
        "environments_stalled": float(np.median(session.stalled)),
    }


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("", "steps/s", "spread", "policy lag", "environments wait"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['steps_per_second']:,.0f}",
            f"{100 * row['spread']:.0f}%",
            f"{row['policy_lag']:.2f}",
            f"{100 * row['environments_stalled']:.0f}%",
        )
    return table
