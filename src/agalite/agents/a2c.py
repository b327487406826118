"""Advantage actor-critic: one gradient step for each rollout (the paper's agent in T-Maze)."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from agalite import errors
from agalite.agents.batch import Batch, descend, into_sequences, recompute
from agalite.agents.returns import gae
from agalite.agents.rollout import Rollout
from agalite.nets.actor_critic import ActorCritic


@dataclass(frozen=True)
class A2C:
    """The defaults are the paper's for T-Maze, with the learning rate and entropy it shipped."""

    learning_rate: float = 1e-4
    discount: float = 0.99
    lam: float = 0.95
    """Lambda of the returns: 0 trusts the critic, 1 the rewards."""
    entropy: float = 1e-3
    """Weight of the entropy bonus."""
    value: float = 0.5
    """Weight of the critic's loss."""
    max_gradient_norm: float = 0.5
    anneal_learning_rate: bool = False
    """Let the learning rate fall to zero over the run."""
    anneal_entropy: bool = False
    """Let the entropy bonus fall to zero over the run."""

    def __post_init__(self) -> None:
        check_common(self)

    def optimiser(self, updates: int) -> optax.GradientTransformation:
        return adam(self, updates)

    def learn(
        self, model: ActorCritic, optimiser: optax.GradientTransformation, memory: Any,
        rollout: Rollout, starts: PyTree[Array], length: int, key: Array,
        remaining: Float[Array, ""],
    ) -> tuple[ActorCritic, Any, dict[str, Float[Array, ""]]]:  # fmt: skip
        """length: of a sequence; remaining: the share of the run still to go, 1 at its start."""
        del key
        advantages = gae(
            rollout.rewards, rollout.values, rollout.next_values, rollout.ends,
            discount=self.discount, lam=self.lam,
        )  # fmt: skip
        batch = into_sequences(rollout, starts, advantages, length)
        bonus = self.entropy * (remaining if self.anneal_entropy else 1.0)

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
            return policy + self.value * value - bonus * entropy, metrics

        return descend(model, optimiser, memory, loss, batch)


def check_common(config: Any) -> None:
    for name in ("learning_rate", "max_gradient_norm"):
        errors.number(name, getattr(config, name), minimum=0.0, above=True)
    for name in ("discount", "lam"):
        errors.number(name, getattr(config, name), minimum=0.0, maximum=1.0)
    for name in ("entropy", "value"):
        errors.number(name, getattr(config, name), minimum=0.0)
    for name in ("anneal_learning_rate", "anneal_entropy"):
        errors.boolean(name, getattr(config, name))


def adam(config: Any, steps: int) -> optax.GradientTransformation:
    """Adam with clipped gradients; `steps` is how many it will take over the run."""
    rate = config.learning_rate
    if config.anneal_learning_rate:
        rate = optax.linear_schedule(rate, 0.0, max(1, steps))
    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm), optax.adam(rate, eps=1e-5)
    )
