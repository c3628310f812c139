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
    numerator, whole = _positions(old, size, align_corners)
    numerator = numerator.maximum(0)  # not before the first element
    low = (numerator // whole).minimum(old - 1)
    high = (low + 1).minimum(old - 1)
    share = (numerator - low * whole).cast(u.dtype) * (1 / whole)
    share = share.reshape(tuple([size if i == axis else 1 for i in range(u.ndim)]))
    first, second = UOp(Ops.TAKE, u.dtype, (u, low), axis), UOp(Ops.TAKE, u.dtype, (u, high), axis)
    return first + (second - first) * share


def _positions(old: int, size: int, align_corners: bool) -> tuple[UOp, int]:
    """Where each element of the result lies between the old ones: numerators, and what divides them."""
    steps = iota(size, dtypes.int64)
    if align_corners:  # i * (old - 1) / (size - 1)
        return steps * (old - 1), max(1, size - 1)
    return (steps * 2 + 1) * old - size, 2 * size  # (i + 1/2) * old / size - 1/2


CUBIC = -0.75  # the slope of Keys' kernel (1981) at distance 1, as image libraries have it


def resize_cubic(u: UOp, axis: int, size: int, align_corners: bool) -> UOp:
    """Cubic convolution of the four nearest elements (Keys 1981); beyond the ends the last ones stand."""
    old = u.shape[axis]
    assert isinstance(old, int), "checked by spatial_sizes"
    if size == old:
        return u
    numerator, whole = _positions(old, size, align_corners)
    low = (numerator + whole) // whole - 1  # the quotient of numbers from 0 is the same everywhere
    share = (numerator - low * whole).cast(u.dtype) * (1 / whole)
    share = share.reshape(tuple([size if i == axis else 1 for i in range(u.ndim)]))
    total: UOp | None = None
    for tap in (-1, 0, 1, 2):
        taken = UOp(Ops.TAKE, u.dtype, (u, (low + tap).maximum(0).minimum(old - 1)), axis)
        part = taken * _cubic_weight(share, tap)
        total = part if total is None else total + part
    assert total is not None
    return total


def _cubic_weight(share: UOp, tap: int) -> UOp:
    """The kernel at distance |share - tap|."""
    x = share - tap if tap <= 0 else share * -1.0 + tap
    if tap in (0, 1):
        return ((x * (CUBIC + 2) - (CUBIC + 3)) * x * x) + 1.0
    return ((x * CUBIC - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
