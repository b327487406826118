"""Advantage actor-critic: one gradient step for each rollout (the paper's agent in T-Maze)."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from agalite.agents.base import Agent, Batch, apply_gradients, recompute
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class A2C(Agent):
    """The defaults are the paper's for T-Maze, with the learning rate and entropy it shipped."""

    def learn(
        self,
        model: ActorCritic,
        optimiser: optax.GradientTransformation,
        memory: Any,
        rollout: Rollout,
        starts: PyTree[Array],
        length: int,
        key: Array,
        remaining: Float[Array, ""],
    ) -> tuple[ActorCritic, Any, dict[str, Float[Array, ""]]]:
        """length: of a sequence; remaining: the share of the run still to go, 1 at its start."""
        del key
        batch, bonus = self._prepare(rollout, starts, length, remaining)

        def loss(model: ActorCritic, batch: Batch) -> tuple[Array, dict[str, Array]]:
            new = recompute(model, batch)
            policy = -jnp.mean(new.log_probs * batch.advantages)
            value = 0.5 * jnp.mean(jnp.square(new.values - batch.targets))
            entropy = jnp.mean(new.entropy)
            metrics = {
                "losses/policy_loss": policy,
                "losses/value_loss": value,
                "losses/entropy": entropy,
            }
            return policy + self.vf_coef * value - bonus * entropy, metrics

        return apply_gradients(model, optimiser, memory, loss, batch)
