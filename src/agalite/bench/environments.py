"""`agalite bench throughput --envs`: steps per second of the environments, with random actions.

A batch of environments steps in one compiled loop with automatic resets, and every observation is
written to memory, as it would be for a policy to read. Mystery Path is compared with memory-gym in
one process, where that is installed, and with a loop that only writes frames of the same size: no
environment with pixel observations can be faster.
"""

import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces
from jaxtyping import Array, UInt8
from rich.console import Console
from rich.table import Table

from agalite.bench.report import at_least, show_targets, write_results
from agalite.bench.timing import progress_bar, spread
from agalite.envs.registry import ENVIRONMENTS, make
from agalite.envs.vector import VectorEnv

FRAME = (84, 84, 3)
MEMORY_GYM = "memory-gym, one process"
FRAMES_ONLY = "frames written, nothing else"
# By name: num_envs, and the steps of each in a round.
SIZES: dict[str, tuple[int, int]] = {
    "tmaze": (1024, 1000),
    "masked-cartpole": (1024, 1000),
    "noisy-masked-cartpole": (1024, 1000),
    "repeat-previous": (1024, 1000),
    "memory-chain": (1024, 1000),
    "mystery-path-grid": (256, 200),
    "mystery-path": (256, 200),
}
CRAFTAX_SIZES = {"craftax-classic-symbolic": (64, 50), "craftax-symbolic": (64, 20)}

# Steps all environments of a benchmark, and returns how many steps these are together.
Stepper = Callable[[], int]


@dataclass
class Rate:
    """Steps per second of one environment, round by round."""

    name: str
    num_envs: int
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return float(np.median(self.rates))

    @property
    def spread(self) -> float:
        return spread(self.rates)


def run(*, rounds: int, craftax: bool, out: Path | None) -> None:
    """Measures, prints and writes the rates.

    **Arguments:**

    - `rounds`: how often each environment is timed.
    - `craftax`: Craftax too, which compiles for minutes.
    - `out`: a JSON file to write; None writes nothing.
    """
    rates = measure(rounds, craftax=craftax)
    show(rates)
    found = targets(rates)
    show_targets(found)
    if out is not None:
        rows = {r.name: {"together": r.num_envs, "steps_per_second": r.rates} for r in rates}
        write_results(out, {"environments": rows, "targets": found})


def measure(rounds: int, *, craftax: bool) -> list[Rate]:
    """The rates of all environments that are installed, interleaved."""
    sizes = SIZES | (CRAFTAX_SIZES if craftax else {})
    steppers: list[tuple[Rate, Stepper]] = []
    with progress_bar() as progress:
        names = [name for name in sizes if not ENVIRONMENTS[name].missing_packages()]
        task = progress.add_task("compiling", total=len(names) + 2)
        for name in names:
            num_envs, steps = sizes[name]
            steppers.append((Rate(name, num_envs), env_stepper(name, num_envs, steps)))
            progress.advance(task)
        num_envs, steps = sizes["mystery-path-grid"]
        steppers.append((Rate(FRAMES_ONLY, num_envs), _frame_writer(num_envs, steps)))
        progress.advance(task)
        if importlib.util.find_spec("memory_gym"):
            steppers.append((Rate(MEMORY_GYM, 1), _memory_gym_stepper(1000)))
        progress.advance(task)
        task = progress.add_task("timing", total=rounds * len(steppers))
        for _ in range(rounds):
            for rate, step in steppers:
                start = time.perf_counter()
                steps = step()
                rate.rates.append(steps / (time.perf_counter() - start))
                progress.advance(task)
    return [rate for rate, _ in steppers]


def random_rollout(env: Any, num_envs: int, steps: int) -> tuple[Callable[..., Any], Any]:
    """A function of a state and a key that takes `steps` random steps, and the first state."""
    vector = VectorEnv(env, num_envs)
    space = env.action_space(env.default_params)

    def step(carry: Any, key: Array) -> tuple[Any, Any]:
        env_state, _ = carry
        action_key, step_key = jax.random.split(key)
        actions = random_actions(space, action_key, num_envs)
        obs, env_state, reward, *_ = vector.step(step_key, env_state, actions)
        return (env_state, obs), reward.mean()

    def rollout(carry: Any, key: Array) -> Any:
        return jax.lax.scan(step, carry, jax.random.split(key, steps))

    obs, env_state = jax.jit(vector.reset)(jax.random.key(0))
    return rollout, (env_state, obs)


def random_actions(space: Any, key: Array, num_envs: int) -> Array:
    """Random actions (num_envs, ...), one draw for all: a split key for each would cost as much
    as many an environment."""
    if isinstance(space, spaces.Discrete):
        # Eight times as fast as `randint`, which divides whole numbers.
        return (jax.random.uniform(key, (num_envs,)) * space.n).astype(jnp.int32)
    return jax.vmap(space.sample)(jax.random.split(key, num_envs))


def env_stepper(name: str, num_envs: int, steps: int) -> Stepper:
    """A function that takes `steps` random steps in each of `num_envs` environments."""
    rollout, first = random_rollout(make(name), num_envs, steps)
    rollout = jax.jit(rollout)
    carried = [first, jax.random.key(1)]

    def run() -> int:
        carried[1], key = jax.random.split(carried[1])
        carried[0], _ = rollout(carried[0], key)
        jax.block_until_ready(carried[0])
        return num_envs * steps

    run()  # compiles
    return run


def _frame_writer(num_envs: int, steps: int) -> Stepper:
    def step(frames: UInt8[Array, "B 84 84 3"], i: Array) -> tuple[Array, None]:
        return jnp.broadcast_to((frames[:, 0, 0, 0] + i)[:, None, None, None], frames.shape), None

    @jax.jit
    def write(frames: Array) -> Array:
        return jax.lax.scan(step, frames, jnp.arange(steps, dtype=jnp.uint8))[0]

    frames = jnp.zeros((num_envs, *FRAME), jnp.uint8)

    def run() -> int:
        write(frames).block_until_ready()
        return num_envs * steps

    run()  # compiles
    return run


def _memory_gym_stepper(steps: int) -> Stepper:
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

    run()  # draws the first maze
    return run


def targets(rates: list[Rate]) -> list[dict[str, Any]]:
    by_name = {rate.name: rate for rate in rates}
    found = [
        at_least(f"{name}, million steps per second", by_name[name].median / 1e6, 1)
        for name in ("tmaze", "masked-cartpole", "noisy-masked-cartpole")
    ]
    if MEMORY_GYM in by_name:
        grid, original = by_name["mystery-path-grid"], by_name[MEMORY_GYM]
        ratio = float(np.median(np.divide(grid.rates, original.rates)))
        found.append(at_least("mystery-path-grid / memory-gym in one process", ratio, 10))
    return found


def show(rates: list[Rate]) -> None:
    """Prints the rates as a table."""
    table = Table(title="Environment steps per second, random actions")
    for column in ("environment", "num_envs", "steps/s", "spread", "/ frames only"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    frames = next(rate for rate in rates if rate.name == FRAMES_ONLY)
    for rate in rates:
        pixels = "mystery" in rate.name or rate.name in (FRAMES_ONLY, MEMORY_GYM)
        share = f"{rate.median / frames.median:.0%}" if pixels else ""
        table.add_row(
            rate.name, str(rate.num_envs), f"{rate.median:,.0f}", f"{rate.spread:.0%}", share
        )
    Console().print(table)
    if not any(rate.name == MEMORY_GYM for rate in rates):
        Console().print(
            "memory-gym is not installed, so it was not compared: "
            "pip install --no-deps memory-gym==1.0.2 && pip install pygame",
            highlight=False,
            soft_wrap=True,
        )
