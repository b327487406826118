"""Proximal policy optimisation (Schulman et al., 2017) over sequences with their memory."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from agalite import validation
from agalite.agents.base import Agent, Batch, Recomputed, apply_gradients, recompute
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class PPO(Agent):
    """The defaults are the paper's for Mystery Path."""

    learning_rate: float = 2.5e-4
    ent_coef: float = 3e-3
    """Weight of the entropy bonus."""
    max_grad_norm: float = 4.0
    update_epochs: int = 3
    """How often each rollout is gone through."""
    num_minibatches: int = 8
    """Parts that its sequences are dealt into, anew in every epoch."""
    clip_coef: float = 0.2
    """How far the policy's ratio may move before its gradient stops."""
    vf_clip_coef: float | None = None
    """The same for the critic's change; None: not clipped."""
    norm_adv: bool = True
    """Zero mean and unit variance within each minibatch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.integer("update_epochs", self.update_epochs, minimum=1)
        validation.integer("num_minibatches", self.num_minibatches, minimum=1)
        validation.number("clip_coef", self.clip_coef, minimum=0.0, above=True)
        if self.vf_clip_coef is not None:
            validation.number("vf_clip_coef", self.vf_clip_coef, minimum=0.0, above=True)
        validation.boolean("norm_adv", self.norm_adv)

    @property
    def _steps_per_update(self) -> int:
        return self.update_epochs * self.num_minibatches

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
        batch, bonus = self._prepare(rollout, starts, length, remaining)
        return self._epochs(model, optimiser, memory, batch, bonus, key)

    def _epochs(
        self,
        model: ActorCritic,
        optimiser: optax.GradientTransformation,
        memory: Any,
        batch: Batch,
        bonus: Float[Array, ""],
        key: Array,
    ) -> tuple[ActorCritic, Any, dict[str, Float[Array, ""]]]:
        sequences = batch.resets.shape[1]
        weights, rest = eqx.partition(model, eqx.is_array)  # a loop carries arrays only

        def part(carry: tuple[Any, Any], rows: Array):
            weights, memory = carry
            model, memory, metrics = apply_gradients(
                eqx.combine(weights, rest),
                optimiser,
                memory,
                lambda m, b: self.loss(m, b, bonus),
                batch.take(rows),
            )
            return (eqx.filter(model, eqx.is_array), memory), metrics

        def epoch(carry: tuple[Any, Any], key: Array):
            deal = jax.random.permutation(key, sequences).reshape(self.num_minibatches, -1)
            return lax.scan(part, carry, deal)

        carry, metrics = lax.scan(
            epoch, (weights, memory), jax.random.split(key, self.update_epochs)
        )
        return eqx.combine(carry[0], rest), carry[1], jax.tree.map(jnp.mean, metrics)

    def loss(
        self, model: ActorCritic, batch: Batch, bonus: Float[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        return self._surrogate(recompute(model, batch), batch, bonus)

    def _surrogate(
        self, new: Recomputed, batch: Batch, bonus: Float[Array, ""]
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        advantages = batch.advantages
        if self.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        log_ratio = new.log_probs - batch.log_probs
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - self.clip_coef, 1 + self.clip_coef)
        policy = -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))
        error = jnp.square(new.values - batch.targets)
        if self.vf_clip_coef is not None:
            change = jnp.clip(new.values - batch.values, -self.vf_clip_coef, self.vf_clip_coef)
            error = jnp.maximum(error, jnp.square(batch.values + change - batch.targets))
        value = 0.5 * jnp.mean(error)
        entropy = jnp.mean(new.entropy)
        metrics = {
            "losses/policy_loss": policy,
            "losses/value_loss": value,
            "losses/entropy": entropy,
            # Schulman's low-variance estimate of the divergence from the acting policy.
            "losses/approx_kl": jnp.mean(ratio - 1 - log_ratio),
            "losses/clipfrac": jnp.mean(jnp.abs(ratio - 1) > self.clip_coef),
        }
        return policy + self.vf_coef * value - bonus * entropy, metrics
