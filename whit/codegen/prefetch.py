"""Memory is asked for before it is needed. On a linear program.

Rows: a kernel that goes over each row several times reads memory in its first loop only and computes or
writes in the others, so that one waits for the other. All its loops fetch a part of the next row, each as
much as it has time for.

Before:  i = RANGE(4096)
           k = RANGE(64) { … LOAD(p, i*4096 + k*64) }
           j = RANGE(64) { … LOAD(p, i*4096 + j*64); … STORE(q, …) }
After:   the same with PREFETCH(p, i*4096 + 4096 + k*8) in the first loop
           and PREFETCH(p, i*4096 + 4608 + j*56) in the second

Streams: a loop that reads a long stretch of memory once has its lines fetched some way ahead.

Before:  i = RANGE(8192) { … LOAD(p, i*64) }
After:   i = RANGE(8192) { PREFETCH(p, i*64 + 1024); … LOAD(p, i*64) }

Weights in blocks: rows are short, and bytes of a block lie apart; each line is fetched some rounds ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from whit.codegen.scopes import LINE
from whit.codegen.target import Target
from whit.uop import Ops, UOp, dtypes
from whit.uop.symbolic import linear_form

LEAST_ROW = 2048  # bytes: shorter rows are over before anything arrives
AHEAD = 4096  # bytes between what a stream reads and what it fetches
BLOCKS_AHEAD = 8192  # the same for weights in blocks
LEAST_MATRIX = 1 << 16  # bytes of such weights: fewer are in the caches
LEAST_STREAM = 1 << 17  # bytes in one go, of which what is fetched beyond the end is little
NEAREST, SECOND = 3, 2  # the first cache, the second: the PREFETCH's arg
STORING = 16.0  # instructions in whose time a loop could fetch a line because it stores one past the caches
READING = 2.0  # instructions in whose time a loop could fetch a line however little it computes


@dataclass(eq=False, slots=True)
class _Body:
    """A loop: the loops in it, its own vector loads that always happen, all its loads and stores, and
    instructions (of whole vectors) in all."""

    counter: UOp
    inner: list[_Body] = field(default_factory=list)
    loads: list[UOp] = field(default_factory=list)
    touched: list[UOp] = field(default_factory=list)
    instructions: float = 0.0

    @property
    def count(self) -> int:
        size = self.counter.src[0]
        return int(size.arg) if size.op is Ops.CONST else 0


def prefetch_rows(linear: UOp, target: Target) -> UOp:
    """Add PREFETCHes to kernels with several loops over each row of a large buffer, and to those that read a
    large buffer from one end to the other."""
    if not target.l2_bytes or not target.vector_bytes:
        return linear
    written = {u.src[0] for u in linear.src if u.op is Ops.STORE}
    added: dict[UOp, list[UOp]] = {}  # instructions, by the counter of the loop at whose start they stand
    for body in _bodies(linear):
        if len(body.inner) > 1:
            for memory in _read_again(body):
                if memory not in written and _bytes(memory) >= target.l2_bytes:
                    _fetch_next(body, memory, target, added)
        if not body.inner:
            _fetch_ahead(body, target, added)
    if not added:
        return linear
    items: list[UOp] = []
    around: list[set[UOp]] = [set()]  # what stands before, by loop
    for node in linear.src:
        if node.op in (Ops.ADD, Ops.MUL) and any(node in known for known in around):
            continue  # it stands further out now
        items.append(node)
        around[-1].add(node)
        if node.op is Ops.RANGE:
            around.append({node})
            for last in added.get(node, ()):
                present = set().union(*around)
                for part in last.toposort(present.__contains__):
                    if part.op is not Ops.CONST and part not in present:
                        items.append(part)
                        around[-1].add(part)
        elif node.op is Ops.END:
            around.pop()
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
        elif stack:
            if node.op in (Ops.LOAD, Ops.STORE):
                stack[-1].touched.append(node)
            if node.op is Ops.LOAD and not depth and _is_plain(node):
                stack[-1].loads.append(node)
            if node.op.is_alu and node.dtype.count > 1:
                stack[-1].instructions += node.dtype.itemsize / LINE
            elif node.op is Ops.STORE and node.arg is not None:
                stack[-1].instructions += STORING * node.src[2].dtype.itemsize / LINE
    return found


def _is_plain(load: UOp) -> bool:
    """A vector of neighbours in a buffer."""
    return load.src[0].op is Ops.PARAM and load.dtype.count > 1 and load.src[1].dtype.count == 1


def _read_again(row: _Body) -> list[UOp]:
    """Buffers that several loops of a row read."""
    readers: dict[UOp, int] = {}
    for body in row.inner:
        for memory in dict.fromkeys([load.src[0] for load in body.loads]):
            readers[memory] = readers.get(memory, 0) + 1
    return [memory for memory, count in readers.items() if count > 1]


def _fetch_next(row: _Body, memory: UOp, target: Target, added: dict[UOp, list[UOp]]) -> None:
    """Have the loops over a row fetch the next row of a buffer, each a part by the time that it takes."""
    reader = next(body for body in row.inner if any(load.src[0] is memory for load in body.loads))
    loads = [load.src[1] for load in reader.loads if load.src[0] is memory]
    terms, constant = min([linear_form(index) for index in loads], key=lambda item: item[1])
    size = memory.dtype.itemsize
    step, width = terms.get(row.counter, 0), reader.count * terms.get(reader.counter, 0) * size
    terms = {leaf: factor for leaf, factor in terms.items() if leaf is not reader.counter}
    if step <= 0 or not LEAST_ROW <= width <= target.l2_bytes // 4:
        return
    if any(leaf.op not in (Ops.RANGE, Ops.SPECIAL, Ops.VAR) for leaf in terms):
        return  # the place of a row is looked up
    near = NEAREST if width + _footprint(row) <= target.l1_bytes else SECOND
    start = _instruction(terms, constant + step)
    added.setdefault(row.counter, []).append(start)
    loops = [body for body in row.inner if body.count]
    times = [body.instructions * body.count + READING * width / LINE for body in loops]
    at, passed = 0, 0.0  # bytes that the loops before fetch, and their time
    for body, time in zip(loops, times, strict=True):
        passed += time
        span = (width * passed / sum(times) - at) / body.count  # bytes of one iteration
        each = round(span / LINE) * LINE
        if body is loops[-1]:  # the rest; lines that iterations share come twice
            each = math.ceil(span / LINE) * LINE if span > LINE else math.ceil(span / size) * size
        for offset in range(0, each, LINE):
            place = _plus(start, _times(body.counter, each // size), (at + offset) // size)
            fetch = UOp(Ops.PREFETCH, dtypes.void, (memory, place), near)
            added.setdefault(body.counter, []).append(fetch)
        at += each * body.count


def _fetch_ahead(body: _Body, target: Target, added: dict[UOp, list[UOp]]) -> None:
    """Have a loop fetch what it will read of large buffers, if it reads each without gaps."""
    found: dict[UOp, list[UOp]] = {}
    for load in body.loads:
        found.setdefault(load.src[0], []).append(load)
    for memory, loads in found.items():
        terms, first = min([linear_form(load.src[1]) for load in loads], key=lambda item: item[1])
        size, step = memory.dtype.itemsize, terms.get(body.counter, 0)
        places = [
            constant - first + lane
            for load in loads
            for others, constant in [linear_form(load.src[1])]
            for lane in range(load.dtype.count if others == terms else 0)
        ]
        long = step * size * body.count >= LEAST_STREAM and step * size >= LINE
        if not long or _bytes(memory) < max(target.l2_bytes, target.stream_bytes):
            continue
        if sorted(places) != list(range(step)):
            continue
        start = next(load.src[1] for load in loads if linear_form(load.src[1])[1] == first)
        for offset in range(0, step * size, LINE):
            place = UOp(Ops.ADD, dtypes.index, (start, UOp.index((AHEAD + offset) // size)))
            fetch = UOp(Ops.PREFETCH, dtypes.void, (memory, place), NEAREST)
            added.setdefault(body.counter, []).append(fetch)


def _bytes(memory: UOp) -> int:
    return int(memory.arg.size * memory.dtype.itemsize)


def _footprint(row: _Body) -> int:
    """Bytes that the loops of a row touch again for the next one, or in another loop: all but results that go
    past the caches."""
    found: dict[UOp, int] = {}
    for body in row.inner:
        for node in body.touched:
            if node.arg is None:
                step = linear_form(node.src[1])[0].get(body.counter, 0)
                size = body.count * step * node.src[0].dtype.itemsize
                found[node.src[0]] = max(found.get(node.src[0], 0), size)
    return sum(found.values())


def _times(leaf: UOp, factor: int) -> UOp:
    return leaf if factor == 1 else UOp(Ops.MUL, dtypes.index, (leaf, UOp.index(factor)))


def _plus(a: UOp, b: UOp, constant: int) -> UOp:
    total = UOp(Ops.ADD, dtypes.index, (a, b))
    return UOp(Ops.ADD, dtypes.index, (total, UOp.index(constant))) if constant else total


def _instruction(terms: dict[UOp, int], constant: int) -> UOp:
    """A sum of products as instructions."""
    total: UOp = UOp.index(constant)
    for leaf, factor in terms.items():
        total = UOp(Ops.ADD, dtypes.index, (_times(leaf, factor), total))
    return total


def prefetch_blocks(linear: UOp, target: Target) -> UOp:
    """Fetch the bytes that a loop over blocks reads some rounds later: rows of blocks are short, and the
    hardware begins anew with each of them.

    Before:  w = LOAD x16 (p, a)
    After:   w = LOAD x16 (p, a); PREFETCH(p, a + BLOCKS_AHEAD)
    """
    found: dict[UOp, list[tuple[int, UOp]]] = {}
    depth = 0
    for u in linear.src:
        depth += (u.op is Ops.RANGE) - (u.op is Ops.END)
        if depth and u.op is Ops.LOAD and u.dtype.scalar is dtypes.uint8 and u.dtype.count >= 8:
            memory, index = u.src[:2]
            if memory.op is Ops.PARAM and memory.arg.size >= LEAST_MATRIX and index.dtype is dtypes.index:
                found.setdefault(memory, []).append((linear_form(index)[1], u))
    loads: set[UOp] = set()
    for each in found.values():
        last = -LINE
        for place, load in sorted(each, key=lambda item: item[0]):
            if place - last >= LINE:  # one for each line
                loads.add(load)
                last = place
    if not loads:
        return linear
    program: list[UOp] = []
    for u in linear.src:
        program.append(u)
        if u in loads:
            ahead = UOp(Ops.ADD, dtypes.index, (u.src[1], UOp.index(BLOCKS_AHEAD)))
            program += [ahead, UOp(Ops.PREFETCH, dtypes.void, (u.src[0], ahead), 3)]
    return linear.replace(src=tuple(program))
