"""Choosing opts without measuring: from the strides of a kernel's accesses and the facts of the target.

A kernel is seen as *scopes*: the body of each REDUCE and of each END, with the loops around it and the memory accesses in it.
The heaviest scope decides the register tile. The steps, each a function below:

1. merge      axes that are contiguous in every access become one
2. vector     the axis whose elements are neighbours in memory becomes the hardware vector
3. tile       more axes join the register tile while that saves loads and the registers last
4. unroll     short reductions and short inner loops are unrolled
5. order      the axis whose tiles are dearest to load goes outermost
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
GATHER = 2.0  # cost of one lane that is loaded or stored by itself, in instructions
MOST_CODE = 192  # vector instructions in the body of an innermost loop


@dataclass(eq=False, slots=True)
class Access:
    """One read or write: element strides per axis; `odd` axes enter the index in another way than by a factor."""

    node: UOp
    strides: dict[int, int]
    odd: frozenset[int]
    axes: frozenset[int]
    itemsize: int
    is_store: bool
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
    alus: float = 0.0  # operations of the body; those that run in outer loops only count in part

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
            scope.alus += weight(node)
        stack += node.src
    scope.alus += scope.node.op is Ops.REDUCE


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
    return Access(node, strides, frozenset(odd), axes, dtype.itemsize, node.op is Ops.STORE, weight)


# ---- 1 merge -----------------------------------------------------------------------------------------------


def merge(k: Kernel) -> None:
    """Neighbouring axes that every access walks as one become one."""
    for kind in (AxisType.LOOP, AxisType.REDUCE):
        present = k.table.of_type(kind)
        for inner in reversed(present):
            for outer in present:
                if outer.number in k.table.axes and inner.number in k.table.axes and _mergeable(k, outer, inner):
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


# ---- 2 vector ----------------------------------------------------------------------------------------------


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
        cost += access.weight * (1 / width if access.is_cheap(axis) else GATHER)
    return cost


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


# ---- 3 tile ------------------------------------------------------------------------------------------------


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
        found |= {n for n in (4, 5, 6, 8) if n < size and round_up(size, n) <= size * 1.08}
    return sorted(found)


def vector_width(k: Kernel, axis: int) -> int:
    """Lanes to use along an axis: all, or the power of two that holds a short one."""
    size = k.size(axis)
    return k.lanes if size >= k.lanes else 1 << max(0, size - 1).bit_length()


def tiles(k: Kernel, scope: Scope, vector: int | None) -> Iterator[dict[int, int]]:
    """Candidate register tiles of a reduction: amounts per axis."""
    width = vector_width(k, vector) if vector is not None else 1
    reuse = {a: sum(a not in x.axes for x in scope.accesses) for a in scope.loops if a != vector}
    others = sorted((a for a in reuse if reuse[a]), key=lambda a: (-reuse[a], -k.size(a)))[:3]
    vector_steps = [1]
    if vector is not None and vector in scope.loops:
        vector_steps = [m for m in (1, 2, 3, 4) if width * m < k.size(vector) + width]
    for steps in vector_steps:
        for amounts in itertools.product(*[_amounts(k, a) for a in others]):
            if math.prod(amounts) * steps <= 2 * k.target.vector_registers:
                tile = dict(zip(others, amounts, strict=True))
                if vector is not None:
                    tile[vector] = width * steps
                yield tile


def tile_cost(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> float:
    """Estimated cycles per useful point of a reduction under a register tile."""
    width = vector_width(k, vector) if vector is not None else 1
    accumulators = math.prod(tile.values()) / width
    loads, vector_loads = 0.0, 0.0
    for access in scope.accesses:
        number = float(math.prod([n for a, n in tile.items() if a in access.axes and a != vector]))
        if vector is not None and vector in access.axes:
            steps = tile[vector] / width
            number *= steps if access.is_cheap(vector) else steps * width * 0.75
            vector_loads += number
        loads += number * access.weight
    registers = k.target.vector_registers
    needed = accumulators + min(vector_loads, 6) + 1
    cycles = max(accumulators * scope.alus * 0.25, loads * 0.5, 4.0) + loads * 0.2 + 1.0
    if needed > registers:
        cycles += 2.0 * (needed - registers)
    waste = 1.0
    for axis, amount in tile.items():
        size = k.size(axis)
        if size % amount:
            waste *= round_up(size, amount) / size * (1.03 if axis == vector else 1.06)
    return cycles * waste / math.prod(tile.values())


def tile_reduction(k: Kernel, scope: Scope, vector: int | None) -> int:
    """Apply the best register tile for a reduction; the number of accumulators."""
    best = min(tiles(k, scope, vector), key=lambda t: tile_cost(k, scope, vector, t))
    width = vector_width(k, vector) if vector is not None else 1
    accumulators = max(1, math.prod(best.values()) // width)
    for axis, amount in best.items():
        if axis != vector:
            k.split(OptKind.UPCAST, axis, amount)
    if vector is not None:
        if vector in scope.reduces:
            steps = _reduce_steps(k, vector, width, accumulators)
            k.split(OptKind.UNROLL, vector, width * steps)
            accumulators *= steps
        else:
            k.split(OptKind.UPCAST, vector, best[vector])
    return accumulators


def _reduce_steps(k: Kernel, axis: int, width: int, accumulators: int) -> int:
    """How many vectors of a vectorised reduction go side by side: enough to hide the latency of the adds."""
    for steps in (8, 4, 2):
        size = k.size(axis)
        if accumulators * steps <= 8 and size >= 2 * width * steps and round_up(size, width * steps) <= size * 1.1:
            return steps
    return 1


# ---- 4 unroll ----------------------------------------------------------------------------------------------


def unroll(k: Kernel, scope: Scope, vector: int | None, accumulators: int) -> None:
    """Unroll short reduce axes, innermost first, while the body of the loop stays small."""
    body = accumulators * max(1, scope.alus)
    for axis in reversed([a for a in scope.reduces if a != vector]):
        present = k.table.axes.get(axis)
        if present is None or present.type is not AxisType.REDUCE or not isinstance(present.size, int):
            continue
        if present.size <= 8 and body * present.size <= MOST_CODE:
            if k.apply(OptKind.UNROLL, axis, 0):
                body *= present.size
        else:
            step = next((n for n in (4, 2) if present.size % n == 0 and body * n <= MOST_CODE // 2), 1)
            if step > 1 and k.apply(OptKind.UNROLL, axis, step):
                body *= step
            break


# ---- 5 order and 6 thread ----------------------------------------------------------------------------------


def order(k: Kernel, scope: Scope) -> None:
    """Of the two innermost loops put that one inside which reads less memory again."""
    loops = [a for a in k.table.of_type(AxisType.LOOP) if a.number in scope.loops]
    if len(loops) < 2 or not scope.reduces:
        return
    first, second = loops[-2].number, loops[-1].number

    def traffic(inner: int, outer: int) -> int:
        """Bytes that the inner loop's accesses cover, times how often it starts."""
        covered = sum(x.itemsize * math.prod(k.original[a] for a in x.axes if a in scope.reduces or a == inner)
                      for x in scope.accesses if inner in x.axes)
        return covered * k.size(outer)

    if traffic(second, first) > traffic(first, second):
        swap(k, first, second)


def nested_work(k: Kernel, order: list[int]) -> float:
    """Work of all scopes when the LOOPs nest in this order: a reduction runs once per iteration of the loops around the
    innermost loop that it depends on, so loops that it does not depend on had better be inside."""
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
            access.axes = frozenset(second if n == first else first if n == second else n for n in access.axes)
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


# ---- all together ------------------------------------------------------------------------------------------


def choose(ast: UOp, target: Target) -> tuple[Opt, ...]:
    """Opts for a kernel, from the target's facts alone; none when NOOPT=1."""
    if NOOPT:
        return ()
    k = Kernel(ast, target)
    work = sum(k.work(scope) for scope in k.scopes)
    merge(k)
    vector, vectors = choose_vector(k)
    hot = max(k.scopes, key=k.work)
    if hot.reduces:
        accumulators = tile_reduction(k, hot, vectors[hot])
        unroll(k, hot, vectors[hot], accumulators)
    if vector is not None and k.table.axes[vector].type is AxisType.LOOP and not (hot.reduces and vector in hot.loops):
        tile_elementwise(k, hot, vector)
    for scope in k.scopes:
        if scope.reduces and scope is not hot:
            small_reduction(k, scope, vectors[scope])
    order(k, hot)
    thread(k, work)
    return tuple(k.table.opts)


def small_reduction(k: Kernel, scope: Scope, vector: int | None) -> None:
    """A reduction that is not the heaviest: its own vector, or a little unrolling."""
    if vector is None or vector not in scope.reduces or k.table.axes[vector].type is not AxisType.REDUCE:
        unroll(k, scope, vector, 1)
        return
    width = vector_width(k, vector)
    if vector_cost(k, scope, vector) < vector_cost(k, scope, None):
        k.split(OptKind.UNROLL, vector, width * _reduce_steps(k, vector, width, 1))


def tile_elementwise(k: Kernel, scope: Scope, vector: int) -> None:
    """Vectors along the contiguous axis, several per iteration when the body is small."""
    width, size = vector_width(k, vector), k.size(vector)
    if vector_cost(k, scope, vector) >= vector_cost(k, scope, None) or k.lanes == 1:
        return
    most = 4 if scope.alus <= 12 else 2 if scope.alus <= 30 else 1
    if size > 64 * width * most:  # long enough for the padding not to matter: leave whole tiles and whole tasks
        if size % (width * most * k.target.threads):
            k.apply(OptKind.PADTO, vector, width * most * 4 * k.target.threads)
        steps = most
    else:
        steps = max((m for m in (1, 2, 3, 4) if m <= most and m * width <= round_up(size, width)),
                    key=lambda m: (-round_up(size, width * m), m))
    k.split(OptKind.UPCAST, vector, width * steps)
