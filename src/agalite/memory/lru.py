"""LRU, the Linear Recurrent Unit (Orvieto et al., 2023), in the shared block.

    h_t = lambda * h_{t-1} + gamma * (B x_t)        complex, element by element
    y_t = Re(C h_t) + D * x_t

with lambda = exp(-exp(nu) + i exp(theta)) (Section 3.3), which is always inside the unit circle,
and gamma, which starts at sqrt(1 - |lambda|^2) (Section 3.4), so that h has about the variance of
B x however slowly it decays. The paper writes x for the state and u for the input.
"""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from agalite import validation
from agalite.memory.block import BlockConfig, TracedStack
from agalite.memory.diagonal import ConstantMixer
from agalite.memory.layers import ComplexIn, ComplexOut, LayerNorm, time_constants
from agalite.ops.matmul import broadcast_like
from agalite.ops.recurrence import METHODS, Complex, Method

# Limits of nu, theta and log gamma: beyond them exp(exp(nu)) or the gradient of |lambda| overflow.
# They leave time constants from less than a step to 160,000 steps.
_SLOWEST, _FASTEST, _LARGEST = -12.0, 4.0, 10.0


@dataclass(frozen=True)
class LRUConfig(BlockConfig):
    """Options of LRU. As many parameters as AGaLiTe at T-Maze size, with the same block."""

    hidden_size: int = 384
    """N, the complex numbers of a layer's state."""
    r_min: float = 0.0
    """Smallest |lambda| at initialisation."""
    r_max: float = 1.0
    """Largest |lambda| at initialisation. With 0 and 1 lambda is uniform over the unit disk."""
    max_phase: float = 2 * math.pi
    """Largest angle of lambda at initialisation."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant at initialisation, in steps, in place of r_min and r_max;
    None: the paper's ring."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential, associative or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("hidden_size", self.hidden_size, minimum=1)
        check_ring(self.r_min, self.r_max, self.max_phase)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


def check_ring(r_min: float, r_max: float, max_phase: float) -> None:
    """Raises unless 0 <= r_min < r_max <= 1 and 0 < max_phase <= 2 pi."""
    validation.check_number("r_min", r_min, minimum=0.0, maximum=1.0)
    validation.check_number("r_max", r_max, minimum=0.0, maximum=1.0)
    if r_min >= r_max:
        raise ValueError(f"r_min={r_min} must be less than r_max={r_max}")
    validation.check_number("max_phase", max_phase, minimum=1e-6, maximum=2 * math.pi)


class Eigenvalues(eqx.Module):
    """lambda = exp(-exp(nu) + i exp(theta)), N of them: the stable exponential parameterisation."""

    nu: Float[Array, " N"]
    theta: Float[Array, " N"]

    def __init__(
        self,
        size: int,
        *,
        r_min: float,
        r_max: float,
        max_phase: float,
        horizon: tuple[float, float] | None,
        key: PRNGKeyArray,
    ):
        a, b = jax.random.split(key)
        if horizon is None:
            # Lemma 3.2: uniform over the ring between r_min and r_max.
            area = jax.random.uniform(a, (size,)) * (r_max**2 - r_min**2) + r_min**2
            rate = -0.5 * jnp.log(jnp.clip(area, 1e-7, 1 - 1e-7))
        else:
            rate = jnp.asarray(-np.log1p(-1 / time_constants(horizon, size)), jnp.float32)
            rate = jax.random.permutation(a, rate)
        self.nu = jnp.log(rate)
        self.theta = jnp.log(max_phase * jnp.maximum(jax.random.uniform(b, (size,)), 1e-6))

    def rate(self) -> Float[Array, " N"]:
        """exp(nu) = -log |lambda|."""
        return jnp.exp(jnp.clip(self.nu, _SLOWEST, _FASTEST))

    def values(self) -> Complex:
        size, angle = jnp.exp(-self.rate()), jnp.exp(jnp.minimum(self.theta, _LARGEST))
        return Complex(size * jnp.cos(angle), size * jnp.sin(angle))

    def normaliser(self) -> Float[Array, " N"]:
        """sqrt(1 - |lambda|^2)."""
        return jnp.sqrt(-jnp.expm1(-2 * self.rate()))


class LRUMixer(ConstantMixer):
    """(T, D) -> (T, D): norm, then the linear recurrence and its output."""

    norm: LayerNorm
    eigenvalues: Eigenvalues
    log_gamma: Float[Array, " N"]
    into: ComplexIn  # B
    out: ComplexOut  # C
    skip: Float[Array, " D"]  # D
    config: LRUConfig = eqx.field(static=True)

    def __init__(self, config: LRUConfig, *, key: PRNGKeyArray):
        c = self.config = config
        ring, into, out, skip = jax.random.split(key, 4)
        self.norm = LayerNorm(c.d_model)
        self.eigenvalues = Eigenvalues(
            c.hidden_size,
            r_min=c.r_min,
            r_max=c.r_max,
            max_phase=c.max_phase,
            horizon=c.horizon,
            key=ring,
        )
        self.log_gamma = jnp.log(self.eigenvalues.normaliser())
        # Glorot; B is halved because Re(C h) keeps half of the variance (the paper's appendix A).
        b_init = jax.nn.initializers.normal((2 * c.d_model) ** -0.5)
        c_init = jax.nn.initializers.normal(c.hidden_size**-0.5)
        self.into = ComplexIn(c.d_model, c.hidden_size, init=b_init, key=into)
        self.out = ComplexOut(c.hidden_size, c.d_model, init=c_init, key=out)
        self.skip = jax.random.normal(skip, (c.d_model,))

    def constants(self) -> tuple[Complex, Float[Array, " N"]]:
        return self.eigenvalues.values(), jnp.exp(jnp.minimum(self.log_gamma, _LARGEST))

    def output(self, states: Complex, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.out(states) + broadcast_like(self.skip, x) * x


class LRU(TracedStack):
    """LRU: (T, input_size) -> (T, d_model).

    The state has 2 * layers * hidden_size floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `LRUConfig`, by name.
    """

    config: LRUConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = LRUConfig(**options)
        self._build(c, input_size, lambda key: LRUMixer(c, key=key), key)
