"""What the studies measure."""

import jax
import numpy as np
import pytest

from agalite.ops import delta_approximation
from agalite.studies import measurements


@pytest.mark.parametrize("basis", ["paper", "published", "slots"])
@pytest.mark.parametrize("r", [1, 4, 7])
def test_the_approximation_error_is_that_of_the_definition(basis, r):
    """In float64, from the sums that define C and C~ (Appendix B), term by term."""
    gate, width, steps, seeds = 0.3, 5, 20, 2
    rows = measurements.approximation_error(
        seeds=seeds, basis=basis, r=(r,), gates=(gate,), width=width, steps=steps
    )
    k, v = np.asarray(jax.random.normal(jax.random.key(0), (2, steps, seeds, width)), np.float64)
    decay = (1 - gate) ** (steps - 1 - np.arange(steps))
    own = r if basis != "slots" else r // 2 + 1
    t = np.arange(1, steps + 1)
    delta = delta_approximation(t[:, None], t[None, :], own, basis)
    for seed in range(seeds):
        left, right = (gate * decay[:, None] * x[:, seed] for x in (v, k))
        exact, near = left.T @ right, left.T @ delta @ right
        error = np.linalg.norm(exact - near)
        assert rows[0]["values"]["error"][seed] == pytest.approx(error, rel=1e-4, abs=1e-5)
        relative = error / np.linalg.norm(exact)
        assert rows[0]["values"]["relative_error"][seed] == pytest.approx(relative, rel=1e-3)
