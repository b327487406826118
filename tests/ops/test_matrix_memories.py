"""mLSTM, the gated delta rule, SSD, FFM and the causal convolution against plain numpy loops.

The loops are the papers' recurrences in float64, one head at a time, without stabiliser or chunks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.ops import _scalar_decay
from agalite.ops.causal_convolution import causal_convolution
from agalite.ops.delta_rule import gated_delta_rule
from agalite.ops.ffm import FFMState, aggregate
from agalite.ops.mlstm import MLSTMState, mlstm
from agalite.ops.ssd import state_space_dual
from attention_cases import quick_jit

H, V, K = 2, 3, 4
STEPS = 75  # more than one chunk of each operator, and not a whole number of them


# --- the recurrences ------------------------------------------------------------------------------


def loop_ssd(S, q, k, v, log_decay, resets):
    """Dao and Gu (2024), Equation 2: S = a S + v k^T; y = S q."""
    out = np.zeros_like(v)
    for t in range(len(v)):
        S = np.zeros_like(S) if resets[t] else S
        S = np.exp(log_decay[t]) * S + np.outer(v[t], k[t])
        out[t] = S @ q[t]
    return S, out


def loop_delta(S, q, k, v, beta, log_alpha, resets):
    """Yang et al. (2024), Equation 10: S = S alpha (I - beta k k^T) + beta v k^T."""
    out = np.zeros_like(v)
    for t in range(len(v)):
        S = np.zeros_like(S) if resets[t] else S
        erase = np.eye(len(k[t])) - beta[t] * np.outer(k[t], k[t])
        S = np.exp(log_alpha[t]) * S @ erase + beta[t] * np.outer(v[t], k[t])
        out[t] = S @ q[t]
    return S, out


def loop_mlstm(state, q, k, v, i, log_f, resets):
    """Beck et al. (2024), Equations 19 to 21, with C and n as they are, not divided by exp(m)."""
    C, n = state
    out = np.zeros_like(v)
    for t in range(len(v)):
        C, n = (np.zeros_like(x) if resets[t] else x for x in (C, n))
        C = np.exp(log_f[t]) * C + np.exp(i[t]) * np.outer(v[t], k[t])
        n = np.exp(log_f[t]) * n + np.exp(i[t]) * k[t]
        out[t] = C @ q[t] / max(abs(n @ q[t]), 1)
    return (C, n), out


def loop_ffm(S, x, alpha, omega, resets):
    """Morad et al. (2023): S_t = Gamma * S_{t-1} + x_t 1^T, in complex numbers."""
    rotation = np.exp(-np.abs(alpha)[:, None] - 1j * omega[None])
    out = []
    for t in range(len(x)):
        S = rotation * (0 * S if resets[t] else S) + x[t][:, None]
        out.append(S)
    return S, np.stack(out)


# --- inputs ---------------------------------------------------------------------------------------

GATES = {"ssd": 1, "delta": 2, "mlstm": 2}
OPERATORS = {"ssd": state_space_dual, "delta": gated_delta_rule, "mlstm": mlstm}


def sequence(name, steps=STEPS, seed=0):
    """q, k, v and gates in float64, resets (some inside a chunk), and a used state."""
    rng = np.random.default_rng(seed)
    width = V if name == "mlstm" else K
    q, k = rng.normal(size=(2, steps, H, width))
    v = rng.normal(size=(steps, H, V))
    log_decay = -np.exp(rng.normal(size=(steps, H)) - 1)
    resets = np.zeros(steps, bool)
    resets[[i for i in (3, 4, 40, 70) if i < steps]] = True
    S = rng.normal(size=(H, V, width))
    if name == "delta":
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
        return (q, k, v, rng.random((steps, H)), log_decay), resets, S
    if name == "mlstm":
        m = rng.normal(size=H)
        return (
            (q, k, v, 3 * rng.normal(size=(steps, H)), log_decay),
            resets,
            MLSTMState(S, rng.normal(size=(H, width)), m),
        )
    return (q, k, v, log_decay), resets, S


def expected(name, inputs, resets, state):
    """(state, outputs) of the loop."""
    loop = {"ssd": loop_ssd, "delta": loop_delta, "mlstm": loop_mlstm}[name]
    if name == "mlstm":
        scale = np.exp(state.m)
        state = list(zip(state.C * scale[:, None, None], state.n * scale[:, None], strict=True))
    found = [loop(state[h], *(x[:, h] for x in inputs), resets) for h in range(H)]
    states, outs = zip(*found, strict=True)
    return states, np.stack(outs, axis=1)


def unscaled(name, state):
    """The state as the loop has it, a list over heads."""
    if name != "mlstm":
        return list(np.asarray(state))
    scale = np.exp(np.asarray(state.m))
    return [
        (np.asarray(state.C)[h] * scale[h], np.asarray(state.n)[h] * scale[h]) for h in range(H)
    ]


def close(a, b, tolerance):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), 1))


# --- matrix memories ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sequential", "chunked"])
@pytest.mark.parametrize("name", GATES)
def test_operators_are_the_papers_recurrence(name, method):
    inputs, resets, state = sequence(name)
    with jax.enable_x64(True):
        run = quick_jit(lambda *args: OPERATORS[name](*args, method=method))
        last, out = run(*inputs, resets, state)
        states, outs = expected(name, inputs, resets, state)
        close(out, outs, 1e-11)
        for a, b in zip(unscaled(name, last), states, strict=True):
            jax.tree.map(lambda a, b: close(a, b, 1e-11), a, b)


@pytest.mark.parametrize("name", GATES)
def test_gradients_of_chunks_are_those_of_the_recurrence(name):
    """In float64, of all inputs and of the state; a batch of two by vmap."""
    two = [sequence(name, seed=s) for s in (0, 1)]
    inputs, resets, state = jax.tree.map(lambda *x: np.stack(x), *two)

    def gradient(method):
        def loss(inputs, state):
            run = jax.vmap(lambda x, r, s: OPERATORS[name](*x, r, s, method=method))
            last, out = run(inputs, resets, state)
            if name == "mlstm":  # its state has a free scale
                scale = jax.lax.stop_gradient(jnp.exp(last.m))
                last = (last.C * scale[..., None, None], last.n * scale[..., None])
            return jnp.sin(out).sum() + sum(jnp.cos(x).sum() for x in jax.tree.leaves(last))

        return quick_jit(jax.grad(loss, argnums=(0, 1)))(inputs, state)

    with jax.enable_x64(True):
        a, b = gradient("chunked"), gradient("sequential")
        jax.tree.map(lambda a, b: close(a, b, 1e-9), a, b)


@pytest.mark.parametrize("name", GATES)
def test_saturated_gates_and_equal_keys(name):
    """Gates of exactly 0 and 1, all keys the same: finite, and what the recurrence gives."""
    rng = np.random.default_rng(0)
    inputs, resets, state = jax.tree.map(lambda x: np.asarray(x, np.float32), sequence(name))
    resets = resets.astype(bool)
    q, _, v, *_ = inputs
    k = np.zeros_like(q)
    k[..., 0] = 1
    pick = rng.integers(3, size=(STEPS, H))
    log_decay = np.array([0, -1e4, -0.1], np.float32)[pick]
    first = {
        "ssd": (),
        "delta": (np.array([0, 1, 1], np.float32)[rng.integers(3, size=(STEPS, H))],),
        "mlstm": (np.array([-1e4, 0, 20], np.float32)[rng.integers(3, size=(STEPS, H))],),
    }[name]

    def run(method):
        def loss(q, k, v, *gates):
            _, out = OPERATORS[name](q, k, v, *gates, resets, state, method=method)
            return jnp.sum(jnp.sin(out)), out

        args = (q, k, v, *first, log_decay)
        compiled = quick_jit(jax.grad(loss, argnums=tuple(range(len(args))), has_aux=True))
        return compiled(*args)

    (chunked, out), (_, reference) = run("chunked"), run("sequential")
    close(out, np.asarray(reference), 1e-5)
    assert all(np.isfinite(x).all() for x in chunked)


@pytest.mark.parametrize("method", ["sequential", "chunked"])
def test_a_forget_gate_above_one_does_not_act_on_an_empty_memory(method):
    """At the start, and at a reset: what is written is read, however large the gate."""
    inputs, resets, _ = jax.tree.map(jnp.asarray, sequence("mlstm", 5))
    q, k, v, i, log_f = (x.astype(jnp.float32) for x in inputs)
    run = quick_jit(lambda log_f: mlstm(q, k, v, i, log_f, resets, method=method)[1])
    begins = resets.at[0].set(True)[:, None]
    large = run(jnp.where(begins, 1e4, log_f))
    close(large, np.asarray(run(log_f)), 1e-6)


def test_decays_after_a_reset_do_not_depend_on_what_was_before():
    """To the bit: no sum has a term of another episode."""
    rng = np.random.default_rng(0)
    a = -np.exp(rng.normal(size=(1, 1, 16))).astype(np.float32)
    b = a.copy()
    b[..., :5] *= 1e4
    keep = np.ones_like(a)
    keep[..., 5] = 0
    x, y = (_scalar_decay.decays(jnp.asarray(z), jnp.asarray(keep)) for z in (a, b))
    np.testing.assert_array_equal(x.between[..., 5:, 5:], y.between[..., 5:, 5:])
    np.testing.assert_array_equal(x.since[..., 5:], y.since[..., 5:])
    assert not np.asarray(x.seen)[..., 5:, :5].any()
    assert not np.asarray(x.fresh)[..., 5:].any()


def test_bad_gates_are_named():
    inputs, resets, state = jax.tree.map(jnp.asarray, sequence("ssd", 5))
    with pytest.raises(ValueError, match=r"log_decay has shape \(4, 2\); expected \(5, 2\)"):
        state_space_dual(*inputs[:3], inputs[3][:4], resets, state)
    with pytest.raises(ValueError, match="method='associative' is unknown"):
        state_space_dual(*inputs, resets, state, method="associative")
    inputs, resets, _ = jax.tree.map(jnp.asarray, sequence("delta", 5))
    with pytest.raises(ValueError, match=r"beta has shape \(5, 2, 1\); expected \(5, 2\)"):
        gated_delta_rule(*inputs[:3], inputs[3][..., None], inputs[4], resets)
    inputs, resets, _ = jax.tree.map(jnp.asarray, sequence("mlstm", 5))
    with pytest.raises(ValueError, match=r"i has shape \(5, 2, 1\); expected \(5, 2\)"):
        mlstm(*inputs[:3], inputs[3][..., None], inputs[4], resets)


# --- FFM ------------------------------------------------------------------------------------------


def ffm_inputs(steps, seed=0):
    rng = np.random.default_rng(seed)
    S = rng.normal(size=(V, K)) + 1j * rng.normal(size=(V, K))
    resets = np.zeros(steps, bool)
    resets[steps // 2] = True
    alpha, omega = rng.normal(size=V), rng.normal(size=K)
    return S, rng.normal(size=(steps, V)), alpha, omega, resets


@pytest.mark.parametrize("method", ["sequential", "associative"])
def test_ffm_is_its_recurrence(method):
    S, x, alpha, omega, resets = ffm_inputs(20)
    last, states = loop_ffm(S, x, alpha, omega, resets)
    with jax.enable_x64(True):
        run = quick_jit(lambda *args: aggregate(*args, method=method))
        found, h = run(x, alpha, omega, resets, FFMState(S.real, S.imag))
    close(np.asarray(h)[:, 0] + 1j * np.asarray(h)[:, 1], states, 1e-12)
    close(np.asarray(found.real) + 1j * np.asarray(found.imag), last, 1e-12)


def test_gradient_of_ffm():
    """The loop's own gradient is autodiff's of the associative scan."""
    two = [ffm_inputs(20, seed=s) for s in (0, 1)]
    S, x, _, _, resets = (np.stack(y) for y in zip(*two, strict=True))
    alpha, omega = two[0][2:4]

    def gradient(method):
        def loss(x, alpha, omega, state):
            run = jax.vmap(lambda x, r, s: aggregate(x, alpha, omega, r, s, method=method)[1])
            return jnp.sin(run(x, resets, state)).sum()

        args = (x, alpha, omega, FFMState(S.real, S.imag))
        return quick_jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)

    with jax.enable_x64(True):
        a, b = gradient("sequential"), gradient("associative")
        jax.tree.map(lambda a, b: close(a, b, 1e-10), a, b)


def test_ffm_does_not_drift():
    """Without decay the length of what is remembered stays, and its phase is that of t omega."""
    x = np.zeros((20_000, 1))
    x[0] = 1.0
    with jax.enable_x64(True):
        _, h = jax.jit(aggregate)(x, np.zeros(1), np.array([0.3, 2.0]))
    end = np.asarray(h)[-1, 0, 0] + 1j * np.asarray(h)[-1, 1, 0]
    np.testing.assert_allclose(end, np.exp(-1j * np.array([0.3, 2.0]) * 19_999), atol=1e-9)


# --- the convolution ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
def test_convolution_sees_its_episode_only(width):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(12, 3)), rng.normal(size=(width, 3))
    resets = np.zeros(12, bool)
    resets[[5, 6, 10]] = True
    begins = 0
    y = np.zeros_like(x)
    for t in range(12):
        begins = t if resets[t] else begins
        for i in range(min(width, t - begins + 1)):
            y[t] += weight[i] * x[t - i]
    with jax.enable_x64(True):
        run = quick_jit(causal_convolution)
        _, whole = run(x, weight, resets)
        close(whole, y, 1e-12)
        state, parts = None, []
        for part in (slice(0, 1), slice(1, 3), slice(3, 11), slice(11, 12)):
            state, ys = run(x[part], weight, resets[part], state)
            parts.append(ys)
        close(np.concatenate(parts), y, 1e-12)
