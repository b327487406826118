"""Streaming agents: every step acts and learns, and is then forgotten. No batches, no replay.

Two algorithms with eligibility traces, actor-critic(lambda) (`StreamAC`) and Q(lambda) (`StreamQ`),
after Elsayed, Vasan and Mahmood, "Streaming Deep Reinforcement Learning Finally Works" (2024). At
every step t

    delta = r + gamma v(S') - v(S)                          the TD error, with the present weights
    z <- gamma lambda z + g                                 g: the gradient of what was predicted
    w <- w + alpha delta z                                  alpha: from a rule that cannot overshoot

Observations are normalised and rewards are scaled by running statistics. A step-size rule
(`step_size.py`) bounds how far one update can move a prediction.

With B > 1 environments every one has its own eligibility trace, because its TD error belongs to the
states that *it* has seen. The update is the mean of their updates, each of which is bounded on its
own. The cost is B eligibility traces.

The gradient g through the memory's state is either that of real-time recurrent learning, which
reaches back to the beginning of the episode at the same cost for every step (`--gradient rtrl`), or
ends after the last `truncation` inputs.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite import validation
from agalite.agents.base import TIME_LIMITS, Metrics, epsilon_schedule
from agalite.agents.rollout import Episodes, RunnerState, count_episodes
from agalite.agents.step_size import STEP_RULES, TINY, Limit, step_size, tightest
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.flat import WeightGroups, Weights, weight_groups
from agalite.networks.heads import Distribution, EpsilonGreedy
from agalite.networks.normalisation import RunningStatistics
from agalite.ops import eligibility as traces
from agalite.ops.matmul import precision as precision_of_products

if TYPE_CHECKING:  # importing gymnax initialises JAX's devices, before --seeds can set their number
    from agalite.envs.vector import VectorEnv

_MEAN_DECAY = 0.999  # of the running means of squared errors and of squared gradient norms


class Window(NamedTuple):
    """The last k inputs of B environments, oldest first, with the memory state before each."""

    obs: PyTree[Shaped[Array, "k B ..."]]
    resets: Bool[Array, "k B"]
    states: PyTree[Shaped[Array, "k B ..."]]


class StreamState(NamedTuple):
    """What a streaming agent carries from step to step beside its weights.

    P is the number of weights, G the number of groups of them that have a step size of their own.
    """

    eligibility: Float[Array, "B P"]
    """After the last step, also where that ended an episode: the next one then forgets it."""
    gradient_norm: Float[Array, " G"]
    """Running mean of the gradients' squared norms."""
    error_square: Float[Array, ""]
    """Running mean of delta^2."""
    returns: Float[Array, " B"]
    """The discounted return of the episode so far."""
    return_statistics: RunningStatistics
    trace: Any
    """Of real-time recurrent learning, (B, ...); None without."""
    window: Window | None
    """None with a trace, and for a truncation of one step."""
    step: Float[Array, ""]
    """Steps done, for the bias of the running means."""


class Predictions(NamedTuple):
    """What the network says about one observation."""

    policy: Distribution
    value: Float[Array, ""]


@dataclass(frozen=True)
class StreamAgent(abc.ABC):
    """Settings that the streaming algorithms share."""

    gamma: float = 0.99
    """Discount factor of future rewards."""
    trace_lambda: float = 0.8
    """Lambda of the eligibility traces: 0 is one-step TD, 1 is Monte Carlo."""
    step_rule: str = "intentional"
    """Step-size rule: intentional (an update changes a prediction by at most a fraction of the
    error) or obgd (Elsayed et al., 2024: bounded by the 1-norm of the eligibility trace)."""
    step_size: float = 0.1
    """With intentional, the fraction of the TD error by which an update may change a value, at most
    0.5; with obgd the largest step size, 1 in its paper."""
    kappa: float = 2.0
    """With obgd, the kappa of values: larger is a smaller step."""
    truncation: int = 1
    """Inputs that a gradient reaches back over, without --gradient rtrl; 1: no gradient through the
    memory's state."""
    norm_reward: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    time_limit: str = "bootstrap"
    """What follows an episode that a time limit ended: bootstrap (the value of its final
    observation) or terminate (nothing)."""

    norm_return: ClassVar[bool] = False
    epsilon: ClassVar[float | None] = None
    """Of the policy after training, where the actor's outputs are action values."""

    def __post_init__(self) -> None:
        for name in ("gamma", "trace_lambda"):
            validation.check_number(name, getattr(self, name), minimum=0.0, maximum=1.0)
        validation.check_one_of("step_rule", self.step_rule, STEP_RULES)
        validation.check_one_of("time_limit", self.time_limit, TIME_LIMITS)
        for name in ("step_size", "kappa"):
            validation.check_number(name, getattr(self, name), minimum=0.0, above=True)
        if self.step_rule == "intentional" and self.step_size > 0.5:
            raise ValueError(
                f"step_size={self.step_size} must be at most 0.5 with step_rule='intentional': an "
                "update that moves two values by more than half of their error can overshoot"
            )
        validation.check_integer("truncation", self.truncation, minimum=1)
        validation.check_boolean("norm_reward", self.norm_reward)

    # --- what the algorithms differ in ------------------------------------------------------------

    @abc.abstractmethod
    def act(
        self, predictions: Predictions, key: Array, remaining: Float[Array, ""]
    ) -> tuple[Shaped[Array, "..."], Bool[Array, ""]]:
        """An action, and whether the eligibility trace of earlier steps continues with it."""

    @abc.abstractmethod
    def predicted(self, predictions: Predictions, action: Shaped[Array, "..."]) -> Float[Array, ""]:
        """The value of which the TD error is taken."""

    @abc.abstractmethod
    def objective(
        self, predictions: Predictions, action: Shaped[Array, "..."], error: Float[Array, ""]
    ) -> Float[Array, ""]:
        """Its gradient enters the eligibility trace."""

    @abc.abstractmethod
    def limits(self, error: Float[Array, ""], typical: Float[Array, ""]) -> list[Limit]:
        """The limits of the groups of weights, for a TD error and the typical size of it."""

    def metrics(self, predictions: Predictions) -> Metrics:
        """Further metrics of a step."""
        del predictions
        return {}

    # --- the state --------------------------------------------------------------------------------

    def init(
        self, model: ActorCritic, runner_state: RunnerState, *, traced: bool = False
    ) -> StreamState:
        """The state before the first step.

        **Arguments:**

        - `model`: the network.
        - `runner_state`: of B environments, before their first step.
        - `traced`: real-time recurrent learning, instead of gradients over `truncation` inputs.
        """
        count = runner_state.resets.shape[0]
        weights, _ = weight_groups(model)
        dtype = weights[0][0].dtype

        def repeated(times: int, tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (times, *x.shape)), tree)

        trace = window = None
        if traced:
            trace = repeated(count, tuple(m.initial_trace() for m in _memories(model)))
        elif self.truncation > 1:
            # All but the first input are stand-ins: the reset that comes with it hides them.
            k = self.truncation - 1
            window = Window(
                repeated(k, runner_state.obs),
                repeated(k, runner_state.resets),
                repeated(k, runner_state.memory_state),
            )
        # One stand-in with variance 1, so that the first returns, which are equal, do not make the
        # scale of rewards infinite.
        statistics = RunningStatistics(())
        statistics = eqx.tree_at(lambda s: s.count, statistics, jnp.ones(()))
        return StreamState(
            jnp.zeros((count, traces.join(weights).size), dtype),
            jnp.zeros(len(weights), dtype),
            jnp.zeros((), dtype),
            jnp.zeros(count, dtype),
            statistics,
            trace,
            window,
            jnp.zeros(()),
        )

    # --- learning ---------------------------------------------------------------------------------

    def run(
        self,
        model: ActorCritic,
        envs: "VectorEnv",
        state: StreamState,
        runner_state: RunnerState,
        key: Array,
        remaining: Float[Array, ""],
        *,
        num_steps: int,
        noise_steps: int = 1,
    ) -> tuple[ActorCritic, StreamState, RunnerState, Episodes, Metrics]:
        """Acts and learns for `num_steps` steps in every environment, one update for each.

        **Arguments:**

        - `model`: the network.
        - `envs`: the B environments.
        - `state`, `runner_state`: from `init`, or from the last call.
        - `key`: for the actions and the environments.
        - `remaining`: the fraction of the run that is left, 1 at its beginning, for schedules.
        - `num_steps`: how many steps.
        - `noise_steps`: steps for which the randomness of the actions stays the same.

        **Returns:**

        The new network and states, sums over the episodes that ended, and the metrics, means over
        the steps.
        """
        weights, groups = weight_groups(model)
        action_keys, env_keys = jax.vmap(jax.random.split, out_axes=1)(
            jax.random.split(key, num_steps)
        )
        steps = jnp.arange(num_steps)
        keys = (action_keys[steps - steps % noise_steps], env_keys)

        def flat(state: StreamState) -> StreamState:
            trace = jax.tree.map(lambda x: x.reshape(x.shape[0], -1), state.trace)
            return state._replace(trace=trace)

        def reshape(x: Array, like: jax.ShapeDtypeStruct) -> Array:
            return x.reshape(like.shape)

        def step(carry: Any, keys: tuple[Array, Array]) -> tuple[Any, tuple[Episodes, Metrics]]:
            weights, statistics, state, runner_state = carry
            state = state._replace(trace=jax.tree.map(reshape, state.trace, shapes))
            (*rest, state, runner_state), outputs = self._step(
                weights, statistics, state, runner_state, envs, groups, *keys, remaining
            )
            return (*rest, flat(state), runner_state), outputs

        # XLA gives arrays with axes of size 1 another layout in the loop than its body has, and
        # copies them twice in each step. Vectors have one layout.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.trace)
        carry = weights, model.obs_statistics, flat(state), runner_state
        carry, (episodes, metrics) = lax.scan(step, carry, keys)
        weights, statistics, state, runner_state = carry
        state = state._replace(trace=jax.tree.map(reshape, state.trace, shapes))
        episodes = jax.tree.map(jnp.sum, episodes)
        metrics = jax.tree.map(jnp.mean, metrics)
        return groups.rebuild(weights, statistics), state, runner_state, episodes, metrics

    def _step(
        self,
        weights: Weights,
        statistics: RunningStatistics | None,
        state: StreamState,
        runner_state: RunnerState,
        envs: "VectorEnv",
        groups: WeightGroups,
        action_key: Array,
        env_key: Array,
        remaining: Float[Array, ""],
    ) -> tuple[Any, tuple[Episodes, Metrics]]:
        """One step in every environment and one update."""
        old, count = runner_state, envs.num_envs
        over_envs = _over_envs(count)
        if statistics is not None:
            statistics = groups.rebuild(weights, statistics).add_observation(old.obs, statistics)
        window = _push(state.window, old)

        def look(w: Weights, window: Any, trace: Any) -> tuple[Predictions, Any]:
            return _look(groups.rebuild(w, statistics), window, trace)

        # The pullback is kept until the TD error is known.
        predictions, pullback, memory_state = over_envs(
            lambda window, trace: jax.vjp(lambda w: look(w, window, trace), weights, has_aux=True)
        )(_time_last(window), state.trace)
        action_keys = jax.random.split(action_key, count)
        actions, continues = over_envs(lambda p, k: self.act(p, k, remaining))(
            predictions, action_keys
        )
        model = groups.rebuild(weights, statistics)
        obs, env_state, rewards, terminated, truncated, info = envs.step(
            env_key, old.env_state, over_envs(model.to_env)(actions)
        )
        ends = terminated | truncated
        obs, final_obs = (
            model.inputs(x, actions, rewards) for x in (obs, info["final_observation"])
        )
        # `final_obs` is the next observation also where no episode ended.
        following = over_envs(lambda m, o: model.step(m, o, jnp.array(False))[2])(
            memory_state, final_obs
        )
        over = ends if self.time_limit == "terminate" else terminated
        scaled, returns, return_statistics = self._scale_rewards(state, rewards)
        values = over_envs(self.predicted)(predictions, actions)
        errors = scaled + self.gamma * jnp.where(over, 0, following) - values

        def gradient(pullback: Any, predictions: Predictions, action: Array, error: Array) -> Any:
            return pullback(jax.grad(self.objective)(predictions, action, error))[0]

        gradients = over_envs(gradient)(pullback, predictions, actions, errors)
        going = continues & ~old.resets
        eligibility, norms = traces.accumulate(
            state.eligibility,
            self.gamma * self.trace_lambda * going.astype(errors.dtype),
            gradients,
            absolute=self.step_rule == "obgd",
        )
        trace = state.trace
        if trace is not None:
            # The new trace depends on the gradients, so that it can take the place of the old one,
            # which they read. Without this the compiler copies it.
            never = jnp.isnan(jnp.sum(norms.square, axis=-1))
            trace = over_envs(lambda *args: _advance(model, *args))(
                _time_last(window), trace, never
            )
        state = state._replace(step=state.step + 1)
        state, sizes = self._sizes(state, norms, errors)
        weights = traces.move(weights, eligibility, sizes * errors[:, None] / count)
        state = state._replace(
            eligibility=eligibility,
            returns=jnp.where(ends, 0, returns),
            return_statistics=return_statistics,
            trace=trace,
            window=None if window is None or state.window is None else _tail(window),
        )
        refresh = jax.vmap(groups.rebuild(weights, statistics).refresh, axis_size=count)
        episodes, so_far, lengths = count_episodes(old, rewards, ends, info)
        new = RunnerState(env_state, obs, ends, refresh(memory_state), so_far, lengths)
        metrics = {
            "losses/td_error": jnp.sqrt(jnp.mean(jnp.square(errors))),
            "losses/eligibility": self._length(norms),
            "losses/step_size": jnp.mean(sizes),
            **jax.tree.map(jnp.mean, over_envs(self.metrics)(predictions)),
        }
        return (weights, statistics, state, new), (episodes, metrics)

    def _scale_rewards(
        self, state: StreamState, rewards: Float[Array, " B"]
    ) -> tuple[Float[Array, " B"], Float[Array, " B"], RunningStatistics]:
        """Rewards over the standard deviation of the discounted return (Elsayed et al., 2024)."""
        returns = self.gamma * state.returns + rewards
        if not self.norm_reward:
            return rewards, returns, state.return_statistics
        statistics = state.return_statistics
        for i in range(returns.shape[0]):
            statistics = statistics.add(returns[i])
        return rewards / statistics.std, returns, statistics

    def _sizes(
        self, state: StreamState, norms: traces.Norms, errors: Float[Array, " B"]
    ) -> tuple[StreamState, Float[Array, "B G"]]:
        """The new running means, and the step sizes."""
        correction = 1 - _MEAN_DECAY**state.step
        error_square = _MEAN_DECAY * state.error_square + (1 - _MEAN_DECAY) * jnp.mean(
            jnp.square(errors)
        )
        typical = jnp.sqrt(error_square / correction)
        squares = _MEAN_DECAY * state.gradient_norm + (1 - _MEAN_DECAY) * jnp.mean(norms.square, 0)
        sizes = []
        for i in range(squares.shape[0]):

            def one(error: Array, square: Array, length: Array, i: int = i) -> Array:
                found = self.limits(error, typical)
                limit = found[i] if len(found) == squares.shape[0] else tightest(found)
                usual = squares[i] / correction
                return step_size(self.step_rule, limit, error, square, length, usual)

            sizes.append(jax.vmap(one)(errors, norms.square[:, i], norms.length[:, i]))
        state = state._replace(gradient_norm=squares, error_square=error_square)
        return state, jnp.stack(sizes, axis=-1)

    def _length(self, norms: traces.Norms) -> Float[Array, ""]:
        """The norm of the eligibility traces, of all groups together; a metric."""
        if self.step_rule == "obgd":
            return jnp.mean(jnp.sum(norms.length, axis=-1))
        return jnp.sqrt(jnp.mean(jnp.sum(norms.length, axis=-1)))


@dataclass(frozen=True)
class StreamAC(StreamAgent):
    """Streaming actor-critic(lambda): settings.

    Actor and critic have step sizes of their own where they share no weights (`separate_critic`).
    Otherwise both are one group: the sum of log pi and the value has one eligibility trace.
    """

    actor_step_size: float = 0.05
    """The same as --step-size for the actor. With intentional, the largest change of the logarithm
    of a probability."""
    actor_kappa: float = 3.0
    """With obgd, the kappa of the actor."""
    ent_coef: float = 0.01
    """Coefficient of the entropy bonus."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("actor_step_size", "actor_kappa"):
            validation.check_number(name, getattr(self, name), minimum=0.0, above=True)
        validation.check_number("ent_coef", self.ent_coef, minimum=0.0)

    def act(
        self, predictions: Predictions, key: Array, remaining: Float[Array, ""]
    ) -> tuple[Shaped[Array, "..."], Bool[Array, ""]]:
        del remaining
        return predictions.policy.sample(key), jnp.array(True)

    def predicted(self, predictions: Predictions, action: Shaped[Array, "..."]) -> Float[Array, ""]:
        del action
        return predictions.value

    def objective(
        self, predictions: Predictions, action: Shaped[Array, "..."], error: Float[Array, ""]
    ) -> Float[Array, ""]:
        # The update multiplies by delta, whose sign must not turn the bonus into a penalty
        # (Elsayed et al., 2024, Stream AC(lambda)).
        policy, value = predictions
        bonus = self.ent_coef * jnp.sign(error) * policy.entropy()
        return policy.log_prob(action) + bonus + value

    def limits(self, error: Float[Array, ""], typical: Float[Array, ""]) -> list[Limit]:
        size = jnp.maximum(jnp.abs(error), typical) + TINY
        actor = Limit(self.actor_step_size / size, self.actor_step_size, self.actor_kappa)
        critic = Limit(self.step_size, self.step_size, self.kappa)
        return [actor, critic]

    def metrics(self, predictions: Predictions) -> Metrics:
        return {"losses/entropy": predictions.policy.entropy()}


@dataclass(frozen=True)
class StreamQ(StreamAgent):
    """Streaming Q(lambda): settings. The actor's outputs are action values; there is no critic.

    A step that is not greedy ends the eligibility of those before it (Watkins, 1989), because what
    follows it says nothing about the greedy policy from there.
    """

    epsilon_start: float = 1.0
    """Probability of a random action at the beginning."""
    epsilon_end: float = 0.01
    """Probability of a random action at the end, and of the agent after training."""
    epsilon_fraction: float = 0.1
    """Fraction of the run over which it falls from the one to the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epsilon_start", "epsilon_end", "epsilon_fraction"):
            validation.check_number(name, getattr(self, name), minimum=0.0, maximum=1.0)

    @property
    def epsilon(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.epsilon_end

    def act(
        self, predictions: Predictions, key: Array, remaining: Float[Array, ""]
    ) -> tuple[Shaped[Array, "..."], Bool[Array, ""]]:
        values = _action_values(predictions)
        explore_key, action_key = jax.random.split(key)
        epsilon = epsilon_schedule(
            remaining, self.epsilon_start, self.epsilon_end, self.epsilon_fraction
        )
        greedy = jnp.argmax(values).astype(jnp.int32)
        random = jax.random.randint(action_key, (), 0, values.shape[-1], jnp.int32)
        action = jnp.where(jax.random.uniform(explore_key) < epsilon, random, greedy)
        return action, action == greedy

    def predicted(self, predictions: Predictions, action: Shaped[Array, "..."]) -> Float[Array, ""]:
        assert isinstance(predictions.policy, EpsilonGreedy)
        return predictions.policy.value(action)

    def objective(
        self, predictions: Predictions, action: Shaped[Array, "..."], error: Float[Array, ""]
    ) -> Float[Array, ""]:
        del error
        return self.predicted(predictions, action)

    def limits(self, error: Float[Array, ""], typical: Float[Array, ""]) -> list[Limit]:
        del error, typical
        return [Limit(self.step_size, self.step_size, self.kappa)]


def _action_values(predictions: Predictions) -> Float[Array, " n"]:
    assert isinstance(predictions.policy, EpsilonGreedy)
    return predictions.policy.values


# --- the network ----------------------------------------------------------------------------------


def _memories(model: ActorCritic) -> tuple[Any, ...]:
    both = model.memory, model.critic_memory
    return tuple(memory for memory in both if memory is not None)


def _look(model: ActorCritic, window: Window, trace: Any) -> tuple[Predictions, Any]:
    """The predictions for the last of k inputs of one environment, and the state after it."""
    first = jax.tree.map(lambda x: x[0], window.states)
    if trace is None:
        state, policy, values = model.scan(first, window.obs, window.resets)
    else:
        memories = _memories(model)
        states = first if len(memories) == 2 else (first,)
        with precision_of_products(model.precision):
            xs = model.encode(window.obs, window.resets)
            states, features = zip(
                *(
                    memory.scan(old, xs, window.resets, trace=t)
                    for memory, old, t in zip(memories, states, trace, strict=True)
                ),
                strict=True,
            )
        state = states if len(memories) == 2 else states[0]
        policy, values = model._heads(*features)
    predictions = Predictions(jax.tree.map(lambda x: x[-1], policy), values[-1])
    return predictions, lax.stop_gradient(state)


def _advance(
    model: ActorCritic, window: Window, trace: tuple[Any, ...], forget: Bool[Array, ""]
) -> tuple[Any, ...]:
    """The trace after the same inputs. The compiler finds what `_look` has computed already."""
    first = jax.tree.map(lambda x: x[0], window.states)
    memories = _memories(model)
    states = first if len(memories) == 2 else (first,)
    with precision_of_products(model.precision):
        xs = model.encode(window.obs, window.resets)
        return tuple(
            memory.advance_trace(t, old, xs, window.resets | forget)
            for memory, old, t in zip(memories, states, trace, strict=True)
        )


def _push(window: Window | None, now: RunnerState) -> Window:
    """The window with the present input as its last, (k, B, ...)."""
    new = Window(now.obs, now.resets, now.memory_state)
    new = jax.tree.map(lambda x: x[None], new)
    if window is None:
        return new
    return jax.tree.map(lambda old, x: jnp.concatenate([old, x]), window, new)


def _tail(window: Window) -> Window:
    return jax.tree.map(lambda x: x[1:], window)


def _time_last(window: Window) -> Window:
    """(k, B, ...) -> (B, k, ...)."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), window)


def _over_envs(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`vmap` over the first axis; for one environment without it, which is faster."""

    def single(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

        return call

    return single if count == 1 else jax.vmap
