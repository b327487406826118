"""The models that latency is measured for, at the sizes of the paper's appendix."""

import math
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from agalite.memory import Memory, make_memory

# Parisotto et al.'s sizes (2020), which the paper measures latency at.
SIZE: dict[str, Any] = {
    "d_model": 256,
    "layers": 12,
    "heads": 8,
    "head_size": 64,
    "ffn_size": 256,
}
INPUT = 256
REFERENCE = "agalite(4,1)"
"""What every ratio is taken to: eta = 4, r = 1."""


@dataclass(frozen=True)
class Subject:
    """A model by name, with its options; `context` is M, None where nothing limits it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    context: int | None = None

    @property
    def recurrent(self) -> bool:
        return self.name in ("gru", "lstm")


MEMORIES = (128, 512, 1024, 2048)


def _subjects() -> dict[str, Subject]:
    out = {
        f"agalite({eta},{r})": Subject("agalite", {"eta": eta, "r": r})
        for r in (1, 7)
        for eta in (4, 8, 16)
    }
    out["galite(4)"] = Subject("galite", {"eta": 4})
    out["linear"] = Subject("linear")
    for m in MEMORIES:
        # The paper's: the whole memory is projected to keys and values again at every step.
        out[f"gtrxl-{m}"] = Subject("gtrxl", {"memory": m, "cache": False}, m)
        out[f"gtrxl-{m}, cached"] = Subject("gtrxl", {"memory": m, "cache": True}, m)
    # One layer, twice as wide as its embedding, as in the paper's table; as many parameters as
    # agalite(4,1) to within half a percent.
    out["gru"] = Subject("gru", {"d_model": 1070, "hidden_size": 2140})
    out["lstm"] = Subject("lstm", {"d_model": 928, "hidden_size": 1856})
    return out


SUBJECTS = _subjects()


def _narrowed(subject: Subject, size: dict[str, Any]) -> dict[str, int]:
    """The recurrent models have one layer: with fewer layers elsewhere they become narrower."""
    share = math.sqrt(size["layers"] / SIZE["layers"])
    return {name: round(share * width) for name, width in subject.options.items()}


def build(subject: Subject, size: dict[str, Any] | None = None) -> Memory:
    """The model with weights drawn from a normal distribution of the usual scale.

    Not the models' own orthogonal weights, which take seconds to draw for so many layers and make
    no difference to the time of a step.
    """
    size = SIZE if size is None else size
    options = subject.options | (_narrowed(subject, size) if subject.recurrent else size)
    shapes: Any = eqx.filter_eval_shape(make_memory, subject.name, INPUT, **options)
    rng = np.random.default_rng(0)

    def draw(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if len(x.shape) < 2:
            return jnp.full(x.shape, 0.5, x.dtype)
        scale = 1 / math.sqrt(x.shape[-1])
        return jnp.asarray(scale * rng.standard_normal(x.shape, np.float32), x.dtype)

    return jax.tree.map(draw, shapes)
