"""The programs of a run: begin with a seed, learn from a batch, score a batch."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from agalite.supervised.classifier import Classifier
from agalite.supervised.config import LRAConfig
from agalite.supervised.packing import Batch
from agalite.training.skeleton import Skeleton


class Sums(NamedTuple):
    """Over the updates since the last row of metrics."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]
    examples: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    updates: Float[Array, ""]


class State(NamedTuple):
    """All of one seed's training between two updates, as arrays."""

    weights: Any
    optimiser: Any
    best: Any
    """The weights with the best score on the validation examples."""
    best_accuracy: Float[Array, ""]
    sums: Sums
    update: Int[Array, ""]
    """How many have been done."""


class Trainer:
    def __init__(self, config: LRAConfig, vocabulary: int, classes: int) -> None:
        self.config, self._vocabulary, self._classes = config, vocabulary, classes
        warmup = round(config.warmup * config.updates)
        self.learning_rate = optax.join_schedules(
            [
                optax.linear_schedule(0.0, config.learning_rate, max(1, warmup)),
                optax.cosine_decay_schedule(config.learning_rate, max(1, config.updates - warmup)),
            ],
            [warmup],
        )
        self._optimiser = optax.chain(
            optax.clip_by_global_norm(config.max_gradient_norm),
            optax.adamw(self._rate, weight_decay=config.weight_decay, mask=_matrices),
        )
        skeleton = Skeleton(self._make)
        self.model, self.parameter_count = skeleton.model, skeleton.parameter_count

    def _rate(self, count: Any) -> Any:
        # The first update is not wasted on a rate of zero.
        return self.learning_rate(count + 1)

    def _make(self, key: Array) -> Classifier:
        c = self.config
        return Classifier(
            self._vocabulary, self._classes, memory=c.memory, memory_options=c.memory_options,
            embedding=c.embedding, hidden=c.hidden, pooling=c.pooling, key=key,
        )  # fmt: skip

    def begin(self, seed: Int[Array, ""]) -> State:
        weights = eqx.filter(self._make(jax.random.key(seed)), eqx.is_array)
        optimiser = self._optimiser.init(weights)
        zero = jnp.zeros(())
        sums = Sums(*[zero] * len(Sums._fields))
        best = jax.tree.map(jnp.zeros_like, weights)
        state = State(
            weights, optimiser, best, jnp.full((), -1.0, jnp.float32), sums,
            jnp.zeros((), jnp.int32),
        )  # fmt: skip
        return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)

    def learn(self, state: State, batch: Batch) -> State:
        """One update: the mean loss over the batch's sequences, however many there are."""
        examples = (batch.ends > batch.starts).sum().astype(jnp.float32)

        def piece(total: Any, rows: Batch) -> tuple[Any, None]:
            def objective(weights: Any) -> tuple[Array, tuple[Array, Array]]:
                loss, correct = self._score(weights, rows)
                return loss / examples, (loss, correct)

            values, gradient = jax.grad(objective, has_aux=True)(state.weights)[::-1]
            return jax.tree.map(jnp.add, total, (gradient, *values)), None

        zeros = jax.tree.map(jnp.zeros_like, state.weights)
        start = (zeros, jnp.zeros(()), jnp.zeros(()))
        (gradient, loss, correct), _ = lax.scan(piece, start, self._pieces(batch))
        changes, optimiser = self._optimiser.update(gradient, state.optimiser, state.weights)
        new = Sums(loss, correct, examples, optax.tree.norm(gradient), jnp.ones(()))
        return state._replace(
            weights=optax.apply_updates(state.weights, changes),
            optimiser=optimiser,
            sums=jax.tree.map(jnp.add, state.sums, new),
            update=state.update + 1,
        )

    def score(self, weights: Any, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The sum of the losses, and how many sequences were classified correctly."""
        losses, correct = lax.map(lambda rows: self._score(weights, rows), self._pieces(batch))
        return losses.sum(), correct.sum()

    def _score(self, weights: Any, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        logits = self.model(weights)(batch.tokens, batch.resets, batch.starts, batch.ends)
        used = batch.ends > batch.starts
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        correct = used & (logits.argmax(-1) == batch.labels)
        return jnp.where(used, losses, 0.0).sum(), correct.sum().astype(jnp.float32)

    def _pieces(self, batch: Batch) -> Batch:
        """The batch with a first axis: `rows_at_once` rows in each of its parts."""
        size = self.config.rows_at_once
        parts = self.config.rows // size

        def over_time(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(x.shape[0], parts, size), 1, 0)

        def over_slots(x: Array) -> Array:
            return x.reshape(parts, size, x.shape[-1])

        tokens, resets, *slots = batch
        return Batch(over_time(tokens), over_time(resets), *map(over_slots, slots))

    @staticmethod
    def choose(state: State, accuracy: Float[Array, ""]) -> State:
        """Remember the weights if no others were better on the validation examples."""
        better = accuracy > state.best_accuracy
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), state.weights, state.best)
        return state._replace(best=best, best_accuracy=jnp.maximum(accuracy, state.best_accuracy))

    @staticmethod
    def clear(state: State) -> State:
        return state._replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


def _matrices(weights: Any) -> Any:
    """What decays: by name, since a head's biases are a matrix too."""

    def decays(path: Any, _: Any) -> bool:
        return jax.tree_util.keystr(path[-1:]) in (".weight", ".embedding")

    return jax.tree_util.tree_map_with_path(decays, weights)
