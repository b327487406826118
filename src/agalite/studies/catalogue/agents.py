"""The agents that the paper compares, by the names it gives them."""

from typing import Any

from agalite import validation
from agalite.memory.registry import BLOCKS, SMALL
from agalite.studies.declaration import Changes, Factor

AGENTS: dict[str, Changes] = {
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
}

# Time constants of the gates spread over 2 to 512 steps, where the paper's start near two.
SPREAD = (2.0, 512.0)
GATED = ("lstm", "gru", "galite", "agalite")


def agents(*names: str, spread: bool = False) -> Factor:
    """`spread`: the gates of the models that have any start with long memories (findings)."""
    levels: dict[str, Changes] = {}
    for name in names:
        changes: dict[str, Any] = dict(AGENTS[name])
        if spread and changes["memory"] in GATED:
            changes["memory_options.horizon"] = SPREAD
        levels[name] = changes
    return Factor("agent", levels)


# --- How large the models are: as in the paper, small enough for two cores, tiny enough for tests -

_TINY = {"d_model": 16, "layers": 1, "heads": 1, "head_size": 8, "ffn_size": 16}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {},
    "small": SMALL,
    "tiny": {
        **dict.fromkeys(BLOCKS, _TINY),
        "feedforward": {"d_model": 16, "layers": 1, "ffn_size": 16},
        "gru": {"d_model": 16, "hidden_size": 16},
        "lstm": {"d_model": 16, "hidden_size": 16},
    },
}


def size(name: str, memory: str) -> dict[str, Any]:
    """Settings for a model: {"memory_options.d_model": 64, ...}."""
    validation.one_of("size", name, SIZES)
    options = SIZES[name].get(memory, {})
    return {f"memory_options.{option}": value for option, value in options.items()}
