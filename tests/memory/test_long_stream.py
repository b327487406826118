"""Ten million steps of one stream: nothing overflows, drifts or is lost (about 5 s a model)."""

import jax
import jax.numpy as jnp
import pytest

from agalite.memory import make_memory

INPUT, CHUNK, STEPS = 2, 100_000 - 100_000 % 12, 10_000_000
TINY = {"d_model": 4, "layers": 1, "heads": 1, "head_size": 2, "ffn_size": 4}
# CHUNK is a multiple of every period here, so that each chunk finds the same phase.
MODELS = {
    "agalite": ("agalite", TINY | {"eta": 2, "r": 3}),
    "agalite published": ("agalite", TINY | {"eta": 2, "basis": "published"}),
    "galite": ("galite", TINY | {"eta": 1}),
    "linear": ("linear", TINY),
    "gru": ("gru", {"d_model": 4, "hidden_size": 4}),
    "lstm": ("lstm", {"d_model": 4, "hidden_size": 4}),
}
# A matrix that forgets nothing grows with every step, until float32 cannot tell one step more.
FORGETS = set(MODELS) - {"linear"}


def floats(state):
    return [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]


def largest(state):
    return max(float(jnp.abs(x).max()) for x in floats(state))


def equal(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bool((x == y).all()) for x, y in leaves)


@pytest.mark.parametrize("row", MODELS)
def test_ten_million_steps(row):
    name, options = MODELS[row]
    memory = make_memory(name, INPUT, key=jax.random.key(1), **options)
    xs = jax.random.normal(jax.random.key(0), (CHUNK, INPUT))

    @jax.jit
    def chunk(memory, state, xs, resets):
        state, ys = memory.scan(state, xs, resets)
        return state, jnp.isfinite(ys).all(), jnp.abs(ys).max()

    never = jnp.zeros(CHUNK, bool)
    state, finite, most = chunk(memory, memory.initial_state(), xs, never)
    first, done = (state, float(most)), CHUNK
    assert bool(finite)
    while done < STEPS:
        state, finite, most = chunk(memory, state, xs, never)
        done += CHUNK
        assert bool(finite), f"an output is not finite before step {done}"
    assert all(bool(jnp.isfinite(x).all()) for x in floats(state))
    if row in FORGETS:
        # The same inputs leave the same state, whether they are the first or the hundredth time.
        assert largest(state) == pytest.approx(largest(first[0]), rel=1e-5)
        assert float(most) == pytest.approx(first[1], rel=1e-5)
        for now, then in zip(floats(state), floats(first[0]), strict=True):
            assert float(jnp.abs(now - then).max()) <= 1e-5 * largest(first[0])
    else:
        assert largest(state) <= STEPS * float(jnp.abs(xs).max()) * 100

    # A reset leaves nothing of it, the phase included.
    few = xs[:50]
    begins = jnp.zeros(50, bool).at[0].set(True)
    run = jax.jit(lambda memory, state, resets: memory.scan(state, few, resets))
    after = run(memory, state, begins)
    assert equal(after, run(memory, memory.initial_state(), begins))
    assert equal(after, run(memory, memory.initial_state(), begins & False))
    assert not equal(run(memory, state, begins & False)[1], after[1])
    step = jax.jit(lambda memory, state, reset: memory.step(state, few[0], reset))
    fresh = step(memory, memory.initial_state(), jnp.array(False))
    assert equal(step(memory, state, jnp.array(True)), fresh)


def test_a_million_single_steps_of_agalite():
    """The same by `step`, as a stream is really run."""
    memory = make_memory("agalite", INPUT, key=jax.random.key(1), **MODELS["agalite"][1])
    xs = jax.random.normal(jax.random.key(0), (CHUNK, INPUT))

    @jax.jit
    def chunk(memory, state, xs):
        def step(state, x):
            state, y = memory.step(state, x, jnp.array(False))
            return state, jnp.abs(y).max()

        state, most = jax.lax.scan(step, state, xs)
        return state, most.max()

    state, most = chunk(memory, memory.initial_state(), xs)
    first = state
    for _ in range(9):
        state, most = chunk(memory, state, xs)
        assert bool(jnp.isfinite(most))
    assert int(state.phase) == int(first.phase)
    for now, then in zip(floats(state), floats(first), strict=True):
        assert float(jnp.abs(now - then).max()) <= 1e-5 * largest(first)


def test_the_size_of_the_paper_streams_too():
    """T-Maze's AGaLiTe, 8,000 steps in chunks: finite, bounded by its inputs, reset exactly."""
    memory = make_memory("agalite", 16, r=3)
    xs = jax.random.normal(jax.random.key(0), (1000, 16))
    scan = jax.jit(lambda memory, state, xs, resets: memory.scan(state, xs, resets))
    never = jnp.zeros(1000, bool)
    state, ys = scan(memory, memory.initial_state(), xs, never)
    once = largest(state)
    for _ in range(7):
        state, ys = scan(memory, state, xs, never)
        assert bool(jnp.isfinite(ys).all())
        assert largest(state) <= 1.5 * once
    begins = never.at[0].set(True)
    assert equal(scan(memory, state, xs, begins), scan(memory, memory.initial_state(), xs, begins))
