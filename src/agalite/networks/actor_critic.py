"""The agent's network: encoder -> memory -> actor and critic."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from agalite import validation
from agalite.memory import Memory, make_memory
from agalite.memory.layers import Dense
from agalite.networks.encoders import Encoder, make_encoder
from agalite.networks.heads import ActionHead, Distribution, make_action_head, output_layer
from agalite.ops.activations import tanh
from agalite.ops.resets import broadcast_state


class ActorCritic(eqx.Module):
    """A policy and a value function that share an encoder and a memory.

    Unbatched: one environment at a time. Use `jax.vmap` for more (of `scan` with
    `in_axes=(0, 1, 1)`).

    ```python
    state = model.initial_state()
    state, policy, value = model.step(state, obs, reset)      # value ()
    state, policy, values = model.scan(state, obs, resets)    # obs (T, ...), values (T,)
    ```
    """

    encoder: Encoder
    memory: Memory
    hidden: Dense
    """The hidden layers of actor and critic as one matrix product: both read the same features."""
    actor: ActionHead
    critic: Dense

    @classmethod
    def make(
        cls,
        observation_space: Any,
        action_space: Any,
        *,
        memory: str,
        memory_options: dict[str, Any] | None = None,
        encoder: str = "auto",
        hidden_size: int = 128,
        key: PRNGKeyArray,
    ) -> "ActorCritic":
        """A new network for an environment.

        **Arguments:**

        - `observation_space`, `action_space`: of gymnax or of Gymnasium.
        - `memory`, `memory_options`: the memory model and its options, as for `make_memory`.
        - `encoder`: a name of `make_encoder`.
        - `hidden_size`: width of the hidden layer of the actor, and of that of the critic.
        - `key`: for the initial weights.
        """
        validation.check_integer("hidden_size", hidden_size, minimum=1)
        encoder_key, memory_key, hidden_key, actor_key, critic_key = jax.random.split(key, 5)
        encoder_module = make_encoder(encoder, observation_space, key=encoder_key)
        memory_module = make_memory(
            memory, encoder_module.output_size, key=memory_key, **(memory_options or {})
        )
        return cls(
            encoder=encoder_module,
            memory=memory_module,
            hidden=Dense(memory_module.output_size, [hidden_size, hidden_size], key=hidden_key),
            actor=make_action_head(action_space, hidden_size, key=actor_key),
            critic=output_layer(hidden_size, 1, gain=1.0, key=critic_key),
        )

    def initial_state(self, batch: int | None = None) -> Any:
        """The memory state before an episode's first observation; (batch, ...) of `batch`."""
        state = self.memory.initial_state()
        if batch is None:
            return state
        return broadcast_state(state, batch)

    def step(
        self, state: Any, obs: Shaped[Array, "..."], reset: Bool[Array, ""] | bool = False
    ) -> tuple[Any, Distribution, Float[Array, ""]]:
        """One observation.

        **Arguments:**

        - `state`: the memory state.
        - `obs`: (...), of the shape of the observation space.
        - `reset`: (), true when an episode begins with `obs`.

        **Returns:**

        The new memory state, the distribution over actions and the value ().
        """
        state, features = self.memory.step(state, self.encoder(obs), reset)
        policy, values = self._heads(features[None])
        return state, jax.tree.map(lambda x: x[0], policy), values[0]

    def scan(
        self, state: Any, obs: Shaped[Array, "T ..."], resets: Bool[Array, " T"] | None = None
    ) -> tuple[Any, Distribution, Float[Array, " T"]]:
        """A sequence: equal to T calls of `step`, but parallel over time where the memory is.

        No gradient passes through the incoming state.

        **Arguments:**

        - `state`: the memory state.
        - `obs`: (T, ...).
        - `resets`: (T,), true where an episode begins.

        **Returns:**

        The new memory state, the distributions (T,) and the values (T,).
        """
        state, features = self.memory.scan(state, self.encoder.over_time(obs), resets)
        return state, *self._heads(features)

    def refresh(self, state: Any) -> Any:
        """A stored memory state for these weights; to be called after every update of them."""
        return self.memory.refresh(state)

    def to_env(self, action: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A sampled action as an element of the environment's action space.

        Learning needs the sampled action, not this one.
        """
        return self.actor.to_env(action)

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers; works for a model of shapes too."""
        leaves = jax.tree.leaves(self)
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))

    def _heads(self, features: Float[Array, "T D"]) -> tuple[Distribution, Float[Array, " T"]]:
        actor, critic = jnp.split(tanh(self.hidden(features)), 2, axis=-1)
        return self.actor(actor), self.critic(critic)[:, 0]


def partition_shapes(shapes: Any) -> tuple[Any, Any]:
    """The arrays and the static part of what `eqx.filter_eval_shape` gave for a model.

    As `eqx.partition(model, eqx.is_array)`, but no array is ever allocated. `eqx.combine(weights,
    static)` is the model again.
    """
    return eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
