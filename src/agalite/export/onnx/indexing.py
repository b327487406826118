"""ONNX rules for slices, gather and scatter.

JAX's gather and scatter are more general than ONNX's. Both become reading or writing the flattened
operand at flat indices. The static part of an index is a constant; the computed part is a small
sum.
"""

import math
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from agalite.export.onnx.graph import Context, Graph, onnx_dtype


def take_slice(ctx: Context) -> str:
    starts, ends = ctx.params["start_indices"], ctx.params["limit_indices"]
    steps = ctx.params["strides"] or (1,) * len(starts)
    axes = range(len(starts))
    return ctx.graph.add(
        "Slice", ctx.names[0], *map(ctx.graph.integers, (starts, ends, axes, steps))
    )


def dynamic_slice(ctx: Context) -> str:
    operand, sizes = ctx.inputs[0].shape, ctx.params["slice_sizes"]
    starts = _clipped_starts(ctx, 1, operand, sizes)
    ends = ctx.graph.add("Add", starts, ctx.graph.integers(sizes))
    return ctx.graph.add("Slice", ctx.names[0], starts, ends, ctx.graph.integers(range(len(sizes))))


def dynamic_update_slice(ctx: Context) -> str:
    operand, update = ctx.inputs[0].shape, ctx.inputs[1].shape
    starts = _clipped_starts(ctx, 2, operand, update)
    strides = _strides(operand)
    weighted = ctx.graph.add("Mul", starts, ctx.graph.integers(strides))
    begin = ctx.graph.add("ReduceSum", weighted, ctx.graph.integers([0]), keepdims=1)
    within = np.zeros(update, np.int64)
    for axis, size in enumerate(update):
        shape = [size if a == axis else 1 for a in range(len(update))]
        within = within + strides[axis] * np.arange(size).reshape(shape)
    flat_indices = ctx.graph.add("Add", begin, ctx.graph.constant(within.reshape(-1)))
    return _write(ctx, flat_indices, ctx.names[1])


def _clipped_starts(ctx: Context, first: int, operand: Any, sizes: Any) -> str:
    """(axes,) int64: the scalar start indices, clipped so that the slice lies inside."""
    graph = ctx.graph
    parts = [graph.reshape(_int64(graph, name), (1,)) for name in ctx.names[first:]]
    starts = graph.add("Concat", *parts, axis=0)
    latest = graph.integers([n - size for n, size in zip(operand, sizes, strict=True)])
    return graph.add("Min", graph.add("Max", starts, graph.integers([0] * len(sizes))), latest)


def gather(ctx: Context) -> str:
    numbers, sizes = ctx.params["dimension_numbers"], ctx.params["slice_sizes"]
    # The operand's axes that remain in the result, in order, and their axes there.
    window = [
        a
        for a in range(len(sizes))
        if a not in numbers.collapsed_slice_dims and a not in numbers.operand_batching_dims
    ]
    result_of = dict(zip(window, (int(a) for a in numbers.offset_dims), strict=True))
    flat_indices = _flat_indices(
        ctx,
        ctx.shape,
        sizes,
        result_of,
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    flat = ctx.graph.reshape(ctx.names[0], (-1,))
    return ctx.graph.add("Gather", flat, flat_indices, axis=0)


def scatter(ctx: Context) -> str:
    return _scatter(ctx, "none")


def scatter_add(ctx: Context) -> str:
    return _scatter(ctx, "add")


def _scatter(ctx: Context, reduction: str) -> str:
    numbers = ctx.params["dimension_numbers"]
    operand, update = ctx.inputs[0].shape, ctx.inputs[2].shape
    window = [
        a
        for a in range(len(operand))
        if a not in numbers.inserted_window_dims and a not in numbers.operand_batching_dims
    ]
    update_of = dict(zip(window, (int(a) for a in numbers.update_window_dims), strict=True))
    sizes = [update[update_of[a]] if a in update_of else 1 for a in range(len(operand))]
    flat_indices = _flat_indices(
        ctx,
        update,
        sizes,
        update_of,
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    return _write(ctx, ctx.graph.reshape(flat_indices, (-1,)), ctx.names[2], reduction)


def _flat_indices(
    ctx: Context,
    shape: tuple[int, ...],
    sizes: Any,
    window: dict[int, int],
    indexed: Any,
    operand_batch: Any,
    index_batch: Any,
) -> str:
    """(*shape) int64: for each number of the result or update, its index in the flat operand.

    `sizes` are the window's, along the operand's axes. `window` maps axes of the operand to axes of
    `shape`. `indexed` has the operand's axis for each entry of an index.
    """
    graph, operand, indices = ctx.graph, ctx.inputs[0].shape, ctx.inputs[1].shape
    latest = [operand[a] - sizes[a] for a in indexed]
    _require_in_bounds(ctx, latest)
    strides = _strides(operand)
    free = [a for a in range(len(shape)) if a not in window.values()]

    static = np.zeros(shape, np.int64)
    for axis, where in window.items():
        static = static + strides[axis] * _along(shape, where)
    for axis, index_axis in zip(operand_batch, index_batch, strict=True):
        static = static + strides[int(axis)] * _along(shape, free[int(index_axis)])

    # Clipped so that the window lies inside, as JAX's mode "clip" does.
    index = graph.add("Max", _int64(graph, ctx.names[1]), graph.integers([0] * len(indexed)))
    weighted = graph.add(
        "Mul",
        graph.add("Min", index, graph.integers(latest)),
        graph.integers([strides[a] for a in indexed]),
    )
    begin = graph.add("ReduceSum", weighted, graph.integers([len(indices) - 1]), keepdims=0)
    expanded = [1] * len(shape)
    for axis, size in zip(free, indices[:-1], strict=True):
        expanded[axis] = size
    return graph.add("Add", graph.reshape(begin, expanded), graph.constant(static))


def _write(ctx: Context, flat_indices: str, update: str, reduction: str = "none") -> str:
    """The operand with the update written, or added, at flat indices (n,)."""
    flat = ctx.graph.reshape(ctx.names[0], (-1,))
    numbers = ctx.graph.reshape(update, (-1,))
    return ctx.graph.reshape(
        ctx.graph.add("ScatterElements", flat, flat_indices, numbers, axis=0, reduction=reduction),
        ctx.inputs[0].shape,
    )


def _along(shape: tuple[int, ...], axis: int) -> np.ndarray:
    """0, 1, ... along one axis, broadcastable to `shape`."""
    view = [shape[a] if a == axis else 1 for a in range(len(shape))]
    return np.arange(shape[axis], dtype=np.int64).reshape(view)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[a + 1 :]) for a in range(len(shape))]


def _int64(graph: Graph, name: str) -> str:
    return graph.add("Cast", name, to=onnx_dtype(np.int64))


def _require_in_bounds(ctx: Context, latest: list[int]) -> None:
    mode, index = ctx.params["mode"], ctx.value(1)
    inside = index is not None and ((index >= 0) & (index <= np.array(latest))).all()
    if not inside and mode not in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        raise ValueError(f"indexing with mode {mode} has no form in ONNX; mode='clip' has one")
