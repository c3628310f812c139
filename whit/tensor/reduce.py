"""Reductions.

`axis` is None (all axes), a number or a tuple; an axis named twice or out of range raises ShapeError.
Accumulation: sums and products of bool and of 8- and 16-bit integers give int32 (unsigned ones uint32); half,
bfloat16 and 8-bit floats accumulate in float32 and are rounded once at the end. `max`, `min`, sorting and
their kin treat NaN as NumPy does.
"""

from __future__ import annotations

import math
from typing import Any, Self, TypeAlias

from whit.helpers import ShapeError, prod
from whit.tensor.base import iota, scalar_shape
from whit.tensor.movement import MovementMixin
from whit.uop import DType, Op, Ops, UOp, dtypes
from whit.uop.dtype import float_of, to_dtype
from whit.uop.ops import identity
from whit.uop.uop import show_shape

Axis: TypeAlias = "int | tuple[int, ...] | list[int] | None"
Bool: TypeAlias = bool


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
