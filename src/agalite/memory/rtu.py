"""RTU, Recurrent Trace Units (Elelimy et al., 2024), in the shared block.

The hidden state of a unit is two real numbers, which a step rotates by theta and shrinks by r:

    h1_t = r cos(theta) h1_{t-1} - r sin(theta) h2_{t-1} + phi (W1 x_t)
    h2_t = r sin(theta) h1_{t-1} + r cos(theta) h2_{t-1} + phi (W2 x_t)

with r = exp(-exp(nu)), theta = exp(log theta) and phi = sqrt(1 - r^2). A linear RTU's output is
f(h1), f(h2); a nonlinear one applies f inside the recurrence, to both right-hand sides. That is
LRU's recurrence for a complex h = h1 + i h2, with an output that is a function of h and not its
real part alone, and with a phi that is no parameter of its own.
"""

import math
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import BlockConfig, DiagonalMixer, Stack
from agalite.memory.layers import ComplexIn, ComplexOut, LayerNorm, broadcast_rows
from agalite.memory.lru import Eigenvalues, check_ring
from agalite.ops.activations import relu, tanh
from agalite.ops.matmul import broadcast_like
from agalite.ops.recurrence import (
    ACTIVATIONS,
    METHODS,
    Activation,
    Complex,
    Method,
    activated_recurrence,
    linear_recurrence,
)

Variant = Literal["linear", "nonlinear"]
VARIANTS = ("linear", "nonlinear")


@dataclass(frozen=True)
class RTUConfig(BlockConfig):
    """Options of RTU. As many parameters as AGaLiTe at T-Maze size, with the same block."""

    hidden_size: int = 384
    """N, the units of a layer, of two numbers each."""
    variant: Variant = "linear"
    """Where the nonlinearity is: linear, after the recurrence, or nonlinear, inside it, which has
    no parallel form."""
    activation: Activation = "relu"
    """The nonlinearity f: relu or tanh."""
    r_min: float = 0.0
    """Smallest r at initialisation."""
    r_max: float = 1.0
    """Largest r at initialisation."""
    max_phase: float = 2 * math.pi
    """Largest theta at initialisation."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant at initialisation, in steps, in place of r_min and r_max;
    None: LRU's ring."""
    method: Method = "auto"
    """How sequences of linear units are computed: auto, sequential, associative or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("hidden_size", self.hidden_size, minimum=1)
        validation.check_one_of("variant", self.variant, VARIANTS)
        validation.check_one_of("activation", self.activation, ACTIVATIONS)
        check_ring(self.r_min, self.r_max, self.max_phase)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


class RTUMixer(DiagonalMixer):
    """(T, D) -> (T, D): norm, units, and an output that reads both numbers of each unit."""

    norm: LayerNorm
    eigenvalues: Eigenvalues  # r and theta
    into: ComplexIn  # W1 and W2
    out: ComplexOut
    bias: Float[Array, " D"]
    config: RTUConfig = eqx.field(static=True)

    def __init__(self, config: RTUConfig, *, key: PRNGKeyArray):
        c = self.config = config
        ring, into, out = jax.random.split(key, 3)
        self.norm = LayerNorm(c.d_model)
        self.eigenvalues = Eigenvalues(
            c.hidden_size,
            r_min=c.r_min,
            r_max=c.r_max,
            max_phase=c.max_phase,
            horizon=c.horizon,
            key=ring,
        )
        self.into = ComplexIn(c.d_model, c.hidden_size, key=into)
        self.out = ComplexOut(c.hidden_size, c.d_model, key=out)
        self.bias = jnp.zeros(c.d_model)

    def initial_state(self) -> Complex:
        zero = jnp.zeros(self.config.hidden_size, self.bias.dtype)
        return Complex(zero, zero)

    def written(self, x: Float[Array, "T D"]) -> Float[Array, "T N"]:
        return jnp.broadcast_to(
            self.eigenvalues.normaliser(), (x.shape[0], self.config.hidden_size)
        )

    def recurrence(self, x: Float[Array, "T D"]) -> tuple[Complex, Complex]:
        wx = self.into(x)
        phi = broadcast_like(self.eigenvalues.normaliser(), wx.real)
        decays = broadcast_rows(self.eigenvalues.values(), wx.real)
        return decays, Complex(phi * wx.real, phi * wx.imag)

    def __call__(
        self, state: Complex, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Complex, Float[Array, "T D"]]:
        c = self.config
        decays, drives = self.recurrence(self.norm(h))
        if c.variant == "nonlinear":
            states = active = activated_recurrence(
                decays, drives, state, resets, activation=c.activation
            )
        else:
            states = linear_recurrence(decays, drives, state, resets, method=c.method)
            active = jax.tree.map(tanh if c.activation == "tanh" else relu, states)
        y = self.out(active)
        return states[-1], y + broadcast_like(self.bias, y)


class RTU(Stack):
    """RTU: (T, input_size) -> (T, d_model).

    The state has 2 * layers * hidden_size floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `RTUConfig`, by name.
    """

    config: RTUConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = RTUConfig(**options)
        self._build(c, input_size, lambda key: RTUMixer(c, key=key), key)
