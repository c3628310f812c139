"""Sorting and what is made of it: order by radix in linear time, selection of the greatest in one pass,
searches, counts. Every row is one loop of a kernel, so compile time does not depend on sizes.

Order is that of NumPy: NaN is the greatest, -0.0 equals 0.0. All orders are stable, descending ones too.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Self

from whit.helpers import ArgumentError, DTypeError, ShapeError, cpu_threads, prod
from whit.tensor.base import check_devices, scalar_shape
from whit.tensor.custom import Backward, run, unbound
from whit.tensor.reduce import accumulator
from whit.tensor.scans import ScanMixin
from whit.uop import DType, Sint, UOp, dtypes
from whit.uop.dtype import float_of
from whit.uop.program import Array, Program, as_index, param
from whit.uop.uop import show_shape

RANKED = 64  # rows up to this length are sorted by counting, for each element, what comes before it
STREAMED = 32  # up to as many greatest elements are kept in order while the row goes by
BLOCK = 64  # of which the greatest is looked at first
CUT = 1 << 18  # rows from this length on are cut into a part for each thread
LONG = 4096  # rows from this length on are sorted by wider digits
U64, I32 = dtypes.uint64, dtypes.int32


class SortingMixin(ScanMixin):
    """Methods of the sorting family."""

    def sort(self, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Self, Self]:
        """(sorted values, their positions as int32) along `dim`. Stable whatever is asked for; NaN counts as
        the greatest. ShapeError for an axis of symbolic size.

        >>> [t.tolist() for t in Tensor([3, 1, 2]).sort()]
        [[1, 2, 3], [1, 2, 0]]
        """
        if not self.ndim:
            self._axis_of_scalar(dim, "sort")
            return self, self._wrap(UOp.const(0, I32))
        at = self._axis(dim, "sort")
        n = self._known_length(at, "sort")
        if n <= 1 or 0 in self.shape:
            return self, self._wrap(scalar_shape(UOp.const(0, I32), self.shape))
        rows = self.transpose(at, -1)
        x = rows._flat_rows()
        count = unbound(x.shape)[0]
        parts = _parts(count, n)
        kernel = _sort(count, n, parts, x.uop.dtype, bool(descending))
        results = [(x.shape, x.uop.dtype), (x.shape, I32)]
        outputs = [*results, *[(x.shape, d) for d in _scratch(n, x.uop.dtype)]]
        backward = Backward(_sort_backward, type(self))
        made = run(kernel, [x.uop], outputs, gradient=backward if parts == 1 else None)
        length = -(-n // parts)
        while length < n:
            merge = _merge(count, n, length, x.uop.dtype, bool(descending))
            length *= 2
            made = run(merge, [*made[:2], x.uop], results, gradient=None if length < n else backward)
        values, order = [self._wrap(u.reshape(rows.shape)).transpose(at, -1) for u in made[:2]]
        return values, order

    def argsort(self, dim: int = -1, descending: bool = False, stable: bool = True) -> Self:
        """Positions that sort along `dim`, as int32.

        >>> Tensor([3, 1, 2]).argsort().tolist()
        [1, 2, 0]
        """
        return self.sort(dim, descending, stable)[1]

    def msort(self) -> Self:
        """The values sorted along the first axis."""
        return self.sort(0)[0]

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted_: bool = True) -> tuple[Self, Self]:
        """(the k greatest values, their positions as int32) along `dim`, greatest first; least first when not
        `largest`. Of equal ones the first come first; NaN counts as the greatest.

        >>> [t.tolist() for t in Tensor([3, 1, 2]).topk(2)]
        [[3, 2], [0, 2]]
        """
        if not sorted_:
            raise ArgumentError(
                "topk(sorted_=False)", because="results are always sorted", fix="leave it True"
            )
        at = self._axis(dim, "topk")
        n = self._known_length(at, "topk")
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= n:
            raise ArgumentError(
                f"topk of {k} along an axis of size {n}",
                because="it has no so many elements",
                fix="choose a smaller k",
            )
        if not 0 < k <= STREAMED or n <= 2 * k or 0 in self.shape:
            values, order = self.sort(at, largest)
            return values._part(at, 0, k), order._part(at, 0, k)
        rows = self.transpose(at, -1)
        x = rows._flat_rows()
        kernel = _greatest(unbound(x.shape)[0], n, k, x.uop.dtype, bool(largest))
        shape = (x.shape[0], k)
        made = run(kernel, [x.uop], [(shape, x.uop.dtype), (shape, I32)],
                   gradient=Backward(_sort_backward, type(self)))
        values, order = [self._wrap(u.reshape((*rows.shape[:-1], k))).transpose(at, -1) for u in made]
        return values, order

    def kthvalue(self, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Self, Self]:
        """(the k-th least value, its position) along `dim`; k counts from 1.

        >>> [t.item() for t in Tensor([5, 3, 4]).kthvalue(2)]
        [4, 2]
        """
        at = self._axis(dim, "kthvalue") if self.ndim else 0
        n = self._known_length(at, "kthvalue") if self.ndim else 1
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= n:
            raise ArgumentError(f"kthvalue({k}) along an axis of size {n}", because=f"k runs from 1 to {n}",
                                fix="choose one of these")
        if not self.ndim:
            return self.sort()
        values, order = [t._part(at, k - 1, k) for t in self.sort(at)]
        return (values, order) if keepdim else (values.squeeze(at), order.squeeze(at))

    def median(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """Without `dim` the median of all elements: the mean of the middle two, as NumPy's. With it, as
        PyTorch, (values, positions) along the axis: of the middle two the lower one. NaN if there is one.

        >>> Tensor([1.0, 4.0, 2.0, 8.0]).median().item(), Tensor([1, 4, 2, 8]).median(0)[0].item()
        (3.0, 2)
        """
        if dim is None:
            return self.quantile(0.5)
        if not self.ndim:
            return self.sort(dim)
        at = self._axis(dim, "median")
        n = self._length_of_some(at, "median")
        values, order = self.sort(at)
        middle = [t._part(at, (n - 1) // 2, (n + 1) // 2) for t in (values, order)]
        if self.uop.dtype.is_float:  # the last one is NaN if any is: the first of those
            last, first_nan = values._part(at, n - 1, n), self.isnan().cast(I32)._first_one(at)
            is_nan = last.isnan()
            middle = [is_nan.where(last, middle[0]), is_nan.where(first_nan, middle[1])]
        return tuple(middle) if keepdim else (middle[0].squeeze(at), middle[1].squeeze(at))

    def _first_one(self, axis: int) -> Self:
        """The position of the first element that is not 0, 0 if there is none; keeps the axis."""
        return self.argmax(axis, keepdim=True)

    def quantile(self, q: Any, dim: int | None = None, keepdim: bool = False,
                 interpolation: str = "linear") -> Self:
        """The values below which the shares q (a number or a 1-D tensor, from 0 to 1) of the elements lie,
        along `dim` (None: of all). Shape: q's axis, if it has one, then the rest. `interpolation` between the
        two nearest: linear, lower, higher, midpoint, nearest. NaN where there is one.

        >>> Tensor([1.0, 2.0, 3.0, 4.0]).quantile(0.5).item()
        2.5
        """
        return self._quantile(q, dim, keepdim, interpolation, False)

    def nanquantile(self, q: Any, dim: int | None = None, keepdim: bool = False,
                    interpolation: str = "linear") -> Self:
        """`quantile` of the elements that are not NaN; NaN where there is none."""
        return self._quantile(q, dim, keepdim, interpolation, True)

    def nanmedian(self, dim: int | None = None, keepdim: bool = False) -> Self:
        """The median of the elements that are not NaN: the mean of the middle two."""
        return self._quantile(0.5, dim, keepdim, "linear", True)

    def _quantile(self, q: Any, dim: int | None, keepdim: bool, interpolation: str, skip_nan: bool) -> Self:
        if interpolation not in ("linear", "lower", "higher", "midpoint", "nearest"):
            raise ArgumentError(f"quantile(interpolation={interpolation!r})", because="there is no such way",
                                fix="use linear, lower, higher, midpoint or nearest")
        kind = float_of(self.uop.dtype)
        x = self.cast(kind if kind.bitsize >= 32 else dtypes.float32)
        given: Any = self._of(q)
        share: Any = given.to(self.device)
        if isinstance(q, (int, float)) or share.dtype.bitsize < 32 or not share.dtype.is_float:
            share = share.cast(dtypes.float64)  # a tensor says how exact it is
        if share.ndim > 1:
            raise ShapeError(f"quantile for q of shape {show_shape(share.shape)}",
                             because="q is a number or has one axis", fix="flatten it")
        if isinstance(q, (int, float)) and not 0 <= q <= 1:
            raise ArgumentError(f"quantile({q})", because="a share is from 0 to 1",
                                fix="divide a percentage by 100")
        whole = dim is None or not x.ndim
        at = 0 if dim is None or whole else x._axis(dim, "quantile")
        rows = x.reshape(-1) if whole else x.transpose(at, -1)
        n = rows._length_of_some(rows.ndim - 1, "quantile")
        ordered = rows.sort(-1)[0]
        nan = ordered.isnan()
        exact = share.dtype
        last = (n - 1 - nan.sum(-1, keepdim=True)).cast(exact) if skip_nan else float(n - 1)
        place = share.reshape((-1, *(1,) * rows.ndim)) * last  # (q, …, 1)
        low = place.floor()
        weight = place - low
        if interpolation == "lower":
            weight = weight * 0
        elif interpolation == "higher":
            weight = weight.gt(0).cast(exact)
        elif interpolation == "midpoint":
            weight = weight.gt(0).cast(exact) * 0.5
        elif interpolation == "nearest":  # halves go to the even one
            odd = low.cast(dtypes.int64) & 1
            weight = (weight.gt(0.5) | (weight.eq(0.5) & odd.eq(1))).cast(exact)
        shape = (share.numel(), *rows.shape[:-1], 1)
        index = [p.maximum(0).minimum(n - 1).cast(I32).expand(*shape) for p in (low, low + weight.gt(0))]
        a, b = [ordered.unsqueeze(0).expand(shape[0], *rows.shape)._gather_rows(i) for i in index]
        weight = weight.cast(x.dtype)
        made = weight.eq(0).where(a, a + (b - a) * weight)
        made = weight.eq(1).where(b, made)
        if not skip_nan:
            made = nan.any(-1, keepdim=True).where(float("nan"), made)
        if whole:
            made = made.reshape(-1, *((1,) * self.ndim if keepdim else ()))
        else:
            made = made.transpose(at + 1, -1) if keepdim else made.transpose(at + 1, -1).squeeze(at + 1)
        result: Self = (made if share.ndim else made.squeeze(0)).cast(kind)
        return result

    def mode(self, dim: int = -1, keepdim: bool = False) -> tuple[Self, Self]:
        """(the most frequent value, of several the least; the position where it stands last) along `dim`.

        >>> [t.item() for t in Tensor([2, 1, 2, 3]).mode()]
        [2, 2]
        """
        if not self.ndim:
            return self.sort(dim)
        at = self._axis(dim, "mode")
        n = self._length_of_some(at, "mode")
        values, order = [t.transpose(at, -1) for t in self.sort(at)]
        keys = values._flat_rows()
        kernel = _longest_run(unbound(keys.shape)[0], n, keys.uop.dtype)
        place = self._wrap(run(kernel, [keys.uop], [((keys.shape[0], 1), I32)])[0])
        place = place.reshape(*values.shape[:-1], 1)
        made = [t._gather_rows(place).transpose(at, -1) for t in (values, order)]
        return (made[0], made[1]) if keepdim else (made[0].squeeze(at), made[1].squeeze(at))

    # ---- searching

    def searchsorted(self, values: Any, right: bool = False, side: str | None = None,
                     sorter: Self | None = None) -> Self:
        """Where `values` would be inserted into this sorted tensor so that it stays sorted, as int32: before
        equal elements, behind them if `right` (side="right"). The last axis is sorted; one row serves all
        values, else leading axes agree. `sorter`: the order that sorts it.

        >>> Tensor([1, 3, 5]).searchsorted(Tensor([0, 3, 9])).tolist()
        [0, 1, 3]
        """
        if side not in (None, "left", "right"):
            raise ArgumentError(f"searchsorted(side={side!r})", because="there is no such side",
                                fix="use left or right")
        behind = bool(right) or side == "right"
        wanted = self._of(values)
        if not self.ndim:
            raise ShapeError("searchsorted in a scalar", because="it has no axis", fix="reshape it to (1,)")
        lead = self.shape[:-1]
        if lead and wanted.shape[:-1] != lead:
            raise ShapeError(f"searchsorted of {show_shape(wanted.shape)} in {show_shape(self.shape)}",
                             because="leading axes differ", fix="give both the same leading axes")
        n = self._known_length(self.ndim - 1, "searchsorted")
        if 0 in wanted.shape or not n:
            return self._wrap(scalar_shape(UOp.const(0, I32), wanted.shape))
        a, b = self._operands(wanted, "searchsorted")
        check_devices("searchsorted", a, b)
        rows = self._wrap(a) if sorter is None else self._wrap(a)._gather_rows(sorter)
        sorted_, queries = rows._flat_rows(), self._wrap(b)._flat_rows(prod(lead))
        kernel = _search(unbound(sorted_.shape)[0], n, unbound(queries.shape)[1], sorted_.uop.dtype, behind)
        made = run(kernel, [sorted_.uop, queries.uop], [(queries.shape, I32)])[0]
        return self._wrap(made.reshape(wanted.shape))

    def bucketize(self, boundaries: Any, right: bool = False) -> Self:
        """For each element the number of the boundary (sorted) that it comes before: `searchsorted` with the
        arguments exchanged.

        >>> Tensor([0, 3, 9]).bucketize(Tensor([1, 3, 5])).tolist()
        [0, 1, 3]
        """
        return self._of(boundaries).searchsorted(self, right)

    # ---- counting; sizes of results are computed now

    def unique(self, sorted_: bool = True, return_inverse: bool = False, return_counts: bool = False,
               dim: int | None = None, return_index: bool = False, equal_nan: bool = True) -> Any:
        """The distinct elements in order, then as asked for: for each element the number of its value, how
        often each value occurs (both int32), where each stands first. Computed now, since the size depends on
        the values. `dim`: distinct slices along that axis, in order of their elements. `equal_nan`: all NaNs
        are one, as in NumPy.

        >>> Tensor([3, 1, 3]).unique().tolist()
        [1, 3]
        """
        if dim is not None and self.ndim > 1:
            return self._unique_slices(dim, return_inverse, return_counts, return_index)
        flat = self.reshape(-1)
        n = flat._known_length(0, "unique")
        if not n:
            none = self._wrap(scalar_shape(UOp.const(0, I32), (0,)))
            parts = [flat, none, none.reshape(self.shape), none]
        else:
            values, order = flat.sort()
            outputs = [((n,), values.uop.dtype), *[((n,), I32)] * 3, ((1,), I32)]
            made = run(_distinct(n, values.uop.dtype, equal_nan), [values.uop, order.uop], outputs)
            parts = self._counted(made, [True, True, False, True])
            parts[2] = parts[2].reshape(*self.shape)
        distinct, first, inverse, counts = parts
        return _asked(distinct, (first, return_index), (inverse, return_inverse), (counts, return_counts))

    def _counted(self, made: list[UOp], cut: list[bool]) -> list[Self]:
        """Outputs of a kernel that says in the last one how many elements of the others count."""
        tensors = [self._wrap(u) for u in made]
        type(tensors[0]).realize_all(tensors)  # type: ignore[attr-defined]  # a Tensor
        count = int(tensors[-1].item())  # type: ignore[attr-defined]
        return [t._part(0, 0, count) if is_cut else t for t, is_cut in zip(tensors[:-1], cut, strict=True)]

    def _unique_slices(self, dim: int, *options: bool) -> Any:
        """Slices are ranked by their elements, last first: what is equal in all of them is one."""
        at = self._axis(dim, "unique")
        rows = self.transpose(0, at).contiguous()
        n, flat = rows.shape[0], rows.reshape(rows.shape[0], -1)
        label = self._wrap(scalar_shape(UOp.const(0, I32), (n,)))
        for column in range(flat.shape[1] - 1, -1, -1):
            rank = flat._part(1, column, column + 1).reshape(n).unique(return_inverse=True)[1]
            label = (rank * n + label.unique(return_inverse=True)[1]).contiguous()
        _, first, inverse, counts = label.unique(return_inverse=True, return_counts=True, return_index=True)
        distinct = rows._pick_slices(first).transpose(0, at)
        return_inverse, return_counts, return_index = options
        return _asked(distinct, (first, return_index), (inverse, return_inverse), (counts, return_counts))

    def _pick_slices(self, index: Self) -> Self:
        from whit.uop import Ops
        return self._wrap(UOp(Ops.TAKE, self.uop.dtype, (self.uop, index.uop), 0))

    def unique_consecutive(self, return_inverse: bool = False, return_counts: bool = False) -> Any:
        """The elements of a flattened tensor without repetitions of the one before; inverse and counts as
        `unique`.

        >>> Tensor([1, 1, 2, 1]).unique_consecutive().tolist()
        [1, 2, 1]
        """
        flat = self.reshape(-1)
        n = flat._known_length(0, "unique_consecutive")
        if not n:
            none = self._wrap(scalar_shape(UOp.const(0, I32), (0,)))
            parts = [flat, none, none, none]
        else:
            places = flat._along(0, n)
            outputs = [((n,), flat.uop.dtype), *[((n,), I32)] * 3, ((1,), I32)]
            made = run(_distinct(n, flat.uop.dtype, False), [flat.uop, places.uop], outputs)
            parts = self._counted(made, [True, True, False, True])
        inverse = parts[2].reshape(*self.shape)
        return _asked(parts[0], (inverse, return_inverse), (parts[3], return_counts))

    def bincount(self, weights: Any = None, minlength: int = 0) -> Self:
        """How often each of 0, 1, 2, … occurs (int32), or the sum of the weights there. The length, at least
        `minlength`, is computed now. Negative elements raise ArgumentError.

        >>> Tensor([0, 2, 2]).bincount().tolist()
        [1, 0, 2]
        """
        if not self.uop.dtype.is_int or self.ndim != 1:
            raise DTypeError(f"bincount of {self.uop.dtype}, shape {show_shape(self.shape)}",
                             because="it counts whole numbers along one axis",
                             fix="cast and flatten it first")
        n = self._known_length(0, "bincount")
        low, high = (0, -1) if not n else [int(t.item()) for t in (self.min(), self.max())]  # type: ignore[attr-defined]
        if low < 0 or minlength < 0:
            raise ArgumentError("bincount", because=f"{min(low, minlength)} is negative",
                                fix="count numbers from 0 on")
        given = None if weights is None else self._of(weights)
        if given is not None and given.shape != self.shape:
            raise ShapeError(f"bincount of {show_shape(self.shape)} with weights {show_shape(given.shape)}",
                             because="the shapes differ", fix="give a weight for each element")
        return self._counts(max(high + 1, minlength), given)

    def _counts(self, size: int, weights: Self | None = None) -> Self:
        """How often (with what weight) 0 … size - 1 occur in a row; what is outside does not count."""
        ones = self._wrap(scalar_shape(UOp.const(1, I32), self.shape)) if weights is None else weights
        if ones.uop.dtype.is_bool:
            ones = ones.cast(I32)
        have = ones.uop.dtype
        made = ones.cast(accumulator(have))._scatter_rows(self, size)
        return made.cast(have) if have.kind == "f" else made

    def histc(self, bins: int = 100, min: float = 0, max: float = 0) -> Self:
        """How many elements lie in each of `bins` parts, of equal length, of [min, max] (both 0: from the
        least to the greatest element, computed now); the last part holds max too. Dtype of the input.

        >>> Tensor([1.0, 2.0, 1.0]).histc(bins=4, min=0, max=3).tolist()
        [0.0, 2.0, 1.0, 0.0]
        """
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ArgumentError(f"histc(bins={bins})", because="there must be a part", fix="use at least 1")
        x = self.reshape(-1).cast(float_of(self.uop.dtype))
        if not x.uop.dtype.bitsize >= 32:
            x = x.cast(dtypes.float32)
        low, high = float(min), float(max)
        if low == high == 0 and x.shape[0]:
            low, high = float(x.min().item()), float(x.max().item())  # type: ignore[attr-defined]
        if low == high:
            low, high = low - 1, high + 1
        if not low < high or low - low != 0 or high - high != 0:
            raise ArgumentError(f"histc from {low} to {high}", because="that is no finite range",
                                fix="give min < max, both finite")
        place = ((x - low) * (bins / (high - low))).floor()
        inside = (x >= low) & (x <= high)
        index = inside.where(place.minimum(bins - 1), -1).cast(I32)
        return index._counts(bins).cast(self.uop.dtype)

    # ---- rows

    def _known_length(self, at: int, what: str) -> int:
        n = self.shape[at]
        if not isinstance(n, int):
            raise ShapeError(f"{what} of shape {show_shape(self.shape)}",
                             because=f"the size of axis {at} is symbolic",
                             fix=f"{what} works along an axis of a known size")
        return n

    def _length_of_some(self, at: int, what: str) -> int:
        """The size of an axis that must not be empty."""
        n = self._known_length(at, what)
        if not n:
            raise ShapeError(f"{what} of shape {show_shape(self.shape)}", because="the axis is empty",
                             fix="an element is needed")
        return n

    def _flat_rows(self, rows: Sint | None = None) -> Self:
        """The last axis and all others as one."""
        count = prod(self.shape[:-1]) if rows is None else rows
        last = self.shape[-1] if rows is None else prod(self.shape) // rows if rows else 0
        return self.reshape(count, last)

    def _gather_rows(self, index: Self) -> Self:
        """x[..., index[..., i]] along the last axis; leading axes agree. An index outside reads 0."""
        x, places = self._flat_rows(), index.cast(I32)._flat_rows()
        n, m = x._known_length(1, "gather"), places._known_length(1, "gather")
        if 0 in index.shape or not n:
            return self._wrap(scalar_shape(self.uop.const_like(0), index.shape))
        kernel = _gather(unbound(x.shape)[0], n, m, x.uop.dtype)
        gradient = Backward(_gather_backward, type(self))
        made = run(kernel, [x.uop, places.uop], [((x.shape[0], m), x.uop.dtype)], gradient=gradient)[0]
        return self._wrap(made.reshape(index.shape))

    def _scatter_rows(self, index: Self, size: int) -> Self:
        """Zeros with n = `size` along the last axis to which each element is added at its index; one outside
        is left out."""
        narrow = self.uop.dtype.is_float and self.uop.dtype.bitsize < 32
        x = (self.cast(dtypes.float32) if narrow else self)._flat_rows()
        places = index.cast(I32)._flat_rows()
        shape = (*self.shape[:-1], size)
        if 0 in self.shape or not size:
            return self._wrap(scalar_shape(self.uop.const_like(0), shape))
        kernel = _scatter(unbound(x.shape)[0], size, x._known_length(1, "scatter"), x.uop.dtype)
        gradient = Backward(_scatter_backward, type(self))
        made = run(kernel, [x.uop, places.uop], [((x.shape[0], size), x.uop.dtype)], gradient=gradient)[0]
        return self._wrap(made.reshape(shape)).cast(self.uop.dtype)


def _asked(first: Any, *others: tuple[Any, bool]) -> Any:
    """A value alone, or with those that were asked for."""
    found = [first, *[value for value, is_wanted in others if is_wanted]]
    return found[0] if len(found) == 1 else tuple(found)


# ---- gradients ---------------------------------------------------------------------------------------------


def _sort_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    of_x = None if grads[0] is None else grads[0]._scatter_rows(outputs[1], values[-1].shape[-1])
    return [*[None] * (len(values) - 1), of_x]


def _gather_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    return [grads[0]._scatter_rows(values[1], values[0].shape[-1]), None]


def _scatter_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    return [grads[0]._gather_rows(values[1]), None]


# ---- kernels -----------------------------------------------------------------------------------------------


def sort_key(value: UOp, descending: bool = False) -> UOp:
    """An unsigned integer that orders as the value does, with every NaN on top and -0.0 equal to 0.0."""
    dtype = value.dtype
    if dtype.is_bool or dtype.is_unsigned:
        key = value.cast(dtypes.uint8) if dtype.is_bool else value
    else:
        unsigned: DType = getattr(dtypes, f"uint{dtype.bitsize}")
        key, top = value.bitcast(unsigned), 1 << (dtype.bitsize - 1)
        if dtype.is_float:
            key = value.equal(0).where(0, key)
            key = (key ^ top).lt(top).where(key ^ (2 * top - 1), key ^ top)
            key = value.not_equal(value).where(2 * top - 1, key)
        else:
            key = key ^ top
    return key ^ ((1 << key.dtype.bitsize) - 1) if descending else key


def _scratch(n: int, dtype: DType) -> list[DType]:
    """What a sort keeps beside its results: two arrays of keys with places, packed where both fit into 64
    bits."""
    if n <= RANKED:
        return []
    return [U64, U64, I32, I32] if dtype.bitsize == 64 else [U64, U64]


def _parts(rows: Sint, n: int) -> int:
    """Into how many parts, each for a thread, long rows are cut: a power of two. They are merged in pairs."""
    most = cpu_threads() // rows if isinstance(rows, int) else 1
    return 1 if n < CUT else 1 << max(0, min(8, most).bit_length() - 1)


@lru_cache(256)
def _sort(rows: Sint, n: int, parts: int, dtype: DType, descending: bool) -> UOp:
    """Outputs: values, order, scratch; then the input. Each part of a row by itself; places are the row's."""
    kinds = [dtype, I32, *_scratch(n, dtype), dtype]
    arrays = [param(slot, (UOp.index(rows) * n if isinstance(rows, UOp) else rows * n,), kind)
              for slot, kind in enumerate(kinds)]
    length = -(-n // parts)
    p = Program("sort")
    with p.parallel(rows * parts) as part:
        if parts == 1:
            row = Row(part * n, UOp.index(0), UOp.index(n))
        else:
            first = (part % parts) * length
            left = n - first
            row = Row((part // parts) * n, first, left.lt(length).where(left, UOp.index(length)))
        if n <= RANKED:
            _rank_row(p, row, n, arrays, descending)
        else:
            _radix_row(p, row, n, arrays, descending)
    return p.finish()


class Row(NamedTuple):
    """A stretch of flat arrays: where its row starts, its first place in the row, its length."""

    start: UOp
    first: UOp
    length: UOp

    def at(self, i: UOp) -> UOp:
        return self.start + self.first + i


def _rank_row(p: Program, row: Row, n: int, arrays: list[Array], descending: bool) -> None:
    """Each element goes to the place that says how many come before it."""
    values, order, x = arrays
    keys = p.scratch(n, U64)
    with p.loop(n) as i:
        p.store(keys, i, sort_key(x[row.at(i)], descending).cast(U64))
    with p.loop(n) as i:
        mine, before = p.let(keys[i]), p.register(0, I32)
        with p.loop(n) as j:
            other = p.let(keys[j])
            first = other.lt(mine) | (other.equal(mine) & j.lt(i))
            p.set(before, before.value + first.cast(I32))
        to = row.at(before.value.cast(dtypes.index))
        p.store(order, to, i.cast(I32))
        p.store(values, to, x[row.at(i)])


def _radix_row(p: Program, row: Row, n: int, arrays: list[Array], descending: bool) -> None:
    """From the lowest digit to the highest: count how often each occurs (all digits in one pass), then put
    every element behind those with lower digits."""
    values, order, *kept, x = arrays
    packed, bits = len(kept) == 2, 8 * x.dtype.itemsize
    width = 8 if n < LONG or bits <= 16 else 11
    starts = list(range(0, bits, width))
    counts = p.scratch(len(starts) << width, I32)
    mask = (1 << width) - 1

    def slot(number: int, key: UOp) -> UOp:
        digit = (key >> starts[number]) & mask
        return digit.cast(dtypes.index) + (number << width)

    with p.loop(len(starts) << width) as c:
        p.store(counts, c, 0)
    with p.loop(row.length) as i:
        key = p.let(sort_key(x[row.at(i)], descending))
        for number in range(len(starts)):
            at = slot(number, key)
            p.store(counts, at, counts[at] + 1)
    for number in range(len(starts)):
        total = p.register(0, I32)
        with p.loop(1 << width) as c:
            count = p.let(counts[c + (number << width)])
            p.store(counts, c + (number << width), total.value)
            p.set(total, total.value + count)
    for number in range(len(starts)):
        with p.loop(row.length) as i:
            source = kept[(number + 1) % 2]
            if not number:
                key, place = p.let(sort_key(x[row.at(i)], descending)).cast(U64), (row.first + i).cast(I32)
            elif packed:
                both = p.let(source[row.at(i)])
                key, place = both >> 32, both.cast(dtypes.uint32).cast(I32)
            else:
                key, place = p.let(source[row.at(i)]), p.let(kept[2 + (number + 1) % 2][row.at(i)])
            at = slot(number, key)
            to = p.let(counts[at])
            p.store(counts, at, to + 1)
            to = row.at(to.cast(dtypes.index))
            if number == len(starts) - 1:
                p.store(order, to, place)
                p.store(values, to, x[row.start + place.cast(dtypes.index)])
            elif packed:
                p.store(kept[number % 2], to, (key << 32) | place.cast(U64))
            else:
                p.store(kept[number % 2], to, key)
                p.store(kept[2 + number % 2], to, place)


@lru_cache(256)
def _merge(rows: int, n: int, length: int, dtype: DType, descending: bool) -> UOp:
    """Neighbouring parts of each row become one. Outputs: values, order; then those of the parts (and what
    was sorted). A task writes a stretch of the result: where it starts in both parts is found by bisection
    (Odeh et al. 2012, "Merge Path")."""
    values, order = param(0, (rows, n), dtype), param(1, (rows, n), I32)
    x, places = param(2, (rows, n), dtype), param(3, (rows, n), I32)
    stretch = -(-length // 8)
    pairs, pieces = -(-n // (2 * length)), -(-2 * length // stretch)
    p = Program("merge")
    with p.parallel(rows * pairs * pieces) as task:
        row, pair, piece = task // (pairs * pieces), (task // pieces) % pairs, task % pieces
        first = p.let(pair * (2 * length))
        second = p.let(_least(first + length, n))  # a part may have no neighbour
        size_a, size_b = p.let(second - first), p.let(_least(second + length, n) - second)
        start = p.let(_least(piece * stretch, size_a + size_b))
        low = p.register((start - size_b).maximum(0))
        high = p.register(_least(start, size_a))
        with p.loop(length.bit_length() + 1), p.when(low.value.lt(high.value)):
            middle = p.let((low.value + high.value) // 2)
            a = sort_key(x[row, first + middle], descending)
            b = sort_key(x[row, second + (start - 1 - middle)], descending)
            from_a = p.let(a.le(b))
            p.set(low, from_a.where(middle + 1, low.value))
            p.set(high, from_a.where(high.value, middle))
        i, j = p.register(low.value), p.register(start - low.value)
        with p.loop(_least(size_a + size_b - start, stretch)) as k:
            at_a, at_b = p.let(i.value), p.let(j.value)
            in_a, in_b = at_a.lt(size_a), at_b.lt(size_b)
            value_a = p.let(x.read((row, first + at_a), in_a))
            value_b = p.let(x.read((row, second + at_b), in_b))
            is_first = sort_key(value_a, descending).le(sort_key(value_b, descending))
            from_a = p.let(in_a & (~in_b | is_first))
            to = (row, first + start + k)
            p.store(values, to, from_a.where(value_a, value_b))
            p.store(order, to, places[row, from_a.where(first + at_a, second + at_b)])
            p.set(i, from_a.where(at_a + 1, at_a))
            p.set(j, from_a.where(at_b, at_b + 1))
    return p.finish()


def _least(a: UOp, b: UOp | int) -> UOp:
    return a.minimum(b)


@lru_cache(256)
def _greatest(rows: Sint, n: int, k: int, dtype: DType, largest: bool) -> UOp:
    """Outputs: the k greatest (least) values and their places; then the input. A block whose greatest element
    is no better than the k-th so far is passed by."""
    values, order = param(0, (rows, k), dtype), param(1, (rows, k), I32)
    x = param(2, (rows, n), dtype)
    p = Program("topk")
    with p.parallel(rows) as row:
        kind = sort_key(x[row, 0]).dtype
        keys, places = p.scratch(k, kind), p.scratch(k, I32)

        def insert(i: UOp, key: UOp, last: UOp) -> None:
            """At `last`, then forward past those that are less."""
            p.store(keys, last, key)
            p.store(places, last, i.cast(I32))
            with p.loop(last) as step:
                b = last - step
                better, worse = p.let(keys[b]), p.let(keys[b - 1])
                with p.when(worse.lt(better)):
                    here, there = p.let(places[b]), p.let(places[b - 1])
                    p.store(keys, b, worse)
                    p.store(keys, b - 1, better)
                    p.store(places, b, there)
                    p.store(places, b - 1, here)

        def consider(i: UOp) -> None:
            key = p.let(sort_key(x[row, i], not largest))
            with p.when(keys[k - 1].lt(key)):
                insert(i, key, UOp.index(k - 1))

        with p.loop(k) as i:
            insert(i, p.let(sort_key(x[row, i], not largest)), i)
        blocks, rest = divmod(n - k, BLOCK)
        with p.loop(blocks) as block:
            best = p.register(0, kind)
            with p.loop(BLOCK) as j:
                p.set(best, best.value.maximum(sort_key(x[row, block * BLOCK + j + k], not largest)))
            with p.when(keys[k - 1].lt(best.value)), p.loop(BLOCK) as j:
                consider(block * BLOCK + j + k)
        with p.loop(rest) as j:
            consider(j + (k + blocks * BLOCK))
        with p.loop(k) as i:
            place = p.let(places[i])
            p.store(order, (row, i), place)
            p.store(values, (row, i), x[row, place.cast(dtypes.index)])
    return p.finish()


@lru_cache(256)
def _search(rows: Sint, n: int, m: Sint, dtype: DType, right: bool) -> UOp:
    """Outputs: places; then the sorted rows and what is looked for. The answer is built bit by bit, the
    highest first."""
    made = param(0, (rows, m), I32)
    x, wanted = param(1, (rows, n), dtype), param(2, (rows, m), dtype)
    p = Program("search")
    with p.parallel(rows if rows != 1 else m) as outer, p.loop(m if rows != 1 else 1) as inner:
        row, i = (outer, inner) if rows != 1 else (inner, outer)
        key, low = p.let(sort_key(wanted[row, i])), p.register(UOp.index(0))
        for bit in reversed(range(n.bit_length())):
            with p.when((low.value + (1 << bit)).le(n)):
                other = p.let(sort_key(x[row, low.value + ((1 << bit) - 1)]))
                before = other.le(key) if right else other.lt(key)
                p.set(low, low.value + before.where(UOp.index(1 << bit), UOp.index(0)))
        p.store(made, (row, i), low.value.cast(I32))
    return p.finish()


@lru_cache(256)
def _distinct(n: int, dtype: DType, equal_nan: bool) -> UOp:
    """Outputs: the values that differ from the one before, where each stands first, for each place the number
    of its value, how often each occurs, how many there are; then the values and the place of each."""
    kinds = [dtype, I32, I32, I32]
    distinct, first, inverse, counts = [param(slot, (n,), kind) for slot, kind in enumerate(kinds)]
    many, x, order = param(4, (1,), I32), param(5, (n,), dtype), param(6, (n,), I32)
    p = Program("distinct")
    number = p.register(-1, I32)
    with p.loop(n) as i:
        value = p.let(x[i])
        before = p.let(x.read(i - 1, i.gt(0)))
        differs = value.not_equal(before)
        if dtype.is_float and equal_nan:
            differs = differs & (value.equal(value) | before.equal(before))
        is_new = p.let(differs | i.equal(0))
        with p.when(is_new):
            p.set(number, number.value + 1)
            at = number.value.cast(dtypes.index)
            p.store(distinct, at, value)
            p.store(first, at, order[i])
            p.store(counts, at, 0)
        at = number.value.cast(dtypes.index)
        p.store(counts, at, counts[at] + 1)
        p.store(inverse, as_index(order[i]), number.value)
    p.store(many, 0, number.value + 1)
    return p.finish()


@lru_cache(256)
def _longest_run(rows: Sint, n: int, dtype: DType) -> UOp:
    """Output: the last place of the longest run of equal elements, of several the first; then sorted rows."""
    made, x = param(0, (rows, 1), I32), param(1, (rows, n), dtype)
    p = Program("longest_run")
    with p.parallel(rows) as row:
        length, best, place = p.register(0, I32), p.register(0, I32), p.register(0, I32)
        with p.loop(n) as i:
            same = sort_key(x[row, i]).equal(sort_key(x.read((row, i - 1), i.gt(0)))) & i.gt(0)
            p.set(length, same.where(length.value, length.value.const_like(0)) + 1)
            with p.when(length.value.gt(best.value)):
                p.set(best, length.value)
                p.set(place, i.cast(I32))
        p.store(made, (row, 0), place.value)
    return p.finish()


@lru_cache(256)
def _gather(rows: Sint, n: int, m: int, dtype: DType) -> UOp:
    made, x, index = param(0, (rows, m), dtype), param(1, (rows, n), dtype), param(2, (rows, m), I32)
    p = Program("gather")
    with p.parallel(rows) as row, p.loop(m) as i:
        at = p.let(index[row, i])
        p.store(made, (row, i), x.read((row, at.cast(dtypes.index)), at.ge(0) & at.lt(n)))
    return p.finish()


@lru_cache(256)
def _scatter(rows: Sint, n: int, m: int, dtype: DType) -> UOp:
    made, x, index = param(0, (rows, n), dtype), param(1, (rows, m), dtype), param(2, (rows, m), I32)
    p = Program("scatter")
    with p.parallel(rows) as row:
        with p.loop(n) as j:
            p.store(made, (row, j), 0)
        with p.loop(m) as i:
            at = p.let(index[row, i])
            with p.when(at.ge(0) & at.lt(n)):
                where = at.cast(dtypes.index)
                p.store(made, (row, where), made[row, where] + x[row, i])
    return p.finish()
