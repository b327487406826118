"""The paper's attentions: every operator and method against the numpy loops of `oracle.py`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from agalite.ops import (
    AGaLiTeState,
    MatrixState,
    Outer,
    agalite_attention,
    dpfp,
    elu1,
    galite_attention,
    linear_attention,
    relu,
    softmax_attention,
    xl_attention,
)
from agalite.ops.attention import EPSILON
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
        oracle.agalite_attention, *x, resets, states=states, r=op.r, basis=op.basis,
        signs=lambda t: sign_table(dtype)[t],
    )  # fmt: skip


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


@pytest.mark.parametrize("method", ["associative", "chunked"])
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

# Each length is compiled once; 35 is more than one of GaLiTe's chunks.
LENGTHS = {"chunked": (1, 6, 35), "sequential": (1, 6), "associative": (1, 6)}
CHUNKINGS = [(name, "chunked") for name in DIFFERENT if name != "paper ungated"] + [
    (name, method) for name in ("galite", "paper") for method in ("sequential", "associative")
]


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


def assert_trees(got, want, tolerance=1e-9):
    got, want = (jax.tree_util.tree_leaves_with_path(t) for t in (got, want))
    for (path, a), (other, b) in zip(got, want, strict=True):
        assert path == other
        assert np.shape(a) == np.shape(b), path
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max()), path


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


# --- extremes -------------------------------------------------------------------------------------


@functools.cache
def finite_gradient(name, method):
    def loss(x, resets):
        _, out = OPS[name].run(x, resets, None, method)
        return jnp.sum(jnp.square(out)), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def assert_finite(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert np.isfinite(np.asarray(leaf)).all(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("method", ["sequential", "associative", "chunked"])
@pytest.mark.parametrize("name", ["linear", "galite", "paper"])
def test_finite_at_saturated_gates_and_zero_inputs(name, method):
    op = OPS[name]
    x, resets = cast(make(op, 12), np.float32)
    cases = [jax.tree.map(np.zeros_like, x), x._replace(q=jax.tree.map(np.zeros_like, x.q))]
    if op.gated:
        for b in (0, 1):
            for g in (0, 1):
                gamma = jax.tree.map(lambda a, g=g: np.full_like(a, g), x.gamma)
                cases.append(x._replace(beta=np.full_like(x.beta, b), gamma=gamma))
    for case in cases:
        result = finite_gradient(name, method)(case, resets)
        assert_finite(result)
        assert_close(result[0][1], ask_oracle(op, case, resets)[1], 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["linear", "galite", "paper"])
def test_one_step(name, method):
    op = OPS[name]
    x, resets = cast(make(op, 1), np.float32)
    result = finite_gradient(name, method)(x, resets)
    assert_finite(result)
    assert_close(result[0][1], ask_oracle(op, x, resets)[1], 1e-5)


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, how) for name in ("linear", "galite", "paper") for how in ("sequential", "chunked")]
    + [("paper", "associative")],
)
def test_4096_steps(name, method):
    """Almost no resets, gates from 1e-3 to 1: finite, and still the oracle's numbers."""
    op = OPS[name]
    x, resets = cast(make(op, 4096, resets=0.0005), np.float32)
    result = finite_gradient(name, method)(x, resets)
    assert_finite(result)
    assert_close(result[0][1], ask_oracle(op, x, resets)[1], 3e-5)


# --- AGaLiTe: folding and limits ------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["paper", "published"])
@pytest.mark.parametrize("r", range(1, 9))
def test_folding_changes_nothing(basis, r):
    op = agalite(basis, r)
    x, resets = make(op, 40, seed=r)
    run = jax.jit(functools.partial(op.run, method="sequential"))
    with jax.enable_x64(True):
        state, out = run(x, resets, None)
    states, want = ask_oracle(op, x, resets)
    assert state.values.shape == (H, r // 2 + 1, V)
    np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-10)
    assert_state(op, state, states, 1e-10)


@pytest.mark.parametrize("method", ["sequential", "associative", "chunked"])
@pytest.mark.parametrize(("basis", "r"), [("paper", 4), ("published", 3)])
def test_unfolded_is_the_letter(basis, r, method):
    op = agalite(basis, r)
    x, resets = make(op, 40)
    with jax.enable_x64(True):
        run = jax.jit(lambda *a: agalite_attention(*a, r=r, basis=basis, fold=False, method=method))
        state, out = run(*x, resets)
    states, want = ask_oracle(op, x, resets)
    np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-10)
    for h in range(H):
        assert_close(state.values[h], states[h][0], 1e-10)
        assert_close(state.keys[h], np.concatenate([states[h][1], states[h][2][None]]), 1e-10)


def test_at_r_1_the_papers_attention_ignores_the_query():
    """Findings 1.3: a_t = v~_t (s . q) / (s . q), a moving average of the values."""
    op = agalite("paper", 1)
    x, resets = make(op, 40)
    other = x._replace(q=make(op, 40, seed=8)[0].q)
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(op.run, method="auto"))
        outs = [run(a, resets, None)[1] for a in (x, other)]
    average = np.zeros((40, H, V))
    for t in range(40):
        before = 0 if resets[t] or t == 0 else average[t - 1]
        average[t] = (1 - x.beta[t]) * before + x.beta[t] * x.v[t]
    lowest = min(np.abs(normaliser(a, resets)).min() for a in (x, other))
    assert lowest > 1e-3  # or EPSILON would be no small change
    for out in outs:
        assert (
            np.abs(np.asarray(out) - average).max()
            <= EPSILON / (2 * lowest) * np.abs(average).max()
        )
    slots = agalite("slots", 2)
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(slots.run, method="auto"))
        a, b = (np.asarray(run(y, resets, None)[1]) for y in (x, other))
    assert np.abs(a - b).max() > 0.01  # where it does not ignore it


def normaliser(x, resets):
    """s_t . q_t (T, H)."""
    x = dense(x)
    s = oracle.linear_recurrence(1 - x.gamma, x.gamma * x.k, None, resets)
    return np.einsum("thk,thk->th", s, x.q)


@pytest.mark.parametrize("method", ["sequential", "chunked"])
def test_slots_that_cover_the_stream_are_galite(method):
    x, resets = make(OPS["galite"], 40)
    with jax.enable_x64(True):
        _, out = jax.jit(functools.partial(agalite("slots", 40).run, method=method))(
            x, resets, None
        )
        _, galite = forward("galite", "chunked")(x, resets, None)
        _, fewer = jax.jit(functools.partial(agalite("slots", 5).run, method=method))(
            x, resets, None
        )
    np.testing.assert_allclose(out, galite, rtol=1e-9, atol=1e-12)
    assert np.abs(np.asarray(fewer) - np.asarray(galite)).max() > 1e-3


def test_the_papers_limit_is_a_quarter_of_galite():
    """Findings 1.5: for r > 2 T delta^ is delta + 2/r, but a_t divides by 2r, not r/2."""
    r, steps = 128, 40
    op = agalite("paper", r)
    x, resets = make(op, steps)
    with jax.enable_x64(True):
        _, out = jax.jit(functools.partial(op.run, method="auto"))(x, resets, None)
        _, galite = forward("galite", "auto")(x, resets, None)
    mean = oracle.linear_recurrence(1 - x.beta, x.beta * x.v, None, resets)  # v~^0
    want = np.asarray(galite) + 2 / r * mean
    error = 4 * np.asarray(out) - want
    assert np.abs(error).max() <= 2 * EPSILON / normaliser(x, resets).min() * np.abs(want).max()


# --- rank1 ----------------------------------------------------------------------------------------


def test_rank1_needs_a_key_and_keeps_it():
    op = OPS["rank1"]
    x, _ = cast(make(op, 5), np.float32)
    with pytest.raises(ValueError, match=r"rank1.*key"):
        agalite_attention(*x, basis="rank1", r=2)
    typed, raw = (
        agalite_attention(*x, basis="rank1", r=2, key=key)
        for key in (jax.random.key(5), jax.random.PRNGKey(5))
    )
    assert_trees(typed, raw, 0)
    np.testing.assert_array_equal(typed[0].signs, KEY)
    other = agalite_attention(*x, basis="rank1", r=2, key=jax.random.key(6))[1]
    assert np.abs(np.asarray(other) - np.asarray(typed[1])).max() > 1e-3


def test_rank1_is_galite_on_average():
    op = OPS["rank1"]
    x, resets = cast(make(op, 12, resets=0), np.float32)
    keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(0), 3000))
    run = jax.jit(jax.vmap(lambda key: agalite_attention(*x, r=4, basis="rank1", key=key)[1]))
    outs = np.asarray(run(keys), np.float64)
    _, galite = ask_oracle(OPS["galite"], x, resets)
    standard_error = outs.std(0) / np.sqrt(len(outs))
    assert (np.abs(outs.mean(0) - galite) < 6 * standard_error + 1e-5).all()
    assert standard_error.max() < 0.05 * np.abs(galite).max()


# --- softmax and Transformer-XL -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "window"), [(1, None), (9, 0), (9, 3), (70, None), (130, 5), (130, 500), (1100, 20)]
)
def test_softmax_equals_the_oracle(steps, window):
    rng = np.random.default_rng(steps)
    q, k, v = 2 * rng.normal(size=(3, steps, H, V))
    resets = rng.uniform(size=steps) < 0.03
    run = jax.jit(functools.partial(softmax_attention, window=window))
    single = [a.astype(np.float32) for a in (q, k, v)]
    with jax.enable_x64(True):
        out = run(q, k, v, resets)
    _, want = oracle.per_head(oracle.softmax_attention, q, k, v, resets, window=window)
    assert_close(out, want, 1e-9)
    if steps < 100:
        _, want = oracle.per_head(oracle.softmax_attention, *single, resets, window=window)
        assert_close(run(*single, resets), want, 1e-5)


def xl_inputs(steps, before, longest, seed=0):
    rng = np.random.default_rng([seed, steps, before, longest])
    q = rng.normal(size=(steps, H, V))
    k, v = rng.normal(size=(2, before + steps, H, V))
    relative = rng.normal(size=(longest + 1, H, V))
    u, w = rng.normal(size=(2, H, V))
    begin, starts = 0 if before == 0 else int(rng.integers(0, before)), []
    for t in range(steps):
        begin = before + t if rng.uniform() < 0.05 else begin
        starts.append(begin)
    return q, k, v, relative, u, w, np.array(starts, np.int32)


@pytest.mark.parametrize(
    ("steps", "before", "longest"),
    [(1, 0, 0), (1, 4, 4), (9, 4, 4), (9, 2, 4), (9, 30, 4), (70, 64, 64), (130, 8, 8), (5, 0, 40)],
)
def test_xl_equals_the_oracle(steps, before, longest):
    inputs = xl_inputs(steps, before, longest)
    want = oracle.xl_attention(*inputs)
    run = jax.jit(xl_attention)
    with jax.enable_x64(True):
        assert_close(run(*inputs), want, 1e-9)
    assert_close(run(*(cast(a, np.float32) for a in inputs)), want, 1e-5)


def test_xl_chunking_is_a_sliding_window():
    """Two halves, the second with the first's last M keys before it, are the whole."""
    q, k, v, relative, u, w, starts = cast(xl_inputs(20, 0, 6), np.float32)
    run = jax.jit(xl_attention)
    whole = run(q, k, v, relative, u, w, starts)
    first = run(q[:9], k[:9], v[:9], relative, u, w, starts[:9])
    second = run(q[9:], k[3:], v[3:], relative, u, w, np.maximum(starts[9:] - 3, 0))
    assert_close(np.concatenate([first, second]), whole, 1e-5)


@pytest.mark.parametrize("which", ["softmax", "xl"])
def test_windowed_gradient_is_the_oracles_slope(which):
    rng = np.random.default_rng(4)
    *inputs, starts = xl_inputs(70, 0 if which == "softmax" else 6, 5)
    weights = rng.normal(size=inputs[0].shape)
    if which == "softmax":
        resets = rng.uniform(size=70) < 0.05
        inputs = inputs[:3]

        def run(*a):
            return softmax_attention(*a, resets, window=5)

        def reference(*a):
            return oracle.per_head(oracle.softmax_attention, *a, resets, window=5)[1]
    else:

        def run(*a):
            return xl_attention(*a, starts)

        def reference(*a):
            return oracle.xl_attention(*a, starts)

    with jax.enable_x64(True):
        slopes = jax.jit(jax.grad(lambda a: jnp.vdot(run(*a), weights)))(tuple(inputs))
    direction = [rng.normal(size=a.shape) for a in inputs]
    up, down = (
        np.vdot(reference(*(a + s * d for a, d in zip(inputs, direction, strict=True))), weights)
        for s in (1e-6, -1e-6)
    )
    found = [np.vdot(g, d) for g, d in zip(slopes, direction, strict=True)]
    assert abs(sum(found) - (up - down) / 2e-6) < 1e-6 * np.abs(found).max()
    assert_finite(slopes)


def test_softmax_of_enormous_scores_is_finite():
    q = np.full((9, H, V), 1e15, np.float32)
    v = np.random.default_rng(0).normal(size=q.shape).astype(np.float32)
    both = jax.value_and_grad(lambda a: softmax_attention(a, a, v).sum())
    assert_finite(both(q))
    assert_finite(jax.jit(both)(q))  # compiled, a score may be computed twice, and rounded so
    assert_finite(jax.jit(both)(q * np.random.default_rng(1).normal(size=q.shape).astype(q.dtype)))


# --- features -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp_is_the_published_loop(nu):
    """Schlag et al. (2021), Appendix: x_i x_(i - j) of x = relu([k, -k]), j = 1 .. nu."""
    k = np.random.default_rng(0).normal(size=(4, 2, 5)).astype(np.float32)
    x = np.maximum(np.concatenate([k, -k], axis=-1), 0)
    want = np.zeros((4, 2, 2 * nu * 5), np.float32)
    for j in range(1, nu + 1):
        for i in range(10):
            want[..., (j - 1) * 10 + i] = x[..., i] * x[..., (i - j) % 10]
    np.testing.assert_allclose(dpfp(jnp.asarray(k), nu), want, rtol=1e-6)


def test_elu1_is_positive_and_relu_is_not_negative():
    x = np.linspace(-15, 15, 301).astype(np.float32)
    assert (elu1(x) > 0).all()
    assert (np.diff(elu1(x)) >= 0).all()
    np.testing.assert_allclose(elu1(x), np.where(x > 0, x + 1, np.exp(x)), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(relu(x), np.maximum(x, 0))


def test_outer_is_f_of_the_outer_product():
    a, b = np.arange(6.0).reshape(1, 2, 3), np.arange(8.0).reshape(1, 2, 4)
    want = np.stack([np.outer(a[0, h], b[0, h]).ravel() for h in range(2)])[None]
    np.testing.assert_array_equal(Outer(a, b).expand(), want)


# --- memory ---------------------------------------------------------------------------------------


def test_galite_never_stores_a_matrix_for_every_step():
    heads, width, feature = 2, 32, 128

    def loss(q, k, v, beta, gamma):
        _, out = galite_attention(q, k, v, beta, gamma, method="chunked")
        return jnp.sum(out)

    steps = 1024
    wide = jax.ShapeDtypeStruct((steps, heads, feature), jnp.float32)
    narrow = jax.ShapeDtypeStruct((steps, heads, width), jnp.float32)
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
    compiled = run.lower(wide, wide, narrow, narrow, wide).compile()
    matrices = steps * heads * width * feature * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * matrices


# --- bad input ------------------------------------------------------------------------------------


def good():
    x, resets = cast(make(OPS["paper"], 6), np.float32)
    return dict(dense(x)._asdict(), resets=resets)


def nan_at(a):
    a = np.array(a)
    a[2, 1, 0] = np.nan
    return a


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": zeros(6, 2)}, r"v has shape \(6, 2\); expected \(T, H, V\)"),
        ({"k": zeros(6, 2, 7)}, r"k has shape \(6, 2, 7\); expected \(6, 2, 8\)"),
        ({"k": zeros(5, 2, 8)}, r"k has shape \(5, 2, 8\); expected \(6, 2, 8\)"),
        ({"q": zeros(6, 3, 8)}, r"q has shape \(6, 3, 8\); expected \(6, 2, 8\)"),
        ({"q": zeros(5, 2, 8)}, r"q has shape \(5, 2, 8\)|expected \(5"),
        ({"beta": zeros(6, 2, 8)}, r"beta has shape \(6, 2, 8\); expected \(6, 2, 3\)"),
        ({"gamma": zeros(6, 2, 3)}, r"gamma has shape \(6, 2, 3\); expected \(6, 2, 8\)"),
        ({"resets": np.zeros(7, bool)}, r"resets has shape \(7,\); expected \(6,\)"),
        ({"k": Outer(zeros(6, 2, 2), zeros(6, 2, 4))}, "k and q must both be"),
        ({"beta": None}, "beta=None but the other gate is given"),
        ({"gamma": None}, "gamma=None but the other gate is given"),
        ({"method": "fast"}, "method='fast' is unknown.*associative, auto, chunked, sequential"),
        ({"q": nan_at(zeros(6, 2, 8))}, r"q\[2, 1, 0\] is nan"),
        ({"v": nan_at(zeros(6, 2, 3))}, r"v\[2, 1, 0\] is nan"),
        ({"beta": nan_at(zeros(6, 2, 3))}, r"beta\[2, 1, 0\] is nan"),
        ({"gamma": np.full((6, 2, 8), np.inf, np.float32)}, r"gamma\[0, 0, 0\] is inf"),
        ({"state": MatrixState(zeros(2, 3, 7), zeros(2, 7))}, r"state does not belong.*expected"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [galite_attention, agalite_attention])
def test_bad_input_is_named(function, change, message):
    with pytest.raises(ValueError, match=message):
        function(**(good() | change))


@pytest.mark.parametrize("function", [linear_attention, galite_attention, agalite_attention])
def test_no_steps(function):
    arguments = {name: a[:0] for name, a in good().items()}
    if function is linear_attention:
        del arguments["beta"], arguments["gamma"]
    with pytest.raises(ValueError, match="v has length 0 along time"):
        function(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "r=0 must be a whole number >= 1"),
        ({"r": 1.5}, r"r=1\.5 must be a whole number >= 1"),
        ({"basis": "fourier"}, "basis='fourier' is unknown; choose one of: paper, "),
    ],
)  # fmt: skip
def test_bad_basis_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        agalite_attention(**(good() | change))


def test_state_of_another_basis_is_refused():
    state, _ = agalite_attention(**good(), r=7)
    with pytest.raises(
        ValueError, match=r"state does not belong.*keys\(2, 4, 8\).*keys\(2, 1, 8\)"
    ):
        agalite_attention(**good(), state=state, r=1)
    with pytest.raises(ValueError, match=r"rank1.*key"):
        agalite_attention(**good(), state=state, r=3, basis="rank1")
    with_signs = state._replace(signs=KEY)
    with pytest.raises(ValueError, match="state does not belong"):
        agalite_attention(**good(), state=with_signs, r=7)
    with pytest.raises(ValueError, match="state does not belong"):
        galite_attention(**good(), state=state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": zeros(6, 2, 4)}, r"k has shape \(6, 2, 4\)"),
        ({"v": zeros(5, 2, 3)}, r"expected \(5, 2, 3\)|v has shape \(5, 2, 3\)"),
        ({"window": -1}, "window=-1 must be a whole number >= 0"),
        ({"window": 2.5}, r"window=2\.5 must be a whole number >= 0"),
        ({"resets": np.zeros(2, bool)}, r"resets has shape \(2,\); expected \(6,\)"),
        ({"q": nan_at(zeros(6, 2, 3))}, r"q\[2, 1, 0\] is nan"),
        ({"q": zeros(0, 2, 3), "k": zeros(0, 2, 3), "v": zeros(0, 2, 3)}, "v has length 0"),
    ],
)
def test_bad_input_of_softmax_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        softmax_attention(**({name: zeros(6, 2, 3) for name in "qkv"} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": zeros(9, 2, 3)}, r"v has shape \(9, 2, 3\)|expected \(9, 2, 3\)"),
        ({"q": zeros(11, 2, 3), "starts": np.zeros(11, np.int32)}, "k has 10 steps, fewer than"),
        ({"relative": zeros(5, 2, 4)}, r"relative has shape \(5, 2, 4\); expected \(M\+1, 2, 3\)"),
        ({"starts": np.zeros(5, np.int32)}, r"starts has shape \(5,\); expected \(6,\)"),
        ({"content_bias": zeros(2, 4)}, r"content_bias has shape \(2, 4\); expected \(2, 3\)"),
        ({"position_bias": zeros(3)}, r"position_bias has shape \(3,\); expected \(2, 3\)"),
        ({"relative": nan_at(zeros(5, 2, 3))}, r"relative\[2, 1, 0\] is nan"),
        ({"q": zeros(0, 2, 3), "starts": np.zeros(0, np.int32)}, "q has length 0"),
    ],
)  # fmt: skip
def test_bad_input_of_xl_is_named(change, message):
    inputs = {
        "q": zeros(6, 2, 3), "k": zeros(10, 2, 3), "v": zeros(10, 2, 3), "relative": zeros(5, 2, 3),
        "content_bias": zeros(2, 3), "position_bias": zeros(2, 3), "starts": np.zeros(6, np.int32),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        xl_attention(**(inputs | change))


@pytest.mark.parametrize("nu", [0, 1.5])
def test_bad_nu_is_named(nu):
    with pytest.raises(ValueError, match=f"nu={nu!r} must be a whole number >= 1"):
        dpfp(zeros(2, 3), nu)
