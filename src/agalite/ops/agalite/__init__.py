"""AGaLiTe's attention (Algorithm 4): the paper's recurrence beside the forms that are fast.

`reference.py` is the algorithm line by line; start there. `attention.py` has the public function.
"""

from agalite.ops.agalite.attention import agalite_attention, attend
from agalite.ops.agalite.reference import AGaLiTeState, initial_state

__all__ = ["AGaLiTeState", "agalite_attention", "attend", "initial_state"]
