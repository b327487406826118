"""Proximal policy optimisation (Schulman et al., 2017) over sequences with memory states.

Minibatches are of whole sequences; each is recomputed from the memory state it began with.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from agalite import validation
from agalite.agents.base import Agent, Batch, Evaluation, Metrics, evaluate_actions, run_epochs
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class PPO(Agent):
    """Settings of PPO. The defaults are the paper's for Mystery Path."""

    learning_rate: float = 2.5e-4
    """Learning rate of Adam."""
    ent_coef: float = 3e-3
    """Coefficient of the entropy bonus."""
    max_grad_norm: float = 4.0
    """Gradients are clipped to this global norm."""
    update_epochs: int = 3
    """Epochs: passes over each rollout."""
    num_minibatches: int = 8
    """Minibatches per epoch; the sequences are shuffled for every epoch."""
    clip_coef: float = 0.2
    """Clip range of the policy's probability ratio."""
    vf_clip_coef: float | None = None
    """Clip range of the change of the critic's values; None: no clipping."""
    norm_adv: bool = True
    """Normalise the advantages of each minibatch to zero mean and unit variance."""
    anneal_clip_coef: bool = False
    """Anneal the clip range of the policy's ratio linearly to zero over the run."""
    target_kl: float | None = None
    """No further epochs after one whose mean approx_kl is larger; None: all epochs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("update_epochs", self.update_epochs, minimum=1)
        validation.check_integer("num_minibatches", self.num_minibatches, minimum=1)
        validation.check_number("clip_coef", self.clip_coef, minimum=0.0, above=True)
        if self.vf_clip_coef is not None:
            validation.check_number("vf_clip_coef", self.vf_clip_coef, minimum=0.0, above=True)
        for name in ("norm_adv", "anneal_clip_coef"):
            validation.check_boolean(name, getattr(self, name))
        if self.target_kl is not None:
            validation.check_number("target_kl", self.target_kl, minimum=0.0, above=True)

    @property
    def gradient_steps(self) -> int:
        return self.update_epochs * self.num_minibatches

    def _learn(
        self,
        model: ActorCritic,
        optimizer: optax.GradientTransformation,
        opt_state: Any,
        rollout: Rollout,
        initial_states: PyTree[Array],
        seq_len: int,
        key: Array,
        remaining: Float[Array, ""],
        traces: PyTree[Array] | None = None,
    ) -> tuple[ActorCritic, Any, Metrics]:
        batch = self._make_batch(rollout, initial_states, seq_len, traces)
        return self._run_epochs(model, optimizer, opt_state, batch, key, remaining)

    def _run_epochs(
        self,
        model: ActorCritic,
        optimizer: optax.GradientTransformation,
        opt_state: Any,
        batch: Batch,
        key: Array,
        remaining: Float[Array, ""],
    ) -> tuple[ActorCritic, Any, Metrics]:
        ent_coef, clip_coef = self._entropy_coefficient(remaining), self._clip_range(remaining)
        return run_epochs(
            model,
            optimizer,
            opt_state,
            lambda model, batch: self.loss(model, batch, ent_coef, clip_coef),
            batch,
            key,
            update_epochs=self.update_epochs,
            num_minibatches=self.num_minibatches,
            target_kl=self.target_kl,
        )

    def _clip_range(self, remaining: Float[Array, ""]) -> Float[Array, ""] | float:
        return self.clip_coef * remaining if self.anneal_clip_coef else self.clip_coef

    def loss(
        self,
        model: ActorCritic,
        batch: Batch,
        ent_coef: Float[Array, ""],
        clip_coef: Float[Array, ""] | float,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The clipped surrogate loss of PPO on a minibatch, with value loss and entropy bonus.

        With `norm_return`, values are compared in standard deviations of the return.

        **Arguments:**

        - `model`: the actor-critic.
        - `batch`: (L, S, ...), a minibatch of whole sequences.
        - `ent_coef`: (), coefficient of the entropy bonus.
        - `clip_coef`: (), the ratio of probabilities is clipped to 1 - it and 1 + it.

        **Returns:**

        The loss () and metrics.
        """
        new = evaluate_actions(model, batch)
        return self._clipped_loss(new, batch, ent_coef, clip_coef, model.value_scale)

    def _clipped_loss(
        self,
        new: Evaluation,
        batch: Batch,
        ent_coef: Float[Array, ""],
        clip_coef: Float[Array, ""] | float,
        value_scale: Float[Array, ""] | float,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The formula of `loss`, from what the model says about the batch."""
        advantages = batch.advantages
        values, old_values, targets = new.values, batch.values, batch.targets
        if self.norm_return:
            advantages, values, old_values, targets = (
                x / value_scale for x in (advantages, values, old_values, targets)
            )
        if self.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        log_ratio = new.log_probs - batch.log_probs
        ratio = jnp.exp(log_ratio)
        clipped_ratio = jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef)
        policy_loss = -jnp.mean(jnp.minimum(ratio * advantages, clipped_ratio * advantages))

        value_error = jnp.square(values - targets)
        if self.vf_clip_coef is not None:
            change = jnp.clip(values - old_values, -self.vf_clip_coef, self.vf_clip_coef)
            clipped_error = jnp.square(old_values + change - targets)
            value_error = jnp.maximum(value_error, clipped_error)
        value_loss = 0.5 * jnp.mean(value_error)

        entropy = jnp.mean(new.entropy)
        metrics = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            # Schulman's low-variance estimate of KL(acting policy, new policy).
            "losses/approx_kl": jnp.mean(ratio - 1 - log_ratio),
            "losses/clipfrac": jnp.mean(jnp.abs(ratio - 1) > clip_coef),
        }
        return policy_loss + self.vf_coef * value_loss - ent_coef * entropy, metrics
