"""The creation family of tensor operations."""
from __future__ import annotations

from whit.tensor.reduce import ReduceMixin


class CreationMixin(ReduceMixin):
    """Methods of the creation family."""
