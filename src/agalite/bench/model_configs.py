"""The models that latency is measured for, at the sizes of the paper's appendix."""

import math
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from agalite.memory import AGaLiTe, Memory, make_memory

# Parisotto et al.'s sizes (2020), at which the paper measures latency.
SIZE: dict[str, Any] = {
    "d_model": 256,
    "layers": 12,
    "heads": 8,
    "head_size": 64,
    "ffn_size": 256,
}
INPUT_SIZE = 256
REFERENCE = "agalite(4,1)"
"""The model that ratios are taken to: eta = 4, r = 1."""
CONTEXTS = (128, 512, 1024, 2048)
"""Memory lengths M of GTrXL."""


class UnfoldedAGaLiTe(AGaLiTe):
    """AGaLiTe with the duplicate state vectors of Algorithm 4 as written."""

    fold = False


UNFOLDED = "agalite unfolded"


def make_model(name: str, input_size: int, **options: Any) -> Memory:
    """`make_memory`, which also knows `UNFOLDED`."""
    if name == UNFOLDED:
        model: Any = UnfoldedAGaLiTe
        return model(input_size, key=jax.random.key(0), **options)
    return make_memory(name, input_size, **options)


@dataclass(frozen=True)
class ModelConfig:
    """A registered model and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    """M, the inputs that a layer can read; None where nothing limits it."""

    @property
    def recurrent(self) -> bool:
        return self.name in ("gru", "lstm")


def _model_configs() -> dict[str, ModelConfig]:
    out = {
        f"agalite({eta},{r})": ModelConfig("agalite", {"eta": eta, "r": r})
        for r in (1, 7)
        for eta in (4, 8, 16)
    }
    out["galite(4)"] = ModelConfig("galite", {"eta": 4})
    out["linear"] = ModelConfig("linear")
    for m in CONTEXTS:
        # As the paper measures it: the whole memory is projected to keys and values at every step.
        out[f"gtrxl-{m}"] = ModelConfig("gtrxl", {"memory": m, "cache": False}, m)
        out[f"gtrxl-{m}, cached"] = ModelConfig("gtrxl", {"memory": m, "cache": True}, m)
    # One layer, twice as wide as its embedding, as in the paper's table; as many parameters as
    # agalite(4,1) to within half a percent.
    out["gru"] = ModelConfig("gru", {"d_model": 1070, "hidden_size": 2140})
    out["lstm"] = ModelConfig("lstm", {"d_model": 928, "hidden_size": 1856})
    return out


MODEL_CONFIGS = _model_configs()


def build(config: ModelConfig, size: dict[str, Any] | None = None) -> Memory:
    """The model with normally distributed weights.

    The models' own orthogonal initialisation takes seconds for this many layers and makes no
    difference to the time of a step.

    **Arguments:**

    - `config`: the model and its options.
    - `size`: `d_model`, `layers` and so on; `SIZE` if not given. GRU and LSTM have one layer and
        sizes of their own, which shrink with the number of layers in `size`.
    """
    size = SIZE if size is None else size
    options = config.options | (_recurrent_size(config, size) if config.recurrent else size)
    shapes: Any = eqx.filter_eval_shape(make_memory, config.name, INPUT_SIZE, **options)
    rng = np.random.default_rng(0)

    def draw(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if len(x.shape) < 2:
            return jnp.full(x.shape, 0.5, x.dtype)
        scale = 1 / math.sqrt(x.shape[-1])
        return jnp.asarray(scale * rng.standard_normal(x.shape, np.float32), x.dtype)

    return jax.tree.map(draw, shapes)


def _recurrent_size(config: ModelConfig, size: dict[str, Any]) -> dict[str, int]:
    """Widths at which the parameter count shrinks as that of a stack with fewer layers does."""
    scale = math.sqrt(size["layers"] / SIZE["layers"])
    return {name: round(scale * width) for name, width in config.options.items()}
