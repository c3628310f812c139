"""The functional family of tensor operations."""
from __future__ import annotations

from whit.tensor.linalg import LinalgMixin


class FunctionalMixin(LinalgMixin):
    """Methods of the functional family."""
