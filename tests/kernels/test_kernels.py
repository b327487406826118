"""Our own kernels against what they stand in for.

The table of attentions (`test_attention_ops.py`, method "auto") and the contract hold them to the
paper's equations at small sizes; here are sizes that fill vectors, many lanes and many threads.
"""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.memory import make_memory
from agalite.memory.layers import prepare_for_inference
from agalite.memory.agalite import PackedBlocks, kernel_order
from agalite.ops.matmul import matmul
from memory_models import cast

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


# What is compared, and at which sizes: compiling the gradient of all would take minutes.
GRADIENTS = [(name, "whole") for name in MODELS] + [
    ("galite", "odd"),
    ("agalite r=7", "odd"),
    ("galite", "tiny"),
    ("agalite", "tiny"),
]
STEPS = [
    ("agalite", "whole", np.float32),
    ("agalite slots", "odd", np.float64),
    ("agalite published", "odd", np.float32),
    ("agalite r=7", "tiny", np.float64),
]


def model(name, size, dtype=np.float64, **more):
    kind, options = MODELS[name]
    memory = make_memory(kind, INPUT, **{"layers": 1} | SIZES[size] | options | more)
    return cast(memory, dtype)


def sequences(steps, batch, dtype=np.float64):
    xs = jax.random.normal(jax.random.key(1), (steps, batch, INPUT), dtype)
    return xs, jax.random.bernoulli(jax.random.key(2), 0.05, (steps, batch))


def assert_same(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(1e-6, np.abs(y).max()), rtol=0)


def outputs_and_gradients(memory):
    """Outputs, last state, and gradients of weights, state and inputs, through three sequences."""
    weights, rest = eqx.partition(memory, eqx.is_inexact_array)
    start = jax.tree.map(
        lambda x: x + 0.1 if eqx.is_inexact_array(x) else x, memory.initial_state()
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

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(weights, floats, xs)


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


@pytest.mark.parametrize("name", ["galite", "agalite", "agalite slots"])
def test_gates_at_zero_and_one(name):
    """Saturated gates, in float32: finite, and XLA's to rounding."""
    memory = model(name, "whole", np.float32)
    bias = memory.blocks[0].attention.project.bias
    saturated = jnp.where(jnp.arange(bias.shape[1]) % 3 == 0, 200.0, -200.0) * jnp.ones_like(bias)
    memory = eqx.tree_at(lambda m: m.blocks[0].attention.project.bias, memory, saturated)
    xs, resets = sequences(70, 1, np.float32)

    def run(memory, xs):
        def loss(memory):
            ys = memory.scan(memory.initial_state(), xs, resets[:, 0])[1]
            return jnp.sum(jnp.sin(ys)), ys

        gradient, ys = eqx.filter_grad(loss, has_aux=True)(memory)
        return ys, eqx.filter(gradient, eqx.is_inexact_array)

    other = model(name, "whole", np.float32, method="sequential")
    other = eqx.tree_at(lambda m: m.blocks[0].attention.project.bias, other, saturated)
    ours, theirs = (jax.jit(run)(m, xs[:, 0]) for m in (memory, other))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ours))
    assert_same(ours[0], theirs[0], 1e-5)


@pytest.mark.parametrize("value", [-1e30, -100.0, -87.5, 0.0, 1e-30, 88.5, 100.0, 1e30, np.inf])
def test_activations_of_any_number(value):
    """Gates of one value, far outside of what exp can take too."""
    from agalite.ops import galite_attention
    from agalite.ops.features import Outer
    from agalite.ops.galite.chunked import Matrix
    from agalite.ops.galite.native import Inputs, attend

    steps, heads, width, eta = 3, 1, 4, 2
    raw = jnp.zeros((steps, heads, 5 * width + 3 * eta)).at[..., 3 * width : 5 * width].set(value)
    raw = raw.at[..., : 2 * width].set(1.0).at[..., 5 * width :].set(1.0)
    raw = raw.at[..., 2 * width : 3 * width].set(0.5)
    start = Matrix(jnp.ones((heads, width, eta * width)), jnp.ones((heads, eta * width)))
    inputs = Inputs(raw, jnp.ones((steps, heads)))
    _, out = attend(1e-5, eta, True, start, inputs)
    one, half = jnp.ones((steps, heads, width)), 0.5 * jnp.ones((steps, heads, width))
    gate = jax.nn.sigmoid(jnp.full((steps, heads, width), value))
    narrow = jnp.ones((steps, heads, eta))
    gamma = Outer(jax.nn.sigmoid(narrow), gate)
    state = (start.C, start.s)
    _, want = galite_attention(
        Outer(narrow, one),
        Outer(narrow, one),
        half,
        gate,
        gamma,
        state=type(galite_attention(one, one, one, one, one)[0])(*state),
        method="sequential",
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

        def run(weights):
            memory = eqx.combine(weights, rest)
            start = memory.initial_state()
            _, first = jax.vmap(memory.step, (None, 0, 0))(start, xs[0], resets[0])
            state, y = start, None
            for t in range(4):
                state, y = memory.step(state, xs[t, 0], resets[t, 0])
            return first, state, y

        tolerance = 1e-5 if dtype is np.float32 else 1e-12
        arrays, rest = eqx.partition(packed, eqx.is_array)
        assert "agalite_stack" in jax.jit(run).lower(arrays).as_text()
        ours = jax.jit(run)(arrays)
        two = jax.jit(jax.vmap(run))(jax.tree.map(lambda x: jnp.stack([x, 0.9 * x]), arrays))
        arrays, rest = eqx.partition(memory, eqx.is_array)
        with kernels.switched_off():
            theirs = jax.jit(lambda a: run(a))(arrays)
            other = jax.jit(lambda a: run(a))(jax.tree.map(lambda x: 0.9 * x, arrays))
        assert_same(ours, theirs, tolerance)
        assert_same(jax.tree.map(lambda x: x[0], two), theirs, tolerance)
        assert_same(jax.tree.map(lambda x: x[1], two), other, tolerance)


def test_packing_keeps_everything():
    memory = model("agalite", "odd", np.float32)
    packed = memory.prepare_for_inference()
    assert packed.parameter_count == memory.parameter_count
    assert packed.state_size == memory.state_size
    for a, b in zip(kernel_order(packed.blocks.blocks), kernel_order(memory.blocks), strict=True):
        np.testing.assert_array_equal(a, b)
    xs, resets = sequences(9, 1, np.float32)
    ours = packed.scan(packed.initial_state(), xs[:, 0], resets[:, 0])
    assert_same(ours, memory.scan(memory.initial_state(), xs[:, 0], resets[:, 0]), 1e-6)


def test_the_gradient_of_a_packed_step_is_that_of_the_blocks():
    with jax.enable_x64(True):
        memory = model("agalite", "odd")
        xs, _ = sequences(1, 1)

        def loss(memory):
            state, y = memory.step(memory.initial_state(), xs[0, 0], False)
            return jnp.sum(jnp.sin(y)) + jnp.sum(state.keys)

        ours, theirs = (eqx.filter_grad(loss)(m) for m in (memory.prepare_for_inference(), memory))
        assert_same(ours.blocks.weights, theirs.prepare_for_inference().blocks.weights, 1e-12)
        used, _ = memory.step(memory.initial_state(), xs[0, 0], False)

        def of_state(keys, memory):
            return jnp.sum(jnp.sin(memory.step(used._replace(keys=keys), xs[0, 0], False)[1]))

        ours, theirs = (jax.grad(of_state)(used.keys, m) for m in (memory.prepare_for_inference(), memory))
        assert np.abs(theirs).max() > 0
        assert_same(ours, theirs, 1e-12)


def test_a_reset_clears_even_an_infinite_state():
    packed = model("agalite", "whole", np.float32).prepare_for_inference()
    broken = jax.tree.map(
        lambda x: x + jnp.inf if eqx.is_inexact_array(x) else x, packed.initial_state()
    )
    x = jnp.ones(INPUT)
    _, y = packed.step(broken, x, True)
    np.testing.assert_array_equal(y, packed.step(packed.initial_state(), x, True)[1])


def test_what_cannot_be_packed_is_left_alone():
    for options in (
        {"gating": False},
        {"feature": "elu1"},
        {"method": "chunked"},
        {"basis": "rank1"},
    ):
        memory = make_memory("agalite", INPUT, layers=1, d_model=4, **options)
        assert not memory.has_step_kernel
        assert memory.prepare_for_inference() is memory
        assert isinstance(prepare_for_inference(memory).blocks, tuple)
    assert not make_memory("gru", INPUT).has_step_kernel
    small = model("agalite", "tiny", np.float32)
    assert small.prepare_for_inference().prepare_for_inference().blocks is not small.blocks
    assert isinstance(prepare_for_inference(small, streams=1000).blocks, tuple)
    half = cast(model("agalite", "tiny", np.float32), jnp.bfloat16)
    assert not half.has_step_kernel


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (301, 517), (1, 20_000), (20_000, 1)])
def test_one_row_times_a_weight(outputs, inputs, dtype):
    with jax.enable_x64(dtype is np.float64):
        w = jax.random.normal(jax.random.key(0), (outputs, inputs), dtype)
        x = jax.random.normal(jax.random.key(1), (1, inputs), dtype)
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
        w = jax.random.normal(jax.random.key(0), (45, 37), dtype)
        x = jax.random.normal(jax.random.key(1), (rows, 37), dtype)
        (y,) = jax.jit(lambda x, w: kernels.call("product", [(rows, 45)], x, w))(x, w)
        np.testing.assert_allclose(y, x @ w.T, rtol=0, atol=1e-4 if dtype is np.float32 else 1e-12)


def test_many_callers_at_once():
    """The helpers serve one caller; the others work alone, and nobody's numbers get mixed up."""
    packed = model("agalite slots", "odd", np.float32).prepare_for_inference()
    step = jax.jit(lambda x: packed.step(packed.initial_state(), x, False)[1])
    xs = np.asarray(jax.random.normal(jax.random.key(3), (8, INPUT)))
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
