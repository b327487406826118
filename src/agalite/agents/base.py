"""What the learning rules have in common: the batch, recomputing the policy, one optimiser step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite import validation
from agalite.agents.returns import gae
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic


class Batch(NamedTuple):
    """Whole sequences, S of them, L steps long, each with the memory it began with.

    A sequence is never cut from that memory, and never padded.
    """

    starts: PyTree[Shaped[Array, "S ..."]]
    obs: Shaped[Array, "L S ..."]
    resets: Bool[Array, "L S"]
    actions: Shaped[Array, "L S ..."]
    log_probs: Float[Array, "L S"]
    values: Float[Array, "L S"]
    advantages: Float[Array, "L S"]
    targets: Float[Array, "L S"]
    """What the critic should have said."""

    def take(self, rows: Array) -> "Batch":
        starts = jax.tree.map(lambda x: x[rows], self.starts)
        rest = jax.tree.map(lambda x: x[:, rows], tuple(self)[1:])
        return Batch(starts, *rest)


def make_batch(
    rollout: Rollout,
    starts: PyTree[Shaped[Array, "N B ..."]],
    advantages: Float[Array, "T B"],
    length: int,
) -> Batch:
    """A rollout of T = N * L steps in B worlds becomes S = N * B sequences of L = `length`."""
    parts = advantages.shape[0] // length
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), starts)
    r = rollout
    rest = (r.obs, r.resets, r.actions, r.log_probs, r.values, advantages, advantages + r.values)
    return Batch(flat, *(to_sequences(x, parts) for x in rest))


def to_sequences(x: Shaped[Array, "T B ..."], parts: int) -> Shaped[Array, "L S ..."]:
    """T = N * L steps of B worlds as S = N * B sequences of L, N being `parts`."""
    if parts == 1:
        return x
    x = x.reshape(parts, -1, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def from_sequences(x: Float[Array, "L S"], parts: int) -> Float[Array, "T B"]:
    """The way back from `cut`."""
    length, sequences = x.shape
    x = x.reshape(length, parts, sequences // parts)
    return jnp.swapaxes(x, 0, 1).reshape(parts * length, sequences // parts)


class Recomputed(NamedTuple):
    log_probs: Float[Array, "L S"]
    entropy: Float[Array, "L S"]
    values: Float[Array, "L S"]


def recompute(model: ActorCritic, batch: Batch) -> Recomputed:
    """What the model, as it is now, makes of the sequences: all steps of all of them at once."""
    _, policy, values = jax.vmap(model.scan, in_axes=(0, 1, 1), out_axes=(0, 1, 1))(
        batch.starts, batch.obs, batch.resets
    )
    return Recomputed(policy.log_prob(batch.actions), policy.entropy(), values)


Loss = Callable[[ActorCritic, Batch], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]


def apply_gradients(
    model: ActorCritic,
    optimiser: optax.GradientTransformation,
    memory: Any,
    loss: Loss,
    batch: Batch,
) -> tuple[ActorCritic, Any, dict[str, Float[Array, ""]]]:
    """One step down the loss; `memory` is the optimiser's."""
    weights, rest = eqx.partition(model, eqx.is_inexact_array)

    def of(weights: Any):
        return loss(eqx.combine(weights, rest), batch)

    (_, metrics), gradient = jax.value_and_grad(of, has_aux=True)(weights)
    metrics = {**metrics, "losses/gradient_norm": optax.tree.norm(gradient)}
    updates, memory = optimiser.update(gradient, memory, weights)
    return eqx.apply_updates(eqx.combine(weights, rest), updates), memory, metrics


# --- What the learning rules have in common: their settings, their optimiser, their batch ---------


@dataclass(frozen=True)
class Agent:
    learning_rate: float = 1e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    """Lambda of the returns: 0 trusts the critic, 1 the rewards."""
    ent_coef: float = 1e-3
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    anneal_lr: bool = False
    """Let the learning rate fall to zero over the run."""
    anneal_ent_coef: bool = False
    """Let the entropy bonus fall to zero over the run."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            validation.number(name, getattr(self, name), minimum=0.0, above=True)
        for name in ("gamma", "gae_lambda"):
            validation.number(name, getattr(self, name), minimum=0.0, maximum=1.0)
        for name in ("ent_coef", "vf_coef"):
            validation.number(name, getattr(self, name), minimum=0.0)
        for name in ("anneal_lr", "anneal_ent_coef"):
            validation.boolean(name, getattr(self, name))

    def optimiser(self, updates: int) -> optax.GradientTransformation:
        """Adam with clipped gradients, for a run of so many updates."""
        rate = self.learning_rate
        if self.anneal_lr:
            rate = optax.linear_schedule(rate, 0.0, max(1, updates * self._steps_per_update))
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm), optax.adam(rate, eps=1e-5)
        )

    @property
    def _steps_per_update(self) -> int:
        """Steps of the optimiser for each rollout."""
        return 1

    def _prepare(
        self, rollout: Rollout, starts: PyTree[Array], length: int, remaining: Float[Array, ""]
    ) -> tuple[Batch, Float[Array, ""]]:
        """The sequences with their advantages, and the weight of the entropy bonus by now."""
        advantages = gae(
            rollout.rewards,
            rollout.values,
            rollout.next_values,
            rollout.ends,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        bonus = self.ent_coef * (remaining if self.anneal_ent_coef else jnp.ones(()))
        return make_batch(rollout, starts, advantages, length), bonus
