"""Choosing opts without measuring: from the strides of a kernel's accesses and the facts of the target.

A kernel is seen as *scopes*: the body of each REDUCE and of each END, with the loops around it and the memory
accesses in it. The heaviest scope decides the register tile. The steps, each a function below:

1. merge      axes that are contiguous in every access become one
2. vector     the axis whose elements are neighbours in memory becomes the hardware vector
3. tile       more axes join the register tile while that saves loads and the registers last
4. unroll     short reductions and short inner loops are unrolled
5. order      that loop goes innermost which leaves most in the caches
6. thread     the outermost axis is shared out when the work pays for it
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from whit.codegen.opts import Axis, AxisTable, Opt, OptError, OptKind
from whit.codegen.target import Target
from whit.helpers import NOOPT, ceildiv, round_up
from whit.uop import AxisType, Ops, UOp, dtypes
from whit.uop.symbolic import linear_form

THREAD_WORK = 50_000  # operations and elements below which a second thread costs more than it brings
TASK_WORK = 20_000  # the least work of one task
MOST_ROWS = 8  # rows far apart that are read side by side without trouble
GATHER = 2.0  # cost of one lane that is loaded or stored by itself, in instructions
MOST_CODE = 256  # vector instructions in the body of an innermost loop


@dataclass(eq=False, slots=True)
class Access:
    """One read or write: element strides per axis; `odd` axes enter the index in another way than by a
    factor."""

    node: UOp
    strides: dict[int, int]
    odd: frozenset[int]
    axes: frozenset[int]
    itemsize: int
    is_store: bool
    nbytes: int  # of the whole buffer
    weight: float = 1.0  # how often it runs, as a share of how often the scope's body runs

    def is_cheap(self, axis: int) -> bool:
        """Whether a vector along `axis` is one load: neighbours, or one element for all lanes."""
        return axis not in self.odd and self.strides.get(axis, 0) in (0, 1)


@dataclass(eq=False, slots=True)
class Scope:
    """The body of a REDUCE or an END."""

    node: UOp
    loops: list[int]  # output axes around it
    reduces: list[int]  # axes that it folds
    accesses: list[Access] = field(default_factory=list)
    ops: dict[frozenset[int], float] = field(
        default_factory=dict
    )  # operations by the axes that they depend on

    @property
    def alus(self) -> float:
        """Operations of the body; those that run in outer loops only count in part."""
        return sum(self.ops.values())

    @property
    def axes(self) -> list[int]:
        return self.loops + self.reduces


class Kernel:
    """A kernel's scopes and sizes, kept up to date with the opts applied so far."""

    def __init__(self, ast: UOp, target: Target) -> None:
        self.table, self.target = AxisTable.of(ast, target), target
        self.fixed: set[int] = set()  # axes that enter comparisons or values, so that they cannot be merged
        self.scopes = _scopes(ast, self.fixed)
        self.original = {number: self.size(number) for number in self.table.axes}

    def size(self, number: int) -> int:
        axis = self.table.axes[number]
        return axis.size if isinstance(axis.size, int) else max(1, int(axis.size.vmax))

    def is_static(self, number: int) -> bool:
        return isinstance(self.table.axes[number].size, int)

    def count(self, scope: Scope) -> int:
        """How often the scope's body runs."""
        return math.prod(self.size(a) for a in scope.axes)

    def work(self, scope: Scope) -> float:
        return self.count(scope) * (scope.alus + sum([a.weight for a in scope.accesses]))

    def apply(self, kind: OptKind, axis: int, amount: int) -> bool:
        """Apply an opt if it is legal."""
        try:
            self.table.apply(Opt(kind, axis, amount))
        except OptError:
            return False
        return True

    def split(self, kind: OptKind, axis: int, amount: int) -> bool:
        """A split, with PADTO before it when the amount does not divide the size."""
        if amount <= 1:
            return False
        if self.size(axis) % amount and not self.apply(OptKind.PADTO, axis, amount):
            return False
        return self.apply(kind, axis, amount)

    @property
    def lanes(self) -> int:
        """Lanes of the widest type that the kernel touches."""
        widest = max([a.itemsize for s in self.scopes for a in s.accesses], default=4)
        return max(1, self.target.vector_bytes // max(1, widest))


def _scopes(ast: UOp, fixed: set[int]) -> list[Scope]:
    """Scopes in order of execution. Fills `fixed`."""
    found: list[Scope] = []
    for node in ast.toposort():
        if node.op is Ops.REDUCE:
            loops = node.ranges
            reduces = node.src[1:]
        elif node.op is Ops.END or (node.op is Ops.STORE and node in ast.src):
            loops, reduces = frozenset(node.src[1:] if node.op is Ops.END else ()), ()
        else:
            if not node.op.is_alu or node.dtype is dtypes.index:
                continue
            if any(s.dtype is dtypes.index for s in node.src):
                fixed.update(r.arg.uid for s in node.src for r in s.ranges)
            continue
        scope = Scope(node, sorted(r.arg.uid for r in loops), sorted(r.arg.uid for r in reduces))
        _fill(scope, fixed, {r.arg.uid: int(r.vmax) + 1 for r in (*loops, *reduces)})
        found.append(scope)
    return found


def _fill(scope: Scope, fixed: set[int], sizes: dict[int, int]) -> None:
    """The scope's accesses and operations, each with the share of iterations in which it runs."""
    nest = {number: depth for depth, number in enumerate(scope.axes)}
    share = [1.0]  # by depth: iterations of the loops up to there, of all iterations
    for number in reversed(scope.axes):
        share.append(share[-1] / max(1, sizes[number]))
    share.reverse()

    def weight(node: UOp) -> float:
        return share[max([nest[r.arg.uid] + 1 for r in node.ranges if r.arg.uid in nest], default=0)]

    stack, seen = [scope.node.src[0] if scope.node.op is not Ops.STORE else scope.node], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op is Ops.INDEX or node.op is Ops.STORE:
            scope.accesses.append(_access(node, fixed, 1.0 if node.op is Ops.STORE else weight(node)))
            if node.op is Ops.STORE:
                stack.append(node.src[2])
            continue
        if node.op is Ops.REDUCE or node.dtype is dtypes.index:
            continue
        if node.op is Ops.CAST and node.src[0].dtype is dtypes.index:
            fixed.update(r.arg.uid for r in node.src[0].ranges)
        if node.op.is_alu:
            axes = frozenset([r.arg.uid for r in node.ranges])
            scope.ops[axes] = scope.ops.get(axes, 0.0) + weight(node)
        stack += node.src
    if scope.node.op is Ops.REDUCE and not _is_product_sum(scope.node):
        axes = frozenset(scope.axes)
        scope.ops[axes] = scope.ops.get(axes, 0.0) + 1.0


def _is_product_sum(reduce: UOp) -> bool:
    """Whether the fold costs nothing beside the product: a fused multiply-add."""
    return reduce.arg.op is Ops.ADD and reduce.dtype.is_float and reduce.src[0].op is Ops.MUL


def _access(node: UOp, fixed: set[int], weight: float) -> Access:
    terms, _ = linear_form(node.src[1])
    strides: dict[int, int] = {}
    odd: set[int] = set()
    for term, factor in terms.items():
        if term.op is Ops.RANGE:
            strides[term.arg.uid] = strides.get(term.arg.uid, 0) + factor
        else:
            odd.update(r.arg.uid for r in term.ranges)
            for inner in term.toposort():  # what a gather reads along an axis is looked up, not merged
                if inner.op is Ops.INDEX:
                    odd.update(r.arg.uid for r in inner.ranges)
    mask = node.src[3:] if node.op is Ops.STORE else node.src[2:]
    for condition in mask:
        fixed.update(r.arg.uid for r in condition.ranges)
    fixed |= odd
    dtype = node.src[2].dtype if node.op is Ops.STORE else node.dtype
    axes = frozenset(r.arg.uid for r in node.src[1].ranges)
    return Access(
        node,
        strides,
        frozenset(odd),
        axes,
        dtype.itemsize,
        node.op is Ops.STORE,
        node.src[0].arg.size * dtype.itemsize,
        weight,
    )


# ---- 1 merge ---------------------------------------------------------------------------------------------


def merge(k: Kernel) -> None:
    """Neighbouring axes that every access walks as one become one."""
    for kind in (AxisType.LOOP, AxisType.REDUCE):
        present = k.table.of_type(kind)
        for inner in reversed(present):
            for outer in present:
                if (
                    outer.number in k.table.axes
                    and inner.number in k.table.axes
                    and _mergeable(k, outer, inner)
                ):
                    _merge(k, outer.number, inner.number)
                    break


def _mergeable(k: Kernel, outer: Axis, inner: Axis) -> bool:
    a, b = outer.number, inner.number
    if a == b or a in k.fixed or b in k.fixed or not k.is_static(a) or not k.is_static(b):
        return False
    if k.table.axes[a].owners != k.table.axes[b].owners:
        return False
    if any((a in s.axes) != (b in s.axes) for s in k.scopes):
        return False
    size = k.size(b)
    return all(x.strides.get(a, 0) == x.strides.get(b, 0) * size for s in k.scopes for x in s.accesses)


def _merge(k: Kernel, outer: int, inner: int) -> None:
    if not k.apply(OptKind.MERGE, outer, inner):
        return
    k.original[outer] *= k.original.pop(inner)
    for scope in k.scopes:
        scope.loops = [a for a in scope.loops if a != inner]
        scope.reduces = [a for a in scope.reduces if a != inner]
        for access in scope.accesses:
            stride = access.strides.pop(inner, 0)
            if stride:
                access.strides[outer] = stride
            access.axes -= {inner}


# ---- 2 vector --------------------------------------------------------------------------------------------


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
        cost += access.weight * (1 / width if access.is_cheap(axis) else lane)
    return cost


def walks_lines(k: Kernel, scope: Scope, access: Access) -> int | None:
    """The output loop along which a strided access reads or writes neighbours: with it inside, each cache
    line that a gather touches serves many iterations."""
    return next(
        (a for a in reversed(scope.loops) if access.strides.get(a) == 1 and a not in access.odd), None
    )


def best_reduce(k: Kernel, scope: Scope) -> int | None:
    """The axis that a reduction had best vectorise over by itself."""
    choices = [a for a in scope.reduces if k.is_static(a)]
    return min(choices, key=lambda a: vector_cost(k, scope, a), default=None)


def choose_vector(k: Kernel) -> tuple[int | None, dict[Scope, int | None]]:
    """The output axis to vectorise (or None), and the vector axis of each scope."""
    loops = [a.number for a in k.table.of_type(AxisType.LOOP) if k.is_static(a.number)]
    best: tuple[float, int | None, dict[Scope, int | None]] | None = None
    for candidate in [*reversed(loops), None]:
        total, chosen = 0.0, {}
        for scope in k.scopes:
            own = best_reduce(k, scope)
            axis = candidate if candidate in scope.loops else own
            chosen[scope] = axis
            total += k.count(scope) * vector_cost(k, scope, axis)
        if best is None or total < best[0] * 0.999:
            best = total, candidate, chosen
    assert best is not None
    return best[1], best[2]


# ---- 3 tile ----------------------------------------------------------------------------------------------


def divisors(size: int, most: int) -> list[int]:
    """Divisors of `size` up to `most`."""
    return [d for d in range(1, min(size, most) + 1) if size % d == 0]


def _amounts(k: Kernel, axis: int) -> list[int]:
    """Tile sizes worth trying for an axis that is not the vector."""
    if not k.is_static(axis):
        return [1]
    size = k.size(axis)
    found = set(divisors(size, 16))
    if size > 16 or len(found) <= 2:
        found |= {n for n in (4, 5, 6, 8, 12, 14) if n < size and round_up(size, n) <= size * 1.08}
    return sorted(found)


def vector_width(k: Kernel, axis: int) -> int:
    """Lanes to use along an axis: all, or the power of two that holds a short one."""
    size = k.size(axis)
    return k.lanes if size >= k.lanes else 1 << max(0, size - 1).bit_length()


def vector_amounts(k: Kernel, axis: int) -> list[int]:
    """Tile sizes along the vector axis: one to four vectors, or all of a short axis in vectors of any
    width."""
    size, lanes = k.size(axis), k.lanes
    width = vector_width(k, axis)
    found = {width * m for m in (1, 2, 3, 4) if width * m < size + width}
    if size <= 4 * lanes:
        found |= {round_up(size, w) for w in (lanes, lanes // 2, lanes // 4) if w > 1}
    return sorted(found)


def piece(k: Kernel, amount: int) -> int:
    """Lanes of the vectors of a tile of this size: the greatest power of two that divides it."""
    return min(k.lanes, amount & -amount)


def tiles(k: Kernel, scope: Scope, vector: int | None) -> Iterator[dict[int, int]]:
    """Candidate register tiles of a reduction: amounts per axis."""
    reuse = {a: sum(a not in x.axes for x in scope.accesses) for a in scope.loops if a != vector}
    others = sorted((a for a in reuse if reuse[a]), key=lambda a: (-reuse[a], -k.size(a)))[:3]
    most = k.target.vector_registers * (1.1 if k.lanes > 1 else 0.6)
    for amount in vector_amounts(k, vector) if vector is not None else [1]:
        width = piece(k, amount)
        steps = amount // width
        outputs = steps if vector in scope.loops else 1
        for amounts in itertools.product(*[_amounts(k, a) for a in others]):
            if math.prod(amounts) * outputs <= most:
                tile = dict(zip(others, amounts, strict=True))
                if vector is not None:
                    tile[vector] = amount
                yield tile


def _load_cycles(k: Kernel, access: Access, vector: int | None, lanes: int) -> float:
    """Cycles of one load. Vectors of a whole cache line are slow, and slower still when they straddle two."""
    if vector is None or vector not in access.axes:
        return 0.45
    if not access.is_cheap(vector):
        return GATHER * lanes * 0.5
    size = lanes * access.itemsize
    aligned = not access.odd and all(f % lanes == 0 for a, f in access.strides.items() if a != vector)
    return 0.45 * max(1.0, size / 32) * (1.0 if aligned else 1.0 + 1.6 * size / 64)


def _is_far(access: Access, tile: dict[int, int]) -> bool:
    """Whether the rows of a tile lie far apart, so that many of them fight for few cache sets and pages."""
    return any(n > 1 and access.strides.get(a, 0) * access.itemsize >= 1024 for a, n in tile.items())


def body(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> tuple[float, float, float]:
    """(cycles of loads, cycles of arithmetic, instructions) of one pass over a tile."""
    lanes = piece(k, tile[vector]) if vector is not None else 1
    loads = work = code = 0.0

    def points(axes: frozenset[int]) -> float:
        number = math.prod([n for a, n in tile.items() if a in axes])
        return number / lanes if vector in axes else number

    for access in scope.accesses:
        number = points(access.axes)
        loads += number * access.weight * _load_cycles(k, access, vector, lanes)
        if vector not in access.axes and number > MOST_ROWS and _is_far(access, tile):
            loads += number - MOST_ROWS
            work += number - MOST_ROWS
        code += number * (1 if vector is None or access.is_cheap(vector) else 2 * lanes)
    for axes, count in scope.ops.items():
        number = points(axes) * count
        work += number * (
            0.5 if lanes == k.lanes else 0.4
        )  # the clock is a little faster without full vectors
        code += number
    return loads, work, code


def memory_cycles(k: Kernel, scope: Scope, tile: dict[int, int], inner: int | None) -> float:
    """Cycles to bring what one tile reads from beyond the first cache, when `inner` is the innermost output
    loop."""
    total = 0.0
    for access in scope.accesses:
        if access.is_store or not any(a in access.axes for a in scope.reduces):
            continue
        part = footprint(
            access, {a: k.original[a] if a in scope.reduces else tile.get(a, 1) for a in access.axes}
        )
        fits = part <= min(k.target.l2_bytes, _reach(k, scope, access, tile)) * 0.8
        if inner is not None and inner not in access.axes and fits:
            total += part * 0.01 if part > k.target.l1_bytes // 2 else 0.0
        elif access.nbytes <= k.target.l2_bytes // 2 and fits:
            total += part * 0.02
        else:
            total += part * 0.15
    return total


def footprint(access: Access, sizes: dict[int, int]) -> int:
    """Bytes that an access covers over axes of these sizes; axes of one stride overlap, as the rows of a
    window do."""
    extents: dict[int, int] = {}
    for axis, size in sizes.items():
        stride = access.strides.get(axis, -axis - 1)  # odd axes count by themselves
        extents[stride] = extents.get(stride, 1) + size - 1
    return min(access.itemsize * math.prod(extents.values()), access.nbytes)


def _reach(k: Kernel, scope: Scope, access: Access, tile: dict[int, int]) -> float:
    """Bytes of an access that the second cache can hold: rows at a stride that is a multiple of many lines
    share few sets."""
    way = k.target.l2_bytes // 16
    reach = float(k.target.l2_bytes)
    for axis in scope.reduces:
        stride = access.strides.get(axis, 0) * access.itemsize
        if stride >= 1024:
            row = max(
                64, access.itemsize * math.prod([n for a, n in tile.items() if access.strides.get(a) == 1])
            )
            reach = min(reach, way / math.gcd(stride, way) * row * 16)
    return reach


def tile_cost(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> float:
    """Estimated cycles per useful point of a reduction under a register tile."""
    lanes = piece(k, tile[vector]) if vector is not None else 1
    loads, work, code = body(k, scope, vector, tile)
    outputs = math.prod([n for a, n in tile.items() if a in scope.loops])
    accumulators = outputs / lanes if vector in scope.loops else outputs
    live = [
        math.prod([n for a, n in tile.items() if a in x.axes]) / lanes
        for x in scope.accesses
        if vector in x.axes
    ]
    excess = accumulators + min([*live, 6.0]) + 1 - k.target.vector_registers
    cycles = (
        max(loads, work, 4.0 * min(1.0, work / (0.5 * accumulators)))
        + 0.15 * loads
        + 1.0
        + 2.0 * max(0.0, excess)
    )
    cycles += 0.05 * max(0.0, code - 2 * MOST_CODE)
    waste = 1.0
    for axis, amount in tile.items():
        size = k.size(axis)
        if size % amount:
            waste *= round_up(size, amount) / size * 1.04
    return cycles * waste / math.prod(tile.values())


def memory_cost(k: Kernel, scope: Scope, tile: dict[int, int]) -> float:
    """Estimated cycles per point to reach beyond the first cache, with the best innermost loop."""
    around: list[int | None] = [*[a for a in scope.loops if k.size(a) > tile.get(a, 1)]] or [None]
    points = math.prod([n for a, n in tile.items() if a in scope.loops]) * math.prod(
        [k.original[a] for a in scope.reduces]
    )
    return 0.25 * min([memory_cycles(k, scope, tile, inner) for inner in around]) / points


def tile_reduction(k: Kernel, scope: Scope, vector: int | None) -> dict[int, int]:
    """Apply the best register tile for a reduction and return it."""
    ranked = sorted([(tile_cost(k, scope, vector, t), n, t) for n, t in enumerate(tiles(k, scope, vector))])
    ranked = [item for item in ranked[:24] if item[0] < 2 * ranked[0][0]]
    best = min(ranked, key=lambda item: item[0] + memory_cost(k, scope, item[2]))[2]
    if vector in scope.reduces:
        best[vector] = _reduce_steps(k, scope, vector, best)
    for axis, amount in best.items():
        k.split(OptKind.UNROLL if axis in scope.reduces else OptKind.UPCAST, axis, amount)
    return best


def _reduce_steps(k: Kernel, scope: Scope, vector: int, tile: dict[int, int]) -> int:
    """Tile size along a vectorised reduction: with few outputs several vectors hide the latency of the
    adds."""
    outputs = math.prod([n for a, n in tile.items() if a in scope.loops])
    size = k.size(vector)
    for amount in (tile[vector] * steps for steps in (8, 4, 2)):
        code = body(k, scope, vector, {**tile, vector: amount})[2]
        if (
            outputs * amount <= 8 * k.lanes
            and size >= 2 * amount
            and code <= MOST_CODE
            and round_up(size, amount) <= size * 1.1
        ):
            return amount
    return tile[vector]


# ---- 4 unroll --------------------------------------------------------------------------------------------


def unroll(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> None:
    """Unroll short reduce axes, innermost first, while the body of the loop stays small."""
    code = max(1.0, body(k, scope, vector, tile)[2])
    for axis in reversed([a for a in scope.reduces if a != vector]):
        present = k.table.axes.get(axis)
        if present is None or present.type is not AxisType.REDUCE or not isinstance(present.size, int):
            continue
        if present.size <= 8 and code * present.size <= MOST_CODE:
            if k.apply(OptKind.UNROLL, axis, 0):
                code *= present.size
        else:
            step = next((n for n in (4, 2) if present.size % n == 0 and code * n <= MOST_CODE // 2), 1)
            if step > 1:
                k.apply(OptKind.UNROLL, axis, step)
            break


# ---- 5 order and 6 thread --------------------------------------------------------------------------------


def order(k: Kernel, scope: Scope, tile: dict[int, int]) -> None:
    """Put that loop innermost which leaves most in the caches."""
    loops = [a.number for a in k.table.of_type(AxisType.LOOP) if a.number in scope.loops]
    if len(loops) < 2:
        return
    if not scope.reduces:
        walks = [
            walks_lines(k, scope, x) for x in scope.accesses if tile and not x.is_cheap(next(iter(tile)))
        ]
        inner = next((a for a in walks if a in loops), None)
        if inner is not None and inner != loops[-1]:
            swap(k, inner, loops[-1])
        return
    best = min(reversed(loops), key=lambda a: memory_cycles(k, scope, tile, a))
    if memory_cycles(k, scope, tile, best) < 0.9 * memory_cycles(k, scope, tile, loops[-1]):
        swap(k, best, loops[-1])


def nested_work(k: Kernel, order: list[int]) -> float:
    """Work of all scopes when the LOOPs nest in this order: a reduction runs once per iteration of the loops
    around the innermost loop that it depends on, so loops that it does not depend on had better be inside."""
    total = 0.0
    for scope in k.scopes:
        depth = max([at + 1 for at, number in enumerate(order) if number in scope.loops], default=0)
        repeated = math.prod([k.size(n) for n in order[:depth] if n not in scope.loops])
        total += k.work(scope) * repeated
    return total


def swap(k: Kernel, first: int, second: int) -> bool:
    """Exchange two LOOPs unless reductions would be computed again and again."""
    order = [a.number for a in k.table.of_type(AxisType.LOOP)]
    other = [second if n == first else first if n == second else n for n in order]
    if nested_work(k, other) > nested_work(k, order) * 1.01 or not k.apply(OptKind.SWAP, first, second):
        return False
    for scope in k.scopes:  # numbers are places: what was `first` is now `second`
        scope.loops = [second if n == first else first if n == second else n for n in scope.loops]
        for access in scope.accesses:
            access.axes = frozenset(
                second if n == first else first if n == second else n for n in access.axes
            )
    return True


def thread(k: Kernel, work: float) -> None:
    """Cut the outermost loop, or the best one brought there, into tasks."""
    threads = k.target.threads
    loops = [a for a in k.table.of_type(AxisType.LOOP) if isinstance(a.size, int) and a.size > 1]
    loops = [a for a in loops if all(end in a.owners for end in k.table.ast.src)]
    if threads < 2 or work < THREAD_WORK or not loops:
        return
    most = max(threads, min(int(work / TASK_WORK), 16 * threads))
    for axis in sorted(loops, key=lambda a: (-_balance(_tasks(k, a, most), threads), a.number)):
        tasks = _tasks(k, axis, most)
        first = k.table.of_type(AxisType.LOOP)[0]
        if tasks > 1 and (first is axis or swap(k, first.number, axis.number)):
            k.apply(OptKind.THREAD, axis.number, tasks)  # SWAP has given it the number of the outermost place
            return


def _balance(tasks: int, threads: int) -> float:
    """Share of the threads' time that is used, a little more for more tasks than threads."""
    rounds: int = ceildiv(tasks, threads)
    return tasks / (threads * rounds) + min(tasks, 4 * threads) / (64 * threads)


def _tasks(k: Kernel, axis: Axis, most: int) -> int:
    """Into how many tasks to cut an axis."""
    assert isinstance(axis.size, int)
    return max(divisors(axis.size, most), key=lambda n: (_balance(n, k.target.threads), -n))


# ---- all together ----------------------------------------------------------------------------------------


def choose(ast: UOp, target: Target) -> tuple[Opt, ...]:
    """Opts for a kernel, from the target's facts alone; none when NOOPT=1."""
    if NOOPT:
        return ()
    k = Kernel(ast, target)
    work = sum(k.work(scope) for scope in k.scopes)
    merge(k)
    vector, vectors = choose_vector(k)
    hot = max(k.scopes, key=k.work)
    tile: dict[int, int] = {}
    if hot.reduces:
        tile = tile_reduction(k, hot, vectors[hot])
        unroll(k, hot, vectors[hot], tile)
    if (
        vector is not None
        and k.table.axes[vector].type is AxisType.LOOP
        and not (hot.reduces and vector in hot.loops)
    ):
        tile[vector] = tile_elementwise(k, hot, vector)
    for scope in k.scopes:
        if scope.reduces and scope is not hot:
            small_reduction(k, scope, vectors[scope], tile)
    order(k, hot, tile)
    thread(k, work)
    return tuple(k.table.opts)


def small_reduction(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> None:
    """A reduction that is not the heaviest: its own vector, or a little unrolling."""
    if vector is None or vector not in scope.reduces or k.table.axes[vector].type is not AxisType.REDUCE:
        present = {a: n for a, n in tile.items() if a in scope.axes}
        unroll(k, scope, vector if vector in present else None, present)
        return
    if vector_cost(k, scope, vector) < vector_cost(k, scope, None):
        k.split(OptKind.UNROLL, vector, _reduce_steps(k, scope, vector, {vector: vector_width(k, vector)}))


def tile_elementwise(k: Kernel, scope: Scope, vector: int) -> int:
    """Vectors along the contiguous axis, several per iteration when the body is small. The size of the
    tile."""
    width, size = vector_width(k, vector), k.size(vector)
    if vector_cost(k, scope, vector) >= vector_cost(k, scope, None) or k.lanes == 1:
        return 1
    most = 4 if scope.alus <= 12 else 2 if scope.alus <= 30 else 1
    if any(not x.is_cheap(vector) for x in scope.accesses):
        most = 1
    if (
        size > 64 * width * most
    ):  # long enough for the padding not to matter: leave whole tiles and whole tasks
        if size % (width * most * k.target.threads):
            k.apply(OptKind.PADTO, vector, width * most * 4 * k.target.threads)
        steps = most
    else:
        steps = max(
            (m for m in (1, 2, 3, 4) if m <= most and m * width <= round_up(size, width)),
            key=lambda m: (-round_up(size, width * m), m),
        )
    return width * steps if k.split(OptKind.UPCAST, vector, width * steps) else 1
