"""The agent's network: an encoder, a memory, and an actor and a critic that read it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from agalite import validation
from agalite.memory import Memory, make_memory
from agalite.memory.layers import Dense
from agalite.networks.encoders import Encoder, make_encoder
from agalite.networks.heads import ActionHead, Distribution, make_action_head, small_dense
from agalite.ops.activations import tanh
from agalite.ops.state import copies


class ActorCritic(eqx.Module):
    """One environment at a time; `vmap` for more (of `scan` with in_axes=(0, 1, 1)).

    state = model.initial_state()
    state, policy, value  = model.step(state, obs, reset)     # value ()
    state, policy, values = model.scan(state, obs, resets)    # obs (T, ...), policy and values (T,)
    """

    encoder: Encoder
    memory: Memory
    hidden: Dense
    """The hidden layers of actor and critic, side by side: they read the same features."""
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
        """For these spaces, of gymnax or Gymnasium; hidden_size: of actor and critic."""
        validation.integer("hidden_size", hidden_size, minimum=1)
        a, b, c, d, e = jax.random.split(key, 5)
        reader = make_encoder(encoder, observation_space, key=a)
        model = make_memory(memory, reader.output_size, key=b, **(memory_options or {}))
        return cls(
            encoder=reader,
            memory=model,
            hidden=Dense(model.output_size, [hidden_size, hidden_size], key=c),
            actor=make_action_head(action_space, hidden_size, key=d),
            critic=small_dense(hidden_size, 1, gain=1.0, key=e),
        )

    def initial_state(self, batch: int | None = None) -> Any:
        """The memory's, before the first observation of an episode; (batch, ...) of so many."""
        state = self.memory.initial_state()
        if batch is None:
            return state
        return copies(state, batch)

    def step(
        self, state: Any, obs: Shaped[Array, "..."], reset: Bool[Array, ""] | bool = False
    ) -> tuple[Any, Distribution, Float[Array, ""]]:
        """One observation; `reset` is true when an episode begins with it."""
        state, features = self.memory.step(state, self.encoder(obs), reset)
        policy, values = self._heads(features[None])
        return state, jax.tree.map(lambda x: x[0], policy), values[0]

    def scan(
        self, state: Any, obs: Shaped[Array, "T ..."], resets: Bool[Array, " T"] | None = None
    ) -> tuple[Any, Distribution, Float[Array, " T"]]:
        """A sequence: the same as T steps, but in parallel over time where the memory can be.

        The gradient does not pass through the incoming state.
        """
        state, features = self.memory.scan(state, self.encoder.over_time(obs), resets)
        return state, *self._heads(features)

    def refresh(self, state: Any) -> Any:
        """The same state for these weights: call it on stored states after an update of them."""
        return self.memory.refresh(state)

    def to_world(self, action: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A sampled action as the world's action space has it; keep the sampled one to learn."""
        return self.actor.to_world(action)

    @property
    def parameter_count(self) -> int:
        """Numbers that are trained; works for a model of shapes too."""
        leaves = jax.tree.leaves(self)
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))

    def _heads(self, features: Float[Array, "T D"]) -> tuple[Distribution, Float[Array, " T"]]:
        actor, critic = jnp.split(tanh(self.hidden(features)), 2, axis=-1)
        return self.actor(actor), self.critic(critic)[:, 0]
