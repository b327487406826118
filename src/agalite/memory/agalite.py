"""AGaLiTe: the approximate gated linear transformer (Algorithm 4).

The attention is written out here, to be read beside the algorithm. The block around it is
`block.py`, its layers are in `layers.py`, and lines 7 to 16 are `ops/agalite/reference.py`. The
algorithm ends at the heading "acting"; what stands under "traces" is docs/rtrl.md.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from agalite import kernels, validation
from agalite.memory.block import Block, StackConfig, TracedAttention, TracedStack
from agalite.memory.layers import (
    PROJECTION_INITS,
    FusedProjection,
    HeadsOut,
    LayerNorm,
    Projected,
    ProjectionInit,
    check_feature_options,
    feature_map,
)
from agalite.ops.activations import normalise, relu, sigmoid
from agalite.ops.agalite import AGaLiTeState, attend, initial_state
from agalite.ops.agalite.native import step_layers
from agalite.ops.delta import BASES, Basis, advance_phase, make_basis, oscillators
from agalite.ops.features import Outer, as_outer, feature_width
from agalite.ops.matmul import broadcast_like, in_bfloat16
from agalite.ops.recurrence import METHODS, Method
from agalite.ops.traces import (
    AGaLiTeTrace,
    RowTrace,
    Slopes,
    agalite_trace,
    agalite_with_past,
    empty_agalite_trace,
)


@dataclass(frozen=True)
class AGaLiTeConfig(StackConfig):
    """Options of AGaLiTe. The defaults are the paper's for T-Maze."""

    eta: int = 4
    """Feature-map expansion: keys and queries are eta * head_size wide."""
    r: int = 1
    """Approximation parameter; for the bases slots and rank1 the number of state vectors."""
    # The best of those with one state vector in the study `tuning-basis`. Mean returns of four
    # seeds with the tuned presets, paper / published: T-Maze of 100 -6.4 / -6.8 and masked CartPole
    # 454 / 450 (not separated), noisy masked CartPole 166 / 76, RepeatPrevious 0.01 / -0.15. With
    # two vectors, paper / published / slots: -6.1 / -6.3 / -6.3, 356 / 392 / 486, 134 / 67 / 132,
    # 0.29 / 0.22 / 0.36: where recall by content counts, slots with r of 2 or more.
    basis: str = "paper"
    """Oscillators of the approximation: paper, published, slots or rank1."""
    feature: str = "outer"
    """Feature map: outer (the paper's learned map), elu1, dpfp or relu."""
    nu: int = 1
    """Expansion of the dpfp feature map."""
    gating: bool = True
    """Whether old memories decay; without is the paper's ablation."""
    projection_init: ProjectionInit = "separate"
    """How the projections start: separate, an orthogonal matrix each, or fused, one for q, k, v,
    beta and gamma and one for p1, p2 and p3, as in the authors' code."""
    horizon: tuple[float, float] | None = None
    """Shortest and longest time constant of the gates at initialisation; None: zero biases."""
    seed: int = 0
    """Seed of the random signs of basis rank1."""
    method: Method = "auto"
    """How sequences are computed: auto, sequential, associative or chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_feature_options(self.eta, self.nu, self.feature)
        validation.check_one_of("projection_init", self.projection_init, PROJECTION_INITS)
        validation.check_integer("r", self.r, minimum=1)
        validation.check_one_of("basis", self.basis, BASES)
        validation.check_one_of("method", self.method, METHODS)
        object.__setattr__(self, "horizon", validation.as_horizon(self.horizon))
        validation.check_boolean("gating", self.gating)
        validation.check_integer_between("seed", self.seed, 0, 2**32 - 1)


class AGaLiTeAttention(TracedAttention):
    """(T, D) -> (T, D): norm, projections, Algorithm 4's memory, output."""

    norm: LayerNorm
    project: FusedProjection
    out: HeadsOut
    config: AGaLiTeConfig = eqx.field(static=True)
    fold: bool = eqx.field(static=True)

    def __init__(self, config: AGaLiTeConfig, *, fold: bool = True, key: PRNGKeyArray):
        c = self.config = config
        self.fold = fold
        a, b = jax.random.split(key)
        self.norm = LayerNorm(c.d_model)
        self.project = FusedProjection(
            c.d_model,
            heads=c.heads,
            head_size=c.head_size,
            eta=c.eta,
            feature=c.feature,
            nu=c.nu,
            gating=c.gating,
            horizon=c.horizon,
            init=c.projection_init,
            key=a,
        )
        self.out = HeadsOut(c.heads, c.head_size, c.d_model, key=b)

    @property
    def basis(self) -> Basis:
        return make_basis(self.config.basis, self.config.r, fold=self.fold)

    def initial_state(self) -> AGaLiTeState:
        return _layer_state(self.config, self.basis, self.out.weight.dtype)

    def projections(self, columns: Float[Array, "T H N"]) -> Projected:
        """Lines 2 to 6 of Algorithm 4, from the columns of `project`."""
        c, y = self.config, self.project.split(columns)
        beta = sigmoid(y["beta"]) if c.gating else None  # line 5
        gamma = sigmoid(y["gamma"]) if c.gating else None
        if c.feature == "outer":
            q = Outer(relu(y["p2"]), relu(y["q"]))  # line 3: f(relu(W_p2 x) (x) relu(W_Q x))
            k = Outer(relu(y["p1"]), relu(y["k"]))  # line 2: f(relu(W_p1 x) (x) relu(W_K x))
            # line 6: f(sigmoid(W_p3 x) (x) sigmoid(W_gamma x))
            gamma = None if gamma is None else Outer(sigmoid(y["p3"]), gamma)
        else:
            q, k = (feature_map(c.feature, y[name], nu=c.nu) for name in ("q", "k"))
        return Projected(q, k, y["v"], beta, gamma)  # line 4: v = W_V x

    def __call__(
        self, state: AGaLiTeState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[AGaLiTeState, Float[Array, "T D"]]:
        columns = self.project(self.norm(h))
        return self._attend(state, self.projections(columns), columns, resets)

    def _attend(
        self, state: AGaLiTeState, projected: Projected, columns: Array, resets: Array
    ) -> tuple[AGaLiTeState, Float[Array, "T D"]]:
        # Lines 7 to 16
        state, attended = attend(
            *projected,
            resets,
            state,
            basis=self.basis,
            method=self.config.method,
            columns=columns if self.reads_columns else None,
        )
        return state, self.out(attended)

    # --- traces -----------------------------------------------------------------------------------

    @property
    def has_traces(self) -> bool:
        return self.config.feature != "dpfp"  # whose features depend on two rows of W_K each

    def initial_trace(self) -> AGaLiTeTrace:
        if not self.has_traces:
            raise ValueError(
                "feature='dpfp' has no traces: each of its features depends on two rows of a "
                "projection; choose outer, elu1 or relu"
            )
        c, dtype = self.config, self.out.weight.dtype
        state = self.initial_state()
        shapes = self._factors(state.keys).shape, state.values.shape
        names = dict(self.project.widths)
        return empty_agalite_trace(*shapes, names, c.d_model, dtype)

    def traced(
        self,
        state: AGaLiTeState,
        trace: AGaLiTeTrace,
        h: Float[Array, "T D"],
        resets: Bool[Array, " T"],
        past: "AGaLiTeAttention",
    ) -> tuple[AGaLiTeState, Float[Array, "T D"], AGaLiTeTrace]:
        inputs = normalise(h)
        scale, bias = (broadcast_like(x, inputs) for x in (self.norm.scale, self.norm.bias))
        columns = self.project(inputs * scale + bias)
        projected = self.projections(columns)
        new_trace = self._advance(state, trace, projected, columns, inputs, resets)
        state = past._with_past(state, trace)
        new_state, out = self._attend(state, projected, columns, resets)
        return new_state, out, new_trace

    def _advance(
        self,
        state: AGaLiTeState,
        trace: AGaLiTeTrace,
        projected: Projected,
        columns: Float[Array, "T H N"],
        inputs: Float[Array, "T D"],
        resets: Bool[Array, " T"],
    ) -> AGaLiTeTrace:
        state, projected, inputs = jax.lax.stop_gradient((state, projected, inputs))
        phases = advance_phase(state.phase, resets, self.basis.period)
        cosines = oscillators(self.basis, phases, state.signs, inputs.dtype)
        k = as_outer(projected.k)
        narrow, wide = ((x > 0).astype(x.dtype) for x in k)  # of relu
        if self.config.feature == "elu1":
            wide = jnp.minimum(k.wide, 1)  # of elu(x) + 1
        slopes = Slopes(narrow if self.config.feature == "outer" else None, wide)
        gamma = None if projected.gamma is None else as_outer(projected.gamma)
        return agalite_trace(
            trace,
            self._factors(state.keys),
            state.values,
            k,
            slopes,
            gamma,
            projected.v,
            projected.beta,
            cosines,
            inputs,
            resets,
            columns=columns if self.reads_columns and self.config.method == "auto" else None,
        )

    def _with_past(self, state: AGaLiTeState, trace: AGaLiTeTrace) -> AGaLiTeState:
        """`state`, with the gradient of `ops.traces.with_past`.

        The trace is by the rows that multiply the input before the norm's scale and bias:
        W (scale * x + shift) + b = (W scale) x + (W shift + b). The gradients of W, b, scale and
        shift follow by differentiating that.
        """
        weight = self.project.inputs.weight[...]
        rows = self.project.split(weight * self.norm.scale.reshape(1, 1, -1), axis=1)
        shift = jnp.einsum("hnd,d->hn", weight, self.norm.bias)
        constants = self.project.split(self.project.bias + shift)
        pairs = {n: RowTrace(jnp.swapaxes(rows[n], 1, 2), constants[n]) for n in rows}
        keys = self._factors(state.keys)
        keys, values = agalite_with_past(keys, state.values, pairs, trace)
        return state._replace(keys=keys.reshape(state.keys.shape), values=values)

    def _factors(self, keys: Float[Array, "H Rk K"]) -> Float[Array, "H Rk E W"]:
        """K = E * W taken apart."""
        narrow = self.config.eta if self.config.feature == "outer" else 1
        return keys.reshape(*keys.shape[:2], narrow, -1)

    @property
    def reads_columns(self) -> bool:
        """Whether custom kernels can start from the columns of `project`."""
        return self.config.feature == "outer" and self.config.gating


def _layer_state(c: AGaLiTeConfig, basis: Basis, dtype: Any) -> AGaLiTeState:
    key = jax.random.key(c.seed) if c.basis == "rank1" else None
    width = feature_width(c.feature, c.head_size, eta=c.eta, nu=c.nu)
    return initial_state(basis, c.heads, width, c.head_size, dtype, key)


def _layer_signs(signs: Array | None, layer: int) -> Array | None:
    """Layers draw different signs from the one key in the state."""
    if signs is None:
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(signs), jnp.uint32(layer))
    return jax.random.key_data(key)


class AGaLiTeMemoryState(NamedTuple):
    """The running sums of all layers (see `AGaLiTeState`), and the phase that they share."""

    keys: Float[Array, "layers H Rk K"]
    values: Float[Array, "layers H R V"]
    phase: Int[Array, ""]
    signs: UInt32[Array, " 2"] | None


class AGaLiTe(TracedStack):
    """The approximate gated linear transformer: (T, input_size) -> (T, d_model).

    The state is layers * heads * (r // 2 + 1) * (eta * V + V) floats in the paper's basis, and one
    integer phase. It never grows, and the phase is exact after any number of steps.

    **Arguments:**

    - `input_size`: width of the input.
    - `key`: draws the weights.
    - the fields of `AGaLiTeConfig`, by name.
    """

    config: AGaLiTeConfig = eqx.field(static=True)
    # A subclass with False keeps the duplicate state vectors of Algorithm 4 as written, to measure
    # what folding saves (`agalite.bench`).
    fold: ClassVar[bool] = True

    def __init__(self, input_size: int, *, key: PRNGKeyArray, **options):
        self.config = c = AGaLiTeConfig(**options)
        self._build(c, input_size, lambda key: AGaLiTeAttention(c, fold=self.fold, key=key), key)

    @property
    def _basis(self) -> Basis:
        return make_basis(self.config.basis, self.config.r, fold=self.fold)

    def initial_state(self) -> AGaLiTeMemoryState:
        layer = _layer_state(self.config, self._basis, self.dtype)
        keys, values = (
            jnp.zeros((self.config.layers, *x.shape), x.dtype) for x in (layer.keys, layer.values)
        )
        return AGaLiTeMemoryState(keys, values, layer.phase, layer.signs)

    def _run_blocks(
        self, state: AGaLiTeMemoryState, h: Float[Array, "T D"], resets: Bool[Array, " T"]
    ) -> tuple[AGaLiTeMemoryState, Float[Array, "T D"]]:
        if isinstance(self.blocks, PackedBlocks):
            return self._run_packed(self.blocks, state, h, resets)
        layers, h = super()._run_blocks(self._layer_states(state), h, resets)
        return self._join_states(state, layers), h

    def _layer_states(self, state: AGaLiTeMemoryState) -> tuple[AGaLiTeState, ...]:
        return tuple(
            AGaLiTeState(state.keys[i], state.values[i], state.phase, _layer_signs(state.signs, i))
            for i in range(self.config.layers)
        )

    def _join_states(
        self, before: AGaLiTeMemoryState, layers: tuple[AGaLiTeState, ...]
    ) -> AGaLiTeMemoryState:
        keys, values = (
            jnp.stack(x) for x in zip(*((s.keys, s.values) for s in layers), strict=True)
        )
        return AGaLiTeMemoryState(keys, values, layers[0].phase, before.signs)

    def _plain_blocks(self) -> tuple[Block, ...]:
        return self.blocks.blocks if isinstance(self.blocks, PackedBlocks) else self.blocks

    def refresh(self, state: AGaLiTeMemoryState) -> AGaLiTeMemoryState:
        return state  # nothing in it is derived from the present weights

    # --- acting -----------------------------------------------------------------------------------
    # The algorithm ends here. What follows computes the same step faster: one custom kernel for all
    # layers, which reads its weights from one array.

    @property
    def has_step_kernel(self) -> bool:
        # rank1 has other signs in every layer, and the kernel one set of oscillators for all.
        return self.config.basis != "rank1" and _packable(self.blocks)

    def prepare_for_inference(self) -> Self:
        if not self.has_step_kernel:
            return self
        return eqx.tree_at(lambda m: m.blocks, self, PackedBlocks(self.blocks))

    def _run_packed(
        self, packed: "PackedBlocks", state: AGaLiTeMemoryState, h: Array, resets: Array
    ) -> tuple[AGaLiTeMemoryState, Float[Array, "T D"]]:
        """A step by the kernel.

        Sequences, and the gradient of a step, are computed by the blocks.
        """

        def unpacked(packed: PackedBlocks, state: AGaLiTeMemoryState, h: Array, resets: Array):
            model = eqx.tree_at(lambda m: m.blocks, self, packed.blocks)
            return model._run_blocks(state, h, resets)

        if h.shape[0] > 1 or in_bfloat16() or not kernels.usable(h, packed.weights):
            return unpacked(packed, state, h, resets)

        @jax.custom_vjp
        def step(packed: PackedBlocks, state: AGaLiTeMemoryState, h: Array, resets: Array) -> Any:
            c = self.config
            keys, values, phase, h = step_layers(
                packed.weights, self._basis, *state, h, resets, eta=c.eta, ffn_size=c.ffn_size
            )
            return AGaLiTeMemoryState(keys, values, phase, state.signs), h

        step.defvjp(
            lambda *args: (step(*args), args),
            lambda args, d: jax.vjp(unpacked, *args)[1](d),
        )
        return step(packed, state, h, resets)


# --- the weights of the step kernel ---------------------------------------------------------------
# Only the order of the weights in memory; nothing of the algorithm.


class PackedBlocks(eqx.Module):
    """All weights of all blocks in one array, in the order in which the step kernel reads them.

    Handing a kernel hundreds of arrays costs time in every step. `blocks` takes the array apart.
    """

    weights: Float[Array, " N"]
    structure: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __init__(self, blocks: tuple[Block, ...]):
        arrays = kernel_order(blocks)
        self.weights = jnp.concatenate([x.reshape(-1) for x in arrays])
        self.shapes = tuple(x.shape for x in arrays)
        self.structure = jax.tree.structure(blocks)

    @property
    def blocks(self) -> tuple[Block, ...]:
        arrays, at = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            arrays.append(self.weights[at : at + size].reshape(shape))
            at += size
        empty = jax.tree.unflatten(self.structure, [None] * self.structure.num_leaves)
        return eqx.tree_at(kernel_order, empty, arrays, is_leaf=lambda x: x is None)


def kernel_order(blocks: tuple[Block, ...]) -> list[Array]:
    """Every weight, in the order in which `kernels/stack.h` reads them."""
    found = []
    for block in blocks:
        attention: Any = block.attention
        first, second, mlp = block.attention_gate, block.mlp_gate, block.mlp
        found += [attention.norm.scale, attention.norm.bias]
        found += [attention.project.inputs.weight, attention.project.bias, first.from_x.weight]
        found += [attention.out.weight, attention.out.bias]
        found += [first.from_y.weight, first.candidate.weight, first.bias]
        found += [block.norm.scale, block.norm.bias]
        found += [mlp.into.weight, mlp.into.bias, second.from_x.weight]
        found += [mlp.out.weight, mlp.out.bias]
        found += [second.from_y.weight, second.candidate.weight, second.bias]
    return found


def _packable(blocks: Any) -> bool:
    """Whether the kernel can step these layers: unmodified, of one floating-point type."""
    if isinstance(blocks, PackedBlocks):
        return False
    attention = blocks[0].attention
    if not attention.reads_columns or attention.config.method != "auto":
        return False
    leaves = jax.tree.leaves(blocks)
    return len(leaves) == len(kernel_order(blocks)) and kernels.usable(*leaves)
