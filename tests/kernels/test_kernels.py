"""The custom kernels against the XLA programs that they replace.

The tests of the attentions (`tests/ops/test_attention.py`, method "auto") and of the contract
compare them with the paper's equations at small sizes. Here are sizes that fill vectors, many lanes
and many threads.
"""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.memory.agalite import PackedBlocks, kernel_order
from agalite.memory.layers import prepare_for_inference
from agalite.ops import MatrixState, Outer, galite_attention
from agalite.ops.galite import native
from agalite.ops.matmul import matmul
from attention_cases import quick_jit, slow_unless
from memory_models import random_memory

INPUT = 6
# Sizes that fill vectors exactly, that do not, and that are smaller than one.
SIZES = {
    "whole": {"d_model": 32, "heads": 2, "head_size": 16, "ffn_size": 48, "eta": 4},
    "odd": {"d_model": 21, "heads": 3, "head_size": 19, "ffn_size": 13, "eta": 3},
    "tiny": {"d_model": 1, "heads": 1, "head_size": 1, "ffn_size": 1, "eta": 1},
}
MODELS = {
    "galite": ("galite", {}),
    "agalite": ("agalite", {}),
    "agalite published": ("agalite", {"basis": "published", "horizon": (2, 50)}),
    "agalite slots": ("agalite", {"basis": "slots", "r": 5}),
    "agalite r=7": ("agalite", {"r": 7}),
}


def test_they_are_used_here():
    """Where this fails the others would compare XLA with itself. `make` installs a compiler."""
    assert kernels.why_not() is None


GRADIENTS = slow_unless(
    lambda *case: (
        case
        in [
            ("galite", "whole"),
            ("galite", "odd"),
            ("agalite slots", "whole"),
            ("agalite r=7", "odd"),
            ("agalite", "tiny"),
        ]
    ),
    [(name, "whole") for name in MODELS]
    + [(name, size) for name in ("galite", "agalite r=7") for size in ("odd", "tiny")]
    + [("agalite", "tiny")],
)
STEPS = slow_unless(
    lambda name, *_: name in ("agalite", "agalite slots"),
    [
        ("agalite", "whole", np.float32),
        ("agalite slots", "odd", np.float64),
        ("agalite published", "odd", np.float32),
        ("agalite r=7", "tiny", np.float64),
    ],
)


def model(name, size, dtype=np.float64, **more):
    kind, options = MODELS[name]
    return random_memory(kind, INPUT, dtype, **{"layers": 1} | SIZES[size] | options | more)


def sequences(steps, batch, dtype=np.float64):
    rng = np.random.default_rng(1)
    xs = rng.normal(size=(steps, batch, INPUT)).astype(dtype)
    return xs, rng.random((steps, batch)) < 0.05


def assert_same(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(1e-6, np.abs(y).max()), rtol=0)


def outputs_and_gradients(memory):
    """Outputs, last state, and gradients of weights, state and inputs, through three sequences."""
    weights, rest = eqx.partition(memory, eqx.is_inexact_array)
    start = jax.tree.map(
        lambda x: np.asarray(x) + x.dtype.type(0.1) if eqx.is_inexact_array(x) else x,
        memory.initial_state(),
    )
    floats, whole = eqx.partition(start, eqx.is_inexact_array)
    xs, resets = sequences(150, 3)

    def loss(weights, floats, xs):
        state, scan = eqx.combine(floats, whole), eqx.combine(weights, rest).scan

        def one(xs, resets):
            return scan(state, xs, resets, through_state=True)

        last, ys = jax.vmap(one, in_axes=1, out_axes=(0, 1))(xs, resets)
        ends = [x for x in jax.tree.leaves(last) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.sum(jnp.sin(ys)) + sum(jnp.sum(jnp.cos(x)) for x in ends), (last, ys)

    return quick_jit(jax.grad(loss, (0, 1, 2), has_aux=True))(weights, floats, xs)


@pytest.mark.parametrize(("name", "size"), GRADIENTS)
def test_outputs_state_and_gradients_are_those_of_the_algorithms(name, size):
    """150 steps are more than two of GaLiTe's chunks, and AGaLiTe's last is not whole."""
    with jax.enable_x64(True):
        found, wanted = (
            outputs_and_gradients(model(name, size, method=method))
            for method in ("auto", "sequential")
        )
        assert_same(found, wanted, 1e-9)


@pytest.mark.parametrize("name", ["galite", "agalite r=7"])
def test_the_program_calls_them(name):
    """In every layer, forwards and backwards."""
    memory = model(name, "whole", np.float32, layers=2)
    xs, resets = sequences(40, 2, np.float32)

    def loss(memory, xs):
        start = memory.initial_state()
        return jnp.sum(jax.vmap(lambda x, r: memory.scan(start, x, r)[1], 1)(xs, resets))

    kernel = name.split()[0]
    text = jax.jit(jax.grad(loss)).lower(memory, xs).as_text()
    assert text.count(f"@agalite_{kernel}_forward") == 2
    assert text.count(f"@agalite_{kernel}_backward") == 2
    text = jax.jit(loss).lower(memory, xs).as_text()
    assert text.count(f"@agalite_{kernel}_forward") == 2
    assert "backward" not in text


@pytest.mark.parametrize("name", ["galite", "agalite slots"])
def test_gates_at_zero_and_one(name):
    """Saturated gates, in float32: finite, and XLA's to rounding."""

    def run(method):
        memory = model(name, "whole", np.float32, method=method)
        shape = memory.blocks[0].attention.project.bias.shape
        saturated = np.where(np.arange(shape[1]) % 3 == 0, 200.0, -200.0) * np.ones(shape)
        memory = eqx.tree_at(
            lambda m: m.blocks[0].attention.project.bias, memory, saturated.astype(np.float32)
        )
        weights, rest = eqx.partition(memory, eqx.is_inexact_array)
        xs, resets = sequences(70, 1, np.float32)

        def loss(weights, xs):
            memory = eqx.combine(weights, rest)
            ys = memory.scan(memory.initial_state(), xs, resets[:, 0])[1]
            return jnp.sum(jnp.sin(ys)), ys

        return quick_jit(jax.grad(loss, has_aux=True))(weights, xs[:, 0])

    (gradient, ours), (_, theirs) = run("auto"), run("sequential")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradient, ours)))
    assert_same(ours, theirs, 1e-5)


ANY_NUMBER = [-1e30, -100.0, -87.5, 0.0, 1e-30, 88.5, 100.0, 1e30, np.inf]


def test_activations_of_any_number():
    """Gates far outside of what exp can take too; a head for each value."""
    steps, heads, width, eta = 3, len(ANY_NUMBER), 4, 2
    values = np.array(ANY_NUMBER, np.float32)[:, None]
    columns = np.ones((steps, heads, 5 * width + 3 * eta), np.float32)
    columns[..., 2 * width : 3 * width] = 0.5  # v
    columns[..., 3 * width : 5 * width] = values  # beta and the wide factor of gamma
    wide, narrow = (np.ones((steps, heads, n), np.float32) for n in (width, eta))
    start = MatrixState(
        np.ones((heads, width, eta * width), np.float32), np.ones((heads, eta * width), np.float32)
    )
    inputs = native.Inputs(columns, np.ones((steps, heads), np.float32))
    _, out = jax.jit(lambda *args: native.attend(1e-5, eta, True, *args))(start, inputs)
    gate = np.broadcast_to(jax.nn.sigmoid(values), wide.shape)
    features, gamma = Outer(narrow, wide), Outer(np.asarray(jax.nn.sigmoid(narrow)), gate)
    _, want = galite_attention(
        features, features, 0.5 * wide, gate, gamma, state=start, method="sequential"
    )
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-7)


# --- a step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size", "dtype"), STEPS)
def test_a_packed_model_steps_like_its_blocks(name, size, dtype):
    """One stream, nineteen side by side, and several models side by side."""
    with jax.enable_x64(dtype is np.float64):
        memory = model(name, size, dtype, layers=2)
        packed = prepare_for_inference(memory)
        assert isinstance(packed.blocks, PackedBlocks)
        xs, resets = sequences(4, 19, dtype)

        def compiled(memory):
            """weights -> outputs of nineteen streams; state and output of one after two steps."""
            rest = eqx.partition(memory, eqx.is_array)[1]

            def run(weights):
                memory = eqx.combine(weights, rest)
                start = memory.initial_state()
                _, first = jax.vmap(memory.step, (None, 0, 0))(start, xs[0], resets[0])
                state, _ = memory.step(start, xs[0, 0], resets[0, 0])
                return first, *memory.step(state, xs[1, 0], resets[1, 0])

            return run

        tolerance = 1e-5 if dtype is np.float32 else 1e-12
        arrays, scaled = (
            jax.tree.map(lambda x, f=f: np.asarray(x) * dtype(f), eqx.filter(packed, eqx.is_array))
            for f in (1, 0.9)
        )
        run = compiled(packed)
        assert "agalite_stack" in jax.jit(run).lower(arrays).as_text()
        ours = quick_jit(run)(arrays)
        two = quick_jit(jax.vmap(run))(jax.tree.map(lambda *x: np.stack(x), arrays, scaled))
        arrays = jax.tree.map(np.asarray, eqx.filter(memory, eqx.is_array))
        with kernels.switched_off():
            run = quick_jit(compiled(memory))
            theirs, other = run(arrays), run(jax.tree.map(lambda x: x * dtype(0.9), arrays))
        assert_same(ours, theirs, tolerance)
        assert_same(jax.tree.map(lambda x: np.asarray(x)[0], two), theirs, tolerance)
        assert_same(jax.tree.map(lambda x: np.asarray(x)[1], two), other, tolerance)


def test_packing_keeps_everything():
    memory = model("agalite", "odd", np.float32)
    packed = memory.prepare_for_inference()
    assert packed.parameter_count == memory.parameter_count
    assert packed.state_size == memory.state_size
    for a, b in zip(kernel_order(packed.blocks.blocks), kernel_order(memory.blocks), strict=True):
        np.testing.assert_array_equal(a, b)
    xs, resets = sequences(9, 1, np.float32)
    ours, theirs = (
        eqx.filter_jit(m.scan)(m.initial_state(), xs[:, 0], resets[:, 0]) for m in (packed, memory)
    )
    assert_same(ours, theirs, 1e-6)


def test_gradient_of_a_packed_step_is_that_of_the_blocks():
    with jax.enable_x64(True):
        memory = model("agalite", "odd")
        xs, _ = sequences(1, 1)
        start = jax.tree.map(
            lambda x: np.full(x.shape, 0.1) if eqx.is_inexact_array(x) else x,
            memory.initial_state(),
        )

        def loss(memory, keys):
            state, y = memory.step(start._replace(keys=keys), xs[0, 0], False)
            return jnp.sum(jnp.sin(y)) + jnp.sum(state.keys)

        gradient = quick_jit(jax.grad(loss, (0, 1)))
        (ours, by_keys), (theirs, want) = (
            gradient(m, start.keys) for m in (memory.prepare_for_inference(), memory)
        )
        packed = np.concatenate([np.ravel(x) for x in kernel_order(theirs.blocks)])
        assert_same(ours.blocks.weights, packed, 1e-12)
        assert np.abs(want).max() > 0
        assert_same(by_keys, want, 1e-12)


def test_a_reset_clears_even_an_infinite_state():
    packed = model("agalite", "whole", np.float32).prepare_for_inference()
    broken = jax.tree.map(
        lambda x: np.full_like(x, np.inf) if eqx.is_inexact_array(x) else x, packed.initial_state()
    )
    x = np.ones(INPUT, np.float32)
    step = eqx.filter_jit(packed.step)
    np.testing.assert_array_equal(
        step(broken, x, True)[1], step(packed.initial_state(), x, True)[1]
    )


def test_what_cannot_be_packed_is_left_alone():
    for options in (
        {"gating": False},
        {"feature": "elu1"},
        {"method": "chunked"},
        {"basis": "rank1"},
    ):
        memory = random_memory("agalite", INPUT, layers=1, d_model=4, **options)
        assert not memory.has_step_kernel
        assert memory.prepare_for_inference() is memory
        assert isinstance(prepare_for_inference(memory).blocks, tuple)
    assert not random_memory("gru", INPUT, hidden_size=4).has_step_kernel
    small = model("agalite", "tiny", np.float32)
    assert small.prepare_for_inference().prepare_for_inference().blocks is not small.blocks
    assert isinstance(prepare_for_inference(small, streams=1000).blocks, tuple)
    assert not model("agalite", "tiny", jnp.bfloat16).has_step_kernel


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (301, 517), (1, 20_000), (20_000, 1)])
def test_one_row_times_a_weight(outputs, inputs, dtype):
    with jax.enable_x64(dtype is np.float64):
        rng = np.random.default_rng(0)
        w, x = (rng.normal(size=(n, inputs)).astype(dtype) for n in (outputs, 1))
        compiled = jax.jit(matmul).lower(x, w)
        assert "agalite_product" in compiled.as_text()
        want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        error = np.abs(compiled.compile()(x, w) - want).max()
        assert error < np.finfo(dtype).eps * 4 * np.sqrt(inputs) * np.abs(want).max() + 1e-5 * (
            dtype is np.float32
        )


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_rows_times_a_weight(rows, dtype):
    with jax.enable_x64(dtype is np.float64):
        rng = np.random.default_rng(0)
        w, x = (rng.normal(size=(n, 37)).astype(dtype) for n in (45, rows))
        (y,) = jax.jit(lambda x, w: kernels.call("product", [(rows, 45)], x, w))(x, w)
        np.testing.assert_allclose(y, x @ w.T, rtol=0, atol=1e-4 if dtype is np.float32 else 1e-12)


def test_many_callers_at_once():
    """The helper threads serve one caller; the others work alone. No numbers are mixed up."""
    packed = model("agalite slots", "odd", np.float32).prepare_for_inference()
    step = jax.jit(lambda x: packed.step(packed.initial_state(), x, False)[1])
    xs = np.random.default_rng(3).normal(size=(8, INPUT)).astype(np.float32)
    want = [np.asarray(step(x)) for x in xs]
    wrong = []

    def work(i):
        wrong.extend(i for _ in range(100) if not np.array_equal(step(xs[i]), want[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
