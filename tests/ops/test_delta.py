"""The Kronecker deltas: the formula, its error, its folding, and phases that stay exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpy_attention
from agalite.ops import BASES, agalite_attention, delta_approximation
from agalite.ops.agalite import initial_state
from agalite.ops.delta import advance_phase, make_basis, oscillators

EVERY_R = [1, 2, 3, 4, 5, 7, 8, 16, 31, 64]


@pytest.mark.parametrize("r", EVERY_R)
def test_is_the_papers_sum(r):
    m, n = np.mgrid[0:40, 0:40]
    want = np.vectorize(lambda a, b: numpy_attention.delta(int(a), int(b), r))(m, n)
    got = delta_approximation(m, n, r)
    assert got.dtype == np.float64
    assert got.shape == m.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("r", EVERY_R)
def test_published_is_the_cosines_of_linspace(r):
    m, n = np.mgrid[0:30, 0:30]
    angles = np.linspace(-np.pi, np.pi, r + 1)
    want = 2 / r * (np.cos(angles * m[..., None]) * np.cos(angles * n[..., None])).sum(-1)
    np.testing.assert_allclose(delta_approximation(m, n, r, "published"), want, rtol=0, atol=1e-11)


def test_tends_to_the_identity():
    """(2/r) sum = delta(m - n) + delta(m + n) + 2/r, and m + n < r: 2/r off everywhere."""
    m, n = np.mgrid[1:30, 1:30]
    for r in (64, 256, 1024):
        np.testing.assert_allclose(
            delta_approximation(m, n, r), np.eye(29) + 2 / r, rtol=0, atol=1e-12
        )


def test_scalars_and_large_steps():
    assert delta_approximation(3, 3, 8, "slots") == 1.0
    assert delta_approximation(3, 4, 8, "slots") == 0.0
    t = 10**15
    want = 2 / 7 * sum(numpy_attention.exact_cosine("paper", i, 7, t) ** 2 for i in range(8))
    np.testing.assert_allclose(delta_approximation(t, t, 7), want, rtol=1e-13)


def test_slots_are_exact_until_they_are_reused():
    t = np.arange(1, 21)
    np.testing.assert_array_equal(delta_approximation(t[:, None], t, 20, "slots"), np.eye(20))
    reused = delta_approximation(t[:, None], t, 19, "slots")
    assert reused[0, 19] == reused[19, 0] == 1.0
    assert (reused - np.eye(20)).sum() == 2.0


# --- Appendix E: error of the state at t = 100 ----------------------------------------------------


@functools.cache
def frobenius_error(basis, r, c, runs=5, d=128, steps=100):
    """|C~ - C| / |C| for constant gates c, normal keys and values; mean of the runs."""
    rng = np.random.default_rng(0)
    t = np.arange(1, steps + 1)
    delta = delta_approximation(t[:, None], t, r, basis)
    gate = c * (1 - c) ** (steps - t)
    errors = []
    for _ in range(runs):
        left, right = gate[:, None] * rng.normal(size=(2, steps, d))
        exact = left.T @ right
        errors.append(np.linalg.norm(left.T @ delta @ right - exact) / np.linalg.norm(exact))
    return float(np.mean(errors))


def with_vectors(count, basis):
    """An r that keeps `count` state vectors: K = r//2 + 1 for the cosines, r for the slots."""
    return count if basis == "slots" else 2 * count - 1


@pytest.mark.parametrize(
    ("vectors", "basis", "error"),
    [
        (4, "paper", 0.82),
        (4, "published", 0.79),
        (4, "slots", 0.36),
        (16, "paper", 0.11),
        (16, "published", 0.12),
        (16, "slots", 0.005),
    ],
)
def test_error_of_the_state(vectors, basis, error):
    r = with_vectors(vectors, basis)
    assert make_basis(basis, r).value_vectors == vectors
    assert frobenius_error(basis, r, 0.3) == pytest.approx(error, rel=0.25)


@pytest.mark.parametrize("c", [0.1, 0.3, 0.5])
def test_slots_have_the_smallest_error_for_the_same_state(c):
    error = {b: frobenius_error(b, with_vectors(4, b), c) for b in ("paper", "published", "slots")}
    assert error["slots"] < 0.8 * min(error["paper"], error["published"])


def test_slots_have_no_error_when_they_cover_the_stream():
    assert frobenius_error("slots", 100, 0.1) < 1e-14
    assert frobenius_error("paper", 100, 0.1) > 0.1


# --- folding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", range(1, 17))
def test_folding_keeps_half(r):
    paper, unfolded = make_basis("paper", r), make_basis("paper", r, fold=False)
    # The constant oscillator's keys are s: no vector more. Unfolded: r + 1, and s.
    assert paper.key_vectors == paper.value_vectors == r // 2 + 1
    assert unfolded.value_vectors == r + 1
    assert unfolded.key_vectors == r + 2
    assert sum(paper.numerator) == r + 1
    assert paper.denominator == (2.0 * r,) + (0.0,) * (r // 2)
    np.testing.assert_array_equal(paper.table[:, 0], 1.0)

    published = make_basis("published", r)
    # omega = 0 is among the published frequencies only when r is even.
    assert published.value_vectors == r // 2 + 1
    assert published.key_vectors == r // 2 + 1 + r % 2
    assert sum(published.numerator) == r + 1
    assert sum(published.denominator) == 2.0 * (r + 1)


@pytest.mark.parametrize("basis", ["paper", "published"])
@pytest.mark.parametrize("r", [1, 2, 3, 6, 7])
def test_folded_table_is_numpys_cosines(basis, r):
    b = make_basis(basis, r)
    for t in range(3 * b.period):
        want = [numpy_attention.exact_cosine(basis, i, r, t) for i in range(b.value_vectors)]
        np.testing.assert_allclose(b.table[t % b.period, : b.value_vectors], want, atol=1e-14)


# --- phases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 3, 14, 64, 2**31 - 1])
def test_phase_counts_from_one_after_a_reset(period):
    rng = np.random.default_rng(period)
    resets = rng.uniform(size=50) < 0.15
    start = (10**10) % period
    t, want = start, []
    for reset in resets:
        t = 1 if reset else t + 1
        want.append(t % period)
    got = jax.jit(advance_phase, static_argnums=2)(np.int32(start), resets, period)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)


def test_phase_does_not_overflow():
    period = 2**31 - 1
    start = period - 3
    got = jax.jit(advance_phase, static_argnums=2)(np.int32(start), np.zeros(6, bool), period)
    np.testing.assert_array_equal(got, [(start + 1 + i) % period for i in range(6)])


def test_phase_continues_across_chunks():
    resets = np.zeros(30, bool)
    resets[[4, 17]] = True
    run = jax.jit(advance_phase, static_argnums=2)
    whole = np.asarray(run(np.int32(5), resets, 7))
    phase, parts = np.int32(5), []
    for part in np.split(resets, 6):
        parts.append(np.asarray(run(phase, part, 7)))
        phase = parts[-1][-1]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(("basis", "r"), [("paper", 7), ("published", 7), ("published", 6)])
def test_ten_thousand_million_steps_later_the_cosines_are_exact(basis, r):
    """A stream that has run 10**10 steps, far beyond float32's and int32's counting."""
    gone, steps = 10**10, 24
    rng = np.random.default_rng(0)
    q, k, gamma = rng.uniform(0.1, 0.9, size=(3, steps, 1, 4))
    v, beta = rng.uniform(0.1, 0.9, size=(2, steps, 1, 3))
    never = np.zeros(steps, bool)
    begun = (np.zeros((r + 1, 3)), np.zeros((r + 1, 4)), np.zeros(4), gone)
    _, want = numpy_attention.per_head(
        numpy_attention.agalite_attention,
        q,
        k,
        v,
        beta,
        gamma,
        never,
        states=[begun],
        r=r,
        basis=basis,
        exact=True,
    )
    period = make_basis(basis, r).period
    with jax.enable_x64(True):
        run = jax.jit(lambda *args: agalite_attention(*args, r=r, basis=basis))
        start = initial_state(make_basis(basis, r), 1, 4, 3, jnp.dtype("float64"), None)
        inputs = (q, k, v, beta, gamma, never)
        _, fresh = run(*inputs, start)
        state, out = run(*inputs, start._replace(phase=np.int32(gone % period)))
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-13)
    assert int(state.phase) == (gone + steps) % period
    assert gone % period  # so that a stream that had lost count would differ:
    assert np.abs(np.asarray(fresh) - want).max() > 1e-3


# --- rank1 ----------------------------------------------------------------------------------------


def test_rank1_is_the_delta_on_average():
    t = np.arange(1, 7)
    draws = [
        delta_approximation(t[:, None], t, 8, "rank1", key=jax.random.key(seed))
        for seed in range(80)
    ]
    np.testing.assert_array_equal([np.diag(d) for d in draws], 1.0)  # a sign's square
    assert np.std([d[0, 1] for d in draws]) == pytest.approx(8**-0.5, rel=0.25)
    mean = np.mean(draws, axis=0)
    assert np.abs(mean - np.eye(6)).max() < 5.5 / np.sqrt(80 * 8)


def test_rank1_signs_are_a_function_of_key_and_step():
    basis = make_basis("rank1", 5)
    key = jax.random.key_data(jax.random.key(3))
    phases = jnp.array([1, 2, 1, 9])
    signs = np.asarray(oscillators(basis, phases, key, jnp.dtype("float32")))
    assert signs.shape == (4, 6)
    assert set(np.unique(signs[:, :5])) == {-1.0, 1.0}
    np.testing.assert_array_equal(signs[:, 5], 1.0)  # the normaliser's
    np.testing.assert_array_equal(signs[0], signs[2])
    assert (signs[0] != signs[1]).any()


def test_rank1_needs_a_key():
    with pytest.raises(ValueError, match=r"rank1.*key"):
        delta_approximation(1, 2, 4, "rank1")


@pytest.mark.parametrize("r", [0, -1, 1.5, "2", None, True])
@pytest.mark.parametrize("basis", BASES)
def test_bad_r_is_named(basis, r):
    with pytest.raises(ValueError, match=f"r={r!r} must be a whole number >= 1"):
        delta_approximation(1, 2, r, basis)


@pytest.mark.parametrize(("good", "bad"), [(2, 2.0), (1, True)])
def test_bad_r_is_refused_even_if_an_equal_good_one_was_seen(good, bad):
    make_basis("paper", good)
    with pytest.raises(ValueError, match=f"r={bad!r} must be a whole number"):
        make_basis("paper", bad)


def test_unknown_basis_is_named():
    with pytest.raises(
        ValueError, match=r"basis='cosine' is unknown.*paper.*published.*rank1.*slots"
    ):
        delta_approximation(1, 2, 4, "cosine")
