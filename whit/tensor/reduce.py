"""The reduce family of tensor operations."""
from __future__ import annotations

from whit.tensor.movement import MovementMixin


class ReduceMixin(MovementMixin):
    """Methods of the reduce family."""
