"""Gradients: one rule per op (`rules.py`), the walk that applies them (`gradient.py`), and the methods of
Tensor that use it (`tensors.py`). Tensor graph to tensor graph."""

from whit.autograd.gradient import gradient
from whit.autograd.rules import RULES
from whit.autograd.tensors import backward, gradients
from whit.tensor.storage import hooks

hooks.backward = backward
hooks.gradient = gradients

__all__ = ["RULES", "backward", "gradient", "gradients"]
