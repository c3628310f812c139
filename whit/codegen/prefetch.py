"""Rows are fetched while the row before is worked on. A kernel that goes over each row several times reads
memory in its first loop only and computes or writes in the others, so that one waits for the other. On a
linear program.

Before:  i = RANGE(4096)
           k = RANGE(64) { … LOAD(p, i*4096 + k*64) }
           j = RANGE(64) { … LOAD(p, i*4096 + j*64) }
After:   the same with PREFETCH(p, i*4096 + j*64 + 4096) before the last of these loads
"""

from __future__ import annotations

from dataclasses import dataclass, field

from whit.codegen.target import Target
from whit.uop import Ops, UOp, dtypes

LEAST_ROW = 2048  # bytes: shorter rows are over before anything arrives
NEAREST, SECOND = 3, 2  # the first cache, the second: the PREFETCH's arg
LINE = 64  # bytes

Sum = tuple[dict[UOp, int], int]  # factors of RANGEs and other leaves, and a constant


@dataclass(eq=False, slots=True)
class _Body:
    """A loop: where it stands, the loops in it, and its own vector loads that always happen."""

    counter: UOp
    inner: list[_Body] = field(default_factory=list)
    loads: list[UOp] = field(default_factory=list)

    @property
    def count(self) -> int:
        size = self.counter.src[0]
        return int(size.arg) if size.op is Ops.CONST else 0


def prefetch_rows(linear: UOp, target: Target) -> UOp:
    """Add PREFETCHes for kernels with several loops over each row of a large buffer."""
    if not target.l2_bytes or not target.vector_bytes:
        return linear
    written = {u.src[0] for u in linear.src if u.op is Ops.STORE}
    added: dict[UOp, tuple[UOp, ...]] = {}
    for body in _bodies(linear):
        if len(body.inner) > 1:
            _prefetch_next(body, written, target, added)
    if not added:
        return linear
    items: list[UOp] = []
    present: set[UOp] = set()
    for node in linear.src:
        for extra in added.get(node, ()):
            if extra not in present:
                present.add(extra)
                items.append(extra)
        items.append(node)
    return linear.replace(src=tuple(items))


def _bodies(linear: UOp) -> list[_Body]:
    found: list[_Body] = []
    stack: list[_Body] = []
    depth = 0  # of IFs
    for node in linear.src:
        if node.op is Ops.RANGE:
            body = _Body(node)
            if stack:
                stack[-1].inner.append(body)
            stack.append(body)
            found.append(body)
        elif node.op is Ops.END:
            stack.pop()
        elif node.op in (Ops.IF, Ops.ENDIF):
            depth += 1 if node.op is Ops.IF else -1
        elif node.op is Ops.LOAD and stack and not depth and _is_plain(node):
            stack[-1].loads.append(node)
    return found


def _is_plain(load: UOp) -> bool:
    """A vector of neighbours in a buffer."""
    return load.src[0].op is Ops.PARAM and load.dtype.count > 1 and load.src[1].dtype.count == 1


def _prefetch_next(
    row: _Body, written: set[UOp], target: Target, added: dict[UOp, tuple[UOp, ...]]
) -> None:
    """For each buffer that several loops of a row read: fetch the next row in the last of them."""
    last: dict[UOp, _Body] = {}
    times: dict[UOp, int] = {}
    for body in row.inner:
        for memory in {load.src[0] for load in body.loads}:
            last[memory], times[memory] = body, times.get(memory, 0) + 1
    for memory, body in last.items():
        itemsize = memory.dtype.itemsize
        if times[memory] < 2 or memory in written or memory.arg.size * itemsize < target.l2_bytes:
            continue
        seen: set[object] = set()
        for load in body.loads:
            terms, constant = _sum_of(load.src[1])
            step = terms.get(row.counter, 0)
            width = body.count * terms.get(body.counter, 0) * itemsize
            if load.src[0] is not memory or step <= 0 or not LEAST_ROW <= width <= target.l2_bytes // 4:
                continue
            key = frozenset(terms.items()), constant * itemsize // LINE
            if key in seen:
                continue
            seen.add(key)
            index = UOp(Ops.ADD, dtypes.index, (load.src[1], UOp.index(step)))
            near = NEAREST if width <= target.l1_bytes // 4 else SECOND
            added[load] = (index, UOp(Ops.PREFETCH, dtypes.void, (memory, index), near))


def _sum_of(index: UOp) -> Sum:
    """An index instruction as a sum of products."""
    if index.op is Ops.CONST:
        return {}, int(index.arg)
    if index.op is Ops.ADD:
        terms, constant = _sum_of(index.src[0])
        more, other = _sum_of(index.src[1])
        for leaf, factor in more.items():
            terms[leaf] = terms.get(leaf, 0) + factor
        return terms, constant + other
    if index.op is Ops.MUL and index.src[1].op is Ops.CONST:
        terms, constant = _sum_of(index.src[0])
        factor = int(index.src[1].arg)
        return {leaf: n * factor for leaf, n in terms.items()}, constant * factor
    return {index: 1}, 0
