"""The random family of tensor operations."""
from __future__ import annotations

from whit.tensor.creation import CreationMixin


class RandomMixin(CreationMixin):
    """Methods of the random family."""
