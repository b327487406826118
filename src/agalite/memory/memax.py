"""Models of the package `memax` (Morad et al.) under this library's contract.

memax writes a recurrent model as a binary operation on states, which a scan applies; about twenty
are published so, from Elman's network to Gated DeltaNet. `Memax` is memax's own residual network
around one of them, which reads x_t and whether an episode begins with it:

    memory = make_memory("memax", 16, cell="GDN", d_model=64, key=key)

The states are computed one after another, whatever scan the cell asks for: after a reset, outputs
then equal those from the initial state to the bit, and on a CPU an associative scan is slower.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from agalite import extras, validation
from agalite.memory.base import Memory

CELLS = (
    *("LRU", "S6", "LinearRNN", "FART", "FFM", "PSpherical", "FWP", "DeltaNet", "GDN"),
    *("DeltaProduct", "NMax", "Stack", "Attention", "Attention-RoPE", "Attention-ALiBi"),
    *("Elman", "ElmanReLU", "GRU", "MGU", "LSTM", "Spherical"),
)


@dataclass(frozen=True)
class MemaxConfig:
    """Options of memax's models."""

    cell: str = "LRU"
    """A name of memax's: LRU, S6, LinearRNN, FART, FFM, PSpherical, FWP, DeltaNet, GDN,
    DeltaProduct, NMax, Stack, Attention, Attention-RoPE, Attention-ALiBi, Elman, ElmanReLU, GRU,
    MGU, LSTM or Spherical."""
    d_model: int = 128
    """D, the model width."""
    layers: int = 2
    """Cells, one after another."""

    def __post_init__(self) -> None:
        validation.check_one_of("cell", self.cell, CELLS)
        validation.check_integer("d_model", self.d_model, minimum=4)
        validation.check_integer("layers", self.layers, minimum=1)


class Memax(Memory[Any]):
    """A model of memax: (T, input_size) -> (T, d_model).

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `MemaxConfig`, by name.
    """

    weights: Any
    """memax's network without what is not an array."""
    rest: Any = eqx.field(static=True)
    """What is not: activations, and the scan."""
    config: MemaxConfig = eqx.field(static=True)
    input_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = MemaxConfig(**options)
        validation.check_integer("input_size", input_size, minimum=1)
        extras.require("memory='memax'", ["memax"], "memax")
        from memax.equinox.scans import set_action_scan
        from memax.equinox.train_utils import get_residual_memory_model

        network: Any = get_residual_memory_model(
            c.cell, input_size, c.d_model, c.d_model, c.layers, key=key
        )
        scans = lambda network: [layer.scan for layer in network.layers]  # noqa: E731
        network = eqx.tree_at(scans, network, [set_action_scan] * c.layers)
        self.weights, self.rest = eqx.partition(network, eqx.is_array)
        self.input_size, self.output_size = input_size, c.d_model

    def initial_state(self) -> Any:
        floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        state = _as_real(self._network.initialize_carry())
        return jax.tree.map(lambda x: x.astype(self.dtype) if floating(x) else x, state)

    def _run(
        self, state: Any, xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]:
        carry = _as_complex(state, jax.eval_shape(self._network.initialize_carry))
        states, ys = self._network(carry, (xs, resets))
        return _as_real(self._network.latest_recurrent_state(states)), ys

    @property
    def _network(self) -> Any:
        return eqx.combine(self.weights, self.rest)


def _as_real(state: Any) -> Any:
    """Complex arrays (...) become pairs (..., 2) of real and imaginary parts."""

    def pair(x: Array) -> Array:
        return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x

    return jax.tree.map(pair, state)


def _as_complex(state: Any, like: Any) -> Any:
    """The inverse of `_as_real`, for a state of these types."""

    def join(x: Array, like: jax.ShapeDtypeStruct) -> Array:
        complex_ = jnp.issubdtype(like.dtype, jnp.complexfloating)
        return jax.lax.complex(x[..., 0], x[..., 1]) if complex_ else x

    return jax.tree.map(join, state, like)
