"""Gradients: one rule per op (`rules.py`), and the walk that applies them (`gradient.py`). Tensor graph to
tensor graph."""
from whit.autograd.gradient import gradient
from whit.autograd.rules import RULES

__all__ = ["RULES", "gradient"]
