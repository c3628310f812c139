"""Linear programs to source text, one file per language. Renderers only spell: codegen has decided."""

from __future__ import annotations

from whit.helpers import PAGE
from whit.uop import Op, Ops, UOp

# what the LLVM and C renderers spell for the types that a CPU computes in; here so that a warm start loads
# neither
CPU_OPS: frozenset[Op] = frozenset(
    {
        Ops.NEG,
        Ops.RECIPROCAL,
        Ops.SQRT,
        Ops.TRUNC,
        Ops.FLOOR,
        Ops.ADD,
        Ops.SUB,
        Ops.MUL,
        Ops.FDIV,
        Ops.FLOORDIV,
        Ops.FLOORMOD,
        Ops.TRUNCDIV,
        Ops.TRUNCMOD,
        Ops.MAX,
        Ops.MIN,
        Ops.AND,
        Ops.OR,
        Ops.XOR,
        Ops.SHL,
        Ops.SHR,
        Ops.CMPLT,
        Ops.CMPLE,
        Ops.CMPEQ,
        Ops.CMPNE,
        Ops.WHERE,
        Ops.MULACC,
        Ops.CAST,
        Ops.BITCAST,
    }
)


def scratch_alignment(local: UOp, streamed: bool) -> int:
    """Bytes of which the address of a LOCAL is a multiple. In kernels with stores past the caches it starts
    at a page, as buffers do: a load waits for an earlier store at the same place of another page, and those
    take long."""
    return PAGE if streamed and local.arg.size * local.dtype.itemsize >= PAGE else 64
