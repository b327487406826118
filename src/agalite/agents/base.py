"""What A2C, PPO, APPO and PQN share: settings, the batch of sequences, and gradient steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite import validation
from agalite.agents.returns import gae
from agalite.agents.rollout import Rollout, Sampler
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Distribution

Metrics = dict[str, Float[Array, ""]]

TIME_LIMITS = ("bootstrap", "terminate")


@dataclass(frozen=True)
class RolloutAgent:
    """The settings of an algorithm that learns from rollouts; a subclass adds its own and `_learn`.

    `epsilon` is, for agents with action values, the probability of a random action after training.
    """

    epsilon: ClassVar[float | None] = None

    learning_rate: float = 1e-4
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount factor of future rewards."""
    max_grad_norm: float = 0.5
    """Gradients are clipped to this global norm."""
    anneal_lr: bool = False
    """Anneal the learning rate linearly to zero over the run."""
    adam_eps: float = 1e-5
    """Epsilon of Adam. Gradients far below it hardly change a weight."""
    time_limit: str = "bootstrap"
    """What follows an episode that a time limit ended: bootstrap (the critic's value) or terminate
    (nothing)."""
    reward_scale: float = 1.0
    """Factor of the rewards that the agent learns from; reported returns are not scaled."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm", "adam_eps", "reward_scale"):
            validation.check_number(name, getattr(self, name), minimum=0.0, above=True)
        validation.check_number("gamma", self.gamma, minimum=0.0, maximum=1.0)
        validation.check_boolean("anneal_lr", self.anneal_lr)
        validation.check_one_of("time_limit", self.time_limit, TIME_LIMITS)

    def make_optimizer(self, updates: int) -> optax.GradientTransformation:
        """Adam with gradients clipped by their norm, for a run of so many updates."""
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.adam(self._rate(updates), eps=self.adam_eps),
        )

    def _rate(self, updates: int) -> float | optax.Schedule:
        if not self.anneal_lr:
            return self.learning_rate
        steps = max(1, updates * self.gradient_steps)
        return optax.linear_schedule(self.learning_rate, 0.0, steps)

    def sampler(self, remaining: Float[Array, ""]) -> Sampler | None:
        """How actions are sampled from the policy in a rollout; `None`: as it says.

        **Arguments:**

        - `remaining`: the fraction of the run that is left.
        """
        del remaining
        return None

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
        returns = self._returns(rollout)
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
    def gradient_steps(self) -> int:
        """Gradient steps for each rollout."""
        return 1

    def _returns(self, rollout: Rollout) -> Float[Array, "T B"]:
        """What the values of a rollout should have been."""
        raise NotImplementedError


@dataclass(frozen=True)
class Agent(RolloutAgent):
    """The settings of an actor-critic algorithm; a subclass adds its own and `_learn`."""

    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo."""
    ent_coef: float = 1e-3
    """Coefficient of the entropy bonus."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    anneal_ent_coef: bool = False
    """Anneal the entropy coefficient linearly to zero over the run."""
    norm_return: bool = False
    """Normalise the critic's targets, and advantages by the same scale, with running statistics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_number("gae_lambda", self.gae_lambda, minimum=0.0, maximum=1.0)
        for name in ("ent_coef", "vf_coef"):
            validation.check_number(name, getattr(self, name), minimum=0.0)
        for name in ("anneal_ent_coef", "norm_return"):
            validation.check_boolean(name, getattr(self, name))

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

    def _returns(self, rollout: Rollout) -> Float[Array, "T B"]:
        return self._advantages(rollout) + rollout.values


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
    """What the model says about the actions of all sequences."""
    policy, values, traces = evaluate_policy(model, batch)
    return Evaluation(policy.log_prob(batch.actions), policy.entropy(), values, traces)


def evaluate_policy(
    model: ActorCritic, batch: Batch
) -> tuple[Distribution, Float[Array, "L S"], PyTree[Shaped[Array, "S ..."]] | None]:
    """Runs the model over all sequences, each from its initial memory state.

    **Returns:**

    The policy (L, S), the values (L, S), and the traces after the sequences if the batch has any.
    """
    if batch.traces is None:
        _, policy, values = jax.vmap(model.scan, in_axes=(0, 1, 1), out_axes=(0, 1, 1))(
            batch.initial_states, batch.obs, batch.resets
        )
        return policy, values, None

    def scan(state: Any, obs: Any, resets: Any, trace: Any) -> Any:
        return model.scan_and_advance(state, obs, resets, trace, past=batch.past)

    _, policy, values, traces = jax.vmap(scan, in_axes=(0, 1, 1, 0), out_axes=(0, 1, 1, 0))(
        batch.initial_states, batch.obs, batch.resets, batch.traces
    )
    return policy, values, traces


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
    trace, traces = lax.scan(one, trace, sequences)
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


def run_epochs(
    model: ActorCritic,
    optimizer: optax.GradientTransformation,
    opt_state: Any,
    loss: Loss,
    batch: Batch,
    key: Array,
    *,
    update_epochs: int,
    num_minibatches: int,
    target_kl: float | None = None,
) -> tuple[ActorCritic, Any, Metrics]:
    """`update_epochs` times: shuffle the sequences, one gradient step for each minibatch.

    **Arguments:**

    - `model`, `optimizer`, `opt_state`, `loss`, `batch`: as for `apply_gradients`.
    - `key`: for shuffling.
    - `num_minibatches`: divides the S sequences of the batch.
    - `target_kl`: no further epochs after one whose mean `losses/approx_kl` is larger.

    **Returns:**

    The new model, the new optimizer state and the metrics, means over the gradient steps.
    """
    sequences = batch.resets.shape[1]
    weights, static = eqx.partition(model, eqx.is_array)  # lax.scan carries arrays only

    def minibatch(carry: tuple[Any, Any], rows: Array):
        weights, opt_state = carry
        model, opt_state, metrics = apply_gradients(
            eqx.combine(weights, static), optimizer, opt_state, loss, batch.take(rows)
        )
        return (eqx.filter(model, eqx.is_array), opt_state), metrics

    def epoch(carry: tuple[Any, Any], key: Array):
        shuffled = jax.random.permutation(key, sequences).reshape(num_minibatches, -1)
        return lax.scan(minibatch, carry, shuffled)

    keys = jax.random.split(key, update_epochs)
    carry = weights, opt_state
    if target_kl is None:
        carry, metrics = lax.scan(epoch, carry, keys)
        metrics = jax.tree.map(jnp.mean, metrics)
    else:

        def next_epoch(state: tuple[Any, Metrics, Array, Array]):
            carry, sums, done, _ = state
            carry, metrics = epoch(carry, keys[done])
            metrics = jax.tree.map(jnp.mean, metrics)
            sums = jax.tree.map(jnp.add, sums, metrics)
            return carry, sums, done + 1, metrics["losses/approx_kl"] > target_kl

        shapes = jax.eval_shape(epoch, carry, keys[0])[1]
        zeros = {name: jnp.zeros((), x.dtype) for name, x in shapes.items()}
        carry, sums, epochs, _ = lax.while_loop(
            lambda state: (state[2] < update_epochs) & ~state[3],
            next_epoch,
            (carry, zeros, jnp.int32(0), jnp.array(False)),
        )
        metrics = {name: x / epochs for name, x in sums.items()}
        metrics["losses/epochs"] = epochs.astype(jnp.float32)
    return eqx.combine(carry[0], static), carry[1], metrics


def epsilon_schedule(
    remaining: Float[Array, "..."], start: float, end: float, fraction: float
) -> Float[Array, "..."]:
    """From `start` to `end` over the first `fraction` of a run, and `end` from there on.

    **Arguments:**

    - `remaining`: (...), the fraction of the run that is left.
    - `start`, `end`, `fraction`: between 0 and 1.

    **Returns:**

    The probability (...) of a random action.
    """
    done = (1 - remaining) / max(fraction, 1e-9)
    return start + jnp.minimum(done, 1) * (end - start)
