"""mLSTM: xLSTM's matrix memory (Beck et al., 2024) in the shared block.

The mixer is written out here, to be read beside Section 2.3 of the paper. Equations 19 to 21 are
`ops/mlstm.py`; the block around it is `block.py` and stands in the place of xLSTM's.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.layers import Dense, HeadNorm, HeadsOut, LayerNorm, spread_over_heads
from agalite.ops._scalar_decay import METHODS, Method
from agalite.ops.activations import sigmoid
from agalite.ops.mlstm import MLSTMState, initial_state, mlstm

ForgetGate = Literal["sigmoid", "exp"]
FORGET_GATES = ("sigmoid", "exp")
# The biases of the authors' code, from the first head to the last: time constants of 21 to 404
# steps.
_FORGET_BIAS = (3.0, 6.0)


@dataclass(frozen=True)
class MLSTMConfig(StackConfig):
    """Options of mLSTM. The sizes are those of the paper's T-Maze models."""

    forget_gate: ForgetGate = "sigmoid"
    """Activation of the forget gate, Equation 26: sigmoid or exp."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant of the forget gates at initialisation, spread over the
    heads; None: biases from 3 to 6, the authors'."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_one_of("forget_gate", self.forget_gate, FORGET_GATES)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


class MLSTMInputs(NamedTuple):
    """What the memory is updated with."""

    q: Float[Array, "T H V"]
    k: Float[Array, "T H V"]
    v: Float[Array, "T H V"]
    i: Float[Array, "T H"]
    log_f: Float[Array, "T H"]
    o: Float[Array, "T H V"]


class MLSTMAttention(Attention):
    """(T, D) -> (T, D): norm, projections and gates, matrix memory, norm of each head, output."""

    norm: LayerNorm
    project: Dense
    head_norm: HeadNorm
    out: HeadsOut
    config: MLSTMConfig = eqx.field(static=True)

    def __init__(self, config: MLSTMConfig, *, key: PRNGKeyArray):
        c = self.config = config
        a, b, d = jax.random.split(key, 3)
        self.norm = LayerNorm(c.d_model)
        inner = c.heads * c.head_size
        project = Dense(c.d_model, [inner] * 4 + [c.heads] * 2, key=a)
        forget = jnp.linspace(*_FORGET_BIAS, c.heads)
        if c.horizon is not None:  # sigmoid(bias) = 1 - 1 / tau
            forget = jnp.log(spread_over_heads(c.horizon, c.heads, key=d) - 1)
        if c.forget_gate == "exp":
            forget = -jax.nn.softplus(-forget)  # the same gates
        bias = project.bias.at[-c.heads :].set(forget)
        self.project = eqx.tree_at(lambda p: p.bias, project, bias)
        self.head_norm = HeadNorm(c.heads, c.head_size)
        self.out = HeadsOut(c.heads, c.head_size, c.d_model, key=b)

    def initial_state(self) -> MLSTMState:
        return initial_state(self.config.heads, self.config.head_size, self.out.weight.dtype)

    def inputs(self, h: Float[Array, "T D"]) -> MLSTMInputs:
        """Equations 22 to 27."""
        c = self.config
        inner = c.heads * c.head_size
        bounds = [inner, 2 * inner, 3 * inner, 4 * inner, 4 * inner + c.heads]
        columns = jnp.split(self.project(self.norm(h)), bounds, axis=-1)
        q, k, v, o = (x.reshape(-1, c.heads, c.head_size) for x in columns[:4])
        i, f = columns[4:]
        log_f = f if c.forget_gate == "exp" else -jax.nn.softplus(-f)  # Equation 26
        # Equation 23 divides the keys by the root of their width.
        return MLSTMInputs(q, k * c.head_size**-0.5, v, i, log_f, sigmoid(o))

    def __call__(
        self, state: MLSTMState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[MLSTMState, Float[Array, "T D"]]:
        x = self.inputs(h)
        # Equations 19 to 21; the norm of each head is the block's (Appendix A.5).
        state, read = mlstm(*x[:-1], resets, state, method=self.config.method)
        return state, self.out(x.o * self.head_norm(read))


class MLSTM(Stack):
    """xLSTM's mLSTM as a memory: (T, input_size) -> (T, d_model).

    The state is a matrix, a vector and a number per head, layers * heads * (V * V + V + 1) floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `MLSTMConfig`, by name.
    """

    config: MLSTMConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = MLSTMConfig(**options)
        self._build(c, input_size, lambda key: MLSTMAttention(c, key=key), key)
