"""LRU, S5, RTU and minGRU: each mixer against a numpy loop of its paper's recurrence, in float64,
and how their recurrences start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.memory import make_memory
from agalite.memory.s5 import hippo_n
from agalite.watch import gates
from memory_models import DIAGONAL, build

T, D, N = 9, DIAGONAL["d_model"], DIAGONAL["hidden_size"]


# --- the papers' recurrences, with complex numbers ------------------------------------------------


def complex_weights(mixer):
    """B (N, D) and C (D, N)."""
    b = np.asarray(mixer.into.parts.weight)
    c = np.asarray(mixer.out.real.weight) + 1j * np.asarray(mixer.out.imag.weight)
    return b[:N] + 1j * b[N:], c


def on_the_spiral(mixer):
    return np.exp(-np.exp(mixer.eigenvalues.nu) + 1j * np.exp(mixer.eigenvalues.theta))


def lru(mixer, x, h):
    """x_k = Lambda x_{k-1} + exp(gamma_log) B u_k,  y_k = Re(C x_k) + D u_k."""
    b, c = complex_weights(mixer)
    h = on_the_spiral(mixer) * h + np.exp(mixer.log_gamma) * (b @ x)
    return h, (c @ h).real + mixer.skip * x


def s5(mixer, x, h):
    """Zero-order hold of dx/dt = Lambda x + B u,  y = 2 Re(C x) + D u."""
    b, c = complex_weights(mixer)
    eigenvalues = -np.exp(mixer.log_rate) + 1j * mixer.frequency
    held = np.exp(eigenvalues * np.exp(mixer.log_step))
    h = held * h + (held - 1) / eigenvalues * (b @ x)
    return h, 2 * (c @ h).real + mixer.skip * x


def rtu(mixer, x, h):
    r, theta = np.exp(-np.exp(mixer.eigenvalues.nu)), np.exp(mixer.eigenvalues.theta)
    w, out = np.asarray(mixer.into.parts.weight), mixer.out
    f = {"relu": lambda x: np.maximum(x, 0), "tanh": np.tanh}[mixer.config.activation]
    phi = np.sqrt(1 - r**2)
    one = r * np.cos(theta) * h.real - r * np.sin(theta) * h.imag + phi * (w[:N] @ x)
    two = r * np.sin(theta) * h.real + r * np.cos(theta) * h.imag + phi * (w[N:] @ x)
    inside = mixer.config.variant == "nonlinear"
    h = f(one) + 1j * f(two) if inside else one + 1j * two
    y = np.asarray(out.real.weight) @ f(one) - np.asarray(out.imag.weight) @ f(two)
    return h, y + mixer.bias


def mingru(mixer, x, h):
    """h_t = (1 - z_t) h_{t-1} + z_t h~_t."""
    gate, candidate = np.split(np.asarray(mixer.into.weight) @ x + mixer.into.bias, 2)
    z = 1 / (1 + np.exp(-gate))
    h = (1 - z) * h + z * candidate
    return h, np.asarray(mixer.out.weight) @ h.real + mixer.out.bias


STEPS = {
    "lru": lru,
    "lru horizon": lru,
    "s5": s5,
    "rtu": rtu,
    "rtu nonlinear": rtu,
    "rtu nonlinear tanh": rtu,
    "mingru horizon": mingru,
}


@pytest.mark.parametrize("row", STEPS)
def test_mixer_equals_its_papers_recurrence(row):
    mixer = jax.tree.map(lambda x: np.asarray(x, np.float64), build(row)).blocks[0].attention
    rng = np.random.default_rng(0)
    inputs, start = rng.normal(size=(T, D)), rng.normal(size=N) + 1j * rng.normal(size=N)
    resets = np.arange(T) == 4
    real = row.startswith("mingru")
    with jax.enable_x64(True):
        state = mixer.initial_state()
        leaves = [start.real] if real else [start.real, start.imag]
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        last, out = jax.jit(lambda mixer, *args: mixer(*args))(mixer, state, inputs, resets)
        found = [np.asarray(x) for x in jax.tree.leaves(last)]
    h = start.real if real else start
    for t in range(T):
        x = inputs[t] - inputs[t].mean()
        x = x / np.sqrt(np.square(x).mean() + 1e-5) * mixer.norm.scale + mixer.norm.bias
        h, y = STEPS[row](mixer, x, np.zeros_like(h) if resets[t] else h)
        np.testing.assert_allclose(np.asarray(out)[t], y, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found, [h] if real else [h.real, h.imag], rtol=1e-10, atol=1e-12)


# --- how they start -------------------------------------------------------------------------------


def started(name, size=400, **options):
    """What the elements of a new model keep, sorted, and what they write: (N,) each."""
    options = DIAGONAL | {"hidden_size": size} | options
    mixer = make_memory(name, 3, **options).blocks[0].attention
    mixer = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.zeros_like(x), mixer)
    written, kept = gates.element_gates(mixer, jnp.zeros((1, D)))
    return np.sort(np.asarray(kept[0])), np.asarray(written[0])


@pytest.mark.parametrize("name", ["lru", "s5", "rtu", "mingru"])
def test_horizon_spreads_the_time_constants(name):
    kept, _ = started(name, horizon=(2, 50), **({"blocks": 100} if name == "s5" else {}))
    np.testing.assert_allclose(1 / (1 - kept), np.geomspace(2, 50, 400), rtol=1e-3)


def test_lru_starts_uniform_over_its_ring():
    """The area within radius r is r^2, and gamma is sqrt(1 - r^2)."""
    kept, written = started("lru", 4000, r_min=0.4, r_max=0.9)
    uniform = (kept**2 - 0.4**2) / (0.9**2 - 0.4**2)
    np.testing.assert_allclose(uniform, np.linspace(0, 1, 4000), atol=0.03)
    np.testing.assert_allclose(np.sort(written)[::-1], np.sqrt(1 - kept**2), rtol=1e-4)
    eigenvalues = make_memory("lru", 3, **DIAGONAL | {"hidden_size": 4000, "max_phase": 0.5})
    angles = np.exp(eigenvalues.blocks[0].attention.eigenvalues.theta)
    np.testing.assert_allclose(np.sort(angles), np.linspace(0, 0.5, 4000), atol=0.015)


def test_s5_starts_as_the_hippo_matrix():
    """The eigenvalues and eigenvectors of both halves give the normal part of HiPPO-LegS."""
    imaginary, vectors = hippo_n(3)
    n, k = np.indices((6, 6))
    root = np.sqrt((n + 0.5) * (k + 0.5))
    expected = np.where(n > k, -root, np.where(n == k, -0.5, root))
    made = 2 * ((vectors * (-0.5 + 1j * imaginary)) @ vectors.conj().T).real
    np.testing.assert_allclose(made, expected, atol=1e-12)
    # LegS itself is this minus the outer product of sqrt(n + 1/2) with itself.
    legs = np.where(n > k, -2 * root, np.where(n == k, -(n + 1.0), 0.0))
    np.testing.assert_allclose(made - root, legs, atol=1e-12)

    mixer = make_memory("s5", 3, **DIAGONAL | {"hidden_size": 6, "blocks": 2}).blocks[0].attention
    np.testing.assert_allclose(mixer.frequency, np.tile(imaginary, 2), rtol=1e-6)
    weight = np.asarray(mixer.into.parts.weight)
    b = (weight[:6] + 1j * weight[6:]).reshape(2, 3, D)
    real = 2 * np.einsum("pn,jnd->jpd", vectors, b).real  # the real B of which b is V^-1 B
    np.testing.assert_allclose(np.einsum("pn,jpd->jnd", vectors.conj(), real), b, atol=1e-6)
    kept, _ = started("s5", 4000, blocks=1000)
    steps = np.sort(np.log(-2 * np.log(kept)))
    np.testing.assert_allclose(steps, np.linspace(np.log(0.001), np.log(0.1), 4000), atol=0.15)
