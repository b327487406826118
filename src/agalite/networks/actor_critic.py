"""The agent's network: encoder -> memory -> actor and critic."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree, Shaped

from agalite import validation
from agalite.memory import Memory, make_memory
from agalite.memory.layers import Dense
from agalite.networks.encoders import Encoder, VectorEncoder, make_encoder
from agalite.networks.heads import ActionHead, Distribution, make_action_head, scaled_dense
from agalite.networks.normalisation import RunningStatistics
from agalite.ops.activations import normalise, relu, tanh
from agalite.ops.matmul import PRECISIONS
from agalite.ops.matmul import precision as precision_of_products
from agalite.ops.resets import broadcast_state

ACTIVATIONS = {"tanh": tanh, "relu": relu}


class Inputs(NamedTuple):
    """An observation with what the agent did before it: see `ActorCritic.inputs`."""

    obs: Shaped[Array, "..."]
    previous_action: Shaped[Array, "..."] | None
    """As the policy sampled it."""
    previous_reward: Float[Array, "..."] | None


class ActorCritic(eqx.Module):
    """A policy and a value function that share an encoder and a memory.

    Unbatched: one environment at a time. Use `jax.vmap` for more (of `scan` with
    `in_axes=(0, 1, 1)`).

    ```python
    state = model.initial_state()
    state, policy, value = model.step(state, obs, reset)      # value ()
    state, policy, values = model.scan(state, obs, resets)    # obs (T, ...), values (T,)
    ```

    A network whose memory also reads the previous action or reward takes `Inputs` for `obs`;
    `inputs` makes them, and gives `obs` itself where neither is read.
    """

    encoder: Encoder
    memory: Memory
    hidden: Dense
    """The hidden layers of actor and critic as one matrix product where both read the same
    features; with a `critic_memory` the actor's alone."""
    actor: ActionHead
    critic: Dense | None
    """None where the actor's outputs are action values, of which the highest is the value."""
    critic_memory: Memory | None
    critic_hidden: Dense | None
    obs_statistics: RunningStatistics | None
    """Observations are normalised with them."""
    return_statistics: RunningStatistics | None
    """The critic's last layer gives (value - mean) / std of these."""
    activation: str = eqx.field(static=True)
    hidden_norm: bool = eqx.field(static=True)
    previous_action: bool = eqx.field(static=True)
    previous_reward: bool = eqx.field(static=True)
    precision: str = eqx.field(static=True)

    @classmethod
    def make(
        cls,
        observation_space: Any,
        action_space: Any,
        *,
        memory: str,
        memory_options: dict[str, Any] | None = None,
        encoder: str = "auto",
        patch_size: int | None = None,
        hidden_size: int = 128,
        hidden_gain: float = math.sqrt(2),
        actor_gain: float = 0.01,
        log_std_init: float = 0.0,
        bounded_mean: bool = False,
        critic_gain: float = 1.0,
        activation: str = "tanh",
        hidden_norm: bool = False,
        separate_critic: bool = False,
        previous_action: bool = False,
        previous_reward: bool = False,
        norm_obs: bool = False,
        norm_return: bool = False,
        epsilon: float | None = None,
        precision: str = "float32",
        key: PRNGKeyArray,
    ) -> "ActorCritic":
        """A new network for an environment.

        **Arguments:**

        - `observation_space`, `action_space`: of gymnax or of Gymnasium.
        - `memory`, `memory_options`: the memory model and its options, as for `make_memory`.
        - `encoder`, `patch_size`: as for `make_encoder`.
        - `hidden_size`: width of the hidden layer of the actor, and of that of the critic.
        - `hidden_gain`, `actor_gain`, `critic_gain`: gains of the orthogonal weights of the hidden
            layers and of the last layer of actor and critic.
        - `log_std_init`: logarithm of the standard deviation of continuous actions at the start.
        - `bounded_mean`: keep the means of continuous actions within their limits.
        - `activation`: of the hidden layers, "tanh" or "relu".
        - `hidden_norm`: layer norm, without weights, before that activation.
        - `separate_critic`: the critic has a memory of its own.
        - `previous_action`, `previous_reward`: whether the memory reads them beside the
            observation.
        - `norm_obs`: normalise observations by running statistics; vectors only.
        - `norm_return`: normalise the critic's targets by running statistics.
        - `epsilon`: the actor's outputs are action values, for a Discrete space, and the policy is
            epsilon-greedy; there is no critic.
        - `precision`: of the matrix products of encoder and memory, as for
            `ops.matmul.precision`; those of actor and critic are float32.
        - `key`: for the initial weights.
        """
        validation.check_integer("hidden_size", hidden_size, minimum=1)
        validation.check_one_of("activation", activation, ACTIVATIONS)
        validation.check_one_of("precision", precision, PRECISIONS)
        encoder_key, memory_key, hidden_key, actor_key, critic_key = jax.random.split(key, 5)
        encoder_module = make_encoder(
            encoder, observation_space, patch_size=patch_size, key=encoder_key
        )
        actor = make_action_head(
            action_space,
            hidden_size,
            gain=actor_gain,
            log_std_init=log_std_init,
            bounded_mean=bounded_mean,
            epsilon=epsilon,
            key=actor_key,
        )
        if epsilon is not None and (separate_critic or norm_return):
            raise ValueError("action values have no critic: leave separate_critic and norm_return")
        inputs = encoder_module.output_size
        inputs += actor.encoding_size * previous_action + 1 * previous_reward

        def make(key: PRNGKeyArray) -> Memory:
            return make_memory(memory, inputs, key=key, **(memory_options or {}))

        memory_module = make(memory_key)
        own = separate_critic or epsilon is not None
        outputs = [hidden_size] if own else [hidden_size, hidden_size]
        second = [jax.random.fold_in(k, 1) for k in (memory_key, hidden_key)]
        critic_memory = make(second[0]) if separate_critic else None
        statistics = None
        if norm_obs:
            if not isinstance(encoder_module, VectorEncoder) or encoder_module.categories:
                raise ValueError(
                    "norm_obs=True is for observations that are vectors of numbers; "
                    f"this environment's are {observation_space}"
                )
            statistics = RunningStatistics((encoder_module.output_size,))
        return cls(
            encoder=encoder_module,
            memory=memory_module,
            hidden=scaled_dense(
                memory_module.output_size, *outputs, gain=hidden_gain, key=hidden_key
            ),
            actor=actor,
            critic=None
            if epsilon is not None
            else scaled_dense(hidden_size, 1, gain=critic_gain, key=critic_key),
            critic_memory=critic_memory,
            critic_hidden=critic_memory
            and scaled_dense(
                critic_memory.output_size, hidden_size, gain=hidden_gain, key=second[1]
            ),
            obs_statistics=statistics,
            return_statistics=RunningStatistics(()) if norm_return else None,
            activation=activation,
            hidden_norm=hidden_norm,
            previous_action=previous_action,
            previous_reward=previous_reward,
            precision=precision,
        )

    def initial_state(self, batch: int | None = None) -> Any:
        """The memory state before an episode's first observation; (batch, ...) of `batch`."""
        state = self.memory.initial_state()
        if self.critic_memory is not None:
            state = state, self.critic_memory.initial_state()
        if batch is None:
            return state
        return broadcast_state(state, batch)

    def inputs(
        self,
        obs: Shaped[Array, "..."],
        action: Shaped[Array, "..."] | None = None,
        reward: Float[Array, "..."] | None = None,
    ) -> Any:
        """What `step` and `scan` take for an observation.

        **Arguments:**

        - `obs`: an observation; all three may have batch axes, the same.
        - `action`, `reward`: the sampled action and the reward that led to it. None before an
            episode's first observation, where they count for nothing.

        **Returns:**

        `Inputs`, or `obs` itself if the memory reads neither.
        """
        if not (self.previous_action or self.previous_reward):
            return obs
        batch = jnp.shape(obs)[: jnp.ndim(obs) - len(self.encoder.shape)]
        if action is None:
            action = self.actor.no_action(batch)
        reward = jnp.zeros(batch) if reward is None else jnp.asarray(reward, jnp.float32)
        return Inputs(
            obs,
            action if self.previous_action else None,
            reward if self.previous_reward else None,
        )

    def pack(self, obs: PyTree[Shaped[Array, "..."]]) -> PyTree[Shaped[Array, "..."]]:
        """What `inputs` gives, as it is kept until it is learned from; `scan` takes it too."""
        if isinstance(obs, Inputs):
            return obs._replace(obs=self.encoder.pack(obs.obs))
        return self.encoder.pack(obs)

    def step(
        self, state: Any, obs: PyTree[Shaped[Array, "..."]], reset: Bool[Array, ""] | bool = False
    ) -> tuple[Any, Distribution, Float[Array, ""]]:
        """One observation.

        **Arguments:**

        - `state`: the memory state.
        - `obs`: (...), of the shape of the observation space, or `Inputs`.
        - `reset`: (), true when an episode begins with `obs`.

        **Returns:**

        The new memory state, the distribution over actions and the value ().
        """
        obs = jax.tree.map(lambda x: jnp.asarray(x)[None], obs)
        critic_features = None
        with precision_of_products(self.precision):
            x = self.encode(obs, jnp.asarray(reset)[None])[0]
            if self.critic_memory is None:
                state, features = self.memory.step(state, x, reset)
            else:
                actor_state, features = self.memory.step(state[0], x, reset)
                critic_state, critic_features = self.critic_memory.step(state[1], x, reset)
                state, critic_features = (actor_state, critic_state), critic_features[None]
        policy, values = self._heads(features[None], critic_features)
        return state, jax.tree.map(lambda x: x[0], policy), values[0]

    def scan(
        self,
        state: Any,
        obs: PyTree[Shaped[Array, "T ..."]],
        resets: Bool[Array, " T"] | None = None,
    ) -> tuple[Any, Distribution, Float[Array, " T"]]:
        """A sequence: equal to T calls of `step`, but parallel over time where the memory is.

        No gradient passes through the incoming state.

        **Arguments:**

        - `state`: the memory state.
        - `obs`: (T, ...), or `Inputs` (T, ...).
        - `resets`: (T,), true where an episode begins.

        **Returns:**

        The new memory state, the distributions (T,) and the values (T,).
        """
        critic_features = None
        with precision_of_products(self.precision):
            xs = self.encode(obs, resets)
            if self.critic_memory is None:
                state, features = self.memory.scan(state, xs, resets)
            else:
                actor_state, features = self.memory.scan(state[0], xs, resets)
                critic_state, critic_features = self.critic_memory.scan(state[1], xs, resets)
                state = actor_state, critic_state
        return state, *self._heads(features, critic_features)

    @property
    def has_traces(self) -> bool:
        """Whether gradients can reach past the beginning of a sequence."""
        return self.memory.has_traces

    def initial_trace(self, batch: int | None = None) -> Any:
        """The trace of `initial_state(batch)`; of a critic's own memory too."""
        trace = self.memory.initial_trace()
        if self.critic_memory is not None:
            trace = trace, self.critic_memory.initial_trace()
        if batch is None:
            return trace
        return broadcast_state(trace, batch)

    def scan_and_advance(
        self,
        state: Any,
        obs: PyTree[Shaped[Array, "T ..."]],
        resets: Bool[Array, " T"] | None,
        trace: Any,
        *,
        past: tuple[Memory, Memory | None] | None = None,
    ) -> tuple[Any, Distribution, Float[Array, " T"], Any]:
        """`scan` whose gradient includes the past of the memory state, and the trace after it.

        What lies below the memory, the encoder, gets the gradient of the sequence only.

        **Arguments:**

        - `state`, `obs`, `resets`: as for `scan`.
        - `trace`: of the memory state.
        - `past`: as for `Memory.scan_and_advance`: the memory and the critic's own memory whose
            weights get the gradient from before the sequence; `None`: those of this network.

        **Returns:**

        The new memory state, the distributions (T,), the values (T,) and the new trace.
        """
        past = (self.memory, self.critic_memory) if past is None else past
        critic_features = None
        with precision_of_products(self.precision):
            xs = self.encode(obs, resets)
            if self.critic_memory is None:
                state, features, trace = self.memory.scan_and_advance(
                    state, xs, resets, trace, past=past[0]
                )
            else:
                actor_state, features, actor_trace = self.memory.scan_and_advance(
                    state[0], xs, resets, trace[0], past=past[0]
                )
                critic_state, critic_features, critic_trace = self.critic_memory.scan_and_advance(
                    state[1], xs, resets, trace[1], past=past[1]
                )
                state, trace = (actor_state, critic_state), (actor_trace, critic_trace)
        return state, *self._heads(features, critic_features), trace

    def encode(
        self, obs: PyTree[Shaped[Array, "T ..."]], resets: Bool[Array, " T"] | None
    ) -> Float[Array, "T N"]:
        """What the memory reads: the encoded observation, the previous action and reward.

        The last two are zero after a reset.
        """
        raw = obs.obs if isinstance(obs, Inputs) else obs
        x = self.encoder.over_time(raw)
        if self.obs_statistics is not None:
            x = self.obs_statistics.normalise(x)
        if not isinstance(obs, Inputs):
            if self.previous_action or self.previous_reward:
                raise ValueError("this network reads previous actions or rewards: use model.inputs")
            return x
        parts = []
        if obs.previous_action is not None:
            parts.append(self.actor.encode(obs.previous_action))
        if obs.previous_reward is not None:
            parts.append(obs.previous_reward[:, None])
        previous = jnp.concatenate(parts, axis=-1)
        if resets is not None:
            previous = jnp.where(resets[:, None], 0, previous)
        return jnp.concatenate([x, previous.astype(x.dtype)], axis=-1)

    def refresh(self, state: Any) -> Any:
        """A stored memory state for these weights; to be called after every update of them."""
        if self.critic_memory is None:
            return self.memory.refresh(state)
        return self.memory.refresh(state[0]), self.critic_memory.refresh(state[1])

    def to_env(self, action: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A sampled action as an element of the environment's action space.

        Learning needs the sampled action, not this one.
        """
        return self.actor.to_env(action)

    @property
    def value_scale(self) -> Float[Array, ""] | float:
        """The standard deviation of returns, by which losses divide; 1 without `norm_return`."""
        return 1.0 if self.return_statistics is None else self.return_statistics.std

    def update_statistics(
        self, obs: PyTree[Shaped[Array, "T B ..."]], returns: Float[Array, "T B"]
    ) -> "ActorCritic":
        """The network with the running statistics of one more rollout.

        To be called after learning from it: what acted and what learned then agree. The critic's
        last layer is rescaled, so that values do not change (Pop-Art, van Hasselt et al., 2016).
        """
        model = self
        if (old := self.obs_statistics) is not None:
            raw = obs.obs if isinstance(obs, Inputs) else obs
            samples = jax.vmap(self.encoder.over_time)(raw).reshape(-1, self.encoder.output_size)
            model = eqx.tree_at(lambda m: m.obs_statistics, model, old.update(samples))
        if (old := self.return_statistics) is not None and self.critic is not None:
            new = old.update(returns.reshape(-1))
            weight = self.critic.weight * (old.std / new.std)
            bias = (self.critic.bias * old.std + old.mean - new.mean) / new.std
            model = eqx.tree_at(
                lambda m: (m.return_statistics, m.critic.weight, m.critic.bias),
                model,
                (new, weight, bias),
            )
        return model

    def add_observation(
        self, obs: PyTree[Shaped[Array, "B ..."]], statistics: RunningStatistics
    ) -> RunningStatistics:
        """The statistics of observations with those of one more step."""
        raw = obs.obs if isinstance(obs, Inputs) else obs
        samples = self.encoder.over_time(raw)
        for i in range(samples.shape[0]):
            statistics = statistics.add(samples[i])
        return statistics

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers; works for a model of shapes too."""
        trained = (self.encoder, self.memory, self.hidden, self.actor, self.critic)
        leaves = jax.tree.leaves((*trained, self.critic_memory, self.critic_hidden))
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))

    def _heads(
        self, features: Float[Array, "T D"], critic_features: Float[Array, "T D"] | None = None
    ) -> tuple[Distribution, Float[Array, " T"]]:
        if self.critic is None:
            policy: Any = self.actor(self._activate(self.hidden(features)))
            return policy, jnp.max(policy.values, axis=-1)
        if self.critic_hidden is None or critic_features is None:
            actor, critic = jnp.split(self.hidden(features), 2, axis=-1)
        else:
            actor, critic = self.hidden(features), self.critic_hidden(critic_features)
        actor, critic = self._activate(actor), self._activate(critic)
        values = self.critic(critic)[:, 0]
        if (statistics := self.return_statistics) is not None:
            values = values * statistics.std + jax.lax.stop_gradient(statistics.mean)
        return self.actor(actor), values

    def _activate(self, x: Float[Array, "T F"]) -> Float[Array, "T F"]:
        return ACTIVATIONS[self.activation](normalise(x) if self.hidden_norm else x)


def partition_shapes(shapes: Any) -> tuple[Any, Any]:
    """The arrays and the static part of what `eqx.filter_eval_shape` gave for a model.

    As `eqx.partition(model, eqx.is_array)`, but no array is ever allocated. `eqx.combine(weights,
    static)` is the model again.
    """
    return eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
