"""What codegen needs to know of a machine, as data. Devices make one; heuristics, decompositions and
renderers read it."""
from __future__ import annotations

from typing import NamedTuple

from whit.uop.dtype import DType, dtypes
from whit.uop.ops import Op


class Target(NamedTuple):
    """`key` must tell apart any two machines for which code may differ (CPU features included): it is part of
    cache keys.

    language: the renderer's name ("llvm", "c", "python", …).
    vector_bytes: width of a vector register; 0 if the target has no vector arithmetic.
    vector_registers: how many of them.
    multiplies: multiply-adds of whole vectors that a core begins in a cycle.
    threads: tasks that run at once (THREAD axes).
    has_local: whether LOCAL/GROUP axes, shared scratch and barriers exist; local_bytes: how much scratch.
    max_local: most work-items of a group.
    native: ops that the language computes itself; any other ALU op is decomposed.
    storage_only: float types that can be loaded and stored (as bits) but not computed in; they go through
    float32.
    """

    key: str
    language: str
    vector_bytes: int = 0
    vector_registers: int = 16
    multiplies: int = 2
    threads: int = 1
    has_local: bool = False
    local_bytes: int = 0
    max_local: int = 1
    native: frozenset[Op] = frozenset()
    storage_only: tuple[DType, ...] = (dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.bfloat16, dtypes.float16)
    l1_bytes: int = 32 << 10
    l2_bytes: int = 1 << 20
    scratch_bytes: int = 3 << 20  # of private scratch memory for a task
    stream_bytes: int = 0  # results from this size on go past the caches; 0: none does
    masked_memory: bool = True  # whether masked vector loads and stores are cheap

    def lanes(self, dtype: DType) -> int:
        """Elements of `dtype` in one vector register, at least 1."""
        return max(1, self.vector_bytes // max(1, dtype.itemsize))
