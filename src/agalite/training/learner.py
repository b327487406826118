"""The learner: a batch of rollouts in, new weights out, as one compiled program."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32

from agalite.agents.rollout import Rollout
from agalite.training.config import HostConfig
from agalite.training.network import Network


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
            self.network.model(state.weights), self._optimiser, state.optimiser, rollout, starts,
            c.sequence_length, jax.random.fold_in(state.key, state.update),
            1 - state.update / c.updates,
        )  # fmt: skip
        weights = eqx.filter(model, eqx.is_array)
        return LearnerState(weights, optimiser, state.key, state.update + 1), losses
