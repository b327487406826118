"""RTU, Recurrent Trace Units (Elelimy et al., 2024), in the shared block.

The hidden state of a unit is two real numbers, which a step rotates by theta and shrinks by r:

    h1_t = r cos(theta) h1_{t-1} - r sin(theta) h2_{t-1} + phi (W1 x_t)
    h2_t = r sin(theta) h1_{t-1} + r cos(theta) h2_{t-1} + phi (W2 x_t)

with r = exp(-exp(nu)), theta = exp(log theta) and phi = sqrt(1 - r^2). A linear RTU's output is
f(h1), f(h2); a nonlinear one applies f inside the recurrence, to both right-hand sides. That is
LRU's recurrence for a complex h = h1 + i h2, with an output that is a function of h and not its
real part alone, and with a phi that is no parameter of its own. Linear units have traces. Nonlinear
ones have none: f acts on both numbers separately, and what a step leaves of their derivatives is a
matrix of two by two, no complex factor.
"""

import math
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import BlockConfig, TracedStack
from agalite.memory.diagonal import ConstantMixer
from agalite.memory.layers import ComplexIn, ComplexOut, LayerNorm
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
)
from agalite.ops.traces import RowTrace

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


class RTUMixer(ConstantMixer):
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

    def constants(self) -> tuple[Complex, Float[Array, " N"]]:
        return self.eigenvalues.values(), self.eigenvalues.normaliser()

    def states(
        self, decays: Complex, drives: Complex, initial: Complex, resets: Bool[Array, " T"]
    ) -> Complex:
        if self.config.variant == "linear":
            return super().states(decays, drives, initial, resets)
        return activated_recurrence(
            decays, drives, initial, resets, activation=self.config.activation
        )

    def output(self, states: Complex, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        del x
        if self.config.variant == "linear":
            states = jax.tree.map(tanh if self.config.activation == "tanh" else relu, states)
        y = self.out(states)
        return y + broadcast_like(self.bias, y)

    @property
    def has_traces(self) -> bool:
        return self.config.variant == "linear"

    def initial_trace(self) -> dict[str, RowTrace]:
        if not self.has_traces:
            raise ValueError(
                "variant='nonlinear' has no traces: with f inside the recurrence a unit's decay "
                "is a matrix of two by two and no complex number; choose linear"
            )
        return super().initial_trace()


class RTU(TracedStack):
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
