"""How large the models are: as in the paper, small enough for two cores, tiny enough for tests."""

from typing import Any

from agalite import errors
from agalite.memory.sizes import BLOCKS, SMALL

_TINY = {"d_model": 16, "layers": 1, "heads": 1, "head_size": 8, "ffn_size": 16}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {},
    "small": SMALL,
    "tiny": {
        **dict.fromkeys(BLOCKS, _TINY),
        "feedforward": {"d_model": 16, "layers": 1, "ffn_size": 16},
        "gru": {"d_model": 16, "hidden": 16},
        "lstm": {"d_model": 16, "hidden": 16},
    },
}


def size(name: str, memory: str) -> dict[str, Any]:
    """Settings for a model: {"memory_options.d_model": 64, ...}."""
    errors.one_of("size", name, SIZES)
    options = SIZES[name].get(memory, {})
    return {f"memory_options.{option}": value for option, value in options.items()}
