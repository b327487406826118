"""The trained weights of a network as lists of arrays, in groups."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

from agalite.networks.actor_critic import ActorCritic
from agalite.networks.normalisation import RunningStatistics

Weights = tuple[list[Float[Array, "..."]], ...]


class WeightGroups(NamedTuple):
    """How a network is taken apart and put together again."""

    model: ActorCritic
    structures: tuple[Any, ...]
    """Of each group, its pytree's structure and what in it is not trained."""

    def rebuild(self, weights: Weights, statistics: RunningStatistics | None) -> ActorCritic:
        """The network with these weights and these statistics of observations."""
        made = [
            eqx.combine(jax.tree.unflatten(structure, arrays), static)
            for (structure, static), arrays in zip(self.structures, weights, strict=True)
        ]
        actor, critic = made if len(made) == 2 else made[0]
        return eqx.tree_at(
            lambda m: (
                *(m.encoder, m.memory, m.hidden, m.actor),
                *(m.critic, m.critic_memory, m.critic_hidden, m.obs_statistics),
            ),
            self.model,
            (*actor, *critic, statistics),
            is_leaf=lambda x: x is None,
        )


def weight_groups(model: ActorCritic) -> tuple[Weights, WeightGroups]:
    """All trained weights: those of actor and of critic if they share no memory, or one group."""
    actor = model.encoder, model.memory, model.hidden, model.actor
    critic = model.critic, model.critic_memory, model.critic_hidden
    groups = (actor, critic) if model.critic_memory is not None else ((actor, critic),)
    weights, structures = [], []
    for group in groups:
        trained, static = eqx.partition(group, eqx.is_inexact_array)
        arrays, structure = jax.tree.flatten(trained)
        weights.append(arrays)
        structures.append((structure, static))
    return tuple(weights), WeightGroups(model, tuple(structures))
