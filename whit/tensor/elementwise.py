"""The elementwise family of tensor operations."""
from __future__ import annotations

from whit.tensor.base import TensorBase


class ElementwiseMixin(TensorBase):
    """Methods of the elementwise family."""
