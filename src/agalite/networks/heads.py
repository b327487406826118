"""Action distributions, and the heads that make them from features.

The leading axes of a distribution's arrays are its batch. A sampled action is () for `Categorical`
and (k,) otherwise; `ActionHead.to_env` turns it into an element of the environment's action space.
"""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from agalite.memory.layers import Dense

_MOST_CHOICES = 4096  # of one integer of a Box space that is treated as a categorical choice
_LOG_STD_LIMIT = 20.0  # exp(2 * log_std) stays finite


class Distribution(eqx.Module):
    """A distribution over actions with batch axes (...)."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray) -> Shaped[Array, "..."]:
        """Random actions (...) or (..., k)."""

    @abc.abstractmethod
    def log_prob(self, action: Shaped[Array, "..."]) -> Float[Array, "..."]:
        """The log-probability (...) of actions, summed over their k parts."""

    @abc.abstractmethod
    def entropy(self) -> Float[Array, "..."]:
        """The entropy (...), summed over the k parts of an action."""

    @abc.abstractmethod
    def mode(self) -> Shaped[Array, "..."]:
        """The most likely actions (...) or (..., k)."""


class Categorical(Distribution):
    """One choice of n: logits (..., n), actions (...) int32.

    Logits may be -inf, which rules an action out, but not all of them.
    """

    logits: Float[Array, "... n"]

    def sample(self, key: PRNGKeyArray) -> Int[Array, "..."]:
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def log_prob(self, action: Int[Array, "..."]) -> Float[Array, "..."]:
        # A mask rather than an index: the gradient of an index is a scatter, slow on a CPU.
        chosen = jnp.arange(self.logits.shape[-1]) == jnp.expand_dims(action, -1)
        return jnp.sum(jnp.where(chosen, self._log_probs(), 0.0), axis=-1)

    def entropy(self) -> Float[Array, "..."]:
        log_probs = self._log_probs()
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def mode(self) -> Int[Array, "..."]:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def _log_probs(self) -> Float[Array, "... n"]:
        # Finite even for logits of -inf: 0 * -inf would be NaN in the entropy and in gradients.
        lowest = jnp.finfo(self.logits.dtype).min / 4
        top = jax.lax.stop_gradient(jnp.max(self.logits, axis=-1, keepdims=True))
        below = jnp.maximum(self.logits - top, lowest)
        return below - jnp.log(jnp.sum(jnp.exp(below), axis=-1, keepdims=True))


class EpsilonGreedy(Categorical):
    """The likeliest of n actions is the one with the highest value (..., n).

    Any action is taken with probability epsilon, the best otherwise; `logits` are the logarithms of
    these probabilities.
    """

    values: Float[Array, "... n"]

    def __init__(self, values: Float[Array, "... n"], epsilon: float | Float[Array, ""]):
        n = values.shape[-1]
        best = jnp.argmax(values, axis=-1, keepdims=True) == jnp.arange(n)
        self.values = values
        self.logits = jnp.log(jnp.where(best, 1 - epsilon + epsilon / n, epsilon / n))

    def mode(self) -> Int[Array, "..."]:
        return jnp.argmax(self.values, axis=-1).astype(jnp.int32)

    def value(self, action: Int[Array, "..."]) -> Float[Array, "..."]:
        """The values (...) of actions (...)."""
        # A mask rather than an index: the gradient of an index is a scatter, slow on a CPU.
        chosen = jnp.arange(self.values.shape[-1]) == jnp.expand_dims(action, -1)
        return jnp.sum(jnp.where(chosen, self.values, 0), axis=-1)


class MultiCategorical(Distribution):
    """k independent choices: logits (..., sum of sizes), actions (..., k) int32."""

    logits: Float[Array, "... n"]
    sizes: tuple[int, ...] = eqx.field(static=True)

    def sample(self, key: PRNGKeyArray) -> Int[Array, "... k"]:
        keys = jax.random.split(key, len(self.sizes))
        samples = [part.sample(k) for part, k in zip(self._parts(), keys, strict=True)]
        return jnp.stack(samples, axis=-1)

    def log_prob(self, action: Int[Array, "... k"]) -> Float[Array, "..."]:
        return sum(
            (part.log_prob(action[..., i]) for i, part in enumerate(self._parts())),
            start=jnp.zeros(self.logits.shape[:-1], self.logits.dtype),
        )

    def entropy(self) -> Float[Array, "..."]:
        return sum(
            (part.entropy() for part in self._parts()),
            start=jnp.zeros(self.logits.shape[:-1], self.logits.dtype),
        )

    def mode(self) -> Int[Array, "... k"]:
        return jnp.stack([part.mode() for part in self._parts()], axis=-1)

    def _parts(self) -> list[Categorical]:
        cuts = np.cumsum(self.sizes)[:-1]
        return [Categorical(x) for x in jnp.split(self.logits, cuts, axis=-1)]


class DiagonalNormal(Distribution):
    """k independent normal numbers: mean and log_std (..., k), actions (..., k), unbounded.

    `log_prob` takes the sampled action. `BoxHead.to_env` clips it to the limits of the action
    space afterwards.
    """

    mean: Float[Array, "... k"]
    log_std: Float[Array, "... k"]

    def sample(self, key: PRNGKeyArray) -> Float[Array, "... k"]:
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self._log_std()) * noise

    def log_prob(self, action: Float[Array, "... k"]) -> Float[Array, "..."]:
        log_std = self._log_std()
        z = (action - self.mean) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * jnp.square(z) + log_std + 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> Float[Array, "..."]:
        return jnp.sum(self._log_std() + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def mode(self) -> Float[Array, "... k"]:
        return self.mean

    def _log_std(self) -> Float[Array, "... k"]:
        return jnp.clip(self.log_std, -_LOG_STD_LIMIT, _LOG_STD_LIMIT)


class ActionHead(eqx.Module):
    """The policy's output layer: features (..., F) -> a distribution with batch axes (...)."""

    @abc.abstractmethod
    def __call__(self, features: Float[Array, "... F"]) -> Distribution:
        """The distribution over actions."""

    @abc.abstractmethod
    def to_env(self, action: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A sampled action as an element of the environment's action space."""

    encoding_size: eqx.AbstractVar[int]
    """n, the length of an encoded action."""

    @abc.abstractmethod
    def encode(self, action: Shaped[Array, "..."]) -> Float[Array, "... n"]:
        """Sampled actions as an input of the memory: one-hot, or numbers clipped to +-1."""

    @abc.abstractmethod
    def no_action(self, batch: tuple[int, ...]) -> Shaped[Array, "..."]:
        """Zeros of the shape (*batch, ...) and the dtype of sampled actions."""


class DiscreteHead(ActionHead):
    """For Discrete spaces: one of `choices` actions."""

    linear: Dense
    start: int = eqx.field(static=True)
    """The smallest action of the space."""

    encoding_size: int = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        choices: int,
        start: int = 0,
        *,
        gain: float = 0.01,
        key: PRNGKeyArray,
    ):
        self.linear, self.start = scaled_dense(features, choices, gain=gain, key=key), start
        self.encoding_size = choices

    def __call__(self, features: Float[Array, "... F"]) -> Categorical:
        return Categorical(self.linear(features))

    def to_env(self, action: Int[Array, "..."]) -> Int[Array, "..."]:
        return action + self.start if self.start else action

    def encode(self, action: Int[Array, "..."]) -> Float[Array, "... n"]:
        return jax.nn.one_hot(action, self.encoding_size)

    def no_action(self, batch: tuple[int, ...]) -> Int[Array, "..."]:
        return jnp.zeros(batch, jnp.int32)


class ActionValueHead(DiscreteHead):
    """For Discrete spaces: the value of each action, and the epsilon-greedy policy of them."""

    epsilon: float = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        choices: int,
        start: int = 0,
        *,
        epsilon: float,
        gain: float = 0.01,
        key: PRNGKeyArray,
    ):
        super().__init__(features, choices, start, gain=gain, key=key)
        self.epsilon = epsilon

    def __call__(self, features: Float[Array, "... F"]) -> EpsilonGreedy:
        return EpsilonGreedy(self.linear(features), self.epsilon)


class MultiDiscreteHead(ActionHead):
    """For MultiDiscrete spaces and Box spaces of integers: an independent choice for each."""

    linear: Dense
    sizes: tuple[int, ...] = eqx.field(static=True)
    start: tuple[int, ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    """Shape of the environment's action, with one number for each of the sizes."""
    encoding_size: int = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        sizes: np.ndarray,
        start: np.ndarray,
        *,
        gain: float = 0.01,
        key: PRNGKeyArray,
    ) -> None:
        self.shape = tuple(sizes.shape)
        self.sizes = tuple(int(n) for n in sizes.ravel())
        self.start = tuple(int(n) for n in np.broadcast_to(start, sizes.shape).ravel())
        self.encoding_size = sum(self.sizes)
        self.linear = scaled_dense(features, self.encoding_size, gain=gain, key=key)

    def __call__(self, features: Float[Array, "... F"]) -> MultiCategorical:
        return MultiCategorical(self.linear(features), self.sizes)

    def to_env(self, action: Int[Array, "... k"]) -> Int[Array, "..."]:
        return _shaped(action + jnp.asarray(self.start, action.dtype), self.shape)

    def encode(self, action: Int[Array, "... k"]) -> Float[Array, "... n"]:
        parts = [jax.nn.one_hot(action[..., i], n) for i, n in enumerate(self.sizes)]
        return jnp.concatenate(parts, axis=-1)

    def no_action(self, batch: tuple[int, ...]) -> Int[Array, "..."]:
        return jnp.zeros((*batch, len(self.sizes)), jnp.int32)


class BoxHead(ActionHead):
    """For Box spaces: a mean from the features and a trained standard deviation for each number.

    The standard deviations start at exp(log_std_init). `to_env` maps -1 and 1 to the lower and
    upper limit of the space and clips beyond. A number without both limits is not scaled, only
    clipped to the limit it has.

    With `bounded_mean` the mean of a number with both limits is a tanh, so that it stays between
    -1 and 1. Without, it can leave the limits so far that every sampled action is clipped to the
    same one; returns then no longer depend on the action, and nothing brings the mean back.
    """

    linear: Dense
    log_std: Float[Array, " k"]
    bounded_mean: bool = eqx.field(static=True)
    # Tuples rather than arrays, so that they are not trained.
    low: tuple[float, ...] = eqx.field(static=True)
    high: tuple[float, ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    encoding_size: int = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        low: np.ndarray,
        high: np.ndarray,
        *,
        gain: float = 0.01,
        log_std_init: float = 0.0,
        bounded_mean: bool = False,
        key: PRNGKeyArray,
    ) -> None:
        self.shape, self.bounded_mean = tuple(low.shape), bounded_mean
        self.low, self.high = tuple(low.ravel().tolist()), tuple(high.ravel().tolist())
        self.encoding_size = low.size
        self.linear = scaled_dense(features, low.size, gain=gain, key=key)
        self.log_std = jnp.full(low.size, log_std_init, jnp.float32)

    def __call__(self, features: Float[Array, "... F"]) -> DiagonalNormal:
        mean = self.linear(features)
        if self.bounded_mean:
            mean = jnp.where(np.isfinite(self.low) & np.isfinite(self.high), jnp.tanh(mean), mean)
        return DiagonalNormal(mean, jnp.broadcast_to(self.log_std, mean.shape))

    def to_env(self, action: Float[Array, "... k"]) -> Float[Array, "..."]:
        low, high = np.array(self.low), np.array(self.high)
        centre, half = np.zeros_like(low), np.ones_like(low)
        bounded = np.isfinite(low) & np.isfinite(high)
        centre[bounded] = (low[bounded] + high[bounded]) / 2
        half[bounded] = (high[bounded] - low[bounded]) / 2
        low, high, centre, half = (jnp.asarray(x, action.dtype) for x in (low, high, centre, half))
        return _shaped(jnp.clip(centre + half * action, low, high), self.shape)

    def encode(self, action: Float[Array, "... k"]) -> Float[Array, "... k"]:
        return jnp.clip(action, -1, 1)

    def no_action(self, batch: tuple[int, ...]) -> Float[Array, "..."]:
        return jnp.zeros((*batch, self.encoding_size))


def make_action_head(
    action_space: Any,
    features: int,
    *,
    gain: float = 0.01,
    log_std_init: float = 0.0,
    bounded_mean: bool = False,
    epsilon: float | None = None,
    key: PRNGKeyArray,
) -> ActionHead:
    """Makes the head for an action space.

    **Arguments:**

    - `action_space`: a Discrete, MultiDiscrete or Box space of gymnax or Gymnasium. In a Box of
        integers, each one is a categorical choice.
    - `features`: F, the number of features.
    - `gain`: of the orthogonal weights. With 0.01 the first policy is close to uniform.
    - `log_std_init`: logarithm of the standard deviation at the start, for Box spaces.
    - `bounded_mean`: keep the means within the limits of a Box space.
    - `epsilon`: makes the outputs action values, for Discrete spaces only: the policy takes the
        best action, or with this probability any.
    - `key`: for the initial weights.
    """
    shape = getattr(action_space, "shape", None)
    if epsilon is not None and not (hasattr(action_space, "n") and shape == ()):
        raise ValueError(
            f"action_space={action_space!r} has no action values; they need a Discrete space, so "
            "train with an algorithm that has a policy (stream-ac, a2c, ppo)"
        )
    if hasattr(action_space, "nvec"):
        sizes = np.asarray(action_space.nvec)
        start = np.asarray(_start(action_space))
        return MultiDiscreteHead(features, sizes, start, gain=gain, key=key)
    if hasattr(action_space, "n") and shape == ():
        count, first = int(action_space.n), int(_start(action_space))
        if epsilon is not None:
            return ActionValueHead(features, count, first, epsilon=epsilon, gain=gain, key=key)
        return DiscreteHead(features, count, first, gain=gain, key=key)
    if shape is None or not (hasattr(action_space, "low") and hasattr(action_space, "high")):
        raise ValueError(
            f"action_space={action_space!r} is not supported; supported are Discrete, "
            "MultiDiscrete and Box"
        )
    low, high = (
        np.broadcast_to(np.asarray(x, np.float64), tuple(shape))
        for x in (action_space.low, action_space.high)
    )
    if not (low < high).all():
        raise ValueError(f"action_space={action_space!r} must have low < high everywhere")
    if not jnp.issubdtype(action_space.dtype, jnp.integer):
        return BoxHead(
            features,
            low,
            high,
            gain=gain,
            log_std_init=log_std_init,
            bounded_mean=bounded_mean,
            key=key,
        )
    choices = high - low + 1
    if choices.max() > _MOST_CHOICES:
        raise ValueError(
            f"action_space={action_space!r} has {choices.max():.0f} whole numbers to choose from; "
            f"at most {_MOST_CHOICES} are supported"
        )
    return MultiDiscreteHead(features, choices.astype(int), low.astype(int), gain=gain, key=key)


def scaled_dense(inputs: int, *widths: int, gain: float, key: PRNGKeyArray) -> Dense:
    """A dense layer with orthogonal weights times `gain`; other layers have a gain of sqrt(2)."""
    dense = Dense(inputs, widths, key=key)
    return eqx.tree_at(lambda d: d.weight, dense, dense.weight * (gain / math.sqrt(2)))


def _start(space: Any) -> Any:
    return getattr(space, "start", 0)


def _shaped(action: Array, shape: tuple[int, ...]) -> Array:
    return action.reshape(*action.shape[:-1], *shape)
