"""Gradients of each action's logit with respect to all observations of the episode so far."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from agalite.networks.actor_critic import ActorCritic
from agalite.networks.encoders import VectorEncoder
from agalite.networks.heads import (
    Categorical,
    DiagonalNormal,
    Distribution,
    EpsilonGreedy,
    MultiCategorical,
)

_OUTLIER = 3.0  # times the next smaller number
_MAX_OUTLIERS = 3


def episode_inputs(
    model: ActorCritic,
    obs: Shaped[Array, "T ..."],
    sampled: Shaped[Array, "T ..."],
    rewards: Float[Array, " T"],
) -> Any:
    """The inputs (T, ...) of `ActorCritic.scan` for an episode: each with the step before it."""
    actions, previous = (jnp.roll(x, 1, axis=0) for x in (sampled, rewards))
    return model.inputs(obs, actions, previous)


def saliency(
    model: ActorCritic,
    obs: Shaped[np.ndarray, "T ..."],
    sampled: Shaped[np.ndarray, "T ..."],
    rewards: Float[np.ndarray, " T"],
) -> Float[np.ndarray, "T T"]:
    """The norm of the gradient of each step's output with respect to each observation.

    The output is the logit of the action taken, log(p / (1 - p)) for its probability p. Of
    MultiDiscrete actions it is the sum of the parts' logits, and of continuous actions the sum of
    the means. For a categorical observation the gradient is that of its one-hot encoding.

    **Arguments:**

    - `model`: the agent.
    - `obs`: (T, ...), from the first of an episode.
    - `sampled`: (T, ...), the actions as the policy drew them.
    - `rewards`: (T,), for the actions.

    **Returns:**

    (T, T): [t, i] is of step t's output and observation i, zero for i > t.
    """
    encoder = model.encoder
    if isinstance(encoder, VectorEncoder) and encoder.categories:
        width = encoder.output_size
        obs = np.eye(width, dtype=np.float32)[np.asarray(obs).astype(int)]
        model = eqx.tree_at(lambda m: m.encoder, model, VectorEncoder((width,)))
    arrays = jnp.asarray(obs, jnp.float32), jnp.asarray(sampled), jnp.asarray(rewards)
    return np.asarray(_gradients(model, *arrays))


@eqx.filter_jit
def _gradients(
    model: ActorCritic,
    obs: Float[Array, "T ..."],
    sampled: Shaped[Array, "T ..."],
    rewards: Float[Array, " T"],
) -> Float[Array, "T T"]:
    steps = obs.shape[0]
    resets = jnp.zeros(steps, bool).at[0].set(True)

    def outputs(obs: Array) -> Float[Array, " T"]:
        inputs = episode_inputs(model, obs, sampled, rewards)
        _, policy, _ = model.scan(model.initial_state(), inputs, resets)
        return chosen_logit(policy, sampled)

    _, vjp = jax.vjp(outputs, obs)

    def norms(cotangent: Float[Array, " T"]) -> Float[Array, " T"]:
        (gradient,) = vjp(cotangent)
        return jnp.sqrt(jnp.sum(jnp.square(gradient.reshape(steps, -1)), axis=-1))

    # Not vmap, which would need T times the memory of a backward pass.
    return jax.lax.map(norms, jnp.eye(steps, dtype=jnp.float32))


def chosen_logit(policy: Distribution, sampled: Any) -> Float[Array, " T"]:
    """(T,): the output that `saliency` differentiates, for the actions taken."""
    match policy:
        case EpsilonGreedy():  # its logits are steps; the action values are what it compares
            return chosen_logit(Categorical(policy.values), sampled)
        case Categorical():
            taken = jnp.arange(policy.logits.shape[-1]) == sampled[:, None]
            own = jnp.sum(jnp.where(taken, policy.logits, 0), axis=-1)
            if policy.logits.shape[-1] == 1:
                return own
            others = jnp.where(taken, -jnp.inf, policy.logits)
            return own - jax.nn.logsumexp(others, axis=-1)
        case MultiCategorical():
            splits = np.cumsum(policy.sizes)[:-1]
            parts = jnp.split(policy.logits, splits, axis=-1)
            return sum(
                (chosen_logit(Categorical(x), sampled[:, i]) for i, x in enumerate(parts)),
                start=jnp.zeros(policy.logits.shape[0], policy.logits.dtype),
            )
        case DiagonalNormal():
            return policy.mean.sum(axis=-1)
    raise ValueError(f"a policy that is a {type(policy).__name__} has no output to differentiate")


def axis_limit(values: Float[np.ndarray, " n"]) -> float:
    """The upper limit of an axis: the largest value that is not an outlier.

    At most three values far above the next are outliers. Gradients have them where a head's
    normaliser (s . q) is almost zero.
    """
    ordered = np.sort(np.asarray(values, np.float64))[::-1]
    first = 0
    while (
        first < min(_MAX_OUTLIERS, len(ordered) - 2)
        and ordered[first] > _OUTLIER * ordered[first + 1]
    ):
        first += 1
    return float(ordered[first])
