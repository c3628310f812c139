"""Products of small numbers by the instructions that add up four (or two) of them at a time.

    sum_k int32(a[i*64 + k]) * int32(b[k*32 + j])                    a, b: int8; k = RANGE(64)
    becomes, with k = RANGE(16) and pack4(v, s) = the bytes v, at s, 2s and 3s elements on, as one int32,
    sum_k DOT4(pack4(a[i*64 + k*4], 1), pack4(b[k*128 + j], 32), 0)

`use_dots` does it before opts, where both operands are used often enough to be packed; to STAGE and the loops
the packed values are ordinary int32 values. Sums wrap as those of int32 do, so every result stays the same.
Pairs of bfloat16 are words of float32, and so is what DOT2B adds up.
`match_signs` comes after opts: machines multiply signed bytes by unsigned or by signed ones, not both.
"""

from __future__ import annotations

import itertools

from whit.codegen.stages import gated, next_uid, rename_free, stored_neighbours
from whit.codegen.target import Target
from whit.helpers import ceildiv, prod, round_up
from whit.uop import AxisType, DType, Op, Ops, RangeArg, ReduceArg, UOp, dtypes
from whit.uop.ops import DOTS
from whit.uop.rewrite import rebuild
from whit.uop.symbolic import linear_form, simplify
from whit.uop.uop import alu

I32, F32 = dtypes.int32, dtypes.float32
LEAST_USES = 4  # of each operand, so that packing it pays
LEAST_WORK = 1 << 14  # multiplications
SIGNS = -0x7F7F7F80  # the sign bit of each of four bytes, as an int32
OTHER = {Ops.DOT4: Ops.DOT4U, Ops.DOT4U: Ops.DOT4}


# ---- before opts -------------------------------------------------------------------------------------------


def use_dots(ast: UOp, target: Target) -> UOp:
    """The kernel with its sums of products of 8- and 16-bit integers by DOT ops, where the target has one."""
    if target.vector_bytes == 0 or target.native.isdisjoint(DOTS):
        return ast
    return rebuild(ast, lambda old, new: _dotted(new, target) or new)


def _dotted(node: UOp, target: Target) -> UOp | None:
    """The sum by a DOT op; None if it is no sum of products of small integers, or too small a one."""
    if node.op is not Ops.REDUCE or node.arg.op is not Ops.ADD or node.src[0].op is not Ops.MUL:
        return None
    if node.dtype is not F32 and (node.dtype.kind not in "iu" or node.dtype.bitsize > 32):
        return None
    x, y = (_narrow(s) for s in node.src[0].src)
    op = _choose(x.dtype, y.dtype, target)
    if op is None or not _is_reused(node, x, y):
        return None
    if op is Ops.DOT4U and x.dtype is dtypes.int8:
        x, y = y, x
    count = 32 // DOTS[op]
    folds = [r for r in node.src[1:] if r in x.ranges and r in y.ranges and _size(r) >= count]
    if not folds:
        return None
    near = {r for value in (x, y) for r in _neighbours(value)}
    k = min(folds, key=lambda r: (round_up(_size(r), count) / _size(r), r not in near, -_size(r)))
    short = k.replace(src=(UOp.index(ceildiv(_size(k), count)),))
    kind = F32 if op is Ops.DOT2B else I32
    words = [packed(v, k, short, op) for v in (x, y)]
    value = UOp(op, kind, (*[w if kind is I32 else w.bitcast(F32) for w in words], UOp.const(0, kind)))
    ranges = [short if r is k else r for r in node.src[1:]]
    return UOp(Ops.REDUCE, kind, (value, *ranges), ReduceArg(Ops.ADD)).cast(node.dtype)


def _narrow(value: UOp) -> UOp:
    """What a value was before casts that only widen it."""
    while value.op is Ops.CAST and value.src[0].dtype.kind in ("f" if value.dtype.is_float else "iu"):
        before = value.src[0].dtype
        if before.bitsize > value.dtype.bitsize:
            break
        value = value.src[0]
    return value


def _choose(a: DType, b: DType, target: Target) -> Op | None:
    """The op for products of these types; of machines with one of DOT4 and DOT4U it may be the other."""
    native, kinds = target.native, {a, b}
    if kinds == {dtypes.bfloat16}:
        return Ops.DOT2B if Ops.DOT2B in native else None
    bytes_too = Ops.DOT4 in native or Ops.DOT4U in native
    if kinds == {dtypes.int8} and bytes_too:
        return Ops.DOT4
    if kinds == {dtypes.int8, dtypes.uint8} and bytes_too:
        return Ops.DOT4U
    return Ops.DOT2 if Ops.DOT2 in native and kinds <= {dtypes.int8, dtypes.uint8, dtypes.int16} else None


def _is_reused(node: UOp, x: UOp, y: UOp) -> bool:
    """Whether each factor meets many values of the other."""
    ranges = node.ranges | frozenset(node.src[1:])
    if any(r.src[0].op is not Ops.CONST for r in ranges) or not (x.ranges | y.ranges) <= ranges:
        return False
    uses = [prod([_size(r) for r in node.ranges - value.ranges]) for value in (x, y)]
    return bool(min(uses) >= LEAST_USES and prod([_size(r) for r in ranges]) >= LEAST_WORK)


def _size(r: UOp) -> int:
    return int(r.src[0].arg)


def _neighbours(value: UOp) -> list[UOp]:
    """The ranges along which its reads walk through neighbours."""
    reads = [u for u in value.toposort() if u.op is Ops.INDEX]
    return [t for u in reads for t, f in linear_form(u.src[1])[0].items() if f == 1 and t.op is Ops.RANGE]


def packed(value: UOp, k: UOp, short: UOp, op: Op) -> UOp:
    """The values at k = n*short, n*short + 1 …, the first in the lowest bits; zeros beyond the end."""
    width = DOTS[op]
    count = 32 // width
    part = dtypes.uint8 if width == 8 else dtypes.uint16
    word: UOp | None = None
    for at in range(count):
        place = short * count + at
        inside = simplify(place.lt(_size(k))) if _size(k) % count else None
        if value.op is Ops.INDEX:
            bits = gated(value, inside, {k: place})
        else:
            bits = value.substitute({k: place})
            bits = bits if inside is None else inside.where(bits, bits.const_like(0))
        bits = simplify(bits)
        if value.dtype.is_float:
            bits = bits.bitcast(part).cast(I32)
        else:
            bits = bits.cast(dtypes.int16 if width == 16 else value.dtype).cast(part).cast(I32)
        bits = bits << (width * at) if at else bits
        word = bits if word is None else word | bits
    assert word is not None
    return word


def word_read(word: UOp) -> UOp | None:
    """The read of the first part if a packed word is made of neighbours in memory, under one mask."""
    parts: dict[int, UOp] = {}
    stack = [word]
    while stack:
        node = stack.pop()
        if node.op is Ops.OR:
            stack += node.src
            continue
        shift = 0
        if node.op is Ops.SHL and node.src[1].op is Ops.CONST:
            node, shift = node.src[0], node.src[1].arg
        node = node.src[0] if node.op is Ops.CAST else node
        width = node.dtype.bitsize
        if not node.dtype.is_unsigned:  # the sign would reach into the next part
            return None
        while node.op is Ops.CAST and node.src[0].dtype.kind in "iu" and node.src[0].dtype.bitsize == width:
            node = node.src[0]
        node = node.src[0] if node.op is Ops.BITCAST else node
        if node.op is not Ops.INDEX or shift in parts:
            return None
        parts[shift] = node
    first, count = parts.get(0), len(parts)
    if first is None or count not in (2, 4) or first.dtype.bitsize * count != 32:
        return None
    terms, start = linear_form(first.src[1])
    for at in range(count):
        read = parts.get(at * 32 // count)
        same = read is not None and (read.src[0], *read.src[2:]) == (first.src[0], *first.src[2:])
        if read is None or not same or linear_form(read.src[1]) != (terms, start + at):
            return None
    return first


# ---- after opts --------------------------------------------------------------------------------------------


def match_signs(ast: UOp, target: Target) -> UOp:
    """DOT4 by DOT4U or the reverse: with the signs of x flipped, each byte is 128 more as an unsigned one, or
    128 less as a signed one. The second sum is that of 128 times y: it does not depend on the rows of x, so
    that it is computed once for many of them.

    Before:  REDUCE(DOT4(x, y, 0), k)
    After:   REDUCE(DOT4U(x ^ 0x80808080, y, 0), k) - REDUCE(DOT4U(0x80808080, y', 0), l)
    """
    order = ast.toposort()
    if not any(node.op in OTHER for node in order):
        return ast
    vectors = stored_neighbours(ast)
    uids = itertools.count(next_uid(order))

    def change(old: UOp, new: UOp) -> UOp:
        value = new.src[0] if new.op is Ops.REDUCE else new
        if new.op is not Ops.REDUCE or value.op not in OTHER or value.op in target.native:
            return new
        other = OTHER[value.op]
        if other not in target.native:
            return new
        x, y, zero = value.src
        if value.op is Ops.DOT4 and not vectors.isdisjoint(x.ranges):
            x, y = y, x
        again = {
            r: r.replace(arg=RangeArg(next(uids), AxisType.REDUCE))
            for r in new.src[1:]
            if not r.arg.axis.is_tile
        }
        inner = [again.get(r, r) for r in new.src[1:]]
        signs = UOp.const(SIGNS, I32)
        main = new.replace(src=(UOp(other, I32, (_flipped(x), y, zero)), *new.src[1:]))
        extra = new.replace(src=(UOp(other, I32, (signs, rename_free(y, again), zero)), *inner))
        return alu(Ops.SUB, main, extra)

    return rebuild(ast, change)


def _flipped(x: UOp) -> UOp:
    """x ^ SIGNS, in scratch already where x is read from there."""
    if x.op is Ops.INDEX and x.src[0].op is Ops.STAGE and len(x.src) == 2:
        stage = x.src[0]
        return x.replace(src=(stage.replace(src=(stage.src[0] ^ SIGNS, *stage.src[1:])), x.src[1]))
    return x ^ SIGNS
