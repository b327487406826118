"""Sizes of the models other than the paper's, which are their defaults."""

from typing import Any

BLOCKS = ("agalite", "galite", "linear", "transformer", "gtrxl")
"""The models that are stacks of one block, and take the same sizes."""

_SMALL = {"d_model": 64, "layers": 2, "heads": 2, "head_size": 32, "ffn_size": 64}

# The recurrent ones have about as many parameters as AGaLiTe.
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(BLOCKS, _SMALL),
    "feedforward": {"d_model": 64, "layers": 2, "ffn_size": 64},
    "gru": {"d_model": 128, "hidden": 192},
    "lstm": {"d_model": 128, "hidden": 160},
}
"""For two cores: options of each model."""
