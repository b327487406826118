"""A memory model of your own: two methods, and every trainer here can use it.

    python examples/custom_memory.py

The model keeps running means of its input at several rates. It uses one of our operators, so that
a sequence is computed in parallel where that is faster, and the base class `Memory`, which checks
the inputs and derives `step` and `scan`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite.memory import Memory
from agalite.ops import linear_recurrence
from agalite.testing import check_memory


class Averages(Memory[tuple[Array]]):
    """input (T, input_size) -> (T, width). State: speeds * input_size floats."""

    mix: Float[Array, "width speeds*input"]
    logit: Float[Array, " speeds"]  # of the decay, which so stays between 0 and 1
    input_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(self, input_size: int, width: int = 32, speeds: int = 4, *, key: PRNGKeyArray):
        self.input_size, self.output_size = input_size, width
        self.logit = jnp.log(2.0 ** jnp.arange(1, speeds + 1) - 1)  # decay 1/2, 3/4, 7/8, ...
        self.mix = jax.random.normal(key, (width, speeds * input_size)) / input_size**0.5

    def initial_state(self) -> tuple[Array]:
        return (jnp.zeros((len(self.logit), self.input_size)),)

    def _run(
        self, state: tuple[Array], xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[tuple[Array], Float[Array, "T width"]]:
        decay = jax.nn.sigmoid(self.logit)
        keep = jnp.broadcast_to(decay[:, None], (len(xs), *state[0].shape))
        means = linear_recurrence(keep, (1 - keep) * xs[:, None, :], state[0], resets)
        return (means[-1],), jnp.tanh(means.reshape(len(xs), -1) @ self.mix.T)


memory = Averages(8, key=jax.random.key(0))

# The contract: a sequence equals its inputs one by one, a reset forgets everything, and more.
check_memory(memory, longest=64)
print(f"{memory.parameter_count} parameters, {memory.state_size} floats of state: as promised")

# Learning: which of the first two numbers of the episode was larger, asked 15 steps later.
data = jax.random.normal(jax.random.key(2), (256, 15, 8))
label = data[:, 0, 0] > data[:, 0, 1]


def loss(parts: tuple[Averages, Array]) -> Array:
    memory, readout = parts
    _, ys = jax.vmap(memory.scan, in_axes=(None, 0))(memory.initial_state(), data)
    return jnp.mean(jax.nn.softplus(jnp.where(label, -1.0, 1.0) * (ys[:, -1] @ readout)))


@eqx.filter_jit
def learn(parts: tuple[Averages, Array]) -> tuple[Array, tuple[Averages, Array]]:
    value, gradient = eqx.filter_value_and_grad(loss)(parts)
    return value, jax.tree.map(lambda p, g: p - 1.0 * g, parts, gradient)


parts = (memory, jnp.zeros(32))
before, parts = learn(parts)
for _ in range(200):
    after, parts = learn(parts)
print(f"loss {float(before):.3f} -> {float(after):.3f}")
assert after < before
