"""The indexing family of tensor operations."""
from __future__ import annotations

from whit.tensor.random import RandomMixin


class IndexingMixin(RandomMixin):
    """Methods of the indexing family."""
