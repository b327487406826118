"""`agalite bench throughput --async`: acting and learning side by side against one after the other.

The environment takes 5 ms for a step and hardly any of the processor; the agent is AGaLiTe at the
paper's T-Maze size, all else is what `agalite train gym:ID` begins with. Both ways use the same
actors, the same learner and the same processes; synchronously one group acts, then the learner
learns, and nothing overlaps. They take turns in one run.

After them Memory Maze, where it is installed: how much of the time its environments have nothing to
do, because the actor or the learner is not ready for them.
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
from agalite.training.asynchronous.threads import LocalActors
from agalite.training.config import HostConfig
from agalite.training.presets import preset
from agalite.training.session import remember_programs

SLOW = f"gym:agalite.bench.sleep_env:{ID}"
MAZE = "memory-maze-9x9"
MEMORY = "agalite"
UPDATES = 5  # timed in each round
TARGET = 1.5
STALLED = 0.1


class Session:
    """A run without its folder: actors and a learner that go on where they stopped."""

    def __init__(self, name: str, env: str, *, synchronous: bool = False) -> None:
        self.name = name
        settings = {**preset("tuned", env, MEMORY), "total_timesteps": 10**9}
        self.config = HostConfig(env=env, memory=MEMORY, synchronous=synchronous, **settings)
        self._place = LocalActors(self.config)
        network = Network(self.config, *self._place.spaces)
        self._learner = Learner(self.config, network)
        self._state = self._learner.begin(np.uint32(0))
        self._place.start(network, 0, self._state.weights, print)
        self.rates: list[float] = []
        self.lags: list[float] = []
        self.stalled: list[float] = []

    def learn(self) -> None:
        batch = None
        while batch is None:
            batch = self._place.take(self.config.rollouts, 1.0)
        rollout, starts, versions = stack(batch)
        self.lags.append(float(np.mean(int(self._state.update) - versions)))
        state, _ = self._learner.update(self._state, rollout, starts)
        self._state = jax.block_until_ready(state)
        self._place.publish(int(state.update), state.weights)

    def measure(self) -> None:
        """What waited since the last round is used up first."""
        for _ in range(1 + self.config.queue_size):
            self.learn()
        self._place.news()
        start = time.perf_counter()
        for _ in range(UPDATES):
            self.learn()
        seconds = time.perf_counter() - start
        self.rates.append(UPDATES * self.config.steps_per_update / seconds)
        said = self._place.news()
        self.stalled.append(sum(d.stalled for d in said) / max(sum(d.seconds for d in said), 1e-9))

    def close(self) -> None:
        self._place.close()


def run(*, rounds: int, out: Path | None) -> None:
    remember_programs()
    ways = _measured(
        rounds,
        lambda: Session("synchronous", SLOW, synchronous=True),
        lambda: Session("asynchronous", SLOW),
    )
    rows = [_row(session) for session in ways]
    Console().print(_table(f"5 ms a step, {ways[0].config.num_envs} environments", rows))
    ratio = float(np.median(np.divide(ways[1].rates, ways[0].rates)))
    targets = [
        at_least("asynchronous by synchronous, steps a second", ratio, TARGET),
        at_most("policy lag, asynchronous, in updates", rows[1]["policy_lag"], 3.0),
    ]
    maze = _maze(rounds)
    if maze is not None:
        targets.append(at_most(f"{MAZE}, environments wait", maze["environments_stalled"], STALLED))
    show_targets(targets)
    if out is not None:
        write_results(out, {"ways": rows, "memory_maze": maze, "targets": targets})


def _maze(rounds: int) -> dict[str, Any] | None:
    """A row for Memory Maze, or None where it is not installed."""
    try:
        (session,) = _measured(rounds, lambda: Session(MAZE, MAZE))
    except ModuleNotFoundError as error:
        Console().print(f"{MAZE} is left out: {error}")
        return None
    row = _row(session)
    Console().print(_table(f"Memory Maze, {session.config.num_envs} environments", [row]))
    return row


def _measured(rounds: int, *makers: Callable[[], Session]) -> list[Session]:
    """What they make, after it has taken turns and is closed."""
    sessions: list[Session] = []
    try:
        with progress_bar() as progress:
            task = progress.add_task("starting", total=len(makers) * rounds)
            for make in makers:
                sessions.append(make())
                sessions[-1].learn()  # compiles
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
