"""The agents that the paper compares, by the names it gives them."""

from typing import Any

from agalite.studies.declaration import Changes, Factor

AGENTS: dict[str, Changes] = {
    "lstm": {"memory": "lstm"},
    "gru": {"memory": "gru"},
    **{f"gtrxl-{m}": {"memory": "gtrxl", "memory_options.memory": m}
       for m in (8, 16, 32, 64, 128, 256)},
    "linear": {"memory": "linear"},
    "galite": {"memory": "galite", "memory_options.eta": 4},
    "agalite": {"memory": "agalite", "memory_options.eta": 4, "memory_options.r": 1},
    "agalite-8": {"memory": "agalite", "memory_options.eta": 8, "memory_options.r": 1},
    "transformer": {"memory": "transformer"},
}  # fmt: skip

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
