"""The attentions of `agalite.ops` with inputs and expected outputs, for their tests."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpy_attention
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
MAIN = ("linear", "galite", "paper")  # one operator of each algorithm
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
    """An operator: run(x, resets, state, method) -> (state, out)."""

    run: Callable[..., Any]
    gated: bool = True
    basis: str | None = None
    r: int = 0
    decay: str = "paper"


def matrix(function, gated):
    def run(x, resets, state, method):
        gates = (x.beta, x.gamma) if function is galite_attention else ()
        return function(x.q, x.k, x.v, *gates, resets, state, method=method)

    return Op(run, gated)


def galite_published():
    def run(x, resets, state, method):
        return galite_attention(*x, resets, state, decay="published", method=method)

    return Op(run, decay="published")


def agalite(basis, r, *, gated=True):
    def run(x, resets, state, method):
        key = KEY if basis == "rank1" and state is None else None
        return agalite_attention(*x, resets, state, r=r, basis=basis, key=key, method=method)

    return Op(run, gated, basis, r)


OPS = {
    "linear": matrix(linear_attention, gated=False),
    "galite": matrix(galite_attention, gated=True),
    "galite ungated": matrix(galite_attention, gated=False),
    "galite published decay": galite_published(),
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
    """The states of numpy_attention for each head: all r + 1 vectors, and s."""
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
def sign_table():
    """rank1's signs (steps, r) for steps counted from the beginning of an episode."""
    draw = jax.jit(lambda steps: random_signs(KEY, steps, OPS["rank1"].r, jnp.dtype("float32")))
    return np.asarray(draw(np.arange(512, dtype=np.int32)))


def expected(op, x, resets, state=None):
    """(list of states, out) of the loops in numpy_attention, in float64."""
    x = dense(cast(x, np.float64))
    states = head_states(op, state)
    if op.basis is None:
        return numpy_attention.per_head(
            numpy_attention.galite_attention, *x, resets, states=states, decay=op.decay
        )
    return numpy_attention.per_head(
        numpy_attention.agalite_attention,
        *x,
        resets,
        states=states,
        r=op.r,
        basis=op.basis,
        signs=lambda t: sign_table()[t],
    )


def assert_close(got, want, tolerance):
    """Relative to the scale of the whole array."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)


def assert_state(op, got, want, tolerance):
    """An operator's last state against `expected`, head by head."""
    got = jax.tree.map(np.asarray, got)
    for h, state in enumerate(want):
        if op.basis is None:
            found = got.C[h], got.s[h]
        else:
            found = unfold(op, got.keys[h], got.values[h])
            assert int(got.phase) == state[3] % make_basis(op.basis, op.r).period
        for a, b in zip(found, state, strict=False):
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

# For programs in float64, whose rounding does not matter: half the time to compile.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


def quick_jit(function):
    return jax.jit(function, compiler_options=COMPILE_QUICKLY)


@functools.cache
def forward(name, method):
    """For float32: (x, resets, state) -> (state, out)."""
    return jax.jit(functools.partial(OPS[name].run, method=method))


@functools.cache
def forward64(name, method):
    """For float64: (x, resets, state) -> (state, out)."""
    return quick_jit(functools.partial(OPS[name].run, method=method))


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
def gradient64(name, method):
    return quick_jit(loss_and_gradient(name, method))


def expected_loss(name, x, floats, rest, resets, weights):
    """The loss of `loss_and_gradient` by the loops in numpy_attention."""
    op = OPS[name]
    states, out = expected(op, x, resets, join(floats, rest))
    if op.basis is None:
        last = [np.stack([s[i] for s in states]) for i in (0, 1)]
    else:
        basis = make_basis(op.basis, op.r)
        keys = [s[1][: basis.value_vectors] for s in states]
        if basis.key_vectors > basis.value_vectors:
            keys = [np.concatenate([a, s[2][None]]) for a, s in zip(keys, states, strict=True)]
        last = [np.stack(keys), np.stack([s[0][: basis.value_vectors] for s in states])]
    return np.vdot(out, weights) + sum(np.vdot(a, np.sin(np.arange(a.size))) for a in last)


def gradient_inputs(name, steps, seed=0, **options):
    """The arguments of `loss_and_gradient`, from the middle of a stream."""
    op = OPS[name]
    x, resets = make(op, steps, seed, saturated=True, **options)
    weights = np.random.default_rng([seed, 2]).normal(size=x.v.shape)
    return x, *split(make_state(op, seed)), resets, weights


def slow_unless(quick, cases):
    """Cases of parametrize, marked slow unless quick(*case)."""
    return [case if quick(*case) else pytest.param(*case, marks=pytest.mark.slow) for case in cases]
