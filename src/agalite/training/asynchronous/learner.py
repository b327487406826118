"""The learner: a batch of rollouts in, new weights out, as one compiled program."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped, UInt32

from agalite import kernels
from agalite.agents.rollout import Rollout
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic
from agalite.training.config import Config, HostConfig
from agalite.training.skeleton import Skeleton, is_shape, without_arrays

# --- The network of a run without its weights, and the compiled programs that act with it ---------


class Acted(NamedTuple):
    """What the network made of B observations."""

    memory: Any
    """(B, ...), the observations taken in."""
    actions: Shaped[Array, "B ..."]
    """As the environments want them."""
    sampled: Shaped[Array, "B ..."]
    """As the policy drew them: what is learned from."""
    log_probs: Float[Array, " B"]
    values: Float[Array, " B"]


class Network:
    """`prepare` the weights once, when they come; then `act` with what it gave."""

    def __init__(self, config: Config, observation_space: Any, action_space: Any) -> None:
        self._config = config
        self._spaces = observation_space, action_space
        skeleton = Skeleton(self.make)
        self.model, self.parameter_count = skeleton.model, skeleton.parameter_count
        acting = eqx.filter_eval_shape(prepare_for_inference, skeleton.shapes)
        self._acting = without_arrays(acting)
        self._structure = jax.tree.structure(eqx.filter(acting, is_shape))
        self.prepare = jax.jit(self._prepare)
        self.act = jax.jit(self._act)
        self.expect = jax.jit(self._expect)
        self.refresh = jax.jit(self._refresh)

    def make(self, key: PRNGKeyArray) -> ActorCritic:
        c = self._config
        return ActorCritic.make(
            *self._spaces,
            memory=c.memory,
            memory_options=c.memory_options,
            encoder=c.encoder,
            hidden_size=c.hidden_size,
            key=key,
        )

    def initial_memory(self, weights: Any, count: int) -> Any:
        """(B, ...): before the first observation of an episode."""
        return self.model(weights).initial_state(count)

    def _prepare(self, weights: Any) -> list[Array]:
        """The weights laid out for a few rows at a time, and as a plain list: at every call JAX
        walks through what it is given, and through a model's modules that takes longer than a
        small network's step."""
        return jax.tree.leaves(eqx.filter(prepare_for_inference(self.model(weights)), eqx.is_array))

    def _prepared(self, prepared: list[Array]) -> ActorCritic:
        return eqx.combine(jax.tree.unflatten(self._structure, prepared), self._acting)

    def _act(
        self,
        prepared: list[Array],
        memory: Any,
        obs: Shaped[Array, "B ..."],
        resets: Bool[Array, " B"],
        key: PRNGKeyArray,
        count: UInt32[Array, ""],
    ) -> Acted:
        """`count` is different at every call with the same key."""
        model = self._prepared(prepared)
        keys = jax.random.split(jax.random.fold_in(key, count), resets.shape[0])
        with kernels.one_thread():  # the worlds' processes and the learner need the cores too
            memory, policy, values = jax.vmap(model.step)(memory, obs, resets)
        sampled = jax.vmap(lambda p, k: p.sample(k))(policy, keys)
        log_probs = jax.vmap(lambda p, a: p.log_prob(a))(policy, sampled)
        return Acted(memory, jax.vmap(model.to_world)(sampled), sampled, log_probs, values)

    def _expect(
        self,
        prepared: list[Array],
        memory: Any,
        obs: Shaped[Array, "B ..."],
        resets: Bool[Array, " B"],
    ) -> Float[Array, " B"]:
        """What the critic says to observations that are seen but not remembered."""
        model = self._prepared(prepared)
        with kernels.one_thread():
            return jax.vmap(lambda m, o, r: model.step(m, o, r)[2])(memory, obs, resets)

    def _refresh(self, prepared: list[Array], memory: Any, like: Bool[Array, " B"]) -> Any:
        """The memory for new weights; `like` says only how many there are."""
        model = self._prepared(prepared)
        return jax.vmap(model.refresh, axis_size=like.shape[0])(memory)


class LearnerState(NamedTuple):
    """All that is kept of such a run: arrays only. The environments are not among it."""

    weights: Any
    """The arrays of the actor-critic."""
    optimiser: Any
    key: Array
    update: Int[Array, ""]
    """How many have been done."""


class Learner:
    """`begin` with a seed, then `update` with one batch after the other."""

    def __init__(self, config: HostConfig, network: Network) -> None:
        self.config, self.network = config, network
        self._optimiser = config.agent.optimiser(config.updates)
        self.begin = jax.jit(self._begin)
        # The weights are not donated: actors still act with them.
        self.update = jax.jit(self._update)

    def like(self) -> LearnerState:
        """The state's shapes, to read a checkpoint by."""
        return jax.eval_shape(self._begin, np.uint32(0))

    def _begin(self, seed: UInt32[Array, ""]) -> LearnerState:
        model_key, run_key = jax.random.split(jax.random.key(seed))
        model = self.network.make(model_key)
        optimiser = self._optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        arrays = eqx.filter(model, eqx.is_array), optimiser
        # A dtype that is up for negotiation would compile the update a second time.
        weights, optimiser = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), arrays)
        return LearnerState(weights, optimiser, run_key, jnp.zeros((), jnp.int32))

    def _update(
        self, state: LearnerState, rollout: Rollout, starts: PyTree[Array]
    ) -> tuple[LearnerState, dict[str, Float[Array, ""]]]:
        """rollout (T, B, ...), starts (N, B, ...), see `trajectory.stack`."""
        c = self.config
        model, optimiser, losses = c.agent.learn(
            self.network.model(state.weights),
            self._optimiser,
            state.optimiser,
            rollout,
            starts,
            c.sequence_length,
            jax.random.fold_in(state.key, state.update),
            1 - state.update / c.updates,
        )
        weights = eqx.filter(model, eqx.is_array)
        return LearnerState(weights, optimiser, state.key, state.update + 1), losses
