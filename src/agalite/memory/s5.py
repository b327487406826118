"""S5, the simplified state-space layer (Smith et al., 2023), in the shared block.

    ds/dt = Lambda s + B x,   y = 2 Re(C s) + D * x        complex, Lambda diagonal (Section 3.2)

discretised by zero-order hold with a step Delta of each element's own:

    s_t = exp(Lambda Delta) * s_{t-1} + (exp(Lambda Delta) - 1) / Lambda * (B x_t)

Lambda, B and C start as the diagonalised HiPPO-N matrix, in blocks (Section 3.3). Its eigenvalues
are conjugate pairs; one of each pair is kept, hence 2 Re(...). The paper writes x for the state and
u for the input. It applies GELU and a gate to y; here the block's ReLU and gate follow.
"""

from dataclasses import dataclass
from functools import cache

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

# Limits of log(-Re Lambda) and log Delta: within them 1 / Lambda and all gradients are finite.
_SMALLEST, _LARGEST = -12.0, 8.0


@dataclass(frozen=True)
class S5Config(BlockConfig):
    """Options of S5. As many parameters as AGaLiTe at T-Maze size, with the same block."""

    hidden_size: int = 384
    """N, the complex numbers of a layer's state: half of the paper's P."""
    blocks: int = 8
    """Blocks of the initial state matrix, J in the paper; they divide hidden_size."""
    step_min: float = 0.001
    """Smallest Delta at initialisation. Delta is log-uniform."""
    step_max: float = 0.1
    """Largest Delta at initialisation."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant at initialisation, in steps, in place of step_min and
    step_max; None: the paper's, which start at about 20 to 2000 steps."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential, associative or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("hidden_size", self.hidden_size, minimum=1)
        validation.check_integer("blocks", self.blocks, minimum=1)
        if self.hidden_size % self.blocks:
            raise ValueError(
                f"blocks={self.blocks} does not divide hidden_size={self.hidden_size}; "
                "choose sizes that do"
            )
        validation.check_number("step_min", self.step_min, minimum=1e-5, maximum=10.0)
        validation.check_number("step_max", self.step_max, minimum=1e-5, maximum=10.0)
        if self.step_min > self.step_max:
            raise ValueError(f"step_min={self.step_min} must be at most step_max={self.step_max}")
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))


@cache
def hippo_n(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The normal part of the HiPPO-LegS matrix (2 size, 2 size), diagonalised.

    A_nk = -sqrt((n + 1/2) (k + 1/2)) below the diagonal, its negative above, -1/2 on it.

    **Returns:**

    The imaginary parts (size,) of the eigenvalues with positive ones; all real parts are -1/2. And
    their eigenvectors (2 size, size), complex, orthonormal.
    """
    root = np.sqrt(np.arange(2 * size) + 0.5)
    skew = -np.tril(np.outer(root, root), -1) + np.triu(np.outer(root, root), 1)
    # The matrix is skew - I / 2, and -i skew is Hermitian: its eigenvalues are the imaginary parts.
    imaginary, vectors = np.linalg.eigh(-1j * skew)
    return imaginary[size:], vectors[:, size:]


class S5Mixer(ConstantMixer):
    """(T, D) -> (T, D): norm, then the discretised state-space model."""

    norm: LayerNorm
    log_rate: Float[Array, " N"]  # Re Lambda = -exp(log_rate), so that nothing ever grows
    frequency: Float[Array, " N"]  # Im Lambda
    log_step: Float[Array, " N"]
    into: ComplexIn  # B
    out: ComplexOut  # C
    skip: Float[Array, " D"]  # D
    config: S5Config = eqx.field(static=True)

    def __init__(self, config: S5Config, *, key: PRNGKeyArray):
        c = self.config = config
        step, into, out, skip = jax.random.split(key, 4)
        self.norm = LayerNorm(c.d_model)
        frequency, vectors = hippo_n(c.hidden_size // c.blocks)
        self.log_rate = jnp.full(c.hidden_size, np.log(0.5), jnp.float32)
        self.frequency = jnp.asarray(np.tile(frequency, c.blocks), jnp.float32)
        if c.horizon is None:
            low, high = np.log(c.step_min), np.log(c.step_max)
            self.log_step = jax.random.uniform(step, (c.hidden_size,), minval=low, maxval=high)
        else:
            # |exp(Lambda Delta)| = exp(-Delta / 2) = 1 - 1 / tau
            steps = -2 * np.log1p(-1 / time_constants(c.horizon, c.hidden_size))
            self.log_step = jax.random.permutation(step, jnp.asarray(np.log(steps), jnp.float32))
        self.into, self.out = _projections(c, vectors, into, out)
        self.skip = jax.random.normal(skip, (c.d_model,))

    def constants(self) -> tuple[Complex, Complex]:
        """exp(Lambda Delta) and (exp(Lambda Delta) - 1) / Lambda, (N,)."""
        rate = jnp.exp(jnp.clip(self.log_rate, _SMALLEST, _LARGEST))
        step = jnp.exp(jnp.clip(self.log_step, _SMALLEST, _LARGEST))
        size, angle = jnp.exp(-rate * step), self.frequency * step
        decay = Complex(size * jnp.cos(angle), size * jnp.sin(angle))
        # decay - 1 without cancellation: for the shortest steps both are almost equal.
        change = Complex(
            jnp.expm1(-rate * step) * jnp.cos(angle) - 2 * jnp.square(jnp.sin(angle / 2)),
            decay.imag,
        )
        norm = jnp.square(rate) + jnp.square(self.frequency)
        return decay, change * Complex(-rate / norm, -self.frequency / norm)

    def output(self, states: Complex, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return 2 * self.out(states) + broadcast_like(self.skip, x) * x


def _projections(
    c: S5Config, vectors: np.ndarray, into: PRNGKeyArray, out: PRNGKeyArray
) -> tuple[ComplexIn, ComplexOut]:
    """V^-1 B and C V for a real B and a complex C, normal with variance 1 / inputs.

    V is block-diagonal with `vectors` (2 R, R) as blocks, and its inverse is its adjoint.
    """
    real, imag = (jnp.asarray(x, jnp.float32) for x in (np.real(vectors), np.imag(vectors)))
    size = vectors.shape[1]
    b = jax.random.normal(into, (c.blocks, 2 * size, c.d_model)) * c.d_model**-0.5
    cs = jax.random.normal(out, (2, c.d_model, c.blocks, 2 * size)) * (2 * c.hidden_size) ** -0.5

    def of_b(v: Array) -> Array:
        return jnp.einsum("pn,jpd->jnd", v, b).reshape(c.hidden_size, c.d_model)

    def of_c(x: Array, v: Array) -> Array:
        return jnp.einsum("djp,pn->djn", x, v).reshape(c.d_model, c.hidden_size)

    made = (
        ComplexIn(c.d_model, c.hidden_size, key=into),
        ComplexOut(c.hidden_size, c.d_model, key=out),
    )
    weights = (
        jnp.concatenate([of_b(real), -of_b(imag)]),
        of_c(cs[0], real) - of_c(cs[1], imag),
        of_c(cs[0], imag) + of_c(cs[1], real),
    )
    return eqx.tree_at(
        lambda x: (x[0].parts.weight, x[1].real.weight, x[1].imag.weight), made, weights
    )


class S5(TracedStack):
    """S5: (T, input_size) -> (T, d_model).

    The state has 2 * layers * hidden_size floats.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `S5Config`, by name.
    """

    config: S5Config = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = S5Config(**options)
        self._build(c, input_size, lambda key: S5Mixer(c, key=key), key)
