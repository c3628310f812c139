"""Reductions, running reductions, searches, sets and sorting."""

from __future__ import annotations

from typing import Any, NamedTuple

from whit.array_api.creation import asarray
from whit.array_api.elementwise import pair
from whit.helpers import ArgumentError, DTypeError
from whit.tensor import Tensor
from whit.tensor.reduce import accumulator
from whit.uop import DType, dtypes
from whit.uop.uop import show_shape

Axis = int | tuple[int, ...] | None


# ---- reductions


def sum(x: Tensor, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: bool = False) -> Tensor:
    """Sums; of small integers in int32 (unsigned ones uint32), unless a dtype is given."""
    return x.sum(axis, keepdims, dtype)


def prod(x: Tensor, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: bool = False) -> Tensor:
    """Products; dtypes as `sum`."""
    return x.prod(axis, keepdims, dtype)


def max(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Maxima; NaN where there is one."""
    return x.max(axis, keepdims)


def min(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Minima; NaN where there is one."""
    return x.min(axis, keepdims)


def mean(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Means."""
    return x.mean(axis, keepdims)


def var(x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Variances, divided by the count minus the correction.

    >>> var(Tensor([1.0, 3.0])).item()
    1.0
    """
    return x.var(axis, keepdims, correction)  # type: ignore[arg-type]  # any number will do


def std(x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Square roots of the variances."""
    return x.std(axis, keepdims, correction)  # type: ignore[arg-type]  # any number will do


def all(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Whether all elements are not zero."""
    return x.all(axis, keepdims)


def any(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Whether one element is not zero."""
    return x.any(axis, keepdims)


def count_nonzero(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """How many elements are not zero."""
    return x.count_nonzero(axis, keepdims)


# ---- running reductions


def cumulative_sum(
    x: Tensor,
    /,
    *,
    axis: int | None = None,
    dtype: DType | None = None,
    include_initial: bool = False,
) -> Tensor:
    """Running sums along an axis (of a vector the only one); include_initial: from 0 on.

    >>> cumulative_sum(Tensor([1, 2, 3]), include_initial=True).tolist()
    [0, 1, 3, 6]
    """
    return _cumulative("cumulative_sum", Tensor.cumsum, 0, x, axis, dtype, include_initial)


def cumulative_prod(
    x: Tensor,
    /,
    *,
    axis: int | None = None,
    dtype: DType | None = None,
    include_initial: bool = False,
) -> Tensor:
    """Running products along an axis; include_initial: from 1 on."""
    return _cumulative("cumulative_prod", Tensor.cumprod, 1, x, axis, dtype, include_initial)


def _cumulative(
    what: str, run: Any, start: int, x: Tensor, axis: int | None, dtype: DType | None, initial: bool
) -> Tensor:
    if axis is None:
        if x.ndim != 1:
            raise ArgumentError(
                f"{what} of shape {show_shape(x.shape)}", because="only vectors need no axis", fix="name it"
            )
        axis = 0
    axis = x._axis(axis, what)
    if dtype is None:
        dtype = x.dtype if x.dtype.is_float else accumulator(x.dtype)
    result: Tensor = run(x.cast(dtype), axis)
    result = result.cast(dtype)
    if not initial:
        return result
    shape = tuple([1 if a == axis else n for a, n in enumerate(x.shape)])
    return Tensor.full(shape, start, dtype=dtype).to(x.device).cat(result, dim=axis)


# ---- searches


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Where the (first) maxima are."""
    return _along_all(x.argmax(axis, keepdims), x, axis, keepdims)


def argmin(x: Tensor, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Where the (first) minima are."""
    return _along_all(x.argmin(axis, keepdims), x, axis, keepdims)


def _along_all(found: Tensor, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    return found.reshape((1,) * x.ndim) if axis is None and keepdims else found


def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """The coordinates of the elements that are not zero, one tensor an axis; computed now."""
    if not x.ndim:
        raise ArgumentError("nonzero of a scalar", because="it has no axes", fix="reshape it to (1,)")
    found = x.nonzero()
    return tuple([found[:, a] for a in range(x.ndim)])


def searchsorted(x1: Tensor, x2: Tensor, /, *, side: str = "left", sorter: Tensor | None = None) -> Tensor:
    """Where x2 would be inserted into the sorted vector x1: before ("left") or behind ("right") its equals.

    >>> searchsorted(Tensor([1, 3, 5]), Tensor([3, 4])).tolist()
    [1, 2]
    """
    if side not in ("left", "right"):
        raise ArgumentError(f"searchsorted(side={side!r})", because="there is no such side", fix='use "left"')
    return x1.searchsorted(x2, side=side, sorter=sorter).cast(dtypes.default_int)


def isin(x1: Tensor, x2: Any, /, *, invert: bool = False) -> Tensor:
    """Whether each element of x1 is one of x2 (invert: none of them).

    >>> isin(Tensor([1, 2, 3]), Tensor([3, 1])).tolist()
    [True, False, True]
    """
    x1, x2 = pair("isin", x1, x2)
    others = x2 if isinstance(x2, Tensor) else x1.ufix(x2)
    found = x1.unsqueeze(-1).eq(others.reshape(-1)).any(-1)
    return found.logical_not() if invert else found


def where(condition: Tensor, x1: Any, x2: Any, /) -> Tensor:
    """x1 where the condition holds, else x2."""
    if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
        return condition.where(x1, x2)
    return condition.where(*pair("where", x1, x2))


def take(x: Tensor, indices: Tensor, /, *, axis: int | None = None) -> Tensor:
    """Slices along an axis by number."""
    if axis is None and x.ndim != 1:
        raise ArgumentError(
            f"take from shape {show_shape(x.shape)}", because="only vectors need no axis", fix="name it"
        )
    return x.take(indices, axis=0 if axis is None else axis)


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    """Elements by number along an axis, each its own."""
    return x.take_along_dim(indices, axis)


# ---- sorting


def sort(x: Tensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Sorted along an axis; always stable."""
    return x.sort(axis, descending)[0]


def argsort(x: Tensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The order that sorts along an axis; always stable."""
    return x.argsort(axis, descending).cast(dtypes.default_int)


# ---- sets


class UniqueAll(NamedTuple):
    """Different values, where each is first, which one each element is, and how often each occurs."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """Different values, and how often each occurs."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """Different values, and which one each element is."""

    values: Tensor
    inverse_indices: Tensor


def unique_all(x: Tensor, /) -> UniqueAll:
    """The different values in rising order, and all about them; computed now. NaNs differ from each other.

    >>> unique_all(Tensor([3, 1, 3])).counts.tolist()
    [1, 2]
    """
    flat = x.reshape(-1)
    n = flat.shape[0]
    index = dtypes.default_int
    if n == 0:
        none = Tensor.zeros(0, dtype=index).to(x.device)
        return UniqueAll(flat, none, none.reshape(x.shape), none)
    ordered, order = flat.sort()
    order = order.cast(index).realize()
    first = Tensor([True]).to(x.device).cat(ordered[1:].ne(ordered[:-1])).realize()
    group = first.cast(index).cumsum() - 1
    starts = first.nonzero().reshape(-1).cast(index)
    ends = starts[1:].cat(Tensor([n], dtype=index).to(x.device))
    inverse = group[order.argsort()].cast(index)
    return UniqueAll(ordered[starts], order[starts], inverse.reshape(x.shape), ends - starts)


def unique_counts(x: Tensor, /) -> UniqueCounts:
    """The different values in rising order and how often each occurs."""
    found = unique_all(x)
    return UniqueCounts(found.values, found.counts)


def unique_inverse(x: Tensor, /) -> UniqueInverse:
    """The different values in rising order and which one each element is."""
    found = unique_all(x)
    return UniqueInverse(found.values, found.inverse_indices)


def unique_values(x: Tensor, /) -> Tensor:
    """The different values in rising order."""
    return unique_all(x).values


def check_float(what: str, x: Tensor) -> Tensor:
    """A tensor of floats. DTypeError for others."""
    if not x.dtype.is_float:
        raise DTypeError(f"{what} of a {x.dtype} tensor", because="it takes floats", fix="cast it")
    return asarray(x)
