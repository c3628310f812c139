"""What stands between the brackets of `x[…]`: NumPy's rules, lowered to views, TAKE and placed writes. UOp
level."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from whit.helpers import IndexingError, ShapeError, argsort, prod
from whit.uop import DType, Ops, Shape, Sint, UOp, broadcast_shapes, dtypes
from whit.uop.symbolic import simplify
from whit.uop.uop import show_shape, show_size

# ---- sizes -------------------------------------------------------------------------------------------------


def actual(size: Sint) -> int | None:
    """The value that a size has in this call: bound variables take their values; None when one is not bound.
    """
    if isinstance(size, int):
        return size
    value = simplify(size.substitute({node: node.src[1] for node in size.toposort() if node.op is Ops.BIND}))
    return int(value.arg) if value.op is Ops.CONST else None


def plain(size: Sint) -> Sint:
    """The size in canonical form, as a Python int when it is a constant."""
    if isinstance(size, int):
        return size
    size = simplify(size)
    return int(size.arg) if size.op is Ops.CONST else size


# ---- the plan ----------------------------------------------------------------------------------------------


class AxisRead:
    """One axis of the source: the elements low, low + step, … (`length` of them), last first when `flip`."""

    __slots__ = ("flip", "length", "low", "step")

    def __init__(self, low: Sint, length: Sint, step: int = 1, flip: bool = False) -> None:
        self.low, self.length, self.step, self.flip = low, length, step, flip


class IndexArray:
    """An integer array in the brackets: its axis in the basic view; `known`: every element was checked to be
    inside."""

    __slots__ = ("axis", "known", "values")

    def __init__(self, axis: int, values: UOp, known: bool) -> None:
        self.axis, self.values, self.known = axis, values, known


class Selection:
    """A parsed index: the basic view, then the index arrays.

    layout: the axes of the basic view, each a source axis or None for a new one of size 1 (integers are
    dropped). place: how many of the axes that no array indexes come before the arrays' axes in the result.
    """

    __slots__ = ("arrays", "layout", "place", "reads", "source")

    def __init__(self, source: Shape, reads: list[AxisRead], layout: list[int | None],
                 arrays: list[IndexArray], place: int) -> None:
        self.source, self.reads, self.layout, self.arrays, self.place = source, reads, layout, arrays, place

    @property
    def basic_shape(self) -> Shape:
        return tuple([1 if axis is None else self.reads[axis].length for axis in self.layout])

    @property
    def kept(self) -> list[int]:
        """The axes of the basic view that no array indexes."""
        taken = {array.axis for array in self.arrays}
        return [axis for axis in range(len(self.layout)) if axis not in taken]

    @property
    def array_shape(self) -> Shape:
        """The common shape of the index arrays."""
        return _common_shape([array.values.shape for array in self.arrays])

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        basic = self.basic_shape
        if not self.arrays:
            return basic
        kept = [basic[axis] for axis in self.kept]
        return (*kept[:self.place], *self.array_shape, *kept[self.place:])

    @property
    def is_whole(self) -> bool:
        """Whether the basic view has every element of the source, in order."""
        return all(read.step == 1 and not read.flip and read.low == 0 and read.length == size
                   for read, size in zip(self.reads, self.source, strict=True))


def _common_shape(shapes: Sequence[Shape]) -> Shape:
    try:
        return broadcast_shapes(*shapes)
    except ShapeError as error:
        raise IndexingError("index with arrays of shapes " + " and ".join(show_shape(s) for s in shapes),
                            because=error.because, fix="give index arrays whose shapes broadcast") from None


# ---- reading and writing through a plan --------------------------------------------------------------------


def _window(read: AxisRead, size: Sint) -> tuple[Sint, Sint, int, int]:
    """(start, stop, zeros needed behind, offset): source[start:stop] and the zeros make `length` blocks of
    `step` elements, and the element at `offset` of each block is one that is read."""
    if read.step == 1:
        return read.low, plain(read.low + read.length), 0, 0
    assert isinstance(read.low, int) and isinstance(read.length, int), "a step needs plain limits"
    assert isinstance(size, int), "a step needs a plain size"
    width = read.length * read.step
    offset = max(0, read.low + width - size)
    if offset <= read.low:  # moving the window to the left avoids the zeros
        return read.low - offset, read.low - offset + width, 0, offset
    return read.low, size, read.low + width - size, 0


def is_view(selection: Selection) -> bool:
    """Whether the basic part is a chain of RESHAPE, SHRINK and FLIP (no PAD)."""
    return all(_window(read, size)[2] == 0 for read, size in zip(selection.reads, selection.source,
                                                                 strict=True))


def read_basic(source: UOp, selection: Selection) -> UOp:
    """The basic view. Shape: selection.basic_shape."""
    reads = selection.reads
    windows = [_window(read, size) for read, size in zip(reads, selection.source, strict=True)]
    u = source.reshape(selection.source).shrink(tuple([(start, stop) for start, stop, _, _ in windows]))
    u = u.pad(tuple([(0, behind) for _, _, behind, _ in windows]))
    if any(read.step > 1 for read in reads):
        blocks, picks = _blocks(reads, windows)
        u = u.reshape(blocks).shrink(picks).reshape(tuple([read.length for read in reads]))
    u = u.flip(tuple([axis for axis, read in enumerate(reads) if read.flip]))
    return u.reshape(selection.basic_shape)


def _blocks(reads: list[AxisRead], windows: list[tuple[Sint, Sint, int, int]]) -> tuple[Shape,
                                                                                        tuple[tuple[Sint,
                                                                                                    Sint],
                                                                                              ...]]:
    """Shape with each stepped axis split into (length, step), and the limits that pick one element of a
    block."""
    blocks: list[Sint] = []
    picks: list[tuple[Sint, Sint]] = []
    for read, (_, _, _, offset) in zip(reads, windows, strict=True):
        blocks.append(read.length)
        picks.append((0, read.length))
        if read.step > 1:
            blocks.append(read.step)
            picks.append((offset, offset + 1))
    return tuple(blocks), tuple(picks)


def place_basic(value: UOp, selection: Selection) -> UOp:
    """The inverse of `read_basic`: an array of the source's shape with `value` where the view reads, zeros
    elsewhere."""
    reads = selection.reads
    windows = [_window(read, size) for read, size in zip(reads, selection.source, strict=True)]
    u = value.reshape(tuple([read.length for read in reads]))
    u = u.flip(tuple([axis for axis, read in enumerate(reads) if read.flip]))
    if any(read.step > 1 for read in reads):
        blocks, picks = _blocks(reads, windows)
        single = tuple([plain(stop - start) for start, stop in picks])
        u = u.reshape(single).pad(tuple([(start, plain(size - stop)) for (start, stop),
                                         size in zip(picks, blocks, strict=True)]))
        u = u.reshape(tuple([read.length * read.step for read in reads]))
        u = u.shrink(tuple([(0, size - behind) for size,
                            (_, _, behind, _) in zip(u.shape, windows, strict=True)]))
    return u.pad(tuple([(start, plain(size - stop))
                        for (start, stop, _, _), size in zip(windows, selection.source, strict=True)]))


def read(source: UOp, selection: Selection) -> UOp:
    """The value of `source[…]`."""
    u = read_basic(source, selection)
    if not selection.arrays:
        return u
    rows, linear, place = _merge(u, selection, selection.place)
    return UOp(Ops.TAKE, u.dtype, (rows, linear), place)


def _merge(u: UOp, selection: Selection, place: int) -> tuple[UOp, UOp, int]:
    """The view with the indexed axes merged into one axis at `place`, and one array of positions along it."""
    axes, kept = [array.axis for array in selection.arrays], selection.kept
    order = (*kept[:place], *axes, *kept[place:])
    sizes = [u.shape[axis] for axis in axes]
    shape = [u.shape[axis] for axis in kept]
    merged = u.permute(order).reshape((*shape[:place], prod(sizes), *shape[place:]))
    if len(axes) == 1:
        array = selection.arrays[0]
        return merged, array.values if array.known else wrapped(array.values, sizes[0]), place
    return merged, _linear(selection.arrays, sizes), place


def wrapped(index: UOp, size: Sint) -> UOp:
    """The index as int32 or int64, with negative values counted from the end."""
    index = index.cast(dtypes.int64 if index.dtype.itemsize == 8 or index.dtype is dtypes.uint32
                       else dtypes.int32)
    if index.vmin >= 0:
        return index
    end = UOp.const(size, index.dtype) if isinstance(size, int) else size.cast(index.dtype)
    return index.lt(0).where(index + end, index)


def _linear(arrays: list[IndexArray], sizes: list[Sint]) -> UOp:
    """One position along the merged axes; -1, which reads 0, where any of the arrays is outside of its axis.
    """
    largest = UOp.index(prod(sizes)).vmax
    wide = largest > dtypes.int32.max or any(array.values.dtype.itemsize == 8 for array in arrays)
    dtype = dtypes.int64 if wide else dtypes.int32
    total: UOp | None = None
    valid: UOp | None = None
    for array, size in zip(arrays, sizes, strict=True):
        index = array.values.cast(dtype) if array.known else wrapped(array.values, size).cast(dtype)
        count = UOp.const(size, dtype) if isinstance(size, int) else size.cast(dtype)
        if not array.known:
            inside = index.ge(0) & index.lt(count)
            valid = inside if valid is None else valid & inside
        total = index if total is None else total * count + index
    assert total is not None, "no index arrays"
    return total if valid is None else valid.where(total, -1)


def write_arrays(u: UOp, selection: Selection, value: UOp) -> UOp:
    """The basic view `u` after `u[arrays] = value`; where a position occurs several times the last one wins.
    `value` has the selection's shape."""
    rows, linear, _ = _merge(u, selection, 0)
    rank, place = linear.ndim, selection.place
    order = (*range(place, place + rank), *range(place), *range(place + rank, value.ndim))
    count = plain(prod(linear.shape))
    updates = value.permute(order).reshape((count, *rows.shape[1:]))
    ones = (1,) * (rows.ndim - 1)
    winner = last_writer(linear.reshape((count,)), rows.shape[0])
    written = winner.ge(0).reshape((rows.shape[0], *ones))
    new = written.where(UOp(Ops.TAKE, value.dtype, (updates, winner), 0), rows)
    axes = [array.axis for array in selection.arrays]
    split = (*[u.shape[axis] for axis in axes], *rows.shape[1:])
    return new.reshape(split).permute(argsort((*axes, *selection.kept)))


def last_writer(index: UOp, size: Sint) -> UOp:
    """For each of `size` targets the last position of the 1-D `index` that names it, or -1. Shape (size,)."""
    from whit.tensor.scatter import is_large, last_positions  # a kernel by hand, which stands on this room

    count = index.shape[0]
    if isinstance(size, int) and is_large((size,), 0, count):
        return last_positions(index, size)
    hit = index.reshape((1, count)).equal(iota(size, index.dtype).reshape((size, 1)))  # (size, count)
    return hit.where(iota(count, dtypes.int32).reshape((1, count)),
                     UOp.const(-1, dtypes.int32)).reduce(Ops.MAX, (1,)) \
        if count != 0 else UOp.const(-1, dtypes.int32).reshape((1,)).expand((size,))


def iota(size: Sint, dtype: DType) -> UOp:
    """0, 1, … along one axis; of a symbolic size, the first part of the longest that it can be."""
    if isinstance(size, int):
        return UOp(Ops.IOTA, dtype, (), size)
    return UOp(Ops.IOTA, dtype, (), int(size.vmax)).shrink(((0, size),))


def simple_view(u: UOp, index: object) -> UOp | None:
    """The fast way for integers and slices without steps; None where anything else stands between the
    brackets."""
    items = index if type(index) is tuple else (index,)
    shape = u.shape
    if len(items) > len(shape):
        return None
    limits: list[tuple[Sint, Sint]] = []
    kept: list[Sint] = []
    for item, size in zip(items, shape, strict=False):
        if type(size) is not int:
            return None
        if type(item) is int:
            if not -size <= item < size:
                return None
            start = item + size if item < 0 else item
            limits.append((start, start + 1))
        elif type(item) is slice and item.step is None and {type(item.start), type(item.stop)} <= _PLAIN:
            start, stop, _ = item.indices(size)
            stop = max(start, stop)
            limits.append((start, stop))
            kept.append(stop - start)
        else:
            return None
    rest = shape[len(items):]
    return u.shrink((*limits, *[(0, size) for size in rest])).reshape((*kept, *rest))


_PLAIN = {int, type(None)}


# ---- parsing -----------------------------------------------------------------------------------------------

MakeArray = Callable[[list[int], tuple[int, ...]], UOp]


class _Data:
    """Integers known on the host, row-major."""

    __slots__ = ("shape", "values")

    def __init__(self, values: list[int], shape: tuple[int, ...]) -> None:
        self.values, self.shape = values, shape


class _Mask:
    """A bool array known on the host: the coordinates of its True elements, one list per axis of the mask."""

    __slots__ = ("coordinates", "shape", "total")

    def __init__(self, shape: tuple[int, ...], coordinates: list[list[int]], total: int) -> None:
        self.shape, self.coordinates, self.total = shape, coordinates, total


def select(shape: Shape, index: object, make_array: MakeArray) -> Selection:
    """Parse what stands between the brackets for a source of that shape.

    `make_array` turns host integers into an array. Errors: IndexingError for too many indices, integers
    outside of their axis, masks of the wrong shape, and anything that cannot index.
    """
    items = _items(index)
    consumed = sum(_axes_of(item) for item in items)
    if consumed > len(shape):
        raise IndexingError(f"{consumed} indices into shape {show_shape(shape)}",
                            because=f"it has {len(shape)} axes", fix="use fewer indices, or unsqueeze first")
    items = _without_ellipsis(items, len(shape) - consumed)
    builder = _Builder(shape, make_array, any(isinstance(item, (_Data, _Mask, UOp)) and not _is_index(item)
                                              for item in items))
    for item in items:
        builder.add(item)
    return builder.finish()


def _is_index(item: object) -> bool:
    return isinstance(item, UOp) and item.dtype is dtypes.index


def _items(index: object) -> list[object]:
    """One entry per index: None, Ellipsis, slice, int, UOp (symbolic if of dtype index, else an array), _Data
    or _Mask."""
    return [_item(item) for item in (index if isinstance(index, tuple) else (index,))]


def _item(item: Any) -> object:
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, bool):
        return _mask([item], ())
    if isinstance(item, int):
        return item
    uop = item if isinstance(item, UOp) else getattr(item, "uop", None)
    if isinstance(uop, UOp):
        return _checked_array(uop)
    if type(item).__module__.partition(".")[0] == "numpy":
        return _numpy_item(item)
    if isinstance(item, (list, tuple, range)):
        return _nested(item)
    if hasattr(item, "__index__"):
        return item.__index__()
    raise IndexingError(f"index with {item!r}", because=f"a {type(item).__name__} is no index",
                        fix="use integers, slices, None, ..., or arrays of integers")


def _checked_array(uop: UOp) -> UOp:
    if not uop.dtype.is_int:
        raise IndexingError(f"index with a tensor of dtype {uop.dtype}", because="indices are integers",
                            fix="cast it to dtypes.int32")
    return uop


def _numpy_item(item: Any) -> object:
    if item.ndim == 0:
        return _item(item.item())
    if item.dtype.kind == "b":
        return _mask(item.ravel().tolist(), item.shape)
    if item.dtype.kind in "iu" or item.size == 0:
        return _Data([int(value) for value in item.ravel().tolist()], tuple(item.shape))
    raise IndexingError(f"index with a NumPy array of dtype {item.dtype}",
                        because="indices are integers or bools",
                        fix="convert it with astype(int)")


def _nested(item: Sequence[Any]) -> object:
    values: list[Any] = []
    shape = _fill(item, values)
    if values and all(isinstance(value, bool) for value in values):
        return _mask(values, shape)
    return _Data([_whole(value) for value in values], shape)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise IndexingError(f"index with a list that contains {value!r}",
                            because="indices are all integers or all bools",
                            fix="convert its elements first")
    return int(value.__index__())


def _fill(item: Any, values: list[Any]) -> tuple[int, ...]:
    """Append the scalars of a nested list to `values`; returns its shape."""
    if not isinstance(item, (list, tuple, range)):
        values.append(item.item() if hasattr(item, "item") else item)
        return ()
    inner = {_fill(part, values) for part in item}
    if len(inner) > 1:
        raise IndexingError(f"index with {item!r}", because="its rows have different lengths",
                            fix="make them equally long")
    return (len(item), *(inner.pop() if inner else ()))


def _mask(values: list[bool], shape: tuple[int, ...]) -> _Mask:
    chosen = [position for position, value in enumerate(values) if value]
    coordinates: list[list[int]] = []
    block = prod(shape)
    for size in shape:
        block = block // size if size else 0
        coordinates.append([position // block % size for position in chosen])
    return _Mask(shape, coordinates, len(chosen))


def _axes_of(item: object) -> int:
    if item is None or item is Ellipsis:
        return 0
    return len(item.shape) if isinstance(item, _Mask) else 1


def _without_ellipsis(items: list[object], missing: int) -> list[object]:
    """Write out `...` (or the end, if there is none) as full slices."""
    places = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(places) > 1:
        raise IndexingError("index with more than one ...",
                            because="it could stand for any split of the axes", fix="keep one")
    place = places[0] if places else len(items)
    full: Iterable[object] = [slice(None)] * missing
    # a marker (None, 0 axes) keeps `x[a, ..., b]` separated even when ... stands for nothing
    return [*items[:place], *([_GAP] if places else []), *full, *items[place + len(places):]]


class _Gap:
    """Stands for an ellipsis: it separates index arrays, as in NumPy, though it makes no axis itself."""


_GAP = _Gap()


class _Builder:
    """Collects a Selection item by item."""

    def __init__(self, shape: Shape, make_array: MakeArray, has_arrays: bool) -> None:
        self.shape, self.make_array, self.has_arrays = shape, make_array, has_arrays
        self.source: list[Sint] = []  # grows by an axis of size 1 for a scalar bool
        self.reads: list[AxisRead] = []
        self.layout: list[int | None] = []
        self.arrays: list[IndexArray] = []
        self.position = 0  # among the indices, to see which arrays stand side by side
        self.advanced: list[int] = []
        self.place = 0
        self.next = 0  # the axis of `shape` that comes next

    def add(self, item: object) -> None:
        if item is None:
            self.layout.append(None)
        elif isinstance(item, slice):
            size = self.shape[self.next]
            self._axis(slice_read(item, size, self.next))
        elif isinstance(item, int) or _is_index(item):
            self._mark()
            self._axis(AxisRead(self._integer(item), 1), dropped=True)
        elif isinstance(item, _Data):
            self._mark()
            self._array(item.values, item.shape)
        elif isinstance(item, _Mask):
            self._mark()
            self._mask(item)
        elif isinstance(item, UOp):
            self._mark()
            self._index_array(item, known=False)
        self.position += 1

    def _mark(self) -> None:
        """Integers count as arrays of rank 0 when there are arrays."""
        if self.has_arrays:
            if not self.advanced:
                self.place = len(self.layout) - len(self.arrays)
            self.advanced.append(self.position)

    def _axis(self, read: AxisRead, dropped: bool = False) -> None:
        if not dropped:
            self.layout.append(len(self.reads))
        self.reads.append(read)
        self.source.append(self.shape[self.next])
        self.next += 1

    def _index_array(self, index: UOp, known: bool) -> None:
        self.arrays.append(IndexArray(len(self.layout), index, known))
        self._axis(AxisRead(0, self.shape[self.next]))

    def _integer(self, item: object) -> Sint:
        assert isinstance(item, (int, UOp)), "an integer"
        size = self.shape[self.next]
        value, length = actual(item), actual(size)
        if value is not None and length is not None and not -length <= value < length:
            raise IndexingError(f"index {value} into axis {self.next} of {show_shape(self.shape)}",
                                because=f"it must be from {-length} to {length - 1}" if length
                                else "the axis is empty",
                                fix="use an index within the axis")
        if isinstance(item, int):
            return item if item >= 0 else plain(size + item)
        if value is not None and value < 0:
            return plain(size + item)
        return plain(item)

    def _array(self, values: list[int], shape: tuple[int, ...]) -> None:
        size = self.shape[self.next]
        length = size if isinstance(size, int) else int(UOp.index(size).vmin)
        for value in values:
            if not -length <= value < length:
                raise IndexingError(f"index {value} into axis {self.next} of {show_shape(self.shape)}",
                                    because=f"it must be from {-length} to {length - 1}" if length
                                    else "the axis is empty",
                                    fix="use indices within the axis")
        if isinstance(size, int):
            self._index_array(self.make_array([value % size for value in values], shape), known=True)
        else:
            self._index_array(self.make_array(values, shape), known=False)

    def _mask(self, mask: _Mask) -> None:
        if not mask.shape:  # x[True] and x[False]: a new axis of size 1 or 0
            self.source.append(1)
            self.reads.append(AxisRead(0, 1))
            self.arrays.append(IndexArray(len(self.layout), self.make_array([0] * mask.total, (mask.total,)),
                                          True))
            self.layout.append(len(self.reads) - 1)
            return
        wanted = self.shape[self.next:self.next + len(mask.shape)]
        if mask.shape != wanted:
            raise IndexingError(
                f"index with a mask of shape {show_shape(mask.shape)} at axis {self.next} of "
                f"{show_shape(self.shape)}",
                because=f"the axes that it covers are {show_shape(wanted)}",
                fix="give a mask of that shape")
        for coordinates in mask.coordinates:
            self._index_array(self.make_array(coordinates, (mask.total,)), known=True)

    def finish(self) -> Selection:
        side_by_side = all(b == a + 1 for a, b in zip(self.advanced, self.advanced[1:]))
        return Selection(tuple(self.source), self.reads, self.layout, self.arrays, self.place if side_by_side
                         else 0)


def slice_read(item: slice, size: Sint, axis: int) -> AxisRead:
    """A slice of an axis of that size; Python's clamping where everything is a plain integer."""
    start, stop, step = [_bound(part) for part in (item.start, item.stop, item.step)]
    if step == 0 or isinstance(step, UOp):
        raise IndexingError(f"slice of axis {axis} with step {show_size(step)}",
                            because="a step is a whole number other than 0",
                            fix="use 1 or -1, or another step that is known now")
    if isinstance(size, int) and not isinstance(start, UOp) and not isinstance(stop, UOp):
        first, last, stride = slice(start, stop, step).indices(size)
        count = len(range(first, last, stride))
        if count == 0:
            return AxisRead(0, 0)
        low = first if stride > 0 else first + (count - 1) * stride
        return AxisRead(low, count, abs(stride) if count > 1 else 1, stride < 0 and count > 1)
    if step not in (None, 1):
        raise IndexingError(f"slice of axis {axis} with step {step}", because="its limits are symbolic",
                            fix="slice with step 1 first, then flip or step over a size that is known")
    return _symbolic_slice(start, stop, size, axis)


def _bound(part: Any) -> int | UOp | None:
    if part is None or isinstance(part, int):
        return None if part is None else int(part)
    uop = part if isinstance(part, UOp) else getattr(part, "uop", None)
    if isinstance(uop, UOp) and uop.dtype is dtypes.index:
        return uop
    if hasattr(part, "__index__"):  # the value of a tensor is read now, as the shape depends on it
        return int(part.__index__())
    raise IndexingError(f"slice with {part!r}", because="limits of slices are integers or Variables",
                        fix="pass an integer, or an integer tensor of one element")


def _symbolic_slice(start: int | UOp | None, stop: int | UOp | None, size: Sint, axis: int) -> AxisRead:
    def absolute(part: int | UOp | None, default: Sint) -> Sint:
        if part is None:
            return default
        return plain(size + part) if isinstance(part, int) and part < 0 else plain(part)

    low, high = absolute(start, 0), absolute(stop, size)
    if isinstance(high, int) and isinstance(size, int):
        high = min(high, size)
    values = actual(low), actual(high), actual(size)
    if all(value is not None
           for value in values) and not 0 <= values[0] <= values[1] <= values[2]:  # type: ignore[operator]
        raise IndexingError(f"slice {values[0]}:{values[1]} of axis {axis} with {values[2]} elements",
                            because="symbolic limits are not clamped", fix="keep 0 <= start <= stop <= size")
    return AxisRead(low, plain(high - low))
