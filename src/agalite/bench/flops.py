"""Operations and state of one attention head for one input of a stream, from first principles.

d is the model's width, V the head's, M GTrXL's memory length, eta and r those of AGaLiTe, H the
number of heads. An operation is one number computed: a multiplication with its addition inside a
matrix product or a dot product, or one elementwise operation outside. Each count follows an
algorithm of the paper line by line, as formulas in these sizes that are printed and evaluated.
"""

import math
from dataclasses import dataclass
from typing import Any

_FUNCTIONS = {"floor": math.floor}


@dataclass(frozen=True)
class Count:
    """Formulas in d, V, M, eta and r, by what they count."""

    name: str
    operations: dict[str, str]
    state: dict[str, str]
    """Floats carried from one input to the next."""
    shared: tuple[str, ...] = ()
    """Names in `state` of which all heads of a layer share one."""

    def total(self, what: str, **sizes: int) -> int:
        """The sum of `operations` or `state`, whichever `what` is."""
        return sum(evaluate(formula, **sizes) for formula in getattr(self, what).values())

    def layer_state(self, **sizes: int) -> int:
        """The state of a layer with H heads, in floats."""
        return sum(
            evaluate(formula, **sizes) * (1 if part in self.shared else sizes["H"])
            for part, formula in self.state.items()
        )


def evaluate(formula: str, **sizes: int) -> int:
    """The value of one of this module's formulas."""
    code: Any = formula.replace("^", "**")
    return int(eval(code, {"__builtins__": {}}, _FUNCTIONS | sizes))


_PROJECT_MEMORY = {
    "query": "d*V",
    "keys and values of the whole memory": "2*M*d*V",
}
_SOFTMAX = {
    "scores, q . k": "M*V",
    "softmax": "3*M",
    "weighted sum of values": "M*V",
}
GTRXL_PLAIN = Count(
    "GTrXL, without relative positions",
    {**_PROJECT_MEMORY, **_SOFTMAX},
    {"inputs of the memory": "M*d"},
    shared=("inputs of the memory",),
)
GTRXL = Count(
    "GTrXL, as the paper measures it",
    {
        **_PROJECT_MEMORY,
        "projected position codes": "M*d*V",
        "scores of positions": "M*V + 2*V + M",
        **_SOFTMAX,
    },
    {"inputs of the memory": "M*d"},
    shared=("inputs of the memory",),
)
GTRXL_CACHED = Count(
    "GTrXL, keys and values cached",
    {
        "query, key, value": "3*d*V",
        "scores of positions, as (q W) . code": "d*V + M*d + 2*V + M",
        **_SOFTMAX,
    },
    {"inputs of the memory": "M*d", "keys and values": "2*M*V"},
    shared=("inputs of the memory",),
)
_PROJECTIONS = {
    "q, k, v, beta, gamma": "5*d*V",
    "p1, p2, p3": "3*eta*d",
    "activations": "4*V + 3*eta",
}
AGALITE = Count(
    "AGaLiTe, Algorithm 4 line by line",
    {
        **_PROJECTIONS,
        "outer products of k, q, gamma": "3*eta*V",
        "1 - beta, beta v, 1 - gamma, gamma k": "2*V + 2*eta*V",
        "v~: decay, cosine, sum": "3*(r+1)*V",
        "k~: decay, cosine, sum": "3*(r+1)*eta*V",
        "s: decay, sum": "2*eta*V",
        "k~ . q, weighted sum of v~": "(r+1)*eta*V + (r+1)*V",
        "s . q, division": "eta*V + V + 1",
    },
    {"k~ and v~": "(r+1)*(eta*V + V)", "s": "eta*V"},
)
# Half of the paper's state vectors equal the other half, and s equals the first of them.
AGALITE_FOLDED = Count(
    "AGaLiTe, folded: without equal state vectors",
    {
        **_PROJECTIONS,
        "outer products of k, q, gamma": "3*eta*V",
        "1 - beta, beta v, 1 - gamma, gamma k": "2*V + 2*eta*V",
        "v~: decay, cosine, sum": "3*(floor(r/2)+1)*V",
        "k~: decay, cosine, sum": "3*(floor(r/2)+1)*eta*V",
        "k~ . q, weighted sum of v~": "(floor(r/2)+1)*(eta*V + V + 1)",
        "division by s . q = k~0 . q": "V + 1",
    },
    {"k~ and v~": "(floor(r/2)+1)*(eta*V + V)"},
)
GALITE = Count(
    "GaLiTe, Algorithm 3",
    {
        **_PROJECTIONS,
        "outer products of k, q, gamma": "3*eta*V",
        "1 - beta, beta v, 1 - gamma, gamma k": "2*V + 2*eta*V",
        "C: decay (two gates), outer product, sum": "4*eta*V^2",
        "s: decay, sum": "2*eta*V",
        "C q, s . q, division": "eta*V^2 + eta*V + V",
    },
    {"C": "eta*V^2", "s": "eta*V"},
)
LINEAR = Count(
    "linear transformer, Algorithm 2",
    {
        "q, k, v": "3*d*V",
        "feature map": "2*V",
        "C: outer product, sum": "2*V^2",
        "s": "V",
        "C q, s . q, division": "V^2 + 2*V",
    },
    {"C": "V^2", "s": "V"},
)
COUNTS = (GTRXL_PLAIN, GTRXL, GTRXL_CACHED, AGALITE, AGALITE_FOLDED, GALITE, LINEAR)


@dataclass(frozen=True)
class Claim:
    """A ratio that the paper prints: the cost of one head of GTrXL by one of AGaLiTe."""

    where: str
    sizes: dict[str, int]
    operations: float
    state: float
    digits: int
    """Decimals of `state` in the paper."""


def _sizes(d: int, m: int, eta: int, r: int, heads: int) -> dict[str, int]:
    return {"d": d, "V": 64, "M": m, "eta": eta, "r": r, "H": heads}


CLAIMS = (
    Claim("T-Maze, GTrXL-256 / AGaLiTe", _sizes(128, 256, 4, 1, 4), 125.1, 36.57, 2),
    Claim("T-Maze, GTrXL-128 / AGaLiTe", _sizes(128, 128, 4, 1, 4), 62.67, 18.28, 2),
    Claim("Mystery Path, GTrXL-128 / AGaLiTe-8", _sizes(128, 128, 8, 1, 4), 55.75, 9.84, 2),
    Claim("Memory Maze, GTrXL-256 / AGaLiTe", _sizes(512, 256, 4, 7, 8), 125, 46, 0),
)


def truncate(value: float, digits: int) -> float:
    """Rounds down, as the paper does: 18.2857, 9.846 and 46.5 are its 18.28, 9.84 and 46."""
    scale = 10**digits
    return math.floor(value * scale) / scale


def ratios(claim: Claim, above: Count, below: Count) -> dict[str, float]:
    """The cost of `above` by the cost of `below`, at the sizes of a claim.

    **Returns:**

    `operations` and `state` of one head, which the paper compares, and `layer_state`.
    """
    sizes = claim.sizes
    return {
        "operations": above.total("operations", **sizes) / below.total("operations", **sizes),
        "state": above.total("state", **sizes) / below.total("state", **sizes),
        "layer_state": above.layer_state(**sizes) / below.layer_state(**sizes),
    }
