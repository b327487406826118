"""The canonical transformer (Algorithm 1), causal, with a finite context, in the shared block.

`WindowAttention` is softmax attention over a sliding window of inputs; GTrXL uses it too, with
relative positions. Its state is the window itself: the last M inputs of the layer. When streaming,
their keys and values are cached beside them, so that a step projects one input and not M. A
sequence is computed from the stored inputs, so its gradient reaches the projections of the
remembered inputs and it uses the present weights. A cache made by other weights is refused
(`refresh`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from agalite import validation
from agalite.memory.block import Attention, Stack, StackConfig
from agalite.memory.layers import ORTHOGONAL, HeadsIn, HeadsOut, LayerNorm
from agalite.ops.activations import relu
from agalite.ops.delta import advance_phase
from agalite.ops.resets import episode_starts
from agalite.ops.softmax import window_attention
from agalite.ops.xl import xl_attention

# Absolute positions count inputs since the reset, modulo this number.
_POSITIONS = 2**16


@dataclass(frozen=True)
class TransformerConfig(StackConfig):
    """Options of the transformer (Algorithm 1)."""

    context: int = 128
    """Number of inputs before the present one that each layer can read."""
    cache: bool = True
    """Keep keys and values between steps; otherwise every step projects the whole context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_integer("context", self.context, minimum=1)
        validation.check_boolean("cache", self.cache)


class Cache(NamedTuple):
    """Keys and values of the window, heads first, so that a step reads them without a transpose."""

    keys: Float[Array, "H M V"]
    values: Float[Array, "H M V"]
    stamp: UInt32[Array, ""]  # a checksum of the weights that made them


class WindowState(NamedTuple):
    """A ring buffer: `cursor` is the next slot to write, `filled` how many slots are valid.

    A reset sets `filled` to zero: older inputs are masked, not overwritten.
    """

    inputs: Float[Array, "M D"]
    filled: Int[Array, ""]
    cursor: Int[Array, ""]
    cache: Cache | None


class Relative(eqx.Module):
    """Transformer-XL's relative positions: sinusoids of the distance, projected, and two biases."""

    weight: Float[Array, "H V D"]
    content_bias: Float[Array, "H V"]
    position_bias: Float[Array, "H V"]

    def __init__(self, d_model: int, heads: int, head_size: int, *, key: PRNGKeyArray):
        weight = ORTHOGONAL(key, (heads * head_size, d_model))
        self.weight = weight.reshape(heads, head_size, d_model)
        self.content_bias = jnp.zeros((heads, head_size))
        self.position_bias = jnp.zeros((heads, head_size))


def sinusoids(positions: Int[Array, " N"] | np.ndarray, size: int) -> Any:
    """(N, size): the position code of Vaswani et al., sines, then cosines.

    For NumPy positions the result is NumPy's: a constant of the compiled program, which would
    otherwise compute it at every step.
    """
    half = (size + 1) // 2
    frequency = np.exp(-np.log(10000.0) * np.arange(half) / half)
    if isinstance(positions, np.ndarray):
        angle = positions[:, None] * frequency
        codes = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
        return codes[:, :size].astype(np.float32)
    angle = positions[:, None] * jnp.asarray(frequency, jnp.float32)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)[:, :size]


class WindowAttention(Attention):
    """(T, D) -> (T, D): softmax attention over the last `memory` inputs and the present one."""

    norm: LayerNorm
    query: HeadsIn
    key_value: HeadsIn
    relative: Relative | None
    out: HeadsOut
    memory: int = eqx.field(static=True)
    cached: bool = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        *,
        heads: int,
        head_size: int,
        memory: int,
        relative: bool,
        cached: bool,
        key: PRNGKeyArray,
    ):
        q, kv, r, o = jax.random.split(key, 4)
        self.norm = LayerNorm(d_model)
        self.query = HeadsIn(d_model, heads, [head_size], key=q)
        self.key_value = HeadsIn(d_model, heads, [head_size] * 2, key=kv)
        self.relative = Relative(d_model, heads, head_size, key=r) if relative else None
        self.out = HeadsOut(heads, head_size, d_model, key=o)
        self.memory, self.cached = memory, cached

    def initial_state(self) -> WindowState:
        heads, head_size, d_model = self.query.weight.shape
        dtype = self.query.weight.dtype
        empty = jnp.zeros((heads, self.memory, head_size), dtype)
        zero = jnp.zeros((), jnp.int32)
        cache = Cache(empty, empty, self._stamp()) if self.cached else None
        return WindowState(jnp.zeros((self.memory, d_model), dtype), zero, zero, cache)

    def refresh(self, state: WindowState) -> WindowState:
        """The same window with keys and values made by the present weights."""
        if not self.cached:
            return state
        return state._replace(cache=self._cache(*self._project(self.norm(state.inputs))))

    def _cache(self, keys: Float[Array, "M H V"], values: Float[Array, "M H V"]) -> Cache:
        return Cache(keys.swapaxes(0, 1), values.swapaxes(0, 1), self._stamp())

    def __call__(
        self, state: WindowState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[WindowState, Float[Array, "T D"]]:
        x = self.norm(h)
        queries = self.query(x)
        keys, values = self._project(x)
        if h.shape[0] == 1:
            state, attended = self._step(state, h, queries[0], keys[0], values[0], resets[0])
        else:
            state, attended = self._sequence(state, h, queries, keys, values, resets)
        return state, self.out(attended)

    def _project(self, x: Float[Array, "T D"]) -> tuple[Array, Array]:
        keys, values = jnp.split(self.key_value(x), 2, axis=-1)
        return keys, values

    @property
    def _scale(self) -> float:
        return self.query.weight.shape[1] ** -0.5

    # --- one input: read the ring buffer ----------------------------------------------------------

    def _step(
        self, state: WindowState, h: Array, q: Array, key: Array, value: Array, reset: Array
    ) -> tuple[WindowState, Float[Array, "1 H V"]]:
        count, cursor = (jnp.where(reset, 0, x) for x in (state.filled, state.cursor))
        made = state.cache or self._cache(*self._project(self.norm(state.inputs)))
        # Slot i holds the input of `age` steps ago; 1 is the last.
        age = (cursor - 1 - jnp.arange(self.memory)) % self.memory + 1
        # Queries are scaled and not scores: see `ops/softmax.py`.
        content, positions = q * self._scale, None
        if self.relative is not None:
            content = (q + self.relative.content_bias) * self._scale
            positions = self._distance_scores((q + self.relative.position_bias) * self._scale)
        past = jnp.einsum("hv,hmv->hm", content, made.keys)
        own = jnp.einsum("hv,hv->h", content, key)
        if positions is not None:
            past, own = past + positions[:, age], own + positions[:, 0]
        past = jnp.where(age <= count, past, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([own[:, None], past], axis=1), axis=-1)
        read = jnp.einsum("hm,hmv->hv", weights[:, 1:], made.values)
        attended = weights[:, :1] * value + read
        attended = self._refuse_stale(state.cache, count, attended)
        # The comparison is never true. It makes the write depend on the read, so that XLA updates
        # the ring in place; otherwise it copies the ring twice, which costs more than the step.
        place = cursor + (attended[0, 0] > jnp.inf).astype(cursor.dtype)

        def put(ring: Array, x: Array, axis: int) -> Array:
            return lax.dynamic_update_index_in_dim(ring, x, place, axis)

        cache = state.cache and Cache(
            put(state.cache.keys, key, 1), put(state.cache.values, value, 1), self._stamp()
        )
        state = WindowState(
            put(state.inputs, h[0], 0),
            jnp.minimum(count + 1, self.memory),
            (cursor + 1) % self.memory,
            cache,
        )
        return state, attended[None]

    def _codes(self, dtype: Any) -> Float[Array, "M+1 D"]:
        return jnp.asarray(
            sinusoids(np.arange(self.memory + 1), self.query.weight.shape[-1]), dtype
        )

    def _distance_scores(self, q: Float[Array, "H V"]) -> Float[Array, "H M+1"]:
        """q . (W r_d) for all distances, as (q W) . r_d: the embeddings need not be projected."""
        assert self.relative is not None
        codes = self._codes(q.dtype)
        return jnp.einsum("hv,hvd->hd", q, self.relative.weight) @ codes.T

    # --- a sequence: the window in order, then the inputs -----------------------------------------

    def _sequence(
        self, state: WindowState, h: Array, q: Array, keys: Array, values: Array, resets: Array
    ) -> tuple[WindowState, Float[Array, "T H V"]]:
        steps = h.shape[0]
        past = jnp.roll(state.inputs, -state.cursor, axis=0)
        old_keys, old_values = self._project(self.norm(past))
        keys = jnp.concatenate([old_keys, keys])
        values = jnp.concatenate([old_values, values])
        # The first valid key before any reset, else the first of the query's episode.
        seen = jnp.cumsum(resets) > 0
        starts = jnp.where(seen, self.memory + episode_starts(resets), self.memory - state.filled)
        if self.relative is None:
            attended = window_attention(
                q, keys, values, starts, window=self.memory, scale=self._scale
            )
        else:
            codes = self._codes(q.dtype)
            embeddings = jnp.einsum("md,hvd->mhv", codes, self.relative.weight)
            attended = xl_attention(
                q,
                keys,
                values,
                embeddings,
                self.relative.content_bias,
                self.relative.position_bias,
                starts,
            )
        count = jnp.minimum(self.memory + steps - starts[-1], self.memory)
        window = slice(-self.memory, None)
        cache = state.cache and self._cache(keys[window], values[window])
        inputs = jnp.concatenate([past, h])[window]
        return WindowState(inputs, count, jnp.zeros_like(state.cursor), cache), attended

    # --- a cache is valid only for the weights that made it ---------------------------------------

    def _stamp(self) -> UInt32[Array, ""]:
        """A checksum of the weights that make keys and values.

        It reads every 64th number of the projection, some of which any step of an optimiser
        changes. Reading all of them would cost as much as the projection itself.
        """
        parts = (self.norm.scale, self.norm.bias, self.key_value.weight[:, ::8, ::8])
        words = [lax.bitcast_convert_type(lax.stop_gradient(p), jnp.uint8).ravel() for p in parts]
        total = jnp.zeros((), jnp.uint32)
        for word in words:
            place = jnp.arange(word.size, dtype=jnp.uint32) % 251 + 1
            total = total + jnp.sum(word.astype(jnp.uint32) * place, dtype=jnp.uint32)
        return total

    def _refuse_stale(self, cache: Cache | None, count: Array, attended: Array) -> Array:
        """Raises outside of `jit`; inside, where it cannot, the output becomes NaN."""
        if cache is None:
            return attended
        stale = (cache.stamp != self._stamp()) & (count > 0)
        if not isinstance(stale, Tracer) and bool(stale):
            raise ValueError(
                "state holds keys and values made by other weights; call "
                "state = memory.refresh(state) after every update of the weights"
            )
        return jnp.where(stale, jnp.nan, attended)


class TransformerState(NamedTuple):
    layers: tuple[Any, ...]
    position: Int[Array, ""]


class Transformer(Stack):
    """The canonical transformer: (T, input_size) -> (T, d_model).

    Sinusoidal positions are added to the embedding. Each layer reads the last `context` inputs and
    the present one, since the reset. After an update of the weights, pass stored states through
    `refresh`.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `TransformerConfig`, by name.
    """

    config: TransformerConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = TransformerConfig(**options)

        def attention(key: PRNGKeyArray) -> WindowAttention:
            return WindowAttention(
                c.d_model,
                heads=c.heads,
                head_size=c.head_size,
                memory=c.context,
                relative=False,
                cached=c.cache,
                key=key,
            )

        self._build(c, input_size, attention, key)

    def initial_state(self) -> TransformerState:
        return TransformerState(super().initial_state(), jnp.zeros((), jnp.int32))

    def refresh(self, state: TransformerState) -> TransformerState:
        return state._replace(layers=super().refresh(state.layers))

    def _run(
        self, state: TransformerState, xs: Float[Array, "T input"], resets: Bool[Array, " T"]
    ) -> tuple[TransformerState, Float[Array, "T D"]]:
        positions = advance_phase(state.position, resets, _POSITIONS)
        h = relu(self.embedding(xs))
        h = h + sinusoids(positions, self.output_size).astype(h.dtype)
        layers, h = self._run_blocks(state.layers, h, resets)
        return TransformerState(layers, positions[-1]), h
