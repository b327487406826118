"""The table of models that the contract is tested for. A new model joins by adding a row."""

import equinox as eqx
import jax
import jax.numpy as jnp

from agalite.memory import make_memory

SMALL = {"d_model": 6, "layers": 2, "heads": 2, "head_size": 4, "ffn_size": 5}
INPUT = 3

ROWS = {
    "agalite": ("agalite", SMALL | {"eta": 2}),
    "agalite r=5": ("agalite", SMALL | {"eta": 2, "r": 5, "horizon": (2, 50)}),
    "agalite published r=1": ("agalite", SMALL | {"eta": 2, "basis": "published"}),
    "agalite published r=4": ("agalite", SMALL | {"eta": 2, "basis": "published", "r": 4}),
    "agalite slots": ("agalite", SMALL | {"eta": 2, "basis": "slots", "r": 3}),
    "agalite rank1": ("agalite", SMALL | {"eta": 2, "basis": "rank1", "r": 2, "seed": 5}),
    "agalite elu1": ("agalite", SMALL | {"feature": "elu1", "r": 2}),
    "agalite dpfp": ("agalite", SMALL | {"feature": "dpfp", "nu": 2, "r": 3}),
    "agalite ungated": ("agalite", SMALL | {"eta": 2, "gating": False, "r": 2}),
    "agalite associative": ("agalite", SMALL | {"eta": 2, "r": 2, "method": "associative"}),
    "galite": ("galite", SMALL | {"eta": 2}),
    "galite dpfp": ("galite", SMALL | {"feature": "dpfp", "horizon": (2, 50)}),
    "galite ungated": ("galite", SMALL | {"eta": 2, "gating": False}),
    "linear": ("linear", SMALL),
    "linear outer": ("linear", SMALL | {"feature": "outer", "eta": 3}),
    "transformer": ("transformer", SMALL | {"context": 5}),
    "gtrxl": ("gtrxl", SMALL | {"memory": 5}),
    "gtrxl no cache": ("gtrxl", SMALL | {"memory": 4, "cache": False}),
    "gtrxl memory 1": ("gtrxl", SMALL | {"memory": 1}),
    "gru": ("gru", {"d_model": 6, "hidden_size": 7}),
    "gru horizon": ("gru", {"d_model": 6, "hidden_size": 7, "horizon": (2, 50)}),
    "lstm": ("lstm", {"d_model": 6, "hidden_size": 7, "horizon": (2, 50)}),
    "feedforward": ("feedforward", {"d_model": 6, "layers": 2, "ffn_size": 5}),
}


def build(row, *, dtype=None):
    """The model with weights and biases drawn at random, so that no term is zero by accident."""
    name, options = ROWS[row]
    memory = make_memory(name, INPUT, key=jax.random.key(3), **options)
    leaves, tree = jax.tree.flatten(memory)
    noisy = [x + 0.2 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)]
    memory = jax.tree.unflatten(tree, noisy)
    return memory if dtype is None else cast(memory, dtype)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def inputs(steps, *, seed=0, often=0.2):
    xs = jax.random.normal(jax.random.key(seed), (steps, INPUT))
    resets = jax.random.bernoulli(jax.random.key(seed + 1), often, (steps,))
    return xs, resets


def unrolled(memory, state, xs, resets):
    """Repeated `step`, one program: (state, ys)."""
    return jax.lax.scan(lambda s, x: memory.step(s, *x), state, (xs, resets))


def distance(a, b):
    """Largest difference, relative to the output's scale."""
    return float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-6))
