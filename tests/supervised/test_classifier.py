"""The classifier, and its transformer without state."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.memory import MODELS, make_memory
from agalite.memory.registry import DIAGONAL
from agalite.supervised.batches import Packing
from agalite.supervised.classifier import Classifier, without_state
from supervised.random_examples import random_examples

BLOCK = {"d_model": 8, "layers": 1, "heads": 2, "head_size": 4, "ffn_size": 8}
OPTIONS = {
    "agalite": BLOCK | {"eta": 2, "r": 3},
    "galite": BLOCK | {"eta": 2},
    "linear": BLOCK,
    "transformer": BLOCK | {"context": 50},
    "gtrxl": BLOCK | {"memory": 8},
    "gru": {"d_model": 8, "hidden_size": 8},
    "lstm": {"d_model": 8, "hidden_size": 8},
    **dict.fromkeys(("mlstm", "deltanet", "mamba2", "ffm"), BLOCK),
    **{name: {"d_model": 8, "layers": 1, "ffn_size": 8, "hidden_size": 8} for name in DIAGONAL},
    "memax": {"cell": "GRU", "d_model": 8, "layers": 1},
    "feedforward": {"d_model": 8, "layers": 1, "ffn_size": 8},
}
QUICK = (("agalite", "mean"), ("transformer", "mean"), ("gru", "last"))
OTHERS = (*((name, "mean") for name in MODELS), ("agalite", "last"))


@pytest.mark.parametrize(
    ("name", "pooling"),
    [*QUICK, *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS if x not in QUICK)],
)
def test_a_sequence_is_classified_the_same_alone_and_among_others(name, pooling):
    model = Classifier(
        12,
        4,
        memory=name,
        memory_options=OPTIONS[name],
        embedding=8,
        hidden_size=8,
        pooling=pooling,
        key=jax.random.key(0),
    )
    examples = random_examples([17, 5, 23, 11, 30])
    packing = Packing(rows=2, length=48, slots=3)
    run = eqx.filter_jit(lambda model, b: model(b.tokens, b.resets, b.starts, b.ends))
    rows = [[0, 1, 2], [3, 4]]
    logits = run(model, packing.batch(examples, rows))
    for b, row in enumerate(rows):
        for s, i in enumerate(row):
            alone = packing.batch(examples, [[i]])
            alone.tokens[alone.ends[0, 0] :, 0] = 7  # padding has no influence
            expected = run(model, alone)[0, 0]
            np.testing.assert_allclose(logits[b, s], expected, rtol=1e-4, atol=1e-7)
    assert np.ptp(logits[0], axis=0).max() > 1e-4  # they do differ


def test_pooling_takes_the_mean_or_the_last():
    ys = jnp.arange(12.0).reshape(6, 2)
    starts, ends = jnp.array([0, 2, 0]), jnp.array([2, 6, 0])
    options = {
        "memory": "feedforward",
        "memory_options": OPTIONS["feedforward"],
        "key": jax.random.key(0),
    }
    with pytest.raises(ValueError, match="pooling='max' is unknown"):
        Classifier(3, 2, pooling="max", **options)
    for pooling, expected in (
        ("mean", [[1, 2], [7, 8], [0, 0]]),
        ("last", [[2, 3], [10, 11], [0, 0]]),
    ):
        make = functools.partial(Classifier, 3, 2, pooling=pooling, **options)
        model = eqx.filter_eval_shape(make)  # pooling needs no weights
        np.testing.assert_allclose(model._pool(ys, starts, ends), expected)


@pytest.mark.parametrize("context", [3, 20])
def test_the_transformer_without_state_equals_the_transformer(context):
    memory = make_memory("transformer", 6, context=context, key=jax.random.key(1), **BLOCK)
    xs = jax.random.normal(jax.random.key(2), (20, 6))
    resets = jnp.zeros(20, bool).at[13].set(True)
    stateless = without_state(memory)
    run = eqx.filter_jit(lambda memory: memory.scan(memory.initial_state(), xs, resets)[1])
    np.testing.assert_allclose(run(stateless), run(memory), rtol=1e-4, atol=1e-5)
    assert stateless.parameter_count == memory.parameter_count
    assert stateless.state_size == 0
