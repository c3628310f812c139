"""Resizing along one axis with exact integer positions. Node level."""
from __future__ import annotations

from whit.tensor.selection import iota
from whit.uop import Ops, UOp, dtypes


def resize_nearest(u: UOp, axis: int, size: int, centres: bool) -> UOp:
    """Element floor(i * old / new), or floor((i + 1/2) * old / new) with `centres`."""
    old = u.shape[axis]
    assert isinstance(old, int), "checked by spatial_sizes"
    if size == old:
        return u
    if size % old == 0:  # every element is repeated: a view
        lead, rest, times = u.shape[:axis], u.shape[axis + 1:], size // old
        return u.reshape((*lead, old, 1, *rest)).expand((*lead, old, times, *rest)).reshape((*lead, size,
                                                                                             *rest))
    steps = iota(size, dtypes.int64)
    position = (steps * 2 + 1) * old // (2 * size) if centres else steps * old // size
    return UOp(Ops.TAKE, u.dtype, (u, position), axis)


def resize_linear(u: UOp, axis: int, size: int, align_corners: bool) -> UOp:
    """Weighted means of the two nearest elements."""
    old = u.shape[axis]
    assert isinstance(old, int), "checked by spatial_sizes"
    if size == old:
        return u
    steps = iota(size, dtypes.int64)
    if align_corners:  # position i * (old - 1) / (size - 1)
        whole = max(1, size - 1)
        numerator = steps * (old - 1)
    else:  # position (i + 1/2) * old / size - 1/2, not before the first element
        whole = 2 * size
        numerator = ((steps * 2 + 1) * old - size).maximum(0)
    low = (numerator // whole).minimum(old - 1)
    high = (low + 1).minimum(old - 1)
    share = (numerator - low * whole).cast(u.dtype) * (1 / whole)
    share = share.reshape(tuple([size if i == axis else 1 for i in range(u.ndim)]))
    first, second = UOp(Ops.TAKE, u.dtype, (u, low), axis), UOp(Ops.TAKE, u.dtype, (u, high), axis)
    return first + (second - first) * share
