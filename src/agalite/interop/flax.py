"""The memory models as Flax modules, for both of its interfaces.

    memory = NNXMemory("agalite", 16, rngs=nnx.Rngs(0), layers=2)      # flax.nnx
    state = memory.initial_state(batch=8)
    state, ys = memory(state, xs, resets)      # xs (T, B, 16), resets (T, B) -> ys (T, B, 128)
    state, y = memory.step(state, x, reset)    # x (B, 16), reset (B,)        -> y (B, 128)

    memory = LinenMemory("agalite", {"layers": 2})                     # flax.linen
    params = memory.init(key, None, xs, resets)        # None: the initial state
    state, ys = memory.apply(params, None, xs, resets)

The contract is that of the models (`agalite.memory.base`): `resets[t]` true begins an episode with
input t, and a sequence gives the same outputs as its inputs one by one. Time is the first axis; the
batch axis B may be left out. Outputs and gradients are those of the Equinox model with the same
weights: the modules only hold the weights where Flax looks for them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agalite import extras, validation
from agalite.memory import Memory, make_memory
from agalite.ops.resets import broadcast_state

try:
    extras.require("agalite.interop.flax", ("flax",), "flax")
except ValueError as error:
    raise ImportError(str(error)) from None

from flax import linen, nnx

Weights = dict[str, Array]


class NNXMemory(nnx.Module):
    """A memory model as a `flax.nnx.Module`; its weights are `nnx.Param`s in the dict `weights`.

    **Arguments:**

    - `model`: a name that `agalite models` lists, or a `Memory`, whose weights are used.
    - `input_size`: width of the inputs; only with a name.
    - `rngs`: draws the weights; only with a name.
    - `options`: those of `agalite.make_memory`; only with a name.
    """

    def __init__(
        self,
        model: str | Memory,
        input_size: int | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, str):
            if input_size is None or rngs is None:
                raise ValueError(f"NNXMemory({model!r}) needs input_size and rngs=nnx.Rngs(seed)")
            model = make_memory(model, input_size, key=rngs.params(), **options)
        elif input_size is not None or options:
            raise ValueError("the model is made already: it takes no input_size and no options")
        weights, self._rebuild = _split(model)
        self.weights = nnx.Dict({name: nnx.Param(value) for name, value in weights.items()})

    def to_equinox(self) -> Memory:
        """The Equinox model with the current weights."""
        return self._rebuild({name: param[...] for name, param in self.weights.items()})

    def initial_state(self, batch: int | None = None) -> Any:
        """The state before the first input, of one sequence or of a batch of them."""
        return _initial_state(self.to_equinox(), batch)

    def __call__(
        self, state: Any, xs: Float[Array, "T *B input"], resets: Bool[Array, "T *B"] | None = None
    ) -> tuple[Any, Float[Array, "T *B output"]]:
        """Compute a sequence.

        **Arguments:**

        - `state`: of the memory; None is the initial state. The gradient stops at it.
        - `xs`: (T, B, input) or (T, input).
        - `resets`: (T, B) or (T,), true where an episode begins; None is nowhere.

        **Returns:**

        The state after the last input, and the outputs (T, B, output) or (T, output).
        """
        return _scan(self.to_equinox(), state, xs, resets)

    def step(
        self, state: Any, x: Float[Array, "*B input"], reset: Bool[Array, "*B"] | None = None
    ) -> tuple[Any, Float[Array, "*B output"]]:
        """Compute one input `x` (B, input) or (input,) of each sequence; otherwise as above."""
        return _step(self.to_equinox(), state, x, reset)

    def refresh(self, state: Any) -> Any:
        """The state for weights that have changed since (`Memory.refresh`): GTrXL needs it."""
        memory = self.to_equinox()
        own = jax.eval_shape(memory.initial_state)
        first, like = jax.tree.leaves(state)[:1], jax.tree.leaves(own)[:1]
        batched = bool(first) and jnp.ndim(first[0]) > like[0].ndim
        return (jax.vmap(memory.refresh) if batched else memory.refresh)(state)


class LinenMemory(linen.Module):
    """A memory model as a `flax.linen.Module`; its input size is that of the inputs.

    **Arguments:**

    - `model`: a name that `agalite models` lists (`name` is an argument of Linen's own).
    - `options`: those of `agalite.make_memory`.
    """

    model: str
    options: Mapping[str, Any] | None = None

    @linen.compact
    def __call__(
        self, state: Any, xs: Float[Array, "T *B input"], resets: Bool[Array, "T *B"] | None = None
    ) -> tuple[Any, Float[Array, "T *B output"]]:
        """Compute a sequence.

        **Arguments:**

        - `state`: of the memory; None is the initial state. The gradient stops at it.
        - `xs`: (T, B, input) or (T, input).
        - `resets`: (T, B) or (T,), true where an episode begins; None is nowhere.

        **Returns:**

        The state after the last input, and the outputs (T, B, output) or (T, output).
        """
        return _scan(self._memory(xs), state, xs, resets)

    @linen.compact
    def step(
        self, state: Any, x: Float[Array, "*B input"], reset: Bool[Array, "*B"] | None = None
    ) -> tuple[Any, Float[Array, "*B output"]]:
        """Compute one input `x` (B, input) or (input,) of each sequence; otherwise as above."""
        return _step(self._memory(x), state, x, reset)

    def _memory(self, xs: Array) -> Memory:
        options = dict(self.options or {})

        def make(key: Array) -> Memory:
            return make_memory(self.model, xs.shape[-1], key=key, **options)

        _, rebuild = _split(eqx.filter_eval_shape(make, jax.random.key(0)))
        return rebuild(self.param("weights", lambda key: _split(make(key))[0]))


class _Rebuild:
    """A model without its weights. Called with the weights, by name, it returns the model.

    It is compared and hashed by the model's structure, so that Flax compiles a function of it
    once.
    """

    def __init__(self, memory: Memory) -> None:
        paths, self.structure = jax.tree_util.tree_flatten_with_path(memory)
        self.names = tuple(
            jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths
        )

    def __call__(self, weights: Mapping[str, Array]) -> Memory:
        return jax.tree.unflatten(self.structure, [weights[name] for name in self.names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rebuild) and self.structure == other.structure

    def __hash__(self) -> int:
        return hash(self.structure)


def _split(memory: Memory) -> tuple[Weights, Callable[[Mapping[str, Array]], Memory]]:
    leaves = jax.tree.leaves(memory)
    others = [x for x in leaves if not jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)]
    if others:
        raise ValueError(
            f"{type(memory).__name__} has a leaf {others[0]!r}, which is no array of floats; "
            "Flax would train it: make it a static field"
        )
    rebuild = _Rebuild(memory)
    return dict(zip(rebuild.names, leaves, strict=True)), rebuild


def _initial_state(memory: Memory, batch: int | None) -> Any:
    state = memory.initial_state()
    if batch is None:
        return state
    validation.check_integer("batch", batch, minimum=1)
    return broadcast_state(state, batch)


def _scan(memory: Memory, state: Any, xs: Any, resets: Any) -> tuple[Any, Array]:
    single = jnp.ndim(xs) == 2
    validation.check_shape(
        "xs", xs, ("T", memory.input_size) if single else ("T", "B", memory.input_size)
    )
    resets = jnp.zeros(jnp.shape(xs)[:-1], bool) if resets is None else resets
    validation.check_shape("resets", resets, jnp.shape(xs)[:-1])
    if state is None:
        state = _initial_state(memory, None if single else jnp.shape(xs)[1])
    if single:
        return memory.scan(state, xs, resets)
    return jax.vmap(memory.scan, in_axes=(0, 1, 1), out_axes=(0, 1))(state, xs, resets)


def _step(memory: Memory, state: Any, x: Any, reset: Any) -> tuple[Any, Array]:
    single = jnp.ndim(x) == 1
    validation.check_shape("x", x, (memory.input_size,) if single else ("B", memory.input_size))
    reset = jnp.zeros(jnp.shape(x)[:-1], bool) if reset is None else reset
    validation.check_shape("reset", reset, jnp.shape(x)[:-1])
    if state is None:
        state = _initial_state(memory, None if single else jnp.shape(x)[0])
    return (memory.step if single else jax.vmap(memory.step))(state, x, reset)
