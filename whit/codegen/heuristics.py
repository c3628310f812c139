"""Choosing opts without measuring: from the strides of a kernel's accesses and the facts of the target.

A kernel is seen as *scopes*: the body of each REDUCE and of each END, with the loops around it and the memory
accesses in it. The heaviest scope decides the register tile. The steps, each a function below:

1. nest       loops that a reduction does not depend on go inside of it
2. merge      axes that are contiguous in every access become one
3. vector     the axis whose elements are neighbours in memory becomes the hardware vector
4. tile       more axes join the register tile while that saves loads and the registers last
5. unroll     short reductions and short inner loops are unrolled
6. order      that loop goes innermost which leaves most in the caches
7. thread     the outermost axis is shared out when the work pays for it
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from whit.codegen.block_sums import block_rows
from whit.codegen.blocking import block
from whit.codegen.costs import (
    MOST_CODE,
    best_sweep,
    body,
    divisors,
    memory_cost,
    memory_cycles,
    piece,
    stationary,
    tile_cost,
    vector_cost,
    walks_lines,
)
from whit.codegen.opts import Axis, Opt, OptKind, axes
from whit.codegen.rows import rows, turn_rows
from whit.codegen.scopes import Kernel, Scope
from whit.codegen.skinny import read_once
from whit.codegen.target import Target
from whit.helpers import NOOPT, ceildiv, round_up
from whit.uop import AxisType, UOp

THREAD_WORK = 50_000  # operations and elements below which a second thread costs more than it brings
TASK_WORK = 20_000  # the least work of one task
LARGE_TASK = 1_000_000  # work of which a task is large enough that more of them cost nothing
SHORT = 8  # vectors of a ragged axis that is all in the tile
PADDED = 0.05  # share of the threads' time that an even split by padding must bring
MOST_SIDE_BY_SIDE = 96  # instructions of several vectors of a sum: more fill no gaps and take registers


# ---- 1 nest ----------------------------------------------------------------------------------------------


def nest(k: Kernel) -> None:
    """Reorder the LOOPs when that saves work: loops that a value does not depend on go inside of it.

    Before:  loops i, j around a sum that depends on j only: it is computed again for every i
    After:   loops j, i
    """
    present = k.loops()
    orders = [present]
    for scope in k.scopes:
        for needed in (frozenset(scope.loops), *scope.ops):
            first = [n for n in present if n in needed]
            orders.append(first + [n for n in present if n not in needed])
    best = min(orders, key=k.nested_work)
    if k.nested_work(best) > 0.8 * k.nested_work(present):
        return
    wanted = list(best)
    for at, place in enumerate(present):  # places are numbers: put the wanted axis there
        if wanted[at] != place and k.swap(place, wanted[at]):
            moved = wanted[at]
            wanted = [moved if n == place else place if n == moved else n for n in wanted]
    k.weigh()


# ---- 2 merge ---------------------------------------------------------------------------------------------


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
                    k.merge(outer.number, inner.number)
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


# ---- 3 vector --------------------------------------------------------------------------------------------


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
            total += math.prod([k.size(a) for a in scope.axes]) * vector_cost(k, scope, axis)
        if best is None or total < best[0] * 0.999:
            best = total, candidate, chosen
    assert best is not None
    return best[1], best[2]


# ---- 4 tile ----------------------------------------------------------------------------------------------


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
    blocks = {x.blocks[axis] for s in k.scopes for x in s.accesses if axis in x.blocks}
    return sorted([n for n in found if all(b % n == 0 for b in blocks)] or [math.gcd(width, *blocks)])


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


def tile_reduction(k: Kernel, scope: Scope, vector: int | None) -> dict[int, int]:
    """Apply the best register tile for a reduction and return it."""
    ranked = sorted([(tile_cost(k, scope, vector, t), n, t) for n, t in enumerate(tiles(k, scope, vector))])
    ranked = [item for item in ranked[:8] if item[0] < 2 * ranked[0][0]]
    best = min(ranked, key=lambda item: item[0] + memory_cost(k, scope, item[2]))[2]
    if vector in scope.reduces:
        best[vector] = _reduce_steps(k, scope, vector, best)
    kept = stationary(scope, vector, best)
    # a tile is expanded in the order in which it is made: what the operand in registers depends on comes last
    for axis in sorted(best, key=lambda a: (a == vector, kept is not None and a in kept.axes, -best[a])):
        k.tile(axis, best[axis])
    return best


def _reduce_steps(k: Kernel, scope: Scope, vector: int, tile: dict[int, int]) -> int:
    """Tile size along a vectorised reduction: with few outputs several vectors hide the latency of the
    adds."""
    outputs = math.prod([n for a, n in tile.items() if a in scope.loops])
    size = k.size(vector)
    whole = round_up(size, k.lanes)
    fits = outputs * whole <= SHORT * k.lanes
    if size % k.lanes and fits and body(k, scope, vector, {**tile, vector: whole})[2] <= MOST_CODE:
        return whole  # no loop, and what is masked is known
    for amount in (tile[vector] * steps for steps in (8, 4, 2)):
        code = _code(k, scope, vector, {**tile, vector: amount})
        if (
            outputs * amount <= 8 * k.lanes
            and size >= 2 * amount
            and code <= MOST_CODE
            and amount / k.lanes * scope.alus <= MOST_SIDE_BY_SIDE
            and round_up(size, amount) <= size * 1.1
        ):
            return amount
    return tile[vector]


# ---- 5 unroll --------------------------------------------------------------------------------------------


def unroll(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> None:
    """Unroll short reduce axes, innermost first, while the loop's body stays small. Adds them to `tile`."""
    here = {a: n for a, n in tile.items() if a in scope.axes}
    vector = vector if vector in here else None
    code = _code(k, scope, vector, tile)
    outputs = math.prod([n for a, n in here.items() if a in scope.loops])
    lanes = k.lanes if vector in scope.loops else 1
    crowded = outputs / lanes > 0.8 * k.target.vector_registers
    # unrolling a loop around another reduction would copy all of that
    around = {a for s in k.scopes for a in s.loops}
    for axis in reversed([a for a in scope.reduces if a not in tile and a not in around]):
        if not k.is_static(axis):
            continue
        size = k.size(axis)
        if size <= 8 and code * size <= MOST_CODE:
            if k.apply(OptKind.UNROLL, axis, 0):
                tile[axis] = size
                code *= size
        else:
            step = next((n for n in (4, 2) if size % n == 0 and code * n <= MOST_CODE // 3), 1)
            if step > 1 and not crowded and k.apply(OptKind.UNROLL, axis, step):
                tile[axis] = step
            break


def _code(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> float:
    """Instructions of one pass over a tile: of a reduction and of those that run in its loops."""
    total = 0.0
    for other in k.scopes:
        if other is scope or not set(other.reduces).isdisjoint(scope.reduces):
            here = {a: n for a, n in tile.items() if a in other.axes}
            total += body(k, other, vector if vector in here else None, here)[2]
    return max(1.0, total)


# ---- 6 order and 7 thread --------------------------------------------------------------------------------


def order(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> None:
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
    sweep = best_sweep(k, scope, tile, loops)
    present = memory_cycles(k, scope, tile, [(a, ceildiv(k.original[a], tile.get(a, 1))) for a in loops])
    tiles = math.prod([k.original[a] / tile.get(a, 1) for a in scope.axes])
    if sweep.axis is None or present - sweep.cycles < 0.05 * max(body(k, scope, vector, tile)[:2]) * tiles:
        return
    if sweep.axis != loops[-1] and not swap(k, sweep.axis, loops[-1]):
        return
    if sweep.tiles is not None and k.apply(OptKind.SPLIT, loops[-1], sweep.tiles):
        swap(k, loops[-2], loops[-1])  # the part that counts the blocks goes around the next loop


def swap(k: Kernel, first: int, second: int) -> bool:
    """Exchange two LOOPs unless values would be computed again and again."""
    present = k.loops()
    other = [second if n == first else first if n == second else n for n in present]
    return k.nested_work(other) <= k.nested_work(present) * 1.01 and k.swap(first, second)


def bring_first(k: Kernel, axis: int) -> bool:
    """Make a LOOP the outermost one; the others keep their order, in which memory may follow."""
    places = k.loops()
    places = places[: places.index(axis) + 1]
    if not swap(k, places[0], axis):
        return False
    for inner, outer in itertools.pairwise(places[:0:-1]):
        swap(k, outer, inner)
    return True


def thread(k: Kernel, work: float) -> None:
    """Cut the outermost loop, or the best one brought there, into tasks: more than threads, which take one
    after another, so that one that others of the machine slow down holds up nothing."""
    threads = k.target.threads
    loops = [a for a in k.table.of_type(AxisType.LOOP) if isinstance(a.size, int) and a.size > 1]
    loops = [a for a in loops if all(end in a.owners for end in k.table.ast.src)]
    if threads < 2 or work < THREAD_WORK or not loops:
        return
    most = max(threads, min(int(work / TASK_WORK), 16 * threads))
    choices = [(_balance(n, threads), axis, n) for axis in loops for n in [_tasks(k, axis, most)]]
    choices += [choice for axis in loops for choice in _padded(k, axis, most)]
    for _, axis, tasks in sorted(choices, key=lambda c: (-c[0], c[1].number)):
        first = k.table.of_type(AxisType.LOOP)[0]
        if tasks > 1 and (first is axis or bring_first(k, axis.number)):
            place = k.loops()[0]  # SWAP has given the axis the number of the outermost one
            if k.size(place) % tasks:
                k.apply(OptKind.PADTO, place, tasks)
            each = 16 if len(k.scopes) == 1 else 8  # several loops over rows: the first row of a task waits
            large = min(int(work / LARGE_TASK), each * threads) // tasks
            more = divisors(k.size(place) // tasks, max(1, large))[-1]
            k.apply(OptKind.THREAD, place, tasks * more)
            return


def _padded(k: Kernel, axis: Axis, most: int) -> Iterator[tuple[float, Axis, int]]:
    """An even split of an axis whose size no good number divides: its last task does a little less."""
    size, threads = k.size(axis.number), k.target.threads
    tasks = min(most, 4 * threads, size // 2) // threads * threads
    if tasks and size % tasks:
        yield _balance(tasks, threads) - PADDED - (round_up(size, tasks) / size - 1), axis, tasks


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
    if NOOPT or any(axis.size == 0 for axis in axes(ast)):  # loops that never run need no care
        return ()
    k = Kernel(ast, target)
    if block_rows(k):
        return tuple(k.table.opts)
    work = sum(k.work(scope) for scope in k.scopes)
    row = rows(k)
    if row is not None:
        thread(k, work)
        turn_rows(k, row)
        return tuple(k.table.opts)
    nest(k)
    work = sum(k.work(scope) for scope in k.scopes)
    merge(k)
    if read_once(k) or block(k):
        return tuple(k.table.opts)
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
    order(k, hot, vectors[hot], tile)
    thread(k, work)
    return tuple(k.table.opts)


def small_reduction(k: Kernel, scope: Scope, vector: int | None, tile: dict[int, int]) -> None:
    """A reduction that is not the heaviest: its own vector, or a little unrolling."""
    if vector is None or vector not in scope.reduces or any(a in tile for a in scope.reduces):
        unroll(k, scope, vector, tile)
    elif vector_cost(k, scope, vector) < vector_cost(k, scope, None):
        amount = _reduce_steps(k, scope, vector, {vector: vector_width(k, vector)})
        if k.tile(vector, amount):
            tile[vector] = amount


def tile_elementwise(k: Kernel, scope: Scope, vector: int) -> int:
    """Vectors along the contiguous axis, several per iteration when the body is small. The size of the
    tile."""
    width, size = vector_width(k, vector), k.size(vector)
    if vector_cost(k, scope, vector) >= vector_cost(k, scope, None) or k.lanes == 1:
        return 4 if size % 4 == 0 and size > 16 and k.tile(vector, 4) else 1  # less of the loop itself
    most = 4 if scope.alus <= 12 else 2 if scope.alus <= 30 else 1
    if any(not x.is_cheap(vector) for x in scope.accesses):
        most = 1
    whole = width * most * 4 * k.target.threads  # tiles and tasks without a rest
    pieces = ceildiv(size, width)
    if size % width and pieces <= SHORT and scope.alus * pieces <= MOST_CODE / 2:
        steps = pieces  # no loop, and what is masked is known
    elif size > 64 * width * most and size % width == 0:  # nothing needs a mask
        steps = max(m for m in range(1, most + 1) if size % (width * m) == 0)
    elif size > 64 * width * most and round_up(size, whole) <= size * 1.02:
        k.apply(OptKind.PADTO, vector, whole)
        steps = most
    else:
        steps = max(
            (m for m in (1, 2, 3, 4) if m <= most and m * width <= round_up(size, width)),
            key=lambda m: (-round_up(size, width * m), m),
        )
    return width * steps if k.tile(vector, width * steps) else 1
