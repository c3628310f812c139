"""Sliding windows, convolution and pooling as movement ops and reductions. Node level, any number of spatial
axes."""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from whit.helpers import ArgumentError, ShapeError, prod
from whit.tensor.linalg import sum_of_products
from whit.uop import DType, Op, Ops, Shape, Sint, UOp, dtypes
from whit.uop.uop import show_shape

Ints = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]


def per_axis(value: Any, count: int, what: str) -> Ints:
    """One whole number for each spatial axis: a number for all of them, or one each."""
    given = tuple(value) if isinstance(value, (tuple, list)) else ()
    values = (value,) * count if isinstance(value, int) else given
    if len(values) != count or not all(isinstance(v, int) for v in values):
        raise ArgumentError(f"{what}={value!r} for {count} spatial axes",
                            because="it takes one whole number, or one for each axis",
                            fix=f"pass an int or {count} of them")
    return values


def resolve_padding(padding: Any, kernel: Ints, dilation: Ints, stride: Ints) -> Pads:
    """(before, after) of each spatial axis from: a number; one number an axis; two numbers an axis, last axis
    first, as `pad` has them; pairs; "valid"; or "same" (stride 1)."""
    count = len(kernel)
    if padding == "valid":
        return ((0, 0),) * count
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ArgumentError(f'padding="same" with stride {stride}',
                                because="the output would be smaller than the input",
                                fix="use stride 1 or give numbers")
        spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple([(span // 2, span - span // 2) for span in spans])
    if isinstance(padding, int):
        return ((padding, padding),) * count
    if isinstance(padding, str):
        raise ArgumentError(f"padding={padding!r}", because="there is no such padding",
                            fix='use "same", "valid" or numbers')
    given = tuple(padding)
    if len(given) == count and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in given):
        return tuple([(int(before), int(after)) for before, after in given])
    if all(isinstance(p, int) for p in given):
        if len(given) == count:
            return tuple([(p, p) for p in given])
        if len(given) == 2 * count:
            return tuple([(given[2 * i], given[2 * i + 1]) for i in reversed(range(count))])
    raise ArgumentError(f"padding={padding!r} for {count} spatial axes",
                        because="it takes one number, one or two an axis, or pairs",
                        fix=f"pass an int, {count} or {2 * count} of them")


def pad_or_crop(u: UOp, pads: Sequence[tuple[int, int]]) -> UOp:
    """Zeros around the last len(pads) axes; negative widths cut off."""
    lead = u.ndim - len(pads)
    keep: list[tuple[Sint, Sint]] = [(0, size) for size in u.shape[:lead]]
    u = u.shrink((*keep, *[(max(0, -before), size - max(0, -after))
                           for (before, after), size in zip(pads, u.shape[lead:], strict=True)]))
    return u.pad((*[(0, 0)] * lead, *[(max(0, before), max(0, after)) for before, after in pads]))


class Geometry(NamedTuple):
    """Sizes of one spatial axis: input, kernel, stride, dilation."""

    size: int
    kernel: int
    stride: int
    dilation: int

    @property
    def span(self) -> int:
        """How many inputs one window reaches over."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def out(self) -> int:
        """How many windows fit."""
        return (self.size - self.span) // self.stride + 1

    @property
    def disjoint(self) -> bool:
        """Whether windows do not overlap, so that a reshape makes them."""
        return self.kernel == 1 or (self.dilation == 1 and self.kernel <= self.stride)

    @property
    def row(self) -> int:
        """Length of a row of the skewed layout (see `windows`)."""
        reach = self.size + (self.kernel - 1) * self.dilation
        return reach + max(0, self.out * self.stride - self.size - self.dilation)


def windows(u: UOp, kernel: Ints, stride: Ints, dilation: Ints, pads: Pads) -> UOp:
    """All windows over the last axes of u with zeros around: out[…, y, ky] = u[…, y * stride + ky *
    dilation].

    Shapes: (…, *size) -> (…, *out, *kernel).
    """
    for op, arg in _steps(u.shape, kernel, stride, dilation, pads):
        u = u.reshape(arg) if op is Ops.RESHAPE else UOp(op, u.dtype, (u,), arg)
    return u


@lru_cache(1024)
def _steps(shape: Shape, kernel: Ints, stride: Ints, dilation: Ints, pads: Pads) -> tuple[tuple[Op, Any],
                                                                                          ...]:
    """The movement ops that make the windows of a value of that shape."""
    start = ones(shape, dtypes.bool).contiguous()  # a node that no movement op melts into
    node = _windows(pad_or_crop(start, pads), kernel, stride, dilation)
    steps = []
    while node is not start:
        steps.append((node.op, node.arg))
        node = node.src[0]
    return tuple(reversed(steps))


def _windows(u: UOp, kernel: Ints, stride: Ints, dilation: Ints) -> UOp:
    """The windows, step by step.

    Windows that overlap come from a skew: with P the row length, k copies of a row end to end, read again in
    rows of P + dilation, have in row ky the elements ky * dilation further on. Zeros in front of the row keep
    the same true of the gradient, so that neither direction is left with a division that the index algebra
    cannot remove.
    """
    lead = u.ndim - len(kernel)
    batch = u.shape[:lead]
    axes = [Geometry(size, k, s, d)
            for size, k, s, d in zip(spatial_sizes("windows", u.shape, len(kernel)), kernel, stride, dilation,
                                     strict=True)]
    u = pad_or_crop(u, [_first_pad(a) for a in axes])
    if not all(a.disjoint for a in axes):
        u = u.reshape(_shape(batch, [(a.out * a.stride,) if a.disjoint else (1, a.row) for a in axes]))
        u = u.expand(_shape(batch, [(a.out * a.stride,) if a.disjoint else (a.kernel, a.row) for a in axes]))
        u = u.reshape(_shape(batch, [(a.out * a.stride,) if a.disjoint else (a.kernel * a.row,)
                                     for a in axes]))
        u = pad_or_crop(u, [(0, 0) if a.disjoint else (0, a.kernel * a.dilation) for a in axes])
        u = u.reshape(_shape(batch, [(a.out * a.stride,) if a.disjoint else (a.kernel, a.row + a.dilation)
                                     for a in axes]))
        u = u.shrink(_limits(batch, [[(0, a.out * a.stride)] if a.disjoint else [(0, a.kernel), _useful(a)]
                                     for a in axes]))
    u = u.reshape(_shape(batch, [(a.out, a.stride) if a.disjoint else (a.kernel, a.out, a.stride)
                                 for a in axes]))
    u = u.shrink(_limits(batch, [[(0, a.out), (0, a.kernel)] if a.disjoint
                                 else [(0, a.kernel), (0, a.out), (0, 1)] for a in axes]))
    u = u.reshape(_shape(batch, [(a.out, a.kernel) if a.disjoint else (a.kernel, a.out) for a in axes]))
    outs = [lead + 2 * i + (0 if a.disjoint else 1) for i, a in enumerate(axes)]
    kernels = [lead + 2 * i + (1 if a.disjoint else 0) for i, a in enumerate(axes)]
    return u.permute((*range(lead), *outs, *kernels))


def _first_pad(a: Geometry) -> tuple[int, int]:
    if a.disjoint:
        return 0, a.out * a.stride - a.size
    before = (a.kernel - 1) * a.dilation
    return before, a.row - a.size - before


def _useful(a: Geometry) -> tuple[int, int]:
    """The part of a skewed row that windows start in."""
    before = (a.kernel - 1) * a.dilation
    return before, before + a.out * a.stride


def _shape(batch: Shape, parts: list[Ints]) -> Shape:
    return (*batch, *[size for part in parts for size in part])


def _limits(batch: Shape, parts: list[list[tuple[int, int]]]) -> tuple[tuple[Sint, Sint], ...]:
    keep: list[tuple[Sint, Sint]] = [(0, size) for size in batch]
    return (*keep, *[limit for part in parts for limit in part])


def spatial_sizes(what: str, shape: Shape, count: int) -> Ints:
    """The last `count` sizes, which windows need as plain numbers."""
    sizes = shape[len(shape) - count:]
    plain = tuple([size for size in sizes if isinstance(size, int)])
    if len(plain) != len(sizes):
        raise ShapeError(f"{what} of shape {show_shape(shape)}", because="its spatial sizes are symbolic",
                         fix="shrink them to known sizes")
    return plain


def check_windows(what: str, sizes: Ints, pads: Pads, kernel: Ints, stride: Ints, dilation: Ints) -> None:
    """Every axis has room for a window."""
    if any(n < 1 for n in (*kernel, *stride, *dilation)):
        raise ArgumentError(f"{what} with kernel {kernel}, stride {stride}, dilation {dilation}",
                            because="each must be at least 1",
                            fix="use positive numbers")
    for size, (before, after), k, d in zip(sizes, pads, kernel, dilation, strict=True):
        if size + before + after < d * (k - 1) + 1:
            raise ShapeError(f"{what} of spatial shape {show_shape(sizes)} with kernel {kernel}",
                             because=f"a window reaches over {d * (k - 1) + 1} elements, there are "
                                     f"{size + before + after} with padding",
                             fix="use a smaller kernel or more padding")


# ---- convolution -------------------------------------------------------------------------------------------


def convolve(x: UOp, weight: UOp, groups: int, stride: Any, dilation: Any, padding: Any, dtype: DType
             | None) -> UOp:
    """Cross-correlation. Shapes: x (n, groups * c, *size), weight (groups * r, c, *kernel) -> (n, groups * r,
    *out)."""
    count = weight.ndim - 2
    kernel = spatial_sizes("convolution", weight.shape, count)
    stride_, dilation_ = per_axis(stride, count, "stride"), per_axis(dilation, count, "dilation")
    pads = resolve_padding(padding, kernel, dilation_, stride_)
    channels, outputs = x.shape[1], weight.shape[0]
    if channels != groups * weight.shape[1] or outputs % groups:
        raise ShapeError(
            f"convolution of {show_shape(x.shape)} with weight {show_shape(weight.shape)}, groups={groups}",
            because=f"the input has {channels} channels, the weight wants {groups} * {weight.shape[1]}, "
                    f"and its {outputs} outputs must divide into the groups",
            fix="the weight is (outputs, input channels / groups, *kernel)")
    sizes = spatial_sizes("convolution", x.shape, count)
    check_windows("convolution", sizes, pads, kernel, stride_, dilation_)
    w = windows(x, kernel, stride_, dilation_, pads)  # (n, g * c, *out, *kernel)
    out = w.shape[2:2 + count]
    left = w.reshape((x.shape[0], groups, 1, weight.shape[1], *out, *kernel))
    right = weight.reshape((1, groups, outputs // groups, weight.shape[1], *(1,) * count, *kernel))
    axes = (3, *range(4 + count, 4 + 2 * count))
    return sum_of_products(left, right, axes, dtype).reshape((x.shape[0], outputs, *out))


def convolve_transposed(x: UOp, weight: UOp, groups: int, stride: Any, dilation: Any, padding: Any,
                        extra: Any) -> UOp:
    """The gradient of a convolution as an operation. weight (groups * c, r, *kernel) -> (n, groups * r,
    *out)."""
    count = weight.ndim - 2
    kernel = spatial_sizes("transposed convolution", weight.shape, count)
    stride_, dilation_ = per_axis(stride, count, "stride"), per_axis(dilation, count, "dilation")
    more = per_axis(extra, count, "output_padding")
    pads = resolve_padding(padding, kernel, dilation_, (1,) * count)
    if x.shape[1] != weight.shape[0] or weight.shape[0] % groups:
        raise ShapeError(
            f"transposed convolution of {show_shape(x.shape)} with weight {show_shape(weight.shape)}, "
            f"groups={groups}",
            because=f"the input has {x.shape[1]} channels, the weight wants {weight.shape[0]}, in equal "
                    "groups",
            fix="the weight is (input channels, outputs / groups, *kernel)")
    sizes = spatial_sizes("transposed convolution", x.shape, count)
    inputs, r = weight.shape[0] // groups, weight.shape[1]
    w = weight.reshape((groups, inputs, r, *kernel)).permute((0, 2, 1, *range(3, 3 + count)))
    w = w.reshape((groups * r, inputs, *kernel)).flip(tuple(range(2, 2 + count)))
    spread = _with_gaps(x, sizes, stride_)
    widths = tuple([(d * (k - 1) - before, d * (k - 1) - after + e)
                    for k, d, (before, after), e in zip(kernel, dilation_, pads, more, strict=True)])
    return convolve(spread, w, groups, 1, dilation_, widths, None)


def _with_gaps(x: UOp, sizes: Ints, stride: Ints) -> UOp:
    """stride - 1 zeros between neighbours along the last axes."""
    if all(s == 1 for s in stride):
        return x
    batch, keep = x.shape[:2], [(0, 0), (0, 0)]
    u = x.reshape(_shape(batch, [(n, 1) for n in sizes]))
    u = u.pad((*keep, *[width for s in stride for width in ((0, 0), (0, s - 1))]))
    u = u.reshape((*batch, *[n * s for n, s in zip(sizes, stride, strict=True)]))
    return pad_or_crop(u, [(0, 1 - s) for s in stride])


# ---- pooling -----------------------------------------------------------------------------------------------


class Pooling(NamedTuple):
    """The resolved arguments of a pooling call. `pads`: what the caller asked for; `ceiling`: with room for
    the last, partly filled window."""

    kernel: Ints
    stride: Ints
    dilation: Ints
    pads: Pads
    ceiling: Pads
    sizes: Ints


def pooling(what: str, shape: Shape, kernel: Any, stride: Any, dilation: Any, padding: Any,
            ceil_mode: bool) -> Pooling:
    """Check and resolve the arguments of a pooling call."""
    kernel_ = (kernel, kernel) if isinstance(kernel, int) else tuple(kernel)
    count = len(kernel_)
    if len(shape) < count:
        raise ShapeError(f"{what} of shape {show_shape(shape)} with kernel {kernel_}",
                         because=f"it has fewer than {count} axes",
                         fix="give the kernel one size for each spatial axis")
    stride_ = kernel_ if stride is None else per_axis(stride, count, "stride")
    dilation_ = per_axis(dilation, count, "dilation")
    pads = resolve_padding(padding, kernel_, dilation_, stride_)
    sizes = spatial_sizes(what, shape, count)
    check_windows(what, sizes, pads, kernel_, stride_, dilation_)
    ceiling = pads
    if ceil_mode:
        ceiling = tuple([_ceil_pads(size, pair, k, s, d)
                         for size, pair, k, s, d in zip(sizes, pads, kernel_, stride_, dilation_,
                                                        strict=True)])
    return Pooling(kernel_, stride_, dilation_, pads, ceiling, sizes)


def _ceil_pads(size: int, pads: tuple[int, int], kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Room for one more window, if it starts inside the input or the padding before it."""
    span, whole = dilation * (kernel - 1) + 1, size + sum(pads)
    out = -(-(whole - span) // stride) + 1
    if (out - 1) * stride >= size + pads[0]:
        out -= 1
    return pads[0], max(pads[1], (out - 1) * stride + span - size - pads[0])


def pooled_windows(u: UOp, p: Pooling, pads: Pads, fill: float | int | bool = 0) -> UOp:
    """Windows over u with `fill` around it. Shape (…, *out, *kernel)."""
    if fill != 0 and any(width for pair in pads for width in pair):
        inside = pad_or_crop(ones(u.shape[u.ndim - len(pads):], dtypes.bool), pads)
        u = inside.where(pad_or_crop(u, pads), UOp.const(fill, u.dtype))
        pads = ((0, 0),) * len(pads)
    return windows(u, p.kernel, p.stride, p.dilation, pads)


def ones(shape: Shape, dtype: DType) -> UOp:
    """A constant array of ones."""
    return UOp.const(1, dtype).reshape((1,) * len(shape)).expand(shape)


def fold_windows(w: UOp, op: Op, p: Pooling) -> UOp:
    """A reduction of the last axes, which hold the windows' elements. They are reduced where they lie in the
    image, so that gradients are written along its rows."""
    lead = w.ndim - len(p.kernel)
    if w.op is Ops.PERMUTE and list(w.arg[:lead]) == sorted(w.arg[:lead]):
        return w.src[0].reduce(op, tuple(sorted(w.arg[lead:])))
    return w.reduce(op, tuple(range(lead, w.ndim)))


def average_pool(u: UOp, p: Pooling, count_include_pad: bool) -> UOp:
    """Window means of floats."""
    w = pooled_windows(u, p, p.ceiling)
    total = fold_windows(w, Ops.ADD, p)
    extended = p.ceiling != p.pads
    if (count_include_pad or all(pair == (0, 0) for pair in p.pads)) and not extended:
        return total * total.const_like(1 / prod(p.kernel))
    if count_include_pad:
        inner = tuple([size + sum(pair) for size, pair in zip(p.sizes, p.pads, strict=True)])
        counted = pooled_windows(ones(inner, u.dtype), p,
                                 tuple([(0, b[1] - a[1]) for a, b in zip(p.pads, p.ceiling, strict=True)]))
    else:
        counted = pooled_windows(ones(p.sizes, u.dtype), p, p.ceiling)
    return total.alu(Ops.FDIV, fold_windows(counted, Ops.ADD, p))


def max_pool(u: UOp, p: Pooling) -> UOp:
    """Window maxima; padding never wins."""
    w = pooled_windows(u, p, p.ceiling, u.dtype.min)
    return fold_windows(w, Ops.MAX, p)


def max_pool_indices(u: UOp, out: UOp, p: Pooling) -> UOp:
    """For each maximum its flat position in the spatial axes (the first, where several are equal), int32."""
    w = pooled_windows(u, p, p.ceiling, u.dtype.min)
    total = prod(p.sizes)
    positions = UOp(Ops.IOTA, dtypes.int32, (), total).reshape(p.sizes)
    places = pooled_windows(positions, p, p.ceiling, total)
    best = out.reshape((*out.shape, *(1,) * len(p.kernel)))
    is_best = w.equal(best) | w.not_equal(w) if u.dtype.is_float else w.equal(best)
    first = fold_windows(is_best.where(places, UOp.const(total, dtypes.int32)), Ops.MIN, p)
    return first.minimum(max(0, total - 1))


def adaptive_pool(u: UOp, axis: int, old: int, new: int, op: Op) -> UOp:
    """Means (op ADD) or maxima along one axis over `new` windows, from floor(i * old / new) to ceil((i + 1) *
    old / new)."""
    lead, rest = u.shape[:axis], u.shape[axis + 1:]
    split = u.reshape((*lead, new, old // new, *rest)) if old % new == 0 else u.reshape((*lead, 1, old,
                                                                                         *rest))
    if old % new:
        window = UOp(Ops.IOTA, dtypes.int64, (), new).reshape((new, 1, *(1,) * len(rest)))
        place = UOp(Ops.IOTA, dtypes.int64, (), old).reshape((old, *(1,) * len(rest)))
        start, stop = window * old // new, ((window + 1) * old + (new - 1)) // new
        inside = place.ge(start) & place.lt(stop)
        split = inside.where(split, u.const_like(0 if op is Ops.ADD else u.dtype.min))
    folded = split.reduce(op, (axis + 1,))
    if op is Ops.MAX:
        return folded
    if old % new == 0:
        return folded * u.const_like(new / old)
    return folded / (stop - start).reshape((new, *(1,) * len(rest))).cast(u.dtype)
