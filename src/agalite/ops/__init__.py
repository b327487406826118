"""The paper's equations as pure functions, without parameters."""

from agalite.ops.attention import (
    agalite_attention,
    galite_attention,
    linear_attention,
    softmax_attention,
    xl_attention,
)
from agalite.ops.delta import BASES, delta_approximation
from agalite.ops.features import Outer, dpfp, elu1, relu
from agalite.ops.recurrence import METHODS, linear_recurrence
from agalite.ops.state import AGaLiTeState, MatrixState

__all__ = [
    "BASES",
    "METHODS",
    "AGaLiTeState",
    "MatrixState",
    "Outer",
    "agalite_attention",
    "delta_approximation",
    "dpfp",
    "elu1",
    "galite_attention",
    "linear_attention",
    "linear_recurrence",
    "relu",
    "softmax_attention",
    "xl_attention",
]
