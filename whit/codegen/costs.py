"""What a tile costs: cycles of its instructions, and cycles to bring its operands from the caches.

The numbers are those of a wide x86 core, in cycles at the clock of full vectors. They need not be right, only
to rank choices rightly; `tests/codegen/test_heuristics.py` pins the choices that were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from whit.codegen.scopes import Access, Axes, Kernel, Scope, footprint
from whit.helpers import ceildiv, round_up

GATHER = 2.0  # cost of one lane that is loaded or stored by itself, in instructions
MOST_ROWS = 6  # rows far apart that are read side by side without trouble
MOST_CODE = 256  # vector instructions in the body of an innermost loop
NEAR, FAR = 0.02, 0.12  # cycles per byte from the second cache, and from beyond it


# ---- instructions ----------------------------------------------------------------------------------------


def piece(k: Kernel, amount: int) -> int:
    """Lanes of the vectors of a tile of this size: the greatest power of two that divides it."""
    return min(k.lanes, amount & -amount)


def vector_cost(k: Kernel, scope: Scope, axis: int | None) -> float:
    """Memory instructions of the scope per element when `axis` is the vector; None: no vector."""
    if axis is None:
        return sum([a.weight for a in scope.accesses]) + scope.alus
    size, lanes = max(1, k.size(axis)), k.lanes  # an empty axis costs as one element
    used = min(lanes, size) if k.is_static(axis) else 1
    full = size / ceildiv(size, lanes) / lanes  # share of the lanes that do something
    width = max(1.0, used * full if used == lanes else used)
    cost = scope.alus / width
    for access in scope.accesses:
        lane = GATHER if scope.reduces or access.odd or walks_lines(k, scope, access) is None else GATHER / 2
        if access.is_cheap(axis) or access.step(axis):
            lane = (2 * access.step(axis) or 1) / width
        cost += access.weight * lane
    return cost


def walks_lines(k: Kernel, scope: Scope, access: Access) -> int | None:
    """The output loop along which a strided access reads or writes neighbours: with it inside, each cache
    line that a gather touches serves many iterations."""
    return next(
        (a for a in reversed(scope.loops) if access.strides.get(a) == 1 and a not in access.odd), None
    )


def _load_cycles(k: Kernel, access: Access, vector: int | None, lanes: int) -> float:
    """Cycles of one load. Vectors of a whole cache line are slow, and slower still when they straddle two."""
    if vector is None:
        return 0.45
    if vector not in access.axes:
        return 1.0  # a scalar into all lanes
    step = access.step(vector)
    if not access.is_cheap(vector) and not step:
        return GATHER * lanes * 0.5
    if step:
        return 2.0 * step
    size = lanes * access.itemsize
    aligned = not access.odd and all(f % lanes == 0 for a, f in access.strides.items() if a != vector)
    return 0.45 * max(1.0, size / 32) * (1.0 if aligned else 1.0 + 2.0 * size / 64)


def _is_far(access: Access, tile: dict[int, int]) -> bool:
    """Whether the rows of a tile lie far apart, so that many of them fight for few cache sets and pages."""
    steps = [access.strides.get(a, 0) * access.itemsize for a, n in tile.items() if n > 1]
    return any(step and step % 1024 == 0 for step in steps)


def body(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> tuple[float, float, float]:
    """(cycles of loads, cycles of arithmetic, instructions) of one pass over a tile."""
    lanes = piece(k, tile[vector]) if vector is not None else 1
    loads = work = code = 0.0

    def points(axes: Axes) -> float:
        number = math.prod([n for a, n in tile.items() if a in axes])
        return number / lanes if vector in axes else number

    for access in scope.accesses:
        number = points(access.axes)
        loads += number * access.weight * _load_cycles(k, access, vector, lanes)
        rows = math.prod([n for a, n in tile.items() if a in access.axes and a != vector])
        if rows > MOST_ROWS and _is_far(access, tile):
            loads += rows - MOST_ROWS
            work += rows - MOST_ROWS
        cheap = vector is None or access.is_cheap(vector)
        code += number * (1 if cheap else 2 * (access.step(vector or 0) or lanes))
    for axes, count in scope.ops.items():
        number = points(axes) * count * scope.shares[axes]
        work += number * (0.5 if lanes == k.lanes else 0.4)  # the clock is faster without full vectors
        code += number
    return loads, work, code


def stationary(scope: Scope, vector: int | None, tile: dict[int, int]) -> Access | None:
    """The vector operand that stays in registers while the others pass by: the smallest."""
    found = [x for x in scope.accesses if vector is not None and vector in x.axes]
    return min(found, key=lambda x: vectors_of(x, tile), default=None)


def vectors_of(access: Access, tile: dict[int, int]) -> int:
    """Elements of an access in one tile."""
    return math.prod([n for a, n in tile.items() if a in access.axes])


def tile_cost(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> float:
    """Estimated cycles per useful point of a reduction under a register tile."""
    lanes = piece(k, tile[vector]) if vector is not None else 1
    loads, work, code = body(k, scope, vector, tile)
    outputs = math.prod([n for a, n in tile.items() if a in scope.loops])
    accumulators = outputs / lanes if vector in scope.loops else outputs
    kept = stationary(scope, vector, tile)
    live = vectors_of(kept, tile) / lanes if kept is not None else 0.0
    # a tenth of the registers stays free: compilers spill before the last one is taken
    excess = accumulators + live + 1 - 0.9 * k.target.vector_registers
    cycles = (
        max(loads, work, 4.0 * min(1.0, work / (0.5 * accumulators)))
        + 0.2 * loads
        + 1.0
        + 2.0 * max(0.0, excess)
    )
    cycles += 0.05 * max(0.0, code - 2 * MOST_CODE)
    if vector in scope.reduces:  # each output is folded across its lanes after the loops
        cycles += 6.0 * accumulators * math.prod([tile.get(a, 1) / k.original[a] for a in scope.reduces])
    depth = sum(n > 1 and a != vector for a, n in tile.items())
    waste = 1.0 + 0.03 * max(0, depth - 2)  # all else being equal, tiles of few axes
    for axis, amount in tile.items():
        size = k.size(axis)
        if size % amount:
            waste *= round_up(size, amount) / size * 1.04
    return cycles * waste / math.prod(tile.values())


# ---- caches ----------------------------------------------------------------------------------------------

Loops = list[
    tuple[int, int]
]  # output loops around a tile, outermost first: axis and how many tiles or blocks


@dataclass(frozen=True, slots=True)
class Sweep:
    """A choice of the innermost output loop and the cycles to bring all operands from beyond the first cache.

    axis: the loop to put innermost; None leaves the order as it is.
    tiles: when not None, that loop is blocked: the innermost loop covers this many tiles, the rest goes
    around the next loop outside, which then runs on a piece that stays in the second cache.
    """

    cycles: float
    axis: int | None = None
    tiles: int | None = None


def best_sweep(k: Kernel, scope: Scope, tile: dict[int, int], axes: list[int]) -> Sweep:
    """The cheapest way to nest the output loops around a tile, among small changes of the present order."""
    loops = [(a, ceildiv(k.original[a], tile.get(a, 1))) for a in axes]
    loops = [(a, count) for a, count in loops if count > 1]
    best = Sweep(memory_cycles(k, scope, tile, loops))
    for at, (axis, count) in enumerate(loops):
        rest = loops[:at] + loops[at + 1 :]
        if rest and at < len(loops) - 1:
            best = min(best, Sweep(memory_cycles(k, scope, tile, [*rest, (axis, count)]), axis), key=_cycles)
        block = _block(k, scope, tile, axis, count) if rest else 1
        if block > 1:
            nested = [*rest[:-1], (axis, count // block), rest[-1], (axis, block)]
            best = min(best, Sweep(memory_cycles(k, scope, tile, nested) * 1.03, axis, block), key=_cycles)
    return best


def _cycles(sweep: Sweep) -> float:
    return sweep.cycles


def _block(k: Kernel, scope: Scope, tile: dict[int, int], axis: int, count: int) -> int:
    """The most tiles along an axis whose operands fit half of the second cache; divides `count`; 1: none."""
    for tiles in divisors(count)[-2:0:-1]:
        wide = {**tile, axis: tile.get(axis, 1) * tiles}
        if sum([_part(k, scope, x, wide) for x in _reads(scope) if axis in x.axes]) <= k.target.l2_bytes // 2:
            return tiles
    return 1


def _reads(scope: Scope) -> list[Access]:
    return [x for x in scope.accesses if not x.is_store and not x.axes.isdisjoint(scope.reduces)]


def _part(k: Kernel, scope: Scope, access: Access, tile: dict[int, int]) -> int:
    """Bytes that an access covers while one tile is computed."""
    return footprint(
        access, {a: k.original[a] if a in scope.reduces else tile.get(a, 1) for a in access.axes}
    )


def memory_cycles(k: Kernel, scope: Scope, tile: dict[int, int], loops: Loops) -> float:
    """Cycles to bring the operands of a reduction from beyond the first cache, over the whole kernel.

    Going outwards from the tile, the operands of ever more loops fit a cache together. What fits is loaded
    once; each step of a loop that does not fit any more loads again what moves with it, each step further out
    loads all.
    """
    reads = _reads(scope)
    near = _traffic(k, scope, tile, loops, reads, 0.9 * k.target.l1_bytes)
    return NEAR * near + (FAR - NEAR) * _traffic(k, scope, tile, loops, reads, 0.9 * k.target.l2_bytes)


def _traffic(
    k: Kernel, scope: Scope, tile: dict[int, int], loops: Loops, reads: list[Access], room: float
) -> float:
    """Bytes loaded into a cache of which `room` bytes can be used."""
    parts = [_part(k, scope, x, tile) for x in reads]
    steps = math.prod([count for _, count in loops])
    anew = float(sum(parts) * steps)  # when nothing is left of a tile for the next
    excess = sum(parts) / room - 1
    if excess >= 1 or any(p > _reach(x, scope, tile, room) for x, p in zip(reads, parts, strict=True)):
        return anew
    covered, outside, moving, count = dict(tile), steps, -1, 1
    for axis, count in reversed(loops):
        wide = {**covered, axis: covered.get(axis, 1) * count}
        wider = [_part(k, scope, x, wide) for x in reads]
        if sum(wider) > room:
            moving = axis
            break
        covered, parts, outside = wide, wider, outside // count
    held = 0.0
    for access, part in zip(reads, parts, strict=True):
        again = moving < 0 or (moving in access.axes and not _overlaps(scope, access, moving))
        held += part * (outside if again else max(1, outside // count))
    return held if excess <= 0 else excess * anew + (1 - excess) * held


def _overlaps(scope: Scope, access: Access, axis: int) -> bool:
    """Whether steps along an output axis read mostly the same elements again, as windows do."""
    stride = access.strides.get(axis)
    return stride is not None and any(access.strides.get(a) == stride for a in scope.reduces)


def _reach(access: Access, scope: Scope, tile: dict[int, int], room: float) -> float:
    """Bytes of an access that a cache can hold: rows at a stride of many lines share few of its sets."""
    way = 1 << int(room / 12).bit_length() - 1
    reach = room
    for axis in scope.reduces:
        stride = access.strides.get(axis, 0) * access.itemsize
        if stride >= 1024:
            row = access.itemsize * math.prod([n for a, n in tile.items() if access.strides.get(a) == 1])
            reach = min(reach, way // math.gcd(stride, way) * max(64, row) * (room / way))
    return reach


def divisors(size: int, most: int | None = None) -> list[int]:
    """Divisors of `size` in order, up to `most`.

    >>> divisors(12, 5)
    [1, 2, 3, 4]
    """
    return [d for d in range(1, min(size, most or size) + 1) if size % d == 0]


def memory_cost(k: Kernel, scope: Scope, tile: dict[int, int]) -> float:
    """Estimated cycles per point to reach beyond the first cache, with the best order of loops."""
    return (
        0.5 * best_sweep(k, scope, tile, scope.loops).cycles / math.prod([k.original[a] for a in scope.axes])
    )
