"""`agalite bench popgym`: steps per second of the POPGym environments, beside the package popgym.

Both take random actions and reset at the end of an episode. Here a batch of environments steps in
one compiled loop; the package steps one environment in Python. Rounds of the two alternate.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from agalite import extras, validation
from agalite.bench.environments import Stepper, env_stepper
from agalite.bench.report import at_least, show_targets, write_results
from agalite.bench.timing import progress_bar
from agalite.envs.popgym import table

TARGET = 100
_PACKAGE_STEPS = 2000


@dataclass
class Pair:
    """Steps per second of one environment, here and in the package, round by round."""

    name: str
    ours: list[float] = field(default_factory=list)
    package: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median over the rounds."""
        return float(np.median(np.divide(self.ours, self.package)))


def run(
    *,
    difficulties: Sequence[str],
    num_envs: int,
    steps: int,
    rounds: int,
    out: Path | None,
    names: Sequence[str] = (),
) -> list[Pair]:
    """Measures, prints and writes the rates.

    **Arguments:**

    - `difficulties`: of "easy", "medium" and "hard".
    - `num_envs`: how many step together here.
    - `steps`: of each of them in a round.
    - `rounds`: how often each environment is timed.
    - `out`: a JSON file to write; None writes nothing.
    - `names`: only these families, as in "RepeatFirst"; all if empty.
    """
    extras.require("agalite bench popgym", ["popgym", "mazelib"], "dev")
    for difficulty in difficulties:
        validation.check_one_of("difficulty", difficulty, table.DIFFICULTIES)
    for name in names:
        validation.check_one_of("family", name, table.FAMILIES)
    tasks = [
        task
        for task in table.tasks()
        if task.name.endswith(tuple(difficulties))
        and (not names or task.package_class.removesuffix(_suffix(task)) in names)
    ]
    pairs = []
    with progress_bar() as progress:
        bar = progress.add_task("timing", total=len(tasks))
        for task in tasks:
            pairs.append(_measure(task, num_envs, steps, rounds))
            progress.advance(bar)
            jax.clear_caches()  # a program of each environment, used once
    show(pairs, num_envs)
    targets = [at_least(f"{pair.name} / popgym", pair.ratio, TARGET) for pair in pairs]
    show_targets(targets)
    if out is not None:
        rows = {p.name: {"steps_per_second": p.ours, "package": p.package} for p in pairs}
        write_results(out, {"num_envs": num_envs, "environments": rows, "targets": targets})
    return pairs


def _suffix(task: table.Task) -> str:
    return task.name.rsplit("-", 1)[1].capitalize()


def _measure(task: table.Task, num_envs: int, steps: int, rounds: int) -> Pair:
    pair = Pair(task.name)
    ours, package = env_stepper(task.name, num_envs, steps), _package_stepper(task)
    for _ in range(rounds):
        for step, rates in ((ours, pair.ours), (package, pair.package)):
            start = time.perf_counter()
            count = step()
            rates.append(count / (time.perf_counter() - start))
    return pair


def _package_stepper(task: table.Task) -> Stepper:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import popgym.envs

        env: Any = getattr(popgym.envs, task.package_class)()
    env.action_space.seed(0)
    env.reset(seed=0)

    def run() -> int:
        for _ in range(_PACKAGE_STEPS):
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        return _PACKAGE_STEPS

    run()
    return run


def show(pairs: list[Pair], num_envs: int) -> None:
    """Prints the rates as a table."""
    rows = Table(title=f"Environment steps per second, random actions, {num_envs} together")
    for column in ("environment", "steps/s", "popgym", "ratio"):
        rows.add_column(column, justify="left" if column == "environment" else "right")
    for pair in pairs:
        ours, package = np.median(pair.ours), np.median(pair.package)
        rows.add_row(pair.name, f"{ours:,.0f}", f"{package:,.0f}", f"{pair.ratio:.0f}")
    Console().print(rows)
