"""Feed a model one input at a time, indefinitely: its memory state has a fixed size.

python examples/streaming.py
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp

import agalite

WIDTH, STEPS = 16, 500

memory = agalite.make_memory("agalite", WIDTH, layers=2, key=jax.random.key(0))
step = eqx.filter_jit(memory.step)
memory_state = memory.initial_state()
xs = jax.random.normal(jax.random.key(1), (STEPS, WIDTH))

# An episode begins with the first input, and the first call compiles.
memory_state, y = step(memory_state, xs[0], True)
start = time.perf_counter()
for x in xs[1:]:
    memory_state, y = step(memory_state, x, False)
seconds = time.perf_counter() - start
print(f"{STEPS - 1} steps, {1e6 * seconds / (STEPS - 1):.0f} microseconds each")
print(f"{memory.state_size:,} floats of state, at the first step as at the last")

# The whole sequence in one call gives the same outputs: this is what a learner computes.
resets = jnp.zeros(STEPS, bool).at[0].set(True)
_, ys = eqx.filter_jit(memory.scan)(memory.initial_state(), xs, resets)
difference = float(jnp.abs(ys[-1] - y).max())
print(f"step by step and all at once differ by {difference:.1e}")
assert difference < 1e-4
