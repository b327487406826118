"""Operators, their inputs and their oracles, for the tests of `agalite.ops`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import numpy_attention as oracle
from agalite.ops import (
    AGaLiTeState,
    MatrixState,
    Outer,
    agalite_attention,
    galite_attention,
    linear_attention,
)
from agalite.ops.delta import make_basis, random_signs

H, V, E, W = 2, 3, 2, 4
K = E * W
BEGUN = 37  # inputs that a stream with a state has seen already
METHODS = ("sequential", "associative", "chunked", "auto")
KEY = np.asarray(jax.random.key_data(jax.random.key(5)))


class X(NamedTuple):
    """The inputs of one sequence."""

    q: Any
    k: Any
    v: Any
    beta: Any
    gamma: Any


class Op(NamedTuple):
    """An operator and its oracle, called alike: (x, resets, state, ...) -> (state, out)."""

    run: Callable[..., Any]
    gated: bool = True
    basis: str | None = None
    r: int = 0


def matrix(function, gated):
    def run(x, resets, state, method):
        gates = (x.beta, x.gamma) if function is galite_attention else ()
        return function(x.q, x.k, x.v, *gates, resets, state, method=method)

    return Op(run, gated)


def agalite(basis, r, *, gated=True):
    def run(x, resets, state, method):
        key = KEY if basis == "rank1" and state is None else None
        return agalite_attention(*x, resets, state, r=r, basis=basis, key=key, method=method)

    return Op(run, gated, basis, r)


OPS = {
    "linear": matrix(linear_attention, gated=False),
    "galite": matrix(galite_attention, gated=True),
    "galite ungated": matrix(galite_attention, gated=False),
    "paper": agalite("paper", 3),
    "paper ungated": agalite("paper", 4, gated=False),
    "published": agalite("published", 3),
    "slots": agalite("slots", 3),
    "rank1": agalite("rank1", 2),
}


# --- data -----------------------------------------------------------------------------------------


def make(op, steps, seed=0, *, sparse=False, saturated=False, resets=0.06):
    """Positive features (`sparse`: relu's) and gates in (0, 1) (`saturated`: some 0 or 1)."""
    rng = np.random.default_rng([seed, steps])

    def feature():
        if not sparse:
            return Outer(*(rng.uniform(0.1, 1, (steps, H, n)) for n in (E, W)))
        return Outer(*(np.maximum(rng.normal(size=(steps, H, n)) + 0.5, 0) for n in (E, W)))

    def gate(n):
        x = 1 / (1 + np.exp(-2 * rng.normal(size=(steps, H, n))))
        if saturated:
            x[rng.uniform(size=x.shape) < 0.1] = 0.0
            x[rng.uniform(size=x.shape) < 0.1] = 1.0
        return x

    q, k, v = feature(), feature(), rng.normal(size=(steps, H, V))
    gates = (gate(V), Outer(gate(E), gate(W))) if op.gated else (None, None)
    return X(q, k, v, *gates), rng.uniform(size=steps) < resets


def make_state(op, seed=0):
    """A state in the middle of a stream, with nothing zero in it."""
    rng = np.random.default_rng([seed, 1])
    if op.basis is None:
        return MatrixState(rng.normal(size=(H, V, K)), rng.uniform(0.1, 1, (H, K)))
    basis = make_basis(op.basis, op.r)
    return AGaLiTeState(
        rng.uniform(0.1, 1, (H, basis.key_vectors, K)),
        rng.normal(size=(H, basis.value_vectors, V)),
        np.int32(BEGUN % basis.period),
        KEY if op.basis == "rank1" else None,
    )


def cast(tree, dtype):
    return jax.tree.map(
        lambda x: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x, tree
    )


def dense(x: X) -> X:
    return X(*(a.expand() if isinstance(a, Outer) else a for a in x))


def head_states(op, state):
    """What the oracle keeps for each head: the r + 1 vectors and s that folding left out."""
    if state is None:
        return None
    state = cast(state, np.float64)
    if op.basis is None:
        return [(state.C[h], state.s[h]) for h in range(H)]
    return [(*unfold(op, state.keys[h], state.values[h]), BEGUN) for h in range(H)]


def unfold(op, keys, values):
    """(v~, k~, s) of Algorithm 4: cos(omega_i t) = cos(omega_(r-i) t)."""
    r = op.r
    if op.basis == "slots":
        return values, keys, keys.sum(0)
    if op.basis == "rank1":
        return values, keys[:-1], keys[-1]
    s = keys[0] if op.basis == "paper" else keys[r // 2] if r % 2 == 0 else keys[-1]
    index = [min(i, r - i) for i in range(r + 1)]
    return values[index], keys[index], s


@functools.cache
def sign_table(dtype):
    """rank1's signs (steps, r) for steps counted from the beginning of an episode."""
    with jax.enable_x64(dtype == np.float64):  # JAX draws other signs where float64 is allowed
        return np.asarray(random_signs(KEY, jnp.arange(512), OPS["rank1"].r, dtype))


def ask_oracle(op, x, resets, state=None):
    dtype, x = x.v.dtype, dense(cast(x, np.float64))
    states = head_states(op, state)
    if op.basis is None:
        return oracle.per_head(oracle.galite_attention, *x, resets, states=states)
    return oracle.per_head(
        oracle.agalite_attention,
        *x,
        resets,
        states=states,
        r=op.r,
        basis=op.basis,
        signs=lambda t: sign_table(dtype)[t],
    )


def assert_close(got, want, tolerance):
    """Relative to the scale of the whole array."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)


def assert_state(op, got, want, tolerance):
    """An operator's last state against the oracle's, head by head."""
    for h, expected in enumerate(want):
        if op.basis is None:
            found = got.C[h], got.s[h]
        else:
            found = unfold(op, np.asarray(got.keys[h]), np.asarray(got.values[h]))
            assert int(got.phase) == expected[3] % make_basis(op.basis, op.r).period
        for a, b in zip(found, expected, strict=False):
            assert_close(a, b, tolerance)


def assert_trees(got, want, tolerance=1e-9):
    got, want = (jax.tree_util.tree_leaves_with_path(t) for t in (got, want))
    for (path, a), (other, b) in zip(got, want, strict=True):
        assert path == other
        assert np.shape(a) == np.shape(b), path
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max()), path


def assert_finite(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert np.isfinite(np.asarray(leaf)).all(), jax.tree_util.keystr(path)


# --- compiled once for each operator and method ---------------------------------------------------


@functools.cache
def forward(name, method):
    return jax.jit(functools.partial(OPS[name].run, method=method))


def split(state):
    """(what has a gradient, the rest)."""
    return (state, None) if isinstance(state, MatrixState) else (state[:2], state[2:])


def join(floats, rest):
    return floats if rest is None else AGaLiTeState(*floats, *rest)


def loss_and_gradient(name, method):
    """(x, float state, other state, resets, weights)
    -> ((loss, (last state, out)), gradients of x and state)."""

    def loss(x, floats, rest, resets, weights):
        state, out = OPS[name].run(x, resets, join(floats, rest), method)
        last = sum(jnp.vdot(a, jnp.sin(jnp.arange(a.size))) for a in split(state)[0])
        return jnp.vdot(out, weights) + last, (state, out)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@functools.cache
def gradient(name, method):
    return jax.jit(loss_and_gradient(name, method))


def gradient_inputs(name, steps, seed=0, **options):
    op = OPS[name]
    x, resets = make(op, steps, seed, saturated=True, **options)
    weights = np.random.default_rng([seed, 2]).normal(size=x.v.shape)
    return x, *split(make_state(op, seed)), resets, weights
