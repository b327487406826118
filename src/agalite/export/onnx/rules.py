"""How each of JAX's primitives is written in ONNX: one table, one small function for each.

A primitive that is not in `RULES` is refused by name. Most are one ONNX operator.
"""

import numpy as np

from agalite.export.onnx.graph import Rule, Site, onnx_dtype
from agalite.export.onnx.indexing import (
    dynamic_slice,
    dynamic_update_slice,
    gather,
    scatter,
    scatter_add,
    take_slice,
)
from agalite.export.onnx.products import convolution, dot_general, row_product, row_spread

_WORD = 2**32


def _same(operator: str) -> Rule:
    return lambda at: at.graph.add(operator, *at.names)


def _wrapping(operator: str) -> Rule:
    """Arithmetic; on uint32, which is held in int64, modulo 2^32."""

    def rule(at: Site) -> str:
        found = at.graph.add(operator, *at.names)
        return _wrapped(at, found) if at.dtype == np.uint32 else found

    return rule


def _wrapped(at: Site, name: str) -> str:
    return at.graph.add("BitwiseAnd", name, at.graph.constant(_WORD - 1, np.int64))


def _logical(truths: str, integers: str) -> Rule:
    return lambda at: at.graph.add(truths if at.dtype == np.bool_ else integers, *at.names)


def _division(at: Site) -> str:
    # ONNX leaves open how negative integers are rounded; the runtimes do it as C does, as JAX does.
    return at.graph.add("Div", *at.names)


def _remainder(at: Site) -> str:
    return at.graph.add("Mod", *at.names, fmod=1)


def _shift(left: bool) -> Rule:
    def rule(at: Site) -> str:
        by = at.value(1)
        if at.dtype != np.uint32 or by is None:
            raise ValueError("only uint32 can be shifted in ONNX, and only by a constant")
        # The runtimes shift only uint64; int64 they multiply.
        factor = at.graph.constant(2 ** by.astype(np.int64))
        if left:
            return _wrapped(at, at.graph.add("Mul", at.names[0], factor))
        return at.graph.add("Div", at.names[0], factor)

    return rule


def _not_equal(at: Site) -> str:
    return at.graph.add("Not", at.graph.add("Equal", *at.names))


def _identity(at: Site) -> list[str]:
    return list(at.names)


def _convert(at: Site) -> str:
    found = at.graph.add("Cast", at.names[0], to=onnx_dtype(at.dtype))
    signed = np.issubdtype(np.dtype(at.inputs[0].dtype), np.signedinteger)
    return _wrapped(at, found) if at.dtype == np.uint32 and signed else found


def _select(at: Site) -> str:
    if len(at.names) != 3:
        raise ValueError("a choice among more than two arrays has no form in ONNX")
    which, no, yes = at.names
    return at.graph.add("Where", which, yes, no)


def _clamp(at: Site) -> str:
    low, x, high = at.names
    return at.graph.add("Min", at.graph.add("Max", x, low), high)


def _square(at: Site) -> str:
    return at.graph.add("Mul", at.names[0], at.names[0])


def _integer_power(at: Site) -> str:
    return at.graph.add("Pow", at.names[0], at.graph.constant(at.params["y"], np.int64))


def _rsqrt(at: Site) -> str:
    return at.graph.add("Reciprocal", at.graph.add("Sqrt", at.names[0]))


def _expm1(at: Site) -> str:
    return at.graph.add("Sub", at.graph.add("Exp", at.names[0]), at.graph.constant(1, at.dtype))


def _log1p(at: Site) -> str:
    return at.graph.add("Log", at.graph.add("Add", at.names[0], at.graph.constant(1, at.dtype)))


def _is_finite(at: Site) -> str:
    bad = at.graph.add("Or", at.graph.add("IsNaN", at.names[0]), at.graph.add("IsInf", at.names[0]))
    return at.graph.add("Not", bad)


def _broadcast(at: Site) -> str:
    shape = [1] * len(at.shape)
    for axis, size in zip(at.params["broadcast_dimensions"], at.inputs[0].shape, strict=True):
        shape[axis] = size
    x = at.names[0] if tuple(shape) == at.inputs[0].shape else at.graph.reshape(at.names[0], shape)
    return x if tuple(shape) == at.shape else at.graph.add("Expand", x, at.graph.integers(at.shape))


def _reshape(at: Site) -> str:
    return at.graph.reshape(at.names[0], at.shape)


def _transpose(at: Site) -> str:
    return at.graph.add("Transpose", at.names[0], perm=[int(i) for i in at.params["permutation"]])


def _concatenate(at: Site) -> str:
    return at.graph.add("Concat", *at.names, axis=at.params["dimension"])


def _stack(at: Site) -> str:
    axis = at.params["axis"]
    shape = [1 if a == axis else n for a, n in enumerate(at.shape)]
    parts = [at.graph.reshape(name, shape) for name in at.names]
    return parts[0] if len(parts) == 1 else at.graph.add("Concat", *parts, axis=axis)


def _split(at: Site) -> list[str]:
    sizes = at.graph.integers(at.params["sizes"])
    return at.graph.add_many("Split", [at.names[0], sizes], len(at.outputs), axis=at.params["axis"])


def _pad(at: Site) -> str:
    config = at.params["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        raise ValueError(f"padding {config} that cuts or spreads has no form in ONNX")
    widths = [low for low, _, _ in config] + [high for _, high, _ in config]
    return at.graph.add("Pad", at.names[0], at.graph.integers(widths), at.names[1])


def _reduce(operator: str) -> Rule:
    def rule(at: Site) -> str:
        axes = at.graph.integers(at.params["axes"])
        return at.graph.add(operator, at.names[0], axes, keepdims=0)

    return rule


def _reduce_truths(operator: str) -> Rule:
    def rule(at: Site) -> str:
        numbers = at.graph.add("Cast", at.names[0], to=onnx_dtype(np.int32))
        axes = at.graph.integers(at.params["axes"])
        found = at.graph.add(operator, numbers, axes, keepdims=0)
        return at.graph.add("Cast", found, to=onnx_dtype(np.bool_))

    return rule


def _argument(operator: str) -> Rule:
    def rule(at: Site) -> str:
        (axis,) = at.params["axes"]
        found = at.graph.add(operator, at.names[0], axis=int(axis), keepdims=0)
        return at.graph.add("Cast", found, to=onnx_dtype(at.dtype))

    return rule


def _cumulative_sum(at: Site) -> str:
    axis = at.graph.constant(at.params["axis"], np.int64)
    return at.graph.add("CumSum", at.names[0], axis, reverse=int(at.params["reverse"]))


def _cumulative(at: Site) -> str:
    if at.shape[at.params["axis"]] != 1:
        raise ValueError("a running maximum of several numbers has no form in ONNX")
    return at.names[0]


_ALIKE: dict[str, str] = {
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
    **{name: _same(operator) for name, operator in _ALIKE.items()},
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
    "cummax": _cumulative,
    "cummin": _cumulative,
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
    "reduce_and": _reduce_truths("ReduceMin"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_or": _reduce_truths("ReduceMax"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_sum": _reduce("ReduceSum"),
    "rem": _remainder,
    "reshape": _reshape,
    "row_product": row_product,
    "row_spread": row_spread,
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
