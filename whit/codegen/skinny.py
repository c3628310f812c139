"""Sums over a large matrix of which each element is used once or a few times: matrix times vector, a few rows
times a matrix, sums of columns. Memory decides: the matrix must be read in long runs, each element once.

    y[m, n] = sum_k x[m, k] * a[k, n]      neighbours along n: *columns*
    y[m, n] = sum_k x[m, k] * a[n, k]      neighbours along k: *rows*

All of m joins the register tile. Columns are read in blocks of a few rows of the matrix; the partial sums
wait in the result, which stays in the caches:

    tasks: parts of n · blocks of k (ACCUMULATE) · tiles of n · ROWS steps of k

Rows are read whole, a few at a time: tasks: parts of n · tiles of n · k in vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

from whit.codegen.costs import divisors
from whit.codegen.opts import OptKind
from whit.codegen.scopes import Access, Kernel, Scope
from whit.helpers import prod, round_up
from whit.uop import AxisType

ROWS = 16  # of the matrix in a block: as many runs as the hardware prefetches side by side
LEAST_RUN = 2048  # bytes that lie together in a row of a task's part
SHORTEST_RUN = 256  # the same where there are threads without work else
REGISTERS = 0.75  # share of the registers that hold sums
TASKS = 4  # for each thread, so that one that is held up does not hold up all
PADDING = 1.02  # the most that an axis may grow by padding


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The large operand and the axes by role; `few` have every element of the matrix used again."""

    access: Access
    few: list[int]
    wide: int
    folded: int


def read_once(k: Kernel) -> bool:
    """Choose the opts of a kernel whose time is that of reading one matrix; False if it is another kernel."""
    found = _find(k)
    if found is None or found.access.nbytes < k.target.l2_bytes or k.lanes == 1:
        return False
    if found.access.strides.get(found.wide) == 1:
        return _columns(k, found)
    return found.access.strides.get(found.folded) == 1 and bool(found.few) and _rows(k, found)


def _find(k: Kernel) -> _Matrix | None:
    """The matrix of the kernel's only sum, if the sum has one folded axis and one that the matrix has too."""
    sums = [scope for scope in k.scopes if scope.reduces]
    if len(sums) != 1 or len(k.scopes) != 2 or len(sums[0].reduces) != 1:
        return None
    scope = sums[0]
    if not scope.accesses or not all(k.is_static(axis) for axis in scope.axes):
        return None
    if len(k.loops()) != len(scope.loops):
        return None
    large = max(scope.accesses, key=lambda x: prod([k.size(a) for a in x.axes]) * x.itemsize)
    wide = [a for a in scope.loops if a in large.axes]
    few = [a for a in scope.loops if a not in large.axes]
    if large.odd or large.is_store or len(wide) != 1 or scope.reduces[0] not in large.axes:
        return None
    if sum([x.nbytes for x in scope.accesses if x is not large]) > k.target.l2_bytes // 2:
        return None
    return _Matrix(large, few, wide[0], scope.reduces[0])


def _scope(k: Kernel) -> Scope:
    return next(scope for scope in k.scopes if scope.reduces)


def _columns(k: Kernel, found: _Matrix) -> bool:
    room = int(REGISTERS * k.target.vector_registers) // prod([k.size(a) for a in found.few])
    steps, run = k.size(found.folded), k.size(found.wide) * found.access.itemsize
    blocks = [n for n in divisors(steps) if ROWS // 2 <= steps // n <= 2 * ROWS and n > 1]
    if room < 1 or not blocks or run < LEAST_RUN or found.access.strides[found.folded] < k.size(found.wide):
        return False
    if any(x.odd or x.strides.get(found.wide, 0) not in (0, 1) for s in k.scopes for x in s.accesses):
        return False
    store = next(x for s in k.scopes for x in s.accesses if x.is_store)
    if store.strides.get(found.wide) != 1:
        return False
    amount = min(blocks, key=lambda n: abs(steps // n - ROWS))
    number = max(k.table.axes) + 1
    if not k.apply(OptKind.ACCUMULATE, found.folded, amount):
        return False
    for axis in found.few:
        k.apply(OptKind.UPCAST, axis, 0)
    _tile_wide(k, found.wide, k.lanes * max(n for n in (4, 2, 1) if n <= room or n == 1))
    share(k, found.wide, max(run // LEAST_RUN, min(k.target.threads, run // SHORTEST_RUN)))
    return k.apply(OptKind.SWAP, found.wide, number)


def _rows(k: Kernel, found: _Matrix) -> bool:
    few = prod([k.size(a) for a in found.few])
    room, size = int(REGISTERS * k.target.vector_registers) // few, k.size(found.wide)
    if room < 1 or k.size(found.folded) < 4 * k.lanes or size < 2:
        return False
    if any(x.odd or x.strides.get(found.folded, 0) not in (0, 1) for x in _scope(k).accesses):
        return False
    side_by_side = max(n for n in (1, 2, 3, 4) if n <= room and round_up(size, n) <= size * PADDING)
    for axis in found.few:
        k.apply(OptKind.UPCAST, axis, 0)
    _tile_wide(k, found.wide, side_by_side)
    k.tile(found.folded, k.lanes * (2 if few * side_by_side <= 8 else 1))
    share(k, found.wide, size)
    return True


def _tile_wide(k: Kernel, axis: int, amount: int) -> None:
    """Take part of an axis into the tile; with whole tasks, when little padding does that."""
    size, whole = k.size(axis), amount * TASKS * k.target.threads
    if size % whole and round_up(size, whole) <= size * PADDING:
        k.apply(OptKind.PADTO, axis, whole)
    k.tile(axis, amount)


def share(k: Kernel, axis: int, most: int) -> None:
    """Cut the axis into tasks, as many for each thread, if it is long enough."""
    threads = k.target.threads
    if threads < 2 or k.table.axes[axis].type is not AxisType.LOOP:
        return
    most = max(1, min(TASKS * threads, most))
    tasks = max(divisors(k.size(axis), most), key=lambda n: (n % threads == 0, n))
    even = min(most, k.size(axis) // 2) // threads * threads
    if tasks % threads and even and k.apply(OptKind.PADTO, axis, even):
        tasks = even
    if tasks > 1:
        k.apply(OptKind.THREAD, axis, tasks)
