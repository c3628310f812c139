"""Reductions, running reductions and sorting.

`axis` is None (all axes), a number or a tuple; an axis named twice or out of range raises ShapeError.
Accumulation: sums and products of bool and of 8- and 16-bit integers give int32 (unsigned ones uint32); half,
bfloat16 and 8-bit floats accumulate in float32 and are rounded once at the end. `max`, `min`, sorting and
their kin treat NaN as NumPy does.
"""

from __future__ import annotations

import math
from typing import Any, Self, TypeAlias

from whit.helpers import ArgumentError, ShapeError, prod
from whit.tensor.base import iota, scalar_shape
from whit.tensor.movement import MovementMixin
from whit.uop import DType, Op, Ops, PyConst, UOp, dtypes
from whit.uop.dtype import float_of, to_dtype
from whit.uop.ops import identity
from whit.uop.uop import show_shape

Axis: TypeAlias = "int | tuple[int, ...] | list[int] | None"
Bool: TypeAlias = bool

# running reductions up to DIRECT elements fold each prefix anew, in one kernel; longer ones do so inside of
# blocks, and run over the blocks' totals
DIRECT, BLOCK = 512, 16
RANKED = 512  # up to this length sorting compares all pairs in one kernel; above it, blocks are merged


def accumulator(dtype: DType) -> DType:
    """The dtype in which sums and products are accumulated."""
    if dtype.kind == "f":
        return dtypes.float32 if dtype.bitsize < 32 else dtype
    if dtype.is_unsigned:
        return dtypes.uint32 if dtype.bitsize < 32 else dtype
    return dtypes.int32 if dtype.bitsize < 32 else dtype


class ReduceMixin(MovementMixin):
    """Methods of the reduce family."""

    def _reduce(self, op: Op, axis: Axis, keepdim: Bool, what: str) -> Self:
        axes = self._axes(axis, what)
        shape = self.uop.shape
        if any(
            isinstance(shape[a], int) and shape[a] == 0 for a in axes
        ):  # nothing to fold: the neutral value
            neutral = UOp.const(identity(op, self.uop.dtype), self.uop.dtype)
            result = scalar_shape(neutral, tuple([size for a, size in enumerate(shape) if a not in axes]))
        else:
            result = self.uop.reduce(op, axes)
        if keepdim:
            result = result.reshape(tuple([1 if a in axes else size for a, size in enumerate(shape)]))
        return self._wrap(result)

    def _accumulate(self, op: Op, axis: Axis, keepdim: Bool, dtype: DType | str | None, what: str) -> Self:
        """A sum or product: widen, fold, and round halves back."""
        have = self.uop.dtype
        wide = accumulator(have) if dtype is None else to_dtype(dtype)
        result = self.cast(wide)._reduce(op, axis, keepdim, what)
        return result.cast(have) if dtype is None and have.kind == "f" else result

    def sum(self, axis: Axis = None, keepdim: Bool = False, dtype: DType | str | None = None) -> Self:
        """The sum over axes. `dtype` is the dtype of the accumulator and the result.

        >>> Tensor([[1, 2], [3, 4]]).sum(0).tolist(), Tensor([True, True]).sum().item()
        ([4, 6], 2)
        """
        return self._accumulate(Ops.ADD, axis, keepdim, dtype, "sum")

    def prod(self, axis: Axis = None, keepdim: Bool = False, dtype: DType | str | None = None) -> Self:
        """The product over axes. `dtype` is the dtype of the accumulator and the result."""
        return self._accumulate(Ops.MUL, axis, keepdim, dtype, "prod")

    def max(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """The greatest element over axes; NaN if one is NaN. ShapeError over an empty axis."""
        return self._extreme(Ops.MAX, axis, keepdim, "max")

    def min(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """The least element over axes; NaN if one is NaN. ShapeError over an empty axis."""
        return self._extreme(Ops.MIN, axis, keepdim, "min")

    def _extreme(self, op: Op, axis: Axis, keepdim: Bool, what: str) -> Self:
        shape = self.uop.shape
        if any(isinstance(shape[a], int) and shape[a] == 0 for a in self._axes(axis, what)):
            raise ShapeError(
                f"{what} over an axis of shape {show_shape(shape)}",
                because="no element is there to choose from",
                fix="skip empty tensors",
            )
        return self._reduce(op, axis, keepdim, what)

    def mean(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """The mean over axes, as a float; NaN over empty ones."""
        have = float_of(self.uop.dtype)
        total = self.cast(accumulator(have)).sum(axis, keepdim)
        return total.div(self._count(axis, total)).cast(have)

    def _count(self, axis: Axis, like: Self) -> Any:
        """How many elements are folded: a number, or a tensor where sizes are symbolic."""
        count = prod([self.uop.shape[a] for a in self._axes(axis, "mean")])
        return float(count) if isinstance(count, int) else self._wrap(count.cast(like.uop.dtype))

    def var(self, axis: Axis = None, keepdim: Bool = False, correction: int = 1) -> Self:
        """The variance over axes: squared deviations summed and divided by n - correction (1: as PyTorch; 0:
        as NumPy)."""
        return self.var_mean(axis, keepdim, correction)[0]

    def var_mean(self, axis: Axis = None, keepdim: Bool = False, correction: int = 1) -> tuple[Self, Self]:
        """(variance, mean)."""
        have = float_of(self.uop.dtype)
        x = self.cast(accumulator(have))
        mean = x.mean(axis, keepdim=True)
        deviation = x - mean
        total = (deviation * deviation).sum(axis, keepdim)
        count = self._count(axis, total)
        below = max(0.0, count - correction) if isinstance(count, float) else (count - correction).maximum(0)
        flat = mean if keepdim else mean.reshape(*total.shape)
        return (total / below).cast(have), flat.cast(have)

    def std(self, axis: Axis = None, keepdim: Bool = False, correction: int = 1) -> Self:
        """The standard deviation: the root of `var`."""
        return self.var(axis, keepdim, correction)._deviation()

    def _deviation(self) -> Self:
        """The root of a variance. Where all values are equal its gradient is 0, not the infinity of sqrt."""
        none = self.eq(0)
        return none.where(0, none.where(1, self).sqrt())

    def std_mean(self, axis: Axis = None, keepdim: Bool = False, correction: int = 1) -> tuple[Self, Self]:
        """(standard deviation, mean)."""
        var, mean = self.var_mean(axis, keepdim, correction)
        return var._deviation(), mean

    def any(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """Whether some element is non-zero."""
        return self.cast(dtypes.bool)._reduce(Ops.MAX, axis, keepdim, "any")

    def all(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """Whether every element is non-zero."""
        return self.cast(dtypes.bool)._reduce(Ops.MIN, axis, keepdim, "all")

    def count_nonzero(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """How many elements are not zero."""
        return self.ne(0).sum(axis, keepdim)

    def allclose(self, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: Bool = False) -> Bool:
        """Whether all elements are close (see `isclose`). Computes now."""
        close = self.isclose(other, rtol=rtol, atol=atol, equal_nan=equal_nan)
        return bool(close.all())

    def nansum(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """The sum over axes, in which NaN counts as 0."""
        return self.isnan().where(0, self).sum(axis, keepdim)

    def nanmean(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """The mean over axes of what is not NaN; NaN where nothing is."""
        x = self._float()
        count = x.isnan().logical_not().sum(axis, keepdim)
        return x.nansum(axis, keepdim) / count.cast(x.uop.dtype)

    def nanmax(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """The greatest element over axes that is not NaN; NaN where nothing is."""
        return self._nan_extreme(-math.inf, axis, keepdim, "max")

    def nanmin(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """The least element over axes that is not NaN; NaN where nothing is."""
        return self._nan_extreme(math.inf, axis, keepdim, "min")

    def _nan_extreme(self, neutral: float, axis: Axis, keepdim: Bool, what: str) -> Self:
        if not self.uop.dtype.is_float:
            return self._extreme(Ops.MAX if what == "max" else Ops.MIN, axis, keepdim, what)
        missing = self.isnan()
        best = missing.where(neutral, self)._extreme(
            Ops.MAX if what == "max" else Ops.MIN, axis, keepdim, what
        )
        return missing.all(axis, keepdim).where(math.nan, best)

    def argmax(self, axis: int | None = None, keepdim: Bool = False) -> Self:
        """Position of the first greatest element along `axis` (of the flattened tensor if None), as int32;
        the first NaN counts as the greatest.

        >>> Tensor([1, 3, 3]).argmax().item()
        1
        """
        return self._arg_extreme(Ops.MAX, axis, keepdim, "argmax")

    def argmin(self, axis: int | None = None, keepdim: Bool = False) -> Self:
        """Position of the first least element along `axis`, as int32; the first NaN counts as the least."""
        return self._arg_extreme(Ops.MIN, axis, keepdim, "argmin")

    def _arg_extreme(self, op: Op, axis: int | None, keepdim: Bool, what: str) -> Self:
        if axis is None:
            flat = self.flatten()._arg_extreme(op, 0, False, what)
            return flat.reshape(*(1,) * self.ndim) if keepdim else flat
        if not self.ndim:
            return (
                self.unsqueeze(0)._arg_extreme(op, self._axis_of_scalar(axis, what), keepdim, what).reshape()
            )
        at = self._axis(axis, what)
        # in memory: a value computed twice may differ in its last bit, and then would equal nothing
        best = (self.cast(dtypes.uint8) if self.uop.dtype.is_bool else self).contiguous()
        hit = best.eq(best._extreme(op, at, True, what))
        if self.uop.dtype.is_float:
            hit = hit | self.isnan()
        size = self.uop.shape[at]
        position = self._along(at, size)
        return hit.where(
            position, size if isinstance(size, int) else self._wrap(size.cast(dtypes.int32))
        )._reduce(Ops.MIN, at, keepdim, what)

    def _axis_of_scalar(self, axis: int, what: str) -> int:
        return 0 if isinstance(axis, int) and axis in (0, -1) else self._axis(axis, what)

    def _along(self, axis: int, size: Any) -> Self:
        """0, 1, 2, … along one axis, size 1 on the others."""
        return self._wrap(
            iota(size).reshape(tuple([size if a == axis else 1 for a in range(len(self.uop.shape))]))
        )

    def logsumexp(self, axis: Axis = None, keepdim: Bool = False) -> Self:
        """log(sum(exp(x))) without overflow; -inf over empty axes."""
        have = float_of(self.uop.dtype)
        return self.cast(accumulator(have))._logsumexp(axis, keepdim).cast(have)

    def _logsumexp(self, axis: Axis, keepdim: Bool) -> Self:
        x = self
        if any(isinstance(x.shape[a], int) and x.shape[a] == 0 for a in x._axes(axis, "logsumexp")):
            return x.exp().sum(axis, keepdim).log()
        top = x._wrap(x.max(axis, keepdim=True).uop.detach())
        top = top.isfinite().where(top, 0)
        total = (x - top).exp().sum(axis, keepdim).log()
        return total + (top if keepdim else top.reshape(*total.shape))

    # ---- running reductions

    def cumsum(self, axis: int = 0) -> Self:
        """Running sum along `axis`; dtypes as `sum`.

        >>> Tensor([1, 2, 3]).cumsum().tolist()
        [1, 3, 6]
        """
        return self._cumulative(Ops.ADD, axis, "cumsum")

    def cumprod(self, axis: int = 0) -> Self:
        """Running product along `axis`; dtypes as `prod`."""
        return self._cumulative(Ops.MUL, axis, "cumprod")

    def cummax(self, axis: int = 0) -> tuple[Self, Self]:
        """Running maximum along `axis`, and the position of the last element that reached it, as int32."""
        return self._cumulative_extreme(Ops.MAX, axis, "cummax")

    def cummin(self, axis: int = 0) -> tuple[Self, Self]:
        """Running minimum along `axis`, and the position of the last element that reached it, as int32."""
        return self._cumulative_extreme(Ops.MIN, axis, "cummin")

    def logcumsumexp(self, axis: int = 0) -> Self:
        """Running log(sum(exp(x))) along `axis`: each prefix is measured from its own maximum."""
        have = float_of(self.uop.dtype)
        x = self.cast(accumulator(have))
        if not x.ndim:
            return x.cast(have)
        at = x._axis(axis, "logcumsumexp")
        rows = x.transpose(at, -1)
        n = rows.shape[-1]
        if not n:
            return x.cast(have)
        top = rows._running(Ops.MAX)
        top = self._wrap(top.isfinite().where(top, 0).uop.detach())  # (..., n)
        shifted = rows.unsqueeze(-2) - top.unsqueeze(-1)  # (..., prefix, element)
        inside = _lower(n)
        total = self._wrap(inside).where(shifted.exp(), 0).sum(-1)
        return (total.log() + top).transpose(at, -1).cast(have)

    def _cumulative(self, op: Op, axis: int, what: str) -> Self:
        have = self.uop.dtype
        wide = accumulator(have) if op in (Ops.ADD, Ops.MUL) else have
        x = self.cast(wide)
        if x.ndim:
            at = x._axis(axis, what)
            x = x.transpose(at, -1)._running(op).transpose(at, -1)
        else:
            self._axis_of_scalar(axis, what)
        return x.cast(have) if have.kind == "f" else x

    def _running(self, op: Op) -> Self:
        """Prefixes along the last axis: a masked fold inside blocks, and the prefixes of the blocks' totals
        on top."""
        *lead, n = self.shape
        if not n or prod(lead) == 0:
            return self
        if n <= DIRECT:
            return self._prefixes(op)
        blocks = -(-n // BLOCK)
        filled = self._fill_end(blocks * BLOCK - n, identity(op, self.uop.dtype)).reshape(
            *lead, blocks, BLOCK
        )
        inner = filled._prefixes(op)
        totals = inner._part(len(lead) + 1, BLOCK - 1, BLOCK).squeeze(-1)._running(op)  # (..., blocks)
        before = (
            totals._part(len(lead), 0, blocks - 1)._fill_start(1, identity(op, self.uop.dtype)).unsqueeze(-1)
        )
        return (
            inner._broadcast_binary(op, before, "cumsum")
            .reshape(*lead, blocks * BLOCK)
            ._part(len(lead), 0, n)
        )

    def _prefixes(self, op: Op) -> Self:
        """Each prefix of the last axis folded by itself: (..., n, n) -> (..., n)."""
        inside = self._wrap(_lower(self.shape[-1]))
        neutral = self._wrap(UOp.const(identity(op, self.uop.dtype), self.uop.dtype))
        return inside.where(self.unsqueeze(-2), neutral)._reduce(op, -1, False, "cumsum")

    def _fill_end(self, count: int, value: PyConst) -> Self:
        return self._pad_constant(((0, 0),) * (self.ndim - 1) + ((0, count),), value)

    def _fill_start(self, count: int, value: PyConst) -> Self:
        return self._pad_constant(((0, 0),) * (self.ndim - 1) + ((count, 0),), value)

    def _cumulative_extreme(self, op: Op, axis: int, what: str) -> tuple[Self, Self]:
        if not self.ndim:
            self._axis_of_scalar(axis, what)
            return self, self._wrap(UOp.const(0, dtypes.int32))
        at = self._axis(axis, what)
        rows = (self.cast(dtypes.uint8) if self.uop.dtype.is_bool else self).contiguous().transpose(at, -1)
        values = rows._running(op)
        hit = rows.eq(values)
        if rows.uop.dtype.is_float:
            hit = hit | rows.isnan()
        positions = hit.where(rows._along(rows.ndim - 1, rows.shape[-1]), 0)._running(Ops.MAX)
        return values.cast(self.uop.dtype).transpose(at, -1), positions.transpose(at, -1)

    # ---- sorting

    def sort(self, dim: int = -1, descending: Bool = False) -> tuple[Self, Self]:
        """(sorted values, their positions as int32) along `dim`. Stable; NaN counts as the greatest.

        >>> [t.tolist() for t in Tensor([3, 1, 2]).sort()]
        [[1, 2, 3], [1, 2, 0]]
        """
        if not self.ndim:
            self._axis_of_scalar(dim, "sort")
            return self, self._wrap(UOp.const(0, dtypes.int32))
        at = self._axis(dim, "sort")
        # in memory: a value computed twice may differ in its last bit, and then would come before itself
        rows = self.contiguous().transpose(at, -1)
        n = rows.shape[-1]
        if not isinstance(n, int):
            raise ShapeError(
                f"sort of shape {show_shape(self.shape)}",
                because="a symbolic axis cannot be sorted",
                fix="sort with a known size",
            )
        if n <= 1:
            return self, self._wrap(scalar_shape(UOp.const(0, dtypes.int32), self.shape))
        order = rows._ranked_order(n, descending) if n <= RANKED else rows._merged_order(n, descending)
        values = rows._take_rows(order)
        return values.transpose(at, -1), order.transpose(at, -1)

    def argsort(self, dim: int = -1, descending: Bool = False) -> Self:
        """Positions that sort along `dim`, as int32."""
        return self.sort(dim, descending)[1]

    def topk(self, k: int, dim: int = -1, largest: Bool = True, sorted_: Bool = True) -> tuple[Self, Self]:
        """(the k greatest values, their positions) along `dim`, greatest first; least when not `largest`."""
        if not sorted_:
            raise ArgumentError(
                "topk(sorted_=False)", because="results are always sorted", fix="leave it True"
            )
        at = self._axis(dim, "topk")
        if not 0 <= k <= self.shape[at]:
            raise ArgumentError(
                f"topk of {k} along an axis of size {self.shape[at]}",
                because="it has no so many elements",
                fix="choose a smaller k",
            )
        values, order = self.sort(at, largest)
        return values._part(at, 0, k), order._part(at, 0, k)

    def _sort_key(self) -> Self:
        """Unsigned integers that order as the values do, with every NaN on top and -0.0 equal to 0.0."""
        dtype = self.uop.dtype
        if dtype.is_bool or dtype.is_unsigned:
            return self.cast(dtypes.uint8) if dtype.is_bool else self
        bits = dtype.bitsize
        unsigned: DType = getattr(dtypes, f"uint{bits}")
        top = 1 << (bits - 1)
        if not dtype.is_float:
            return self._wrap(self.uop.bitcast(unsigned)) ^ top
        raw = self._wrap(self.eq(0).where(0.0, self).uop.bitcast(unsigned))
        key = (raw >= top).where(raw ^ (2 * top - 1), raw ^ top)
        return self.isnan().where(self._wrap(UOp.const(2 * top - 1, unsigned)), key)

    def _ranked_order(self, n: int, descending: Bool) -> Self:
        """Each element's rank is how many come before it; the order is the inverse of the ranks."""
        key = self._sort_key()
        mine, other = key.unsqueeze(-1), key.unsqueeze(-2)  # (..., i, 1), (..., 1, j)
        i, j = self._wrap(iota(n).reshape((n, 1))), self._wrap(iota(n).reshape((1, n)))
        first = (other > mine if descending else other < mine) | (other.eq(mine) & (j < i))
        rank = first.sum(-1)  # (..., n)
        return (rank.unsqueeze(-2).eq(i)).where(j, 0).sum(-1)  # (..., place, element) -> (..., place)

    def _merged_order(self, n: int, descending: Bool) -> Self:
        """Blocks are ranked, then merged pairwise. Padding carries the greatest key and stands last, so that
        a stable order leaves it last."""
        key = self._sort_key()
        if descending:
            key = key.bitwise_not()
        *lead, _ = key.shape
        rows, block = prod(lead), 1 << max(RANKED, 2).bit_length() - 1
        size = block
        while size < n:
            size *= 2
        key = key._fill_end(size - n, key.uop.dtype.max).reshape(-1, block)
        local = key._ranked_order(block, False)  # (rows * blocks, block)
        start = self._wrap(iota(rows * size // block).reshape((rows * size // block, 1))) * block
        place = (local + (start & (size - 1))).flatten()._in_memory()
        key = key._take_rows(local).flatten()._in_memory()
        while block < size:
            key, place = _merge(key, place, block)
            block *= 2
        return place.reshape(rows, size)._part(1, 0, n).reshape(*lead, n)

    def _in_memory(self) -> Self:
        """The value in memory of its own, always as a new node."""
        return self._wrap(self.uop.contiguous())

    def _take_rows(self, order: Self) -> Self:
        """values[..., order[..., i]] along the last axis: rows laid end to end, then one TAKE."""
        *lead, n = self.shape
        if not lead:
            return self._wrap(UOp(Ops.TAKE, self.uop.dtype, (self.uop, order.uop), 0))
        rows = prod(lead)
        start = self._wrap(iota(rows).reshape((rows, 1))) * n
        flat = (order.reshape(rows, order.shape[-1]) + start).uop
        taken = UOp(Ops.TAKE, self.uop.dtype, (self.uop.reshape((rows * n,)), flat), 0)
        return self._wrap(taken.reshape((*lead, order.shape[-1])))


def _lower(n: int) -> UOp:
    """The bool matrix (n, n) of j <= i."""
    return UOp(Ops.CMPLE, dtypes.bool, (iota(n).reshape((1, n)), iota(n).reshape((n, 1))))


def _merge(key: Any, place: Any, block: int) -> tuple[Any, Any]:
    """Merge neighbouring sorted blocks of a flat array, all at once: output k of a pair holds the i-th
    element of the first block or the (k - i)-th of the second, and i is found by bisection along the k-th
    diagonal (Odeh et al. 2012, "Merge Path"). Equal keys keep their order."""
    flat = key._wrap(iota(key.numel()))
    k = flat & (2 * block - 1)
    first = flat - k
    second = first + block
    low, high = (k - block).maximum(0), k.minimum(block)
    for _ in range(block.bit_length()):
        middle = (low + high) >> 1
        taken = _at(key, first + middle) <= _at(key, second + (k - 1 - middle))
        searching = low < high
        low, high = (searching & taken).where(middle + 1, low), (searching & ~taken).where(middle, high)
    other = k - low
    a, b = _at(key, first + low), _at(key, second + other)
    from_first = (low < block) & ((other >= block) | (a <= b))
    source = from_first.where(first + low, second + other)
    return from_first.where(a, b)._in_memory(), _at(place, source)._in_memory()


def _at(values: Any, index: Any) -> Any:
    """values[index] of a flat array."""
    return values._wrap(UOp(Ops.TAKE, values.uop.dtype, (values.uop, index.uop), 0))
