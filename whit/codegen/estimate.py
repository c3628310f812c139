"""What a kernel costs at least: floating-point operations and bytes of memory traffic."""

from __future__ import annotations

from whit.uop import Ops, Sint, UOp

_NOT_COUNTED = frozenset({Ops.WHERE, Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE})


def estimate(ast: UOp) -> tuple[Sint, Sint]:
    """(flops, bytes) of a kernel: each float operation once per value of the RANGEs that it depends on, each
    element of a buffer once however often it is read. Symbolic sizes give expressions of VARs.

    >>> from whit.uop import ParamArg, dtypes
    >>> i = UOp.range(10, uid=0)
    >>> p, q = (UOp(Ops.PARAM, dtypes.float32, (), ParamArg(n, 10)) for n in range(2))
    >>> x = UOp(Ops.INDEX, dtypes.float32, (q, i))
    >>> estimate(UOp.sink(UOp(Ops.STORE, dtypes.void, (p, i, x * x)).end(i)))
    (10, 80)
    """
    flops: Sint = 0
    touched: dict[UOp, Sint] = {}
    for node in ast.toposort():
        op = node.op
        if op is Ops.INDEX or op is Ops.STORE:
            if node.src[0].op is not Ops.PARAM:
                continue  # scratch
            touched[node.src[0]] = _less(
                touched.get(node.src[0], 0) + _times(node.src[1].ranges), node.src[0].arg.size
            )
        elif node.dtype.is_float and op.is_alu and op not in _NOT_COUNTED:
            flops = flops + _times(node.ranges) * (2 if op is Ops.MULACC else 1)
        elif op is Ops.REDUCE and node.dtype.is_float:
            flops = flops + _times(node.ranges | frozenset(node.src[1:]))
    total: Sint = 0
    for param, count in touched.items():
        total = total + count * param.dtype.itemsize
    return flops, total


def _times(ranges: frozenset[UOp]) -> Sint:
    result: Sint = 1
    for r in ranges:
        size = r.src[0]
        result = result * (size.arg if size.op is Ops.CONST else size)
    return result


def _less(count: Sint, limit: int) -> Sint:
    return min(count, limit) if isinstance(count, int) else count
