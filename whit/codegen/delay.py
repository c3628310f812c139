"""Rows are stored while the next one is computed. A kernel that computes a row into scratch and scales it
later, as softmax does, has memory wait while it computes, and arithmetic while it stores. On a linear
program.

Before:  i = RANGE(512)
           j = RANGE(64) { … STORE(e, j*64, exponential) }
           …
           k = RANGE(64) { STORE(y, i*4096 + k*64, LOAD(e, k*64) * scale; "nontemporal") }
After:   r = REG(0)
         i = RANGE(512)
           j = RANGE(64)
             …
             IF(0 < i) { STORE(y, (i-1)*4096 + j*64, LOAD(e, j*64) * r; "nontemporal") }
             STORE(e, j*64, exponential)
           …
           SET(r, scale)
         k = RANGE(64) { STORE(y, 511*4096 + k*64, LOAD(e, k*64) * r; "nontemporal") }

Each element of scratch is read just before it is overwritten, so that it takes no second row. Bits stay what
they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from whit.codegen.stream import NONTEMPORAL
from whit.codegen.target import Target
from whit.uop import Ops, UOp, dtypes
from whit.uop.symbolic import linear_form, simplify

LEAST_ROWS = 8  # of a task: the last one is stored by itself
WORTH = 8  # instructions on each vector stored, from which on there is something to compute meanwhile
SIMPLE = (Ops.LOAD, Ops.STORE, Ops.BROADCAST, Ops.CONST)  # besides arithmetic: what a delayed loop may hold


class _Loop(NamedTuple):
    """A loop without others in it: where its RANGE and its END stand, and what is between."""

    first: int
    last: int
    counter: UOp
    body: tuple[UOp, ...]


class _Delay(NamedTuple):
    """The loop over rows (where its RANGE and END stand), the loop that fills scratch and the one that
    stores."""

    first: int
    last: int
    fill: _Loop
    store: _Loop


def delay_stores(linear: UOp, target: Target) -> UOp:
    """Have the loop that fills scratch with a row store the row before it."""
    if not target.stream_bytes or not any(u.op is Ops.STORE and u.arg == NONTEMPORAL for u in linear.src):
        return linear
    items = list(linear.src)
    found = next((d for d in _rows(items) if _is_possible(d, items)), None)
    return linear.replace(src=tuple(_delayed(found, items))) if found else linear


def _rows(items: list[UOp]) -> Iterable[_Delay]:
    """Loops whose last inner loop stores past the caches what an earlier one has put into scratch."""
    open_loops: list[tuple[int, list[_Loop]]] = []  # where they begin, the simple loops in them
    for at, node in enumerate(items):
        if node.op is Ops.RANGE:
            open_loops.append((at, []))
        elif node.op is Ops.END:
            first, inner = open_loops.pop()
            if inner and inner[-1].last == at - 1 and len(inner) > 1:
                store = inner[-1]
                memories = {u.src[0] for u in store.body if u.op is Ops.LOAD}
                fills = [x for x in inner[:-1] if {u.src[0] for u in x.body if u.op is Ops.STORE} == memories]
                if len(fills) == 1 and len(memories) == 1:
                    yield _Delay(first, at, fills[0], store)
            elif open_loops and not any(u.op is Ops.RANGE for u in items[first + 1 : at]):
                open_loops[-1][1].append(_Loop(first, at, items[first], tuple(items[first + 1 : at])))


def _is_possible(d: _Delay, items: list[UOp]) -> bool:
    """Whether the two loops go over the same elements of scratch, and rows and elements are known numbers."""
    (memory,) = {u.src[0] for u in d.store.body if u.op is Ops.LOAD}
    sizes = [loop.src[0] for loop in (items[d.first], d.fill.counter, d.store.counter)]
    if memory.op is not Ops.LOCAL or any(size.op is not Ops.CONST for size in sizes):
        return False
    rows, fills, stores = [int(size.arg) for size in sizes]
    if rows < LEAST_ROWS or not fills or stores % fills:
        return False
    simple = all(u.op.is_alu or u.op in SIMPLE for u in (*d.store.body, *d.fill.body))
    streamed = all(u.arg == NONTEMPORAL for u in d.store.body if u.op is Ops.STORE)
    outside = items[: d.fill.first] + items[d.fill.last :]
    others = [u for u in outside if u.op is Ops.STORE and u.src[0] is memory]
    if not simple or not streamed or others or any(u.op is Ops.LOCAL and u.arg.shared for u in items):
        return False
    vectors = sum([u.src[2].dtype.itemsize for u in d.fill.body if u.op is Ops.STORE])
    work = sum([u.dtype.itemsize for u in d.fill.body if u.op.is_alu and u.dtype.count > 1])
    filled = _covered(d.fill, Ops.STORE, memory)
    return work >= WORTH * vectors and filled == _covered(d.store, Ops.LOAD, memory) * (stores // fills) != 0


def _covered(loop: _Loop, op: object, memory: UOp) -> int:
    """Elements of one iteration, if accesses go over memory from its start, each element once; else 0."""
    places: list[tuple[int, int]] = []
    step = 0
    for node in loop.body:
        if node.op is op and node.src[0] is memory:
            terms, constant = linear_form(node.src[1])
            step = terms.get(loop.counter, 0)
            value = node.src[2] if op is Ops.STORE else node
            if set(terms) != {loop.counter} or node.src[1].dtype.count > 1:
                return 0
            places += [(constant + lane, step) for lane in range(value.dtype.count)]
    return step if sorted(places) == [(at, step) for at in range(step)] else 0


def _delayed(d: _Delay, items: list[UOp]) -> list[UOp]:
    row = items[d.first]
    again = int(d.store.counter.src[0].arg) // int(d.fill.counter.src[0].arg)
    registers = _registers(d, items)
    is_later = UOp(Ops.CMPLT, dtypes.bool, (UOp.index(0), row))
    branch = UOp(Ops.IF, dtypes.void, (is_later,), len(items))
    before: dict[UOp, UOp] = {row: row - 1, **registers}
    stored: list[UOp] = []
    for part in range(again):
        counter = simplify(d.fill.counter * again + part)
        stored += _copied(d.store.body, {**before, d.store.counter: counter})
    last = {row: UOp.index(int(row.src[0].arg) - 1), **registers}
    kept = [u for u in d.fill.body if u.op is not Ops.STORE]
    writes = [u for u in d.fill.body if u.op is Ops.STORE]
    out = [*items[: d.first], *registers.values(), *items[d.first : d.fill.first]]
    addresses = [s for u in stored for s in u.src if s.dtype is dtypes.index and s.op is not Ops.CONST]
    out += [is_later, d.fill.counter, *kept, *addresses]
    out += [branch, *stored, UOp(Ops.ENDIF, dtypes.void, (branch,)), *writes]
    out += items[d.fill.last : d.store.first]
    out += [UOp(Ops.SET, dtypes.void, (register, value)) for value, register in registers.items()]
    out += [items[d.last], d.store.counter, *_copied(d.store.body, last), items[d.store.last]]
    return _in_order([*out, *items[d.last + 1 :]])


def _registers(d: _Delay, items: list[UOp]) -> dict[UOp, UOp]:
    """What the storing loop reads of its row, not counting addresses -> the register that carries it on."""
    inside = set(d.store.body)
    computed = set(items[d.first : d.store.first])
    needed = dict.fromkeys([s for u in d.store.body for s in u.src if s in computed and s not in inside])
    free = max([u.arg for u in items if u.op is Ops.REG], default=-1) + 1
    data = [u for u in needed if u.dtype is not dtypes.index]
    return {
        value: UOp(Ops.REG, value.dtype, (UOp.const(0, value.dtype),), free + number)
        for number, value in enumerate(data)
    }


def _copied(body: tuple[UOp, ...], changes: dict[UOp, UOp]) -> list[UOp]:
    """The instructions with other operands."""
    return [u.substitute(changes) for u in body if u.dtype is not dtypes.index]


def _in_order(items: list[UOp]) -> list[UOp]:
    """The program with the addresses that its instructions need before them, each once where it is seen."""
    out: list[UOp] = []
    around: list[set[UOp]] = [set()]  # what stands before, by loop
    for node in items:
        present = set().union(*around)
        if node in present and node.op is not Ops.SET:
            continue
        for part in node.toposort(present.__contains__):
            if part.op is not Ops.CONST and part not in present and part is not node:
                out.append(part)
                around[-1].add(part)
        if node.op is Ops.END:
            around.pop()
        out.append(node)
        around[-1].add(node)
        if node.op is Ops.RANGE:
            around.append({node})
    return out
