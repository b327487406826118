"""The paper's equations as pure functions of arrays, without parameters.

Every attention has the paper's recurrence line by line (`agalite/reference.py` is Algorithm 4,
`galite/reference.py` Algorithm 3, `linear.py` Algorithm 2, `softmax.py` Algorithm 1) beside the
forms that are fast. Time is the first axis, one sequence; `vmap` adds a batch.
"""

from agalite.ops.agalite import AGaLiTeState, agalite_attention
from agalite.ops.delta import BASES, delta_approximation
from agalite.ops.features import Outer, dpfp, elu1, relu
from agalite.ops.galite import galite_attention
from agalite.ops.linear import MatrixState, linear_attention
from agalite.ops.recurrence import METHODS, Complex, activated_recurrence, linear_recurrence
from agalite.ops.softmax import softmax_attention
from agalite.ops.xl import xl_attention

__all__ = [
    "BASES",
    "METHODS",
    "AGaLiTeState",
    "Complex",
    "MatrixState",
    "Outer",
    "activated_recurrence",
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
