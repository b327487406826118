"""Collecting a rollout: a policy with memory acts in B copies of an environment for T steps.

At step t the agent sees `obs[t]`; `resets[t]` is true when an episode begins with it. The memory
takes in both, an action is sampled from the policy, and the environment is stepped.
`next_values[t]` is the value to bootstrap from after step t: 0 if the episode terminated, the value
of the episode's *final observation* if it was truncated, and the value of `obs[t + 1]` otherwise.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Distribution

Sampler = Callable[[Distribution, Array], Shaped[Array, "..."]]
"""`sample(policy, key)` is an action of a policy without batch axes."""

if TYPE_CHECKING:  # importing gymnax initialises JAX's devices, before --seeds can set their number
    from agalite.envs.vector import VectorEnv


class RunnerState(NamedTuple):
    """The state of acting between two rollouts, in B environments."""

    env_state: Any
    obs: PyTree[Shaped[Array, "B ..."]]
    """Of the environments, or `Inputs` where the memory also reads previous actions or rewards."""
    resets: Bool[Array, " B"]
    memory_state: Any
    """(B, ...)"""
    returns: Float[Array, " B"]
    """Of the current episode so far."""
    lengths: Float[Array, " B"]
    """Of the current episode so far."""


class Rollout(NamedTuple):
    """T steps in B environments: all that the learning rules use."""

    obs: PyTree[Shaped[Array, "T B ..."]]
    """As `ActorCritic.pack` keeps them."""
    resets: Bool[Array, "T B"]
    actions: Shaped[Array, "T B ..."]
    log_probs: Float[Array, "T B"]
    values: Float[Array, "T B"]
    rewards: Float[Array, "T B"]
    ends: Bool[Array, "T B"]
    """The episode terminated or was truncated with this step."""
    next_values: Float[Array, "T B"]


class Episodes(NamedTuple):
    """Sums over the episodes that ended. Sums rather than means, so that rollouts can be added."""

    ended: Float[Array, ""]
    """The number of episodes."""
    returns: Float[Array, ""]
    lengths: Float[Array, ""]
    extras: dict[str, Float[Array, ""]]
    """What the environment reports at the end of an episode: `success`, achievements."""


def init(model: ActorCritic, envs: "VectorEnv", key: Array) -> RunnerState:
    """Resets all environments; every one begins an episode with an empty memory.

    **Arguments:**

    - `model`: the actor-critic that will act.
    - `envs`: the B environments.
    - `key`: for the resets.

    **Returns:**

    The runner state before the first step: `obs` (B, ...), `resets` (B,) all true.
    """
    obs, env_state = envs.reset(key)
    count = envs.num_envs
    zeros = jnp.zeros(count)
    return RunnerState(
        env_state,
        model.inputs(obs),
        jnp.ones(count, bool),
        model.initial_state(count),
        zeros,
        zeros,
    )


def collect_rollout(
    model: ActorCritic,
    envs: "VectorEnv",
    runner_state: RunnerState,
    key: Array,
    *,
    num_steps: int,
    seq_len: int,
    bootstrap: bool = True,
    noise_steps: int = 1,
    noise_key: Array | None = None,
    sample: Sampler | None = None,
) -> tuple[RunnerState, Rollout, PyTree[Shaped[Array, "N B ..."]], Episodes]:
    """Acts for T = `num_steps` steps in every environment.

    **Arguments:**

    - `model`: the actor-critic that acts; it is not updated here.
    - `envs`: the B environments.
    - `runner_state`: where the last rollout stopped, or `init(...)`.
    - `key`: for the actions and the environments.
    - `num_steps`: T, a multiple of `seq_len`.
    - `seq_len`: the length of the sequences that are learned from.
    - `bootstrap`: whether the value of the final observation stands for what follows a truncated
        episode; otherwise nothing follows.
    - `noise_steps`: steps for which the randomness of the actions stays the same. Every action
        still has the policy's distribution, so that its log-probability is right.
    - `noise_key`: the randomness of all actions of this rollout, if it stays the same for several
        rollouts; `None`: from `key`.
    - `sample`: how actions are sampled; `None`: from the policy.

    **Returns:**

    The new runner state, the rollout (T, B), the memory states (N, B, ...) at the beginning of each
    of the N = T / seq_len sequences, and sums over the episodes that ended.
    """
    model = prepare_for_inference(model, streams=envs.num_envs)

    def sequence(runner_state: RunnerState, keys: tuple[Array, Array]):
        initial_state = runner_state.memory_state
        runner_state, (rollout, episodes) = lax.scan(
            lambda state, keys: _step(model, envs, state, *keys, bootstrap, sample or _sample),
            runner_state,
            keys,
        )
        return runner_state, (rollout, initial_state, episodes)

    action_keys, env_keys = jax.vmap(jax.random.split, out_axes=1)(jax.random.split(key, num_steps))
    steps = jnp.arange(num_steps)
    action_keys = action_keys[steps - steps % noise_steps]
    if noise_key is not None:
        action_keys = jnp.broadcast_to(noise_key, num_steps)
    keys = jax.tree.map(lambda x: x.reshape(num_steps // seq_len, seq_len), (action_keys, env_keys))
    runner_state, (rollout, initial_states, episodes) = lax.scan(sequence, runner_state, keys)
    rollout = jax.tree.map(lambda x: x.reshape(num_steps, *x.shape[2:]), rollout)
    # The value of the observation after the last step. The memory state that this step returns is
    # dropped: the next rollout begins with the same observation.
    _, _, last_values = jax.vmap(model.step)(
        runner_state.memory_state, runner_state.obs, runner_state.resets
    )
    following = jnp.concatenate([rollout.values[1:], last_values[None]])
    next_values = jnp.where(rollout.ends, rollout.next_values, following)
    episodes = jax.tree.map(jnp.sum, episodes)
    return runner_state, rollout._replace(next_values=next_values), initial_states, episodes


def _step(
    model: ActorCritic,
    envs: "VectorEnv",
    runner_state: RunnerState,
    action_key: Array,
    env_key: Array,
    bootstrap: bool,
    sample: Sampler,
) -> tuple[RunnerState, tuple[Rollout, Episodes]]:
    """One step in every environment; `next_values` is filled in at truncations only."""
    state = runner_state
    memory_state, policy, values = jax.vmap(model.step)(state.memory_state, state.obs, state.resets)
    actions = jax.vmap(sample)(policy, jax.random.split(action_key, envs.num_envs))
    log_probs = jax.vmap(lambda p, a: p.log_prob(a))(policy, actions)
    obs, env_state, rewards, terminated, truncated, info = envs.step(
        env_key, state.env_state, jax.vmap(model.to_env)(actions)
    )
    ends = terminated | truncated

    obs, final_obs = (model.inputs(x, actions, rewards) for x in (obs, info["final_observation"]))
    weights, static = eqx.partition(model, eqx.is_array)

    def final_values(weights: Any, memory_state: Any, final_obs: Any) -> Array:
        model = eqx.combine(weights, static)
        return jax.vmap(lambda m, o: model.step(m, o, jnp.array(False))[2])(memory_state, final_obs)

    # The values of final observations cost as much as acting, so they are computed only in the rare
    # steps in which an episode is truncated.
    truncated_values = jnp.zeros_like(values)
    if bootstrap:
        truncated_values = batched_cond(
            jnp.any(truncated), final_values, truncated_values, weights, memory_state, final_obs
        )
    episodes, returns, lengths = count_episodes(state, rewards, ends, info)
    rollout = Rollout(
        model.pack(state.obs),
        state.resets,
        actions,
        log_probs,
        values,
        rewards,
        ends,
        jnp.where(truncated, truncated_values, 0.0),
    )
    new = RunnerState(env_state, obs, ends, memory_state, returns, lengths)
    return new, (rollout, episodes)


def _sample(policy: Distribution, key: Array) -> Shaped[Array, "..."]:
    return policy.sample(key)


def count_episodes(
    state: RunnerState, rewards: Float[Array, " B"], ends: Bool[Array, " B"], info: dict[str, Any]
) -> tuple[Episodes, Float[Array, " B"], Float[Array, " B"]]:
    """Sums over the episodes that a step ended.

    **Arguments:**

    - `state`: before the step.
    - `rewards`, `ends`, `info`: (B,), of the step.

    **Returns:**

    The sums, and the returns and lengths (B,) of the current episodes so far.
    """
    returns, lengths = state.returns + rewards, state.lengths + 1
    done = ends.astype(jnp.float32)
    extras = {
        name: jnp.sum(done * info[name].astype(jnp.float32))
        for name in sorted(info)
        if name not in _NOT_EXTRAS and jnp.shape(info[name]) == done.shape
    }
    episodes = Episodes(done.sum(), (done * returns).sum(), (done * lengths).sum(), extras)
    return episodes, (1 - done) * returns, (1 - done) * lengths


_NOT_EXTRAS = ("terminated", "truncated", "final_observation", "discount")


def batched_cond(
    pred: Bool[Array, ""], function: Callable[..., Any], otherwise: Any, *args: Any
) -> Any:
    """`function(*args)` if `pred`, else `otherwise`, without computing both under `vmap`.

    `vmap` turns `lax.cond` into a select that always computes both branches. This one computes
    `function` for the whole batch if any element needs it, and not at all if none does.

    **Arguments:**

    - `pred`: ().
    - `function`: of `args`; it returns a pytree like `otherwise`.
    - `otherwise`: a pytree of arrays.
    - `args`: pytrees of arrays. Under `vmap`, pass everything batched here: `function` must not
        close over it.

    **Returns:**

    A pytree like `otherwise`.
    """

    @custom_batching.custom_vmap
    def call(pred: Array, otherwise: Any, args: Any) -> Any:
        return lax.cond(pred, lambda _, a: function(*a), lambda o, _: o, otherwise, args)

    @call.def_vmap
    def rule(size: int, batched: Any, pred: Array, otherwise: Any, args: Any) -> Any:
        def broadcast(tree: Any, is_batched: Any) -> Any:
            return jax.tree.map(
                lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)), tree, is_batched
            )

        pred, otherwise, args = (
            broadcast(*pair) for pair in zip((pred, otherwise, args), batched, strict=True)
        )
        computed = batched_cond(jnp.any(pred), jax.vmap(lambda *a: function(*a)), otherwise, *args)

        def select(yes: Array, no: Array) -> Array:
            return jnp.where(pred.reshape(size, *(1,) * (yes.ndim - 1)), yes, no)

        selected = jax.tree.map(select, computed, otherwise)
        return selected, jax.tree.map(lambda _: True, selected)

    return call(pred, otherwise, args)
