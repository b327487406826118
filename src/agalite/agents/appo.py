"""Asynchronous PPO: the policy that acted may be a few updates older than the one that learns.

Two things correct for that lag. The ratio in PPO's loss is to the policy that acted, so its clip
also stops a step that the lag has made too large. And advantages and targets are V-trace's
(Espeholt et al., 2018), computed with the current critic. Without lag both equal those of PPO, up
to rounding.

Two kinds of values are still the actor's, from when it acted: that of the final observation of a
truncated episode, and that of the observation after the rollout's last step. Computing them anew
would need memory states from the middle of a sequence, which are not kept.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from agalite import validation
from agalite.agents.base import (
    Batch,
    Evaluation,
    Metrics,
    apply_gradients,
    evaluate_actions,
    from_sequences,
    make_batch,
    to_sequences,
)
from agalite.agents.ppo import PPO
from agalite.agents.returns import vtrace
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class APPO(PPO):
    """Settings of asynchronous PPO. The defaults are the paper's for Memory Maze."""

    ent_coef: float = 3e-3
    """Coefficient of the entropy bonus."""
    update_epochs: int = 1
    """Epochs: passes over each batch."""
    num_minibatches: int = 1
    """Minibatches per epoch; the sequences are shuffled for every epoch."""
    clip_coef: float = 0.1
    """Clip range of the policy's probability ratio."""
    vf_clip_coef: float | None = 1.0
    """Clip range of the change of the critic's values; None: no clipping."""
    vtrace: bool = True
    """Correct advantages and targets for the age of the policy that acted; without, they are GAE's
    with the values of the critic that acted."""
    clip_rho: float = 1.0
    """V-trace's rho: largest importance weight of a step's own temporal difference."""
    clip_c: float = 1.0
    """V-trace's c: largest importance weight of the temporal differences after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_boolean("vtrace", self.vtrace)
        for name in ("clip_rho", "clip_c"):
            validation.check_number(name, getattr(self, name), minimum=0.0, above=True)

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
        """`initial_states` may be of any age: what they cache is refreshed."""
        parts = rollout.rewards.shape[0] // seq_len
        sequences = parts * rollout.rewards.shape[1]
        advantages = jnp.zeros_like(rollout.rewards) if self.vtrace else self._advantages(rollout)
        plain = make_batch(rollout, initial_states, advantages, seq_len, traces)
        # The axis size is given because a memory state may hold no arrays.
        refresh = jax.vmap(model.refresh, axis_size=sequences)
        plain = plain._replace(initial_states=refresh(plain.initial_states))
        if not self.vtrace:
            return self._run_epochs(model, optimizer, opt_state, plain, key, remaining)

        def with_vtrace(new: Evaluation) -> Batch:
            advantages, targets = self._vtrace(new, plain, rollout, parts)
            return plain._replace(
                advantages=to_sequences(advantages, parts), targets=to_sequences(targets, parts)
            )

        if self.gradient_steps == 1:
            # With one gradient step, its own forward pass also gives V-trace what it needs.
            ent_coef, clip_coef = self._entropy_coefficient(remaining), self._clip_range(remaining)

            def loss(model: ActorCritic, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
                new = evaluate_actions(model, batch)
                return self._clipped_loss(
                    new, with_vtrace(new), ent_coef, clip_coef, model.value_scale
                )

            return apply_gradients(model, optimizer, opt_state, loss, plain)
        batch = with_vtrace(evaluate_actions(model, plain))
        return self._run_epochs(model, optimizer, opt_state, batch, key, remaining)

    def _vtrace(
        self, new: Evaluation, batch: Batch, rollout: Rollout, parts: int
    ) -> tuple[Float[Array, "T B"], Float[Array, "T B"]]:
        """Advantages and targets over whole rollouts, across the boundaries of sequences."""
        new = jax.lax.stop_gradient(new)
        values = from_sequences(new.values, parts)
        # Where an episode ended and after the last step: the actor's values, see above.
        following = jnp.concatenate([values[1:], rollout.next_values[-1:]])
        next_values = jnp.where(rollout.ends, rollout.next_values, following)
        targets, advantages = vtrace(
            from_sequences(new.log_probs - batch.log_probs, parts),
            rollout.rewards,
            values,
            next_values,
            rollout.ends,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            clip_rho=self.clip_rho,
            clip_c=self.clip_c,
            weighted=False,
        )
        return advantages, targets
