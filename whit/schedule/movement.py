"""Movement ops as index arithmetic: where an element of a node's value comes from in its source."""

from __future__ import annotations

from typing import NamedTuple

from whit.helpers import all_int, prod, strides_of
from whit.uop import Ops, Shape, Sint, UOp, dtypes
from whit.uop.symbolic import conjunction, floordiv, floormod, simplify, simplify_sum

ZERO = UOp.index(0)


class Place(NamedTuple):
    """One element of a value: an index expression per axis, and the condition (None: always) under which it
    is wanted."""

    idxs: tuple[UOp, ...]
    valid: UOp | None = None


def unbind(size: Sint) -> Sint:
    """The size with every BIND replaced by its VAR."""
    if isinstance(size, int):
        return size
    binds = {node: node.src[0] for node in size.toposort() if node.op is Ops.BIND}
    return simplify(size.substitute(binds))


def unbound_shape(shape: Shape) -> Shape:
    """A shape in VARs only, as kernels see it."""
    for size in shape:
        if not isinstance(size, int):
            return tuple([unbind(size) for size in shape])
    return shape


def reshape_index(idxs: tuple[UOp, ...], old: Shape, new: Shape) -> tuple[UOp, ...]:
    """Indices into `old` of the element at `idxs` in `new` (row-major). Works in groups of axes whose
    products agree, so that axes which a reshape leaves alone stay untouched."""
    result: list[UOp] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        left: Sint = 1
        right: Sint = 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while left is not right and left != right:
            if isinstance(left, int) and isinstance(right, int):
                if left < right and i < len(old):
                    left, i = _times(left, old[i]), i + 1
                    continue
                if right < left and j < len(new):
                    right, j = _times(right, new[j]), j + 1
                    continue
            i, j = len(old), len(new)  # zero sizes and symbolic ones: the rest is one group
            break
        result += _split_group(_merge_group(idxs[first_j:j], new[first_j:j]), old[first_i:i])
    return tuple(result)


def _times(a: Sint, b: Sint) -> Sint:
    product = a * b
    if isinstance(product, UOp):
        product = simplify(product)
        return int(product.arg) if product.op is Ops.CONST else product
    return product


def _merge_group(idxs: tuple[UOp, ...], sizes: Shape) -> UOp:
    """The flat index of a group of axes."""
    wide = [(i, s) for i, s in zip(idxs, sizes) if not (isinstance(s, int) and s == 1)]
    if len(wide) == 1:
        return wide[0][0]
    parts = []
    for (idx, _), stride in zip(wide, strides_of([s for _, s in wide])):
        parts.append(simplify(idx * stride))
    return simplify_sum(*parts)


def _split_group(flat: UOp, sizes: Shape) -> list[UOp]:
    """The index of each axis of a group."""
    wide = [s for s in sizes if not (isinstance(s, int) and s == 1)]
    strides = strides_of(wide)
    parts: list[UOp] = []
    for position, (size, stride) in enumerate(zip(wide, strides)):
        part = _div(flat, stride)
        parts.append(part if position == 0 else _mod(part, size))
    if not wide and flat is not ZERO:
        return [ZERO for _ in sizes]
    taken = iter(parts)
    return [ZERO if isinstance(s, int) and s == 1 else next(taken) for s in sizes]


def _div(u: UOp, by: Sint) -> UOp:
    if isinstance(by, int):
        return floordiv(u, by) if by > 0 else ZERO
    return simplify(u // by)


def _mod(u: UOp, by: Sint) -> UOp:
    if isinstance(by, int):
        return floormod(u, by) if by > 0 else ZERO
    return simplify(u % by)


def through(node: UOp, place: Place) -> Place:
    """The place in a movement op's source that its element at `place` comes from."""
    idxs, valid, arg, source = place.idxs, place.valid, node.arg, node.src[0]
    op = node.op
    if op is Ops.RESHAPE:
        return Place(reshape_index(idxs, unbound_shape(source.shape), unbound_shape(node.shape)), valid)
    if op is Ops.PERMUTE:
        moved = [ZERO] * len(arg)
        for position, axis in enumerate(arg):
            moved[axis] = idxs[position]
        return Place(tuple(moved), valid)
    if op is Ops.EXPAND:
        return Place(
            tuple(
                [
                    ZERO if old is not new and old != new else idx
                    for idx, old, new in zip(idxs, source.shape, arg)
                ]
            ),
            valid,
        )
    if op is Ops.SHRINK:
        return Place(
            tuple(
                [
                    idx if isinstance(start, int) and start == 0 else simplify(idx + unbind(start))
                    for idx, (start, _) in zip(idxs, arg)
                ]
            ),
            valid,
        )
    if op is Ops.FLIP:
        shape = unbound_shape(source.shape)
        return Place(
            tuple(
                [
                    simplify(UOp.index(shape[axis]) - 1 - idx) if axis in arg else idx
                    for axis, idx in enumerate(idxs)
                ]
            ),
            valid,
        )
    assert op is Ops.PAD, f"{op} is no movement op"
    moved, conditions = [], [valid]
    for idx, (before, after), size in zip(idxs, arg, unbound_shape(source.shape)):
        if isinstance(before, int) and before == 0:
            moved.append(idx)
        else:
            moved.append(simplify(idx - unbind(before)))
            conditions.append(simplify(moved[-1].ge(0)))
        if not (isinstance(after, int) and after == 0):
            conditions.append(simplify(moved[-1].lt(UOp.index(size))))
    return Place(tuple(moved), conjunction(*conditions))


def operand_place(place: Place, node: UOp, source: UOp) -> Place:
    """The place in an operand of an elementwise op, by NumPy's broadcasting."""
    shape = source.shape
    if shape == node.shape:
        return place
    tail = place.idxs[len(place.idxs) - len(shape) :]
    wide = node.shape[len(node.shape) - len(shape) :]
    return Place(
        tuple([idx if old is new or old == new else ZERO for idx, old, new in zip(tail, shape, wide)]),
        place.valid,
    )


def flat_index(place: Place, shape: Shape) -> UOp:
    """The row-major element number of a place."""
    return _merge_group(place.idxs, unbound_shape(shape)) if len(shape) != 1 else place.idxs[0]


def stripped(node: UOp) -> UOp:
    """The node below views that keep every element in its place."""
    while node.op in (Ops.RESHAPE, Ops.DETACH, Ops.CONTIGUOUS):
        node = node.src[0]
    return node


def contiguous_view(node: UOp) -> tuple[UOp, Sint] | None:
    """(BUFFER or AFTER, offset in elements) when the value is a plain run of existing memory, else None."""
    offset: Sint = 0
    while node.op not in (Ops.BUFFER, Ops.AFTER):
        if node.op is Ops.SHRINK and _is_run(node):
            strides = strides_of(node.src[0].shape)
            offset = offset + sum([start * stride for (start, _), stride in zip(node.arg, strides)])
        elif node.op not in (Ops.RESHAPE, Ops.DETACH, Ops.CONTIGUOUS, Ops.BITCAST):
            return None
        node = node.src[0]
    return node, offset


def fixed_view(node: UOp) -> tuple[UOp, int] | None:
    """`contiguous_view` at an offset that is a plain number, in the memory's own dtype; else None."""
    view = contiguous_view(node)
    if view is None or not isinstance(view[1], int) or view[0].dtype is not node.dtype:
        return None
    return view[0], view[1]


def memory_of(node: UOp) -> UOp:
    """The BUFFER below an AFTER, or a view of either."""
    while node.op is not Ops.BUFFER:
        node = node.src[0]
    return node


def _is_run(node: UOp) -> bool:
    """Whether a SHRINK keeps one run of memory: below the outermost axis of size > 1, every axis is whole."""
    seen = False
    for size, whole in zip(node.shape, node.src[0].shape):
        if seen and size is not whole and size != whole:
            return False
        seen = seen or not (isinstance(size, int) and size == 1)
    return not all_int(node.shape) or prod(node.shape) != 0


def index_dtype(value: UOp) -> UOp:
    """An integer value as an index."""
    return value if value.dtype is dtypes.index else UOp(Ops.CAST, dtypes.index, (value,))
