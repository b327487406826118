"""Step sizes with which one update of a streaming agent cannot overshoot."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

STEP_RULES = ("intentional", "obgd")
TINY = 1e-12


class Limit(NamedTuple):
    """How far an update may go, of one group of weights."""

    change: Float[Array, ""] | float
    """Rule "intentional": alpha times the two norms is at most this."""
    largest: float
    """Rule "obgd": alpha itself is at most this."""
    kappa: float
    """Rule "obgd"."""


def tightest(limits: list[Limit]) -> Limit:
    """The limit of weights that several limits hold for."""
    change = limits[0].change
    for limit in limits[1:]:
        change = jnp.minimum(change, limit.change)
    return Limit(change, min(x.largest for x in limits), max(x.kappa for x in limits))


def step_size(
    rule: str,
    limit: Limit,
    error: Float[Array, ""],
    square: Float[Array, ""],
    length: Float[Array, ""],
    usual: Float[Array, ""],
) -> Float[Array, ""]:
    """The alpha of w <- w + alpha delta z.

    An update changes the prediction v(S), to the first order, by alpha delta g . z, which is at
    most alpha |delta| |g| |z| by the Cauchy-Schwarz inequality (2-norms).

    "intentional" chooses alpha so that this bound is a given fraction of the error, as normalised
    least mean squares does without a trace. It follows the principle of Sharifnassab et al.,
    "Intentional Updates for Streaming Reinforcement Learning" (2026), to fix the change of the
    prediction and not that of the weights; the bound by the two norms is this library's. |g| counts
    as at least its running root mean square, so that a state on which the weights have little
    influence does not make a large step. With a fraction of at most 1/2 neither v(S) nor v(S')
    moves by more than half of the error, if the gradient of v(S') is no longer than |g|: the TD
    error of the same transition keeps its sign.

    "obgd" is overshooting-bounded gradient descent (Elsayed et al., 2024, the algorithm of that
    name): alpha = largest / max(1, largest kappa max(|delta|, 1) |z|_1). With features within +-1
    and a kappa of 2 the TD error keeps its sign.

    **Arguments:**

    - `rule`: one of `STEP_RULES`.
    - `limit`: of this group of weights.
    - `error`: delta.
    - `square`: |g|^2.
    - `length`: |z|_1 for "obgd", |z|^2 for "intentional".
    - `usual`: the running mean of |g|^2, for "intentional".

    **Returns:**

    alpha.
    """
    if rule == "obgd":
        bounded = jnp.maximum(jnp.abs(error), 1) * length
        return limit.largest / jnp.maximum(1, limit.largest * limit.kappa * bounded)
    longest = jnp.maximum(square, usual)
    return limit.change / jnp.sqrt(longest * length + TINY)
