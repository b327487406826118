"""The paper's attentions at saturated gates, one step and many, and the memory they take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.ops import galite_attention
from attention_cases import METHODS, OPS, ask_oracle, assert_close, assert_finite, cast, make

# --- extremes -------------------------------------------------------------------------------------


@functools.cache
def finite_gradient(name, method):
    def loss(x, resets):
        _, out = OPS[name].run(x, resets, None, method)
        return jnp.sum(jnp.square(out)), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


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
