"""The linalg family of tensor operations."""
from __future__ import annotations

from whit.tensor.indexing import IndexingMixin


class LinalgMixin(IndexingMixin):
    """Methods of the linalg family."""
