"""Long streams: nothing overflows, drifts or is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.memory import make_memory
from attention_cases import slow_unless

INPUT = 2
TINY = {"d_model": 4, "layers": 1, "heads": 1, "head_size": 2, "ffn_size": 4}
DIAGONAL = {"d_model": 4, "layers": 1, "ffn_size": 4, "hidden_size": 4}
# Chunks are a multiple of every period here, so that each chunk finds the same phase.
LENGTHS = {"a hundred thousand": (9, 12_000), "ten million": (100, 99_996)}  # chunks, steps of each
MODELS = {
    "agalite": ("agalite", TINY | {"eta": 2, "r": 3}),
    "agalite published": ("agalite", TINY | {"eta": 2, "basis": "published"}),
    "galite": ("galite", TINY | {"eta": 1}),
    "linear": ("linear", TINY),
    "gru": ("gru", {"d_model": 4, "hidden_size": 4}),
    "lstm": ("lstm", {"d_model": 4, "hidden_size": 4}),
    "lru": ("lru", DIAGONAL),
    "s5": ("s5", DIAGONAL | {"blocks": 1}),
    "rtu nonlinear": ("rtu", DIAGONAL | {"variant": "nonlinear"}),
    "mingru": ("mingru", DIAGONAL),
    "mlstm": ("mlstm", TINY),
    "deltanet": ("deltanet", TINY),
    "mamba2": ("mamba2", TINY | {"d_state": 2}),
    "ffm": ("ffm", TINY | {"horizon": (2, 50)}),
}
SLOW = {"agalite published", "s5", "rtu nonlinear", "mingru", "lru"}
# A matrix in which nothing decays grows with every step, until float32 cannot resolve a step.
FORGETS = set(MODELS) - {"linear"}
SLOW = {"agalite published", "mlstm", "deltanet", "mamba2"}  # to compile


def floats(state):
    leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
    return [x for x in leaves if np.issubdtype(x.dtype, np.floating)]


def largest(state):
    return max(np.abs(x).max() for x in floats(state))


def equal(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    ("row", "length"),
    slow_unless(
        lambda row, length: length == "a hundred thousand" and row not in SLOW,
        [(row, length) for row in MODELS for length in LENGTHS],
    ),
)
def test_long_stream(row, length):
    chunks, size = LENGTHS[length]
    name, options = MODELS[row]
    memory = make_memory(name, INPUT, key=jax.random.key(1), **options)
    xs = normal(size, INPUT)

    @jax.jit
    def chunk(memory, state, xs, resets):
        state, ys = memory.scan(state, xs, resets)
        return state, jnp.isfinite(ys).all(), jnp.abs(ys).max()

    never = np.zeros(size, bool)
    state, finite, most = chunk(memory, memory.initial_state(), xs, never)
    first = state, float(most)
    assert bool(finite)
    for i in range(1, chunks):
        state, finite, most = chunk(memory, state, xs, never)
        assert bool(finite), f"an output is not finite in chunk {i} of {size} steps"
    assert all(np.isfinite(x).all() for x in floats(state))
    if row in FORGETS:
        # The same inputs leave the same state, whether they are the first or the hundredth time.
        assert largest(state) == pytest.approx(largest(first[0]), rel=1e-5)
        assert float(most) == pytest.approx(first[1], rel=1e-5)
        for now, then in zip(floats(state), floats(first[0]), strict=True):
            assert np.abs(now - then).max() <= 1e-5 * largest(first[0])
    else:
        assert largest(state) <= chunks * size * np.abs(xs).max() * 100

    # A reset leaves nothing of it, the phase included.
    few = xs[:50]
    begins = np.arange(50) == 0
    run = jax.jit(lambda memory, state, resets: memory.scan(state, few, resets))
    after = run(memory, state, begins)
    assert equal(after, run(memory, memory.initial_state(), begins))
    assert equal(after, run(memory, memory.initial_state(), begins & False))
    assert not equal(run(memory, state, begins & False)[1], after[1])
    step = jax.jit(lambda memory, state, reset: memory.step(state, few[0], reset))
    fresh = step(memory, memory.initial_state(), False)
    assert equal(step(memory, state, True), fresh)


@pytest.mark.parametrize(
    ("chunks", "size"),
    slow_unless(lambda chunks, _: chunks == 9, LENGTHS.values()),
)
def test_single_steps_of_agalite(chunks, size):
    """The same by `step`, as streams run."""
    memory = make_memory("agalite", INPUT, key=jax.random.key(1), **MODELS["agalite"][1])
    xs = normal(size, INPUT)

    @jax.jit
    def chunk(memory, state, xs):
        def step(state, x):
            state, y = memory.step(state, x, False)
            return state, jnp.abs(y).max()

        state, most = jax.lax.scan(step, state, xs)
        return state, most.max()

    state, most = chunk(memory, memory.initial_state(), xs)
    first = state
    for _ in range(1, chunks):
        state, most = chunk(memory, state, xs)
        assert np.isfinite(most)
    assert int(state.phase) == int(first.phase)
    for now, then in zip(floats(state), floats(first), strict=True):
        assert np.abs(now - then).max() <= 1e-5 * largest(first)


@pytest.mark.slow
def test_the_size_of_the_paper_streams_too():
    """T-Maze's AGaLiTe, 8,000 steps in chunks: finite, bounded by its inputs, reset exactly."""
    memory = make_memory("agalite", 16, r=3)
    xs = normal(1000, 16)
    scan = jax.jit(lambda memory, state, xs, resets: memory.scan(state, xs, resets))
    never = np.zeros(1000, bool)
    state, ys = scan(memory, memory.initial_state(), xs, never)
    once = largest(state)
    for _ in range(7):
        state, ys = scan(memory, state, xs, never)
        assert np.isfinite(ys).all()
        assert largest(state) <= 1.5 * once
    begins = np.arange(1000) == 0
    assert equal(scan(memory, state, xs, begins), scan(memory, memory.initial_state(), xs, begins))
