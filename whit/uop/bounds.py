"""Interval arithmetic: the least and greatest value that a node can take (used by `UOp.bounds`)."""
from __future__ import annotations

import math
from collections.abc import Callable

from whit.uop.dtype import PyConst, dtypes
from whit.uop.ops import Op, Ops
from whit.uop.uop import UOp

Bounds = tuple[PyConst, PyConst]
INDEX_LIMIT = 1 << 62  # index arithmetic never overflows; this stands for "unknown"


def bounds_of(u: UOp) -> Bounds:
    """Bounds from the sources' bounds, which must be known. Integer results that could wrap give the dtype's
    whole range."""
    rule = _RULES.get(u.op)
    unknown: Bounds = (-INDEX_LIMIT, INDEX_LIMIT) if u.dtype is dtypes.index else (u.dtype.scalar.min,
                                                                                   u.dtype.scalar.max) \
        if u.dtype is not dtypes.void else (0, 0)
    if rule is None or u.dtype.is_float or (u.dtype.count > 1 and u.op is not Ops.CONST):
        return unknown
    result = rule(u)
    if result is None:
        return unknown
    if u.dtype.kind in "iu" and not (u.dtype.min <= result[0] and result[1] <= u.dtype.max):
        return unknown
    return result


def _const(u: UOp) -> Bounds | None:
    if isinstance(u.arg, tuple):
        return (min(u.arg), max(u.arg)) if not u.dtype.is_float else None
    return (u.arg, u.arg)


def _corners(function: Callable[[PyConst, PyConst], PyConst]) -> Callable[[UOp], Bounds]:
    def rule(u: UOp) -> Bounds:
        (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
        values = [function(x, y) for x in (a, b) for y in (c, d)]
        return min(values), max(values)
    return rule


def _add(u: UOp) -> Bounds | None:
    if u.dtype.is_bool:
        return None
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    return a + c, b + d


def _mul(u: UOp) -> Bounds | None:
    return None if u.dtype.is_bool else _corners(lambda x, y: x * y)(u)


def _sub(u: UOp) -> Bounds:
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    return a - d, b - c


def _neg(u: UOp) -> Bounds:
    a, b = u.src[0].bounds
    return -b, -a


def _floordiv(u: UOp) -> Bounds | None:
    c, d = u.src[1].bounds
    if c <= 0 <= d:
        return None
    return _corners(lambda x, y: int(x) // int(y))(u)


def _floormod(u: UOp) -> Bounds | None:
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    if c == d and c > 0:
        if a // c == b // c:
            return a % c, b % c
        return 0, c - 1
    return (0, d - 1) if c > 0 else None


def _truncdiv(u: UOp) -> Bounds | None:
    return _floordiv(u) if u.src[0].vmin >= 0 and u.src[1].vmin > 0 else None


def _truncmod(u: UOp) -> Bounds | None:
    return _floormod(u) if u.src[0].vmin >= 0 and u.src[1].vmin > 0 else None


def _compare(certain: Callable[[Bounds, Bounds], bool | None]) -> Callable[[UOp], Bounds | None]:
    def rule(u: UOp) -> Bounds | None:
        if u.src[0].dtype.is_float:
            return None
        known = certain(u.src[0].bounds, u.src[1].bounds)
        return None if known is None else (known, known)
    return rule


def _lt(x: Bounds, y: Bounds) -> bool | None:
    return True if x[1] < y[0] else False if x[0] >= y[1] else None


def _le(x: Bounds, y: Bounds) -> bool | None:
    return True if x[1] <= y[0] else False if x[0] > y[1] else None


def _eq(x: Bounds, y: Bounds) -> bool | None:
    return False if x[1] < y[0] or y[1] < x[0] else True if x[0] == x[1] == y[0] == y[1] else None


def _ne(x: Bounds, y: Bounds) -> bool | None:
    known = _eq(x, y)
    return None if known is None else not known


def _and(u: UOp) -> Bounds | None:
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    if u.dtype.is_bool:
        return bool(a and c), bool(b and d)
    if a >= 0 or c >= 0:  # the sign bit of one is 0, hence that of the result
        return 0, min(b, d) if a >= 0 and c >= 0 else b if a >= 0 else d
    return None


def _or(u: UOp) -> Bounds | None:
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    if u.dtype.is_bool:
        return bool(a or c), bool(b or d)
    return (max(a, c), (1 << max(int(b), int(d)).bit_length()) - 1) if a >= 0 and c >= 0 else None


def _xor(u: UOp) -> Bounds | None:
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    if u.dtype.is_bool or a < 0 or c < 0:
        return None
    return 0, (1 << max(int(b), int(d)).bit_length()) - 1


def _shl(u: UOp) -> Bounds | None:
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    if not 0 <= c <= d < 64 or a < 0 or int(b) << int(d) > u.dtype.max:
        return None
    return int(a) << int(c), int(b) << int(d)


def _shr(u: UOp) -> Bounds | None:
    (a, b), (c, d) = u.src[0].bounds, u.src[1].bounds
    if not 0 <= c <= d < 64 or (c != d and a < 0):
        return None
    return int(a) >> int(d), int(b) >> int(c)


def _where(u: UOp) -> Bounds:
    (low, high), yes, no = u.src[0].bounds, u.src[1].bounds, u.src[2].bounds
    if low == high:
        return yes if low else no
    return min(yes[0], no[0]), max(yes[1], no[1])


def _cast(u: UOp) -> Bounds | None:
    source = u.src[0]
    if source.dtype.is_float or u.dtype.is_bool:
        return None
    low, high = source.bounds
    limit = (-INDEX_LIMIT, INDEX_LIMIT) if u.dtype is dtypes.index else (u.dtype.min, u.dtype.max)
    return (int(low), int(high)) if limit[0] <= low and high <= limit[1] else None


def _range(u: UOp) -> Bounds:
    return 0, max(0, u.src[0].vmax - 1)


_RULES: dict[Op, Callable[[UOp], Bounds | None]] = {
    Ops.CONST: _const, Ops.ADD: _add, Ops.SUB: _sub, Ops.MUL: _mul, Ops.NEG: _neg,
    Ops.FLOORDIV: _floordiv, Ops.FLOORMOD: _floormod, Ops.TRUNCDIV: _truncdiv, Ops.TRUNCMOD: _truncmod,
    Ops.MAX: _corners(lambda x, y: max(x, y)), Ops.MIN: _corners(lambda x, y: min(x, y)),
    Ops.CMPLT: _compare(_lt), Ops.CMPLE: _compare(_le), Ops.CMPEQ: _compare(_eq), Ops.CMPNE: _compare(_ne),
    Ops.AND: _and, Ops.OR: _or, Ops.XOR: _xor, Ops.SHL: _shl, Ops.SHR: _shr, Ops.WHERE: _where,
    Ops.CAST: _cast, Ops.RANGE: _range,
    Ops.VAR: lambda u: (u.arg.min, u.arg.max), Ops.BIND: lambda u: (u.src[0].arg.min, u.src[0].arg.max),
    Ops.SPECIAL: lambda u: (0, u.arg.size - 1), Ops.IOTA: lambda u: (0, max(0, u.arg - 1)),
    Ops.RESHAPE: lambda u: u.src[0].bounds, Ops.BROADCAST: lambda u: u.src[0].bounds,
}

assert math.isinf(dtypes.float32.max)
