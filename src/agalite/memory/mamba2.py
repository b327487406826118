"""Mamba-2 (Dao and Gu, 2024) in the shared block.

The mixer is written out here, to be read beside Section 7.1 and Figure 6 of the paper: all
projections from the block's input in parallel, a short convolution of x, B and C, the scalar-decay
state space model of Equation 2 (`ops/ssd.py`), a skip, and a norm behind a gate. B and C are shared
by all heads (multi-value attention, Section 7.2). The block around it is `block.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.layers import (
    CausalConvolution,
    Dense,
    HeadNorm,
    HeadsOut,
    LayerNorm,
    spread_over_heads,
)
from agalite.ops._scalar_decay import METHODS, Method
from agalite.ops.matmul import broadcast_like
from agalite.ops.ssd import state_space_dual

# Mamba's initial values: A uniform, the step size dt log-uniform.
_A = (1.0, 16.0)
_DT = (1e-3, 1e-1)
_LARGEST_LOG_A = 20.0  # exp of more would overflow


@dataclass(frozen=True)
class Mamba2Config(StackConfig):
    """Options of Mamba-2. The sizes are those of the paper's T-Maze models."""

    d_state: int = 64
    """Width of B and C, and of the state of each value: N of the paper."""
    d_conv: int = 4
    """Inputs that the short convolution sees; 1 is none before the present one."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant at initialisation, spread over the heads; None: A uniform
    from 1 to 16 and dt log-uniform from 0.001 to 0.1, as in Mamba."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("d_state", self.d_state, minimum=1)
        validation.check_integer("d_conv", self.d_conv, minimum=1)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


class Mamba2State(NamedTuple):
    """The matrices of all heads, and the last inputs of the convolution."""

    S: Float[Array, "H V K"]
    inputs: Float[Array, "W-1 C"]


class Decay(eqx.Module):
    """log a_t = -A dt_t with A = exp(log_A), one number per head: (T, H) -> (T, H)."""

    log_A: Float[Array, " H"]

    def __call__(self, dt: Float[Array, "T H"]) -> Float[Array, "T H"]:
        A = jnp.exp(jnp.minimum(self.log_A, _LARGEST_LOG_A))
        return -dt * broadcast_like(A, dt)


def initial_decay(
    horizon: tuple[float, float] | None, heads: int, *, key: PRNGKeyArray
) -> tuple[Decay, Float[Array, " heads"]]:
    """The decay of a head and the bias of its dt, softplus(bias) = dt.

    With a horizon, A = 1 and exp(-dt) = 1 - 1 / tau.
    """
    a, b = jax.random.split(key)
    if horizon is None:
        log_A = jnp.log(jax.random.uniform(a, (heads,), minval=_A[0], maxval=_A[1]))
        low, high = jnp.log(jnp.array(_DT))
        dt = jnp.exp(jax.random.uniform(b, (heads,), minval=low, maxval=high))
    else:
        log_A = jnp.zeros(heads)
        dt = -jnp.log1p(-1 / spread_over_heads(horizon, heads, key=a))
    return Decay(log_A), jnp.log(jnp.expm1(dt))


class Mamba2Attention(Attention):
    """(T, D) -> (T, D): norm, projections, convolution, state space model, gated norm, output."""

    norm: LayerNorm
    project: Dense
    convolution: CausalConvolution
    decay: Decay
    skip: Float[Array, " H"]
    head_norm: HeadNorm
    out: HeadsOut
    config: Mamba2Config = eqx.field(static=True)

    def __init__(self, config: Mamba2Config, *, key: PRNGKeyArray):
        c = self.config = config
        keys = jax.random.split(key, 4)
        self.norm = LayerNorm(c.d_model)
        inner = c.heads * c.head_size
        project = Dense(c.d_model, [inner, inner, c.d_state, c.d_state, c.heads], key=keys[0])
        self.decay, dt_bias = initial_decay(c.horizon, c.heads, key=keys[1])
        bias = project.bias.at[-c.heads :].set(dt_bias)
        self.project = eqx.tree_at(lambda p: p.bias, project, bias)
        self.convolution = CausalConvolution(c.d_conv, inner + 2 * c.d_state, key=keys[2])
        self.skip = jnp.ones(c.heads)
        self.head_norm = HeadNorm(c.heads, c.head_size)
        self.out = HeadsOut(c.heads, c.head_size, c.d_model, key=keys[3])

    def initial_state(self) -> Mamba2State:
        c = self.config
        shape = (c.heads, c.head_size, c.d_state)
        return Mamba2State(
            jnp.zeros(shape, self.out.weight.dtype), self.convolution.initial_state()
        )

    def columns(
        self, h: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T H V"], Float[Array, "T C"], Float[Array, "T H"]]:
        """z, the convolution's input (x, B, C), and dt."""
        c = self.config
        inner = c.heads * c.head_size
        bounds = [inner, 2 * inner + 2 * c.d_state]
        z, xBC, dt = jnp.split(self.project(self.norm(h)), bounds, axis=-1)
        return z.reshape(-1, c.heads, c.head_size), xBC, jax.nn.softplus(dt)

    def __call__(
        self, state: Mamba2State, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Mamba2State, Float[Array, "T D"]]:
        c = self.config
        z, xBC, dt = self.columns(h)
        inputs, xBC = self.convolution(state.inputs, xBC, resets)
        inner = c.heads * c.head_size
        x, B, C = jnp.split(xBC, [inner, inner + c.d_state], axis=-1)
        x = x.reshape(-1, c.heads, c.head_size)
        q, k = C[:, None], B[:, None]
        # Equation 2, discretised: a_t = exp(-A dt_t), and dt_t x_t is written.
        v = x * _for_values(dt, c.head_size)
        S, y = state_space_dual(q, k, v, self.decay(dt), resets, state.S, method=c.method)
        y = y + x * _for_values(broadcast_like(self.skip, dt), c.head_size)
        y = self.head_norm(y * jax.nn.silu(z))
        return Mamba2State(S, inputs), self.out(y)


def _for_values(x: Float[Array, "T H"], size: int) -> Float[Array, "T H V"]:
    # An outer product: broadcasting would make `vmap` move the batch in front of time.
    return jnp.einsum("th,v->thv", x, jnp.ones(size, x.dtype))


class Mamba2(Stack):
    """Mamba-2 as a memory: (T, input_size) -> (T, d_model).

    The state is a matrix per head and the last inputs of the convolution, layers * (heads * V * N +
    (d_conv - 1) * (heads * V + 2 N)) floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `Mamba2Config`, by name.
    """

    config: Mamba2Config = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = Mamba2Config(**options)
        self._build(c, input_size, lambda key: Mamba2Attention(c, key=key), key)
