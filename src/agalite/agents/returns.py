"""Advantages and value targets: GAE, lambda-returns and V-trace.

All arrays are time-major: (T,) for one environment, or (T, ...) elementwise over the other axes.

`next_values[t]` is the value to bootstrap from after step t: 0 where the episode terminated, the
value of the final observation where it was truncated, else the value of the next step's
observation. `ends[t]` is true where an episode ended with step t, either way; no later reward
counts towards it. The results are targets, so no gradient passes through them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from agalite import validation


def gae(
    rewards: Float[Array, "T ..."],
    values: Float[Array, "T ..."],
    next_values: Float[Array, "T ..."],
    ends: Bool[Array, "T ..."],
    *,
    gamma: float | Float[Array, ""],
    gae_lambda: float | Float[Array, ""],
) -> Float[Array, "T ..."]:
    """Generalised advantage estimation (Schulman et al., 2016).

    **Arguments:**

    - `rewards`, `values`, `next_values`: (T, ...), see the module's description.
    - `ends`: (T, ...) bool.
    - `gamma`: the discount factor.
    - `gae_lambda`: 0 for one-step advantages, 1 for those of the whole episode.

    **Returns:**

    Advantages (T, ...).
    """
    gamma, gae_lambda = _as_fraction("gamma", gamma), _as_fraction("gae_lambda", gae_lambda)
    rewards, values, next_values = _as_floats(rewards, values=values, next_values=next_values)
    continues = _continues(ends, rewards)
    td_errors = rewards + gamma * next_values - values
    return _scan_backwards(td_errors, gamma * gae_lambda * continues, jnp.zeros_like(rewards[0]))


def lambda_returns(
    rewards: Float[Array, "T ..."],
    next_values: Float[Array, "T ..."],
    ends: Bool[Array, "T ..."],
    *,
    gamma: float | Float[Array, ""],
    gae_lambda: float | Float[Array, ""],
) -> Float[Array, "T ..."]:
    """Returns from one step (`gae_lambda` 0) to the whole episode (`gae_lambda` 1).

    Equal to `gae` plus `values` where next_values[t] is values[t + 1] within episodes.

    **Arguments:** as for `gae`.

    **Returns:**

    Returns (T, ...).
    """
    gamma, gae_lambda = _as_fraction("gamma", gamma), _as_fraction("gae_lambda", gae_lambda)
    rewards, next_values = _as_floats(rewards, next_values=next_values)
    # The weight of the next step's return; the rest of the weight is on next_values.
    weight = gae_lambda * _continues(ends, rewards)
    gains = rewards + gamma * (1 - weight) * next_values
    return _scan_backwards(gains, gamma * weight, next_values[-1])


def vtrace(
    log_ratios: Float[Array, "T ..."],
    rewards: Float[Array, "T ..."],
    values: Float[Array, "T ..."],
    next_values: Float[Array, "T ..."],
    ends: Bool[Array, "T ..."],
    *,
    gamma: float | Float[Array, ""],
    gae_lambda: float | Float[Array, ""] = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    weighted: bool = True,
) -> tuple[Float[Array, "T ..."], Float[Array, "T ..."]]:
    """V-trace (Espeholt et al., 2018): targets and advantages for actions of another policy.

    With log_ratios 0, and clips of at least 1, the two are `lambda_returns` and `gae`.

    **Arguments:**

    - `log_ratios`: (T, ...), log pi(a) - log mu(a); pi is learned, mu acted.
    - `rewards`, `values`, `next_values`, `ends`, `gamma`, `gae_lambda`: as for `gae`.
    - `clip_rho`, `clip_c`: the largest importance weights.
    - `weighted`: whether the advantages contain min(clip_rho, pi / mu). With the weight they
        multiply the gradient of log pi. A loss that contains the ratio itself, such as PPO's, needs
        them without.

    **Returns:**

    Value targets (T, ...) and advantages (T, ...).
    """
    gamma, gae_lambda = _as_fraction("gamma", gamma), _as_fraction("gae_lambda", gae_lambda)
    rewards, log_ratios, values, next_values = _as_floats(
        rewards, log_ratios=log_ratios, values=values, next_values=next_values
    )
    continues = _continues(ends, rewards)
    rho, c = (
        _clipped_ratio(log_ratios, name, clip)
        for name, clip in (("clip_rho", clip_rho), ("clip_c", clip_c))
    )
    td_errors = rho * (rewards + gamma * next_values - values)
    correction = _scan_backwards(
        td_errors, gamma * gae_lambda * continues * c, jnp.zeros_like(rewards[0])
    )
    # What the corrected target of the next step adds to next_values; nothing across an end.
    following = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    bootstrap = next_values + gae_lambda * continues * following
    advantages = rewards + gamma * bootstrap - values
    return values + correction, rho * advantages if weighted else advantages


def _scan_backwards(
    gains: Float[Array, "T ..."], factors: Float[Array, "T ..."], last: Float[Array, "..."]
) -> Float[Array, "T ..."]:
    """y[t] = gains[t] + factors[t] y[t + 1], with y[T] = `last`."""

    def step(following: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        y = now[0] + now[1] * following
        return y, y

    return jax.lax.scan(step, last, (gains, factors), reverse=True)[1]


def _clipped_ratio(log_ratios: Array, name: str, clip: Any) -> Array:
    real = isinstance(clip, int | float | np.integer | np.floating) and not isinstance(clip, bool)
    if not real or not clip > 0:
        raise ValueError(f"{name}={clip!r} must be a number > 0 (inf for no clipping)")
    # Clipped before the exponential, which cannot overflow then.
    return jnp.exp(jnp.minimum(log_ratios, math.log(clip)))


def _as_floats(rewards: Any, **others: Any) -> list[Array]:
    """All as floating point of one dtype, checked to have the shape of the rewards."""
    arrays = {"rewards": rewards} | others
    arrays = {name: validation.as_real(name, value) for name, value in arrays.items()}
    shape = arrays["rewards"].shape
    if not shape:
        raise ValueError("rewards has shape (); expected (T,) or (T, ...)")
    validation.check_nonempty("rewards", arrays["rewards"])
    for name, array in arrays.items():
        validation.check_shape(name, array, shape)
    dtype = jnp.result_type(jnp.float32, *arrays.values())
    return [jax.lax.stop_gradient(array.astype(dtype)) for array in arrays.values()]


def _continues(ends: Any, rewards: Array) -> Float[Array, "T ..."]:
    """1 where the episode continues after the step, 0 where it ended."""
    ends = validation.as_bool("ends", ends)
    validation.check_shape("ends", ends, rewards.shape)
    return jnp.where(ends, 0, 1).astype(rewards.dtype)


def _as_fraction(name: str, value: Any) -> Any:
    """A number from 0 to 1. Arrays are not checked: an annealed value is a tracer."""
    if isinstance(value, jax.Array):
        return value
    return validation.check_number(name, value, minimum=0.0, maximum=1.0)
