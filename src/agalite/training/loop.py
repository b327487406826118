"""The training program: act, learn, again, for a whole log interval without leaving the device."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from agalite.agents import rollout
from agalite.agents.rollout import Episodes, Place
from agalite.envs.registry import make
from agalite.envs.vector import Vector
from agalite.nets.actor_critic import ActorCritic
from agalite.training.config import TrainConfig
from agalite.training.skeleton import Skeleton


class TrainState(NamedTuple):
    """All that a run is, between two updates: arrays only, so that it can be saved to the bit."""

    weights: Any
    """The arrays of the actor-critic."""
    optimiser: Any
    place: Place
    key: Array
    update: Int[Array, ""]
    """How many have been done."""


class Trainer:
    """The pure functions of one configuration: `begin` a run with a seed, `advance` it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.world: Any = make(config.env, **config.env_options)
        self.vector = Vector(self.world, config.environments)
        self._optimiser = config.agent.optimiser(config.updates)
        skeleton = Skeleton(self._make_model)
        self.model, self.parameter_count = skeleton.model, skeleton.parameter_count

    def _make_model(self, key: Array) -> ActorCritic:
        c = self.config
        params = self.world.default_params
        return ActorCritic.make(
            self.world.observation_space(params), self.world.action_space(params),
            memory=c.memory, memory_options=c.memory_options, encoder=c.encoder, hidden=c.hidden,
            key=key,
        )  # fmt: skip

    def begin(self, seed: Int[Array, ""]) -> TrainState:
        key = jax.random.key(seed)
        model_key, world_key, run_key = jax.random.split(key, 3)
        model = self._make_model(model_key)
        optimiser = self._optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        place = rollout.begin(model, self.vector, world_key)
        weights = eqx.filter(model, eqx.is_array)
        state = TrainState(weights, optimiser, place, run_key, jnp.zeros((), jnp.int32))
        return jax.tree.map(_strong, state)

    def update(
        self, state: TrainState
    ) -> tuple[TrainState, tuple[Episodes, dict[str, Float[Array, ""]]]]:
        c = self.config
        act_key, learn_key = jax.random.split(jax.random.fold_in(state.key, state.update))
        model = self.model(state.weights)
        place, data, starts, episodes = rollout.collect(
            model, self.vector, state.place, act_key, steps=c.rollout, sequence=c.sequence_length
        )
        remaining = 1 - state.update / c.updates
        model, optimiser, losses = c.agent.learn(
            model,
            self._optimiser,
            state.optimiser,
            data,
            starts,
            c.sequence_length,
            learn_key,
            remaining,
        )
        # What a memory has cached belongs to the weights that made it.
        refresh = jax.vmap(model.refresh, axis_size=c.environments)  # a state may hold nothing
        place = place._replace(memory=refresh(place.memory))
        weights = eqx.filter(model, eqx.is_array)
        new = TrainState(weights, optimiser, place, state.key, state.update + 1)
        return new, (episodes, losses)

    def advance(
        self, state: TrainState, updates: Int[Array, ""]
    ) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        """So many updates; the means of what happened meanwhile.

        The number is not part of the program, so that a shorter last interval compiles nothing.
        """
        # Traced once here and used again by the loop: tracing is what a small run waits for.
        update = jax.jit(self.update)
        shapes = jax.eval_shape(update, state)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def one(_: Array, carry: Any) -> Any:
            state, sums = carry
            state, new = update(state)
            return state, jax.tree.map(jnp.add, sums, new)

        state, (episodes, losses) = lax.fori_loop(0, updates, one, (state, zeros))
        return state, {**_charts(episodes), **jax.tree.map(lambda x: x / updates, losses)}


def _strong(x: Array) -> Array:
    """The same with a dtype that is no longer up for negotiation.

    A number that came from Python's would have one, its successor after an update not, and the
    whole program would be compiled a second time for the difference.
    """
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x, x.dtype)


def _charts(episodes: Episodes) -> dict[str, Float[Array, ""]]:
    """NaN where no episode ended."""
    extras = {f"charts/{name}": x / episodes.ended for name, x in episodes.extras.items()}
    return {
        "charts/episodic_return": episodes.returns / episodes.ended,
        "charts/episodic_length": episodes.lengths / episodes.ended,
        "charts/episodes": episodes.ended,
        **extras,
    }
