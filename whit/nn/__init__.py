"""Layers (here), optimisers (`nn.optim`), names and files of parameters (`nn.state`), data sets
(`nn.datasets`)."""

from __future__ import annotations

import importlib
from typing import Any

from whit.nn.clip import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from whit.nn.layers import (
    BatchNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNorm2d,
    Linear,
    LSTMCell,
    RMSNorm,
)
from whit.nn.recurrent import GRU, LSTM, RNN, GRUCell, RNNCell

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "LayerNorm2d",
    "Linear",
    "RMSNorm",
    "RNNCell",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]


def __getattr__(name: str) -> Any:
    """`nn.optim`, `nn.state` and `nn.datasets` are loaded on first use."""
    if name in ("optim", "state", "datasets"):
        return importlib.import_module(f"whit.nn.{name}")
    raise AttributeError(f"module 'whit.nn' has no attribute {name!r}")
