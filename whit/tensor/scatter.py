"""Slices that are added to places by number, which is the gradient of a read by index, and places that are
written several times: in time that does not grow with places times positions. Node level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from whit.helpers import all_int, ceildiv, cpu_threads, prod
from whit.tensor.custom import run
from whit.uop import DType, Ops, Shape, Sint, UOp, dtypes
from whit.uop.program import Program, param

LEAST_PAIRS = 1 << 18  # of places and positions: below, comparing all of them fuses with what is around


def is_large(shape: Shape, axis: int, positions: Sint) -> bool:
    """Whether `add_slices` is worth a kernel of its own."""
    length = shape[axis]
    if not isinstance(length, int) or not isinstance(positions, int) or not all_int(shape) or 0 in shape:
        return False
    return positions * length >= LEAST_PAIRS


def add_slices(index: UOp, updates: UOp, axis: int, length: int) -> UOp:
    """Zeros with `length` places along an axis, to which slice i of `updates` is added at index[i]; one whose
    index is outside is left out. Sums of one place are in order, in float32 if narrower.

    Shapes: index (n,), updates (…, n at axis, …) -> (…, length at axis, …).
    """
    before, after = updates.shape[:axis], updates.shape[axis + 1 :]
    positions = updates.shape[axis]
    assert all_int(updates.shape) and isinstance(positions, int), "as is_large says"
    batches, width = prod(before), prod(after)
    wide = dtypes.float32 if updates.dtype.is_float and updates.dtype.itemsize < 4 else updates.dtype
    parts = max(1, min(length, cpu_threads() // batches))
    kernel = _add_slices(batches, positions, length, width, parts, wide, index.dtype)
    flat = updates.cast(wide).reshape((batches, positions, width))
    shape = (batches, length, width)
    made = run(kernel, [flat, index.reshape((positions,))], [(shape, wide)], gradient=_taken)[0]
    return made.reshape((*before, length, *after)).cast(updates.dtype)


def last_positions(index: UOp, length: int) -> UOp:
    """For each of `length` places the last position of the 1-D index that names it, int32; -1 for none."""
    positions, parts = index.shape[0], max(1, min(length, cpu_threads()))
    assert isinstance(positions, int), "as is_large says"
    kernel = _last_positions(positions, length, parts, index.dtype)
    return run(kernel, [index], [((length,), dtypes.int32)])[0]


def _taken(
    upstreams: Sequence[UOp | None], outputs: Sequence[UOp], values: Sequence[UOp]
) -> list[UOp | None]:
    """Slice i had its effect at place index[i]."""
    g = upstreams[0]
    return [None if g is None else UOp(Ops.TAKE, g.dtype, (g, values[1]), 1), None]


@lru_cache(256)
def _add_slices(
    batches: int, positions: int, length: int, width: int, parts: int, dtype: DType, kind: DType
) -> UOp:
    """Each task has some of the places: it goes over all positions, and adds those that are its own."""
    made, x = param(0, (batches, length, width), dtype), param(1, (batches, positions, width), dtype)
    index, p = param(2, (positions,), kind), Program("add_slices")
    with p.parallel(batches * parts) as task:
        batch = task // parts
        first, count = _own(task % parts, parts, length)
        with p.loop(count * width) as j:
            flat = first * width + j
            p.store(made, (batch, flat // width, flat % width), 0)
        with p.loop(positions) as i:
            at = p.let(index[i].cast(dtypes.index))
            with p.when(at.ge(first) & at.lt(first + count)), p.loop(width) as k:
                p.store(made, (batch, at, k), made[batch, at, k] + x[batch, i, k])
    return p.finish()


@lru_cache(256)
def _last_positions(positions: int, length: int, parts: int, kind: DType) -> UOp:
    """Each task goes over all positions, in order, and notes those of its own places."""
    made, index = param(0, (length,), dtypes.int32), param(1, (positions,), kind)
    p = Program("last_positions")
    with p.parallel(parts) as task:
        first, count = _own(task, parts, length)
        with p.loop(count) as j:
            p.store(made, first + j, -1)
        with p.loop(positions) as i:
            at = p.let(index[i].cast(dtypes.index))
            with p.when(at.ge(first) & at.lt(first + count)):
                p.store(made, at, i.cast(dtypes.int32))
    return p.finish()


def _own(part: UOp, parts: int, length: int) -> tuple[UOp, UOp]:
    """The first place of a part, and how many it has."""
    size = ceildiv(length, parts)
    first = part * size
    left = (length - first).maximum(0)
    return first, left.lt(size).where(left, UOp.index(size))
