"""`agalite bench throughput --envs`: how many steps a second the worlds make, by random actions.

All environments of a world step in one compiled loop, beginning again when an episode ends, and
every observation is written to memory, as it would be for a policy to read. Beside Mystery Path
stand the real memory-gym, in one process, where that is installed, and a loop that writes frames of
the same size and nothing else: no environment that shows pixels can be faster.
"""

import importlib.util
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8
from rich.console import Console
from rich.table import Table

from agalite.bench.report import at_least, show_targets, write_results
from agalite.bench.timing import progress_bar, spread
from agalite.envs.registry import ENVIRONMENTS, make
from agalite.envs.vector import Vector

FRAME = (84, 84, 3)
ORIGINAL = "memory-gym, one process"
FRAMES = "frames written, nothing else"
# How many environments step together, and for how many steps a round lasts.
SIZES: dict[str, tuple[int, int]] = {
    "tmaze": (1024, 1000),
    "masked-cartpole": (1024, 1000),
    "noisy-masked-cartpole": (1024, 1000),
    "mystery-path-grid": (256, 200),
    "mystery-path": (256, 200),
}
CRAFTAX = {"craftax-classic-symbolic": (64, 50), "craftax-symbolic": (64, 20)}


@dataclass
class Rate:
    """Steps a second of one world, every time it was measured."""

    name: str
    count: int
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return float(np.median(self.rates))

    @property
    def spread(self) -> float:
        return spread(self.rates)


def run(*, rounds: int, craftax: bool, out: Path | None) -> None:
    rates = measure(rounds, craftax=craftax)
    show(rates)
    found = targets(rates)
    show_targets(found)
    if out is not None:
        rows = {r.name: {"together": r.count, "steps_per_second": r.rates} for r in rates}
        write_results(out, {"environments": rows, "targets": found})


def measure(rounds: int, *, craftax: bool) -> list[Rate]:
    sizes = SIZES | (CRAFTAX if craftax else {})
    runners: list[tuple[Rate, Any]] = []
    with progress_bar() as progress:
        names = [name for name in sizes if not ENVIRONMENTS[name].missing()]
        task = progress.add_task("compiling", total=len(names) + 2)
        for name in names:
            count, steps = sizes[name]
            runners.append((Rate(name, count), _rollout(name, count, steps)))
            progress.advance(task)
        count, steps = sizes["mystery-path-grid"]
        runners.append((Rate(FRAMES, count), _frames(count, steps)))
        progress.advance(task)
        if importlib.util.find_spec("memory_gym"):
            runners.append((Rate(ORIGINAL, 1), _memory_gym(1000)))
        progress.advance(task)
        task = progress.add_task("timing", total=rounds * len(runners))
        for _ in range(rounds):
            for rate, run in runners:
                start = time.perf_counter()
                steps = run()
                rate.rates.append(steps / (time.perf_counter() - start))
                progress.advance(task)
    return [rate for rate, _ in runners]


def _rollout(name: str, count: int, steps: int) -> Any:
    """A function that makes `steps` steps in each of `count` environments, and says how many."""
    world: Any = make(name)
    vector = Vector(world, count)
    space = world.action_space(world.default_params)

    def step(carry: Any, key: Array) -> tuple[Any, Any]:
        state, _ = carry
        choose, move = jax.random.split(key)
        actions = jax.vmap(space.sample)(jax.random.split(choose, count))
        obs, state, reward, *_ = vector.step(move, state, actions)
        return (state, obs), reward.mean()

    @jax.jit
    def rollout(carry: Any, key: Array) -> Any:
        return jax.lax.scan(step, carry, jax.random.split(key, steps))

    obs, state = jax.jit(vector.reset)(jax.random.key(0))
    held = [(state, obs), jax.random.key(1)]

    def run() -> int:
        held[1], key = jax.random.split(held[1])
        held[0], _ = rollout(held[0], key)
        jax.block_until_ready(held[0])
        return count * steps

    run()
    return run


def _frames(count: int, steps: int) -> Any:
    def step(frames: UInt8[Array, "B 84 84 3"], i: Array) -> tuple[Array, None]:
        return jnp.broadcast_to((frames[:, 0, 0, 0] + i)[:, None, None, None], frames.shape), None

    @jax.jit
    def write(frames: Array) -> Array:
        return jax.lax.scan(step, frames, jnp.arange(steps, dtype=jnp.uint8))[0]

    frames = jnp.zeros((count, *FRAME), jnp.uint8)

    def run() -> int:
        write(frames).block_until_ready()
        return count * steps

    run()
    return run


def _memory_gym(steps: int) -> Any:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import gymnasium
    import memory_gym  # noqa: F401  registers its environments

    env = gymnasium.make("MysteryPath-Grid-v0", disable_env_checker=True)
    env.action_space.seed(0)
    env.reset(seed=0)

    def run() -> int:
        for _ in range(steps):
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        return steps

    run()
    return run


def targets(rates: list[Rate]) -> list[dict[str, Any]]:
    by_name = {rate.name: rate for rate in rates}

    found = [
        at_least(f"{name}, million steps a second", by_name[name].median / 1e6, 1)
        for name in ("tmaze", "masked-cartpole", "noisy-masked-cartpole")
    ]
    grid = by_name["mystery-path-grid"]
    if ORIGINAL in by_name:
        ratio = float(np.median(np.divide(grid.rates, by_name[ORIGINAL].rates)))
        found.append(at_least("mystery-path-grid / memory-gym in one process", ratio, 10))
    return found


def show(rates: list[Rate]) -> None:
    table = Table(title="Environment steps a second, random actions")
    for column in ("environment", "together", "steps/s", "spread", "/ frames alone"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    frames = next(rate for rate in rates if rate.name == FRAMES)
    for rate in rates:
        pixels = "mystery" in rate.name or rate.name in (FRAMES, ORIGINAL)
        share = f"{rate.median / frames.median:.0%}" if pixels else ""
        table.add_row(
            rate.name, str(rate.count), f"{rate.median:,.0f}", f"{rate.spread:.0%}", share
        )
    Console().print(table)
    if not any(rate.name == ORIGINAL for rate in rates):
        Console().print(
            "memory-gym is not installed, so it was not compared: "
            "pip install --no-deps memory-gym==1.0.2 && pip install pygame",
            highlight=False,
            soft_wrap=True,
        )
