"""Comparing an exported file with the agent: both get the same inputs, each with its own state."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agalite.export.step import Step, zeros

STEPS = 200
TOLERANCE = 1e-5
# Where the agent itself is not exact to `TOLERANCE`: so many times what it differs from itself by,
# up to a limit above which the numbers are no longer the same.
_ROUNDING, _MOST = 2.0, 1e-3
_RESET_PROBABILITY = 0.05

# The arrays of `Step.inputs` in, those of `Step.outputs` out.
Run = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


class Difference(NamedTuple):
    """The largest difference of a replay, and where it is."""

    size: float
    """Relative to the output's largest magnitude if that is above 1; infinite if integers
    differ."""
    output: str
    step: int


def check(step: Step, candidate: Run, observation_space: Any, *, tolerance: float | None) -> float:
    """Compares a file with the agent.

    **Arguments:**

    - `step`: the agent's step.
    - `candidate`: the function of the file.
    - `observation_space`: from which observations are drawn.
    - `tolerance`: a larger difference is a ValueError. `None`: `TOLERANCE`, or twice what the agent
        differs from itself by when it is computed in a batch, if that is more.

    **Returns:**

    The largest difference in a replay of `STEPS` steps.
    """
    worst = replay(step, candidate, observation_space)
    if worst.size <= (TOLERANCE if tolerance is None else tolerance):
        return worst.size
    own = replay(step, _batched(step), observation_space)
    if tolerance is None:
        tolerance = min(max(TOLERANCE, _ROUNDING * own.size), _MOST)
        if worst.size <= tolerance:
            return worst.size
    raise ValueError(
        f"the exported file differs from the agent: output {worst.output!r} by {worst.size:.2g} at "
        f"step {worst.step} of {STEPS}, and {tolerance:g} is allowed (--tolerance); nothing was "
        f"written. From itself, computed in a batch of three, the agent differs by {own.size:.2g}"
    )


def replay(step: Step, candidate: Run, observation_space: Any, *, seed: int = 0) -> Difference:
    """The largest difference of any output in `STEPS` steps with random resets."""
    compiled = jax.jit(step.function)
    generator = np.random.default_rng(seed)
    batch_size, heads = step.inputs[0].shape[0], len(step.outputs) - len(step.state)
    state, candidate_state = zeros(step), zeros(step)
    previous = step.inputs[2 : len(step.inputs) - len(step.state)]
    worst = Difference(0.0, "", 0)
    # Accelerators round the inputs of products by default.
    with jax.default_matmul_precision("highest"):
        for t in range(STEPS):
            observation = sample(observation_space, step.inputs[0], generator)
            reset = (generator.random(batch_size) < _RESET_PROBABILITY) | (t == 0)
            given = [observation, reset, *(_previous(x, generator) for x in previous)]
            expected = [np.asarray(x) for x in compiled(*given, *state)]
            found = [np.asarray(x) for x in candidate([*given, *candidate_state])]
            for tensor, a, b in zip(step.outputs, expected, found, strict=True):
                size = _difference(a, b)
                if not np.isfinite(size):
                    return Difference(size, tensor.name, t)
                if size > worst.size:
                    worst = Difference(size, tensor.name, t)
            state, candidate_state = expected[heads:], found[heads:]
    return worst


def _previous(like: Any, generator: np.random.Generator) -> np.ndarray:
    """A previous action or reward; 0 and 1 are actions of every discrete space but the smallest."""
    if like.dtype.kind in "iu":
        return generator.integers(0, 2, like.shape).astype(like.dtype)
    return generator.normal(size=like.shape).astype(like.dtype)


def _batched(step: Step) -> Run:
    """The agent in a batch of three, another program: it differs by rounding alone."""
    compiled = jax.jit(jax.vmap(lambda *x: step.function(*x)))

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [x[0] for x in compiled(*(np.stack([x] * 3) for x in inputs))]

    return run


def sample(space: Any, like: Any, generator: np.random.Generator) -> np.ndarray:
    """Random observations (N, ...) of the space, of the shape and dtype of `like`."""
    if hasattr(space, "n"):
        return generator.integers(0, int(space.n), like.shape).astype(like.dtype)
    limits = (space.low, space.high)
    low, high = (np.broadcast_to(np.asarray(x, np.float64), space.shape) for x in limits)
    if like.dtype.kind in "iu":
        low, high = np.clip(low, -1000, 1000), np.clip(high, -1000, 1000)
        return generator.integers(low.astype(int), high.astype(int) + 1, like.shape).astype(
            like.dtype
        )
    # Some environments give the largest float as a limit and mean none.
    bounded = (low > -1e6) & (high < 1e6)
    uniform = generator.uniform(np.where(bounded, low, 0), np.where(bounded, high, 1), like.shape)
    return np.where(bounded, uniform, generator.normal(size=like.shape)).astype(like.dtype)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return np.inf
    if a.dtype.kind != "f":
        return 0.0 if (a == b).all() else np.inf
    if a.size == 0:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.abs(a - b).max() / max(1.0, np.abs(a).max()))
