"""Approximations of the Kronecker delta, and the oscillators of AGaLiTe's memory (Section 4).

AGaLiTe replaces C_t = sum_i l_i (x) m_i by sum_ij delta^(i, j) l_i (x) m_j, with a delta^ that is a
sum of R products c_m(i) c_m(j). Then C_t is a sum of R outer products of running sums. A `Basis`
says which c_m:

* "paper": c_m(t) = cos(2 pi m t / r), m = 0 .. r, the equations to the letter. At r = 1 every
  cosine
  is 1 and the output does not depend on the query.
* "published": the authors' code, whose frequencies are shifted by pi: every cosine times (-1)^t.
* "slots": step t writes to accumulator t mod r only. Its delta^ errs only between steps that are a
  multiple of r apart, and it is exact as soon as r covers the stream.
* "rank1": random signs (Ollivier and Charpiat, 2015), the paper's ablation.

All but rank1 are periodic in t, so the phase is a small integer, exact after any number of steps.

Folding: for integer t, cos(2 pi k t / r) = cos(2 pi (r - k) t / r), so the running sums of k and
r - k are equal. Only k = 0 .. r // 2 are kept, each counted as often as it occurs. Where an
oscillator is constantly 1, its running sum of keys is the normaliser s_t (paper: k = 0).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from agalite import validation

BASES = ("paper", "published", "slots", "rank1")


@dataclass(frozen=True)
class Basis:
    """The oscillators that multiply AGaLiTe's writes, and the weights that read its running sums.

    table:       (period, key_vectors) c_m(t) at t mod period; None for rank1, which draws signs.
    numerator:   (value_vectors,)  weight of v~_m (k~_m . q) in the attention's numerator.
    denominator: (key_vectors,)    weight of k~_m . q in its denominator.

    The first `value_vectors` oscillators serve keys and values alike; a last one, constantly 1 and
    for keys only, is the normaliser s where no other oscillator is constant.
    """

    name: str
    r: int
    period: int
    table: np.ndarray | None
    numerator: tuple[float, ...]
    denominator: tuple[float, ...]

    @property
    def key_vectors(self) -> int:
        return len(self.denominator)

    @property
    def value_vectors(self) -> int:
        return len(self.numerator)


def cosine(k: Int[np.ndarray, "..."], t: Int[np.ndarray, "..."], r: int) -> np.ndarray:
    """cos(2 pi k t / r) in float64; the angle is reduced in integers and exact for any t."""
    return np.cos(2 * np.pi * ((k * t) % r) / r)


def make_basis(name: str, r: int, *, fold: bool = True) -> Basis:
    """The basis of this name.

    **Arguments:**

    - `name`: "paper", "published", "slots" or "rank1".
    - `r`: the approximation parameter; for "slots" and "rank1" the number of state vectors.
    - `fold`: `False` keeps the r + 1 oscillators and the s of Algorithm 4.

    **Returns:**

    A `Basis`.
    """
    validation.check_one_of("basis", name, BASES)
    validation.check_integer("r", r, minimum=1)
    return _make_basis(name, int(r), fold)


@lru_cache
def _make_basis(name: str, r: int, fold: bool) -> Basis:
    if name == "slots":
        # Step t writes to slot t mod r only. Each key is in one slot, so s is the slots' sum.
        return Basis(name, r, r, np.eye(r), (1.0,) * r, (1.0,) * r)
    if name == "rank1":
        # E[sign_m(i) sign_m(j)] = delta_ij (Ollivier and Charpiat, 2015), averaged over r draws.
        return Basis(name, r, 2**31 - 1, None, (1.0 / r,) * r, (0.0,) * r + (1.0,))

    kept = r // 2 + 1 if fold else r + 1
    period = r if name == "paper" else lcm(2, r)
    t, k = np.arange(period)[:, None], np.arange(kept)
    table = cosine(k, t, r)
    normaliser = 2.0 * r
    if name == "published":
        # linspace(-pi, pi, r + 1) is omega_k - pi: every cosine times (-1)^t.
        table = table * np.where(t % 2 == 0, 1.0, -1.0)
        normaliser = 2.0 * (r + 1)
    counts = [float(len({int(i), r - int(i)})) if fold else 1.0 for i in k]
    constant = np.flatnonzero(np.all(table == 1.0, axis=0)) if fold else np.array([], int)
    denominator = np.zeros(kept + (constant.size == 0))
    denominator[constant[0] if constant.size else kept] = normaliser
    if constant.size == 0:
        table = np.concatenate([table, np.ones((period, 1))], axis=1)
    return Basis(name, r, period, table, tuple(counts), tuple(denominator.tolist()))


def advance_phase(phase: Int[Array, ""], resets: Array, period: int) -> Int[Array, " T"]:
    """(T,) t mod period of each input, counting from 1 at the first input after a reset."""
    index = jnp.arange(resets.shape[0], dtype=jnp.int32)
    latest = jax.lax.cummax(jnp.where(resets, index, -1))
    # Both branches stay below 2**31: the stored phase is < period, and period <= 2**31 - 1 only
    # for rank1, where the sum is taken unsigned before it is reduced.
    since_start = (phase.astype(jnp.uint32) + (index + 1).astype(jnp.uint32)) % np.uint32(period)
    since_reset = (index - latest + 1) % period
    return jnp.where(latest >= 0, since_reset, since_start.astype(jnp.int32))


def oscillators(
    basis: Basis, phases: Int[Array, " T"], key: Array | None, dtype: jnp.dtype
) -> Float[Array, "T R"]:
    """c_m(t) at each of `phases`: (T, key_vectors)."""
    if basis.table is not None:
        return jnp.asarray(basis.table, dtype)[phases]
    signs = random_signs(key, phases, basis.r, dtype)
    return jnp.concatenate([signs, jnp.ones_like(signs[:, :1])], axis=1)


def random_signs(
    key: Array | None, phases: Int[Array, " T"], count: int, dtype: jnp.dtype
) -> Float[Array, "T R"]:
    """(T, count) of +-1; a function of key and phase only, so scanning and stepping agree."""
    if key is None:
        raise ValueError("basis='rank1' draws random signs: its state must carry a key")

    def draw(phase: Array) -> Array:
        # Bits of a fixed width: other generators draw differently when x64 is on.
        bits = jax.random.bits(jax.random.fold_in(key, phase), (count,), jnp.uint32)
        return jnp.where(bits >> 31 == 0, 1, -1).astype(dtype)

    return jax.vmap(draw)(phases)


def delta_approximation(
    m: Int[np.ndarray, "..."] | int,
    n: Int[np.ndarray, "..."] | int,
    r: int,
    basis: str = "paper",
    *,
    key: Array | None = None,
) -> np.ndarray:
    """delta^_mn in float64, elementwise over m and n (Section 4).

    **Arguments:**

    - `m`, `n`: integers, broadcast against each other.
    - `r`: the approximation parameter; for "slots" and "rank1" the number of state vectors.
    - `basis`: "paper", "published", "slots" or "rank1".
    - `key`: the random signs of "rank1".
    """
    b = make_basis(basis, r)
    m, n = np.broadcast_arrays(np.asarray(m), np.asarray(n))
    if b.table is None:
        everything, where = np.unique(np.concatenate([m.ravel(), n.ravel()]), return_inverse=True)
        drawn = random_signs(key, jnp.asarray(everything, jnp.int32), r, jnp.dtype("float32"))
        left, right = np.asarray(drawn, np.float64)[where].reshape(2, *m.shape, r)
    else:
        left, right = (b.table[x % b.period, : b.value_vectors] for x in (m, n))
    # In the cosine bases the delta carries 2 / r, not the operator's 1 / (2r): Algorithm 4 divides
    # by four times too much (a constant that the next layer absorbs).
    scale = 2 / r if basis in ("paper", "published") else 1.0
    return scale * np.sum(left * right * np.asarray(b.numerator), axis=-1)
