import dataclasses
import json
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import cli
from agalite.memory import MODELS, make_memory
from agalite.supervised import data
from agalite.supervised import train as training
from agalite.supervised.baselines import baselines, features
from agalite.supervised.batches import Feed, Packing, RunnerState
from agalite.supervised.classifier import Classifier, from_nothing
from agalite.supervised.config import LRAConfig, preset
from agalite.supervised.data import Task, load
from agalite.supervised.examples import Examples
from agalite.supervised.listops import generate
from agalite.supervised.train import Trainer, _matrices
from agalite.system import Stopped
from agalite.training.checkpoint import Checkpoints
from agalite.training.logging import read_metrics

SMALL = {"d_model": 16, "layers": 2, "heads": 2, "head_size": 8, "ffn_size": 16}
TINY = {
    "agalite": SMALL | {"eta": 2, "r": 3},
    "galite": SMALL | {"eta": 2},
    "linear": SMALL,
    "transformer": SMALL | {"context": 50},
    "gtrxl": SMALL | {"memory": 8},
}


def some_examples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return Examples.of(
        [rng.integers(0, 12, n).astype(np.uint8) for n in lengths], rng.integers(0, 4, len(lengths))
    )


# --- packing --------------------------------------------------------------------------------------


def test_every_example_is_packed_once_and_comes_out_as_it_went_in():
    examples = some_examples(np.random.default_rng(1).integers(1, 60, 500))
    packing = Packing.fit(4, 64, examples)
    assert packing.slots == 32  # sixty-four sequences of one token would be beyond reason
    seen = []
    for rows in packing.shuffled(examples, seed=3, epoch=2):
        batch = packing.batch(examples, rows)
        assert batch.tokens.shape == (64, 4)
        expected_resets = np.zeros((64, 4), bool)
        for b in range(4):
            numbers = rows[b] if b < len(rows) else []
            used = np.flatnonzero(batch.ends[b] > batch.starts[b])
            assert len(used) == len(numbers) <= packing.slots
            for s, i in zip(used, numbers, strict=True):
                tokens = batch.tokens[batch.starts[b, s] : batch.ends[b, s], b]
                np.testing.assert_array_equal(tokens, examples[i])
                assert batch.labels[b, s] == examples.labels[i]
                expected_resets[batch.starts[b, s], b] = True
            seen += numbers
        np.testing.assert_array_equal(batch.resets, expected_resets)
    assert sorted(seen) == list(range(500))


def test_listops_fills_the_rows():
    examples = generate(3000, seed=0)
    packing = Packing.fit(8, 4096, examples)
    rows = packing.epoch(examples, np.arange(3000))
    assert len(examples.tokens) / (len(rows) * 4096) > 0.96


def test_the_order_is_decided_by_seed_and_epoch():
    examples = some_examples([5] * 40 + [9] * 30)
    packing = Packing.fit(2, 20, examples)
    orders = [packing.shuffled(examples, s, e) for s, e in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


def test_a_row_must_hold_the_longest_sequence():
    with pytest.raises(ValueError, match="row_length=8 must be a whole number >= 9"):
        Packing.fit(2, 8, some_examples([9, 3]))


def test_a_feed_goes_on_from_any_place():
    examples = some_examples([7, 9, 11, 13] * 10)
    packing = Packing.fit(2, 32, examples)
    seeds = np.array([4, 5], np.uint32)
    whole = Feed(examples, packing, seeds, RunnerState.beginning(2))
    first = [whole.next() for _ in range(5)]
    cut = Feed(examples, packing, seeds, whole.place)
    rest = [whole.next() for _ in range(12)]  # into the next epoch and beyond
    again = [cut.next() for _ in range(12)]
    assert whole.place.epoch.min() >= 1
    for a, b in zip(rest, again, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    assert first[0].tokens.shape == (2, 32, 2)
    assert any((a.tokens != b.tokens).any() for a, b in zip(first, rest, strict=False))


# --- the classifier -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pooling"), [*((name, "mean") for name in MODELS), ("agalite", "last")]
)
def test_a_sequence_is_classified_the_same_alone_and_among_others(name, pooling):
    options = TINY.get(name, {"hidden_size": 16} if name in ("gru", "lstm") else {})
    model = Classifier(
        12,
        4,
        memory=name,
        memory_options=options,
        embedding=8,
        hidden_size=8,
        pooling=pooling,
        key=jax.random.key(0),
    )
    examples = some_examples([17, 5, 23, 11, 30])
    packing = Packing(rows=2, length=48, slots=3)
    run = eqx.filter_jit(lambda model, b: model(b.tokens, b.resets, b.starts, b.ends))
    together = packing.batch(examples, [[0, 1, 2], [3, 4]])
    logits = run(model, together)
    for b, row in enumerate([[0, 1, 2], [3, 4]]):
        for s, i in enumerate(row):
            alone = packing.batch(examples, [[i]])
            # What stands in the padding is nobody's business.
            alone.tokens[alone.ends[0, 0] :, 0] = 7
            expected = run(model, alone)[0, 0]
            np.testing.assert_allclose(logits[b, s], expected, rtol=1e-4, atol=1e-7)
    assert np.ptp(logits[0], axis=0).max() > 1e-4  # they do differ


def test_pooling_takes_the_mean_or_the_last():
    ys = jnp.arange(12.0).reshape(6, 2)
    starts, ends = jnp.array([0, 2, 0]), jnp.array([2, 6, 0])
    make = {"memory": "feedforward", "memory_options": {}, "key": jax.random.key(0)}
    mean, last = (
        Classifier(3, 2, pooling=p, **make)._pool(ys, starts, ends) for p in ("mean", "last")
    )
    np.testing.assert_allclose(mean, [[1, 2], [7, 8], [0, 0]])
    np.testing.assert_allclose(last, [[2, 3], [10, 11], [0, 0]])
    with pytest.raises(ValueError, match="pooling='max' is unknown"):
        Classifier(3, 2, pooling="max", **make)


@pytest.mark.parametrize("context", [3, 40])
def test_the_transformer_from_nothing_is_the_transformer(context):
    memory = make_memory("transformer", 6, context=context, key=jax.random.key(1), **SMALL)
    xs = jax.random.normal(jax.random.key(2), (40, 6))
    resets = jnp.zeros(40, bool).at[13].set(True)
    fresh = from_nothing(memory)
    run = eqx.filter_jit(lambda memory: memory.scan(memory.initial_state(), xs, resets)[1])
    ys, expected = run(fresh), run(memory)
    np.testing.assert_allclose(ys, expected, rtol=1e-4, atol=1e-5)
    assert fresh.parameter_count == memory.parameter_count
    assert fresh.state_size == 0


# --- learning -------------------------------------------------------------------------------------


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
        memory="agalite",
        memory_options={**preset("tuned", "agalite", 20), **SMALL, "layers": 1},
    )


def test_gradients_do_not_depend_on_how_many_rows_are_done_at_once(config):
    task = load(config)
    packing = Packing.fit(4, 64, task.train)
    batch = packing.batch(task.train, packing.shuffled(task.train, 0, 0)[0])
    states = []
    for rows in (1, 4):
        trainer = Trainer(dataclasses.replace(config, rows_at_once=rows), 15, 10)
        states.append(jax.jit(trainer.learn)(jax.jit(trainer.begin)(jnp.uint32(0)), batch))
    one, all_ = states
    used = int((batch.ends > batch.starts).sum())
    assert one.sums.examples == used
    np.testing.assert_allclose(one.sums.loss, all_.sums.loss, rtol=1e-5)
    np.testing.assert_allclose(one.sums.gradient_norm, all_.sums.gradient_norm, rtol=1e-4)
    np.testing.assert_allclose(one.sums.loss / used, np.log(10), rtol=0.02)
    scored = jax.jit(Trainer(config, 15, 10).score)(one.weights, batch)
    assert scored[0] < one.sums.loss  # an update makes its own batch better


def test_decay_spares_biases_and_the_learning_rate_rises_and_falls(config):
    trainer = Trainer(dataclasses.replace(config, total_timesteps=100 * 256), 15, 10)
    decays = _matrices(jax.eval_shape(trainer.begin, jnp.uint32(0)).weights)
    assert decays.embedding
    assert decays.hidden.weight
    assert decays.memory.blocks[0].attention.project.inputs.weight
    assert not decays.memory.blocks[0].attention.project.bias  # the gates' time constants
    assert not decays.norm.scale
    rates = [float(trainer.learning_rate(i)) for i in (0, 5, 50, 100)]
    assert rates[0] == 0
    assert rates[1] == pytest.approx(5e-3)
    assert 0 < rates[2] < rates[1]
    assert rates[3] == pytest.approx(0, abs=1e-9)


def without_time(table):
    return {name: x for name, x in table.items() if name != "charts/SPS"}


def test_a_run_learns_and_resumes_to_the_same_bits(config, tmp_path, monkeypatch):
    whole = training.train(config, tmp_path / "whole", quiet=True)
    table = read_metrics(whole.folder)
    losses = table["losses/loss"]
    assert losses[-2:].mean() < 0.95 * losses[:2].mean()
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
    following = Feed.next

    def stop_at_the_thirteenth(feed):
        if next(calls) == 13:  # between two rows of metrics and between two checkpoints
            signal.raise_signal(signal.SIGTERM)
        return following(feed)

    monkeypatch.setattr(Feed, "next", stop_at_the_thirteenth)
    with pytest.raises(Stopped):
        training.train(config, tmp_path / "cut", quiet=True)
    assert Checkpoints(tmp_path / "cut" / "checkpoints").latest() == 14 * 256
    cut = training.resume(tmp_path / "cut", quiet=True)
    again = without_time(read_metrics(cut.folder))
    for name, column in without_time(table).items():
        np.testing.assert_array_equal(column, again[name])
    assert cut.read_summary()["test_accuracy"] == summary["test_accuracy"]  # type: ignore[index]

    # Other data under the same name is not what the run began with.
    config_path = tmp_path / "cut" / "config.json"
    changed = json.loads(config_path.read_text()) | {"data_seed": 1}
    config_path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"is not what .* began with"):
        training.resume(tmp_path / "cut", quiet=True)


def test_the_command_line_trains_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    folder = str(tmp_path / "run")
    words = [
        "lra",
        "listops",
        "--memory",
        "linear",
        "--min-length",
        "3",
        "--max-length=20",
        "--train-examples",
        "100",
        "--test-examples",
        "50",
        "--validation-examples",
        "50",
        "--rows",
        "2",
        "--row-length",
        "64",
        "--steps",
        "512",
        "--model.layers",
        "1",
        "--model.d-model",
        "16",
        "--model.heads",
        "1",
        "--model.head-size",
        "8",
        "--out",
        folder,
    ]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "test accuracy" in out
    assert "100 for train, 50 for validation, 50 for test" in out
    assert cli.main(["resume", folder]) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert cli.main(words) == 2
    assert "already holds a run" in capsys.readouterr().err

    assert cli.main(["eval", folder]) == 2
    assert "is a run of `agalite lra listops`: a classifier" in capsys.readouterr().err

    page = tmp_path / "page.md"
    assert cli.main(["lra", "report", folder, "--out", str(page)]) == 0
    written = page.read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"| 1 | 512 | {summary['epochs'][0]:.2f} |" in written
    assert f"| {100 * summary['test_accuracy_mean']:.2f} |" in written
    assert "commonest class" in written
    assert "39.33" in written
    assert page.with_suffix(".png").stat().st_size > 1000
    assert cli.main(["lra", "report", folder, "--out", str(tmp_path / "page.txt")]) == 2
    (tmp_path / "run" / "summary.json").unlink()
    capsys.readouterr()
    assert cli.main(["lra", "report", folder, "--out", str(page)]) == 2
    assert "has not ended" in capsys.readouterr().err


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
        ({"task": "text", "min_length": 20}, "min_length=20 is for generated expressions alone"),
        ({"data": "x", "data_seed": 1}, "data_seed=1 is for generated expressions alone"),
        ({"train_examples": 0}, "train_examples=0 must be"),
        ({"seed": 2**32}, r"must be below 2\*\*32"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LRAConfig(**{"task": "listops", **options})


def test_baselines_find_what_counts_can_say():
    rng = np.random.default_rng(0)

    def part(count):
        """The class is whether 3 is commoner than 4; class 1 is the commoner one."""
        shares = np.where(rng.random(count) < 0.7, 0.7, 0.3)
        sequences = [rng.choice([3, 4], 50, p=[p, 1 - p]).astype(np.uint8) for p in shares]
        return Examples.of(sequences, [int((x == 3).sum() > 25) for x in sequences])

    task = Task("listops", 15, 2, part(300), part(100), part(200), [])
    scores = baselines(task)
    assert scores.majority == pytest.approx(task.test.labels.mean())
    assert scores.counts > 0.97
    silent = Examples.of([np.array([1]), np.array([2])], [0, 1])
    assert features(silent, 3).shape == (2, 7)
    np.testing.assert_allclose(features(silent, 3)[0, :3], [0, 1, 0])


def test_presets_have_the_papers_sizes():
    for name in MODELS:
        for which in ("paper", "tuned"):
            options = preset(which, name, 50)
            eqx.filter_eval_shape(make_memory, name, 8, key=jax.random.key(0), **options)
    config = LRAConfig(task="text", memory_options=preset("paper", "agalite", 4096))
    assert config.memory_options == {"eta": 8}
    assert Trainer(config, 256, 2).parameter_count == 1_829_506
    assert preset("tuned", "transformer", 4096)["context"] == 4095
