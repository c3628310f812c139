"""Sums over weights in blocks (`nn.blocks`): one loop over the blocks, the axes inside of a block unrolled,
and what a block or a group of it has in common, such as its scale, outside of the sum over the group.

    y[n] = sum_k d[n, k // 32] * (nibble(w[n, k // 32, k % 16], k % 32 // 16) - 8) * x[k]

becomes, with k = b * 32 + h * 16 + j and j as wide as a vector,

    y[n] = sum_{b, j} d[n, b] * (sum_h (nibble(w[n, b, j], h) - 8) * x[b * 32 + h * 16 + j])

`split_blocks` does it before opts, where the matrix of bytes meets a few vectors only; `block_rows` chooses
opts: rows side by side, all axes inside of a block in the tile, and tasks of rows. A minimum, (d * q + m) *
x, becomes a sum of its own, m * sum x, in which the sum of x serves all rows. With more than a few vectors it
is better to scale each weight once: scales stay inside.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator

from whit.codegen.opts import OptKind
from whit.codegen.scopes import Access, Kernel, Scope
from whit.codegen.skinny import share
from whit.codegen.stages import next_uid
from whit.codegen.target import Target
from whit.helpers import prod
from whit.uop import AxisType, Ops, RangeArg, ReduceArg, UOp, dtypes
from whit.uop.rewrite import rebuild
from whit.uop.symbolic import operands, simplify

MOST_USES = 8  # of each byte: with more, a tile of decoded numbers is worth its memory (blocking.py)
HOISTED_USES = 2  # up to which a scale outside of a sum saves more than it costs: once a vector, not a weight
LEAST_BYTES = 1 << 12  # of the matrix
LEAST_TASK = 1 << 16  # bytes that a task reads: it waits for the first of them
MOST_TERMS = 4  # of a value multiplied out
MOST_POINTS = 16  # of a sum inside of a group that is written out
MOST_ROWS = 4  # side by side
MOST_VECTORS = 32  # of numbers in the body of a loop

# ---- before opts -------------------------------------------------------------------------------------------


def split_blocks(ast: UOp, target: Target) -> UOp:
    """The kernel with sums over blocks of bytes in the form above; the same kernel if there are none."""
    if target.vector_bytes == 0:
        return ast
    order = ast.toposort()
    if not any(u.op is Ops.INDEX and u.dtype is dtypes.uint8 for u in order):
        return ast
    uids = itertools.count(next_uid(order))

    def split(old: UOp, new: UOp) -> UOp:
        return (_split(new, target, uids) or new) if new.op is Ops.REDUCE else new

    return rebuild(ast, split)


def _split(reduce: UOp, target: Target, uids: Iterator[int]) -> UOp | None:
    if reduce.arg.op is not Ops.ADD or reduce.dtype is not dtypes.float32 or len(reduce.src) != 2:
        return None
    k = reduce.src[1]
    if k.src[0].op is not Ops.CONST:
        return None
    whole = simplify(_inlined(reduce.src[0], k.src[0].arg))
    body = [u for u in whole.toposort(lambda u: u.op is Ops.STAGE) if k in u.ranges]
    uses = _uses(reduce, body)
    if uses is None or uses > MOST_USES:
        return None
    sizes = _sizes(body, k, target.vector_bytes // 4)
    if sizes is None:
        return None
    parts = _parts(k, sizes, uids)
    value = simplify(_apart(whole.substitute({k: _place(parts)}), target, uids))
    cut = (Ops.FLOORDIV, Ops.FLOORMOD)
    if any(
        u.op in cut and not u.ranges.isdisjoint(parts) for u in value.toposort(lambda u: u.op is Ops.STAGE)
    ):
        return None
    if uses > HOISTED_USES:
        return UOp(Ops.REDUCE, value.dtype, (value, *parts), ReduceArg(Ops.ADD))
    return _sums(_terms(value, parts[-1]), parts, Ops.MULACC in target.native)


def _uses(reduce: UOp, body: list[UOp]) -> int | None:
    """How often each byte of a matrix of bytes is used; None if the sum reads none."""
    bytes_ = [u for u in body if u.op is Ops.INDEX and u.dtype is dtypes.uint8 and u.src[0].op is Ops.PARAM]
    if not bytes_ or max([u.src[0].arg.size for u in bytes_]) < LEAST_BYTES:
        return None
    matrix = frozenset().union(*[u.ranges for u in bytes_])
    others = [r for r in reduce.ranges if r not in matrix]
    if not all(r.src[0].op is Ops.CONST for r in others):
        return None
    return int(prod([r.src[0].arg for r in others]))


def _sizes(body: Iterable[UOp], k: UOp, lanes: int) -> list[int] | None:
    """Sizes of the axes that k falls into where indices divide it: 32 // 16 and 16 for k // 32 and k % 32 //
    16."""
    unit = {k: 1}  # how much of k a quotient counts
    cuts: set[int] = set()
    for u in body:
        if u.op in (Ops.FLOORDIV, Ops.FLOORMOD) and u.src[0] in unit and u.src[1].op is Ops.CONST:
            cuts.add(unit[u.src[0]] * u.src[1].arg)
            unit[u] = unit[u.src[0]] * (u.src[1].arg if u.op is Ops.FLOORDIV else 1)
    chain = [1, *sorted(cuts), int(k.src[0].arg)]
    if not cuts or any(b % a for a, b in itertools.pairwise(chain)):
        return None
    if chain[1] > lanes and chain[1] % lanes == 0:
        chain.insert(1, lanes)
    return [b // a for a, b in itertools.pairwise(chain) if b > a][::-1]


def _inlined(value: UOp, size: int) -> UOp:
    """Values of which there is one a block, and decoded rows of `size` numbers, computed where they are read,
    not in scratch as the schedule had it: other rows that use them are in the same tile."""

    def inline(old: UOp, new: UOp) -> UOp:
        if new.op is not Ops.INDEX or new.src[0].op is not Ops.STAGE or len(new.src) > 2:
            return new
        stage, number = new.src
        ranges = stage.src[1:]
        if any(r.src[0].op is not Ops.CONST for r in ranges):
            return new
        if len(ranges) > 1 and prod([r.src[0].arg for r in ranges]) != size:
            return new
        places: dict[UOp, UOp] = {}
        for r in reversed(ranges[1:]):
            places[r], number = simplify(number % r.src[0].arg), simplify(number // r.src[0].arg)
        places[ranges[0]] = number
        return stage.src[0].substitute(places)

    return rebuild(value, inline)


def _apart(value: UOp, target: Target, uids: Iterator[int]) -> UOp:
    """Axes of scratch that fall into parts the same way: the numbers of its elements stay what they are."""

    def split(old: UOp, new: UOp) -> UOp:
        if new.op is not Ops.STAGE or any(r.src[0].op is not Ops.CONST for r in new.src[1:]):
            return new
        body, ranges = new.src[0], []
        for r in new.src[1:]:
            sizes = _sizes([u for u in body.toposort() if r in u.ranges], r, target.vector_bytes // 4)
            parts = [r] if sizes is None else _parts(r, sizes, uids)
            if sizes is not None:
                body = simplify(body.substitute({r: _place(parts)}))
            ranges += parts
        return new.replace(src=(body, *ranges))

    return rebuild(value, split)


def _parts(r: UOp, sizes: list[int], uids: Iterator[int]) -> list[UOp]:
    return [r.replace(src=(UOp.index(n),), arg=RangeArg(next(uids), AxisType.REDUCE)) for n in sizes]


def _place(parts: list[UOp]) -> UOp:
    """The number that the parts of an axis make."""
    place = UOp.index(0)
    for part in parts:
        place = place * part.src[0].arg + part
    return place


# ---- sums --------------------------------------------------------------------------------------------------


def _terms(value: UOp, lane: UOp) -> list[tuple[bool, list[UOp]]]:
    """The value as a sum of products, each with whether it is subtracted. Sums are multiplied out where one
    side is the same for a whole vector: (d * q - m) * x is d * q * x - m * x."""
    done: list[tuple[bool, list[UOp]]] = []
    todo = [(False, operands(value, Ops.MUL))]
    while todo:
        minus, factors = todo.pop()
        at = next((n for n, f in enumerate(factors) if _is_sum(f, lane)), None)
        if at is None or len(done) + len(todo) >= MOST_TERMS:
            done.append((minus, factors))
            continue
        rest = factors[:at] + factors[at + 1 :]
        a, b = factors[at].src
        todo.append((minus ^ (factors[at].op is Ops.SUB), operands(b, Ops.MUL) + rest))
        todo.append((minus, operands(a, Ops.MUL) + rest))
    return done


def _is_sum(factor: UOp, lane: UOp) -> bool:
    """Whether it is a sum of which one side is the same for a whole vector, and no constant."""
    if factor.op not in (Ops.ADD, Ops.SUB) or not factor.dtype.is_float:
        return False
    return any(lane not in s.ranges and s.ranges for s in factor.src)


def _sums(terms: list[tuple[bool, list[UOp]]], parts: list[UOp], fuse: bool) -> UOp:
    """Each product summed: factors without the vector axis outside of the sum over the axes that they
    lack."""
    lane = parts[-1]
    scales = [f for _, factors in terms for f in factors if lane not in f.ranges]
    inner = [r for r in parts[:-1] if not any(r in f.ranges for f in scales)] if scales else []
    outer = [r for r in parts if r not in inner]
    total: UOp | None = None
    for minus, factors in terms:
        own = [f for f in factors if lane in f.ranges]
        common = [f for f in factors if lane not in f.ranges]
        both = functools.reduce(operator.mul, [*common, *([_folded(own, inner, fuse)] if own else [])])
        part = UOp(Ops.REDUCE, both.dtype, (both, *outer), ReduceArg(Ops.ADD))
        total = part if total is None else total - part if minus else total + part
    assert total is not None
    return total


def _folded(factors: list[UOp], inner: list[UOp], fuse: bool) -> UOp:
    """The sum of a product over the axes `inner`; a constant that a factor adds is summed apart, as
    (q - 8) * x is q * x - 8 * x and the sum of x serves all rows."""
    at = next((n for n, f in enumerate(factors) if _offset(f) is not None), None)
    rest = factors if at is None else factors[:at] + factors[at + 1 :]
    start: UOp | None = None
    if at is not None and rest and not any(_reads_bytes(f) for f in rest):
        offset = _offset(factors[at])
        assert offset is not None
        factors = [offset[0], *rest]
        whole = functools.reduce(operator.mul, rest)
        start = functools.reduce(operator.add, _points(whole, inner)) * offset[1]
    value = functools.reduce(operator.mul, factors)
    if prod([r.src[0].arg for r in inner]) > MOST_POINTS:
        total = UOp(Ops.REDUCE, value.dtype, (value, *inner), ReduceArg(Ops.ADD))
        return total if start is None else total + start
    for point in _points(value, inner):
        if start is None:
            start = point
        elif fuse and point.op is Ops.MUL:
            start = UOp(Ops.MULACC, point.dtype, (*point.src, start))
        else:
            start = start + point
    assert start is not None
    return start


def _points(value: UOp, inner: list[UOp]) -> list[UOp]:
    """The value at every point of some axes."""
    places = itertools.product(*[range(r.src[0].arg) for r in inner])
    return [
        simplify(value.substitute({r: UOp.index(n) for r, n in zip(inner, place, strict=True)}))
        for place in places
    ]


def _offset(factor: UOp) -> tuple[UOp, UOp] | None:
    """(q, c) of q + c for a constant."""
    if factor.op not in (Ops.ADD, Ops.SUB) or factor.src[1].op is not Ops.CONST:
        return None
    value, constant = factor.src
    return value, constant if factor.op is Ops.ADD else constant.const_like(-constant.arg)


def _reads_bytes(value: UOp) -> bool:
    return any(u.op is Ops.INDEX and u.dtype is dtypes.uint8 for u in value.toposort())


# ---- opts --------------------------------------------------------------------------------------------------


def block_rows(k: Kernel) -> bool:
    """Choose the opts of a kernel that `split_blocks` made; False if it is another kernel."""
    found = _find(k)
    if found is None:
        return False
    matrix, sums = found
    folded = {a for scope in sums for a in scope.reduces}
    blocks = max((a for a in folded if a in matrix.strides), key=lambda a: matrix.strides[a])
    rows = [a for a in k.loops() if a in matrix.axes]
    few = [a for a in k.loops() if a not in matrix.axes]
    if not rows or not all(k.is_static(a) for a in [*folded, *k.loops()]):
        return False
    wide = max(rows, key=k.size)
    together = prod([k.size(a) for a in few])
    if together > MOST_USES:
        return False
    for axis in few:
        k.apply(OptKind.UPCAST, axis, 0)
    inside = sorted(folded - {blocks}, reverse=True)
    vectors = max(1, prod([k.size(a) for a in inside]) // k.lanes)  # of a block, or of what sums write out
    most = min(MOST_ROWS, MOST_USES // together, max(1, MOST_VECTORS // vectors))
    side_by_side = max(n for n in (1, 2, 4) if n <= most and (n == 1 or k.size(wide) % n == 0))
    k.tile(wide, side_by_side)
    for axis in inside:
        if not k.apply(OptKind.UNROLL, axis, 0):
            return False
    for scope in k.scopes:
        if scope not in sums and scope.reduces:
            _unroll_scales(k, scope)
    share(k, wide, min(k.size(wide), max(k.target.threads, matrix.nbytes // LEAST_TASK)))
    return True


def _find(k: Kernel) -> tuple[Access, list[Scope]] | None:
    """The matrix of bytes, and the scopes of the sums over it."""
    if k.lanes == 1 or not any(_reads_blocks(u) for u in k.table.ast.toposort()):
        return None
    sums = [s for s in k.scopes if s.reduces and not s.is_stage]
    reads = [x for s in sums for x in s.accesses if x.itemsize == 1 and not x.is_store and not x.odd]
    folded = {a for s in sums for a in s.reduces}
    reads = [x for x in reads if len(folded.intersection(x.strides)) > 1 and x.nbytes >= LEAST_BYTES]
    return (max(reads, key=lambda x: len(x.axes)), sums) if reads else None


def _reads_blocks(u: UOp) -> bool:
    """Whether it is a sum over bytes of several axes, made by `split_blocks`."""
    if u.op is not Ops.REDUCE or u.arg.op is not Ops.ADD or u.dtype is not dtypes.float32 or len(u.src) < 3:
        return False
    return any(
        v.op is Ops.INDEX and v.dtype is dtypes.uint8 and u.src[-1] in v.ranges for v in u.src[0].toposort()
    )


def _unroll_scales(k: Kernel, scope: Scope) -> None:
    """Scales in scratch: all axes but the one that counts blocks."""
    for axis in sorted(scope.reduces)[1:]:
        k.apply(OptKind.UNROLL, axis, 0)
