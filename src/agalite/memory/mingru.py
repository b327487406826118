"""minGRU (Feng et al., 2024, "Were RNNs All We Needed?"), in the shared block.

    z_t = sigmoid(W_z x_t + b_z)
    h~_t = W_h x_t + b_h
    h_t = (1 - z_t) * h_{t-1} + z_t * h~_t

A GRU whose gate and candidate do not read h_{t-1}, without tanh (Section 3.1). The paper computes
the recurrence in log space, with a positive h~, for the sake of its parallel scan;
`ops/recurrence.py` does without, so h~ is the linear one.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import BlockConfig, TracedStack
from agalite.memory.diagonal import DiagonalMixer
from agalite.memory.layers import Dense, LayerNorm, write_bias
from agalite.ops.activations import sigmoid
from agalite.ops.recurrence import METHODS, Method
from agalite.ops.traces import RowTrace


@dataclass(frozen=True)
class MinGRUConfig(BlockConfig):
    """Options of minGRU. As many parameters as AGaLiTe at T-Maze size, with the same block."""

    hidden_size: int = 512
    """N, the numbers of a layer's state."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant of the state at initialisation; None: zero biases."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential, associative or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("hidden_size", self.hidden_size, minimum=1)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


class MinGRUMixer(DiagonalMixer):
    """(T, D) -> (T, D): norm, gate and candidate, recurrence, output."""

    norm: LayerNorm
    into: Dense  # z, h~
    out: Dense
    config: MinGRUConfig = eqx.field(static=True)

    def __init__(self, config: MinGRUConfig, *, key: PRNGKeyArray):
        c = self.config = config
        a, b, bias = jax.random.split(key, 3)
        self.norm = LayerNorm(c.d_model)
        self.into = Dense(c.d_model, [c.hidden_size] * 2, key=a)
        self.out = Dense(c.hidden_size, [c.d_model], key=b)
        if c.horizon is not None:
            write = write_bias(c.horizon, 1, c.hidden_size, key=bias)[0]
            biases = self.into.bias.at[: c.hidden_size].set(write)
            self.into = eqx.tree_at(lambda d: d.bias, self.into, biases)

    def initial_state(self) -> Float[Array, " N"]:
        return jnp.zeros(self.config.hidden_size, self.out.bias.dtype)

    def written(self, x: Float[Array, "T D"]) -> Float[Array, "T N"]:
        return sigmoid(jnp.split(self.into(x), 2, axis=-1)[0])

    def recurrence(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T N"], Float[Array, "T N"]]:
        gate, candidate = jnp.split(self.into(x), 2, axis=-1)
        z = sigmoid(gate)
        return 1 - z, z * candidate

    def output(self, states: Float[Array, "T N"], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        del x
        return self.out(states)

    def rows(self) -> dict[str, RowTrace]:
        weights, biases = jnp.split(self.into.weight[...], 2), jnp.split(self.into.bias, 2)
        gate, candidate = (RowTrace(w.T, b) for w, b in zip(weights, biases, strict=True))
        return {"gate": gate, "candidate": candidate}

    def derivatives(
        self,
        decays: Float[Array, "T N"],
        drives: Float[Array, "T N"],
        previous: Float[Array, "T N"],
    ) -> dict[str, Float[Array, "T N"]]:
        z = 1 - decays
        # Of the gate z (1 - z) (h~ - h), with h~ = drive / z.
        return {"gate": decays * (drives - z * previous), "candidate": z}


class MinGRU(TracedStack):
    """minGRU: (T, input_size) -> (T, d_model).

    The state has layers * hidden_size floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `MinGRUConfig`, by name.
    """

    config: MinGRUConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = MinGRUConfig(**options)
        self._build(c, input_size, lambda key: MinGRUMixer(c, key=key), key)
