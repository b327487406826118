"""What every memory model promises.

    state = memory.initial_state()                    # one sequence; vmap for a batch
    state, y  = memory.step(state, x, reset)          # x (input,), reset () -> y (output,)
    state, ys = memory.scan(state, xs, resets)        # xs (T, input), resets (T,) -> ys (T, output)

`reset[t]` true means that an episode begins with input t: nothing before t influences anything from
t on (of finite numbers: a NaN inside a sequence spreads through `scan`). `scan` equals repeated
`step`, cut anywhere; the state is a fixed-size pytree of arrays.
`tests/test_contract.py` holds every model to this, in one table.
"""

import abc
from typing import Any, Generic, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agalite import validation

State = TypeVar("State")


class Memory(eqx.Module, Generic[State]):
    """Base of all models. A new one defines `initial_state` and `_run`."""

    input_size: eqx.AbstractVar[int]
    output_size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def initial_state(self) -> State:
        """The state before the first input of an episode."""

    @abc.abstractmethod
    def _run(
        self, state: State, xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[State, Float[Array, "T output"]]:
        """Inputs that have been checked, T >= 1; differentiable in everything."""

    def step(
        self, state: State, x: Float[Array, " input"], reset: Bool[Array, ""] | bool = False
    ) -> tuple[State, Float[Array, " output"]]:
        """One input: x (input,), reset () -> state, y (output,).

        The gradient passes through the incoming state, so that unrolled steps can be trained.
        """
        x, reset = validation.real_numbers("x", x), validation.as_bool("reset", reset)
        validation.check_shape("x", x, (self.input_size,))
        validation.check_shape("reset", reset, ())
        x = x.astype(self.dtype)
        validation.finite("x", x)
        validation.same_structure("state", state, jax.eval_shape(self.initial_state))
        state, y = self._run(state, x[None], reset[None])
        return state, y[0]

    def scan(
        self,
        state: State,
        xs: Float[Array, "T input"],
        resets: Bool[Array, " T"] | None = None,
        *,
        through_state: bool = False,
    ) -> tuple[State, Float[Array, "T output"]]:
        """A sequence: xs (T, input), resets (T,) -> state, ys (T, output).

        The gradient reaches back to the beginning of the sequence given, and not through the
        incoming state unless `through_state` is set.
        """
        xs = validation.real_numbers("xs", xs)
        validation.check_shape("xs", xs, ("T", self.input_size))
        validation.nonempty("xs", xs)
        resets = validation.as_bool(
            "resets", jnp.zeros(len(xs), bool) if resets is None else resets
        )
        validation.check_shape("resets", resets, (xs.shape[0],))
        xs = xs.astype(self.dtype)
        validation.finite("xs", xs)
        validation.same_structure("state", state, jax.eval_shape(self.initial_state))
        if not through_state:
            state = jax.lax.stop_gradient(state)
        return self._run(state, xs, resets)

    def refresh(self, state: State) -> State:
        """The same state for these weights, where it holds anything derived from older ones.

        Only GTrXL and Transformer with a key/value cache need it: call it on stored states after an
        update of the weights. For every other model it returns the state as it is.
        """
        return state

    @property
    def packable(self) -> bool:
        """Whether `packed` has something to offer."""
        return False

    def packed(self) -> Self:
        """The same model, its weights laid out for steps of one stream or a few."""
        return self

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights; inputs are converted to it."""
        return jnp.result_type(*(x.dtype for x in self._weights()))

    @property
    def state_size(self) -> int:
        """Floating-point numbers carried from step to step, for one sequence."""
        # Shapes only, so that it works for a model of shapes too (`agalite models`).
        shapes: Any = eqx.filter_eval_shape(lambda memory: memory.initial_state(), self)
        leaves = jax.tree.leaves(shapes)
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    @property
    def parameter_count(self) -> int:
        return sum(x.size for x in self._weights())

    def _weights(self) -> list[Array]:
        leaves = jax.tree.leaves(self)
        return [x for x in leaves if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)]
