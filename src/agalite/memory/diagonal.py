"""Memories whose elements evolve by themselves, in the place of a block's attention.

    s_t = decay_t * s_{t-1} + drive_t        element by element, real or complex

minGRU has decays that depend on the input; LRU, S5 and RTU have constant, complex ones. Both have
traces (docs/rtrl.md), written down here once.
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from agalite.memory.block import TracedAttention
from agalite.memory.layers import ComplexIn, LayerNorm
from agalite.ops.activations import normalise
from agalite.ops.matmul import broadcast_like
from agalite.ops.recurrence import Complex, linear_recurrence
from agalite.ops.traces import RowTrace, advance, with_past


class DiagonalMixer(TracedAttention):
    """(T, D) -> (T, D): norm, the recurrence, and an output of its states.

    The state is one vector (N,) of real numbers or `Complex` ones, in which every element has a
    decay and a drive of its own.
    """

    norm: eqx.AbstractVar[LayerNorm]
    config: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def recurrence(self, x: Float[Array, "T D"]) -> tuple[Any, Any]:
        """decays and drives (T, N), arrays or both `Complex`, of the inputs after the norm."""

    @abc.abstractmethod
    def output(self, states: Any, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Of the states (T, N) and the inputs after the norm."""

    @abc.abstractmethod
    def written(self, x: Float[Array, "T D"]) -> Float[Array, "T N"]:
        """The factor with which each element takes in its projection of the input."""

    def states(self, decays: Any, drives: Any, initial: Any, resets: Bool[Array, " T"]) -> Any:
        """s_t (T, N). A unit with a nonlinearity inside the recurrence overrides it."""
        return linear_recurrence(decays, drives, initial, resets, method=self.config.method)

    def __call__(
        self, state: Any, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[Any, Float[Array, "T D"]]:
        x = self.norm(h)
        states = self.states(*self.recurrence(x), state, resets)
        return states[-1], self.output(states, x)

    # --- traces -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def rows(self) -> dict[str, RowTrace]:
        """What decays and drives are functions of, by name: differentiable in the weights.

        A row of a projection of x, the input after the norm, has weight (D, N) and bias (N,); a
        constant of each element has no weight. Types are those of the state, complex ones joined.
        """

    @abc.abstractmethod
    def derivatives(
        self,
        decays: Shaped[Array, "T N"],
        drives: Shaped[Array, "T N"],
        previous: Shaped[Array, "T N"],
    ) -> dict[str, Shaped[Array, "T N"]]:
        """Of s_t by each of `rows` with s_{t-1}, `previous`, held fixed."""

    def initial_trace(self) -> dict[str, RowTrace]:
        return jax.tree.map(jnp.zeros_like, self.rows())

    def traced(
        self,
        state: Any,
        trace: dict[str, RowTrace],
        h: Float[Array, "T D"],
        resets: Bool[Array, " T"],
        past: "DiagonalMixer",
    ) -> tuple[Any, Float[Array, "T D"], dict[str, RowTrace]]:
        x = self.norm(h)
        decays, drives = self.recurrence(x)
        states = self.states(decays, drives, past._with_past(state, trace), resets)
        before = jnp.concatenate([_joined(state)[None], _joined(states)[:-1]])
        before = jnp.where(resets[:, None], jnp.zeros_like(before), before)
        derivatives = self.derivatives(_joined(decays), _joined(drives), before)
        trace = advance(trace, _joined(decays), derivatives, normalise(h), resets)
        return states[-1], self.output(states, x), trace

    def _with_past(self, state: Any, trace: dict[str, RowTrace]) -> Any:
        """`state`, with the gradient of `ops.traces.with_past`.

        The trace is by the rows that multiply the input before the norm's scale and bias:
        w (scale * x + shift) + b = (w scale) x + (w shift + b). The gradients of w, b, scale and
        shift follow by differentiating that.
        """

        def before_norm(row: RowTrace) -> RowTrace:
            if row.weight is None:
                return row
            shifted = row.bias + jnp.einsum("dn,d->n", row.weight, self.norm.bias)
            return RowTrace(row.weight * self.norm.scale[:, None], shifted)

        rows = {name: before_norm(row) for name, row in self.rows().items()}
        new = with_past(_joined(state), rows, trace)
        return Complex(new.real, new.imag) if isinstance(state, Complex) else new


class ConstantMixer(DiagonalMixer):
    """A recurrence with complex constants, s_t = a * s_{t-1} + g * (B x_t), in each element."""

    into: eqx.AbstractVar[ComplexIn]  # B

    @abc.abstractmethod
    def constants(self) -> tuple[Complex, Complex | Float[Array, " N"]]:
        """a and g (N,)."""

    def initial_state(self) -> Complex:
        zero = jnp.zeros(self.config.hidden_size, self.norm.scale.dtype)
        return Complex(zero, zero)

    def written(self, x: Float[Array, "T D"]) -> Float[Array, "T N"]:
        gain = self.constants()[1]
        if isinstance(gain, Complex):
            gain = jnp.sqrt(jnp.square(gain.real) + jnp.square(gain.imag))
        return jnp.broadcast_to(gain, (x.shape[0], self.config.hidden_size))

    def recurrence(self, x: Float[Array, "T D"]) -> tuple[Complex, Complex]:
        bx = self.into(x)
        decay, gain = jax.tree.map(lambda c: broadcast_like(c, bx.real), self.constants())
        return decay, bx * gain

    def rows(self) -> dict[str, RowTrace]:
        """a, and the rows of g B: two traces for all parameters that they are functions of."""
        decay, gain = (_joined(x) for x in self.constants())
        weight = lax.complex(*jnp.split(self.into.parts.weight[...], 2)).T * gain
        return {
            "decay": RowTrace(None, decay),
            "drive": RowTrace(weight, jnp.zeros_like(decay)),
        }

    def derivatives(
        self,
        decays: Shaped[Array, "T N"],
        drives: Shaped[Array, "T N"],
        previous: Shaped[Array, "T N"],
    ) -> dict[str, Shaped[Array, "T N"]]:
        del decays, drives
        return {"decay": previous, "drive": jnp.ones_like(previous)}


def _joined(x: Any) -> Shaped[Array, "..."]:
    """`Complex` as an array of complex numbers; an array as it is."""
    return lax.complex(x.real, x.imag) if isinstance(x, Complex) else x
