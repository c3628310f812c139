"""Stores that go past the caches: a large result pushes out what is needed again, and reads every line that
it will overwrite. On a linear program, where each store, its loops and its address can be seen.

Before:  i = RANGE(1048576) { … STORE(p0, i*16, v) }
After:   i = RANGE(1048576) { … STORE(p0, i*16, v; "nontemporal") }
"""

from __future__ import annotations

import math

from whit.codegen.target import Target
from whit.uop import Ops, UOp, dtypes

NONTEMPORAL = "nontemporal"  # the STORE's arg
MOST = 1 << 40  # iterations; what is known to be less than nothing is no size
LEAST = 16  # bytes of the narrowest store that is worth it: the narrowest vector


def stream_stores(linear: UOp, target: Target) -> UOp:
    """Mark the vector stores of results that are too large for the caches.

    A buffer is streamed when the kernel writes `target.stream_bytes` or more and does not read the buffer
    itself (its lines would be in the cache already). A store is streamed when it is a vector at a multiple of
    its size from the start of the buffer. Where a mask cuts off the end of a vector, full ones are streamed:

    Before:  STORE(p0, i, v, m)
    After:   f = FOLD(m; AND); IF(f) { STORE(p0, i, v; "nontemporal") }
             n = CMPNE(f, true); IF(n) { STORE(p0, i, v, m) }
    """
    large = _large(linear, target)
    if not large:
        return linear
    items: list[UOp] = []
    known: set[UOp] = set()  # conditions of the present body
    for node in linear.src:
        if node.op in (Ops.RANGE, Ops.END):
            known.clear()
        if node.op is not Ops.STORE or node.src[0] not in large or not _is_whole(node):
            items.append(node)
        elif len(node.src) == 3:
            items.append(node.replace(arg=NONTEMPORAL))
        else:
            full = UOp(Ops.FOLD, dtypes.bool, (node.src[3],), Ops.AND)
            rest = UOp(Ops.CMPNE, dtypes.bool, (full, UOp.const(True, dtypes.bool)))
            if full not in known:
                items += [full, rest]
                known.add(full)
            streamed = node.replace(src=node.src[:3], arg=NONTEMPORAL)
            for condition, store in ((full, streamed), (rest, node)):
                branch = UOp(Ops.IF, dtypes.void, (condition,), len(items))
                items += [branch, store, UOp(Ops.ENDIF, dtypes.void, (branch,))]
    return linear.replace(src=tuple(items))


def _large(linear: UOp, target: Target) -> set[UOp]:
    """PARAMs that are written only, if all writes of the kernel together exceed what is streamed."""
    read = {node.src[0] for node in linear.src if node.op is Ops.LOAD}
    written: dict[UOp, int] = {}
    times = [1]
    for node in linear.src:
        if node.op is Ops.SPECIAL:
            times[0] *= node.arg.size
        elif node.op is Ops.RANGE:
            times.append(times[-1] * max(1, min(int(node.src[0].vmax), MOST)))  # symbolic: at most
        elif node.op is Ops.END:
            times.pop()
        elif node.op is Ops.STORE and node.src[0].op is Ops.PARAM:
            size = times[-1] * node.src[2].dtype.count * node.src[0].dtype.itemsize
            written[node.src[0]] = written.get(node.src[0], 0) + size
    if not target.stream_bytes or sum(written.values()) < target.stream_bytes:
        return set()
    return set(written) - read


def _is_whole(store: UOp) -> bool:
    """Whether a store fills an aligned piece of its buffer, if the buffer is aligned."""
    lanes: int = store.src[2].dtype.count
    size = lanes * store.src[0].dtype.itemsize
    return size >= LEAST and size & size - 1 == 0 and store.src[1].dtype.count == 1 \
        and _factor(store.src[1]) % lanes == 0


def _factor(index: UOp) -> int:
    """A number that divides every value of an index; 0 divides 0 only."""
    if index.op is Ops.CONST:
        return int(index.arg)
    parts = [_factor(s) for s in index.src] if index.op in (Ops.ADD, Ops.SUB, Ops.MUL) else [1]
    return math.prod(parts) if index.op is Ops.MUL else math.gcd(*parts)
