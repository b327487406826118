"""Memory models with parameters: one file each, one contract (`base.py`)."""

from agalite.memory.agalite import AGaLiTe, AGaLiTeConfig
from agalite.memory.base import Memory
from agalite.memory.deltanet import DeltaNet, DeltaNetConfig
from agalite.memory.feedforward import Feedforward, FeedforwardConfig
from agalite.memory.ffm import FFM, FFMConfig
from agalite.memory.galite import GaLiTe, GaLiTeConfig
from agalite.memory.gru import GRU, GRUConfig
from agalite.memory.gtrxl import GTrXL, GTrXLConfig
from agalite.memory.linear import LinearConfig, LinearTransformer
from agalite.memory.lru import LRU, LRUConfig
from agalite.memory.lstm import LSTM, LSTMConfig
from agalite.memory.mamba2 import Mamba2, Mamba2Config
from agalite.memory.mingru import MinGRU, MinGRUConfig
from agalite.memory.mlstm import MLSTM, MLSTMConfig
from agalite.memory.registry import MODELS, make_memory
from agalite.memory.rtu import RTU, RTUConfig
from agalite.memory.s5 import S5, S5Config
from agalite.memory.transformer import Transformer, TransformerConfig

__all__ = [
    "FFM",
    "GRU",
    "LRU",
    "LSTM",
    "MLSTM",
    "MODELS",
    "RTU",
    "S5",
    "AGaLiTe",
    "AGaLiTeConfig",
    "DeltaNet",
    "DeltaNetConfig",
    "FFMConfig",
    "Feedforward",
    "FeedforwardConfig",
    "GRUConfig",
    "GTrXL",
    "GTrXLConfig",
    "GaLiTe",
    "GaLiTeConfig",
    "LRUConfig",
    "LSTMConfig",
    "LinearConfig",
    "LinearTransformer",
    "MLSTMConfig",
    "Mamba2",
    "Mamba2Config",
    "Memory",
    "MinGRU",
    "MinGRUConfig",
    "RTUConfig",
    "S5Config",
    "Transformer",
    "TransformerConfig",
    "make_memory",
]
