"""The attentions at saturated gates, one step and many, and the memory they take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.ops import galite_attention
from attention_cases import (
    COMPILE_QUICKLY,
    MAIN,
    OPS,
    assert_close,
    assert_finite,
    cast,
    expected,
    make,
    slow_unless,
)

# --- extremes -------------------------------------------------------------------------------------


@functools.cache
def finite_gradient(name, method):
    def loss(x, resets):
        _, out = OPS[name].run(x, resets, None, method)
        return jnp.sum(jnp.square(out)), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=COMPILE_QUICKLY)


@pytest.mark.parametrize("method", ["sequential", "associative", "chunked"])
@pytest.mark.parametrize("name", MAIN)
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
        assert_close(result[0][1], expected(op, case, resets)[1], 1e-5)


@pytest.mark.parametrize(
    ("name", "method"),
    slow_unless(
        lambda _, method: method in ("sequential", "chunked"),
        [(name, how) for name in MAIN for how in ("sequential", "associative", "chunked")],
    ),
)
def test_one_step(name, method):
    op = OPS[name]
    x, resets = cast(make(op, 1), np.float32)
    result = finite_gradient(name, method)(x, resets)
    assert_finite(result)
    assert_close(result[0][1], expected(op, x, resets)[1], 1e-5)


LONG = [
    *((name, how) for name in MAIN for how in ("sequential", "chunked")),
    ("paper", "associative"),
]


@pytest.mark.parametrize(
    ("name", "method", "steps"),
    slow_unless(
        lambda _, method, steps: method == "chunked" and steps == 300,
        [(*case, steps) for case in LONG for steps in (300, 4096)],
    ),
)
def test_many_steps(name, method, steps):
    """Almost no resets, gates from 1e-3 to 1. 300 steps are two of GaLiTe's segments."""
    op = OPS[name]
    x, resets = cast(make(op, steps, resets=2 / steps), np.float32)
    result = finite_gradient(name, method)(x, resets)
    assert_finite(result)
    assert_close(result[0][1], expected(op, x, resets)[1], 3e-5)


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
    compiled = run.lower(wide, wide, narrow, narrow, wide).compile(COMPILE_QUICKLY)
    matrices = steps * heads * width * feature * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * matrices
