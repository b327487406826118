"""The contract of every memory model.

    state = memory.initial_state()                    # one sequence; vmap for a batch
    state, y  = memory.step(state, x, reset)          # x (input,), reset () -> y (output,)
    state, ys = memory.scan(state, xs, resets)        # xs (T, input), resets (T,) -> ys (T, output)

`reset[t]` true means that an episode begins with input t: nothing before t influences anything from
t on. (Of finite inputs: a NaN inside a sequence reaches all outputs of that `scan`.) `scan` equals
repeated `step`, for any chunking of a sequence. The state is a fixed-size pytree of arrays.
`agalite.testing.check_memory` checks all of this for any model.

A model whose recurrence is diagonal can also have traces (`has_traces`): what the state's past owes
to the weights, carried along with the state (docs/rtrl.md).

    trace = memory.initial_trace()
    trace = memory.advance_trace(trace, state, xs, resets)    # state: before xs
    state, ys = memory.scan(state, xs, resets, trace=trace)   # its gradient includes the past
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
    """Base class of all memory models.

    A new model defines `initial_state` and `_run`; one with traces also `has_traces`,
    `initial_trace` and `_run_traced`.
    """

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
        self,
        state: State,
        x: Float[Array, " input"],
        reset: Bool[Array, ""] | bool = False,
        *,
        trace: Any = None,
    ) -> tuple[State, Float[Array, " output"]]:
        """Takes in one input. The gradient passes through the incoming state.

        **Arguments:**

        - `state`: the state before this input.
        - `x`: (input,).
        - `reset`: (), true if an episode begins with this input.
        - `trace`: as for `scan`; no gradient then passes through the incoming state.

        **Returns:**

        The state after this input, and the output (output,).
        """
        x, reset = validation.as_real("x", x), validation.as_bool("reset", reset)
        validation.check_shape("x", x, (self.input_size,))
        validation.check_shape("reset", reset, ())
        x = x.astype(self.dtype)
        validation.check_finite("x", x)
        validation.check_structure("state", state, jax.eval_shape(self.initial_state))
        if trace is not None:
            self._check_trace(trace)
            state, ys, _ = self._run_traced(state, trace, x[None], reset[None], self)
            return state, ys[0]
        state, y = self._run(state, x[None], reset[None])
        return state, y[0]

    def scan(
        self,
        state: State,
        xs: Float[Array, "T input"],
        resets: Bool[Array, " T"] | None = None,
        *,
        through_state: bool = False,
        trace: Any = None,
    ) -> tuple[State, Float[Array, "T output"]]:
        """Takes in a sequence: the same numbers as repeated `step`, all at once.

        The gradient reaches back to the beginning of the sequence; with a trace, further: see
        `initial_trace`.

        **Arguments:**

        - `state`: the state before the first input.
        - `xs`: (T, input), T >= 1.
        - `resets`: (T,), true where an episode begins; `None`: nowhere.
        - `through_state`: let the gradient pass through the incoming state too.
        - `trace`: of the incoming state. The gradient of the weights then includes what reaches
            them through that state; the outputs are the same.

        **Returns:**

        The state after the last input, and the outputs (T, output).
        """
        if trace is not None:
            if through_state:
                raise ValueError(
                    "through_state=True with a trace would count the past twice; pass one of them"
                )
            state, ys, _ = self.scan_and_advance(state, xs, resets, trace)
            return state, ys
        xs, resets = self._check_sequence(state, xs, resets)
        if not through_state:
            state = jax.lax.stop_gradient(state)
        return self._run(state, xs, resets)

    def _check_sequence(
        self, state: State, xs: Array, resets: Array | None
    ) -> tuple[Float[Array, "T input"], Bool[Array, " T"]]:
        """The arguments of `scan`, checked; inputs in the model's type."""
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
        return xs, resets

    # --- traces -----------------------------------------------------------------------------------

    @property
    def has_traces(self) -> bool:
        """Whether gradients can reach past the beginning of a sequence (`initial_trace`)."""
        return False

    def initial_trace(self) -> Any:
        """The trace of `initial_state()`: a pytree of zeros, for one sequence.

        A trace holds the derivative of the state by the weights that wrote it. Carried along with
        the state (`advance_trace`) and given to `scan`, it makes the gradient of a sequence that of
        the whole past since the last reset: exactly for the weights that a layer's recurrence is
        made of, if they have not changed meanwhile. Across layers, and to what lies below the first
        of them, the gradient reaches back to the beginning of the sequence only. It leaves out the
        effect of weights on the past *inputs* of a layer, that is, every path through the states of
        layers above (Zucchet et al., 2023).
        """
        from agalite.memory.registry import models_with_traces

        raise ValueError(
            f"{type(self).__name__} has no traces with these options, so its gradients end where a "
            f"sequence begins; models with traces: {', '.join(models_with_traces())}"
        )

    def advance_trace(
        self,
        trace: Any,
        state: State,
        xs: Float[Array, "T input"],
        resets: Bool[Array, " T"] | None = None,
    ) -> Any:
        """The trace after a sequence. No gradient flows through it.

        **Arguments:**

        - `trace`: before the first input.
        - `state`: the memory state before the first input.
        - `xs`, `resets`: as for `scan`. A reset makes the trace zero, as it does the state.
        """
        return self.scan_and_advance(state, xs, resets, trace)[2]

    def scan_and_advance(
        self,
        state: State,
        xs: Float[Array, "T input"],
        resets: Bool[Array, " T"] | None,
        trace: Any,
        *,
        past: Self | None = None,
    ) -> tuple[State, Float[Array, "T output"], Any]:
        """`scan` with a trace and `advance_trace` in one pass over the sequence.

        **Arguments:**

        - `state`, `xs`, `resets`, `trace`: as for `scan`.
        - `past`: a model like this one, whose weights get the gradient from before the sequence in
            place of this model's, so that it can be told from the rest; `None`: this model.

        **Returns:**

        The state after the last input, the outputs (T, output), and the trace after the last input.
        """
        xs, resets = self._check_sequence(state, xs, resets)
        self._check_trace(trace)
        state, trace = jax.lax.stop_gradient((state, trace))
        return self._run_traced(state, trace, xs, resets, self if past is None else past)

    def _run_traced(
        self,
        state: State,
        trace: Any,
        xs: Float[Array, "T input"],
        resets: Bool[Array, " T"],
        past: Any,
    ) -> tuple[State, Float[Array, "T output"], Any]:
        """`scan_and_advance` for arguments that are checked already (see `ops.traces`).

        past: a model of this class, of which only weights are read, and only by `with_past`.
        """
        raise NotImplementedError

    def _check_trace(self, trace: Any) -> None:
        validation.check_structure(
            "trace", trace, jax.eval_shape(self.initial_trace), start="initial_trace()"
        )

    @property
    def trace_size(self) -> int:
        """Numbers in the trace of one sequence, of complex ones both parts; 0 without traces."""
        if not self.has_traces:
            return 0
        shapes: Any = eqx.filter_eval_shape(lambda memory: memory.initial_trace(), self)
        leaves = jax.tree.leaves(shapes)
        return sum(x.size * (1 + jnp.issubdtype(x.dtype, jnp.complexfloating)) for x in leaves)

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
