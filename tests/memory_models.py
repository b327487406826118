"""Small memory models for tests. A new model joins the tests of the contract by adding a row."""

import jax
import jax.numpy as jnp
import numpy as np

from agalite.memory import make_memory

SMALL = {"d_model": 6, "layers": 1, "heads": 2, "head_size": 4, "ffn_size": 5}
INPUT = 3
DIAGONAL = {"d_model": 6, "layers": 1, "ffn_size": 5, "hidden_size": 4}

# One row for each model, with all tests. The rows of OTHERS differ in an option.
QUICK = {
    "agalite": ("agalite", SMALL | {"layers": 2, "eta": 2}),
    "galite": ("galite", SMALL | {"eta": 2}),
    "linear": ("linear", SMALL),
    "transformer": ("transformer", SMALL | {"context": 5}),
    "gtrxl": ("gtrxl", SMALL | {"memory": 5}),
    "gru": ("gru", {"d_model": 6, "hidden_size": 7}),
    "lstm": ("lstm", {"d_model": 6, "hidden_size": 7, "horizon": (2, 50)}),
    "lru": ("lru", DIAGONAL),
    "s5": ("s5", DIAGONAL | {"blocks": 2}),
    "rtu": ("rtu", DIAGONAL),
    "mingru": ("mingru", DIAGONAL),
    "mlstm": ("mlstm", SMALL),
    "deltanet": ("deltanet", SMALL | {"d_conv": 3}),
    "mamba2": ("mamba2", SMALL | {"d_state": 5}),
    "ffm": ("ffm", SMALL | {"head_size": 2, "contexts": 3}),
    "feedforward": ("feedforward", {"d_model": 6, "layers": 1, "ffn_size": 5}),
}
OTHERS = {
    "agalite slots": ("agalite", SMALL | {"eta": 2, "basis": "slots", "r": 3}),
    "agalite r=5": ("agalite", SMALL | {"eta": 2, "r": 5, "horizon": (2, 50)}),
    "agalite published r=1": ("agalite", SMALL | {"eta": 2, "basis": "published"}),
    "agalite published r=4": ("agalite", SMALL | {"eta": 2, "basis": "published", "r": 4}),
    "agalite rank1": ("agalite", SMALL | {"layers": 2, "eta": 2, "basis": "rank1", "r": 2}),
    "agalite elu1": ("agalite", SMALL | {"feature": "elu1", "r": 2}),
    "agalite dpfp": ("agalite", SMALL | {"feature": "dpfp", "nu": 2, "r": 3}),
    "agalite ungated": ("agalite", SMALL | {"eta": 2, "gating": False, "r": 2}),
    "agalite associative": ("agalite", SMALL | {"eta": 2, "r": 2, "method": "associative"}),
    "galite dpfp": ("galite", SMALL | {"feature": "dpfp", "horizon": (2, 50)}),
    "galite published decay": ("galite", SMALL | {"eta": 2, "decay": "published"}),
    "galite ungated": ("galite", SMALL | {"eta": 2, "gating": False}),
    "linear outer": ("linear", SMALL | {"feature": "outer", "eta": 3}),
    "gtrxl no cache": ("gtrxl", SMALL | {"layers": 2, "memory": 4, "cache": False}),
    "gtrxl memory 1": ("gtrxl", SMALL | {"memory": 1}),
    "mlstm exp": ("mlstm", SMALL | {"forget_gate": "exp", "horizon": (2, 50)}),
    "deltanet without convolution": ("deltanet", SMALL | {"d_conv": 1, "horizon": (2, 50)}),
    "mamba2 horizon": ("mamba2", SMALL | {"d_state": 3, "d_conv": 2, "horizon": (2, 50)}),
    "ffm associative": ("ffm", SMALL | {"method": "associative", "horizon": (2, 50)}),
    "gru without embedding": ("gru", {"hidden_size": 7, "embedding": False}),
    "lru horizon": ("lru", DIAGONAL | {"layers": 2, "horizon": (2, 50), "method": "associative"}),
    "s5 horizon": ("s5", DIAGONAL | {"blocks": 1, "horizon": (2, 50)}),
    "rtu nonlinear": ("rtu", DIAGONAL | {"variant": "nonlinear", "horizon": (2, 50)}),
    "rtu nonlinear tanh": ("rtu", DIAGONAL | {"variant": "nonlinear", "activation": "tanh"}),
    "mingru horizon": ("mingru", DIAGONAL | {"horizon": (2, 50), "method": "chunked"}),
    "memax deltanet": ("memax", {"cell": "DeltaNet", "d_model": 9, "layers": 1}),
    "memax gru": ("memax", {"cell": "GRU", "d_model": 6, "layers": 2}),
    "memax fart": ("memax", {"cell": "FART", "d_model": 9, "layers": 1}),
    "gru horizon": ("gru", {"d_model": 6, "hidden_size": 7, "horizon": (2, 50)}),
}
ROWS = QUICK | OTHERS


def build(row):
    """The model of a row, with noise on all weights and biases, so that no term is zero."""
    name, options = ROWS[row]
    memory = make_memory(name, INPUT, key=jax.random.key(3), **options)
    rng = np.random.default_rng(0)

    def noisy(x):
        noise = 0.2 * rng.normal(size=x.shape)
        return jnp.asarray((np.asarray(x) + noise).astype(x.dtype))

    return jax.tree.map(noisy, memory)


def random_memory(name, input_size, dtype=np.float32, **options):
    """A model with NumPy's random weights: nothing is compiled to draw them."""
    rng = np.random.default_rng(0)

    def draw(x):
        # Biases are small, and so are the products of inputs and weights.
        scale = 0.2 if x.ndim == 1 else x.shape[-1] ** -0.5
        return jnp.asarray((scale * rng.normal(size=x.shape)).astype(dtype))

    return jax.tree.map(draw, jax.eval_shape(lambda: make_memory(name, input_size, **options)))


def inputs(steps, *, seed=0, often=0.2):
    """xs (T, INPUT), and resets (T,) with this probability."""
    rng = np.random.default_rng(seed)
    xs = rng.standard_normal((steps, INPUT), np.float32)
    return jnp.asarray(xs), jnp.asarray(rng.random(steps) < often)


def distance(a, b):
    """Largest difference, relative to the output's scale."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6))
