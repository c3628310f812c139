"""Layers (here), optimisers (`nn.optim`), learning rates (`nn.schedulers`), names and files of parameters
(`nn.state`), data sets (`nn.datasets`)."""

from __future__ import annotations

import importlib
from typing import Any

from whit.nn.attention import MultiheadAttention, TransformerEncoder, TransformerEncoderLayer
from whit.nn.clip import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from whit.nn.containers import ModuleList, Sequential
from whit.nn.layers import (
    BatchNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
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
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "Embedding",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "LayerNorm2d",
    "Linear",
    "ModuleList",
    "MultiheadAttention",
    "RMSNorm",
    "RNNCell",
    "Sequential",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]


_LATER = {"EMA": "ema", "GradScaler": "scaling"}


def __getattr__(name: str) -> Any:
    """What training needs besides layers is loaded on first use."""
    if name in ("init", "optim", "schedulers", "state", "datasets"):
        return importlib.import_module(f"whit.nn.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(f"whit.nn.{_LATER[name]}"), name)
    raise AttributeError(f"module 'whit.nn' has no attribute {name!r}")
