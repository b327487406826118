"""What the learning rules have in common: their settings, their optimiser, their batch."""

from dataclasses import dataclass

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from agalite import errors
from agalite.agents.batch import Batch, into_sequences
from agalite.agents.returns import gae
from agalite.agents.rollout import Rollout


@dataclass(frozen=True)
class Learning:
    learning_rate: float = 1e-4
    discount: float = 0.99
    lam: float = 0.95
    """Lambda of the returns: 0 trusts the critic, 1 the rewards."""
    entropy: float = 1e-3
    """Weight of the entropy bonus."""
    value: float = 0.5
    """Weight of the critic's loss."""
    max_gradient_norm: float = 0.5
    anneal_learning_rate: bool = False
    """Let the learning rate fall to zero over the run."""
    anneal_entropy: bool = False
    """Let the entropy bonus fall to zero over the run."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_gradient_norm"):
            errors.number(name, getattr(self, name), minimum=0.0, above=True)
        for name in ("discount", "lam"):
            errors.number(name, getattr(self, name), minimum=0.0, maximum=1.0)
        for name in ("entropy", "value"):
            errors.number(name, getattr(self, name), minimum=0.0)
        for name in ("anneal_learning_rate", "anneal_entropy"):
            errors.boolean(name, getattr(self, name))

    def optimiser(self, updates: int) -> optax.GradientTransformation:
        """Adam with clipped gradients, for a run of so many updates."""
        rate = self.learning_rate
        if self.anneal_learning_rate:
            rate = optax.linear_schedule(rate, 0.0, max(1, updates * self._steps_per_update))
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm), optax.adam(rate, eps=1e-5)
        )

    @property
    def _steps_per_update(self) -> int:
        """Steps of the optimiser for each rollout."""
        return 1

    def _prepare(
        self, rollout: Rollout, starts: PyTree[Array], length: int, remaining: Float[Array, ""]
    ) -> tuple[Batch, Float[Array, ""]]:
        """The sequences with their advantages, and the weight of the entropy bonus by now."""
        advantages = gae(
            rollout.rewards, rollout.values, rollout.next_values, rollout.ends,
            discount=self.discount, lam=self.lam,
        )  # fmt: skip
        bonus = self.entropy * (remaining if self.anneal_entropy else jnp.ones(()))
        return into_sequences(rollout, starts, advantages, length), bonus
