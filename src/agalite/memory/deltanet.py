"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024) in the shared block.

The mixer is written out here, to be read beside Section 3.4 and Figure 1 of the paper: queries,
keys and values through a short convolution and SiLU, keys and queries of length 1, the gated delta
rule of Equation 10 (`ops/delta_rule.py`), and a norm of each head behind a gate. alpha has
Mamba-2's form. The block around it is `block.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.layers import CausalConvolution, Dense, HeadNorm, HeadsOut, LayerNorm
from agalite.memory.mamba2 import Decay, initial_decay
from agalite.ops._scalar_decay import METHODS, Method
from agalite.ops.activations import rms_normalise, sigmoid
from agalite.ops.delta_rule import gated_delta_rule


@dataclass(frozen=True)
class DeltaNetConfig(StackConfig):
    """Options of Gated DeltaNet. The sizes are those of the paper's T-Maze models."""

    d_conv: int = 4
    """Inputs that the short convolution sees; 1 is none before the present one."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant of alpha at initialisation, spread over the heads; None:
    Mamba's values."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("d_conv", self.d_conv, minimum=1)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


class DeltaNetState(NamedTuple):
    """The matrices of all heads, and the last inputs of the convolution."""

    S: Float[Array, "H V K"]
    inputs: Float[Array, "W-1 C"]


class DeltaNetAttention(Attention):
    """(T, D) -> (T, D): norm, projections, convolution, delta rule, gated norm, output."""

    norm: LayerNorm
    project: Dense
    convolution: CausalConvolution
    decay: Decay
    head_norm: HeadNorm
    out: HeadsOut
    config: DeltaNetConfig = eqx.field(static=True)

    def __init__(self, config: DeltaNetConfig, *, key: PRNGKeyArray):
        c = self.config = config
        keys = jax.random.split(key, 4)
        self.norm = LayerNorm(c.d_model)
        inner = c.heads * c.head_size
        project = Dense(c.d_model, [inner] * 4 + [c.heads] * 2, key=keys[0])
        self.decay, dt_bias = initial_decay(c.horizon, c.heads, key=keys[1])
        bias = project.bias.at[-c.heads :].set(dt_bias)
        self.project = eqx.tree_at(lambda p: p.bias, project, bias)
        self.convolution = CausalConvolution(c.d_conv, 3 * inner, key=keys[2])
        self.head_norm = HeadNorm(c.heads, c.head_size)
        self.out = HeadsOut(c.heads, c.head_size, c.d_model, key=keys[3])

    def initial_state(self) -> DeltaNetState:
        c = self.config
        shape = (c.heads, c.head_size, c.head_size)
        return DeltaNetState(
            jnp.zeros(shape, self.out.weight.dtype), self.convolution.initial_state()
        )

    def columns(
        self, h: Float[Array, "T D"]
    ) -> tuple[
        Float[Array, "T C"], Float[Array, "T H V"], Float[Array, "T H"], Float[Array, "T H"]
    ]:
        """The convolution's input (q, k, v), the output's gate, beta, and log alpha."""
        c = self.config
        inner = c.heads * c.head_size
        bounds = [3 * inner, 4 * inner, 4 * inner + c.heads]
        qkv, z, beta, dt = jnp.split(self.project(self.norm(h)), bounds, axis=-1)
        z = z.reshape(-1, c.heads, c.head_size)
        # alpha_t = exp(-A softplus(dt_t))
        return qkv, z, sigmoid(beta), self.decay(jax.nn.softplus(dt))

    def __call__(
        self, state: DeltaNetState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[DeltaNetState, Float[Array, "T D"]]:
        c = self.config
        qkv, z, beta, log_alpha = self.columns(h)
        inputs, qkv = self.convolution(state.inputs, qkv, resets)
        q, k, v = (x.reshape(-1, c.heads, c.head_size) for x in jnp.split(qkv, 3, axis=-1))
        # Of a mean square of 1, divided by the root of the width: of length 1.
        q, k = (rms_normalise(x) * c.head_size**-0.5 for x in (q, k))
        # Equation 10
        S, o = gated_delta_rule(q, k, v, beta, log_alpha, resets, state.S, method=c.method)
        return DeltaNetState(S, inputs), self.out(self.head_norm(o) * jax.nn.silu(z))


class DeltaNet(Stack):
    """Gated DeltaNet as a memory: (T, input_size) -> (T, d_model).

    The state is a matrix per head and the last inputs of the convolution, layers * (heads * V * V +
    (d_conv - 1) * 3 * heads * V) floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `DeltaNetConfig`, by name.
    """

    config: DeltaNetConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = DeltaNetConfig(**options)
        self._build(c, input_size, lambda key: DeltaNetAttention(c, key=key), key)
