"""The weights of a network as one vector."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from agalite.networks.actor_critic import ActorCritic
from agalite.networks.normalisation import RunningStatistics

LANES = 128
"""Groups of weights are filled up to a multiple of it."""

Rebuild = Callable[[Float[Array, " P"], RunningStatistics | None], ActorCritic]


def flat_weights(
    model: ActorCritic,
) -> tuple[Float[Array, " P"], list[tuple[int, int]], Rebuild]:
    """All trained weights as one vector, because a few long loops are faster than many short ones.

    **Returns:**

    The weights (P,), each group filled up with zeros to whole vector lanes; where each group begins
    and ends: the actor's and the critic's if they share no memory, or one; and a function of a
    vector and of the statistics of observations that gives the network.
    """
    actor = model.encoder, model.memory, model.hidden, model.actor
    critic = model.critic, model.critic_memory, model.critic_hidden
    groups = (actor, critic) if model.critic_memory is not None else ((actor, critic),)
    vectors, bounds, parts, at = [], [], [], 0
    for group in groups:
        arrays, static = eqx.partition(group, eqx.is_inexact_array)
        vector, unravel = ravel_pytree(arrays)
        size = vector.size + -vector.size % LANES
        vectors.append(jnp.pad(vector, (0, size - vector.size)))
        bounds.append((at, at + size))
        parts.append((unravel, static, vector.size))
        at += size

    def rebuild(weights: Array, statistics: RunningStatistics | None) -> ActorCritic:
        made = [
            eqx.combine(unravel(weights[start : start + size]), static)
            for (start, _), (unravel, static, size) in zip(bounds, parts, strict=True)
        ]
        actor, critic = made if len(made) == 2 else made[0]
        return eqx.tree_at(
            lambda m: (
                *(m.encoder, m.memory, m.hidden, m.actor),
                *(m.critic, m.critic_memory, m.critic_hidden, m.obs_statistics),
            ),
            model,
            (*actor, *critic, statistics),
            is_leaf=lambda x: x is None,
        )

    return jnp.concatenate(vectors), bounds, rebuild
