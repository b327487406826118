"""AGaLiTe: the approximate gated linear transformer (Algorithm 4)."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from agalite import kernels, validation
from agalite.memory import packed
from agalite.memory.block import Stack, StackConfig
from agalite.memory.gated import FeatureAttention, check_features
from agalite.memory.packed import Packed, packable
from agalite.ops.attention import agalite_attention
from agalite.ops.delta import BASES, Basis, make_basis
from agalite.ops.features import feature_width
from agalite.ops.recurrence import METHODS, Method
from agalite.ops.state import AGaLiTeState, agalite_state


@dataclass(frozen=True)
class AGaLiTeConfig(StackConfig):
    eta: int = 4
    """Feature-map expansion: keys and queries are eta * head_size wide."""
    r: int = 1
    """Approximation parameter; for the bases slots and rank1 the number of state vectors."""
    basis: str = "paper"
    """paper, published, slots or rank1 (see agalite.ops.delta)."""
    feature: str = "outer"
    """outer (the learned map), elu1, dpfp or relu."""
    nu: int = 1
    """Expansion of the dpfp feature map."""
    gating: bool = True
    """False switches the gates off (the paper's ablation)."""
    horizon: tuple[float, float] | None = None
    """(shortest, longest) time constants of the gates at initialisation; None: as in the paper."""
    seed: int = 0
    """Of the random signs of basis rank1."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential, associative or chunked."""
    fold: bool = True
    """False keeps the paper's duplicate state vectors, to measure what folding saves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self.eta, self.nu, self.feature)
        validation.integer("r", self.r, minimum=1)
        validation.one_of("basis", self.basis, BASES)
        validation.one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.horizon(self.horizon))
        validation.boolean("gating", self.gating)
        validation.boolean("fold", self.fold)
        validation.integer("seed", self.seed, minimum=0)


class AGaLiTeMemoryState(NamedTuple):
    """All layers' running sums (see `ops.AGaLiTeState`), and the one phase that they share."""

    keys: Float[Array, "layers H Rk K"]
    values: Float[Array, "layers H R V"]
    phase: Int[Array, ""]
    signs: UInt32[Array, " 2"] | None


def _state_of_a_layer(c: AGaLiTeConfig, dtype: Any) -> AGaLiTeState:
    key = jax.random.key(c.seed) if c.basis == "rank1" else None
    width = feature_width(c.feature, c.head_size, eta=c.eta, nu=c.nu)
    return agalite_state(_basis(c), c.heads, width, c.head_size, dtype, key)


def _basis(c: AGaLiTeConfig) -> Basis:
    return make_basis(c.basis, c.r, fold=c.fold)


class AGaLiTeAttention(FeatureAttention):
    @property
    def basis(self) -> Basis:
        return _basis(self.config)

    def initial_state(self) -> AGaLiTeState:
        return _state_of_a_layer(self.config, self.out.weight.dtype)

    def __call__(
        self, state: AGaLiTeState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[AGaLiTeState, Float[Array, "T D"]]:
        c = self.config
        columns = self.project.columns(self.norm(h))
        state, attended = agalite_attention(
            *self.project.activated(columns),
            resets,
            state,
            r=c.r,
            basis=c.basis,
            method=c.method,
            fold=c.fold,
            columns=columns if self.project.raw else None,
        )
        return state, self.out(attended)


class AGaLiTe(Stack):
    """input (T, input_size) -> (T, d_model).

    The state is layers * heads * (r//2 + 1) * (eta*V + V) floats in the paper's basis, and one
    phase; it never grows, and the phase is an integer, exact for ever.
    """

    config: AGaLiTeConfig = eqx.field(static=True)

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = AGaLiTeConfig(**options)
        c = self.config

        def attention(key: PRNGKeyArray) -> AGaLiTeAttention:
            return AGaLiTeAttention.make(c, gating=c.gating, horizon=c.horizon, key=key)

        self._build(c, input_size, attention, key)

    def initial_state(self) -> AGaLiTeMemoryState:
        layer = _state_of_a_layer(self.config, self.dtype)
        keys, values = (
            jnp.zeros((self.config.layers, *x.shape), x.dtype) for x in (layer.keys, layer.values)
        )
        return AGaLiTeMemoryState(keys, values, layer.phase, layer.signs)

    def _pack(self, layers: tuple[AGaLiTeState, ...], signs: Array | None) -> AGaLiTeMemoryState:
        keys, values = (
            jnp.stack(x) for x in zip(*((s.keys, s.values) for s in layers), strict=True)
        )
        return AGaLiTeMemoryState(keys, values, layers[0].phase, signs)

    def _run_blocks(
        self, state: AGaLiTeMemoryState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[AGaLiTeMemoryState, Float[Array, "T D"]]:
        if isinstance(self.blocks, Packed):
            return self._run_packed(self.blocks, state, h, resets)
        layers = tuple(
            AGaLiTeState(
                state.keys[i], state.values[i], state.phase, self._layer_signs(state.signs, i)
            )
            for i in range(self.config.layers)
        )
        layers, h = super()._run_blocks(layers, h, resets)
        return self._pack(layers, state.signs), h

    @property
    def packable(self) -> bool:
        # rank1 has other signs in every layer, and the kernel one set of oscillators for all.
        return packable(self.blocks) and self.config.basis != "rank1"

    def packed(self) -> Self:
        if not self.packable:
            return self
        return eqx.tree_at(lambda m: m.blocks, self, Packed(self.blocks))

    def _run_packed(
        self, blocks: Packed, state: AGaLiTeMemoryState, h: Array, resets: Array
    ) -> tuple[AGaLiTeMemoryState, Float[Array, "T D"]]:
        def plain(blocks: Packed, state: AGaLiTeMemoryState, h: Array, resets: Array) -> Any:
            model = eqx.tree_at(lambda m: m.blocks, self, blocks.blocks)
            return model._run_blocks(state, h, resets)

        if h.shape[0] > 1 or not kernels.usable(h, blocks.weights):
            return plain(blocks, state, h, resets)
        c = self.config
        basis = _basis(c)

        @jax.custom_vjp
        def step(blocks: Packed, state: AGaLiTeMemoryState, h: Array, resets: Array) -> Any:
            keys, values, phase, h = packed.step(blocks, basis, c.eta, c.ffn_size, state, h, resets)
            return AGaLiTeMemoryState(keys, values, phase, state.signs), h

        step.defvjp(
            lambda *args: (step(*args), args),
            lambda args, d: jax.vjp(plain, *args)[1](d),
        )
        return step(blocks, state, h, resets)

    def refresh(self, state: AGaLiTeMemoryState) -> AGaLiTeMemoryState:
        return state  # sums of what was, whatever the weights are now

    @staticmethod
    def _layer_signs(signs: Array | None, layer: int) -> Array | None:
        """Layers draw different signs from the one key in the state."""
        return (
            None
            if signs is None
            else jax.random.key_data(
                jax.random.fold_in(jax.random.wrap_key_data(signs), jnp.uint32(layer))
            )
        )
