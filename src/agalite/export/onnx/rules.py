"""The ONNX form of each JAX primitive: the table `RULES`, with one small function per entry.

Most primitives are one ONNX operator. A primitive that is not in the table cannot be exported.
"""

import numpy as np

from agalite.export.onnx.graph import Context, Rule, onnx_dtype
from agalite.export.onnx.indexing import (
    dynamic_slice,
    dynamic_update_slice,
    gather,
    scatter,
    scatter_add,
    take_slice,
)
from agalite.export.onnx.products import convolution, dot_general, row_broadcast, row_product

_WORD = 2**32


def _operator(operator: str) -> Rule:
    """One ONNX operator with the same inputs."""
    return lambda ctx: ctx.graph.add(operator, *ctx.names)


def _wrapping(operator: str) -> Rule:
    """Arithmetic; of uint32, which the graph stores as int64, modulo 2^32."""

    def rule(ctx: Context) -> str:
        found = ctx.graph.add(operator, *ctx.names)
        return _wrapped(ctx, found) if ctx.dtype == np.uint32 else found

    return rule


def _wrapped(ctx: Context, name: str) -> str:
    return ctx.graph.add("BitwiseAnd", name, ctx.graph.constant(_WORD - 1, np.int64))


def _logical(bools: str, integers: str) -> Rule:
    return lambda ctx: ctx.graph.add(bools if ctx.dtype == np.bool_ else integers, *ctx.names)


def _division(ctx: Context) -> str:
    # ONNX does not define the rounding of negative integers; the runtimes truncate, as JAX does.
    return ctx.graph.add("Div", *ctx.names)


def _remainder(ctx: Context) -> str:
    return ctx.graph.add("Mod", *ctx.names, fmod=1)


def _shift(left: bool) -> Rule:
    def rule(ctx: Context) -> str:
        by = ctx.value(1)
        if ctx.dtype != np.uint32 or by is None:
            raise ValueError("only uint32 can be shifted in ONNX, and only by a constant")
        # The runtimes shift uint64 only, so the int64 is multiplied or divided.
        factor = ctx.graph.constant(2 ** by.astype(np.int64))
        if left:
            return _wrapped(ctx, ctx.graph.add("Mul", ctx.names[0], factor))
        return ctx.graph.add("Div", ctx.names[0], factor)

    return rule


def _not_equal(ctx: Context) -> str:
    return ctx.graph.add("Not", ctx.graph.add("Equal", *ctx.names))


def _identity(ctx: Context) -> list[str]:
    return list(ctx.names)


def _convert(ctx: Context) -> str:
    found = ctx.graph.add("Cast", ctx.names[0], to=onnx_dtype(ctx.dtype))
    signed = np.issubdtype(np.dtype(ctx.inputs[0].dtype), np.signedinteger)
    return _wrapped(ctx, found) if ctx.dtype == np.uint32 and signed else found


def _select(ctx: Context) -> str:
    if len(ctx.names) != 3:
        raise ValueError("a choice among more than two arrays has no form in ONNX")
    which, no, yes = ctx.names
    return ctx.graph.add("Where", which, yes, no)


def _clamp(ctx: Context) -> str:
    low, x, high = ctx.names
    return ctx.graph.add("Min", ctx.graph.add("Max", x, low), high)


def _square(ctx: Context) -> str:
    return ctx.graph.add("Mul", ctx.names[0], ctx.names[0])


def _integer_power(ctx: Context) -> str:
    return ctx.graph.add("Pow", ctx.names[0], ctx.graph.constant(ctx.params["y"], np.int64))


def _rsqrt(ctx: Context) -> str:
    return ctx.graph.add("Reciprocal", ctx.graph.add("Sqrt", ctx.names[0]))


def _expm1(ctx: Context) -> str:
    return ctx.graph.add(
        "Sub", ctx.graph.add("Exp", ctx.names[0]), ctx.graph.constant(1, ctx.dtype)
    )


def _log1p(ctx: Context) -> str:
    return ctx.graph.add(
        "Log", ctx.graph.add("Add", ctx.names[0], ctx.graph.constant(1, ctx.dtype))
    )


def _is_finite(ctx: Context) -> str:
    bad = ctx.graph.add(
        "Or", ctx.graph.add("IsNaN", ctx.names[0]), ctx.graph.add("IsInf", ctx.names[0])
    )
    return ctx.graph.add("Not", bad)


def _broadcast(ctx: Context) -> str:
    before = ctx.inputs[0].shape
    shape = [1] * len(ctx.shape)
    for axis, size in zip(ctx.params["broadcast_dimensions"], before, strict=True):
        shape[axis] = size
    x = ctx.names[0]
    if tuple(shape) != before:
        x = ctx.graph.reshape(x, shape)
    if tuple(shape) != ctx.shape:
        x = ctx.graph.add("Expand", x, ctx.graph.integers(ctx.shape))
    return x


def _reshape(ctx: Context) -> str:
    return ctx.graph.reshape(ctx.names[0], ctx.shape)


def _transpose(ctx: Context) -> str:
    return ctx.graph.add(
        "Transpose", ctx.names[0], perm=[int(i) for i in ctx.params["permutation"]]
    )


def _concatenate(ctx: Context) -> str:
    return ctx.graph.add("Concat", *ctx.names, axis=ctx.params["dimension"])


def _stack(ctx: Context) -> str:
    axis = ctx.params["axis"]
    shape = [1 if a == axis else n for a, n in enumerate(ctx.shape)]
    parts = [ctx.graph.reshape(name, shape) for name in ctx.names]
    return parts[0] if len(parts) == 1 else ctx.graph.add("Concat", *parts, axis=axis)


def _split(ctx: Context) -> list[str]:
    sizes = ctx.graph.integers(ctx.params["sizes"])
    return ctx.graph.add_many(
        "Split", [ctx.names[0], sizes], len(ctx.outputs), axis=ctx.params["axis"]
    )


def _pad(ctx: Context) -> str:
    config = ctx.params["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        raise ValueError(f"padding {config} that is negative or interior has no form in ONNX")
    widths = [low for low, _, _ in config] + [high for _, high, _ in config]
    return ctx.graph.add("Pad", ctx.names[0], ctx.graph.integers(widths), ctx.names[1])


def _reduce(operator: str) -> Rule:
    def rule(ctx: Context) -> str:
        axes = ctx.graph.integers(ctx.params["axes"])
        return ctx.graph.add(operator, ctx.names[0], axes, keepdims=0)

    return rule


def _reduce_bools(operator: str) -> Rule:
    def rule(ctx: Context) -> str:
        numbers = ctx.graph.add("Cast", ctx.names[0], to=onnx_dtype(np.int32))
        axes = ctx.graph.integers(ctx.params["axes"])
        found = ctx.graph.add(operator, numbers, axes, keepdims=0)
        return ctx.graph.add("Cast", found, to=onnx_dtype(np.bool_))

    return rule


def _argument(operator: str) -> Rule:
    def rule(ctx: Context) -> str:
        (axis,) = ctx.params["axes"]
        found = ctx.graph.add(operator, ctx.names[0], axis=int(axis), keepdims=0)
        return ctx.graph.add("Cast", found, to=onnx_dtype(ctx.dtype))

    return rule


def _cumulative_sum(ctx: Context) -> str:
    axis = ctx.graph.constant(ctx.params["axis"], np.int64)
    return ctx.graph.add("CumSum", ctx.names[0], axis, reverse=int(ctx.params["reverse"]))


def _cumulative_extreme(ctx: Context) -> str:
    if ctx.shape[ctx.params["axis"]] != 1:
        raise ValueError("a running maximum of several numbers has no form in ONNX")
    return ctx.names[0]


_OPERATORS: dict[str, str] = {
    "abs": "Abs",
    "ceil": "Ceil",
    "cos": "Cos",
    "cosh": "Cosh",
    "eq": "Equal",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "le": "LessOrEqual",
    "log": "Log",
    "logistic": "Sigmoid",
    "lt": "Less",
    "max": "Max",
    "min": "Min",
    "neg": "Neg",
    "pow": "Pow",
    "sign": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "sqrt": "Sqrt",
    "tan": "Tan",
    "tanh": "Tanh",
}

RULES: dict[str, Rule] = {
    **{name: _operator(operator) for name, operator in _OPERATORS.items()},
    "add": _wrapping("Add"),
    "add_any": _wrapping("Add"),
    "and": _logical("And", "BitwiseAnd"),
    "argmax": _argument("ArgMax"),
    "argmin": _argument("ArgMin"),
    "broadcast_in_dim": _broadcast,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "conv_general_dilated": convolution,
    "convert_element_type": _convert,
    "copy": _identity,
    "cummax": _cumulative_extreme,
    "cummin": _cumulative_extreme,
    "cumsum": _cumulative_sum,
    "div": _division,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "expand_dims": _reshape,
    "expm1": _expm1,
    "gather": gather,
    "integer_pow": _integer_power,
    "is_finite": _is_finite,
    "log1p": _log1p,
    "mul": _wrapping("Mul"),
    "ne": _not_equal,
    "not": _logical("Not", "BitwiseNot"),
    "optimization_barrier": _identity,
    "or": _logical("Or", "BitwiseOr"),
    "pad": _pad,
    "reduce_and": _reduce_bools("ReduceMin"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_or": _reduce_bools("ReduceMax"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_sum": _reduce("ReduceSum"),
    "rem": _remainder,
    "reshape": _reshape,
    "row_product": row_product,
    "row_broadcast": row_broadcast,
    "rsqrt": _rsqrt,
    "scatter": scatter,
    "scatter-add": scatter_add,
    "select_n": _select,
    "shift_left": _shift(left=True),
    "shift_right_logical": _shift(left=False),
    "slice": take_slice,
    "split": _split,
    "square": _square,
    "squeeze": _reshape,
    "stack": _stack,
    "stop_gradient": _identity,
    "sub": _wrapping("Sub"),
    "transpose": _transpose,
    "xor": _logical("Xor", "BitwiseXor"),
}
