"""Sums of products of small whole numbers in blocks: weights of a few bits (`nn.blocks`) and numbers that
were rounded to 8 bits, four of each in a word.

    y[n] = sum_b d[n, b] * float32(sum_e q(w[n, b], e) * x[b * 32 + e])       q: 0 to 255, x: int8
    becomes, with a word for e = 4l, 4l + 1, 4l + 2, 4l + 3,
    y[n] = sum_{b, l} d[n, b] * float32(DOT4U(word(w[n, b], l), word(x, b * 8 + l), 0))

The words of weights come from the bytes of the block, all four numbers at once: those of nibbles are
(bytes >> 4 * h) & 0x0F0F0F0F. Each lane of a vector sums its own l, so that no lanes are added up until the
end. A sum of a few products of bytes is exact as a float32. q - 8 is summed as q; what 8 * x sums to
is where each DOT4U starts, and serves all rows. `split_words` does it before opts; `block_sums.block_rows`
chooses them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator

from whit.codegen.dots import SIGNS, packed
from whit.codegen.stages import next_uid
from whit.codegen.target import Target
from whit.uop import AxisType, Ops, RangeArg, ReduceArg, UOp, dtypes
from whit.uop.ops import DOTS
from whit.uop.rewrite import rebuild
from whit.uop.symbolic import operands, simplify
from whit.uop.uop import alu

I32, U32 = dtypes.int32, dtypes.uint32
EACH = 0x01010101  # one in each of four bytes
SPREAD = 0x00204081  # times four bits, and EACH: a bit in each of four bytes

MOST_SUM = 1 << 24  # float32 has all whole numbers up to here

Term = tuple[bool, list[UOp], UOp | None]  # whether it is subtracted, factors, a sum of products of bytes


def split_words(ast: UOp, target: Target) -> UOp:
    """The kernel with sums of products of bytes in the form above; the same kernel if there are none."""
    if target.vector_bytes == 0 or target.native.isdisjoint(DOTS):
        return ast
    order = ast.toposort()
    if not any(u.op is Ops.INDEX and u.dtype is dtypes.int8 for u in order):
        return ast
    uids = itertools.count(next_uid(order))
    return rebuild(ast, lambda old, new: _split(new, uids) or new)


def _split(reduce: UOp, uids: Iterator[int]) -> UOp | None:
    if reduce.op is not Ops.REDUCE or reduce.arg.op is not Ops.ADD or reduce.dtype is not dtypes.float32:
        return None
    terms = _terms(reduce.src[0])
    sums = dict.fromkeys([inner for _, _, inner in terms if inner is not None])
    if not sums:
        return None
    lanes = {inner.src[0].src[1].src[0].arg for inner in sums}
    if len(lanes) > 1:
        return None
    size = lanes.pop() // 4
    if size & (size - 1):
        return None
    l = UOp(Ops.RANGE, dtypes.index, (UOp.index(size),), RangeArg(next(uids), AxisType.REDUCE))
    dots = {inner: _dot(inner.src[0], l) for inner in sums}
    if any(dot is None for dot in dots.values()):
        return None
    total: UOp | None = None
    for minus, factors, inner in terms:
        factors = sorted(factors, key=lambda f: len(f.ranges))  # what rows have in common is computed once
        dot = None if inner is None else dots[inner]
        # what has no sum inside is shared among the lanes, so that all stand in one loop
        own = UOp.const(1 / size, dtypes.float32) if dot is None else dot.cast(dtypes.float32)
        factors = [own, *factors] if dot is None else [*factors, own]
        value = functools.reduce(operator.mul, factors)
        part = UOp(Ops.REDUCE, reduce.dtype, (value, *reduce.src[1:], l), ReduceArg(Ops.ADD))
        total = part if total is None else total - part if minus else total + part
    return total


def _terms(value: UOp) -> list[Term]:
    """The value as a sum of products, multiplied out as far as sums of products of bytes stand inside."""
    found: list[Term] = []
    todo: list[tuple[bool, list[UOp], UOp]] = [(False, [], value)]
    while todo:
        minus, factors, node = todo.pop()
        if _is_sum(node):
            found.append((minus, factors, node))
        elif not _has_sum(node):
            found.append((minus, [*factors, *operands(node, Ops.MUL)], None))
        elif node.op in (Ops.ADD, Ops.SUB):
            a, b = node.src
            todo.append((minus ^ (node.op is Ops.SUB), factors, b))
            todo.append((minus, factors, a))
        elif node.op is Ops.MUL:
            parts = operands(node, Ops.MUL)
            inside = [p for p in parts if _has_sum(p)]
            if len(inside) > 1:
                return []
            todo.append((minus, [*factors, *[p for p in parts if p is not inside[0]]], inside[0]))
        else:
            return []
    found.sort(key=lambda term: term[0])  # no sum begins with what is subtracted
    return [] if found[0][0] else found


def _is_sum(node: UOp) -> bool:
    """Whether it is float32 of a sum of products over one axis, whole words of it, that float32 has exactly:
    it then equals the sum of what its lanes are as float32."""
    if node.op is not Ops.CAST or node.dtype is not dtypes.float32 or node.src[0].op is not Ops.REDUCE:
        return False
    inner = node.src[0]
    if inner.arg.op is not Ops.ADD or inner.dtype is not I32 or len(inner.src) != 2:
        return False
    size, value = inner.src[1].src[0], inner.src[0]
    if value.op is not Ops.MUL or size.op is not Ops.CONST or size.arg % 4:
        return False
    return bool(max(abs(value.vmin), abs(value.vmax)) * size.arg <= MOST_SUM)


def _has_sum(node: UOp) -> bool:
    return any(_is_sum(u) for u in node.toposort(lambda u: u.op is Ops.STAGE or u.dtype is dtypes.index))


# ---- words -------------------------------------------------------------------------------------------------


def _dot(inner: UOp, l: UOp) -> UOp | None:
    """What lane l adds to a sum of products; None if these are no bytes. It starts with what the offset of
    the weights adds, which is the same for all rows."""
    k = inner.src[1]
    a, b = (_narrow(s) for s in inner.src[0].src)
    if not _reads_weights(a):
        a, b = b, a
    offset = 0
    if a.op in (Ops.ADD, Ops.SUB) and a.src[1].op is Ops.CONST:
        offset = int(a.src[1].arg) * (1 if a.op is Ops.SUB else -1)
        a = _narrow(a.src[0])
    low, high = a.vmin, a.vmax
    fits = (low >= 0 and high <= 255) or (low >= -128 and high <= 127)
    if not fits or not _reads_weights(a):
        return None
    q, zero = _word(a, k, l), UOp.const(0, I32)
    if low < 0 and q is not None:  # flipping its sign bit adds 128 to a byte
        q, offset = q ^ SIGNS, offset + 128
    if q is None or b.op is not Ops.INDEX or b.dtype is not dtypes.int8 or not 0 <= offset <= 255:
        return None
    x = packed(b, k, l, Ops.DOT4U)
    if not offset:
        return UOp(Ops.DOT4U, I32, (q, x, zero))
    return UOp(Ops.DOT4U, I32, (q, x, alu(Ops.SUB, zero, UOp(Ops.DOT4U, I32, (_each(offset), x, zero)))))


def _narrow(value: UOp) -> UOp:
    """What a value was before casts between integers that keep it."""
    while value.op is Ops.CAST and value.src[0].dtype.kind in "iu":
        before = value.src[0]
        limits = value.dtype.min, value.dtype.max
        if before.vmin < limits[0] or before.vmax > limits[1]:
            break
        value = before
    return value


def _reads_weights(value: UOp) -> bool:
    return any(u.op is Ops.INDEX and u.dtype is dtypes.uint8 for u in value.toposort())


def _word(value: UOp, k: UOp, l: UOp) -> UOp | None:
    """The low bytes of the values at k = 4l … 4l + 3, the first in the lowest bits, from the bytes that they
    are computed of, all four at once. None if that is not known how."""
    value = _narrow(value)
    op = value.op
    if op is Ops.CONST:
        return _each(value.arg & 255)
    if op is Ops.INDEX and value.dtype.itemsize == 1:
        return packed(value, k, l, Ops.DOT4U)
    if op is Ops.BITCAST and value.src[0].dtype.itemsize == 1:
        return _word(value.src[0], k, l)
    if op in (Ops.OR, Ops.XOR):
        a, b = (_word(s, k, l) for s in value.src)
        return None if a is None or b is None else alu(op, a, b)
    if op is Ops.SHL and value.src[1].op is Ops.CONST and value.vmax <= 255:
        a = _word(value.src[0], k, l)
        return None if a is None else a << value.src[1].arg
    if op is Ops.AND and value.src[1].op is Ops.CONST and 0 < value.src[1].arg <= 255:
        return _masked(value.src[0], value.src[1].arg, k, l)
    return None


def _masked(value: UOp, mask: int, k: UOp, l: UOp) -> UOp | None:
    """The words of value & mask."""
    value = _narrow(value)
    each = _each(mask)
    if value.op is not Ops.SHR:
        a = _word(value, k, l)
        return None if a is None else a & each
    before, amount = value.src
    at = [simplify(amount.substitute({k: l * 4 + n})) for n in range(4)]
    if k not in before.ranges and mask == 1:  # bits that follow each other
        steps = [simplify(_index(a) - _index(at[0])) for a in at]
        if all(s.op is Ops.CONST and s.arg == n for n, s in enumerate(steps)):
            four = (before.cast(U32) >> at[0].cast(U32)) & 15
            return (four.cast(I32) * SPREAD) & EACH
    if any(a is not at[0] for a in at) or before.vmax > 255 or mask > 255 >> min(8, int(amount.vmax)):
        return None
    word = _word(before, k, l)
    return None if word is None else (word.cast(U32) >> at[0].cast(U32)).cast(I32) & each


def _each(byte: int) -> UOp:
    """A word of four times a byte."""
    word: UOp = UOp.const(byte * EACH - ((byte & 128) << 25), I32)
    return word


def _index(amount: UOp) -> UOp:
    """A shift as an index, through casts and multiplications by constants."""
    if amount.op is Ops.CAST:
        return _index(amount.src[0])
    if amount.op is Ops.MUL and amount.src[1].op is Ops.CONST:
        return alu(Ops.MUL, _index(amount.src[0]), UOp.index(int(amount.src[1].arg)))
    if amount.op is Ops.ADD:
        return _index(amount.src[0]) + _index(amount.src[1])
    return UOp.index(int(amount.arg)) if amount.op is Ops.CONST else amount
