"""What the learning rules have in common: the batch, recomputing the policy, one optimiser step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite.agents.rollout import Rollout
from agalite.nets.actor_critic import ActorCritic


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


def into_sequences(
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
    return Batch(flat, *(cut(x, parts) for x in rest))


def cut(x: Shaped[Array, "T B ..."], parts: int) -> Shaped[Array, "L S ..."]:
    """T = N * L steps of B worlds as S = N * B sequences of L, N being `parts`."""
    if parts == 1:
        return x
    x = x.reshape(parts, -1, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def joined(x: Float[Array, "L S"], parts: int) -> Float[Array, "T B"]:
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


def descend(
    model: ActorCritic, optimiser: optax.GradientTransformation, memory: Any, loss: Loss,
    batch: Batch,
) -> tuple[ActorCritic, Any, dict[str, Float[Array, ""]]]:  # fmt: skip
    """One step down the loss; `memory` is the optimiser's."""
    weights, rest = eqx.partition(model, eqx.is_inexact_array)

    def of(weights: Any):
        return loss(eqx.combine(weights, rest), batch)

    (_, metrics), gradient = jax.value_and_grad(of, has_aux=True)(weights)
    metrics = {**metrics, "losses/gradient_norm": optax.tree.norm(gradient)}
    updates, memory = optimiser.update(gradient, memory, weights)
    return eqx.apply_updates(eqx.combine(weights, rest), updates), memory, metrics
