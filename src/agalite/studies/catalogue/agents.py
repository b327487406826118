"""The agents that the paper compares, by the names it gives them, and the sizes of their models."""

from typing import Any

from agalite import validation
from agalite.memory.registry import BLOCKS, DIAGONAL, SMALL
from agalite.studies.declaration import Factor, Settings

AGENTS: dict[str, Settings] = {
    "lstm": {"memory": "lstm"},
    "gru": {"memory": "gru"},
    **{
        f"gtrxl-{m}": {"memory": "gtrxl", "memory_options.memory": m}
        for m in (8, 16, 32, 64, 128, 256)
    },
    "linear": {"memory": "linear"},
    "galite": {"memory": "galite", "memory_options.eta": 4},
    "agalite": {"memory": "agalite", "memory_options.eta": 4, "memory_options.r": 1},
    "agalite-8": {"memory": "agalite", "memory_options.eta": 8, "memory_options.r": 1},
    "transformer": {"memory": "transformer"},
    **{name: {"memory": name} for name in DIAGONAL},
}

LONG_HORIZON = (2.0, 512.0)
"""Initial time constants of the gates, in steps; the paper's initialisation gives about 2."""
GATED = ("lstm", "gru", "galite", "agalite")
"""The agents of the paper that have a `horizon`."""


def agents(*names: str) -> Factor:
    """The factor "agent", with one level for each of these keys of `AGENTS`."""
    return Factor("agent", {name: AGENTS[name] for name in names})


_TINY = {"d_model": 16, "layers": 1, "heads": 1, "head_size": 8, "ffn_size": 16}

# Options by model: the paper's sizes are the defaults, small ones suit two cores, tiny ones tests.
MODEL_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {},
    "small": SMALL,
    "tiny": {
        **dict.fromkeys(BLOCKS, _TINY),
        **{
            name: {"d_model": 16, "layers": 1, "ffn_size": 16, "hidden_size": 16}
            for name in DIAGONAL
        },
        "feedforward": {"d_model": 16, "layers": 1, "ffn_size": 16},
        "gru": {"d_model": 16, "hidden_size": 16},
        "lstm": {"d_model": 16, "hidden_size": 16},
    },
}


def model_size(name: str, memory: str) -> dict[str, Any]:
    """The settings that give a model a size: {"memory_options.d_model": 64, ...}."""
    validation.check_one_of("model_size", name, MODEL_SIZES)
    options = MODEL_SIZES[name].get(memory, {})
    return {f"memory_options.{option}": value for option, value in options.items()}
