"""Is the exported file the same agent? Both play the same observations, each with its own state."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agalite.export.step import Step, zeros

STEPS = 200
TOLERANCE = 1e-5
_RESETS = 0.05

# A list of arrays in, a list of arrays out, as the step's own function.
Run = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


class Difference(NamedTuple):
    size: float
    """Relative to the output's largest number where that is above 1, as rounding is; infinite
    where whole numbers are not equal."""
    output: str
    step: int


def check(step: Step, candidate: Run, observation_space: Any, *, tolerance: float) -> float:
    """The largest difference in a replay; one above `tolerance` is a ValueError."""
    worst = replay(step, candidate, observation_space)
    if worst.size <= tolerance:
        return worst.size
    own = replay(step, _one_of_three(step), observation_space)
    raise ValueError(
        f"the exported file differs from the agent: output {worst.output!r} by {worst.size:.2g} at "
        f"step {worst.step} of {STEPS}, and {tolerance:g} is allowed (--tolerance); nothing was "
        f"written. From itself, computed as one of three, the agent differs by {own.size:.2g}"
    )


def replay(step: Step, candidate: Run, observation_space: Any, *, seed: int = 0) -> Difference:
    """The largest difference of any output in 200 steps with resets, each with its own state."""
    compiled = jax.jit(step.function)
    generator = np.random.default_rng(seed)
    batch, heads = step.inputs[0].shape[0], len(step.outputs) - len(step.state)
    ours, theirs = zeros(step), zeros(step)
    worst = Difference(0.0, "", 0)
    # On an accelerator products are rounded coarsely unless one asks.
    with jax.default_matmul_precision("highest"):
        for t in range(STEPS):
            observation = sample(observation_space, step.inputs[0], generator)
            reset = (generator.random(batch) < _RESETS) | (t == 0)
            expected = [np.asarray(x) for x in compiled(observation, reset, *ours)]
            found = [np.asarray(x) for x in candidate([observation, reset, *theirs])]
            for tensor, a, b in zip(step.outputs, expected, found, strict=True):
                size = _difference(a, b)
                if not np.isfinite(size):  # nothing is worse
                    return Difference(size, tensor.name, t)
                if size > worst.size:
                    worst = Difference(size, tensor.name, t)
            ours, theirs = expected[heads:], found[heads:]
    return worst


def _one_of_three(step: Step) -> Run:
    """The agent itself as another program: how far rounding alone goes."""
    compiled = jax.jit(jax.vmap(lambda *x: step.function(*x)))

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [x[0] for x in compiled(*(np.stack([x] * 3) for x in inputs))]

    return run


def sample(space: Any, like: Any, generator: np.random.Generator) -> np.ndarray:
    """Observations (N, ...) such as the world might give."""
    if hasattr(space, "n"):
        return generator.integers(0, int(space.n), like.shape).astype(like.dtype)
    low, high = (np.broadcast_to(np.asarray(x, np.float64), space.shape) for x in _limits(space))
    if like.dtype.kind in "iu":
        low, high = np.clip(low, -1000, 1000), np.clip(high, -1000, 1000)
        return generator.integers(low.astype(int), high.astype(int) + 1, like.shape).astype(
            like.dtype
        )
    # Some worlds give the largest float as a limit, and mean none.
    bounded = (low > -1e6) & (high < 1e6)
    uniform = generator.uniform(np.where(bounded, low, 0), np.where(bounded, high, 1), like.shape)
    return np.where(bounded, uniform, generator.normal(size=like.shape)).astype(like.dtype)


def _limits(space: Any) -> tuple[Any, Any]:
    return space.low, space.high


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return np.inf
    if a.dtype.kind != "f":
        return 0.0 if (a == b).all() else np.inf
    if a.size == 0:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.abs(a - b).max() / max(1.0, np.abs(a).max()))
