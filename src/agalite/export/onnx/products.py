"""ONNX rules for matrix products and convolutions."""

import math

import numpy as np

from agalite.export.onnx.graph import Context


def row_product(ctx: Context) -> str:
    """`ops.matmul`: x (*rows, *inputs), w (*outputs, *inputs) -> (*rows, *outputs)."""
    outputs, back = ctx.params["outputs"], ctx.params["back"]
    x, w = ctx.inputs
    matrix = (math.prod(w.shape[:outputs]), math.prod(w.shape[outputs:]))
    inner = matrix[0] if back else matrix[1]
    weight = ctx.value(1)
    if weight is not None:  # transposed once, not at every step
        second = ctx.graph.constant(weight.reshape(matrix) if back else weight.reshape(matrix).T)
    else:
        second = ctx.graph.reshape(ctx.names[1], matrix)
        second = second if back else ctx.graph.add("Transpose", second, perm=[1, 0])
    flat = ctx.graph.reshape(ctx.names[0], (math.prod(x.shape) // inner, inner))
    return ctx.graph.reshape(ctx.graph.add("MatMul", flat, second), ctx.shape)


def row_broadcast(ctx: Context) -> str:
    """`ops.matmul.broadcast_like`: b (*outputs) for every row of (*rows, *outputs)."""
    return ctx.graph.add("Expand", ctx.names[0], ctx.graph.integers(ctx.shape))


def dot_general(ctx: Context) -> str:
    """A product of batches of matrices: batch axes first, contracted axes merged."""
    ((left_sum, right_sum), (left_batch, right_batch)) = ctx.params["dimension_numbers"]
    left = _as_matrices(ctx, 0, left_batch, left_sum, summed_last=True)
    right = _as_matrices(ctx, 1, right_batch, right_sum, summed_last=False)
    found = ctx.graph.reshape(ctx.graph.add("MatMul", left, right), ctx.shape)
    wanted = ctx.params.get("preferred_element_type")
    if wanted is not None and np.dtype(wanted) != np.dtype(ctx.inputs[0].dtype):
        raise ValueError("a product of one dtype summed in another has no form in ONNX")
    return found


def _as_matrices(
    ctx: Context, i: int, batch: tuple[int, ...], summed: tuple[int, ...], *, summed_last: bool
) -> str:
    """Input i as (batch, kept, summed), or as (batch, summed, kept)."""
    shape, name = ctx.inputs[i].shape, ctx.names[i]
    kept = tuple(a for a in range(len(shape)) if a not in batch and a not in summed)
    order = [*batch, *kept, *summed] if summed_last else [*batch, *summed, *kept]
    if order != sorted(order):
        name = ctx.graph.add("Transpose", name, perm=[int(a) for a in order])
    rows, sums = (math.prod(shape[a] for a in axes) for axes in (kept, summed))
    last = (rows, sums) if summed_last else (sums, rows)
    return ctx.graph.reshape(name, (math.prod(shape[a] for a in batch), *last))


def convolution(ctx: Context) -> str:
    """`conv_general_dilated`, transposed to ONNX's order of axes and back."""
    params = ctx.params
    if params["batch_group_count"] != 1 or any(n != 1 for n in params["lhs_dilation"]):
        raise ValueError("a convolution with batch groups or a dilated input has no form in ONNX")
    numbers = params["dimension_numbers"]
    image = ctx.graph.add("Transpose", ctx.names[0], perm=[int(i) for i in numbers.lhs_spec])
    kernel = ctx.graph.add("Transpose", ctx.names[1], perm=[int(i) for i in numbers.rhs_spec])
    padding = params["padding"]
    found = ctx.graph.add(
        "Conv",
        image,
        kernel,
        strides=[int(n) for n in params["window_strides"]],
        pads=[int(low) for low, _ in padding] + [int(high) for _, high in padding],
        dilations=[int(n) for n in params["rhs_dilation"]],
        group=int(params["feature_group_count"]),
    )
    inverse = np.argsort(numbers.out_spec)
    return ctx.graph.add("Transpose", found, perm=[int(i) for i in inverse])
