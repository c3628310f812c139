"""Sampling and its transposes: grids of positions, windows added up, rows by number, alignments (CTC), and
pooling over one and three axes."""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, Self

from whit.helpers import ArgumentError, DTypeError, ShapeError, prod
from whit.tensor.custom import Backward, run
from whit.tensor.functional import FunctionalMixin, Size
from whit.tensor.selection import iota
from whit.tensor.storage import hooks
from whit.tensor.windows import per_axis, windows
from whit.uop import DType, UOp, dtypes
from whit.uop.program import Array, Program, exp, log, param
from whit.uop.uop import show_shape

CUBIC = -0.75  # the slope of cubic interpolation at its second point


class SamplingMixin(FunctionalMixin):
    """Methods of the sampling family."""

    def affine_grid(self, size: Sequence[int], align_corners: bool = False) -> Self:
        """Positions for `grid_sample`: each output pixel's place, -1 to 1 along every axis, under an affine
        map for each image.

        Shapes: maps (n, r, r + 1), size (n, c, *out) with r axes in out -> (n, *out, r), x first.
        align_corners: -1 and 1 are the centres of the outermost pixels, not their edges. Dtypes: floats.
        Errors: ShapeError.

        >>> Tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]).affine_grid((1, 1, 1, 2)).tolist()
        [[[[-0.5, 0.0], [0.5, 0.0]]]]
        """
        sizes = tuple(size)
        out, rank = sizes[2:], len(sizes) - 2
        if self.shape != (sizes[0] if sizes else 0, rank, rank + 1) or rank < 1:
            raise ShapeError(f"affine_grid of {show_shape(self.shape)} for images {show_shape(sizes)}",
                             because="it takes maps (n, r, r + 1) and sizes (n, c, and r more)",
                             fix="give one map of r rows for each image")
        self._needs_float("affine_grid")
        result = self[:, :, rank].reshape(sizes[0], *(1,) * rank, rank)
        for axis, n in enumerate(out):  # the last axis is x
            steps = self._wrap(iota(n, dtypes.int32).cast(self.dtype))
            if align_corners:
                place = steps * (2 / max(1, n - 1)) - (1 if n > 1 else 0)
            else:
                place = (steps * 2 + 1) / n - 1
            place = place.reshape(*[n if i == axis else 1 for i in range(rank)], 1)
            column = self[:, :, rank - 1 - axis].reshape(sizes[0], *(1,) * rank, rank)
            result = result + column * place
        return result

    def grid_sample(self, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros",
                    align_corners: bool = False) -> Self:
        """The image at given positions, -1 to 1 along every axis, x first.

        Shapes: (n, c, *size) with r axes in size, grid (n, *out, r) -> (n, c, *out). mode: "bilinear" (along
        all axes), "nearest" (halves to even) or "bicubic" (two axes). padding_mode: outside are "zeros", the
        "border" or a "reflection". align_corners: as `affine_grid`.
        Dtypes: floats. Errors: ShapeError, ArgumentError, DTypeError.

        >>> Tensor([[[[1.0, 3.0]]]]).grid_sample(Tensor([[[[0.0, 0.0]]]])).tolist()
        [[[[2.0]]]]
        """
        where = self._of(grid)
        rank = self.ndim - 2
        if rank < 1 or where.ndim != rank + 2 or where.shape[-1] != rank or where.shape[0] != self.shape[0]:
            raise ShapeError(f"grid_sample of {show_shape(self.shape)} at {show_shape(where.shape)}",
                             because="an image (n, c, and r axes) takes positions (n, …, r) of as many axes",
                             fix="give a position of r numbers for every output pixel")
        for name, value, known in (("mode", mode, ("bilinear", "nearest", "bicubic")),
                                   ("padding_mode", padding_mode, ("zeros", "border", "reflection"))):
            if value not in known or (value == "bicubic" and rank != 2):
                raise ArgumentError(f"grid_sample with {name}={value!r} over {rank} axes",
                                    because="there is no such one", fix="use one of " + ", ".join(known))
        if 0 in self.shape[2:]:
            raise ShapeError(f"grid_sample of {show_shape(self.shape)}", because="there is no pixel to read",
                             fix="give images of at least one pixel")
        self._needs_float("grid_sample")
        where._needs_float("grid_sample")
        x, at = self._wide(), where._wide()
        taps = [_taps(at[..., rank - 1 - axis], n, mode, padding_mode, align_corners)
                for axis, n in enumerate(self.shape[2:])]
        images, channels = self.shape[:2]
        count, pixels = prod(where.shape[1:-1]), prod(self.shape[2:])
        rows = x.reshape(images, channels, pixels).permute(0, 2, 1).reshape(images * pixels, channels)
        first = self._wrap(iota(images, dtypes.int32)).reshape(images, 1) * pixels
        total: Any = None
        for choice in product(*taps):
            place, weight = choice[0].place, choice[0].weight
            for tap, n in zip(choice[1:], self.shape[3:], strict=True):
                place, weight = place * n + tap.place, weight * tap.weight
            read = rows[place.reshape(images, count) + first]  # (images, count, channels)
            weight = weight.reshape(images, count, 1)
            # what weighs nothing adds nothing, also where it is inf or NaN
            part = choice[0].seen(choice[1:]).reshape(images, count, 1).where(read * weight, 0)
            total = part if total is None else total + part
        result: Self = total.permute(0, 2, 1).reshape(images, channels, *where.shape[1:-1])
        return result._narrow(self.dtype)

    def fold(self, output_size: Size, kernel_size: Size, dilation: Size = 1, padding: Size = 0,
             stride: Size = 1) -> Self:
        """Windows added up where they overlap: the transpose of cutting an image into windows (PyTorch's
        fold).

        Shapes: (n, c * kernel, windows) -> (n, c, *output_size); n may be missing. Dtypes: floats; narrow
        ones are added up in float32. Errors: ShapeError, ArgumentError, DTypeError.

        >>> Tensor([[[1.0, 2.0], [3.0, 4.0]]]).fold((1, 3), (1, 2)).tolist()
        [[[[1.0, 5.0, 4.0]]]]
        """
        rank = 2 if isinstance(output_size, int) else len(tuple(output_size))
        size = per_axis(output_size, rank, "output_size")
        kernel, step = per_axis(kernel_size, rank, "kernel_size"), per_axis(stride, rank, "stride")
        wide, pad = per_axis(dilation, rank, "dilation"), per_axis(padding, rank, "padding")
        if min(*kernel, *step, *wide, 1) < 1 or min(*pad, *size, 0) < 0:
            raise ArgumentError(f"fold with kernel {kernel}, stride {step}, dilation {wide}, padding {pad}",
                                because="these are sizes", fix="use positive whole numbers")
        spans = [n + 2 * p - d * (k - 1) - 1 for n, p, d, k in zip(size, pad, wide, kernel, strict=True)]
        counts = tuple([span // s + 1 for span, s in zip(spans, step, strict=True)])
        single = self.ndim == 2
        x = self.reshape(1, *self.shape) if single else self
        taps = prod(kernel)
        if x.ndim != 3 or min(*spans, 0) < 0 or x.shape[1] % taps or x.shape[2] != prod(counts):
            raise ShapeError(f"fold of {show_shape(self.shape)} to {size}",
                             because=f"it takes (n, c * {taps}, {prod([max(0, c) for c in counts])})",
                             fix="give as many windows as the output has")
        self._needs_float("fold")
        x, channels = x._wide(), x.shape[1] // taps
        image = type(self).empty(x.shape[0], channels, *size, dtype=x.dtype, device=self.device)
        cut = windows(image.uop, kernel, step, wide, tuple([(p, p) for p in pad]))
        order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
        upstream = x.reshape(x.shape[0], channels, *kernel, *counts)
        made = hooks.gradient(self._wrap(cut.permute(order)), [image], upstream, True)[0]  # type: ignore[arg-type,list-item]
        result = self._wrap(made.uop)._narrow(self.dtype)
        return result.reshape(*result.shape[1:]) if single else result

    def embedding(self, weight: Any, padding_idx: int | None = None) -> Self:
        """Rows of a table by number. Shapes: whole numbers (…), weight (rows, size) -> (…, size).

        A negative number counts from the end, one outside of the table gives zeros. padding_idx: this row
        gets no gradient. Errors: DTypeError, ShapeError.

        >>> Tensor([1, 0]).embedding(Tensor([[1.0], [2.0]])).tolist()
        [[2.0], [1.0]]
        """
        table = self._of(weight)
        if not self.dtype.is_int:
            raise DTypeError(f"embedding of {self.dtype}", because="rows are chosen by whole numbers",
                             fix="cast the numbers to an integer dtype")
        if table.ndim != 2:
            raise ShapeError(f"embedding with a table of shape {show_shape(table.shape)}",
                             because="it has a row for each number", fix="give a table (rows, size)")
        rows: Any = table[self]
        if padding_idx is None:
            return self._wrap(rows.uop)
        fixed = self.eq(padding_idx % table.shape[0]).reshape(*self.shape, 1)
        made: Self = fixed.where(rows.detach(), rows)
        return made

    def ctc_loss(self, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
                 reduction: str = "mean", zero_infinity: bool = False) -> Self:
        """Connectionist temporal classification (Graves et al. 2006): -log of the probability that the steps,
        with repeats joined and blanks dropped, say the targets.

        Shapes: log probabilities (t, n, classes), targets of whole numbers (n, s), both lengths (n,) -> ()
        or, reduction "none", (n,); "mean" divides each by its target's length first. zero_infinity: targets
        that do not fit count 0. The gradient has none itself.
        Dtypes: floats. Errors: ShapeError, DTypeError, ArgumentError.

        >>> x = Tensor([[[0.5, 0.5]]]).log()
        >>> x.ctc_loss(Tensor([[1]]), Tensor([1]), Tensor([1])).exp().round(decimals=4).tolist()
        2.0
        """
        labels = self._of(targets)
        lengths = [self._of(v).reshape(-1).cast(dtypes.int32) for v in (input_lengths, target_lengths)]
        if self.ndim != 3 or labels.ndim != 2 or any(
            v.shape != (self.shape[1],) for v in (*lengths, labels[:, 0] if labels.shape[1] else lengths[0])):
            raise ShapeError(f"ctc_loss of {show_shape(self.shape)} with targets {show_shape(labels.shape)}",
                             because="it takes (t, n, classes), (n, s) and two times n lengths",
                             fix="pad the targets to one length")
        self._needs_float("ctc_loss")
        steps, n, classes = self.shape
        if not labels.dtype.is_int or not 0 <= blank < classes or not steps or not n:
            raise ArgumentError(f"ctc_loss of {show_shape(self.shape)}, {labels.dtype}, blank={blank}",
                                because="targets and blank are classes, and there must be a step",
                                fix="use whole numbers from 0 to below classes")
        x = self._wide()
        states = 2 * labels.shape[1] + 1
        between = labels.cast(dtypes.int32).reshape(n, -1, 1)._pad_constant(((0, 0), (0, 0), (1, 0)), blank)
        extended = between.reshape(n, states - 1)._pad_constant(((0, 0), (0, 1)), blank)
        earlier = extended._pad_constant(((0, 0), (2, 0)), blank)[:, :states]
        may_skip = (extended.ne(blank) & extended.ne(earlier)).cast(dtypes.int32)
        scores = x.permute(1, 0, 2).gather(2, extended.reshape(n, 1, states).expand(n, steps, states))
        # lengths beyond the arrays would lead outside of them
        ends = lengths[0].clamp(0, steps), lengths[1].clamp(0, labels.shape[1])
        shape, dtype = (n, steps, states), x.dtype
        values = [scores.uop, may_skip.uop, ends[0].uop, ends[1].uop]
        backward = Backward(_ctc_backward, type(self))
        made = run(_ctc_forward(shape, dtype), values, [((n,), dtype), (shape, dtype)], gradient=backward)
        loss = self._wrap(made[0])
        if zero_infinity:
            loss = loss.isinf().where(0, loss)
        if reduction == "mean":
            loss = loss / ends[1].maximum(1).cast(dtype)
        return loss._reduction(reduction)._narrow(self.dtype)

    # ---- pooling over one and three axes

    def avg_pool1d(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Self:
        """`avg_pool2d` over the last axis. Shape: (…, n) -> (…, out).

        >>> Tensor([[1.0, 3.0]]).avg_pool1d(2).tolist()
        [[2.0]]
        """
        return self.avg_pool2d(*_windows_of(1, kernel_size, stride), 1, padding)

    def avg_pool3d(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Self:
        """`avg_pool2d` over the last three axes. Shape: (…, d, h, w) -> (…, *out)."""
        return self.avg_pool2d(*_windows_of(3, kernel_size, stride), 1, padding)

    def max_pool1d(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0,
                   dilation: Size = 1) -> Self:
        """`max_pool2d` over the last axis. Shape: (…, n) -> (…, out).

        >>> Tensor([[1.0, 3.0]]).max_pool1d(2).tolist()
        [[3.0]]
        """
        made: Self = self.max_pool2d(*_windows_of(1, kernel_size, stride), dilation, padding)
        return made

    def max_pool3d(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0,
                   dilation: Size = 1) -> Self:
        """`max_pool2d` over the last three axes. Shape: (…, d, h, w) -> (…, *out)."""
        made: Self = self.max_pool2d(*_windows_of(3, kernel_size, stride), dilation, padding)
        return made

    def adaptive_avg_pool1d(self, output_size: Size) -> Self:
        """`adaptive_avg_pool2d` over the last axis.

        >>> Tensor([[1.0, 3.0]]).adaptive_avg_pool1d(1).tolist()
        [[2.0]]
        """
        return self.adaptive_avg_pool2d(per_axis(output_size, 1, "output_size"))

    def adaptive_avg_pool3d(self, output_size: Size) -> Self:
        """`adaptive_avg_pool2d` over the last three axes."""
        return self.adaptive_avg_pool2d(per_axis(output_size, 3, "output_size"))

    def adaptive_max_pool1d(self, output_size: Size) -> Self:
        """`adaptive_max_pool2d` over the last axis.

        >>> Tensor([[1.0, 3.0]]).adaptive_max_pool1d(1).tolist()
        [[3.0]]
        """
        return self.adaptive_max_pool2d(per_axis(output_size, 1, "output_size"))

    def adaptive_max_pool3d(self, output_size: Size) -> Self:
        """`adaptive_max_pool2d` over the last three axes."""
        return self.adaptive_max_pool2d(per_axis(output_size, 3, "output_size"))

    def _needs_float(self, what: str) -> None:
        if not self.dtype.is_float:
            raise DTypeError(f"{what} of {self.dtype}", because="it computes with fractions",
                             fix="cast it to a float dtype")


def _windows_of(rank: int, kernel: Size, stride: Size | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = per_axis(kernel, rank, "kernel_size")
    return sizes, sizes if stride is None else per_axis(stride, rank, "stride")


# ---- positions ---------------------------------------------------------------------------------------------


class Tap(NamedTuple):
    """A pixel along one axis that a position reads, and how much it counts (0 outside of the image)."""

    place: Any
    weight: Any
    inside: Any

    def seen(self, others: Sequence[Tap]) -> Any:
        """Whether the pixel of this and of the other axes lies in the image."""
        result = self.inside
        for other in others:
            result = result & other.inside
        return result


def _taps(at: Any, size: int, mode: str, padding: str, align: bool) -> list[Tap]:
    """What is read along one axis of `size` pixels at positions -1 to 1."""
    pixel = (at + 1) * ((size - 1) / 2) if align else ((at + 1) * size - 1) * 0.5
    if mode == "bicubic":
        low = pixel.floor().detach()
        weights = _cubic(pixel - low)
        return [_tap(_inside(low + (k - 1), size, padding, align), weight, size)
                for k, weight in enumerate(weights)]
    pixel = _inside(pixel, size, padding, align)
    if mode == "nearest":
        return [_tap(pixel.round().detach(), (pixel * 0 + 1).detach(), size)]
    low = pixel.floor().detach()
    share = pixel - low
    return [_tap(low, 1 - share, size), _tap(low + 1, share, size)]


def _tap(place: Any, weight: Any, size: int) -> Tap:
    inside = (place >= 0) & (place <= size - 1)
    return Tap(inside.where(place, 0).cast(dtypes.int32), weight, inside)


def _cubic(t: Any) -> list[Any]:
    """Keys's cubic convolution: weights of the four pixels around a position that is t behind the second."""
    def near(d: Any) -> Any:
        return ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1

    def far(d: Any) -> Any:
        return ((CUBIC * d - 5 * CUBIC) * d + 8 * CUBIC) * d - 4 * CUBIC

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _inside(pixel: Any, size: int, padding: str, align: bool) -> Any:
    """Positions moved into the image, unless zeros lie around it."""
    if padding == "zeros":
        return pixel
    if padding == "reflection":  # about the outermost pixels' centres, or edges
        low, span = (0.0, size - 1.0) if align else (-0.5, float(size))
        if not span:
            return pixel * 0
        distance = (pixel - low).abs()
        flips = (distance / span).floor().detach()
        rest = distance - flips * span
        odd = (flips - (flips * 0.5).floor() * 2).ne(0)
        pixel = odd.where(span - rest, rest) + low
    return pixel.clamp(0, size - 1)


# ---- alignments --------------------------------------------------------------------------------------------

Lattice = tuple[int, int, int]  # texts, steps, states


def _log_sum(p: Program, terms: list[UOp]) -> UOp:
    """log of the sum of exp, of which all may be -inf."""
    terms = [p.let(term) for term in terms]
    top = terms[0]
    for term in terms[1:]:
        top = term.gt(top).where(term, top)
    base = p.let(top.equal(-math.inf).where(top.const_like(0), top))
    total = exp(terms[0] - base)
    for term in terms[1:]:
        total = total + exp(term - base)
    return base + log(total)


def _earlier(a: Array, n: UOp, t: UOp, s: UOp, by: int, valid: UOp) -> UOp:
    """a[n, t, s + by] where that is valid, else -inf."""
    return valid.where(a.read((n, t, s + by), valid), UOp.const(-math.inf, a.dtype))


@lru_cache(64)
def _ctc_forward(shape: Lattice, dtype: DType) -> UOp:
    """alpha[n, t, s]: log of the probability of all ways to state s at step t."""
    texts, steps, states = shape
    p, lost, alpha = Program("ctc"), param(0, (texts,), dtype), param(1, shape, dtype)
    scores, skip = param(2, shape, dtype), param(3, (texts, states), dtypes.int32)
    ends, counts = param(4, (texts,), dtypes.int32), param(5, (texts,), dtypes.int32)
    never = UOp.const(-math.inf, dtype)
    with p.parallel(texts) as n:
        end, last = p.let(ends[n].cast(dtypes.index)), p.let(counts[n].cast(dtypes.index) * 2)
        with p.loop(steps) as t, p.loop(states) as s:
            begins = t.lt(1) & s.lt(2) & s.le(last)
            p.store(alpha, (n, t, s), begins.where(scores[n, t, s], never))
        with p.loop((end - 1).maximum(0)) as k, p.loop(last + 1) as s:
            leap = p.let(skip[n, s].not_equal(0) & s.ge(2))
            ways = [alpha[n, k, s], _earlier(alpha, n, k, s, -1, s.ge(1)), _earlier(alpha, n, k, s, -2, leap)]
            p.store(alpha, (n, k + 1, s), _log_sum(p, ways) + scores[n, k + 1, s])
        some = end.ge(1)
        final = _log_sum(p, [_earlier(alpha, n, end - 1, last, 0, some),
                             _earlier(alpha, n, end - 1, last, -1, some & last.ge(1))])
        nothing = end.lt(1) & last.lt(1)
        p.store(lost, n, nothing.where(final.const_like(0), -final))
    return p.finish()


@lru_cache(64)
def _ctc_gradient(shape: Lattice, dtype: DType) -> UOp:
    """beta[n, t, s]: log of the probability of all ways from state s at step t to the end. The share of the
    ways that pass through it is exp(alpha + beta + loss)."""
    texts, steps, states = shape
    p, slope, beta = Program("ctc_gradient"), param(0, shape, dtype), param(1, shape, dtype)
    scores, skip = param(2, shape, dtype), param(3, (texts, states), dtypes.int32)
    ends, counts = param(4, (texts,), dtypes.int32), param(5, (texts,), dtypes.int32)
    alpha, lost, given = param(6, shape, dtype), param(7, (texts,), dtype), param(8, (texts,), dtype)
    zero, never = UOp.const(0.0, dtype), UOp.const(-math.inf, dtype)
    with p.parallel(texts) as n:
        end, last = p.let(ends[n].cast(dtypes.index)), p.let(counts[n].cast(dtypes.index) * 2)
        with p.loop(steps) as t, p.loop(states) as s:
            finishes = t.equal(end - 1) & s.le(last) & s.ge(last - 1)
            p.store(beta, (n, t, s), finishes.where(zero, never))
            p.store(slope, (n, t, s), zero)
        with p.loop((end - 1).maximum(0)) as k, p.loop(last + 1) as s:
            t = end - 1 - k  # from t to t - 1
            ways = []
            for by in range(3):
                valid = (s + by).le(last)
                if by == 2:
                    valid = valid & skip.read((n, s + 2), (s + 2).le(last)).not_equal(0)
                valid = p.let(valid)
                ways.append(_earlier(beta, n, t, s, by, valid) + scores.read((n, t, s + by), valid))
            p.store(beta, (n, t - 1, s), _log_sum(p, ways))
        weight = p.let(given[n])
        with p.when(weight.not_equal(0)), p.loop(end) as t, p.loop(last + 1) as s:
            p.store(slope, (n, t, s), -weight * exp(alpha[n, t, s] + beta[n, t, s] + lost[n]))
    return p.finish()


def _ctc_backward(grads: list[Any], outputs: list[Any], values: list[Any]) -> list[Any]:
    if grads[0] is None:
        return [None] * 4
    lost, alpha = outputs
    shape, dtype = alpha.shape, alpha.dtype
    nodes = [*[value.uop for value in values], alpha.uop, lost.uop, grads[0].uop]
    made = run(_ctc_gradient(shape, dtype), nodes, [(shape, dtype), (shape, dtype)])
    return [values[0]._wrap(made[0]), None, None, None]
