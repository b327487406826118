"""The memory models as Flax modules, of either of its interfaces.

    memory = NNXMemory("agalite", 16, rngs=nnx.Rngs(0), layers=2)      # flax.nnx
    state = memory.initial_state(batch=8)
    state, ys = memory(state, xs, resets)      # xs (T, B, 16), resets (T, B) -> ys (T, B, 128)
    state, y = memory.step(state, x, reset)    # x (B, 16), reset (B,)        -> y (B, 128)

    memory = LinenMemory("agalite", {"layers": 2})                     # flax.linen
    params = memory.init(key, None, xs, resets)        # None: a fresh start
    state, ys = memory.apply(params, None, xs, resets)

The contract is the models' own (`agalite.memory.base`): `resets[t]` true begins an episode with
input t, and a sequence gives the same numbers as its inputs one by one. Time comes first; without
the axis B both take a single sequence. The numbers and the gradients are those of the Equinox model
with the same weights: this only moves the weights to where Flax looks for them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agalite import extras, validation
from agalite.memory import Memory, make_memory
from agalite.ops.state import copies

try:
    extras.require("agalite.interop.flax", ("flax",), "flax")
except ValueError as error:
    raise ImportError(str(error)) from None

from flax import linen, nnx

Weights = dict[str, Array]


class NNXMemory(nnx.Module):
    """A memory model whose weights are `nnx.Param`s, by name in `weights`."""

    def __init__(
        self,
        model: str | Memory,
        input_size: int | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ) -> None:
        """model: a name, and then input_size and options are those of `agalite.make_memory` and
        rngs draws the weights; or a model that exists already, with its weights."""
        if isinstance(model, str):
            if input_size is None or rngs is None:
                raise ValueError(f"NNXMemory({model!r}) needs input_size and rngs=nnx.Rngs(seed)")
            model = make_memory(model, input_size, key=rngs.params(), **options)
        elif input_size is not None or options:
            raise ValueError("the model is made already: it takes no input_size and no options")
        weights, self._rest = _apart(model)
        self.weights = nnx.Dict({name: nnx.Param(value) for name, value in weights.items()})

    def to_equinox(self) -> Memory:
        """The Equinox model with the weights as they are now."""
        return self._rest({name: param[...] for name, param in self.weights.items()})

    def initial_state(self, batch: int | None = None) -> Any:
        """The state before the first input, of one sequence or of `batch` of them."""
        return _initial_state(self.to_equinox(), batch)

    def __call__(
        self, state: Any, xs: Float[Array, "T *B input"], resets: Bool[Array, "T *B"] | None = None
    ) -> tuple[Any, Float[Array, "T *B output"]]:
        """A sequence; state None is a fresh start. The gradient stops at the state."""
        return _scan(self.to_equinox(), state, xs, resets)

    def step(
        self, state: Any, x: Float[Array, "*B input"], reset: Bool[Array, "*B"] | None = None
    ) -> tuple[Any, Float[Array, "*B output"]]:
        """One input of each sequence; state None is a fresh start."""
        return _step(self.to_equinox(), state, x, reset)

    def refresh(self, state: Any) -> Any:
        """The same state for the weights as they are now (`Memory.refresh`): GTrXL's needs it."""
        memory = self.to_equinox()
        own = jax.eval_shape(memory.initial_state)
        first, like = jax.tree.leaves(state)[:1], jax.tree.leaves(own)[:1]
        batched = bool(first) and jnp.ndim(first[0]) > like[0].ndim
        return (jax.vmap(memory.refresh) if batched else memory.refresh)(state)


class LinenMemory(linen.Module):
    """A memory model whose weights are parameters of Linen; its input size is that of the inputs.

    model: a name that `agalite models` lists (`name` is Linen's own word). options: those of
    `agalite.make_memory`.
    """

    model: str
    options: Mapping[str, Any] | None = None

    @linen.compact
    def __call__(
        self, state: Any, xs: Float[Array, "T *B input"], resets: Bool[Array, "T *B"] | None = None
    ) -> tuple[Any, Float[Array, "T *B output"]]:
        """A sequence; state None is a fresh start. The gradient stops at the state."""
        return _scan(self._memory(xs), state, xs, resets)

    @linen.compact
    def step(
        self, state: Any, x: Float[Array, "*B input"], reset: Bool[Array, "*B"] | None = None
    ) -> tuple[Any, Float[Array, "*B output"]]:
        """One input of each sequence; state None is a fresh start."""
        return _step(self._memory(x), state, x, reset)

    def _memory(self, xs: Array) -> Memory:
        options = dict(self.options or {})

        def make(key: Array) -> Memory:
            return make_memory(self.model, xs.shape[-1], key=key, **options)

        _, rest = _apart(eqx.filter_eval_shape(make, jax.random.key(0)))
        return rest(self.param("weights", lambda key: _apart(make(key))[0]))


class _Rest:
    """A model without its weights: called with them, by name, it is the model again.

    Compared and hashed by what it holds, so that Flax compiles a function of it once.
    """

    def __init__(self, memory: Memory) -> None:
        paths, self.structure = jax.tree_util.tree_flatten_with_path(memory)
        self.names = tuple(
            jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths
        )

    def __call__(self, weights: Mapping[str, Array]) -> Memory:
        return jax.tree.unflatten(self.structure, [weights[name] for name in self.names])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rest) and self.structure == other.structure

    def __hash__(self) -> int:
        return hash(self.structure)


def _apart(memory: Memory) -> tuple[Weights, Callable[[Mapping[str, Array]], Memory]]:
    leaves = jax.tree.leaves(memory)
    strange = [x for x in leaves if not jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact)]
    if strange:
        raise ValueError(
            f"{type(memory).__name__} has a leaf {strange[0]!r}, which is no array of floats; "
            "Flax would train it: make it a static field"
        )
    rest = _Rest(memory)
    return dict(zip(rest.names, leaves, strict=True)), rest


def _initial_state(memory: Memory, batch: int | None) -> Any:
    state = memory.initial_state()
    if batch is None:
        return state
    validation.integer("batch", batch, minimum=1)
    return copies(state, batch)


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
