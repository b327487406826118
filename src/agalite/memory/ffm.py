"""Fast and Forgetful Memory (Morad et al., 2023) in the shared block.

The mixer is written out here, to be read beside Section 4 of the paper: an input gate, the
aggregator S_t = Gamma * S_{t-1} + x_t 1^T (`ops/ffm.py`), a layer that reads all of S, and an
output gate between what was read and the input. The block around it is `block.py`.
"""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.layers import Dense, LayerNorm
from agalite.ops.activations import mix, normalise, sigmoid
from agalite.ops.ffm import METHODS, FFMState, Method, aggregate

# The authors' initial values: decays and periods equally spaced.
_ALPHA = (1e-6, 0.5)
_PERIODS = (1.0, 1024.0)


@dataclass(frozen=True)
class FFMConfig(StackConfig):
    """Options of FFM. The sizes give about as many parameters as the paper's T-Maze models."""

    head_size: int = 32
    """Traces of a head. There is nothing else in a head: heads * head_size traces in all."""
    contexts: int = 4
    """Frequencies with which every trace oscillates."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant of the traces at initialisation, log-uniform; None: decays
    alpha equally spaced from 1e-6 to 0.5, the authors'."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential or associative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("contexts", self.contexts, minimum=1)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))

    @property
    def traces(self) -> int:
        return self.heads * self.head_size


class FFMAttention(Attention):
    """(T, D) -> (T, D): norm, gated input, aggregator, gated output."""

    norm: LayerNorm
    project: Dense
    alpha: Float[Array, " M"]
    omega: Float[Array, " C"]
    read: Dense
    config: FFMConfig = eqx.field(static=True)

    def __init__(self, config: FFMConfig, *, key: PRNGKeyArray):
        c = self.config = config
        a, b = jax.random.split(key)
        self.norm = LayerNorm(c.d_model)
        # l1 to l5 of the paper, but l3, which reads S: l1 the input, l2 its gate, l4 the output's
        # gate, l5 the way around the memory.
        self.project = Dense(c.d_model, [c.traces] * 2 + [c.d_model] * 2, key=a)
        self.read = Dense(2 * c.traces * c.contexts, [c.d_model], key=b)
        if c.horizon is None:
            alpha = np.linspace(*_ALPHA, c.traces)
        else:  # exp(-alpha) = 1 - 1 / tau
            alpha = -np.log1p(-1 / np.geomspace(*c.horizon, c.traces))
        self.alpha = jnp.asarray(alpha, jnp.float32)
        periods = np.linspace(*_PERIODS, c.contexts)
        self.omega = jnp.asarray(2 * math.pi / periods, jnp.float32)

    def initial_state(self) -> FFMState:
        c = self.config
        return FFMState(*jnp.zeros((2, c.traces, c.contexts), self.alpha.dtype))

    def columns(self, h: Float[Array, "T D"]) -> tuple[Array, Array, Array, Array]:
        """l1(x), sigma(l2(x)), sigma(l4(x)) and l5(x)."""
        c = self.config
        bounds = [c.traces, 2 * c.traces, 2 * c.traces + c.d_model]
        x, gate, out_gate, around = jnp.split(self.project(self.norm(h)), bounds, axis=-1)
        return x, sigmoid(gate), sigmoid(out_gate), around

    def __call__(
        self, state: FFMState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[FFMState, Float[Array, "T D"]]:
        x, gate, out_gate, around = self.columns(h)
        x = x * gate  # x~ = l1(x) * sigma(l2(x))
        state, S = aggregate(x, self.alpha, self.omega, resets, state, method=self.config.method)
        z = self.read(S.reshape(len(h), -1))  # z = l3(Re S | Im S)
        # y = LN(z) * sigma(l4(x)) + l5(x) * (1 - sigma(l4(x)))
        return state, mix(out_gate, normalise(z), around)


class FFM(Stack):
    """Fast and Forgetful Memory: (T, input_size) -> (T, d_model).

    The state is one complex number per trace and context, layers * 2 * heads * head_size * contexts
    floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `FFMConfig`, by name.
    """

    config: FFMConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = FFMConfig(**options)
        self._build(c, input_size, lambda key: FFMAttention(c, key=key), key)
