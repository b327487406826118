"""Memory models with parameters: one file each, one contract (`base.py`)."""

from agalite.memory.agalite import AGaLiTe, AGaLiTeConfig
from agalite.memory.base import Memory
from agalite.memory.feedforward import Feedforward, FeedforwardConfig
from agalite.memory.galite import GaLiTe, GaLiTeConfig
from agalite.memory.gru import GRU, GRUConfig
from agalite.memory.gtrxl import GTrXL, GTrXLConfig
from agalite.memory.linear import LinearConfig, LinearTransformer
from agalite.memory.lstm import LSTM, LSTMConfig
from agalite.memory.registry import MODELS, make_memory
from agalite.memory.transformer import Transformer, TransformerConfig

__all__ = [
    "GRU",
    "LSTM",
    "MODELS",
    "AGaLiTe",
    "AGaLiTeConfig",
    "Feedforward",
    "FeedforwardConfig",
    "GRUConfig",
    "GTrXL",
    "GTrXLConfig",
    "GaLiTe",
    "GaLiTeConfig",
    "LSTMConfig",
    "LinearConfig",
    "LinearTransformer",
    "Memory",
    "Transformer",
    "TransformerConfig",
    "make_memory",
]
