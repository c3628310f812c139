"""The movement family of tensor operations."""
from __future__ import annotations

from whit.tensor.elementwise import ElementwiseMixin


class MovementMixin(ElementwiseMixin):
    """Methods of the movement family."""
