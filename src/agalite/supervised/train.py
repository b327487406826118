"""Trains a classifier on a Long Range Arena task, or resumes a run, up to its test accuracy.

`Trainer` holds the pure functions of a configuration, all of one seed. `_Session` runs them for all
seeds: batches in, metrics and checkpoints out. `train` and `resume` are the entry points.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from agalite.networks.actor_critic import partition_shapes
from agalite.supervised.batches import Batch, BatchStream, Cursor, Packing
from agalite.supervised.classifier import Classifier
from agalite.supervised.config import LRAConfig
from agalite.supervised.data import Task, load
from agalite.supervised.examples import Examples
from agalite.system import Stopped
from agalite.training import plots
from agalite.training.checkpoint import Checkpoints
from agalite.training.logging import MetricsWriter, ProgressBar
from agalite.training.plots import bootstrap_interval
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.session import (
    already_finished,
    check_losses,
    enable_compilation_cache,
    mean_over_seeds,
    restore_latest,
    stop_signals,
)

ACCURACY, VALIDATION = "charts/accuracy", "charts/validation_accuracy"


class Sums(NamedTuple):
    """Sums over the updates since the last row of metrics."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]
    examples: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    updates: Float[Array, ""]


class TrainState(NamedTuple):
    """The whole state of one seed between two updates, as arrays."""

    weights: Any
    """The arrays of the `Classifier`; `Trainer.model` adds its static part."""
    opt_state: Any
    best: Any
    """The weights with the best accuracy on the validation examples."""
    best_accuracy: Float[Array, ""]
    sums: Sums
    update: Int[Array, ""]
    """The number of updates done."""


class Trainer:
    """The pure functions of a configuration, all of one seed.

    **Arguments:**

    - `config`: the configuration.
    - `vocabulary`: the number of tokens.
    - `classes`: the number of classes.
    """

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
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.adamw(self._rate, weight_decay=config.weight_decay, mask=_decayed),
        )
        shapes = eqx.filter_eval_shape(self._make_model, jax.random.key(0))
        self.parameter_count: int = shapes.parameter_count
        _, self._static = partition_shapes(shapes)

    def model(self, weights: Any) -> Classifier:
        """The classifier with these arrays as its weights."""
        return eqx.combine(weights, self._static)

    def _rate(self, count: Any) -> Any:
        # The first update would have a rate of zero.
        return self.learning_rate(count + 1)

    def _make_model(self, key: Array) -> Classifier:
        c = self.config
        return Classifier(
            self._vocabulary,
            self._classes,
            memory=c.memory,
            memory_options=c.memory_options,
            embedding=c.embedding,
            hidden_size=c.hidden_size,
            pooling=c.pooling,
            key=key,
        )

    def init(self, seed: Int[Array, ""]) -> TrainState:
        """The state before the first update."""
        weights = eqx.filter(self._make_model(jax.random.key(seed)), eqx.is_array)
        opt_state = self._optimizer.init(weights)
        zero = jnp.zeros(())
        sums = Sums(*[zero] * len(Sums._fields))
        best = jax.tree.map(jnp.zeros_like, weights)
        state = TrainState(
            weights,
            opt_state,
            best,
            jnp.full((), -1.0, jnp.float32),
            sums,
            jnp.zeros((), jnp.int32),
        )
        # Without weak types, which the state after an update does not have.
        return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)

    def update(self, state: TrainState, batch: Batch) -> TrainState:
        """One update on the mean loss over the sequences of a batch."""
        examples = (batch.ends > batch.starts).sum().astype(jnp.float32)

        def add_gradient(total: Any, rows: Batch) -> tuple[Any, None]:
            def objective(weights: Any) -> tuple[Array, tuple[Array, Array]]:
                loss, correct = self._score(weights, rows)
                return loss / examples, (loss, correct)

            values, gradient = jax.grad(objective, has_aux=True)(state.weights)[::-1]
            return jax.tree.map(jnp.add, total, (gradient, *values)), None

        zeros = jax.tree.map(jnp.zeros_like, state.weights)
        start = (zeros, jnp.zeros(()), jnp.zeros(()))
        (gradient, loss, correct), _ = lax.scan(add_gradient, start, self._split(batch))
        changes, opt_state = self._optimizer.update(gradient, state.opt_state, state.weights)
        new = Sums(loss, correct, examples, optax.tree.norm(gradient), jnp.ones(()))
        return state._replace(
            weights=optax.apply_updates(state.weights, changes),
            opt_state=opt_state,
            sums=jax.tree.map(jnp.add, state.sums, new),
            update=state.update + 1,
        )

    def score(self, weights: Any, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The sum of the losses, and the number of sequences that are classified correctly."""
        losses, correct = lax.map(lambda rows: self._score(weights, rows), self._split(batch))
        return losses.sum(), correct.sum()

    def _score(self, weights: Any, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        logits = self.model(weights)(batch.tokens, batch.resets, batch.starts, batch.ends)
        used = batch.ends > batch.starts
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        correct = used & (logits.argmax(-1) == batch.labels)
        return jnp.where(used, losses, 0.0).sum(), correct.sum().astype(jnp.float32)

    def _split(self, batch: Batch) -> Batch:
        """The batch in parts of `rows_at_once` rows, along a new first axis."""
        size = self.config.rows_at_once
        parts = self.config.rows // size

        def over_time(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(x.shape[0], parts, size), 1, 0)

        def over_slots(x: Array) -> Array:
            return x.reshape(parts, size, x.shape[-1])

        tokens, resets, *slots = batch
        return Batch(over_time(tokens), over_time(resets), *map(over_slots, slots))

    @staticmethod
    def keep_best(state: TrainState, accuracy: Float[Array, ""]) -> TrainState:
        """Stores the weights as the best ones if their validation accuracy is higher."""
        better = accuracy > state.best_accuracy
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), state.weights, state.best)
        return state._replace(best=best, best_accuracy=jnp.maximum(accuracy, state.best_accuracy))

    @staticmethod
    def clear_sums(state: TrainState) -> TrainState:
        """Starts a new row of metrics."""
        return state._replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


def _decayed(weights: Any) -> Any:
    """Which arrays decay: weights and the embedding, by name, since biases may be matrices too."""

    def decays(path: Any, _: Any) -> bool:
        return jax.tree_util.keystr(path[-1:]) in (".weight", ".embedding")

    return jax.tree_util.tree_map_with_path(decays, weights)


def train(config: LRAConfig, folder: str | os.PathLike[str], *, quiet: bool = False) -> Run:
    """Trains a classifier into a new folder.

    **Arguments:**

    - `config`: the configuration.
    - `folder`: the folder of the run, which must not hold a run yet.
    - `quiet`: show no progress bar.

    **Returns:**

    The run, with its summary. On Ctrl-C or SIGTERM it saves a checkpoint and raises `Stopped`.
    """
    enable_compilation_cache()
    task = load(config)
    with Run.create(folder, {**config.to_dict(), "data_sha256": task.fingerprint}) as run:
        session = _Session(run, config, task)
        parameters = session.trainer.parameter_count
        run.log(f"started: {config.task}, {config.memory}, {parameters:,} parameters")
        for note in task.notes:
            run.log(note)
        session.train(session.init(), quiet=quiet)
    return run


def resume(folder: str | os.PathLike[str], *, quiet: bool = False) -> Run:
    """Resumes a run from its newest undamaged checkpoint.

    The result is the same, to the bit, as without the interruption.

    **Arguments:**

    - `folder`: the folder of the run.
    - `quiet`: show no progress bar.

    **Returns:**

    The run, as `train` returns it.
    """
    enable_compilation_cache()
    with Run.open(folder, write=True) as run:
        config = load_config(run)
        task = load(config)
        if task.fingerprint != run.config.get("data_sha256"):
            raise ValueError(
                f"data={config.data!r} is not what {folder} was started with: the examples differ"
            )
        session = _Session(run, config, task)
        start = session.restore()
        if not already_finished(run, config, start[0].update):
            session.train(start, quiet=quiet)
    return run


def load_config(run: Run) -> LRAConfig:
    """The configuration of a run."""
    return LRAConfig.from_dict({k: v for k, v in run.settings.items() if k != "data_sha256"})


class _Session:
    """One process's part of a run, for all seeds."""

    def __init__(self, run: Run, config: LRAConfig, task: Task) -> None:
        self.run, self.config, self.task = run, config, task
        self.trainer = Trainer(config, task.vocabulary, task.classes)
        self.seeds = Seeds(config.seeds)
        self.checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
        # Batches of training, validation and test have one shape, for one compiled program.
        parts = (task.train, task.validation, task.test)
        self.packing = Packing.fit(config.rows, config.row_length, *parts)
        self._update = self.seeds.compile(self.trainer.update, donate=True)
        self._score = self.seeds.compile(self.trainer.score, shared=1)
        self._keep_best = self.seeds.compile(self.trainer.keep_best)
        self._clear_sums = self.seeds.compile(self.trainer.clear_sums)

    def init(self) -> tuple[TrainState, Cursor]:
        """The state and the position in the data before the first update."""
        state = self.seeds.init(self.trainer.init, self.config.seed_numbers)
        return state, Cursor.start(self.config.seeds)

    def restore(self) -> tuple[TrainState, Cursor]:
        """The state and the position of the newest checkpoint, or of the start without any."""
        shapes = self.seeds.shapes(self.trainer.init, self.config.seed_numbers)
        like = (shapes, Cursor.start(self.config.seeds))
        saved = restore_latest(self.run, self.checkpoints, like)
        if saved is None:
            return self.init()
        state, cursor = saved
        return self.seeds.put(state), cursor

    def train(self, start: tuple[TrainState, Cursor], *, quiet: bool) -> None:
        """Trains from `start` to the end of the run, and evaluates the best weights."""
        state, cursor = start
        c, per_update = self.config, self.config.steps_per_update
        done = first = int(np.asarray(state.update)[0])
        batches = BatchStream(self.task.train, self.packing, c.seed_numbers, cursor)
        log = c.in_updates(c.log_every)
        # Multiples of the log interval: what is saved or evaluated has been checked to be finite.
        evaluate, save = (
            log * max(1, round(c.in_updates(steps) / log))
            for steps in (c.evaluate_every, c.checkpoint_every)
        )
        start_time = last_time = time.perf_counter()
        last_logged = done
        with (
            MetricsWriter(self.run, c.seeds, done * per_update) as metrics,
            ProgressBar(c.updates * per_update, done * per_update, quiet=quiet) as bar,
            stop_signals() as received,
        ):
            while done < c.updates:
                state = self._update(state, self.seeds.put(batches.next()))
                done += 1
                step, ending = done * per_update, done == c.updates
                evaluated = done % evaluate == 0 or ending
                logged = done % log == 0 or ending
                if logged or received:
                    rows = self._rows(state, done)
                    check_losses(self.run, rows, step, self.checkpoints)
                    if logged:
                        tokens = (done - last_logged) * per_update * c.seeds
                        rate = tokens / (time.perf_counter() - last_time)
                        state = self._clear_sums(state)
                        if evaluated:
                            state = self._validate(state, rows)
                        metrics.write(step, [{**row, "charts/SPS": rate} for row in rows])
                        bar.update(step, rate, mean_over_seeds(rows))
                        last_logged, last_time = done, time.perf_counter()
                if done % save == 0 or ending or received:
                    best = float(np.asarray(state.best_accuracy).mean())
                    saved = (state, batches.cursor)
                    self.checkpoints.save(step, saved, best if evaluated else None)
                if received and not ending:
                    self._stop(step, received[0])
            seconds = time.perf_counter() - start_time

            def check_signals() -> None:
                if received:
                    self._stop(done * per_update, received[0])

            self._finish(state, batches.cursor, seconds, done - first, check_signals)

    def _validate(self, state: TrainState, rows: list[dict[str, float]]) -> TrainState:
        """Adds the validation accuracy to the rows of metrics, and keeps the best weights."""
        _, accuracy = self._evaluate(state.weights, self.task.validation)
        for row, value in zip(rows, accuracy, strict=True):
            row[VALIDATION] = float(value)
        return self._keep_best(state, self.seeds.put(np.asarray(accuracy, np.float32)))

    def _evaluate(
        self, weights: Any, examples: Examples, before_batch: Callable[[], None] = lambda: None
    ) -> tuple[Float[np.ndarray, " seeds"], Float[np.ndarray, " seeds"]]:
        """The mean loss and the accuracy of each seed."""
        loss, correct = np.zeros((2, self.config.seeds))
        for batch in self.packing.in_order(examples):
            before_batch()
            values = self._score(weights, batch)
            loss += np.asarray(values[0], np.float64)
            correct += np.asarray(values[1], np.float64)
        return loss / len(examples), correct / len(examples)

    def _rows(self, state: TrainState, done: int) -> list[dict[str, float]]:
        """A row of metrics for each seed."""
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), state.sums)
        rate = float(np.asarray(self.trainer.learning_rate(done)))
        return [
            {
                "losses/loss": float(sums.loss[i] / sums.examples[i]),
                ACCURACY: float(sums.correct[i] / sums.examples[i]),
                VALIDATION: math.nan,  # unless it is evaluated
                "charts/gradient_norm": float(sums.gradient_norm[i] / sums.updates[i]),
                "charts/learning_rate": rate,
            }
            for i in range(self.config.seeds)
        ]

    def _stop(self, step: int, number: int) -> None:
        """Ends the session after a checkpoint was saved."""
        self.run.log(f"stopped at step {step} by {signal.Signals(number).name}; all is saved")
        raise Stopped(number, self.run.folder)

    def _finish(
        self,
        state: TrainState,
        cursor: Cursor,
        seconds: float,
        updates: int,
        check_signals: Callable[[], None],
    ) -> None:
        """Evaluates the best weights on the test examples, and writes the summary and the curve.

        `seconds` and `updates` are those of this session.
        """
        c = self.config
        loss, accuracy = self._evaluate(state.best, self.task.test, check_signals)
        low, high = bootstrap_interval(accuracy)
        batches = len(self.packing.shuffled(self.task.train, c.seed, 0))
        rate = updates * c.steps_per_update * c.seeds / max(seconds, 1e-9)
        self.run.write_summary(
            {
                "task": c.task,
                "data": self.task.notes,
                "memory": c.memory,
                "parameters": self.trainer.parameter_count,
                "steps": c.updates * c.steps_per_update,
                "seeds": c.seeds,
                "epochs": cursor.epoch + cursor.batch / batches,
                "share_of_rows_filled": len(self.task.train.tokens)
                / (batches * c.steps_per_update),
                "validation_accuracy": np.asarray(state.best_accuracy),
                "test_examples": len(self.task.test),
                "test_accuracy": accuracy,
                "test_accuracy_mean": accuracy.mean(),
                "test_accuracy_interval_over_seeds": [low, high] if c.seeds > 1 else None,
                "test_loss": loss,
                "seconds_of_this_session": round(seconds, 1),
                "steps_per_second_of_this_session": round(rate, 1),
            }
        )
        shown = [VALIDATION, ACCURACY]
        plots.curve([self.run.folder], self.run.curve_path, metric=shown, steps="tokens")
        self.run.log(f"ended: test accuracy {accuracy.tolist()}")
