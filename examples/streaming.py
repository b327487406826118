"""Feed a model one input at a time, for as long as you like: its state never grows.

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
state = memory.initial_state()
xs = jax.random.normal(jax.random.key(1), (STEPS, WIDTH))

state, y = step(state, xs[0], True)  # an episode begins with this input; the first call compiles
start = time.perf_counter()
for x in xs[1:]:
    state, y = step(state, x, False)
seconds = time.perf_counter() - start
print(f"{STEPS - 1} steps, {1e6 * seconds / (STEPS - 1):.0f} microseconds each")
print(f"{memory.state_size:,} floats carried from step to step, at the first as at the last")

# The whole sequence in one call gives the same numbers: that is how one learns from it.
resets = jnp.zeros(STEPS, bool).at[0].set(True)
_, ys = eqx.filter_jit(memory.scan)(memory.initial_state(), xs, resets)
difference = float(jnp.abs(ys[-1] - y).max())
print(f"one by one and all at once differ by {difference:.1e}")
assert difference < 1e-4
