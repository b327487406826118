"""The network's compiled acting programs, and the learner: a batch of rollouts in, weights out."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped, UInt32

from agalite import kernels
from agalite.agents.rollout import Rollout
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic, partition_shapes
from agalite.training.config import Config, HostConfig


class PolicyStep(NamedTuple):
    """What the network computes for B observations."""

    memory_state: Any
    """(B, ...), after the observations."""
    env_actions: Shaped[Array, "B ..."]
    """The actions as the environments take them."""
    actions: Shaped[Array, "B ..."]
    """The actions as the policy sampled them; the learner needs these."""
    log_probs: Float[Array, " B"]
    values: Float[Array, " B"]


class Network:
    """The actor-critic of a run without its weights.

    `prepare` weights once when they arrive, then call `act`, `value` and `refresh` with the result.
    All four are compiled.

    **Arguments:**

    - `config`: of the run.
    - `observation_space`, `action_space`: of one environment.
    """

    def __init__(self, config: Config, observation_space: Any, action_space: Any) -> None:
        self._config = config
        self._spaces = observation_space, action_space
        shapes = eqx.filter_eval_shape(self.make, jax.random.key(0))
        self.parameter_count: int = shapes.parameter_count
        _, self._static = partition_shapes(shapes)
        arrays, self._prepared_static = partition_shapes(
            eqx.filter_eval_shape(prepare_for_inference, shapes)
        )
        self._prepared_structure = jax.tree.structure(arrays)
        self.prepare = jax.jit(self._prepare)
        self.act = jax.jit(self._act)
        self.value = jax.jit(self._value)
        self.refresh = jax.jit(self._refresh)

    def make(self, key: PRNGKeyArray) -> ActorCritic:
        """An actor-critic with new weights."""
        c = self._config
        return ActorCritic.make(
            *self._spaces,
            **c.network_options,
            key=key,
        )

    def model(self, weights: Any) -> ActorCritic:
        """The actor-critic with these arrays as its weights."""
        return eqx.combine(weights, self._static)

    def inputs(self, obs: Any, actions: Any = None, rewards: Any = None) -> Any:
        """See `ActorCritic.inputs`."""
        return self._static.inputs(obs, actions, rewards)

    def initial_state(self, weights: Any, num_envs: int) -> Any:
        """The memory state (B, ...) before the first observation of an episode."""
        return self.model(weights).initial_state(num_envs)

    def _prepare(self, weights: Any) -> list[Array]:
        """The weights in the layout for inference, as a flat list.

        JAX flattens its arguments at every call, and flattening a model's modules takes longer than
        a step of a small network.
        """
        return jax.tree.leaves(eqx.filter(prepare_for_inference(self.model(weights)), eqx.is_array))

    def _prepared_model(self, prepared: list[Array]) -> ActorCritic:
        arrays = jax.tree.unflatten(self._prepared_structure, prepared)
        return eqx.combine(arrays, self._prepared_static)

    def _act(
        self,
        prepared: list[Array],
        memory_state: Any,
        obs: PyTree[Shaped[Array, "B ..."]],
        resets: Bool[Array, " B"],
        key: PRNGKeyArray,
        count: UInt32[Array, ""],
    ) -> PolicyStep:
        """Advance the memory and sample actions; `count` differs between calls with one key."""
        model = self._prepared_model(prepared)
        noise_key = jax.random.fold_in(key, count // self._config.noise_steps)
        keys = jax.random.split(noise_key, resets.shape[0])
        with kernels.one_thread():  # the environments' processes and the learner use the cores too
            memory_state, policy, values = jax.vmap(model.step)(memory_state, obs, resets)
        actions = jax.vmap(lambda p, k: p.sample(k))(policy, keys)
        log_probs = jax.vmap(lambda p, a: p.log_prob(a))(policy, actions)
        env_actions = jax.vmap(model.to_env)(actions)
        return PolicyStep(memory_state, env_actions, actions, log_probs, values)

    def _value(
        self,
        prepared: list[Array],
        memory_state: Any,
        obs: PyTree[Shaped[Array, "B ..."]],
        resets: Bool[Array, " B"],
    ) -> Float[Array, " B"]:
        """The critic's values of observations, without advancing the memory."""
        model = self._prepared_model(prepared)
        with kernels.one_thread():
            return jax.vmap(lambda m, o, r: model.step(m, o, r)[2])(memory_state, obs, resets)

    def _refresh(self, prepared: list[Array], memory_state: Any, resets: Bool[Array, " B"]) -> Any:
        """The memory state for new weights; `resets` gives only the batch size."""
        model = self._prepared_model(prepared)
        return jax.vmap(model.refresh, axis_size=resets.shape[0])(memory_state)


class LearnerState(NamedTuple):
    """What a checkpoint stores. The environments cannot be stored."""

    weights: Any
    """The arrays of the actor-critic."""
    opt_state: Any
    key: Array
    update: Int[Array, ""]
    """The number of updates done."""


class Learner:
    """`init` with a seed, then `update` with one batch after the other. Both are compiled."""

    def __init__(self, config: HostConfig, network: Network) -> None:
        self.config, self.network = config, network
        self._optimizer = config.agent.make_optimizer(config.updates)
        self.init = jax.jit(self._init)
        # The state is not donated: actors still use the weights.
        self.update = jax.jit(self._update)

    def state_shapes(self) -> LearnerState:
        """The shapes of the state, to restore a checkpoint with."""
        return jax.eval_shape(self._init, np.uint32(0))

    def _init(self, seed: UInt32[Array, ""]) -> LearnerState:
        model_key, run_key = jax.random.split(jax.random.key(seed))
        model = self.network.make(model_key)
        opt_state = self._optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        arrays = eqx.filter(model, eqx.is_array), opt_state
        # Without weak types, which would compile `update` a second time.
        weights, opt_state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), arrays)
        return LearnerState(weights, opt_state, run_key, jnp.zeros((), jnp.int32))

    def _update(
        self, state: LearnerState, rollout: Rollout, initial_states: PyTree[Array]
    ) -> tuple[LearnerState, dict[str, Float[Array, ""]]]:
        """One update from a batch: rollout (T, B, ...), initial_states (N, B, ...)."""
        c = self.config
        model, opt_state, losses = c.agent.learn(
            self.network.model(state.weights),
            self._optimizer,
            state.opt_state,
            rollout,
            initial_states,
            c.sequence_length,
            jax.random.fold_in(state.key, state.update),
            1 - state.update / c.updates,
        )
        weights = eqx.filter(model, eqx.is_array)
        return LearnerState(weights, opt_state, state.key, state.update + 1), losses
