"""The paper's attentions: every operator and method against the loops of numpy_attention.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.ops.delta import make_basis
from attention_cases import (
    KEY,
    METHODS,
    OPS,
    X,
    ask_oracle,
    assert_close,
    assert_state,
    assert_trees,
    cast,
    dense,
    forward,
    gradient,
    gradient_inputs,
    join,
    loss_and_gradient,
    make,
    make_state,
    split,
)

# --- every operator, every method -----------------------------------------------------------------


# More than one of the chunks of either operator. The associative scan has no chunks, and its
# program grows with the length.
STEPS = {"sequential": 150, "chunked": 150, "associative": 12, "auto": 40}
DIFFERENT = [name for name in OPS if name != "galite ungated"]  # which is "linear" by definition


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DIFFERENT)
def test_float64_equals_the_oracle(name, method):
    """From the middle of a stream, with relu's zeros, resets, and gates at 0 and at 1."""
    op = OPS[name]
    x, *state, resets, weights = gradient_inputs(name, STEPS[method], sparse=True)
    resets[5] = True
    with jax.enable_x64(True):
        if method == "auto":
            last, out = forward(name, method)(x, resets, join(*state))
        else:
            (_, (last, out)), _ = gradient(name, method)(x, *state, resets, weights)
    assert out.dtype == np.float64
    states, want = ask_oracle(op, x, resets, join(*state))
    assert_close(out, want, 1e-9)
    assert_state(op, last, states, 1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPS)
def test_float32_equals_the_oracle_for_arrays_and_for_outer_products(name, method):
    op = OPS[name]
    x, resets = make(op, STEPS["associative"], seed=1)
    x = cast(x, np.float32)
    _, want = ask_oracle(op, x, resets)
    last, out = forward(name, method)(x, resets, None)
    assert out.dtype == np.float32
    assert_close(out, want, 1e-5)
    states, wide = forward(name, method)(dense(x), resets, None)
    assert_close(wide, out, 1e-5)
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(last), strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("name", ["linear", "galite", "paper"])
def test_float32_over_many_chunks(name):
    op = OPS[name]
    x, resets = cast(make(op, 300, seed=2), np.float32)
    _, out = forward(name, "auto")(x, resets, None)
    assert_close(out, ask_oracle(op, x, resets)[1], 1e-5)


@functools.cache
def sequential_gradient(name, steps):
    with jax.enable_x64(True):
        return gradient(name, "sequential")(*gradient_inputs(name, steps))


@pytest.mark.parametrize("method", ["associative", "chunked", "auto"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_gradients_agree_with_the_sequential_ones(name, method):
    with jax.enable_x64(True):
        (loss, _), found = gradient(name, method)(*gradient_inputs(name, STEPS[method]))
    (expected_loss, _), expected = sequential_gradient(name, STEPS[method])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-10)
    found, expected = (dict(jax.tree_util.tree_leaves_with_path(g)) for g in (found, expected))
    assert found.keys() == expected.keys()
    assert len(found) >= 5
    for path, want in expected.items():
        assert np.abs(want).max() > 0, path
        np.testing.assert_allclose(
            found[path], want, rtol=1e-7, atol=1e-9 * np.abs(want).max(), err_msg=str(path)
        )


@pytest.mark.parametrize("name", DIFFERENT)
def test_gradients_are_the_oracles_slope(name):
    """A central difference of the numpy loop in a random direction of all inputs and the state."""
    op = OPS[name]
    steps = STEPS["chunked"]
    x, floats, rest, resets, weights = gradient_inputs(name, steps)
    rng = np.random.default_rng(9)
    direction = jax.tree.map(lambda a: rng.normal(size=a.shape), (x, floats))

    def loss(step):
        moved, state = jax.tree.map(lambda a, d: a + step * d, (x, floats), direction)
        states, out = ask_oracle(op, moved, resets, join(state, rest))
        if op.basis is None:
            last = [np.stack([s[i] for s in states]) for i in (0, 1)]
        else:
            basis = make_basis(op.basis, op.r)
            keys = [s[1][: basis.value_vectors] for s in states]
            if basis.key_vectors > basis.value_vectors:
                keys = [np.concatenate([a, s[2][None]]) for a, s in zip(keys, states, strict=True)]
            last = [np.stack(keys), np.stack([s[0][: basis.value_vectors] for s in states])]
        return np.vdot(out, weights) + sum(np.vdot(a, np.sin(np.arange(a.size))) for a in last)

    step = 1e-6
    slope = (loss(step) - loss(-step)) / (2 * step)
    (value, _), found = sequential_gradient(name, steps)
    np.testing.assert_allclose(value, loss(0), rtol=1e-10)
    products = jax.tree.map(lambda g, d: float(np.vdot(g, d)), found, direction)
    scale = np.abs(jax.tree.leaves(products)).max()
    assert abs(sum(jax.tree.leaves(products)) - slope) < 1e-6 * scale


# --- chunking -------------------------------------------------------------------------------------

# Each length is compiled once; 35 and 75 are more than one of GaLiTe's chunks.
LENGTHS = {"chunked": (1, 6, 35), "sequential": (1, 6), "associative": (1, 6), "auto": (1, 6, 75)}
CHUNKINGS = (
    [(name, "chunked") for name in DIFFERENT if name != "paper ungated"]
    + [(name, "auto") for name in ("galite", "paper", "slots")]
    + [(name, method) for name in ("galite", "paper") for method in ("sequential", "associative")]
)


def fresh_state(op):
    state = jax.tree.map(np.zeros_like, make_state(op))
    return state._replace(signs=KEY) if op.basis == "rank1" else state


@pytest.mark.parametrize(("name", "method"), CHUNKINGS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 10**6), often=st.sampled_from([0.0, 0.05, 0.5]))
def test_state_carries_over_any_chunking(name, method, data, seed, often):
    op = OPS[name]
    lengths = data.draw(st.lists(st.sampled_from(LENGTHS[method]), min_size=1, max_size=7))
    x, resets = make(op, sum(lengths), seed, resets=often)
    states, want = ask_oracle(op, x, resets)
    state, first, outs = fresh_state(op), 0, []
    with jax.enable_x64(True):
        for length in lengths:
            part = slice(first, first + length)
            piece = jax.tree.map(lambda a, part=part: a[part], x)
            state, out = forward(name, method)(piece, resets[part], state)
            outs.append(np.asarray(out))
            first += length
    assert_close(np.concatenate(outs), want, 1e-9)
    assert_state(op, state, states, 1e-9)


@pytest.mark.parametrize(("name", "method"), CHUNKINGS)
def test_reset_is_a_fresh_start(name, method):
    """To the last bit, whatever state came before; the oscillators' phase included."""
    op = OPS[name]
    steps = LENGTHS[method][-1]
    x, resets = make(op, steps, seed=3)
    resets[0] = True
    old = jax.tree.map(lambda a: a * 1e6 if a.dtype == np.float64 else a, make_state(op))
    with jax.enable_x64(True):
        got = forward(name, method)(x, resets, old)
        want = forward(name, method)(x, resets & (np.arange(steps) > 0), fresh_state(op))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


# --- batches --------------------------------------------------------------------------------------

BATCH = 4


@functools.cache
def batch_inputs(name):
    """Four sequences with states and resets of their own, stacked; and their results."""
    each = [gradient_inputs(name, 7, seed, resets=0.2) for seed in range(BATCH)]
    if OPS[name].basis == "rank1":  # and random keys of their own
        keys = [np.asarray(jax.random.key_data(jax.random.key(i))) for i in range(BATCH)]
        each = [
            (x, s, (rest[0], key), *more)
            for (x, s, rest, *more), key in zip(each, keys, strict=True)
        ]
    with jax.enable_x64(True):
        single = [gradient(name, "sequential")(*one) for one in each]
    return stack(each), stack(single)


def stack(trees):
    return jax.tree.map(lambda *a: np.stack(a), *trees)


@pytest.mark.parametrize(
    ("name", "batching"),
    [(name, how) for name in ("galite", "paper") for how in ("axis 0", "axis 1", "nested")]
    + [("linear", "nested"), ("rank1", "axis 0"), ("paper ungated", "axis 1")],
)
def test_vmap_of_the_chunked_gradient(name, batching):
    inputs, want = batch_inputs(name)
    one = loss_and_gradient(name, "chunked")
    if batching == "axis 0":
        run = jax.vmap(one)
    elif batching == "axis 1":
        # Only what has two axes can be batched along the second: the time-major inputs.
        x, floats, rest, resets, weights = inputs
        x, resets, weights = jax.tree.map(lambda a: np.swapaxes(a, 0, 1), (x, resets, weights))
        inputs = x, floats, rest, resets, weights
        run = jax.vmap(one, in_axes=(1, 0, 0, 1, 1))
    else:
        inputs, want = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (inputs, want))
        run = jax.vmap(jax.vmap(one))
    with jax.enable_x64(True):
        got = jax.jit(run)(*inputs)
    assert_trees(got, want)


@pytest.mark.parametrize("method", ["sequential", "associative"])
@pytest.mark.parametrize("name", ["galite", "paper"])
def test_vmap_of_the_other_methods(name, method):
    inputs, want = batch_inputs(name)
    with jax.enable_x64(True):
        got = jax.jit(jax.vmap(loss_and_gradient(name, method)))(*inputs)
    assert_trees(got, want)


@pytest.mark.parametrize("name", ["linear", "galite", "paper"])
def test_gradient_of_a_vmap_that_shares_its_state_and_gates(name):
    """What is not batched is broadcast, and its gradient is the sum over the batch."""
    (x, floats, rest, resets, weights), _ = batch_inputs(name)
    first = jax.tree.map(lambda a: a[0], (x, floats, rest))
    shared = X(x.q, x.k, x.v, first[0].beta, first[0].gamma)
    axes = X(0, 0, 0, None, None)

    def total(method, x, floats):
        def one(x, floats, resets, weights):
            state, out = OPS[name].run(x, resets, join(floats, first[2]), method)
            return jnp.vdot(out, weights) + sum(jnp.sum(a) for a in split(state)[0])

        return jax.vmap(one, in_axes=(axes, None, 0, 0))(x, floats, resets, weights).sum()

    with jax.enable_x64(True):
        got, want = (
            jax.jit(jax.grad(functools.partial(total, m), argnums=(0, 1)))(shared, first[1])
            for m in ("chunked", "sequential")
        )
    assert_trees(got, want)


def test_eager_equals_jit():
    for name in ("linear", "paper"):
        op = OPS[name]
        x, resets = cast(make(op, 12, seed=1), np.float32)
        x = jax.tree.map(jnp.asarray, x)
        for a, b in zip(
            jax.tree.leaves(op.run(x, jnp.asarray(resets), None, "auto")),
            jax.tree.leaves(forward(name, "auto")(x, resets, None)),
            strict=True,
        ):
            assert_close(a, b, 1e-6)
