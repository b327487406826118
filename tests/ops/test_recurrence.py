"""h_t = a_t h_{t-1} + b_t: every method, forward and backward, against a numpy loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpy_attention
from agalite.ops import METHODS, Complex, activated_recurrence, linear_recurrence


def make(steps, width=(2, 3), seed=0):
    """Decays in [0, 1], some exactly 0 and some exactly 1; resets, also twice running."""
    rng = np.random.default_rng([seed, steps])
    decay = rng.uniform(size=(steps, *width))
    decay[rng.uniform(size=decay.shape) < 0.1] = 0.0
    decay[rng.uniform(size=decay.shape) < 0.2] = 1.0
    write, weights = rng.normal(size=(2, steps, *width))
    resets = rng.uniform(size=steps) < 0.05
    if steps > 6:
        resets[3:5] = True
    return decay, write, rng.normal(size=width), resets, weights


@functools.cache
def runner(method):
    def loss(decay, write, initial, resets, weights):
        h = linear_recurrence(decay, write, initial, resets, method=method)
        return jnp.vdot(h, weights), h

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def adjoint(decay, write, initial, resets, weights):
    """The gradient of sum(weights * h), written out: g_t = w_t + a_{t+1} g_{t+1}."""
    h = numpy_attention.linear_recurrence(decay, write, initial, resets)
    d_decay, d_write = np.zeros_like(decay), np.zeros_like(write)
    g = np.zeros_like(initial)
    for t in reversed(range(len(decay))):
        g = g + weights[t]
        d_write[t] = g
        before = initial if t == 0 else h[t - 1]
        d_decay[t] = 0 if resets[t] else g * before
        g = np.zeros_like(g) if resets[t] else g * decay[t]
    return d_decay, d_write, g


@pytest.mark.parametrize("steps", [1, 7, 64, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_loop_forward_and_backward(method, steps):
    inputs = make(steps)
    with jax.enable_x64(True):
        (_, h), gradient = runner(method)(*inputs)
    np.testing.assert_allclose(
        h, numpy_attention.linear_recurrence(*inputs[:4]), rtol=1e-11, atol=1e-12
    )
    for got, want in zip(gradient, adjoint(*inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_float32_is_as_close_as_float32_allows(method):
    inputs = make(64, seed=1)
    single = [x if x.dtype == bool else x.astype(np.float32) for x in inputs]
    (_, h), gradient = runner(method)(*single)
    assert h.dtype == jnp.float32
    want = numpy_attention.linear_recurrence(
        *(np.asarray(x, np.float64) for x in single[:3]), inputs[3]
    )
    assert np.abs(h - want).max() < 1e-5 * np.abs(want).max()
    for got, exact in zip(gradient, adjoint(*inputs), strict=True):
        assert np.abs(got - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_decays_all_0_or_all_1(method, value):
    """At 0 the recurrence is its writes, at 1 their sum: both are known exactly."""
    _, write, initial, _, weights = make(64, seed=2)
    never = np.zeros(64, bool)
    with jax.enable_x64(True):
        (_, h), (d_decay, d_write, d_initial) = runner(method)(
            np.full_like(write, value), write, initial, never, weights
        )
    want = write if value == 0 else initial + np.cumsum(write, axis=0)
    np.testing.assert_allclose(h, want, rtol=1e-12, atol=1e-12)
    later = weights if value == 0 else np.cumsum(weights[::-1], axis=0)[::-1]
    np.testing.assert_allclose(d_write, later, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(d_initial, value * later[0], rtol=1e-12, atol=1e-12)
    assert np.isfinite(d_decay).all()
    assert np.abs(d_decay).max() > 0


@pytest.mark.parametrize("method", METHODS)
def test_without_initial_and_resets(method):
    decay, write, *_ = make(7, width=())
    with jax.enable_x64(True):
        h = jax.jit(functools.partial(linear_recurrence, method=method))(decay, write)
    np.testing.assert_allclose(
        h, numpy_attention.linear_recurrence(decay, write), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("method", METHODS)
def test_batch_of_one_element_wide_recurrences(method):
    """vmap over axis 1 and over the initial state, against one recurrence with a wider state."""
    decay, write, initial, resets, _ = make(64, width=(5,), seed=3)
    run = functools.partial(linear_recurrence, method=method)
    batched = jax.jit(jax.vmap(run, in_axes=(1, 1, 0, None), out_axes=1))
    with jax.enable_x64(True):
        h = batched(decay, write, initial, resets)
    want = numpy_attention.linear_recurrence(decay, write, initial, resets)
    np.testing.assert_allclose(h, want, rtol=1e-11, atol=1e-12)


def test_a_reset_lets_nothing_through():
    decay, write, initial, _, _ = make(64, seed=4)  # a length that is compiled already
    resets = np.zeros(64, bool)
    resets[9] = True
    inputs = [x.astype(np.float32) for x in (decay, write, initial)]
    later = np.zeros((64, 2, 3), np.float32)
    later[9:] = 1
    for method in METHODS:
        (_, h), (_, d_write, d_initial) = runner(method)(*inputs, resets, later)
        assert not np.any(d_initial), method
        assert not np.any(d_write[:9]), method
        np.testing.assert_allclose(h[9], write[9], rtol=1e-6)


# --- complex numbers ------------------------------------------------------------------------------


def complex_inputs(steps, width=3, seed=0):
    """decay, some of it 0 and some on the unit circle, write, initial, resets, weights; complex."""
    rng = np.random.default_rng([seed, steps])
    sizes = rng.choice([0.0, 0.3, 0.9, 1.0], size=(steps, width))
    decay = sizes * np.exp(1j * rng.uniform(0, 7, size=(steps, width)))
    parts = rng.normal(size=(2, 2, steps, width))
    write, weights = parts[0] + 1j * parts[1]
    return decay, write, write[0] * 2, rng.uniform(size=steps) < 0.1, weights


def pair(x):
    return Complex(x.real, x.imag)


def joined(x):
    return np.asarray(x.real) + 1j * np.asarray(x.imag)


def loss_of(run):
    """sum(Re(weights* h)), and h, with the gradients of decay, write and initial."""

    def loss(decay, write, initial, resets, weights):
        h = run(decay, write, initial, resets)
        return jnp.vdot(h.real, weights.real) + jnp.vdot(h.imag, weights.imag), h

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("method", METHODS)
def test_complex_equals_the_loop_and_its_adjoint(method):
    decay, write, initial, resets, weights = complex_inputs(19)
    with jax.enable_x64(True):
        (_, h), gradient = loss_of(functools.partial(linear_recurrence, method=method))(
            pair(decay), pair(write), pair(initial), resets, pair(weights)
        )
    want = numpy_attention.linear_recurrence(decay, write, initial, resets)
    np.testing.assert_allclose(joined(h), want, rtol=1e-11, atol=1e-12)
    # As two real numbers each, the adjoint of a product is the product with the conjugate.
    wanted = adjoint(decay.conj(), write, initial, resets, weights)
    before = np.concatenate([initial[None], want[:-1]]).conj()
    wanted = (np.where(resets[:, None], 0, wanted[1] * before), *wanted[1:])
    for got, exact in zip(gradient, wanted, strict=True):
        np.testing.assert_allclose(joined(got), exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_activated_equals_the_loop_and_its_autodiff(activation):
    decay, write, initial, resets, weights = complex_inputs(9, seed=1)

    def slowly(decay, write, initial, resets):
        f, h, path = jnp.tanh if activation == "tanh" else jax.nn.relu, initial, []
        for t in range(len(resets)):
            h = jax.tree.map(lambda x, t=t: jnp.where(resets[t], 0.0, x), h)
            h = jax.tree.map(f, decay[t] * h + write[t])
            path.append(h)
        return jax.tree.map(lambda *x: jnp.stack(x), *path)

    inputs = pair(decay), pair(write), pair(initial), resets, pair(weights)
    fast = functools.partial(activated_recurrence, activation=activation)
    with jax.enable_x64(True):
        (_, h), gradient = loss_of(fast)(*inputs)
        (_, expected), exact = loss_of(slowly)(*inputs)
    f = np.tanh if activation == "tanh" else lambda x: np.maximum(x, 0)
    state = initial
    for t in range(len(resets)):
        state = decay[t] * (0 if resets[t] else state) + write[t]
        state = f(state.real) + 1j * f(state.imag)
        np.testing.assert_allclose(joined(h)[t], state, rtol=1e-12, atol=1e-12)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
        (h, gradient),
        (expected, exact),
    )


@pytest.mark.parametrize("run", ["linear", "activated"])
def test_a_batch_of_complex_recurrences_is_a_wider_one(run):
    """Values and gradients under vmap, with one decay for the whole batch."""
    decay, write, initial, resets, weights = complex_inputs(8, width=6, seed=2)
    shared, late = pair(decay[:, :2]), pair(write.reshape(8, 3, 2))
    start, weights = pair(initial.reshape(3, 2)), pair(weights.reshape(8, 3, 2))
    many = np.stack([resets, ~resets, resets], axis=1)
    one = (
        linear_recurrence
        if run == "linear"
        else functools.partial(activated_recurrence, activation="tanh")
    )
    batched = jax.vmap(one, in_axes=(None, 1, 0, 1), out_axes=1)
    with jax.enable_x64(True):
        (_, h), (d_decay, *_) = loss_of(batched)(shared, late, start, many, weights)
        alone = [
            loss_of(one)(shared, late[:, i], start[i], many[:, i], weights[:, i]) for i in range(3)
        ]
    for i, ((_, expected), _) in enumerate(alone):
        np.testing.assert_allclose(joined(h)[:, i], joined(expected), rtol=1e-12, atol=1e-12)
    total = sum(joined(gradient[0]) for _, gradient in alone)
    np.testing.assert_allclose(joined(d_decay), total, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "parallel"}, r"method='parallel'.*associative.*chunked.*sequential"),
        ({"write": np.zeros((4, 2))}, r"write has shape \(4, 2\); expected \(4, 3\)"),
        ({"initial": np.zeros(2)}, r"initial has shape \(2,\); expected \(3,\)"),
        ({"resets": np.zeros(5, bool)}, r"resets has shape \(5,\); expected \(4,\)"),
        ({"decay": np.zeros((0, 3)), "write": np.zeros((0, 3))}, "decay has length 0"),
    ],
)
def test_bad_input_is_named(change, message):
    good = {name: np.zeros((4, 3), np.float32) for name in ("decay", "write")}
    with pytest.raises(ValueError, match=message):
        linear_recurrence(**(good | change))


def test_bad_activation_is_named():
    zeros = np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match="activation='gelu' is unknown; choose one of: relu, tanh"):
        activated_recurrence(zeros, zeros, activation="gelu")
