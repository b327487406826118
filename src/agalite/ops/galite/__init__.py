"""GaLiTe's attention (Algorithm 3): the paper's recurrence beside the forms that are fast.

`reference.py` is the algorithm line by line; start there. `attention.py` has the public function.
"""

from agalite.ops.galite.attention import attend, galite_attention

__all__ = ["attend", "galite_attention"]
