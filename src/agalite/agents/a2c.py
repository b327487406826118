"""Advantage actor-critic (Mnih et al., 2016): one gradient step for each rollout.

The paper's agent in T-Maze.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree, Shaped

from agalite.agents.base import Agent, Batch, Metrics, apply_gradients, evaluate_actions
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic

# Among the metrics of the loss: the traces after the sequences.
_TRACES = "traces"


@dataclass(frozen=True)
class A2C(Agent):
    """Settings of A2C.

    The defaults are the paper's for T-Maze, with the learning rate and the entropy coefficient of
    its published code.
    """

    def _learn(
        self,
        model: ActorCritic,
        optimizer: optax.GradientTransformation,
        opt_state: Any,
        rollout: Rollout,
        initial_states: PyTree[Array],
        seq_len: int,
        key: Array,
        remaining: Float[Array, ""],
        traces: PyTree[Array] | None = None,
    ) -> tuple[ActorCritic, Any, Metrics]:
        del key
        batch = self._make_batch(rollout, initial_states, seq_len, traces)
        ent_coef = self._entropy_coefficient(remaining)

        def loss(model: ActorCritic, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
            return self.loss(model, batch, ent_coef)

        return apply_gradients(model, optimizer, opt_state, loss, batch)

    def learn_with_trace(
        self,
        model: ActorCritic,
        optimizer: optax.GradientTransformation,
        opt_state: Any,
        rollout: Rollout,
        initial_states: PyTree[Shaped[Array, "N B ..."]],
        trace: PyTree[Shaped[Array, "B ..."]],
        seq_len: int,
        key: Array,
        remaining: Float[Array, ""],
    ) -> tuple[ActorCritic, Any, Metrics, PyTree[Shaped[Array, "B ..."]]]:
        args = model, optimizer, opt_state, rollout, initial_states
        new_trace: Any
        if seq_len < rollout.resets.shape[0]:
            model, opt_state, metrics, new_trace = super().learn_with_trace(
                *args, trace, seq_len, key, remaining
            )
            metrics.pop(_TRACES)
        else:
            # The loss passes over each rollout once, with the weights that acted: it advances the
            # trace on the way.
            traces = jax.tree.map(lambda x: x[None], trace)
            model, opt_state, metrics = self.learn(*args, seq_len, key, remaining, traces)
            new_trace = metrics.pop(_TRACES)
        return model, opt_state, metrics, new_trace

    def loss(
        self, model: ActorCritic, batch: Batch, ent_coef: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Metrics]:
        """-log pi(a) A + vf_coef (V - target)^2 / 2 - ent_coef H(pi), the mean over the batch.

        With `norm_return`, A and V - target are in standard deviations of the return.
        """
        new = evaluate_actions(model, batch)
        advantages, errors = batch.advantages, new.values - batch.targets
        if self.norm_return:
            advantages, errors = (x / model.value_scale for x in (advantages, errors))
        policy_loss = -jnp.mean(new.log_probs * advantages)
        value_loss = 0.5 * jnp.mean(jnp.square(errors))
        entropy = jnp.mean(new.entropy)
        metrics = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
        }
        if new.traces is not None:
            traces: Any = new.traces
            metrics[_TRACES] = traces
        return policy_loss + self.vf_coef * value_loss - ent_coef * entropy, metrics
