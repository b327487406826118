"""Acting: a policy with memory in many copies of a world, and what is kept to learn from.

At step t the agent sees obs[t]; resets[t] is true when an episode begins with it. Its memory takes
both in, an action is sampled, the world answers. `next_values[t]` is what the critic expects after
step t: nothing if the episode terminated, the value of its *final observation* if it was cut off by
a time limit, and otherwise the value of obs[t + 1].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite.envs.vector import Vector
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic

# --- Do something only when it is needed, also for many seeds at once -----------------------------


def batched_cond(
    needed: Bool[Array, ""], function: Callable[..., Any], otherwise: Any, *args: Any
) -> Any:
    """`function(*args)` if needed, else `otherwise`.

    `vmap` turns a conditional into doing both always. Here it asks first whether any of the batch
    needs it.
    """

    @custom_batching.custom_vmap
    def call(needed: Array, otherwise: Any, args: Any) -> Any:
        return lax.cond(needed, lambda _, a: function(*a), lambda o, _: o, otherwise, args)

    @call.def_vmap
    def rule(size: int, batched: Any, needed: Array, otherwise: Any, args: Any) -> Any:
        def all_batched(tree: Any, which: Any) -> Any:
            return jax.tree.map(
                lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)), tree, which
            )

        needed, otherwise, args = (
            all_batched(*pair) for pair in zip((needed, otherwise, args), batched, strict=True)
        )
        done = batched_cond(jnp.any(needed), jax.vmap(lambda *a: function(*a)), otherwise, *args)

        def choose(yes: Array, no: Array) -> Array:
            return jnp.where(needed.reshape(size, *(1,) * (yes.ndim - 1)), yes, no)

        chosen = jax.tree.map(choose, done, otherwise)
        return chosen, jax.tree.map(lambda _: True, chosen)

    return call(needed, otherwise, args)


class Rollout(NamedTuple):
    obs: Shaped[Array, "T B ..."]
    resets: Bool[Array, "T B"]
    actions: Shaped[Array, "T B ..."]
    log_probs: Float[Array, "T B"]
    values: Float[Array, "T B"]
    rewards: Float[Array, "T B"]
    ends: Bool[Array, "T B"]
    """Terminated or truncated: nothing after it may reach back past it."""
    next_values: Float[Array, "T B"]


class Episodes(NamedTuple):
    """Sums over the episodes that ended, so that sums of sums make means."""

    ended: Float[Array, ""]
    """How many."""
    returns: Float[Array, ""]
    lengths: Float[Array, ""]
    extras: dict[str, Float[Array, ""]]
    """Of what the world reports at an episode's end: `success`, achievements."""


class RunnerState(NamedTuple):
    """Where acting stands between two rollouts."""

    world: Any
    obs: Shaped[Array, "B ..."]
    resets: Bool[Array, " B"]
    memory: Any
    """(B, ...)"""
    returns: Float[Array, " B"]
    lengths: Float[Array, " B"]


def init(model: ActorCritic, vector: Vector, key: Array) -> RunnerState:
    obs, world = vector.reset(key)
    count = vector.count
    zeros = jnp.zeros(count)
    return RunnerState(world, obs, jnp.ones(count, bool), model.initial_state(count), zeros, zeros)


def collect_rollout(
    model: ActorCritic, vector: Vector, place: RunnerState, key: Array, *, steps: int, sequence: int
) -> tuple[RunnerState, Rollout, PyTree[Shaped[Array, "N B ..."]], Episodes]:
    """Acts for `steps`; returns also the memory (N, B, ...) at the start of every `sequence`."""

    model = prepare_for_inference(model, streams=vector.count)

    def part(place: RunnerState, keys: Array):
        memory = place.memory
        place, (rollout, episodes) = lax.scan(lambda p, k: _step(model, vector, p, k), place, keys)
        return place, (rollout, memory, episodes)

    keys = jax.random.split(key, steps).reshape(steps // sequence, sequence)
    place, (rollout, starts, episodes) = lax.scan(part, place, keys)
    rollout = jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), rollout)
    # What follows the last step is seen but not yet remembered: the next rollout begins with it.
    _, _, bootstrap = jax.vmap(model.step)(place.memory, place.obs, place.resets)
    following = jnp.concatenate([rollout.values[1:], bootstrap[None]])
    next_values = jnp.where(rollout.ends, rollout.next_values, following)
    episodes = jax.tree.map(jnp.sum, episodes)
    return place, rollout._replace(next_values=next_values), starts, episodes


def _step(
    model: ActorCritic, vector: Vector, place: RunnerState, key: Array
) -> tuple[RunnerState, tuple[Rollout, Episodes]]:
    choose, move = jax.random.split(key)
    memory, policy, values = jax.vmap(model.step)(place.memory, place.obs, place.resets)
    actions = jax.vmap(lambda p, k: p.sample(k))(policy, jax.random.split(choose, vector.count))
    log_probs = jax.vmap(lambda p, a: p.log_prob(a))(policy, actions)
    obs, world, rewards, terminated, truncated, info = vector.step(
        move, place.world, jax.vmap(model.to_world)(actions)
    )
    ends = terminated | truncated

    weights, rest = eqx.partition(model, eqx.is_array)

    def final_values(weights: Any, memory: Any, final: Array) -> Array:
        model = eqx.combine(weights, rest)
        return jax.vmap(lambda m, o: model.step(m, o, jnp.array(False))[2])(memory, final)

    # Rare, and as costly as acting itself: only when somebody was cut off.
    final = info["final_observation"]
    nothing = jnp.zeros_like(values)
    cut = batched_cond(jnp.any(truncated), final_values, nothing, weights, memory, final)
    returns, lengths = place.returns + rewards, place.lengths + 1
    done = ends.astype(jnp.float32)
    extras = {
        name: jnp.sum(done * info[name].astype(jnp.float32))
        for name in sorted(info)
        if name not in _NOT_EXTRAS and jnp.shape(info[name]) == done.shape
    }
    episodes = Episodes(done.sum(), (done * returns).sum(), (done * lengths).sum(), extras)
    rollout = Rollout(
        place.obs,
        place.resets,
        actions,
        log_probs,
        values,
        rewards,
        ends,
        jnp.where(truncated, cut, 0.0),
    )
    place = RunnerState(world, obs, ends, memory, (1 - done) * returns, (1 - done) * lengths)
    return place, (rollout, episodes)


_NOT_EXTRAS = ("terminated", "truncated", "final_observation", "discount")
