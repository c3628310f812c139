"""Values that several loops of a kernel compute again are kept in scratch: softmax sums exponentials in one
loop and divides them in the next.

Before:  s = REDUCE(EXP2(x[i*n + k] - m), k; ADD)
         STORE(y, i*n + j, EXP2(x[i*n + j] - m) / s)
After:   e = STAGE(EXP2(x[i*n + t] - m), t)                   # filled once for every i, in the nearest caches
         s = REDUCE(INDEX(e, k), k; ADD)
         STORE(y, i*n + j, INDEX(e, j) / s)

A loop here is a LOOP or REDUCE range with its part of the tile. Two values are the same if they are the same
function of the loop's counter; bits do not change, whatever is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from whit.codegen.stages import next_uid, scratch_bytes
from whit.codegen.target import Target
from whit.codegen.transcendental import INSTRUCTIONS
from whit.uop import AxisType, Ops, RangeArg, StageArg, UOp, dtypes
from whit.uop.symbolic import simplify

WORTH = 10  # instructions for which an element is written to scratch and read back
VECTORS = 2  # computed side by side when scratch is filled
SHORT = 8  # vectors that need no loop


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop and what is computed in it: `counter` in terms of its ranges, from 0 to size - 1."""

    root: UOp
    ranges: tuple[UOp, ...]
    counter: UOp
    size: int

    def is_dear(self) -> bool:
        """Whether something is computed in each iteration that takes more than one instruction."""
        ranges = frozenset(self.ranges)
        body = self.root.toposort(lambda n: n.ranges.isdisjoint(ranges))
        return any(n.op in INSTRUCTIONS and not n.ranges.isdisjoint(ranges) for n in body)


def keep_values(ast: UOp, target: Target) -> UOp:
    """The kernel, tiled or not, with dear values that two loops compute kept in a task's own scratch."""
    order = ast.toposort()
    if not target.vector_bytes or target.has_local or not any(node.op in INSTRUCTIONS for node in order):
        return ast
    if any(r.arg.axis.is_reduce for node in order if node.op is Ops.STAGE for r in node.src[1:]):
        return ast  # the schedule has chosen what is kept
    loops = [loop for node in order for loop in _loops_of(node) if loop.is_dear()]
    if len(loops) < 2:
        return ast
    uid = next_uid(order)
    counter = UOp(Ops.RANGE, dtypes.index, (UOp.index(1 << 40),), RangeArg(uid, AxisType.LOOP))
    found: dict[UOp, list[tuple[_Loop, UOp]]] = {}  # as functions of `counter`
    for loop in loops:
        for value, general in _generalised(loop, counter).items():
            found.setdefault(general, []).append((loop, value))
    # stores that stand in one loop compute a value once already
    several = [value for value, places in found.items() if len({loop.ranges for loop, _ in places}) > 1]
    cost = {value: _cost(value, counter) for value in several}
    changes: dict[UOp, UOp] = {}
    inside: set[UOp] = set()
    room = min(target.l2_bytes // 2, target.scratch_bytes - scratch_bytes(order))
    for value in sorted(cost, key=lambda v: -cost[v]):
        if cost[value] < WORTH or value in inside:
            continue
        size = max([loop.size for loop, _ in found[value]])
        room -= size * value.dtype.itemsize
        stage = _stage(value, counter, size, target, uid + 1 + 2 * len(changes)) if room >= 0 else None
        if stage is not None:
            inside.update(value.toposort())
            for loop, place in found[value]:
                changes[place] = UOp(Ops.INDEX, value.dtype, (stage, loop.counter))
    return ast.substitute(changes) if changes else ast


def _loops_of(node: UOp) -> list[_Loop]:
    """The loop of a REDUCE over one axis, or the innermost one of a store; of what the tile may be a part or
    the whole."""
    if node.op is Ops.REDUCE:
        root, ranges = node.src[0], node.src[1:]
    elif node.op is Ops.END and node.src[0].op is Ops.STORE:
        root, ranges = node.src[0].src[2], node.src[1:]
    else:
        return []
    tile = [r for r in ranges if r.arg.axis.is_tile]
    loops = [r for r in ranges if r.arg.axis in (AxisType.LOOP, AxisType.REDUCE)]
    if len(tile) > 1 or (node.op is Ops.REDUCE and len(tile) + len(loops) < len(ranges)):
        return []
    if node.op is Ops.REDUCE and len(loops) > 1:
        return []
    found = []
    for chosen in dict.fromkeys([(*loops[-1:], *tile), tuple(tile)]):
        if chosen and all(r.src[0].op is Ops.CONST for r in chosen):
            counter, size = UOp.index(0), 1
            for r in chosen:
                counter, size = counter * r.src[0].arg + r, size * r.src[0].arg
            found.append(_Loop(root, chosen, simplify(counter), size))
    return found


def _generalised(loop: _Loop, counter: UOp) -> dict[UOp, UOp]:
    """Values that the loop computes -> the same as functions of `counter`, where they are that."""
    ranges = frozenset(loop.ranges)
    last = loop.ranges[-1]
    step = {last: counter - loop.ranges[0] * last.src[0].arg if len(loop.ranges) > 1 else counter}
    new: dict[UOp, UOp] = {}
    result: dict[UOp, UOp] = {}
    for node in loop.root.toposort(lambda n: n.ranges.isdisjoint(ranges)):
        if node.ranges.isdisjoint(ranges):
            new[node] = node
        elif node.dtype is dtypes.index or node.dtype is dtypes.bool:
            new[node] = simplify(node.substitute(step))
        else:
            src = tuple([new[s] for s in node.src])
            new[node] = node.replace(src=src)
        general = new[node]
        if (
            node.dtype in (dtypes.float32, dtypes.float64)
            and node.op is not Ops.INDEX
            and counter in general.ranges
            and ranges.isdisjoint(general.ranges)
            and not any(r.arg.axis.is_tile for r in general.ranges)
        ):
            result[node] = general
    return result


def _cost(value: UOp, counter: UOp) -> float:
    """Instructions that an element takes, without its reads."""
    parts = value.toposort(lambda n: counter not in n.ranges or n.dtype is dtypes.index)
    return sum(
        [
            INSTRUCTIONS.get(n.op, 1.0)
            for n in parts
            if counter in n.ranges and n.op.is_alu and n.dtype is not dtypes.index
        ]
    )


def _stage(value: UOp, counter: UOp, size: int, target: Target, uid: int) -> UOp | None:
    """The node that fills scratch with the value for all counters below `size`, in vectors; None if it cannot
    be cut into vectors."""
    lanes = target.lanes(value.dtype)
    width = next((lanes * n for n in range(VECTORS, 0, -1) if size % (lanes * n) == 0), 0)
    if width and size <= SHORT * lanes:
        width = size  # without a loop
    if not width:
        return None
    outer = UOp(Ops.RANGE, dtypes.index, (UOp.index(size // width),), RangeArg(uid, AxisType.LOOP))
    lane = UOp(Ops.RANGE, dtypes.index, (UOp.index(width),), RangeArg(uid + 1, AxisType.UPCAST))
    whole = size == width
    fill = simplify(value.substitute({counter: lane if whole else outer * width + lane}))
    ranges = (lane,) if whole else (outer, lane)
    return UOp(Ops.STAGE, value.dtype, (fill, *ranges), StageArg("local", uid))
