"""Lazy tensors: Python calls become a graph."""

from whit.tensor.storage import hooks
from whit.tensor.tensor import Tensor

__all__ = ["Tensor", "hooks"]
