"""The paper's operators in your own model, with plain JAX: no modules, no classes.

    python examples/plain_jax.py

`agalite.ops` takes queries, keys, values and gates of one sequence, time first, and returns the
memory state and the attention. The projections are yours: here five matrices in a dictionary. (For
whole models inside Flax there is `agalite.interop.flax`.)
"""

import jax
import jax.numpy as jnp

from agalite.ops import agalite_attention, elu1

TIME, WIDTH, HEADS, V = 64, 24, 2, 8

names = ("q", "k", "v", "beta", "gamma")
keys = jax.random.split(jax.random.key(0), len(names))
params = {
    name: jax.random.normal(key, (WIDTH, HEADS, V)) / WIDTH**0.5
    for name, key in zip(names, keys, strict=True)
}


def attend(params, xs, resets, memory_state=None):
    """xs (T, WIDTH), resets (T,) -> memory_state, (T, HEADS, V)."""
    q, k, v, beta, gamma = (jnp.einsum("td,dhv->thv", xs, params[name]) for name in names)
    return agalite_attention(
        elu1(q),
        elu1(k),
        v,
        jax.nn.sigmoid(beta),
        jax.nn.sigmoid(gamma),
        resets,
        memory_state,
        r=4,
        basis="slots",
    )


xs = jax.random.normal(jax.random.key(1), (TIME, WIDTH))
resets = jnp.zeros(TIME, bool).at[30].set(True)  # an episode begins with input 30
memory_state, out = jax.jit(attend)(params, xs, resets)
print("attention:", out.shape, "state:", jax.tree.map(jnp.shape, memory_state))

# The stream continues from the memory state, in chunks of any length.
half, first = jax.jit(attend)(params, xs[:40], resets[:40])
_, second = jax.jit(attend)(params, xs[40:], resets[40:], half)
assert jnp.allclose(jnp.concatenate([first, second]), out, atol=1e-5)

# Gradients, batches and compilation are JAX's own.
batch = jax.random.normal(jax.random.key(2), (3, TIME, WIDTH))
many = jax.vmap(attend, in_axes=(None, 0, None))


@jax.jit
@jax.grad
def gradient(params):
    return jnp.mean(jnp.square(many(params, batch, resets)[1]))


size = {name: float(jnp.abs(g).max()) for name, g in gradient(params).items()}
print("largest entry of each gradient:", {name: f"{value:.1e}" for name, value in size.items()})
assert all(0 < value < 1e3 for value in size.values())
