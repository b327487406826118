"""What A2C, PPO and APPO share: their settings, the batch of sequences, and a gradient step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite import validation
from agalite.agents.returns import gae
from agalite.agents.rollout import Rollout
from agalite.networks.actor_critic import ActorCritic

Metrics = dict[str, Float[Array, ""]]

TIME_LIMITS = ("bootstrap", "terminate")


@dataclass(frozen=True)
class Agent:
    """The settings of an actor-critic algorithm; a subclass adds its own and `_learn`."""

    learning_rate: float = 1e-4
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount factor of future rewards."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo."""
    ent_coef: float = 1e-3
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are clipped to this global norm."""
    anneal_lr: bool = False
    """Anneal the learning rate linearly to zero over the run."""
    anneal_ent_coef: bool = False
    """Anneal the entropy coefficient linearly to zero over the run."""
    adam_eps: float = 1e-5
    """Epsilon of Adam. Gradients far below it hardly change a weight."""
    time_limit: str = "bootstrap"
    """What follows an episode that a time limit ended: bootstrap (the critic's value) or terminate
    (nothing)."""
    reward_scale: float = 1.0
    """Factor of the rewards that the agent learns from; reported returns are not scaled."""
    norm_return: bool = False
    """Normalise the critic's targets, and advantages by the same scale, with running statistics."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm", "adam_eps", "reward_scale"):
            validation.check_number(name, getattr(self, name), minimum=0.0, above=True)
        for name in ("gamma", "gae_lambda"):
            validation.check_number(name, getattr(self, name), minimum=0.0, maximum=1.0)
        for name in ("ent_coef", "vf_coef"):
            validation.check_number(name, getattr(self, name), minimum=0.0)
        for name in ("anneal_lr", "anneal_ent_coef", "norm_return"):
            validation.check_boolean(name, getattr(self, name))
        validation.check_one_of("time_limit", self.time_limit, TIME_LIMITS)

    def make_optimizer(self, updates: int) -> optax.GradientTransformation:
        """Adam with gradients clipped by their norm, for a run of so many updates."""
        rate = self.learning_rate
        if self.anneal_lr:
            rate = optax.linear_schedule(rate, 0.0, max(1, updates * self._steps_per_update))
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm), optax.adam(rate, eps=self.adam_eps)
        )

    def learn(
        self,
        model: ActorCritic,
        optimizer: optax.GradientTransformation,
        opt_state: Any,
        rollout: Rollout,
        initial_states: PyTree[Shaped[Array, "N B ..."]],
        seq_len: int,
        key: Array,
        remaining: Float[Array, ""],
        traces: PyTree[Shaped[Array, "N B ..."]] | None = None,
    ) -> tuple[ActorCritic, Any, Metrics]:
        """Updates the model with one rollout.

        **Arguments:**

        - `model`, `optimizer`, `opt_state`: as `make_optimizer` and `optimizer.init` gave them.
        - `rollout`: (T, B, ...).
        - `initial_states`: the memory states (N, B, ...) at the beginning of each of the
            N = T / seq_len sequences.
        - `seq_len`: how many steps back a gradient reaches.
        - `key`: for shuffling.
        - `remaining`: the fraction of the run that is left, 1 at its beginning, for annealing.
        - `traces`: (N, B, ...), of the initial states; `None`: gradients end at those.

        **Returns:**

        The new model, the new optimizer state and the metrics, means over the gradient steps.
        """
        if self.reward_scale != 1:
            rollout = rollout._replace(rewards=self.reward_scale * rollout.rewards)
        # The statistics follow after learning, so that the policy that learns starts as the one
        # that acted.
        returns = self._advantages(rollout) + rollout.values
        model, opt_state, metrics = self._learn(
            model, optimizer, opt_state, rollout, initial_states, seq_len, key, remaining, traces
        )
        return model.update_statistics(rollout.obs, returns), opt_state, metrics

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
        """`learn` by real-time recurrent learning: gradients reach past the rollout.

        **Arguments:** as for `learn`, and

        - `trace`: (B, ...), of the memory states at the beginning of the rollout.

        **Returns:**

        As `learn`, and the trace of the memory states at the end of the rollout.
        """
        traces, trace = advance_traces(model, trace, rollout, initial_states, seq_len)
        args = rollout, initial_states, seq_len, key, remaining
        model, opt_state, metrics = self.learn(model, optimizer, opt_state, *args, traces)
        return model, opt_state, metrics, trace

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
        """`learn` with scaled rewards and fixed running statistics."""
        raise NotImplementedError

    @property
    def bootstraps(self) -> bool:
        """Whether the value of the final observation stands for what follows a time limit."""
        return self.time_limit == "bootstrap"

    @property
    def _steps_per_update(self) -> int:
        """Gradient steps for each rollout."""
        return 1

    def _entropy_coefficient(self, remaining: Float[Array, ""]) -> Float[Array, ""]:
        return self.ent_coef * (remaining if self.anneal_ent_coef else jnp.ones(()))

    def _make_batch(
        self,
        rollout: Rollout,
        initial_states: PyTree[Array],
        seq_len: int,
        traces: PyTree[Array] | None,
    ) -> "Batch":
        """The sequences of a rollout with their GAE advantages."""
        return make_batch(rollout, initial_states, self._advantages(rollout), seq_len, traces)

    def _advantages(self, rollout: Rollout) -> Float[Array, "T B"]:
        return gae(
            rollout.rewards,
            rollout.values,
            rollout.next_values,
            rollout.ends,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )


class Batch(NamedTuple):
    """S sequences of L steps, each with the memory state it began with. No padding."""

    initial_states: PyTree[Shaped[Array, "S ..."]]
    obs: PyTree[Shaped[Array, "L S ..."]]
    resets: Bool[Array, "L S"]
    actions: Shaped[Array, "L S ..."]
    log_probs: Float[Array, "L S"]
    """Under the policy that acted."""
    values: Float[Array, "L S"]
    """Of the critic when the agent acted."""
    advantages: Float[Array, "L S"]
    targets: Float[Array, "L S"]
    """Regression targets of the critic."""
    traces: PyTree[Shaped[Array, "S ..."]] | None = None
    """Of the initial states, if gradients are to reach past them."""
    past: Any = None
    """`past` of `ActorCritic.scan_and_advance`."""

    def take(self, rows: Array) -> "Batch":
        """The minibatch of these sequences."""
        states, traces = jax.tree.map(lambda x: x[rows], (self.initial_states, self.traces))
        whole = self._replace(initial_states=None, traces=None, past=None)
        rest = jax.tree.map(lambda x: x[:, rows], whole)
        return rest._replace(initial_states=states, traces=traces, past=self.past)


def make_batch(
    rollout: Rollout,
    initial_states: PyTree[Shaped[Array, "N B ..."]],
    advantages: Float[Array, "T B"],
    seq_len: int,
    traces: PyTree[Shaped[Array, "N B ..."]] | None = None,
) -> Batch:
    """A rollout of T = N * L steps in B environments as S = N * B sequences of L = `seq_len`.

    **Arguments:**

    - `rollout`: (T, B, ...).
    - `initial_states`: (N, B, ...), the memory states that the sequences began with.
    - `advantages`: (T, B).
    - `seq_len`: L, which divides T.
    - `traces`: (N, B, ...), of the initial states, or `None`.

    **Returns:**

    The batch: (L, S, ...), its initial states (S, ...), and targets advantages + values.
    """
    parts = advantages.shape[0] // seq_len
    states, traces = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (initial_states, traces))
    r = rollout
    rest: Any = (
        *(r.obs, r.resets, r.actions, r.log_probs, r.values),
        *(advantages, advantages + r.values),
    )
    return Batch(states, *jax.tree.map(lambda x: to_sequences(x, parts), rest))._replace(
        traces=traces
    )


def to_sequences(x: Shaped[Array, "T B ..."], parts: int) -> Shaped[Array, "L S ..."]:
    """T = N * L steps of B environments as S = N * B sequences of L steps; N is `parts`."""
    if parts == 1:
        return x
    x = x.reshape(parts, -1, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def from_sequences(x: Float[Array, "L S"], parts: int) -> Float[Array, "T B"]:
    """The inverse of `to_sequences`."""
    length, sequences = x.shape
    x = x.reshape(length, parts, sequences // parts)
    return jnp.swapaxes(x, 0, 1).reshape(parts * length, sequences // parts)


class Evaluation(NamedTuple):
    """What a model says about the actions of a batch."""

    log_probs: Float[Array, "L S"]
    entropy: Float[Array, "L S"]
    values: Float[Array, "L S"]
    traces: PyTree[Shaped[Array, "S ..."]] | None = None
    """After the sequences, if the batch has traces."""


def evaluate_actions(model: ActorCritic, batch: Batch) -> Evaluation:
    """Runs the model over all sequences, each from its initial memory state."""
    if batch.traces is not None:

        def scan(state: Any, obs: Any, resets: Any, trace: Any) -> Any:
            return model.scan_and_advance(state, obs, resets, trace, past=batch.past)

        _, policy, values, traces = jax.vmap(scan, in_axes=(0, 1, 1, 0), out_axes=(0, 1, 1, 0))(
            batch.initial_states, batch.obs, batch.resets, batch.traces
        )
        return Evaluation(policy.log_prob(batch.actions), policy.entropy(), values, traces)
    _, policy, values = jax.vmap(model.scan, in_axes=(0, 1, 1), out_axes=(0, 1, 1))(
        batch.initial_states, batch.obs, batch.resets
    )
    return Evaluation(policy.log_prob(batch.actions), policy.entropy(), values)


def advance_traces(
    model: ActorCritic,
    trace: PyTree[Shaped[Array, "B ..."]],
    rollout: Rollout,
    initial_states: PyTree[Shaped[Array, "N B ..."]],
    seq_len: int,
) -> tuple[PyTree[Shaped[Array, "N B ..."]], PyTree[Shaped[Array, "B ..."]]]:
    """The traces at the beginning of each of the N sequences of a rollout, and at its end.

    **Arguments:**

    - `model`: with the weights that acted.
    - `trace`: (B, ...), at the beginning of the rollout.
    - `rollout`: (T, B, ...).
    - `initial_states`: (N, B, ...), the memory states at the beginning of the sequences.
    - `seq_len`: T / N.
    """

    def split(x: Array) -> Array:
        return x.reshape(-1, seq_len, *x.shape[1:])

    def one(trace: Any, sequence: tuple[Any, Any, Array]) -> tuple[Any, Any]:
        state, obs, resets = sequence
        scan = jax.vmap(lambda *args: model.scan_and_advance(*args)[3], in_axes=(0, 1, 1, 0))
        return scan(state, obs, resets, trace), trace

    sequences = initial_states, *jax.tree.map(split, (rollout.obs, rollout.resets))
    trace, traces = jax.lax.scan(one, trace, sequences)
    return traces, trace


Loss = Callable[[ActorCritic, Batch], tuple[Float[Array, ""], Metrics]]


def apply_gradients(
    model: ActorCritic,
    optimizer: optax.GradientTransformation,
    opt_state: Any,
    loss: Loss,
    batch: Batch,
) -> tuple[ActorCritic, Any, Metrics]:
    """One gradient step.

    **Arguments:**

    - `model`, `optimizer`, `opt_state`: as in `Agent.learn`.
    - `loss`: `loss(model, batch)` is the loss () and metrics.
    - `batch`: (L, S, ...).

    **Returns:**

    The new model, the new optimizer state, and the metrics with the norm of the gradient. With
    traces also `losses/past_grad_fraction`: with g the gradient of the memory's weights inside the
    sequences and p what the traces add to it, |p| / (|p| + |g|).
    """
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_of(params: Any, past: Any) -> tuple[Float[Array, ""], Metrics]:
        model = eqx.combine(params, static)
        if past is None:
            return loss(model, batch)
        memories = static.memory, static.critic_memory
        return loss(model, batch._replace(past=eqx.combine(past, memories)))

    if batch.traces is None:
        (_, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(params, None)
    else:
        # The same weights twice, so that the gradient from before the sequences can be measured.
        memories = params.memory, params.critic_memory
        (_, metrics), (gradient, past) = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(
            params, memories
        )
        inside = gradient.memory, gradient.critic_memory
        a, b = optax.tree.norm(past), optax.tree.norm(inside)
        metrics = {**metrics, "losses/past_grad_fraction": a / jnp.maximum(a + b, 1e-30)}
        gradient = eqx.tree_at(
            lambda g: (g.memory, g.critic_memory),
            gradient,
            jax.tree.map(jnp.add, inside, past),
            is_leaf=lambda x: x is None,
        )
    metrics = {**metrics, "losses/grad_norm": optax.tree.norm(gradient)}
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return eqx.apply_updates(eqx.combine(params, static), updates), opt_state, metrics
