"""Reading and writing parts of a tensor: brackets, gather and scatter, masks."""
from __future__ import annotations

from typing import Any, Self

from whit.helpers import CHECK, ArgumentError, DTypeError, IndexingError, ShapeError, all_int, prod
from whit.tensor.base import TensorBase, check_devices, scalar_shape
from whit.tensor.random import RandomMixin
from whit.tensor.scatter import add_slices, is_large
from whit.tensor.selection import (
    Selection,
    actual,
    iota,
    is_view,
    last_writer,
    place_basic,
    plain,
    read,
    read_basic,
    select,
    simple_view,
    wrapped,
    write_arrays,
)
from whit.tensor.storage import is_overwritten, next_version
from whit.uop import Op, Ops, Shape, Sint, UOp, dtypes
from whit.uop.uop import show_shape

NARROW = (dtypes.float16, dtypes.bfloat16, *dtypes.fp8s)  # added up in float32


class IndexingMixin(RandomMixin):
    """Methods of the indexing family."""

    # ---- brackets

    def _selection(self, index: object) -> Selection:
        def make_array(values: list[int], shape: tuple[int, ...]) -> UOp:
            from whit.tensor.tensor import buffer_of, pack
            dtype = dtypes.int64 if any(value > dtypes.int32.max for value in values) else dtypes.int32
            return buffer_of(memoryview(pack(values, dtype)), shape, dtype, self.device)
        selection = select(self.uop.shape, _masks_read(index), make_array)
        if CHECK:
            for array in selection.arrays:
                axis = selection.layout[array.axis]
                if not array.known and axis is not None:
                    self._check_inside("index", axis, self._wrap(array.values))
        return selection

    def _check_inside(self, what: str, axis: int, index: TensorBase) -> None:
        """CHECK=1: read the index and raise IndexingError for the first element outside of an axis."""
        if any([node.op is Ops.PARAM for node in index.uop.toposort()]):
            return  # it depends on the arguments of a traced function, which have no values
        import numpy as np
        size = actual(self.uop.shape[axis])
        values = _values(index, what)
        outside = np.argwhere((values < -size) | (values >= size)) if size is not None else None
        if outside is not None and len(outside):
            position = tuple(outside[0].tolist())
            raise IndexingError(
                f"{what}: {values[position]} at position {show_shape(position)} of an index tensor of shape "
                f"{show_shape(index.shape)}, into axis {axis} of {show_shape(self.uop.shape)}",
                because=f"it must be from {-size} to {size - 1}" if size else "the axis is empty",
                fix="correct the index (found as CHECK=1; without it reads give 0 and writes are dropped)")

    def __getitem__(self, index: Any) -> Self:
        """x[…] by NumPy's rules: integers, slices with any step, None, ..., integer and bool arrays, lists
        and tensors, Variables. Views cost nothing. A bool tensor is computed now, since the size of the
        result depends on it. A value of an integer tensor that is outside of its axis reads 0; with CHECK=1
        it raises IndexingError, which names it.

        Errors: IndexingError for what is outside of its axis, and for anything that is no index.

        >>> x = Tensor([[1, 2, 3], [4, 5, 6]])
        >>> x[-1, ::2].tolist(), x[:, [2, 0]].tolist()
        ([4, 6], [[3, 1], [6, 4]])
        """
        view = simple_view(self.uop, index)
        if view is not None:
            return self._wrap(view)
        if isinstance(index, TensorBase) and index.uop.dtype.is_bool and self._fits(index):
            places = index.reshape(-1).nonzero().reshape(-1)  # type: ignore[attr-defined]  # a Tensor's
            rows = self.uop.reshape((index.uop.size, *self.shape[index.ndim:]))
            return self._wrap(UOp(Ops.TAKE, rows.dtype, (rows, places.uop), 0))
        selection = self._selection(index)
        if selection.arrays:
            check_devices("index", self.uop, *[array.values for array in selection.arrays])
            selection.array_shape  # noqa: B018  # raises if they do not broadcast
        return self._wrap(read(self.uop, selection))

    def __setitem__(self, index: Any, value: Any) -> None:
        """x[…] = value. A tensor in memory is overwritten in place when the place is a view; whoever read it
        before keeps what it read. Where an index array names a position twice the last value stays; what an
        integer tensor names outside of its axis is dropped (CHECK=1: IndexingError).

        Shapes: value broadcasts to the shape of x[index]. Dtype: value is converted to x's.

        >>> x = Tensor.zeros(2, 3)
        >>> x[:, 1] = 5
        >>> x.tolist()
        [[0.0, 5.0, 0.0], [0.0, 5.0, 0.0]]
        """
        mask = getattr(index, "uop", None)
        if isinstance(mask, UOp) and mask.dtype.is_bool:
            value = self._of(value)
            rest = mask.ndim <= self.ndim and self.shape[mask.ndim:]
            if value.ndim <= len(rest or ()) or value.shape[0] == 1:  # no need to know the mask
                self.uop = self._masked_write(mask, value)
                return
            spread = self._spread(index, value)
            if spread is not None:
                self.uop = spread
                return
        selection = self._selection(index)
        new = self._value_for(value, selection.shape)
        check_devices("write", self.uop, new, *[array.values for array in selection.arrays])
        if selection.arrays:
            new = write_arrays(read_basic(self.uop, selection), selection, new)
        self.uop = _write_basic(self.uop, selection, new)

    def _fits(self, mask: TensorBase) -> bool:
        """Whether a bool tensor covers leading axes exactly, whose sizes are known."""
        shape = mask.uop.shape
        return bool(shape) and all_int(shape) and shape == self.uop.shape[:len(shape)]

    def _spread(self, mask: Any, value: Any) -> UOp | None:
        """x[mask] = value for a value for each place that the mask selects: the mask's running count says
        which one. None where the shapes do not say so."""
        rest = self.shape[mask.ndim:]
        if not self._fits(mask) or value.shape[1:] != rest:
            return None
        count = int(mask.cast(dtypes.int32).sum().item())
        if value.shape[0] != count:
            raise ShapeError(
                f"write a value of shape {show_shape(value.shape)} through a mask that selects {count}",
                because="the value does not broadcast to the places",
                fix="give one value, or one for each place")
        which = mask.reshape(-1).cast(dtypes.int32).cumsum() - 1
        taken = UOp(Ops.TAKE, self.dtype, (value.cast(self.dtype).uop, which.uop), 0).reshape(self.shape)
        wide = mask.uop.reshape((*mask.shape, *(1,) * len(rest)))
        return overwritten(self.uop, wide.alu(Ops.WHERE, taken, self.uop))

    def _value_for(self, value: Any, shape: Shape) -> UOp:
        """The value to be written, in this dtype, with exactly that shape."""
        uop = self._of(value).uop
        if uop.dtype is not self.uop.dtype:
            uop = uop.cast(self.uop.dtype)
        given = uop.shape
        while len(uop.shape) > len(shape) and uop.shape[0] == 1:  # as NumPy does
            uop = uop.reshape(uop.shape[1:])
        padded = (1,) * (len(shape) - uop.ndim) + uop.shape
        if len(padded) != len(shape) or any(a != b and a != 1 for a, b in zip(padded, shape, strict=True)):
            raise ShapeError(
                f"write a value of shape {show_shape(given)} into a place of shape {show_shape(shape)}",
                because="the value does not broadcast to the place",
                fix="reshape or expand the value")
        return uop.reshape(padded).expand(shape)

    def _masked_write(self, mask: UOp, value: Any) -> UOp:
        """x[mask] = value for a bool tensor: possible without knowing the mask when one value serves all
        places."""
        shape, rank = self.uop.shape, mask.ndim
        if mask.shape != shape[:rank]:
            raise IndexingError(
                f"write through a mask of shape {show_shape(mask.shape)} into shape {show_shape(shape)}",
                because="the mask must cover the leading axes exactly", fix="expand the mask")
        rest = shape[rank:]
        placed = self._value_for(value, (1, *rest)).reshape((*(1,) * rank, *rest))
        wide = mask.reshape((*shape[:rank], *(1,) * len(rest)))
        return overwritten(self.uop, wide.alu(Ops.WHERE, placed, self.uop))

    # ---- along one axis

    def take(self, indices: Any, axis: int | None = None, *, dim: int | None = None) -> Self:
        """Elements by number along an axis, or of the flattened tensor (NumPy's `take`). Shape: the axis
        becomes indices.shape.

        >>> Tensor([[1, 2], [3, 4]]).take([3, 0]).tolist()
        [4, 1]
        """
        axis = dim if axis is None else axis
        if axis is None:
            return self._wrap(self.uop.reshape((prod(self.uop.shape),)))[_as_index(indices)]
        return self[(*(slice(None),) * self._axis(axis, "take"), _as_index(indices))]

    def index_select(self, dim: int, index: Any) -> Self:
        """Slices along `dim` by number. Shapes: index (k,) -> size k along dim.

        >>> Tensor([[1, 2], [3, 4]]).index_select(1, Tensor([1, 1])).tolist()
        [[2, 2], [4, 4]]
        """
        index = self._of(index)
        if index.ndim > 1:
            raise ShapeError(f"index_select with an index of shape {show_shape(index.shape)}",
                             because="the index has one axis",
                             fix="flatten it, or use take")
        return self[(*(slice(None),) * self._axis(dim, "index_select"), index.reshape(-1))]

    def gather(self, dim: int, index: Any) -> Self:
        """out[i][j][k] = x[i][index[i][j][k]][k] for dim 1 (PyTorch's `gather`).

        Shapes: index has x's rank, and no more than x's size along every axis but dim. Result: index.shape,
        x.dtype.

        >>> Tensor([[1, 2], [3, 4]]).gather(1, Tensor([[0, 0], [1, 0]])).tolist()
        [[1, 1], [4, 3]]
        """
        index = self._of(index)
        axis = self._axis(dim, "gather")
        self._check_along("gather", axis, index)
        return self._wrap(gather_uop(self.uop, axis, index.uop))

    def take_along_dim(self, indices: Any, dim: int | None = None) -> Self:
        """`gather` with broadcasting; without dim over the flattened tensors (NumPy's take_along_axis).

        >>> x = Tensor([[30, 10, 20]])
        >>> x.take_along_dim(Tensor([[1, 2, 0]]), 1).tolist()
        [[10, 20, 30]]
        """
        index = self._of(indices)
        if dim is None:
            return self.reshape(-1).gather(0, index.reshape(-1))
        axis = self._axis(dim, "take_along_dim")
        if index.ndim != self.ndim:
            raise ShapeError(
                f"take_along_dim of shape {show_shape(self.shape)} with indices {show_shape(index.shape)}",
                because="both must have the same number of axes",
                fix="unsqueeze the smaller one")
        both = [max_size(a, b) for a, b in zip(self.shape, index.shape, strict=True)]
        mine = [self.shape[i] if i == axis else both[i] for i in range(self.ndim)]
        theirs = [index.shape[i] if i == axis else both[i] for i in range(self.ndim)]
        return self.expand(*mine).gather(axis, index.expand(*theirs))

    def _check_along(self, what: str, axis: int, index: TensorBase, src: TensorBase | None = None) -> None:
        """What gather and scatter ask of the index (and of the source)."""
        if not index.uop.dtype.is_int:
            raise DTypeError(f"{what} with an index of dtype {index.dtype}", because="indices are integers",
                             fix="cast the index")
        fits = index.ndim == self.ndim and all(i == axis or a is b or a == b
                                               or (isinstance(a, int) and isinstance(b, int) and a <= b)
                                               for i, (a, b) in enumerate(zip(index.shape, self.shape,
                                                                              strict=True)))
        if not fits:
            raise ShapeError(
                f"{what} along axis {axis} of shape {show_shape(self.shape)} with an index of shape "
                f"{show_shape(index.shape)}",
                because="the index must have the same rank, and no axis but that one may be longer",
                fix="expand or shrink the index")
        if CHECK:
            self._check_inside(what, axis, index)
        if src is not None and (src.ndim != index.ndim or any(a is not b and a > b for a,
                                                              b in zip(index.shape, src.shape, strict=True))):
            raise ShapeError(
                f"{what} with an index of shape {show_shape(index.shape)} from a source of shape "
                f"{show_shape(src.shape)}",
                because="every index needs an element of the source",
                fix="give a source at least as large as the index")
        check_devices(what, self.uop, index.uop, *([] if src is None else [src.uop]))

    # ---- scatter

    def _scatter_operands(self, what: str, dim: int, index: Any, src: Any) -> tuple[UOp, UOp]:
        """(hits, updates): `hits` (…, M at axis, …, K) says which of the K updates go to which of the M
        places."""
        axis, index = self._axis(dim, what), self._of(index)
        shape: Shape = index.uop.shape
        if isinstance(src, (bool, int, float)):
            self._check_along(what, axis, index)
            update = UOp.const(src, self.uop.dtype).reshape((1,) * len(shape)).expand(shape)
        else:
            source = self._of(src)
            self._check_along(what, axis, index, source)
            if source.dtype is not self.dtype:
                raise DTypeError(f"{what} of dtype {source.dtype} into {self.dtype}",
                                 because="both must be of one dtype",
                                 fix="cast the source")
            update = source.uop.shrink(tuple([(0, size) for size in shape]))
        return hits_of(index.uop, axis, self.uop.shape[axis]), rows_last(update, axis)

    def scatter(self, dim: int, index: Any, src: Any, reduce: str | None = None) -> Self:
        """A copy with x[i][index[i][j][k]][k] = src[i][j][k] for dim 1; of several writes to one place the
        last stays, or with reduce="add" or "multiply" all are combined with the old value.

        Shapes: index has x's rank; src (a tensor at least as large as index, or a scalar). Result: like x.

        >>> Tensor.zeros(4, dtype="int32").scatter(0, Tensor([1, 3]), Tensor([7, 9], dtype="int32")).tolist()
        [0, 7, 0, 9]
        """
        if reduce in ("add", "multiply"):
            return self.scatter_reduce(dim, index, src, "sum" if reduce == "add" else "prod")
        if reduce is not None:
            raise ArgumentError(f"scatter with reduce={reduce!r}", because="there is no such reduction",
                                fix='use "add", "multiply" or None')
        hits, updates = self._scatter_operands("scatter", dim, index, src)
        axis, where = self._axis(dim, "scatter"), self._of(index).uop
        if 0 not in where.shape and is_large(self.uop.shape, axis, where.size):
            places, values = self._flat_updates(axis, where, src)
            winner = last_writer(places, prod(self.shape))
            new = UOp(Ops.TAKE, self.uop.dtype, (values, winner), 0).reshape(self.uop.shape)
            return self._wrap(winner.ge(0).reshape(self.uop.shape).where(new, self.uop))
        return self._wrap(overwrite(self.uop, hits, updates))

    def scatter_reduce(self, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Self:
        """A copy where everything that `src` sends to a place is combined: reduce is "sum", "prod", "mean",
        "amax" or "amin"; include_self: with the old value too. Places that nothing is sent to keep their
        value.

        >>> x, i = Tensor([1.0, 2.0]), Tensor([0, 0])
        >>> x.scatter_reduce(0, i, Tensor([5.0, 7.0]), "mean", include_self=False).tolist()
        [6.0, 2.0]
        """
        ops = {"sum": Ops.ADD, "mean": Ops.ADD, "prod": Ops.MUL, "amax": Ops.MAX, "amin": Ops.MIN}
        if reduce not in ops:
            raise ArgumentError(f"scatter_reduce with reduce={reduce!r}",
                                because="there is no such reduction",
                                fix="use one of " + ", ".join(ops))
        hits, updates = self._scatter_operands("scatter_reduce", dim, index, src)
        axis, where = self._axis(dim, "scatter_reduce"), self._of(index).uop
        adds = reduce == "sum" and include_self and not self.dtype.is_bool and 0 not in where.shape
        if adds and is_large(self.uop.shape, axis, where.size):
            places, values = self._flat_updates(axis, where, src)
            total = add_slices(places, values, 0, prod(self.shape))
            return self._wrap(self.uop + total.reshape(self.uop.shape))
        return self._wrap(combine(self.uop, hits, updates, ops[reduce], include_self, reduce == "mean"))

    def _flat_updates(self, axis: int, index: UOp, src: Any) -> tuple[UOp, UOp]:
        """Where each element of an index along an axis points, in x as one row, and what is sent there."""
        count = index.size
        if isinstance(src, (bool, int, float)):
            values = UOp.const(src, self.uop.dtype).reshape((1,)).expand((count,))
        else:
            values = self._of(src).uop.shrink(tuple([(0, size) for size in index.shape])).reshape((count,))
        return places_of(self.uop.shape, axis, index).reshape((count,)), values

    def scatter_add(self, dim: int, index: Any, src: Any) -> Self:
        """`scatter_reduce` with "sum"."""
        return self.scatter_reduce(dim, index, src, "sum")

    def put_along_dim(self, indices: Any, values: Any, dim: int) -> Self:
        """A copy with values written where `take_along_dim` would read; values broadcast.

        >>> Tensor([[1, 2, 3]]).put_along_dim(Tensor([[0, 2]]), 9, 1).tolist()
        [[9, 2, 9]]
        """
        index = self._of(indices)
        if not isinstance(values, (bool, int, float)):
            values = self._of(values).cast(self.dtype).expand(*index.shape)
        return self.scatter(dim, index, values)

    def _rows(self, what: str, dim: int, index: Any, source: Any) -> tuple[UOp, UOp]:
        """hits and updates of index_add and index_copy, where a 1-D index speaks about whole slices."""
        axis, index, source = self._axis(dim, what), self._of(index), self._of(source)
        shape = self.uop.shape
        wanted = (*shape[:axis], index.uop.size, *shape[axis + 1:])
        if index.ndim > 1 or not index.dtype.is_int or source.shape != wanted:
            raise ShapeError(
                f"{what} along axis {axis} of {show_shape(shape)}: index {index.dtype} "
                f"{show_shape(index.shape)}, "
                f"source {show_shape(source.shape)}",
                because=f"it takes a 1-D integer index and a source of {show_shape(wanted)}",
                fix="reshape the source, or cast and flatten the index")
        check_devices(what, self.uop, index.uop, source.uop)
        if CHECK:
            self._check_inside(what, axis, index)
        row = index.uop.reshape(tuple([index.uop.size if i == axis else 1 for i in range(len(shape))]))
        return hits_of(row, axis, shape[axis]), rows_last(source.uop.cast(self.dtype), axis)

    def index_add(self, dim: int, index: Any, source: Any, alpha: float = 1) -> Self:
        """A copy with alpha * source[i] added to slice index[i] along dim; repeated indices add up.

        >>> Tensor([1.0, 2.0]).index_add(0, Tensor([1, 1]), Tensor([10.0, 20.0])).tolist()
        [1.0, 32.0]
        """
        hits, updates = self._rows("index_add", dim, index, source)
        axis, index, source = self._axis(dim, "index_add"), self._of(index), self._of(source)
        if is_large(self.uop.shape, axis, index.uop.size) and not self.dtype.is_bool:
            scaled = source.uop.cast(self.dtype) if alpha == 1 else (source.uop * alpha).cast(self.dtype)
            length = self.uop.shape[axis]
            assert isinstance(length, int), "is_large"
            flat = wrapped(index.uop.reshape((index.uop.size,)), length)
            return self._wrap(self.uop + add_slices(flat, scaled, axis, length))
        updates = updates if alpha == 1 else updates * alpha
        return self._wrap(combine(self.uop, hits, updates, Ops.ADD, True, False))

    def index_copy(self, dim: int, index: Any, source: Any) -> Self:
        """A copy with slice index[i] along dim replaced by source[i]; of repeated indices the last stays."""
        hits, updates = self._rows("index_copy", dim, index, source)
        axis, index, source = self._axis(dim, "index_copy"), self._of(index), self._of(source)
        length = self.uop.shape[axis]
        if isinstance(length, int) and is_large(self.uop.shape, axis, index.uop.size):
            winner = last_writer(wrapped(index.uop.reshape((index.uop.size,)), length), length)
            new = UOp(Ops.TAKE, self.uop.dtype, (source.uop.cast(self.dtype), winner), axis)
            return self._wrap(_along(winner.ge(0), axis, self.ndim).where(new, self.uop))
        return self._wrap(overwrite(self.uop, hits, updates))

    # ---- masks

    def masked_select(self, mask: Any) -> Self:
        """The elements where the mask holds, as one axis. The mask is computed now, since the size depends on
        it.

        >>> x = Tensor([1, 5, 3])
        >>> x.masked_select(x > 2).tolist()
        [5, 3]
        """
        import numpy as np
        mask = self._of(mask)
        shape = tuple(np.broadcast_shapes(self.shape, mask.shape))
        where = np.flatnonzero(np.broadcast_to(_values(mask, "masked_select"), shape))
        return self.expand(*shape).reshape(-1)[where]

    def nonzero(self) -> Self:
        """The coordinates of the elements that are not 0, computed now. Shape (count, ndim), int32.

        >>> Tensor([[0, 7], [8, 0]]).nonzero().tolist()
        [[0, 1], [1, 0]]
        """
        import numpy as np
        found = np.argwhere(_values(self, "nonzero"))
        return self._of(found.astype(np.int32))

    def one_hot(self, num_classes: int = -1) -> Self:
        """Zeros with a one at each element's position along a new last axis, int32. -1: the largest element +
        1, computed now.

        >>> Tensor([0, 2]).one_hot(3).tolist()
        [[1, 0, 0], [0, 0, 1]]
        """
        if not self.dtype.is_int:
            raise DTypeError(f"one_hot of dtype {self.dtype}", because="classes are integers",
                             fix="cast to an integer dtype")
        if num_classes == -1:
            num_classes = int(_values(self, "one_hot").max(initial=-1)) + 1
        index = self.uop.cast(dtypes.int64 if self.dtype.itemsize == 8 or self.dtype is dtypes.uint32
                              else dtypes.int32)
        hit = index.reshape((*index.shape, 1)).equal(iota(num_classes, index.dtype))
        return self._wrap(hit.cast(dtypes.default_int))


# ---- on nodes ----------------------------------------------------------------------------------------------


def _masks_read(index: object) -> object:
    """The index with bool tensors replaced by their values: what they select depends on them."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, TensorBase) and item.uop.dtype.is_bool for item in items):
        return index
    return tuple([_values(item, "index") if isinstance(item, TensorBase) and item.uop.dtype.is_bool else item
                  for item in items])


def _as_index(indices: Any) -> Any:
    return list(indices) if isinstance(indices, tuple) else indices


def _values(tensor: TensorBase, what: str) -> Any:
    """The elements on the host, for calls whose result's size depends on them."""
    if any(not isinstance(size, int) for size in tensor.shape):
        raise ShapeError(f"{what} of shape {show_shape(tensor.shape)}",
                         because="the size of the result depends on the values",
                         fix="shrink it to sizes that are known")
    return tensor.numpy()  # type: ignore[attr-defined]  # Tensor's


def max_size(a: Sint, b: Sint) -> Sint:
    """The size that two axes broadcast to, if they do."""
    return b if isinstance(a, int) and a == 1 else a


def _write_basic(target: UOp, selection: Selection, value: UOp) -> UOp:
    """The next version of `target` with `value` in the basic view: in place if it lies in memory, else
    composed."""
    value = value.reshape(selection.basic_shape)
    memory = memory_below(target)
    if memory is not None and is_view(selection):
        view = read_basic(target, selection)
        return next_version(memory, view, value).reshape(target.shape)
    if selection.is_whole:
        return overwritten(target, value.reshape(target.shape))
    here = scalar_shape(UOp.const(True, dtypes.bool), selection.basic_shape)
    written = place_basic(here, selection).reshape(target.shape)
    placed = place_basic(value, selection).reshape(target.shape)
    return overwritten(target, written.alu(Ops.WHERE, placed, target))


def overwritten(target: UOp, value: UOp) -> UOp:
    """The next version of `target`, all of it: in its memory if it has any, else just the value."""
    memory = memory_below(target)
    if memory is None:
        return value
    return next_version(memory, target, value).reshape(target.shape)


def in_memory(uop: UOp) -> bool:
    """Whether a node is what AFTER may write: a BUFFER, a RESHAPE of one, or an earlier version of either."""
    while uop.op is Ops.AFTER:
        uop = uop.src[0]
    return uop.op is Ops.BUFFER or (uop.op is Ops.RESHAPE and uop.src[0].op is Ops.BUFFER)


def memory_below(uop: UOp) -> UOp | None:
    """The BUFFER, or the latest version of one, that a node is a RESHAPE of; None if it is anything else, or
    if another tensor that shares the memory writes to it."""
    while uop.op is Ops.RESHAPE:
        uop = uop.src[0]
    return uop if uop.op in (Ops.BUFFER, Ops.AFTER) and not is_overwritten(uop) else None


def rows_last(u: UOp, axis: int) -> UOp:
    """(…, k, …) as (…, 1, …, k): the axis moved to the end, size 1 in its place."""
    order = (*[i for i in range(u.ndim) if i != axis], axis)
    shape = u.shape
    return u.permute(order).reshape((*shape[:axis], 1, *shape[axis + 1:], shape[axis]))


def hits_of(index: UOp, axis: int, size: Sint) -> UOp:
    """Which of the k indices along `axis` name which of `size` places: bool (…, size at axis, …, k)."""
    last = rows_last(wrapped(index, size), axis)
    return last.equal(iota(size, last.dtype).reshape(tuple([size if i == axis else 1
                                                            for i in range(last.ndim)])))


def gather_uop(x: UOp, axis: int, index: UOp) -> UOp:
    """`gather` on nodes. A few floats are picked by comparison, which makes the gradient as cheap as the
    forward pass; everything else by position."""
    shape, size = index.shape, x.shape[axis]
    others = [n for i, n in enumerate(shape) if i != axis]
    if all(isinstance(n, int) and n == 1 for n in others):
        x = x.shrink(tuple([(0, size if i == axis else 1) for i in range(len(shape))]))
        return UOp(Ops.TAKE, x.dtype, (x.reshape((size,)), wrapped(index, size)), 0)
    if x.dtype.is_float and not is_large(x.shape, axis, index.size):
        x = x.shrink(tuple([(0, size if i == axis else part) for i, part in enumerate(shape)]))
        hit = wrapped(index, size).reshape((*shape, 1)).equal(iota(size, wrapped(index, size).dtype))
        return hit.where(rows_last(x, axis), UOp.const(0, x.dtype)).reduce(Ops.ADD, (len(shape),))
    return UOp(Ops.TAKE, x.dtype, (x.reshape((plain(prod(x.shape)),)), places_of(x.shape, axis, index)), 0)


def places_of(shape: Shape, axis: int, index: UOp) -> UOp:
    """The flat place, in an array of this shape, of each element that an index along an axis names; -1 where
    it is outside."""
    size = shape[axis]
    linear = position = wrapped(index, size).cast(dtypes.int64)
    inside = position.ge(0) & position.lt(UOp.const(size, dtypes.int64) if isinstance(size, int)
                                          else size.cast(dtypes.int64))
    stride: Sint = 1
    linear = UOp.const(0, dtypes.int64)
    for i in reversed(range(len(shape))):
        place = position if i == axis else _along(iota(index.shape[i], dtypes.int64), i, len(shape))
        step = UOp.const(stride, dtypes.int64) if isinstance(stride, int) else stride.cast(dtypes.int64)
        linear = linear + place * step
        stride = stride * shape[i]
    return inside.where(linear, -1)


def _along(u: UOp, axis: int, rank: int) -> UOp:
    """A 1-D node as axis `axis` of `rank` axes, size 1 elsewhere."""
    return u.reshape(tuple([u.shape[0] if i == axis else 1 for i in range(rank)]))


def _placed(u: UOp, shape: Shape) -> UOp:
    """A value for the leading part of each axis, zeros up to `shape`."""
    return u.pad(tuple([(0, plain(full - part)) for full, part in zip(shape, u.shape, strict=True)]))


def _broadcast_last(u: UOp, hits: UOp, updates: UOp) -> UOp:
    """u expanded to the common shape of hits and updates without the last axis."""
    shape = tuple([max_size(a, b) for a, b in zip(hits.shape[:-1], updates.shape[:-1], strict=True)])
    return u.reshape(u.shape).expand(shape) if u.shape != shape else u


def overwrite(x: UOp, hits: UOp, updates: UOp) -> UOp:
    """x with the last update that hits each place."""
    last = hits.ndim - 1
    steps = iota(updates.shape[last], dtypes.int32)
    winner = hits.where(steps, UOp.const(-1, dtypes.int32)).reduce(Ops.MAX, (last,))
    chosen = winner.reshape((*winner.shape, 1)).equal(steps)
    if x.dtype.is_bool:
        value = (chosen & updates).reduce(Ops.MAX, (last,))
    else:
        value = chosen.where(updates, UOp.const(0, x.dtype)).reduce(Ops.ADD, (last,))
    written = _broadcast_last(winner.ge(0), hits, updates)
    return _placed(written, x.shape).alu(Ops.WHERE, _placed(value, x.shape), x)


def combine(x: UOp, hits: UOp, updates: UOp, op: Op, include_self: bool, mean: bool) -> UOp:
    """x with everything that hits a place folded by op, together with the old value if include_self."""
    last, dtype = hits.ndim - 1, x.dtype
    wide = dtypes.float32 if dtype in NARROW else dtype
    neutral = {Ops.ADD: 0, Ops.MUL: 1, Ops.MAX: dtype.min, Ops.MIN: dtype.max}[op]
    folded = hits.where(updates.cast(wide), UOp.const(neutral, wide)).reduce(op, (last,))
    count = hits.cast(dtypes.int32).reduce(Ops.ADD, (last,))
    touched = _placed(_broadcast_last(count.not_equal(0), hits, updates), x.shape)
    total = _placed(folded, x.shape)
    old = x.cast(wide)
    if include_self:
        total = old.alu(op, total)
    if mean:
        number = _placed(_broadcast_last(count, hits, updates), x.shape) + (1 if include_self else 0)
        number = touched.where(number, 1).cast(wide)
        total = total / number if wide.is_float else total // number
    return touched.where(total.cast(dtype), x)

