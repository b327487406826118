"""What a step was worth: GAE, lambda-returns and V-trace.

All arrays are time-major, (T,) for one environment or (T, ...) elementwise over what follows T.

`next_values[t]` is the value of what came after step t: 0 where the episode terminated, V of the
final observation where it was truncated, else the value of the next step's observation. `ends[t]`
is true where an episode ended with step t, either way: nothing after it counts towards it. The
results are targets to learn from, so no gradient passes through them.
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
    """Advantages (T, ...): generalised advantage estimation (Schulman et al., 2016)."""
    gamma, gae_lambda = _fraction("gamma", gamma), _fraction("gae_lambda", gae_lambda)
    rewards, values, next_values = _numbers(rewards, values=values, next_values=next_values)
    keep = _keep(ends, rewards)
    surprise = rewards + gamma * next_values - values
    return _backwards(surprise, gamma * gae_lambda * keep, jnp.zeros_like(rewards[0]))


def lambda_returns(
    rewards: Float[Array, "T ..."],
    next_values: Float[Array, "T ..."],
    ends: Bool[Array, "T ..."],
    *,
    gamma: float | Float[Array, ""],
    gae_lambda: float | Float[Array, ""],
) -> Float[Array, "T ..."]:
    """Returns (T, ...), from one step (gae_lambda 0) to the whole episode (gae_lambda 1).

    Equal to `gae` plus values where next_values[t] is values[t + 1] within episodes.
    """
    gamma, gae_lambda = _fraction("gamma", gamma), _fraction("gae_lambda", gae_lambda)
    rewards, next_values = _numbers(rewards, next_values=next_values)
    onward = gae_lambda * _keep(
        ends, rewards
    )  # the share of what follows that is not yet next_values
    return _backwards(rewards + gamma * (1 - onward) * next_values, gamma * onward, next_values[-1])


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
    """Value targets (T, ...) and policy-gradient advantages (T, ...) for actions of another policy.

    `log_ratios` is log pi(a) - log mu(a), pi being learned and mu the one that acted (Espeholt et
    al., 2018). The advantages carry the weight min(clip_rho, pi / mu): multiply them by the
    gradient of log pi, not by the ratio again. A loss with the ratio in it, such as PPO's, wants
    them without (`weighted=False`). With log_ratios 0 the two are `lambda_returns` and `gae`, given
    clips of at least 1.
    """
    gamma, gae_lambda = _fraction("gamma", gamma), _fraction("gae_lambda", gae_lambda)
    rewards, log_ratios, values, next_values = _numbers(
        rewards, log_ratios=log_ratios, values=values, next_values=next_values
    )
    keep = _keep(ends, rewards)
    rho, c = (
        _clipped_ratio(log_ratios, name, clip)
        for name, clip in (("clip_rho", clip_rho), ("clip_c", clip_c))
    )
    surprise = rho * (rewards + gamma * next_values - values)
    correction = _backwards(surprise, gamma * gae_lambda * keep * c, jnp.zeros_like(rewards[0]))
    # What the corrected target of the next step adds to next_values; nothing past an end.
    following = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    bootstrap = next_values + gae_lambda * keep * following
    advantages = rewards + gamma * bootstrap - values
    return values + correction, rho * advantages if weighted else advantages


def _backwards(
    gain: Float[Array, "T ..."], pass_on: Float[Array, "T ..."], last: Float[Array, "..."]
) -> Float[Array, "T ..."]:
    """y[t] = gain[t] + pass_on[t] y[t + 1], with y[T] = `last`."""

    def step(after: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        y = now[0] + now[1] * after
        return y, y

    return jax.lax.scan(step, last, (gain, pass_on), reverse=True)[1]


def _clipped_ratio(log_ratios: Array, name: str, clip: Any) -> Array:
    real = isinstance(clip, int | float | np.integer | np.floating) and not isinstance(clip, bool)
    if not real or not clip > 0:
        raise ValueError(f"{name}={clip!r} must be a number > 0 (inf for no clipping)")
    # Clipped before the exponential, which cannot overflow then.
    return jnp.exp(jnp.minimum(log_ratios, math.log(clip)))


def _numbers(rewards: Any, **others: Any) -> list[Array]:
    """All as floating point of one type, checked to have the shape of the rewards."""
    arrays = {"rewards": rewards} | others
    arrays = {name: validation.real_numbers(name, value) for name, value in arrays.items()}
    shape = arrays["rewards"].shape
    if not shape:
        raise ValueError("rewards has shape (); expected (T,) or (T, ...)")
    validation.nonempty("rewards", arrays["rewards"])
    for name, array in arrays.items():
        validation.check_shape(name, array, shape)
    dtype = jnp.result_type(jnp.float32, *arrays.values())
    return [jax.lax.stop_gradient(array.astype(dtype)) for array in arrays.values()]


def _keep(ends: Any, rewards: Array) -> Float[Array, "T ..."]:
    """1 where the episode goes on after the step, 0 where it ended."""
    ends = validation.as_bool("ends", ends)
    validation.check_shape("ends", ends, rewards.shape)
    return jnp.where(ends, 0, 1).astype(rewards.dtype)


def _fraction(name: str, value: Any) -> Any:
    """A number from 0 to 1; one that is being traced (an annealed one) is taken on trust."""
    if isinstance(value, jax.Array):
        return value
    return validation.number(name, value, minimum=0.0, maximum=1.0)
