"""Derivatives: one rule per op (`rules.py`), the walk backwards that applies them (`gradient.py`), the walk
forwards (`forward.py`), the nodes that only derivatives see (`marks.py`), and the methods of Tensor that
use it (`tensors.py`). Tensor graph to tensor graph."""

from whit.autograd.forward import FORWARD, tangents
from whit.autograd.gradient import gradient
from whit.autograd.rules import RULES
from whit.autograd.tensors import backward, gradients
from whit.tensor.storage import hooks

hooks.backward = backward
hooks.gradient = gradients

__all__ = ["FORWARD", "RULES", "backward", "gradient", "gradients", "tangents"]
