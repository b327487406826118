"""Every attention and method against the numpy loops of numpy_attention.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import (
    KEY,
    MAIN,
    METHODS,
    OPS,
    X,
    assert_close,
    assert_state,
    assert_trees,
    cast,
    dense,
    expected,
    expected_loss,
    forward,
    forward64,
    gradient64,
    gradient_inputs,
    join,
    loss_and_gradient,
    make,
    make_state,
    quick_jit,
    slow_unless,
    split,
)

# More than one chunk of every operator. The associative scan has no chunks, and its program grows
# with the length.
STEPS = {"sequential": 70, "chunked": 70, "auto": 70, "associative": 12}
DIFFERENT = [name for name in OPS if name != "galite ungated"]  # which is "linear" by definition


# --- every operator, every method -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"),
    slow_unless(
        lambda name, method: name in MAIN or method in ("sequential", "chunked"),
        [(name, method) for name in DIFFERENT for method in METHODS],
    ),
)
def test_float64_equals_numpy(name, method):
    """Outputs and last state, with relu's zeros, resets, and gates at 0 and at 1; gradients."""
    op = OPS[name]
    inputs = gradient_inputs(name, STEPS[method], sparse=True)
    x, floats, rest, resets, _ = inputs
    resets[5] = True
    with jax.enable_x64(True):
        (_, (last, out)), _ = gradient64(name, method)(*inputs)
    assert out.dtype == np.float64
    states, want = expected(op, x, resets, join(floats, rest))
    assert_close(out, want, 1e-9)
    assert_state(op, last, states, 1e-9)

    # A central difference in a random direction of all inputs and the state. Features are not
    # sparse here: where s . q is almost zero, a difference is not a gradient.
    inputs = gradient_inputs(name, STEPS[method])
    with jax.enable_x64(True):
        (loss, _), found = gradient64(name, method)(*inputs)
    rng = np.random.default_rng(9)
    direction = jax.tree.map(lambda a: rng.normal(size=a.shape), inputs[:2])

    def moved(step):
        both = jax.tree.map(lambda a, d: a + step * d, inputs[:2], direction)
        return expected_loss(name, *both, *inputs[2:])

    np.testing.assert_allclose(loss, moved(0), rtol=1e-10)
    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    products = jax.tree.leaves(jax.tree.map(np.vdot, found, direction))
    assert abs(sum(products) - slope) < 1e-6 * np.abs(products).max()


@pytest.mark.parametrize(
    ("name", "method"),
    slow_unless(
        lambda name, method: name in MAIN and method != "associative",
        [(name, method) for name in DIFFERENT for method in METHODS[1:]],
    ),
)
def test_gradients_agree_with_the_sequential_ones(name, method):
    inputs = gradient_inputs(name, STEPS[method], sparse=True)
    with jax.enable_x64(True):
        _, found = gradient64(name, method)(*inputs)
        _, want = gradient64(name, "sequential")(*inputs)
    found, want = (dict(jax.tree_util.tree_leaves_with_path(g)) for g in (found, want))
    assert found.keys() == want.keys()
    assert len(found) >= 5
    for path, a in want.items():
        scale = np.abs(a).max()
        assert scale > 0, path
        np.testing.assert_allclose(found[path], a, rtol=1e-7, atol=1e-9 * scale, err_msg=str(path))


@pytest.mark.parametrize(
    ("name", "method"),
    slow_unless(
        lambda name, method: name in MAIN and method in ("chunked", "auto"),
        [(name, method) for name in OPS for method in METHODS],
    ),
)
def test_float32_equals_numpy_for_arrays_and_for_outer_products(name, method):
    op = OPS[name]
    x, resets = make(op, 12, seed=1)
    x = cast(x, np.float32)
    _, want = expected(op, x, resets)
    last, out = forward(name, method)(x, resets, None)
    assert out.dtype == np.float32
    assert_close(out, want, 1e-5)
    states, wide = forward(name, method)(dense(x), resets, None)
    assert_close(wide, out, 1e-5)
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(last), strict=True):
        assert_close(a, b, 1e-5)


# --- chunking -------------------------------------------------------------------------------------

# Each length is compiled once; the last is more than one chunk of every operator.
LENGTHS = {"chunked": (1, 70), "sequential": (1, 6), "associative": (1, 6), "auto": (1, 70)}
CHUNKINGS = slow_unless(
    lambda name, method: (
        (name in MAIN and method == "chunked") or (name, method) == ("slots", "auto")
    ),
    [(name, "chunked") for name in DIFFERENT if name != "paper ungated"]
    + [(name, "auto") for name in ("galite", "paper", "slots")]
    + [(name, method) for name in ("galite", "paper") for method in ("sequential", "associative")],
)


def fresh_state(op):
    state = jax.tree.map(np.zeros_like, make_state(op))
    return state._replace(signs=KEY) if op.basis == "rank1" else state


@pytest.mark.parametrize(("name", "method"), CHUNKINGS)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 10**6), often=st.sampled_from([0.0, 0.05, 0.5]))
def test_state_carries_over_any_chunking(name, method, data, seed, often):
    op = OPS[name]
    lengths = data.draw(st.lists(st.sampled_from(LENGTHS[method]), min_size=1, max_size=5))
    x, resets = make(op, sum(lengths), seed, resets=often)
    states, want = expected(op, x, resets)
    state, first, outs = fresh_state(op), 0, []
    with jax.enable_x64(True):
        for length in lengths:
            part = slice(first, first + length)
            piece = jax.tree.map(lambda a, part=part: a[part], x)
            state, out = forward64(name, method)(piece, resets[part], state)
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
        got = forward64(name, method)(x, resets, old)
        want = forward64(name, method)(x, resets & (np.arange(steps) > 0), fresh_state(op))
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
        single = [gradient64(name, "sequential")(*one) for one in each]
    return stack(each), stack(single)


def stack(trees):
    return jax.tree.map(lambda *a: np.stack(a), *trees)


@pytest.mark.parametrize(
    ("name", "batching"),
    slow_unless(
        lambda name, how: (
            (name, how)
            in [
                ("linear", "nested"),
                ("galite", "axis 1"),
                ("galite published decay", "axis 1"),
                ("paper", "axis 0"),
            ]
        ),
        [(name, how) for name in ("galite", "paper") for how in ("axis 0", "axis 1", "nested")]
        + [("linear", "nested"), ("rank1", "axis 0"), ("paper ungated", "axis 1")]
        + [("galite published decay", "axis 1")],
    ),
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
        got = quick_jit(run)(*inputs)
    assert_trees(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "associative"])
@pytest.mark.parametrize("name", ["galite", "paper"])
def test_vmap_of_the_other_methods(name, method):
    inputs, want = batch_inputs(name)
    with jax.enable_x64(True):
        got = quick_jit(jax.vmap(loss_and_gradient(name, method)))(*inputs)
    assert_trees(got, want)


@pytest.mark.parametrize(
    "name", [pytest.param("linear", marks=pytest.mark.slow), "galite", "paper"]
)
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
            quick_jit(jax.grad(functools.partial(total, m), argnums=(0, 1)))(shared, first[1])
            for m in ("chunked", "sequential")
        )
    assert_trees(got, want)


@pytest.mark.parametrize("name", [pytest.param("linear", marks=pytest.mark.slow), "paper"])
def test_eager_equals_jit(name):
    op = OPS[name]
    x, resets = cast(make(op, 12, seed=1), np.float32)
    x = jax.tree.map(jnp.asarray, x)
    eager = op.run(x, jnp.asarray(resets), None, "auto")
    compiled = forward(name, "auto")(x, resets, None)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        assert_close(a, b, 1e-6)
