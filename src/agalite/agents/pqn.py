"""PQN (Gallici et al., 2025): Q-learning without a replay buffer and without target networks.

Many environments in parallel take the place of the replay buffer, and layer norm (`hidden_norm`)
that of the target network. The targets are the lambda-returns of Q(lambda), with the values of the
network that acted:

    G_t = r_t + gamma (lambda G_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a))

Each rollout is used for some epochs of minibatches and dropped. Minibatches are of whole
sequences; each is recomputed from the memory state it began with, as in PPO.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree, Shaped

from agalite import validation
from agalite.agents.base import (
    Batch,
    Metrics,
    RolloutAgent,
    epsilon_schedule,
    evaluate_policy,
    make_batch,
    run_epochs,
)
from agalite.agents.returns import lambda_returns
from agalite.agents.rollout import Rollout, Sampler
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Distribution, EpsilonGreedy


@dataclass(frozen=True)
class PQN(RolloutAgent):
    """Settings of PQN. The actor's outputs are action values; there is no critic."""

    norm_return: ClassVar[bool] = False

    learning_rate: float = 5e-4
    """Learning rate of RAdam."""
    q_lambda: float = 0.9
    """Lambda of the returns: 0 is one-step Q-learning, 1 is Monte Carlo."""
    update_epochs: int = 4
    """Epochs: passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per epoch; the sequences are shuffled for every epoch."""
    epsilon_start: float = 1.0
    """Probability of a random action at the beginning."""
    epsilon_end: float = 0.02
    """Probability of a random action at the end, and of the agent after training."""
    epsilon_fraction: float = 0.25
    """Fraction of the run over which it falls from the one to the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("update_epochs", "num_minibatches"):
            validation.check_integer(name, getattr(self, name), minimum=1)
        for name in ("q_lambda", "epsilon_start", "epsilon_end", "epsilon_fraction"):
            validation.check_number(name, getattr(self, name), minimum=0.0, maximum=1.0)

    @property
    def epsilon(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.epsilon_end

    def exploration(self, remaining: Float[Array, ""]) -> Float[Array, ""]:
        """The probability of a random action, () or of the shape of `remaining`."""
        return epsilon_schedule(
            remaining, self.epsilon_start, self.epsilon_end, self.epsilon_fraction
        )

    def sampler(self, remaining: Float[Array, ""]) -> Sampler:
        epsilon = self.exploration(remaining)

        def sample(policy: Distribution, key: Array) -> Shaped[Array, "..."]:
            return EpsilonGreedy(cast(EpsilonGreedy, policy).values, epsilon).sample(key)

        return sample

    def make_optimizer(self, updates: int) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.radam(self._rate(updates), eps=self.adam_eps),
        )

    @property
    def gradient_steps(self) -> int:
        return self.update_epochs * self.num_minibatches

    def _returns(self, rollout: Rollout) -> Float[Array, "T B"]:
        # The values of a network with action values are those of the best actions.
        return lambda_returns(
            rollout.rewards,
            rollout.next_values,
            rollout.ends,
            gamma=self.gamma,
            gae_lambda=self.q_lambda,
        )

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
        advantages = self._returns(rollout) - rollout.values
        batch = make_batch(rollout, initial_states, advantages, seq_len, traces)
        model, opt_state, metrics = run_epochs(
            model,
            optimizer,
            opt_state,
            self.loss,
            batch,
            key,
            update_epochs=self.update_epochs,
            num_minibatches=self.num_minibatches,
        )
        return model, opt_state, {**metrics, "charts/epsilon": self.exploration(remaining)}

    def loss(self, model: ActorCritic, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Half the mean squared error of the values of the actions that were taken.

        **Arguments:**

        - `model`: the network.
        - `batch`: (L, S, ...), a minibatch of whole sequences.

        **Returns:**

        The loss () and metrics.
        """
        policy, best, _ = evaluate_policy(model, batch)
        taken = cast(EpsilonGreedy, policy).value(batch.actions)
        loss = 0.5 * jnp.mean(jnp.square(taken - jax.lax.stop_gradient(batch.targets)))
        return loss, {"losses/q_loss": loss, "losses/q_values": jnp.mean(best)}
