"""Baselines that ignore the order of tokens: the commonest class, and a regression on counts.

The features of the logistic regression are how often each token occurs: a bag of bytes for Text, of
digits and operators for ListOps. The weight of its penalty is chosen on the validation examples.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from agalite.supervised.data import Task
from agalite.supervised.examples import Examples

PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
_STEPS = 300


class Baselines(NamedTuple):
    """Test accuracies."""

    majority: float
    """Of the commonest class."""
    counts: float
    """Of the logistic regression."""
    penalty: float
    """The chosen weight of its penalty."""


def baselines(task: Task) -> Baselines:
    """Fits both baselines and scores them on the test examples."""
    commonest = int(np.bincount(task.train.labels, minlength=task.classes).argmax())
    majority = float((task.test.labels == commonest).mean())
    train, validation, test = (
        features(part, task.vocabulary) for part in (task.train, task.validation, task.test)
    )
    mean, std = train.mean(0), train.std(0)
    std[std == 0] = 1.0  # a feature that is constant

    def standardise(x: np.ndarray) -> Array:
        return jnp.asarray((x - mean) / std, jnp.float32)

    fit = jax.jit(_fit, static_argnums=2)
    labels = jnp.asarray(task.train.labels, jnp.int32)
    found = {}
    for penalty in PENALTIES:
        weights = fit(standardise(train), labels, task.classes, jnp.float32(penalty))
        found[penalty] = weights, _accuracy(weights, standardise(validation), task.validation)
    penalty = max(found, key=lambda p: found[p][1])
    return Baselines(majority, _accuracy(found[penalty][0], standardise(test), task.test), penalty)


def features(examples: Examples, vocabulary: int) -> Float[np.ndarray, "E 2*vocabulary+1"]:
    """Relative and logarithmic counts of each token, and the logarithm of the length."""
    which = np.repeat(np.arange(len(examples)), examples.lengths)
    flat = which * vocabulary + examples.tokens
    counts = np.bincount(flat, minlength=len(examples) * vocabulary)
    counts = counts.reshape(len(examples), vocabulary)
    lengths = examples.lengths[:, None]
    return np.concatenate([counts / lengths, np.log1p(counts), np.log(lengths)], axis=1)


def _fit(x: Float[Array, "E F"], labels: Array, classes: int, penalty: Array) -> Any:
    """Weights (F, classes) and biases (classes,), fitted by L-BFGS on all examples."""

    def loss(parameters: Any) -> Array:
        weights, bias = parameters
        errors = optax.softmax_cross_entropy_with_integer_labels(x @ weights + bias, labels)
        return errors.mean() + penalty * (weights**2).sum()

    solver = optax.lbfgs()
    start = (jnp.zeros((x.shape[1], classes)), jnp.zeros(classes))
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        parameters, state = carry
        value, grad = value_and_grad(parameters, state=state)
        updates, state = solver.update(
            grad, state, parameters, value=value, grad=grad, value_fn=loss
        )
        return (optax.apply_updates(parameters, updates), state), None

    (parameters, _), _ = jax.lax.scan(step, (start, solver.init(start)), None, _STEPS)
    return parameters


def _accuracy(parameters: Any, x: Array, examples: Examples) -> float:
    weights, bias = parameters
    chosen = np.asarray((x @ weights + bias).argmax(-1))
    return float((chosen == examples.labels).mean())
