"""Reading and writing at computed places in ONNX.

JAX's gather and scatter are far more general than ONNX's. Here both become reading and writing a
flat array at flat places: the static part of a place is a constant, and the computed part is a
small sum.
"""

import math
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from agalite.export.onnx.graph import Graph, Site, onnx_dtype


def take_slice(at: Site) -> str:
    starts, ends = at.params["start_indices"], at.params["limit_indices"]
    steps = at.params["strides"] or (1,) * len(starts)
    axes = range(len(starts))
    return at.graph.add("Slice", at.names[0], *map(at.graph.integers, (starts, ends, axes, steps)))


def dynamic_slice(at: Site) -> str:
    operand, sizes = at.inputs[0].shape, at.params["slice_sizes"]
    starts = _clipped_starts(at, 1, operand, sizes)
    ends = at.graph.add("Add", starts, at.graph.integers(sizes))
    return at.graph.add("Slice", at.names[0], starts, ends, at.graph.integers(range(len(sizes))))


def dynamic_update_slice(at: Site) -> str:
    operand, update = at.inputs[0].shape, at.inputs[1].shape
    starts = _clipped_starts(at, 2, operand, update)
    strides = _strides(operand)
    weighted = at.graph.add("Mul", starts, at.graph.integers(strides))
    begin = at.graph.add("ReduceSum", weighted, at.graph.integers([0]), keepdims=1)
    within = np.zeros(update, np.int64)
    for axis, size in enumerate(update):
        shape = [size if a == axis else 1 for a in range(len(update))]
        within = within + strides[axis] * np.arange(size).reshape(shape)
    places = at.graph.add("Add", begin, at.graph.constant(within.reshape(-1)))
    return _write(at, places, at.names[1])


def _clipped_starts(at: Site, first: int, operand: Any, sizes: Any) -> str:
    """(axes,) int64: scalar start indices side by side, moved so that the slice lies inside."""
    graph = at.graph
    parts = [graph.reshape(_long(graph, name), (1,)) for name in at.names[first:]]
    starts = graph.add("Concat", *parts, axis=0)
    latest = graph.integers([n - size for n, size in zip(operand, sizes, strict=True)])
    return graph.add("Min", graph.add("Max", starts, graph.integers([0] * len(sizes))), latest)


def gather(at: Site) -> str:
    numbers, sizes = at.params["dimension_numbers"], at.params["slice_sizes"]
    # Axes of the operand that the result has, in order, and where in the result they are.
    window = [
        a
        for a in range(len(sizes))
        if a not in numbers.collapsed_slice_dims and a not in numbers.operand_batching_dims
    ]
    result_of = dict(zip(window, (int(a) for a in numbers.offset_dims), strict=True))
    places = _places(
        at,
        at.shape,
        sizes,
        result_of,
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    flat = at.graph.reshape(at.names[0], (-1,))
    return at.graph.add("Gather", flat, places, axis=0)


def scatter(at: Site) -> str:
    return _scattered(at, "none")


def scatter_add(at: Site) -> str:
    return _scattered(at, "add")


def _scattered(at: Site, reduction: str) -> str:
    numbers = at.params["dimension_numbers"]
    operand, update = at.inputs[0].shape, at.inputs[2].shape
    window = [
        a
        for a in range(len(operand))
        if a not in numbers.inserted_window_dims and a not in numbers.operand_batching_dims
    ]
    update_of = dict(zip(window, (int(a) for a in numbers.update_window_dims), strict=True))
    sizes = [update[update_of[a]] if a in update_of else 1 for a in range(len(operand))]
    places = _places(
        at,
        update,
        sizes,
        update_of,
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    return _write(at, at.graph.reshape(places, (-1,)), at.names[2], reduction)


def _places(
    at: Site,
    shape: tuple[int, ...],
    sizes: Any,
    window: dict[int, int],
    indexed: Any,
    operand_batch: Any,
    index_batch: Any,
) -> str:
    """(*shape) int64: the flat place in the operand of each number of the result or update.

    sizes: of the window, along the operand's axes. window: axis of the operand -> axis of `shape`.
    indexed: the operand's axis that each entry of an index is for.
    """
    graph, operand, indices = at.graph, at.inputs[0].shape, at.inputs[1].shape
    latest = [operand[a] - sizes[a] for a in indexed]
    _require_in_bounds(at, latest)
    strides = _strides(operand)
    free = [a for a in range(len(shape)) if a not in window.values()]

    static = np.zeros(shape, np.int64)
    for axis, where in window.items():
        static = static + strides[axis] * _along(shape, where)
    for axis, index_axis in zip(operand_batch, index_batch, strict=True):
        static = static + strides[int(axis)] * _along(shape, free[int(index_axis)])

    # An index is moved so that its window lies inside, as JAX's "clip" does.
    index = graph.add("Max", _long(graph, at.names[1]), graph.integers([0] * len(indexed)))
    weighted = graph.add(
        "Mul",
        graph.add("Min", index, graph.integers(latest)),
        graph.integers([strides[a] for a in indexed]),
    )
    begin = graph.add("ReduceSum", weighted, graph.integers([len(indices) - 1]), keepdims=0)
    spread = [1] * len(shape)
    for axis, size in zip(free, indices[:-1], strict=True):
        spread[axis] = size
    return graph.add("Add", graph.reshape(begin, spread), graph.constant(static))


def _write(at: Site, places: str, update: str, reduction: str = "none") -> str:
    """The operand with the update's numbers at flat places (n,), or added there."""
    flat = at.graph.reshape(at.names[0], (-1,))
    numbers = at.graph.reshape(update, (-1,))
    return at.graph.reshape(
        at.graph.add("ScatterElements", flat, places, numbers, axis=0, reduction=reduction),
        at.inputs[0].shape,
    )


def _along(shape: tuple[int, ...], axis: int) -> np.ndarray:
    view = [shape[a] if a == axis else 1 for a in range(len(shape))]
    return np.arange(shape[axis], dtype=np.int64).reshape(view)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[a + 1 :]) for a in range(len(shape))]


def _long(graph: Graph, name: str) -> str:
    return graph.add("Cast", name, to=onnx_dtype(np.int64))


def _require_in_bounds(at: Site, latest: list[int]) -> None:
    mode, index = at.params["mode"], at.value(1)
    inside = index is not None and ((index >= 0) & (index <= np.array(latest))).all()
    if not inside and mode not in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        raise ValueError(f"indexing with mode {mode} has no form in ONNX; mode='clip' has one")
