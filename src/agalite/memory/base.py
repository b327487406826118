"""The contract of every memory model.

    state = memory.initial_state()                    # one sequence; vmap for a batch
    state, y  = memory.step(state, x, reset)          # x (input,), reset () -> y (output,)
    state, ys = memory.scan(state, xs, resets)        # xs (T, input), resets (T,) -> ys (T, output)

`reset[t]` true means that an episode begins with input t: nothing before t influences anything from
t on. (Of finite inputs: a NaN inside a sequence reaches all outputs of that `scan`.) `scan` equals
repeated `step`, for any chunking of a sequence. The state is a fixed-size pytree of arrays.
`agalite.testing.check_memory` checks all of this for any model.
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
    """Base class of all memory models. A new model defines `initial_state` and `_run`."""

    input_size: eqx.AbstractVar[int]
    output_size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def initial_state(self) -> State:
        """The state before the first input of an episode."""

    @abc.abstractmethod
    def _run(
        self, state: State, xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[State, Float[Array, "T output"]]:
        """`scan` for inputs that are checked already, T >= 1; differentiable in all arguments."""

    def step(
        self, state: State, x: Float[Array, " input"], reset: Bool[Array, ""] | bool = False
    ) -> tuple[State, Float[Array, " output"]]:
        """Takes in one input. The gradient passes through the incoming state.

        **Arguments:**

        - `state`: the state before this input.
        - `x`: (input,).
        - `reset`: (), true if an episode begins with this input.

        **Returns:**

        The state after this input, and the output (output,).
        """
        x, reset = validation.as_real("x", x), validation.as_bool("reset", reset)
        validation.check_shape("x", x, (self.input_size,))
        validation.check_shape("reset", reset, ())
        x = x.astype(self.dtype)
        validation.check_finite("x", x)
        validation.check_structure("state", state, jax.eval_shape(self.initial_state))
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
        """Takes in a sequence: the same numbers as repeated `step`, all at once.

        The gradient reaches back to the beginning of the sequence.

        **Arguments:**

        - `state`: the state before the first input.
        - `xs`: (T, input), T >= 1.
        - `resets`: (T,), true where an episode begins; `None`: nowhere.
        - `through_state`: let the gradient pass through the incoming state too.

        **Returns:**

        The state after the last input, and the outputs (T, output).
        """
        xs = validation.as_real("xs", xs)
        validation.check_shape("xs", xs, ("T", self.input_size))
        validation.check_nonempty("xs", xs)
        resets = validation.as_bool(
            "resets", jnp.zeros(len(xs), bool) if resets is None else resets
        )
        validation.check_shape("resets", resets, (xs.shape[0],))
        xs = xs.astype(self.dtype)
        validation.check_finite("xs", xs)
        validation.check_structure("state", state, jax.eval_shape(self.initial_state))
        if not through_state:
            state = jax.lax.stop_gradient(state)
        return self._run(state, xs, resets)

    def refresh(self, state: State) -> State:
        """The same state for the present weights, after an update of the weights.

        Only GTrXL and Transformer with a key/value cache hold anything derived from weights. All
        other models return the state unchanged.
        """
        return state

    @property
    def has_step_kernel(self) -> bool:
        """Whether `prepare_for_inference` gives a model that steps faster."""
        return False

    def prepare_for_inference(self) -> Self:
        """The same model with its weights laid out for stepping one stream, or a few."""
        return self

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the weights; inputs are converted to it."""
        return jnp.result_type(*(x.dtype for x in self._weights()))

    @property
    def state_size(self) -> int:
        """Floating-point numbers in the state of one sequence."""
        # Shapes only, so that it works for a model of shapes too (`agalite models`).
        shapes: Any = eqx.filter_eval_shape(lambda memory: memory.initial_state(), self)
        leaves = jax.tree.leaves(shapes)
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    @property
    def parameter_count(self) -> int:
        """Numbers that are trained."""
        return sum(x.size for x in self._weights())

    def _weights(self) -> list[Array]:
        leaves = jax.tree.leaves(self)
        return [x for x in leaves if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)]
