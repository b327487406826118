"""Which past observations an action depends on: exact gradients through the whole episode."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from agalite.networks.actor_critic import ActorCritic
from agalite.networks.encoders import VectorEncoder
from agalite.networks.heads import Categorical, DiagonalNormal, Distribution, MultiCategorical

_FAR = 3.0
_CUT = 3  # at most so many


def saliency(
    model: ActorCritic, obs: Shaped[np.ndarray, "T ..."], sampled: Shaped[np.ndarray, "T ..."]
) -> Float[np.ndarray, "T T"]:
    """[t, i], for i <= t: the length of the gradient, in observation i, of step t's output.

    The output is the logit of the action taken, log(p / (1 - p)) for its probability p: what the
    network says for it and not equally for all others. Of several choices at once it is the sum of
    their logits, and of continuous actions the sum of their means. An observation that is a
    category is taken as the numbers that the memory is given for it. T gradients through T steps.
    """
    encoder = model.encoder
    if isinstance(encoder, VectorEncoder) and encoder.categories:
        width = encoder.output_size
        obs = np.eye(width, dtype=np.float32)[np.asarray(obs).astype(int)]
        model = eqx.tree_at(lambda m: m.encoder, model, VectorEncoder((width,)))
    return np.asarray(_gradients(model, jnp.asarray(obs, jnp.float32), jnp.asarray(sampled)))


@eqx.filter_jit
def _gradients(
    model: ActorCritic, obs: Float[Array, "T ..."], sampled: Shaped[Array, "T ..."]
) -> Float[Array, "T T"]:
    steps = obs.shape[0]
    resets = jnp.zeros(steps, bool).at[0].set(True)

    def outputs(obs: Array) -> Float[Array, " T"]:
        _, policy, _ = model.scan(model.initial_state(), obs, resets)
        return chosen(policy, sampled)

    _, pull = jax.vjp(outputs, obs)

    def lengths(one: Float[Array, " T"]) -> Float[Array, " T"]:
        (gradient,) = pull(one)
        return jnp.sqrt(jnp.sum(jnp.square(gradient.reshape(steps, -1)), axis=-1))

    # One after the other: all at once would need T times the memory of a backward pass.
    return jax.lax.map(lengths, jnp.eye(steps, dtype=jnp.float32))


def axis_top(line: Float[np.ndarray, " n"]) -> float:
    """Where an axis should end for all but a few to be seen: those far above the next are cut.

    Gradients have such peaks: where a head's normaliser (s . q) is almost zero, a small change of
    an input changes the output a lot.
    """
    ordered = np.sort(np.asarray(line, np.float64))[::-1]
    first = 0
    while first < min(_CUT, len(ordered) - 2) and ordered[first] > _FAR * ordered[first + 1]:
        first += 1
    return float(ordered[first])


def chosen(policy: Distribution, sampled: Any) -> Float[Array, " T"]:
    """(T,): what stands for the action taken among the policy's outputs."""
    match policy:
        case Categorical():
            taken = jnp.arange(policy.logits.shape[-1]) == sampled[:, None]
            own = jnp.sum(jnp.where(taken, policy.logits, 0), axis=-1)
            if policy.logits.shape[-1] == 1:
                return own
            others = jnp.where(taken, -jnp.inf, policy.logits)
            return own - jax.nn.logsumexp(others, axis=-1)
        case MultiCategorical():
            cuts = np.cumsum(policy.sizes)[:-1]
            parts = jnp.split(policy.logits, cuts, axis=-1)
            return sum(
                (chosen(Categorical(x), sampled[:, i]) for i, x in enumerate(parts)),
                start=jnp.zeros(policy.logits.shape[0], policy.logits.dtype),
            )
        case DiagonalNormal():
            return policy.mean.sum(axis=-1)
    raise ValueError(f"a policy that is a {type(policy).__name__} has no output to follow back")
