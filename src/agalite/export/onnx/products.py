"""Matrix products and convolutions in ONNX."""

import math

import numpy as np

from agalite.export.onnx.graph import Site


def row_product(at: Site) -> str:
    """`memory.product`: x (*rows, *inputs), w (*outputs, *inputs) -> (*rows, *outputs)."""
    outputs, back = at.params["outputs"], at.params["back"]
    x, w = at.inputs
    matrix = (math.prod(w.shape[:outputs]), math.prod(w.shape[outputs:]))
    inner = matrix[0] if back else matrix[1]
    weight = at.value(1)
    if weight is not None:  # turned here, not at every step
        turned = weight.reshape(matrix) if back else weight.reshape(matrix).T
        second = at.graph.constant(turned)
    else:
        second = at.graph.reshape(at.names[1], matrix)
        second = second if back else at.graph.add("Transpose", second, perm=[1, 0])
    flat = at.graph.reshape(at.names[0], (math.prod(x.shape) // inner, inner))
    return at.graph.reshape(at.graph.add("MatMul", flat, second), at.shape)


def row_spread(at: Site) -> str:
    """`memory.product.spread`: b (*outputs) for every row of (*rows, *outputs)."""
    return at.graph.add("Expand", at.names[0], at.graph.integers(at.shape))


def dot_general(at: Site) -> str:
    """Batch axes first, summed axes together, then a product of stacks of matrices."""
    ((left_sum, right_sum), (left_batch, right_batch)) = at.params["dimension_numbers"]
    left = _arranged(at, 0, left_batch, left_sum, summed_last=True)
    right = _arranged(at, 1, right_batch, right_sum, summed_last=False)
    found = at.graph.reshape(at.graph.add("MatMul", left, right), at.shape)
    wanted = at.params.get("preferred_element_type")
    if wanted is not None and np.dtype(wanted) != np.dtype(at.inputs[0].dtype):
        raise ValueError("a product of one dtype summed in another has no form in ONNX")
    return found


def _arranged(
    at: Site, i: int, batch: tuple[int, ...], summed: tuple[int, ...], *, summed_last: bool
) -> str:
    shape, name = at.inputs[i].shape, at.names[i]
    kept = tuple(a for a in range(len(shape)) if a not in batch and a not in summed)
    order = [*batch, *kept, *summed] if summed_last else [*batch, *summed, *kept]
    if order != sorted(order):
        name = at.graph.add("Transpose", name, perm=[int(a) for a in order])
    rows, sums = (math.prod(shape[a] for a in axes) for axes in (kept, summed))
    last = (rows, sums) if summed_last else (sums, rows)
    return at.graph.reshape(name, (math.prod(shape[a] for a in batch), *last))


def convolution(at: Site) -> str:
    params = at.params
    if params["batch_group_count"] != 1 or any(n != 1 for n in params["lhs_dilation"]):
        raise ValueError("a convolution with batch groups or a spread input has no form in ONNX")
    numbers = params["dimension_numbers"]
    image = at.graph.add("Transpose", at.names[0], perm=[int(i) for i in numbers.lhs_spec])
    kernel = at.graph.add("Transpose", at.names[1], perm=[int(i) for i in numbers.rhs_spec])
    padding = params["padding"]
    found = at.graph.add(
        "Conv",
        image,
        kernel,
        strides=[int(n) for n in params["window_strides"]],
        pads=[int(low) for low, _ in padding] + [int(high) for _, high in padding],
        dilations=[int(n) for n in params["rhs_dilation"]],
        group=int(params["feature_group_count"]),
    )
    back = np.argsort(numbers.out_spec)
    return at.graph.add("Transpose", found, perm=[int(i) for i in back])
