"""The six promises of design.md, for every model: the rows are in models.py."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agalite.memory import MODELS
from agalite.memory.layers import prepare_for_inference
from models import INPUT, ROWS, build, cast, distance, inputs, unrolled

STEPS = 23
TOLERANCE = 1e-5

# By model, all tests of one before the next: its programs are compiled once, and then let go.
every_model = pytest.mark.parametrize("row", list(ROWS), scope="module")


@pytest.fixture(scope="module")
def compiled():
    """scan and repeated step of a model, compiled once for all tests of it."""
    made = {}

    def get(row):
        if row not in made:
            made.clear()
            memory = build(row)
            made[row] = (memory, eqx.filter_jit(memory.scan), repeated(memory.step))
        return made[row]

    return get


def repeated(step):
    """As scan, step by step: one program, whatever the length."""
    compiled = jax.jit(lambda *arguments: step(*arguments))  # a model's method has no hash

    def run(state, xs, resets):
        ys = []
        for x, reset in zip(np.asarray(xs), np.asarray(resets), strict=True):
            state, y = compiled(state, x, reset)
            ys.append(y)
        return state, jnp.stack(ys)

    return run


@every_model
def test_1_scan_equals_repeated_step_for_any_resets(row, compiled):
    memory, scan, steps = compiled(row)
    start = memory.initial_state()

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.lists(st.booleans(), min_size=STEPS, max_size=STEPS), st.integers(0, 10**6))
    def check(pattern, seed):
        xs, _ = inputs(STEPS, seed=seed)
        resets = jnp.asarray(pattern)
        _, ys = scan(start, xs, resets)
        _, stepped = steps(start, xs, resets)
        assert distance(ys, stepped) < TOLERANCE

    check()


@every_model
def test_1_weights_turned_for_acting_compute_the_same(row, compiled):
    memory, _, steps = compiled(row)
    xs, resets = inputs(STEPS, seed=6)
    used, _ = steps(memory.initial_state(), *inputs(STEPS, seed=9))
    acting = repeated(lambda s, x, reset: prepare_for_inference(memory).step(s, x, reset))
    _, ys = acting(used, xs, resets)
    assert distance(ys, steps(used, xs, resets)[1]) < TOLERANCE
    leaves = [x.shape for x in jax.tree.leaves(prepare_for_inference(memory))]
    assert leaves != [x.shape for x in jax.tree.leaves(memory)]  # something was turned


@every_model
@pytest.mark.parametrize("length", [1, 70])
def test_1_at_other_lengths_and_from_a_used_state(row, length, compiled):
    memory, scan, steps = compiled(row)
    used, _ = scan(memory.initial_state(), *inputs(STEPS, seed=9))
    xs, resets = inputs(length, seed=14, often=0.05)  # seed 4 has a test of its own, below
    end, ys = scan(used, xs, resets)
    _, stepped = steps(used, xs, resets)
    assert distance(ys, stepped) < TOLERANCE
    # The states may lie differently in memory (a ring), but they continue alike.
    later = inputs(STEPS, seed=5, often=0.0)
    assert distance(scan(end, *later)[1], scan(steps(used, xs, resets)[0], *later)[1]) < TOLERANCE


def test_1_where_the_attention_divides_by_almost_nothing():
    """With seed 4, GaLiTe's scan and step are 1.4e-5 apart: rounding, in float64 they agree.

    At one step s . q is 1.7e-5, as small as the epsilon added to it, by a query whose ReLU let
    almost nothing through. There a change of the input in its last bit changes the output as much.
    """
    memory = build("galite")
    used, _ = memory.scan(memory.initial_state(), *inputs(STEPS, seed=9))
    xs, resets = inputs(70, seed=4, often=0.05)
    scan = eqx.filter_jit(memory.scan)
    _, ys = scan(used, xs, resets)
    _, stepped = repeated(memory.step)(used, xs, resets)
    apart, sensitivity = distance(ys, stepped), 0.0
    for key in jax.random.split(jax.random.key(0), 8):
        up = jax.random.bernoulli(key, shape=xs.shape)
        nudged = jnp.nextafter(xs, jnp.where(up, jnp.inf, -jnp.inf))
        sensitivity = max(sensitivity, distance(scan(used, nudged, resets)[1], ys))
    assert sensitivity > TOLERANCE
    assert apart < 2 * sensitivity
    precise = jax.tree.map(lambda x: np.asarray(x, np.float64), (memory, used, xs))
    with jax.enable_x64(True):
        memory, used, xs = jax.tree.map(jnp.asarray, precise)
        _, ys = memory.scan(used, xs, resets)
        _, stepped = repeated(memory.step)(used, xs, resets)
        assert distance(ys, stepped) < 1e-12


@every_model
def test_2_any_chunking_gives_the_same(row, compiled):
    memory, scan, _ = compiled(row)
    start = memory.initial_state()

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(
        st.permutations([1, 11, 11]), st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.5])
    )  # lengths, of which the second is the only one that nothing else here compiles
    def check(lengths, seed, often):
        xs, resets = (np.asarray(a) for a in inputs(STEPS, seed=seed, often=often))
        _, whole = scan(start, xs, resets)
        state, parts, cut = start, [], 0
        for length in lengths:
            part = slice(cut, cut + length)
            state, ys = scan(state, xs[part], resets[part])
            parts.append(ys)
            cut += length
        assert distance(jnp.concatenate(parts), whole) < TOLERANCE

    check()


@every_model
def test_3_after_a_reset_nothing_of_the_past_remains(row, compiled):
    """Exactly, whatever the state held: huge numbers, counters at the end of their range."""
    memory, scan, steps = compiled(row)

    def spoil(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full_like(x, 1e30)
        return x if x.dtype == jnp.uint32 else jnp.full_like(x, 2**31 - 2)

    spoiled = jax.tree.map(spoil, memory.initial_state())
    xs, _ = inputs(STEPS, seed=2)
    resets = jnp.zeros(STEPS, bool).at[0].set(True)
    for run in (scan, steps):
        np.testing.assert_array_equal(
            run(spoiled, xs, resets)[1], run(memory.initial_state(), xs, resets)[1]
        )
        fresh = run(memory.initial_state(), xs, jnp.zeros(STEPS, bool))[1]
        np.testing.assert_array_equal(run(spoiled, xs, resets)[1], fresh)


@every_model
def test_3_outputs_do_not_depend_on_what_came_before_a_reset(row, compiled):
    memory, scan, _ = compiled(row)
    xs, _ = inputs(STEPS, seed=2)
    resets = jnp.zeros(STEPS, bool).at[9].set(True)
    other = xs.at[:9].add(1.0)
    a, b = (scan(memory.initial_state(), x, resets)[1] for x in (xs, other))
    assert distance(a[9:], b[9:]) == 0
    assert distance(a[:9], b[:9]) > 1e-3


@every_model
def test_memory_remembers_and_the_control_does_not(row, compiled):
    memory, scan, _ = compiled(row)
    xs, _ = inputs(STEPS, seed=2)
    none = jnp.zeros(STEPS, bool)
    changed = xs.at[STEPS - 3].add(1.0)
    a, b = (scan(memory.initial_state(), x, none)[1][-1] for x in (xs, changed))
    assert (distance(a, b) > 1e-4) == (row != "feedforward")


@every_model
def test_4_the_state_has_one_size(row, compiled):
    memory, scan, steps = compiled(row)

    def shapes(state):
        return [(x.shape, x.dtype) for x in jax.tree.leaves(state)]

    start = memory.initial_state()
    for run in (scan, steps):
        state, _ = run(start, *inputs(STEPS))
        assert jax.tree.structure(state) == jax.tree.structure(start)
        assert shapes(state) == shapes(start)
    floats = [x for x in jax.tree.leaves(start) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert memory.state_size == sum(x.size for x in floats)


@every_model
def test_5_gradients_equal_those_of_unrolled_steps(row):
    with jax.enable_x64(True):
        memory = build(row, dtype=jnp.float64)
        weights, rest = eqx.partition(memory, eqx.is_inexact_array)
        xs, resets = inputs(7, seed=6)
        target = jax.random.normal(jax.random.key(1), (7, memory.output_size), jnp.float64)

        def loss(run):
            def value(weights, xs):
                memory = eqx.combine(weights, rest)
                _, ys = run(memory, memory.initial_state(), xs, resets)
                return jnp.sum(ys * target)

            return jax.jit(jax.grad(value, argnums=(0, 1)))

        xs = xs.astype(jnp.float64)
        scanned = loss(lambda m, *a: m.scan(*a))(weights, xs)
        stepped = loss(unrolled)(weights, xs)
        largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(stepped))
        for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(stepped), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9 * largest)


@every_model
def test_5_the_gradient_stops_at_the_incoming_state_unless_asked(row, compiled):
    memory, scan, _ = compiled(row)
    state, _ = scan(memory.initial_state(), *inputs(STEPS, seed=1, often=0.0))
    floats, rest = eqx.partition(state, eqx.is_inexact_array)
    xs, resets = inputs(3, seed=7, often=0.0)

    def gradient(**options):
        def value(floats):
            _, ys = memory.scan(eqx.combine(floats, rest), xs, resets, **options)
            return jnp.sum(jnp.square(ys))

        leaves = jax.tree.leaves(jax.jit(jax.grad(value))(floats))
        return sum(float(jnp.abs(x).sum()) for x in leaves)

    assert gradient() == 0
    assert (gradient(through_state=True) > 0) == (row != "feedforward")


def finite(memory, steps, dtype=jnp.float32):
    """(factors of the weights and of the inputs) -> are all outputs and gradients finite?"""
    weights, rest = eqx.partition(memory, eqx.is_inexact_array)
    xs = jax.random.normal(jax.random.key(0), (steps, INPUT))

    def loss(weights, xs):
        memory = eqx.combine(weights, rest)
        _, ys = memory.scan(memory.initial_state(), xs.astype(dtype), jnp.zeros(steps, bool))
        return jnp.mean(jnp.square(ys)), ys

    @jax.jit
    def everywhere(of_weights, of_inputs):
        scaled = jax.tree.map(lambda x: of_weights * x, weights)
        found = jax.value_and_grad(loss, has_aux=True)(scaled, of_inputs * xs)
        return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(found)]).all()

    return everywhere


@every_model
def test_6_finite_for_zero_inputs_and_saturated_gates(row):
    everywhere = finite(build(row), 9)
    assert everywhere(1.0, 0.0)
    # Weights a hundred times as large drive every sigmoid to exactly 0 or 1.
    assert everywhere(100.0, 1.0)


@every_model
def test_6_finite_for_bfloat16_inputs(row):
    assert finite(build(row), 9, dtype=jnp.bfloat16)(1.0, 1.0)


@pytest.mark.parametrize("row", [*MODELS, "agalite slots"])
@pytest.mark.parametrize("steps", [1, 4096])
def test_6_finite_for_one_step_and_for_many(row, steps):
    everywhere = finite(build(row), steps)
    assert everywhere(1.0, 1.0)
    assert everywhere(1.0, 0.0)


@every_model
def test_a_batch_is_a_vmap(row, compiled):
    """Whichever axis the batch is on, and for several models at once."""
    memory, scan, _ = compiled(row)
    start = memory.initial_state()
    each = [inputs(STEPS, seed=s) for s in (0, 10, 20)]
    xs, resets = (jnp.stack(x, axis=1) for x in zip(*each, strict=True))

    @jax.jit
    def batch(start, xs, resets):
        return jax.vmap(memory.scan, in_axes=(None, 1, 1), out_axes=(0, 1))(start, xs, resets)

    _, ys = batch(start, xs, resets)
    for i, (x, r) in enumerate(each):
        assert distance(ys[:, i], scan(start, x, r)[1]) < TOLERANCE

    @jax.jit
    def step(start, x, reset):
        return jax.vmap(memory.step, in_axes=(None, 0, 0))(start, x, reset)

    _, y = step(start, xs[0], resets[0])
    assert distance(y, ys[0]) < TOLERANCE


def test_two_models_side_by_side_equal_each_alone():
    """Weights can be batched too: seeds trained in one program."""
    models = [build("agalite"), jax.tree.map(lambda x: 0.5 * x, build("agalite"))]
    both = jax.tree.map(lambda *x: jnp.stack(x), *models)
    xs, resets = inputs(STEPS)

    def run(memory):
        return memory.scan(memory.initial_state(), xs, resets)[1]

    def step(memory):
        return memory.step(memory.initial_state(), xs[0])[1]

    for f in (run, step):
        together, alone = jax.jit(jax.vmap(f))(both), jax.jit(f)
        for i, memory in enumerate(models):
            assert distance(together[i], alone(memory)) < TOLERANCE


def test_weights_in_float64_compute_in_float64():
    with jax.enable_x64(True):
        memory = cast(build("agalite"), jnp.float64)
        _, ys = jax.eval_shape(memory.scan, memory.initial_state(), inputs(4)[0])
        assert ys.dtype == jnp.float64


@every_model
def test_refresh_with_the_same_weights_changes_nothing(row, compiled):
    memory, scan, steps = compiled(row)
    xs, resets = inputs(STEPS, seed=11)
    used, _ = scan(memory.initial_state(), xs, resets)
    fresh = memory.refresh(used)
    assert jax.tree.structure(fresh) == jax.tree.structure(used)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, used)
    _, before = steps(used, xs, resets)
    _, after = steps(fresh, xs, resets)
    assert distance(after, before) < TOLERANCE
