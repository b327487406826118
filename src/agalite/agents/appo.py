"""Asynchronous PPO: the policy that acted may be a few updates older than the one that learns.

Two things make up for that lag. The ratio in PPO's loss is to the policy that acted, as always, so
its clip also stops a step that the lag has already made too far. And advantages and targets are
V-trace's (Espeholt et al., 2018), from the critic as it is now. Without lag both are what PPO
computes, to rounding.

Two kinds of value are the actor's, from when it acted: that of a final observation where an episode
was cut off, and that of the observation after the rollout's last step. Making them anew would need
the memory of the middle of a sequence; they are as old as the policy, and no bias at lag zero.
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
    Recomputed,
    apply_gradients,
    from_sequences,
    make_batch,
    recompute,
    to_sequences,
)
from agalite.agents.ppo import PPO
from agalite.agents.returns import vtrace
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class APPO(PPO):
    """The defaults are the paper's for Memory Maze."""

    ent_coef: float = 3e-3
    """Weight of the entropy bonus."""
    update_epochs: int = 1
    """How often each batch is gone through."""
    num_minibatches: int = 1
    """Parts that its sequences are dealt into, anew in every epoch."""
    clip_coef: float = 0.1
    """How far the policy's ratio may move before its gradient stops."""
    vf_clip_coef: float | None = 1.0
    """The same for the critic's change; None: not clipped."""
    clip_rho: float = 1.0
    """V-trace: the most that a step's own surprise is weighted with."""
    clip_c: float = 1.0
    """V-trace: the most that the surprises after it are weighted with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_rho", "clip_c"):
            validation.number(name, getattr(self, name), minimum=0.0, above=True)

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
        """As PPO's. `starts` are of any age: what is derived from older weights is made anew."""
        parts = rollout.rewards.shape[0] // length
        sequences = parts * rollout.rewards.shape[1]
        bonus = self.ent_coef * (remaining if self.anneal_ent_coef else jnp.ones(()))
        plain = make_batch(rollout, starts, jnp.zeros_like(rollout.rewards), length)
        refresh = jax.vmap(model.refresh, axis_size=sequences)  # a state may hold nothing
        plain = plain._replace(starts=refresh(plain.starts))

        def corrected(new: Recomputed) -> Batch:
            advantages, targets = self._vtrace(new, plain, rollout, parts)
            return plain._replace(
                advantages=to_sequences(advantages, parts), targets=to_sequences(targets, parts)
            )

        if self._steps_per_update == 1:
            # The one step's own forward pass says what V-trace needs: a second would be the same.
            def loss(model: ActorCritic, batch: Batch) -> Any:
                new = recompute(model, batch)
                return self._surrogate(new, corrected(new), bonus)

            return apply_gradients(model, optimiser, memory, loss, plain)
        batch = corrected(recompute(model, plain))
        return self._epochs(model, optimiser, memory, batch, bonus, key)

    def _vtrace(
        self, new: Recomputed, batch: Batch, rollout: Rollout, parts: int
    ) -> tuple[Float[Array, "T B"], Float[Array, "T B"]]:
        """Advantages and targets over whole rollouts, however they were cut into sequences."""
        new = jax.lax.stop_gradient(new)
        values = from_sequences(new.values, parts)
        # The actor's own where an episode ended and after the last step, see above.
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
