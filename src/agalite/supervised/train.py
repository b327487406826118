"""Training a run of a Long Range Arena task, or going on with one, to its final score."""

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

from agalite.supervised.batches import Batch, Feed, Packing, RunnerState
from agalite.supervised.classifier import Classifier
from agalite.supervised.config import LRAConfig
from agalite.supervised.data import Task, load
from agalite.supervised.examples import Examples
from agalite.system import Stopped
from agalite.training import plots
from agalite.training.checkpoint import Checkpoints
from agalite.training.logging import Bar, MetricsWriter
from agalite.training.plots import bootstrap_interval
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.session import (
    asked_to_stop,
    ended,
    mean,
    refuse_divergence,
    remember_programs,
    restored,
)
from agalite.training.skeleton import Skeleton

# --- The programs of a run: begin with a seed, learn from a batch, score a batch ------------------


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
            optax.clip_by_global_norm(config.max_grad_norm),
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
            self._vocabulary,
            self._classes,
            memory=c.memory,
            memory_options=c.memory_options,
            embedding=c.embedding,
            hidden_size=c.hidden_size,
            pooling=c.pooling,
            key=key,
        )

    def begin(self, seed: Int[Array, ""]) -> State:
        weights = eqx.filter(self._make(jax.random.key(seed)), eqx.is_array)
        optimiser = self._optimiser.init(weights)
        zero = jnp.zeros(())
        sums = Sums(*[zero] * len(Sums._fields))
        best = jax.tree.map(jnp.zeros_like, weights)
        state = State(
            weights,
            optimiser,
            best,
            jnp.full((), -1.0, jnp.float32),
            sums,
            jnp.zeros((), jnp.int32),
        )
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


ACCURACY, VALIDATION = "charts/accuracy", "charts/validation_accuracy"


def train(config: LRAConfig, folder: str | os.PathLike[str], *, quiet: bool = False) -> Run:
    """Trains into a new folder. On Ctrl-C it saves and raises `Stopped`."""
    remember_programs()
    task = load(config)
    with Run.create(folder, {**config.to_dict(), "data_sha256": task.fingerprint}) as run:
        session = _Session(run, config, task)
        run.log(
            f"begun: {config.task}, {config.memory}, {session.trainer.parameter_count:,} parameters"
        )
        for note in task.notes:
            run.log(note)
        session.go_on(session.beginning(), quiet=quiet)
    return run


def resume(folder: str | os.PathLike[str], *, quiet: bool = False) -> Run:
    """Goes on from the newest whole checkpoint, to the same end as if it had never stopped."""
    remember_programs()
    with Run.open(folder, write=True) as run:
        config = config_of(run)
        task = load(config)
        if task.fingerprint != run.config.get("data_sha256"):
            raise ValueError(
                f"data={config.data!r} is not what {folder} began with: the examples differ"
            )
        session = _Session(run, config, task)
        start = session.restored()
        if not ended(run, config, start[0].update):
            session.go_on(start, quiet=quiet)
    return run


def config_of(run: Run) -> LRAConfig:
    return LRAConfig.from_dict({k: v for k, v in run.asked.items() if k != "data_sha256"})


class _Session:
    """One process's part of a run."""

    def __init__(self, run: Run, config: LRAConfig, task: Task) -> None:
        self.run, self.config, self.task = run, config, task
        self.trainer = Trainer(config, task.vocabulary, task.classes)
        self.seeds = Seeds(config.seeds)
        self.checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
        # One shape for all three parts.
        parts = (task.train, task.validation, task.test)
        self.packing = Packing.fit(config.rows, config.row_length, *parts)
        self._learn = self.seeds.compile(self.trainer.learn, donate=True)
        self._score = self.seeds.compile(self.trainer.score, shared=1)
        self._choose = self.seeds.compile(self.trainer.choose)
        self._clear = self.seeds.compile(self.trainer.clear)

    def beginning(self) -> tuple[State, RunnerState]:
        state = self.seeds.begin(self.trainer.begin, self.config.seed_numbers)
        return state, RunnerState.beginning(self.config.seeds)

    def restored(self) -> tuple[State, RunnerState]:
        shapes = self.seeds.shapes(self.trainer.begin, self.config.seed_numbers)
        like = (shapes, RunnerState.beginning(self.config.seeds))
        saved = restored(self.run, self.checkpoints, like)
        if saved is None:
            return self.beginning()
        state, place = saved
        return self.seeds.put(state), place

    def go_on(self, start: tuple[State, RunnerState], *, quiet: bool) -> None:
        state, place = start
        c, per_update = self.config, self.config.steps_per_update
        done = first = int(np.asarray(state.update)[0])
        feed = Feed(self.task.train, self.packing, c.seed_numbers, place)
        log = c.in_updates(c.log_every)
        # Whole intervals of metrics: nothing is saved or scored that was not seen to be finite.
        evaluate, save = (
            log * max(1, round(c.in_updates(steps) / log))
            for steps in (c.evaluate_every, c.checkpoint_every)
        )
        began = last = time.perf_counter()
        since = done
        with (
            MetricsWriter(self.run, c.seeds, done * per_update) as metrics,
            Bar(c.updates * per_update, done * per_update, quiet=quiet) as bar,
            asked_to_stop() as asked,
        ):
            while done < c.updates:
                state = self._learn(state, self.seeds.put(feed.next()))
                done += 1
                step, ending = done * per_update, done == c.updates
                scored = done % evaluate == 0 or ending
                logged = done % log == 0 or ending
                if logged or asked:
                    rows = self._rows(state, done)
                    refuse_divergence(self.run, rows, step, self.checkpoints)
                    if logged:
                        rate = (done - since) * per_update * c.seeds / (time.perf_counter() - last)
                        state = self._clear(state)
                        if scored:
                            state = self._validate(state, rows)
                        metrics.write(step, [{**row, "charts/SPS": rate} for row in rows])
                        bar.update(step, rate, mean(rows))
                        since, last = done, time.perf_counter()
                if done % save == 0 or ending or asked:
                    value = float(np.asarray(state.best_accuracy).mean())
                    self.checkpoints.save(step, (state, feed.place), value if scored else None)
                if asked and not ending:
                    self._stop(step, asked[0])
            seconds = time.perf_counter() - began
            self._finish(
                state,
                feed.place,
                seconds,
                done - first,
                stop=lambda: self._stop(done * per_update, asked[0]) if asked else None,
            )

    def _validate(self, state: State, rows: list[dict[str, float]]) -> State:
        """Puts the scores into the rows of metrics, and remembers the weights that are best."""
        _, accuracy = self.evaluate(state.weights, self.task.validation)
        for row, value in zip(rows, accuracy, strict=True):
            row[VALIDATION] = float(value)
        return self._choose(state, self.seeds.put(np.asarray(accuracy, np.float32)))

    def evaluate(
        self, weights: Any, examples: Examples, stop: Callable[[], None] = lambda: None
    ) -> tuple[Float[np.ndarray, " seeds"], Float[np.ndarray, " seeds"]]:
        """Mean loss and accuracy of each seed."""
        loss, correct = np.zeros((2, self.config.seeds))
        for batch in self.packing.in_order(examples):
            stop()
            values = self._score(weights, batch)
            loss += np.asarray(values[0], np.float64)
            correct += np.asarray(values[1], np.float64)
        return loss / len(examples), correct / len(examples)

    def _rows(self, state: State, done: int) -> list[dict[str, float]]:
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), state.sums)
        rate = float(np.asarray(self.trainer.learning_rate(done)))
        return [
            {
                "losses/loss": float(sums.loss[i] / sums.examples[i]),
                ACCURACY: float(sums.correct[i] / sums.examples[i]),
                VALIDATION: math.nan,  # until it is scored
                "charts/gradient_norm": float(sums.gradient_norm[i] / sums.updates[i]),
                "charts/learning_rate": rate,
            }
            for i in range(self.config.seeds)
        ]

    def _stop(self, step: int, number: int) -> None:
        self.run.log(f"stopped at step {step} by {signal.Signals(number).name}; all is saved")
        raise Stopped(number, self.run.folder)

    def _finish(
        self,
        state: State,
        place: RunnerState,
        seconds: float,
        updates: int,
        stop: Callable[[], None],
    ) -> None:
        c = self.config
        loss, accuracy = self.evaluate(state.best, self.task.test, stop)
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
                "epochs": place.epoch + place.batch / batches,
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
