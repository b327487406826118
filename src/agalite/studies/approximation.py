"""How far AGaLiTe's state is from GaLiTe's, as in Appendix E: random keys and values, gates that
are all the same constant."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agalite.ops.attention import agalite_attention, galite_attention
from agalite.ops.delta import make_basis


def measure(
    *, seeds: int, basis: str, r: Sequence[int], gates: Sequence[float], width: int = 128,
    steps: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    """Frobenius norms of C - C~ after so many steps, for `seeds` independent draws.

    At each r all bases have the same number of state vectors, r//2 + 1: that is what slots and the
    rank-1 trick count.
    """
    k, v = jax.random.normal(jax.random.key(0), (2, steps, seeds, width))
    rows = []
    for order in r:
        vectors = order // 2 + 1
        own = order if basis in ("paper", "published") else vectors
        compare = _comparison(k, v, own, basis)
        for gate in gates:
            error, size = (np.asarray(x, np.float64) for x in compare(jnp.float32(gate)))
            rows.append({
                "levels": {"r": order, "gate": f"{gate:g}", "vectors": vectors},
                "values": {"error": error, "relative_error": error / size},
            })  # fmt: skip
    return rows


def _comparison(k: jax.Array, v: jax.Array, r: int, basis: str) -> Any:
    """gate () -> the error (seeds,) and the norm of the exact state (seeds,).

    The draws are independent, so they pass as heads of one attention.
    """
    b = make_basis(basis, r)
    # As in `delta_approximation`: the approximation of C carries 2 / r, which the attention leaves
    # to its normaliser.
    scale = 2 / r if basis in ("paper", "published") else 1.0
    weights = jnp.asarray(scale * np.asarray(b.numerator), k.dtype)

    def compare(gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jnp.full(k.shape, gate)
        options: dict[str, Any] = {"method": "sequential"}
        exact, _ = galite_attention(k, k, v, gates, gates, **options)
        state, _ = agalite_attention(
            k, k, v, gates, gates, r=r, basis=basis, key=jax.random.key(1), **options
        )
        keys = state.keys[:, : b.value_vectors]
        near = jnp.einsum("r,hrv,hrk->hvk", weights, state.values, keys)
        return jnp.linalg.norm(exact.C - near, axis=(1, 2)), jnp.linalg.norm(exact.C, axis=(1, 2))

    return jax.jit(compare)
