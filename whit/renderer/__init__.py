"""Linear programs to source text, one file per language. Renderers only spell: codegen has decided."""

from __future__ import annotations

from whit.uop import Op, Ops

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
