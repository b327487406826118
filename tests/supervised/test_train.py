"""Training a classifier: updates, a whole run, resuming it; the configuration; the baselines."""

import dataclasses
import json
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.memory import MODELS, make_memory
from agalite.supervised import data, train
from agalite.supervised.baselines import baselines, features
from agalite.supervised.batches import BatchStream, Packing
from agalite.supervised.config import LRAConfig, preset
from agalite.supervised.data import Task, load
from agalite.supervised.examples import Examples
from agalite.supervised.train import Trainer, _decayed
from agalite.system import Stopped
from agalite.training.checkpoint import Checkpoints
from agalite.training.logging import read_metrics

GRU = {"memory": "gru", "memory_options": {"d_model": 16, "hidden_size": 16}}
AGALITE = {
    "memory": "agalite",
    "memory_options": {
        **preset("tuned", "agalite", 20),
        **{"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "ffn_size": 16},
    },
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    return LRAConfig(
        task="listops",
        min_length=3,
        max_length=20,
        train_examples=400,
        validation_examples=100,
        test_examples=120,
        total_timesteps=40 * 256,
        rows=4,
        row_length=64,
        rows_at_once=2,
        seeds=2,
        log_every=5 * 256,
        evaluate_every=10 * 256,
        checkpoint_every=10 * 256,
        embedding=16,
        hidden_size=16,
        learning_rate=5e-3,
        **GRU,
    )


def test_gradients_do_not_depend_on_how_many_rows_are_done_at_once(config):
    task = load(config)
    packing = Packing.fit(4, 64, task.train)
    batch = packing.batch(task.train, packing.shuffled(task.train, 0, 0)[0])
    trainers = [Trainer(dataclasses.replace(config, rows_at_once=n), 15, 10) for n in (1, 4)]
    # Random weights of the right shapes: initialising them would compile another program.
    shapes = jax.eval_shape(trainers[0].init, jnp.uint32(0))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    rng = np.random.default_rng(0)
    start = start._replace(
        weights=jax.tree.map(
            lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), shapes.weights
        )
    )
    one, four = (jax.jit(trainer.update)(start, batch) for trainer in trainers)
    used = int((batch.ends > batch.starts).sum())
    assert one.sums.examples == used
    np.testing.assert_allclose(one.sums.loss, four.sums.loss, rtol=1e-5)
    np.testing.assert_allclose(one.sums.gradient_norm, four.sums.gradient_norm, rtol=1e-4)
    loss, _ = jax.jit(trainers[0].score)(one.weights, batch)
    assert loss < one.sums.loss  # an update improves the loss on its own batch


def test_biases_do_not_decay_and_the_learning_rate_rises_and_falls(config):
    config = dataclasses.replace(config, total_timesteps=100 * 256, **AGALITE)
    trainer = Trainer(config, 15, 10)
    decayed = _decayed(jax.eval_shape(trainer.init, jnp.uint32(0)).weights)
    assert decayed.embedding
    assert decayed.hidden.weight
    attention = decayed.memory.blocks[0].attention
    assert attention.project.inputs.weight
    assert not attention.project.bias  # the time constants of the gates
    assert not decayed.norm.scale
    rates = [float(trainer.learning_rate(i)) for i in (0, 5, 50, 100)]
    assert rates[0] == 0
    assert rates[1] == pytest.approx(5e-3)
    assert 0 < rates[2] < rates[1]
    assert rates[3] == pytest.approx(0, abs=1e-9)


def _without_speed(table):
    return {name: x for name, x in table.items() if name != "charts/SPS"}


@pytest.mark.parametrize(
    "model",
    [pytest.param(GRU, id="gru"), pytest.param(AGALITE, id="agalite", marks=pytest.mark.slow)],
)
def test_a_run_learns_and_resumes_to_the_same_bits(model, config, tmp_path, monkeypatch):
    config = dataclasses.replace(config, **model)
    whole = train.train(config, tmp_path / "whole", quiet=True)
    table = read_metrics(whole.folder)
    losses = table["losses/loss"]
    assert losses[0] == pytest.approx(np.log(10), rel=0.02)
    assert losses[-2:].mean() < 0.97 * losses[:2].mean()
    summary = whole.read_summary()
    assert summary is not None
    assert len(summary["test_accuracy"]) == 2
    assert summary["test_examples"] == 120
    assert summary["epochs"][0] > 1
    assert 0.5 < summary["share_of_rows_filled"] <= 1
    best = np.nanmax(table["charts/validation_accuracy"][table["seed"] == 0])
    assert summary["validation_accuracy"][0] == pytest.approx(best, abs=1e-6)
    assert whole.curve_path.exists()

    calls = iter(range(1000))
    original = BatchStream.next

    def stop_at_the_thirteenth(stream):
        if next(calls) == 13:  # between two rows of metrics and between two checkpoints
            signal.raise_signal(signal.SIGTERM)
        return original(stream)

    monkeypatch.setattr(BatchStream, "next", stop_at_the_thirteenth)
    with pytest.raises(Stopped):
        train.train(config, tmp_path / "cut", quiet=True)
    assert Checkpoints(tmp_path / "cut" / "checkpoints").latest() == 14 * 256
    resumed = train.resume(tmp_path / "cut", quiet=True)
    again = _without_speed(read_metrics(resumed.folder))
    for name, column in _without_speed(table).items():
        np.testing.assert_array_equal(column, again[name])
    assert (resumed.read_summary() or {})["test_accuracy"] == summary["test_accuracy"]

    # Other data under the same name are refused.
    config_path = tmp_path / "cut" / "config.json"
    changed = json.loads(config_path.read_text()) | {"data_seed": 1}
    config_path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"is not what .* was started with"):
        train.resume(tmp_path / "cut", quiet=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "images"}, "task='images' is unknown; choose one of: listops, text"),
        ({"memory": "rnn"}, "memory='rnn' is unknown"),
        ({"rows_at_once": 3}, "rows_at_once=3 must divide rows=8"),
        ({"row_length": 1000}, "row_length=1000 must be a whole number >= 2000"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be"),
        ({"warmup": 1.5}, "warmup=1.5 must be"),
        ({"min_length": 5000}, "max_length=2000 must be"),
        ({"task": "text", "min_length": 20}, "min_length=20 is only for generated expressions"),
        ({"data": "x", "data_seed": 1}, "data_seed=1 is only for generated expressions"),
        ({"train_examples": 0}, "train_examples=0 must be"),
        ({"seed": 2**32}, "must be a whole number from 0 to 4294967295"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LRAConfig(**{"task": "listops", **options})


def test_baselines_find_what_counts_can_say():
    rng = np.random.default_rng(0)

    def part(count):
        """The class is whether 3 occurs more often than 4; class 1 is the commoner one."""
        shares = np.where(rng.random(count) < 0.7, 0.7, 0.3)
        sequences = [rng.choice([3, 4], 50, p=[p, 1 - p]).astype(np.uint8) for p in shares]
        return Examples.from_sequences(sequences, [int((x == 3).sum() > 25) for x in sequences])

    task = Task("listops", 15, 2, part(300), part(100), part(200), [])
    scores = baselines(task)
    assert scores.majority == pytest.approx(task.test.labels.mean())
    assert scores.counts > 0.97
    two = Examples.from_sequences([np.array([1]), np.array([2])], [0, 1])
    assert features(two, 3).shape == (2, 7)
    np.testing.assert_allclose(features(two, 3)[0, :3], [0, 1, 0])


def test_presets_have_the_papers_sizes():
    for name in MODELS:
        for which in ("paper", "tuned"):
            options = preset(which, name, 50)
            eqx.filter_eval_shape(make_memory, name, 8, key=jax.random.key(0), **options)
    config = LRAConfig(task="text", memory_options=preset("paper", "agalite", 4096))
    assert config.memory_options == {"eta": 8}
    assert Trainer(config, 256, 2).parameter_count == 1_829_506
    assert preset("tuned", "transformer", 4096)["context"] == 4095
