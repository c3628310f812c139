"""The functions of neural networks: convolution, pooling, normalisation, attention, dropout, losses,
resizing."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

from whit.helpers import TRAINING, ArgumentError, DTypeError, ShapeError, prod
from whit.tensor.base import check_devices
from whit.tensor.decompositions import DecompositionMixin
from whit.tensor.indexing import NARROW
from whit.tensor.resize import resize_cubic, resize_linear, resize_nearest
from whit.tensor.selection import iota, plain
from whit.tensor.windows import (
    adaptive_pool,
    average_pool,
    convolve,
    convolve_transposed,
    max_pool,
    max_pool_indices,
    pooling,
    spatial_sizes,
)
from whit.uop import DType, Op, Ops, Sint, UOp, dtypes
from whit.uop.dtype import common_dtype, to_dtype
from whit.uop.uop import show_shape

Size = int | Sequence[int]


class FunctionalMixin(DecompositionMixin):
    """Methods of the functional family."""

    def sequential(self, layers: Sequence[Callable[[Any], Any]]) -> Self:
        """Apply functions one after the other.

        >>> Tensor([1.0, -1.0]).sequential([lambda x: x * 2, Tensor.relu]).tolist()
        [2.0, 0.0]
        """
        x: Any = self
        if not isinstance(layers, (list, tuple)) or not all(callable(layer) for layer in layers):
            raise ArgumentError(
                f"sequential of {repr(layers)[:60]}",
                because="it takes a list of functions of a tensor",
                fix="pass layers such as nn.Linear(2, 3), or functions",
            )
        for layer in layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]

    def _wide(self) -> Self:
        """As a float of at least 32 bits: what sums and exponentials are computed in."""
        return self.cast(dtypes.float32) if not self.dtype.is_float or self.dtype in NARROW else self

    def _narrow(self, like: DType) -> Self:
        """Back to a float dtype after `_wide`; integers stay floats."""
        return self.cast(like) if like.is_float else self

    # ---- convolution

    def conv2d(self, weight: Any, bias: Any = None, groups: int = 1, stride: Size = 1, dilation: Size = 1,
               padding: Any = 0, dtype: DType | str | None = None) -> Self:
        """Cross-correlation over as many spatial axes as the weight has (1, 2, 3, …).

        Shapes: (n, groups * c, *size), weight (groups * r, c, *kernel), bias (groups * r,) -> (n, groups * r,
        *out). n may be missing. padding: a number, one an axis, two an axis (last axis first), pairs, "same"
        or "valid".
        Dtypes: promoted; narrow floats accumulate in float32. Errors: ShapeError, ArgumentError.

        >>> Tensor.ones(1, 1, 3, 3).conv2d(Tensor.ones(1, 1, 2, 2)).tolist()
        [[[[4.0, 4.0], [4.0, 4.0]]]]
        """
        x, w, single = self._conv_operands("conv2d", weight)
        wanted = None if dtype is None else to_dtype(dtype)
        return self._finish_conv(convolve(x, w, groups, stride, dilation, padding, wanted), bias, single)

    def conv_transpose2d(self, weight: Any, bias: Any = None, groups: int = 1, stride: Size = 1,
                         dilation: Size = 1, padding: Any = 0, output_padding: Size = 0) -> Self:
        """The transposed convolution (the gradient of `conv2d` for its input), over any number of spatial
        axes.

        Shapes: (n, groups * c, *size), weight (groups * c, r, *kernel) -> (n, groups * r, *out) with
        out = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1.

        >>> Tensor.ones(1, 1, 1, 1).conv_transpose2d(Tensor.ones(1, 1, 2, 2)).tolist()
        [[[[1.0, 1.0], [1.0, 1.0]]]]
        """
        x, w, single = self._conv_operands("conv_transpose2d", weight)
        out = convolve_transposed(x, w, groups, stride, dilation, padding, output_padding)
        return self._finish_conv(out, bias, single)

    def _conv_operands(self, what: str, weight: Any) -> tuple[UOp, UOp, bool]:
        w, x = self._of(weight).uop, self.uop
        count = w.ndim - 2
        if count < 1 or x.ndim not in (count + 1, count + 2):
            raise ShapeError(f"{what} of {show_shape(x.shape)} with weight {show_shape(w.shape)}",
                             because=f"a weight with {max(count, 0)} spatial axes needs an input with "
                                     f"{max(count, 0) + 2}",
                             fix="give both a channel axis and the input a batch axis")
        single = x.ndim == count + 1
        if single:
            x = x.reshape((1, *x.shape))
        common = common_dtype(x.dtype, w.dtype)
        check_devices(what, x, w)
        return x.cast(common), w.cast(common), single

    def _finish_conv(self, result: UOp, bias: Any, single: bool) -> Self:
        """Add the bias to each output channel; drop the batch axis that was added."""
        out = self._wrap(result)
        if bias is not None:
            bias = self._of(bias)
            if bias.shape != (out.shape[1],):
                raise ShapeError(
                    f"convolution with {out.shape[1]} outputs and a bias of shape {show_shape(bias.shape)}",
                    because="it takes one number for each output channel",
                    fix=f"reshape it to ({out.shape[1]},)")
            out = out.add(bias.reshape(-1, *(1,) * (out.ndim - 2)))
        return self._wrap(out.uop.reshape(out.uop.shape[1:])) if single else out

    def conv1d(self, weight: Any, bias: Any = None, groups: int = 1, stride: Size = 1, dilation: Size = 1,
               padding: Any = 0) -> Self:
        """`conv2d` for one spatial axis."""
        return self._with_rank("conv1d", weight, 3).conv2d(weight, bias, groups, stride, dilation, padding)

    def conv3d(self, weight: Any, bias: Any = None, groups: int = 1, stride: Size = 1, dilation: Size = 1,
               padding: Any = 0) -> Self:
        """`conv2d` for three spatial axes."""
        return self._with_rank("conv3d", weight, 5).conv2d(weight, bias, groups, stride, dilation, padding)

    def conv_transpose1d(self, weight: Any, bias: Any = None, groups: int = 1, stride: Size = 1,
                         dilation: Size = 1, padding: Any = 0, output_padding: Size = 0) -> Self:
        """`conv_transpose2d` for one spatial axis."""
        return self._with_rank("conv_transpose1d", weight, 3).conv_transpose2d(
            weight, bias, groups, stride, dilation, padding, output_padding)

    def conv_transpose3d(self, weight: Any, bias: Any = None, groups: int = 1, stride: Size = 1,
                         dilation: Size = 1, padding: Any = 0, output_padding: Size = 0) -> Self:
        """`conv_transpose2d` for three spatial axes."""
        return self._with_rank("conv_transpose3d", weight, 5).conv_transpose2d(
            weight, bias, groups, stride, dilation, padding, output_padding)

    def _with_rank(self, what: str, weight: Any, rank: int) -> Self:
        shape = self._of(weight).uop.shape
        if len(shape) != rank:
            raise ShapeError(f"{what} with a weight of shape {show_shape(shape)}",
                             because=f"the weight must have {rank} axes",
                             fix="reshape the weight")
        return self

    # ---- pooling

    def avg_pool2d(self, kernel_size: Size = (2, 2), stride: Size | None = None, dilation: Size = 1,
                   padding: Any = 0,
                   ceil_mode: bool = False, count_include_pad: bool = True) -> Self:
        """The mean of each window over the last axes, as many as kernel_size has entries (an int means two).
        Floats.

        stride None: kernel_size. ceil_mode: also a last window that is only partly filled. count_include_pad:
        padding counts as zeros; False: means are over what is there.

        >>> Tensor([[1.0, 2.0], [3.0, 6.0]]).avg_pool2d(2).tolist()
        [[3.0]]
        """
        p = pooling("avg_pool2d", self.uop.shape, kernel_size, stride, dilation, padding, ceil_mode)
        return self._wrap(average_pool(self._wide().uop, p, count_include_pad))._narrow(self.dtype)

    def max_pool2d(self, kernel_size: Size = (2, 2), stride: Size | None = None, dilation: Size = 1,
                   padding: Any = 0,
                   ceil_mode: bool = False, return_indices: bool = False) -> Any:
        """The maximum of each window over the last axes, as many as kernel_size has entries (an int means
        two). Any dtype.

        return_indices: also the flat position of each maximum in the spatial axes (int32), for
        `max_unpool2d`.

        >>> Tensor([[1, 2], [3, 6]]).max_pool2d(2).tolist()
        [[6]]
        """
        p = pooling("max_pool2d", self.uop.shape, kernel_size, stride, dilation, padding, ceil_mode)
        if not return_indices:
            return self._wrap(max_pool(self.uop, p))
        kept = self.contiguous().uop  # so that each maximum equals its element to the last bit
        out = max_pool(kept, p)
        return self._wrap(out), self._wrap(max_pool_indices(kept, out, p))

    def max_unpool2d(self, indices: Any, kernel_size: Size = (2, 2), stride: Size | None = None,
                     dilation: Size = 1,
                     padding: Any = 0, output_size: Sequence[int] | None = None) -> Self:
        """Put maxima back where `max_pool2d` found them, zeros elsewhere. output_size: the spatial sizes (or
        the whole shape)."""
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        count = len(kernel)
        p = pooling("max_unpool2d", (*kernel,), kernel, stride, dilation, 0, False)
        pads = padding if isinstance(padding, int) else tuple(padding)
        before = (pads,) * count if isinstance(pads, int) else pads[:count]
        sizes = spatial_sizes("max_unpool2d", self.uop.shape, count)
        if output_size is None:
            full = tuple([(n - 1) * s - 2 * b + d * (k - 1) + 1
                          for n, s, b, d, k in zip(sizes, p.stride, before, p.dilation, kernel, strict=True)])
        else:
            full = tuple(output_size)[-count:]
        batch = self.uop.shape[:-count]
        index = self._of(indices).reshape(*batch, prod(sizes))
        empty = UOp.const(0, self.dtype).reshape((1,) * (len(batch) + 1)).expand((*batch, prod(full)))
        return self._wrap(empty).scatter(-1, index, self.reshape(*batch, prod(sizes))).reshape(*batch, *full)

    def adaptive_avg_pool2d(self, output_size: Size) -> Self:
        """Means over the last axes to a given size (an int means two axes): window i runs from floor(i * in /
        out) to ceil((i + 1) * in / out). Floats.

        >>> Tensor([[1.0, 3.0, 5.0]]).adaptive_avg_pool2d((1, 2)).tolist()
        [[2.0, 4.0]]
        """
        return self._wrap(self._adaptive("adaptive_avg_pool2d", self._wide().uop, output_size,
                                         Ops.ADD))._narrow(
            self.dtype)

    def adaptive_max_pool2d(self, output_size: Size) -> Self:
        """Maxima over the windows of `adaptive_avg_pool2d`. Any dtype."""
        return self._wrap(self._adaptive("adaptive_max_pool2d", self.uop, output_size, Ops.MAX))

    def _adaptive(self, what: str, u: UOp, output_size: Size, op: Op) -> UOp:
        """Fold each axis over windows of the same number; a mean is a product of means along the axes."""
        size = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
        olds = spatial_sizes(what, u.shape, len(size))
        if len(olds) != len(size) or any(n < 1 for n in (*size, *olds)):
            raise ShapeError(f"{what} of {show_shape(u.shape)} to {size}",
                             because="each size must be at least 1",
                             fix="give one size for each of the last axes")
        for axis, (new, old) in enumerate(zip(size, olds, strict=True), u.ndim - len(size)):
            u = adaptive_pool(u, axis, old, new, op)
        return u

    def pixel_shuffle(self, upscale_factor: int) -> Self:
        """Channels to space. Shape: (…, c * r * r, h, w) -> (…, c, h * r, w * r).

        >>> Tensor([[[1]], [[2]], [[3]], [[4]]]).pixel_shuffle(2).tolist()
        [[[1, 2], [3, 4]]]
        """
        r, shape = upscale_factor, self.shape
        if self.ndim < 3 or r < 1 or shape[-3] % (r * r):
            raise ShapeError(f"pixel_shuffle of {show_shape(shape)} by {r}",
                             because=f"the channels, third from the end, must be a multiple of {r} * {r}",
                             fix="use another factor")
        c, h, w = shape[-3] // (r * r), shape[-2], shape[-1]
        n = self.ndim - 3
        u = self.uop.reshape((*shape[:-3], c, r, r, h, w)).permute((*range(n), n, n + 3, n + 1, n + 4, n + 2))
        return self._wrap(u.reshape((*shape[:-3], c, h * r, w * r)))

    def pixel_unshuffle(self, downscale_factor: int) -> Self:
        """Space to channels: the inverse of `pixel_shuffle`."""
        r, shape = downscale_factor, self.shape
        if self.ndim < 3 or r < 1 or shape[-2] % r or shape[-1] % r:
            raise ShapeError(f"pixel_unshuffle of {show_shape(shape)} by {r}",
                             because=f"height and width must be multiples of {r}", fix="use another factor")
        c, h, w = shape[-3], shape[-2] // r, shape[-1] // r
        n = self.ndim - 3
        u = self.uop.reshape((*shape[:-3], c, h, r, w, r)).permute((*range(n), n, n + 2, n + 4, n + 1, n + 3))
        return self._wrap(u.reshape((*shape[:-3], c * r * r, h, w)))

    # ---- softmax and normalisation

    def softmax(self, axis: int = -1, dtype: DType | str | None = None) -> Self:
        """exp(x) / sum(exp(x)) along an axis, computed in float32 or wider after subtracting the maximum.

        >>> Tensor([0.0, 0.0]).softmax().tolist()
        [0.5, 0.5]
        """
        x, _ = self._shifted(axis)
        e = x.exp()
        total = self._wrap(_sum_keep(e.uop, self._softmax_axis(axis)))
        return (e * total.reciprocal())._narrow(self.dtype if dtype is None else to_dtype(dtype))

    def log_softmax(self, axis: int = -1, dtype: DType | str | None = None) -> Self:
        """log(softmax(x)) along an axis, without overflow.

        >>> Tensor([0.0, 0.0]).log_softmax().exp().round(decimals=4).tolist()
        [0.5, 0.5]
        """
        x, _ = self._shifted(axis)
        total = self._wrap(_sum_keep(x.exp().uop, self._softmax_axis(axis)))
        return (x - total.log())._narrow(self.dtype if dtype is None else to_dtype(dtype))

    def softmin(self, axis: int = -1, dtype: DType | str | None = None) -> Self:
        """softmax(-x)."""
        return (-self._wide()).softmax(axis)._narrow(self.dtype if dtype is None else to_dtype(dtype))

    def _softmax_axis(self, axis: int) -> tuple[int, ...]:
        return self._axes(axis, "softmax")

    def _shifted(self, axis: int) -> tuple[Self, Self]:
        """(x - max, max) in a wide float; no gradient flows through the maximum, on which the results do not
        depend."""
        x = self._wide()
        axes = self._softmax_axis(axis)
        peak = self._wrap(_keep(x.uop, x.uop.reduce(Ops.MAX, axes), axes).detach())
        return x - peak, peak

    def layernorm(self, axis: int | tuple[int, ...] = -1, eps: float = 1e-5) -> Self:
        """(x - mean) / sqrt(variance + eps) over the axes, computed in float32 or wider (Ba, Kiros and Hinton
        2016).

        >>> Tensor([1.0, 3.0]).layernorm(eps=0).tolist()
        [-1.0, 1.0]
        """
        x, axes = self._wide(), self._axes(axis, "layernorm")
        centered = x - self._wrap(_mean_keep(x.uop, axes))
        variance = self._wrap(_mean_keep((centered * centered).uop, axes))
        return (centered * (variance + eps).rsqrt())._narrow(self.dtype)

    def rms_norm(self, weight: Any = None, eps: float = 1e-6, axis: int | tuple[int, ...] = -1) -> Self:
        """x / sqrt(mean(x * x) + eps), times weight (Zhang and Sennrich 2019), computed in float32 or wider.

        >>> Tensor([3.0, 4.0]).rms_norm(eps=0).round(decimals=3).tolist()
        [0.8489999771118164, 1.13100004196167]
        """
        x = self._wide()
        square = self._wrap(_mean_keep((x * x).uop, self._axes(axis, "rms_norm")))
        scaled = (x * (square + eps).rsqrt())._narrow(self.dtype)
        return scaled if weight is None else scaled * weight

    def batchnorm(self, weight: Any, bias: Any, mean: Any, invstd: Any,
                  axis: int | tuple[int, ...] = 1) -> Self:
        """(x - mean) * invstd * weight + bias, where these have one entry for each index of `axis` (Ioffe and
        Szegedy 2015); weight and bias may be None. An invstd with x's rank is used as it is."""
        x = self._wide()
        axes = self._axes(axis, "batchnorm")
        shape = tuple([size if i in axes else 1 for i, size in enumerate(self.shape)])

        def channels(value: Any) -> Any:
            return self._of(value)._wide().reshape(*shape)

        result: Self = x - channels(mean)
        if weight is not None:
            result = result * channels(weight)
        inverse = self._of(invstd)._wide()
        result = result * (inverse.reshape(*shape) if inverse.ndim == len(axes) else inverse)
        if bias is not None:
            result = result + channels(bias)
        return result._narrow(self.dtype)

    def normalize(self, p: float = 2.0, dim: int | tuple[int, ...] = 1, eps: float = 1e-12) -> Self:
        """x divided by its p-norm along dim (by eps if that is greater).

        >>> Tensor([[3.0, 4.0]]).normalize().round(decimals=2).tolist()
        [[0.6000000238418579, 0.800000011920929]]
        """
        x = self._wide()
        axes = self._axes(dim, "normalize")
        if p == 2:
            norm = self._wrap(_sum_keep((x * x).uop, axes)).sqrt()
        elif p == math.inf:
            norm = self._wrap(_keep(x.uop, x.abs().uop.reduce(Ops.MAX, axes), axes))
        else:
            norm = self._wrap(_sum_keep((x.abs() ** p).uop, axes)) ** (1 / p)
        return (x / norm.maximum(eps))._narrow(self.dtype)

    # ---- attention and dropout

    def dropout(self, p: float = 0.5) -> Self:
        """While training (`Tensor.train()` or Context(TRAINING=1)) each element becomes 0 with probability p
        and the others are scaled by 1 / (1 - p); otherwise x itself.

        >>> Tensor([1.0, 2.0]).dropout(0.5).tolist()
        [1.0, 2.0]
        """
        if not 0 <= p <= 1:
            raise ArgumentError(f"dropout with p={p}", because="it is a probability",
                                fix="use a number from 0 to 1")
        if not TRAINING or p == 0:
            return self
        if p == 1:
            return self * 0
        keep = self.rand_like(dtype=dtypes.float32) >= p
        return keep.where(self * (1 / (1 - p)), 0.0)

    def scaled_dot_product_attention(self, key: Any, value: Any, attn_mask: Any = None,
                                     dropout_p: float = 0.0,
                                     is_causal: bool = False, scale: float | None = None,
                                     enable_gqa: bool = False) -> Self:
        """softmax(q @ kᵀ * scale + mask) @ v (Vaswani et al. 2017). Scores and softmax are in float32 or
        wider.

        Shapes: q (…, h, l, d), k (…, h, s, d), v (…, h, s, e) -> (…, h, l, e). scale: 1 / sqrt(d) unless
        given. attn_mask: bool (True takes part) or a float that is added, broadcast to (…, h, l, s).
        is_causal: position i sees 0 … i. enable_gqa: k and v may have a divisor of h heads, each shared by a
        group of queries. A query that sees nothing gives zeros; a NaN or infinity in a key that it does not
        see does not reach it, one in a value may. The memory that it takes does not grow with l * s.
        """
        key, value = self._of(key), self._of(value)
        if enable_gqa:
            key, value = self._shared_heads(key), self._shared_heads(value)
        if is_causal and attn_mask is not None:
            raise ArgumentError("scaled_dot_product_attention with is_causal and attn_mask",
                                because="only one can say what is seen",
                                fix="put the causal part into the mask")
        common = common_dtype(self.dtype, key.dtype)
        wide = dtypes.float32 if common in NARROW else common
        factor = 1 / math.sqrt(self._known_size(-1)) if scale is None else scale
        scores = self.matmul(key.transpose(-2, -1), dtype=wide) * factor  # (…, h, l, s)
        seen: Self | None = None
        if is_causal:
            rows = iota(scores.shape[-2], dtypes.int32).reshape((scores.shape[-2], 1))
            seen = self._wrap(iota(scores.shape[-1], dtypes.int32).le(rows))
        elif attn_mask is not None:
            mask = self._of(attn_mask)
            seen, scores = (mask, scores) if mask.dtype.is_bool else (None, scores + mask)
        e = scores._exponentials(seen, attn_mask is not None)
        total = self._wrap(_sum_keep(e.uop, (e.ndim - 1,)))  # (…, h, l, 1)
        if attn_mask is not None:
            total = total.maximum(2.0 ** -126)
        if TRAINING and dropout_p:
            return (e / total).cast(common).dropout(dropout_p).matmul(value)
        # the sums of a row divide its result, not its weights: e different divisions a row instead of s
        mixed = e.cast(common).matmul(value, dtype=common_dtype(wide, value.dtype))
        return (mixed / total).cast(common_dtype(common, value.dtype))

    def _exponentials(self, seen: Self | None, may_see_nothing: bool) -> Self:
        """exp(x - peak) with the last axis's maximum among what is seen, and 0 of the rest."""
        x = self if seen is None else seen.where(self, -math.inf)
        axes = (x.ndim - 1,)
        peak = self._wrap(_keep(x.uop, x.uop.reduce(Ops.MAX, axes), axes).detach())
        if may_see_nothing:
            peak = peak.ne(-math.inf).where(peak, 0.0)
        return (x - peak).exp()

    def _known_size(self, axis: int) -> int:
        size = self.shape[axis]
        if not isinstance(size, int):
            raise ShapeError(f"attention with queries of shape {show_shape(self.shape)}",
                             because="the size of the last axis is symbolic",
                             fix="pass scale=")
        return size

    def _shared_heads(self, other: Self) -> Self:
        """Each head of k or v repeated for the queries that share it."""
        mine, theirs = self.shape[-3], other.shape[-3]
        if mine % theirs:
            raise ShapeError(f"attention with {mine} query heads and {theirs} key heads",
                             because="the groups would not be equal",
                             fix="use a number of query heads that the key heads divide")
        return other if mine == theirs else other.repeat_interleave(mine // theirs, -3)

    # ---- losses

    def _reduction(self, reduction: str) -> Self:
        if reduction == "none":
            return self
        axes = tuple(range(self.ndim))
        if reduction == "sum":
            return self._wrap(self.uop.reduce(Ops.ADD, axes))
        if reduction == "mean":
            return self._wrap(self.uop.reduce(Ops.ADD, axes) * _inverse(prod(self.shape), self.dtype))
        raise ArgumentError(f"reduction={reduction!r}", because="there is no such reduction",
                            fix='use "mean", "sum" or "none"')

    def _loss_target(self, what: str, target: Any) -> tuple[Self, Self]:
        """(x, target) as wide floats of shapes that agree."""
        target = self._of(target)
        if target.shape != self.shape:
            raise ShapeError(f"{what} of {show_shape(self.shape)} and a target of {show_shape(target.shape)}",
                             because="their shapes differ",
                             fix="reshape or expand the target")
        return self._wide(), target._wide()

    def cross_entropy(self, Y: Any, reduction: str = "mean", label_smoothing: float = 0.0, weight: Any = None,
                      ignore_index: int = -100) -> Self:
        """The cross entropy between softmax(x) over the class axis (axis 1; axis 0 of a vector) and Y.

        Shapes: x (n, c, *rest); Y integers (n, *rest): class numbers; or floats like x: class probabilities.
        weight (c,): a factor for each class. Where Y is ignore_index the loss is 0 and does not count in the
        mean. A class number that is neither ignored nor from 0 to c - 1 counts as having no class. Result: a
        scalar, or (n, *rest) with reduction="none".

        >>> Tensor([[0.0, 0.0]]).cross_entropy(Tensor([1])).round(decimals=4).item()
        0.6930999755859375
        """
        target = self._of(Y)
        axis = 0 if self.ndim == 1 else 1
        x = self._classes_last(axis)
        if target.shape == self.shape and target.dtype.is_float:
            return x._probability_loss(target._classes_last(axis), reduction, label_smoothing, weight)
        return x._class_loss(target, reduction, label_smoothing, weight, ignore_index, self.shape)

    def sparse_categorical_crossentropy(self, Y: Any, ignore_index: int = -1, label_smoothing: float = 0.0,
                                        reduction: str = "mean") -> Self:
        """`cross_entropy` with class numbers and the classes on the last axis.

        Shapes: x (*rest, c), Y integers (*rest).

        >>> Tensor([[0.0, 0.0]]).sparse_categorical_crossentropy(Tensor([1])).round(decimals=4).item()
        0.6930999755859375
        """
        return self._class_loss(self._of(Y), reduction, label_smoothing, None, ignore_index, self.shape)

    def nll_loss(self, Y: Any, weight: Any = None, ignore_index: int | None = None,
                 reduction: str = "mean") -> Self:
        """Minus the log-probability x of class Y. Shapes: x (n, c, *rest), Y integers (n, *rest), weight
        (c,).

        >>> Tensor([[-1.0, -2.0]]).nll_loss(Tensor([1])).item()
        2.0
        """
        target, x = self._of(Y), self._classes_last(0 if self.ndim == 1 else 1)
        x._check_classes("nll_loss", target, self.shape)
        hit = x._hit(target)
        loss = -self._wrap(_last_sum(hit.where(x.uop, UOp.const(0, x.dtype))))
        return self._weighted(loss, target, hit, weight, ignore_index, reduction)._narrow(self.dtype)

    def _classes_last(self, axis: int) -> Self:
        order = (*[i for i in range(self.ndim) if i != axis], axis)
        return self._wrap(self.uop.permute(order))._wide()

    def _check_classes(self, what: str, target: Self, shape: Any) -> None:
        if not target.dtype.is_int:
            raise DTypeError(
                f"{what} with a target of dtype {target.dtype} and shape {show_shape(target.shape)}",
                because="class numbers are integers, and probabilities have the input's shape "
                        f"{show_shape(shape)}",
                fix="cast the class numbers to an integer dtype")
        if target.shape != self.shape[:-1]:
            raise ShapeError(f"{what} of {show_shape(shape)} with a target of {show_shape(target.shape)}",
                             because=f"the target must be {show_shape(self.shape[:-1])}: one class for "
                                     "each row", fix="reshape the target")
        check_devices(what, self.uop, target.uop)

    def _hit(self, target: Self) -> UOp:
        """Which class is the target's: bool, like x."""
        index = target.uop.cast(dtypes.int64 if target.dtype.itemsize == 8 or target.dtype is dtypes.uint32
                                else dtypes.int32)
        return index.reshape((*index.shape, 1)).equal(iota(self.uop.shape[-1], index.dtype))

    def _class_loss(self, target: Self, reduction: str, smoothing: float, weight: Any, ignore_index: int
                    | None, shape: Any) -> Self:
        """Cross entropy with class numbers; classes are on the last axis. Only sums over rows are ever
        formed."""
        _check_smoothing(smoothing)
        self._check_classes("cross_entropy", target, shape)
        x, _ = self._shifted(-1)
        hit = x._hit(target)
        log_total = self._wrap(_last_sum(x.exp().uop)).log()
        loss = log_total - self._wrap(_last_sum(hit.where(x.uop, UOp.const(0, x.dtype))))
        factor = None
        if weight is not None:
            factor = self._of(weight)._wide().cast(x.dtype)
            loss = loss * self._wrap(_last_sum(hit.where(factor.uop, UOp.const(0, x.dtype))))
        if smoothing:
            even = log_total * x.shape[-1] - self._wrap(_last_sum(x.uop)) if factor is None else \
                self._wrap(_last_sum(((log_total.unsqueeze(-1) - x) * factor).uop))
            loss = loss * (1 - smoothing) + even * (smoothing / x.shape[-1])
        return self._weighted(loss, target, hit, weight, ignore_index, reduction,
                              weigh=False)._narrow(self.dtype)

    def _weighted(self, loss: Self, target: Self, hit: UOp, weight: Any, ignore_index: int | None,
                  reduction: str,
                  weigh: bool = True) -> Self:
        """Class weights, ignored rows and the reduction: the mean divides by the weights that took part."""
        if weight is not None:
            factor = self._of(weight)._wide().uop.cast(loss.dtype)
            weights = self._wrap(_last_sum(hit.where(factor, UOp.const(0, loss.dtype))))
            if weigh:
                loss = loss * weights
        else:
            weights = None
        counts = None
        if ignore_index is not None and target.dtype.min <= ignore_index <= target.dtype.max:
            counts = target.ne(ignore_index)
            loss = counts.where(loss, 0)
        if reduction != "mean" or (weights is None and counts is None):
            return loss._reduction(reduction)
        if counts is not None:
            weights = counts.cast(loss.dtype) if weights is None else counts.where(weights, 0)
        assert weights is not None, "set above"
        return loss._reduction("sum") / weights._reduction("sum")

    def _probability_loss(self, target: Self, reduction: str, smoothing: float, weight: Any) -> Self:
        """Cross entropy with class probabilities; classes are on the last axis."""
        _check_smoothing(smoothing)
        x, _ = self._shifted(-1)
        log_total = self._wrap(_last_sum(x.exp().uop)).log()
        if smoothing:
            target = target * (1 - smoothing) + smoothing / target.shape[-1]
        if weight is not None:
            target = target * self._of(weight)._wide()
        loss = self._wrap(_last_sum((target * (log_total.unsqueeze(-1) - x)).uop))
        return loss._reduction(reduction)

    def binary_crossentropy(self, Y: Any, reduction: str = "mean") -> Self:
        """-(Y log x + (1 - Y) log(1 - x)) of probabilities x; logarithms are not taken below -100.

        >>> Tensor([0.5]).binary_crossentropy(Tensor([1.0])).round(decimals=4).item()
        0.6930999755859375
        """
        x, y = self._loss_target("binary_crossentropy", Y)
        loss = -(y * x.log().maximum(-100.0) + (1 - y) * (1 - x).log().maximum(-100.0))
        return loss._reduction(reduction)._narrow(self.dtype)

    def binary_crossentropy_logits(self, Y: Any, reduction: str = "mean", pos_weight: Any = None) -> Self:
        """`binary_crossentropy` of sigmoid(x), without overflow. pos_weight: a factor for the part of Y.

        >>> Tensor([0.0]).binary_crossentropy_logits(Tensor([1.0])).round(decimals=4).item()
        0.6930999755859375
        """
        x, y = self._loss_target("binary_crossentropy_logits", Y)
        tail = ((-x.abs()).exp() + 1).log()  # log(1 + exp(-|x|))
        if pos_weight is None:
            return (x.relu() - x * y + tail)._reduction(reduction)._narrow(self.dtype)
        factor = (self._of(pos_weight)._wide() - 1) * y + 1
        return ((1 - y) * x + factor * (tail + (-x).relu()))._reduction(reduction)._narrow(self.dtype)

    def mse_loss(self, target: Any, reduction: str = "mean") -> Self:
        """The squared difference.

        >>> Tensor([1.0, 3.0]).mse_loss(Tensor([1.0, 1.0])).item()
        2.0
        """
        x, y = self._loss_target("mse_loss", target)
        return (x - y).square()._reduction(reduction)._narrow(self.dtype)

    def l1_loss(self, target: Any, reduction: str = "mean") -> Self:
        """The absolute difference."""
        x, y = self._loss_target("l1_loss", target)
        return (x - y).abs()._reduction(reduction)._narrow(self.dtype)

    def huber_loss(self, target: Any, reduction: str = "mean", delta: float = 1.0) -> Self:
        """Half the square of differences up to delta, linear beyond: delta * (|d| - delta / 2).

        >>> Tensor([3.0]).huber_loss(Tensor([0.0])).item()
        2.5
        """
        if delta <= 0:
            raise ArgumentError(f"huber_loss with delta={delta}", because="it must be positive",
                                fix="use l1_loss for a limit of 0")
        x, y = self._loss_target("huber_loss", target)
        gap = (x - y).abs()
        loss = (gap < delta).where(gap.square() * 0.5, (gap - 0.5 * delta) * delta)
        return loss._reduction(reduction)._narrow(self.dtype)

    def smooth_l1_loss(self, target: Any, reduction: str = "mean", beta: float = 1.0) -> Self:
        """`huber_loss` divided by delta = beta; beta 0 is `l1_loss`."""
        return self.l1_loss(target, reduction) if beta == 0 else self.huber_loss(target, reduction,
                                                                                 beta) * (1 / beta)

    def kl_div(self, target: Any, reduction: str = "mean", log_target: bool = False) -> Self:
        """target * (log target - x), where x is a log-probability. reduction "batchmean" divides the sum by
        the first size.

        >>> Tensor([0.0]).kl_div(Tensor([1.0])).item()
        0.0
        """
        x, y = self._loss_target("kl_div", target)
        if log_target:
            loss = y.exp() * (y - x)
        else:
            loss = (y > 0).where(y * ((y > 0).where(y, 1.0).log() - x), y * 0)
        if reduction == "batchmean":
            return (loss._reduction("sum") * _inverse(self.shape[0] if self.shape else 1,
                                                      loss.dtype))._narrow(self.dtype)
        return loss._reduction(reduction)._narrow(self.dtype)

    def cosine_similarity(self, other: Any, dim: int = 1, eps: float = 1e-8) -> Self:
        """The cosine of the angle between vectors along dim; shapes broadcast.

        >>> Tensor([[1.0, 0.0]]).cosine_similarity(Tensor([[1.0, 0.0]])).tolist()
        [1.0]
        """
        a, b = self._wide(), self._of(other)._wide()
        product = a * b
        axes = product._axes(dim, "cosine_similarity")
        norms = [(v * v + product * 0 if v.shape != product.shape else v * v) for v in (a, b)]
        lengths = [self._wrap(n.uop.reduce(Ops.ADD, axes)).sqrt().maximum(eps) for n in norms]
        return (self._wrap(product.uop.reduce(Ops.ADD, axes)) / (lengths[0] * lengths[1]))._narrow(self.dtype)

    # ---- resizing

    def interpolate(self, size: Sequence[int], mode: str = "linear", align_corners: bool = False) -> Self:
        """Resize the last len(size) axes. mode: "nearest" (the input at floor(i * in / out)), "nearest-exact"
        (at pixel centres), "linear" (along every axis: bilinear, trilinear) or "cubic" (bicubic; Keys 1981),
        with pixel centres or, align_corners, end points aligned, or "area" (means of what an output covers).

        >>> Tensor([0.0, 1.0]).interpolate((4,)).tolist()
        [0.0, 0.25, 0.75, 1.0]
        """
        size = (size,) if isinstance(size, int) else tuple(size)
        sizes = spatial_sizes("interpolate", self.uop.shape, len(size))
        if len(sizes) != len(size) or any(n < 1 for n in (*size, *sizes)):
            raise ShapeError(f"interpolate {show_shape(self.shape)} to {size}",
                             because="each size must be at least 1, for existing axes",
                             fix="give one size for each of the last axes")
        kind = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
        if kind not in ("nearest", "nearest-exact", "linear", "cubic", "area"):
            raise ArgumentError(f"interpolate with mode={mode!r}", because="there is no such mode",
                                fix='use "nearest", "nearest-exact", "linear", "cubic" or "area"')
        picks = kind.startswith("nearest")
        u = self.uop if picks else self._wide().uop
        for axis, n in enumerate(size, self.ndim - len(size)):
            if picks:
                u = resize_nearest(u, axis, n, kind == "nearest-exact")
            elif kind == "area":
                u = adaptive_pool(u, axis, sizes[axis - self.ndim + len(size)], n, Ops.ADD)
            else:
                u = (resize_linear if kind == "linear" else resize_cubic)(u, axis, n, align_corners)
        return self._wrap(u) if picks else self._wrap(u)._narrow(self.dtype)


# ---- on nodes ----------------------------------------------------------------------------------------------


def _keep(full: UOp, reduced: UOp, axes: tuple[int, ...]) -> UOp:
    """Reduced axes back as size 1."""
    return reduced.reshape(tuple([1 if i in axes else size for i, size in enumerate(full.shape)]))


def _sum_keep(u: UOp, axes: tuple[int, ...]) -> UOp:
    return _keep(u, u.reduce(Ops.ADD, axes), axes)


def _mean_keep(u: UOp, axes: tuple[int, ...]) -> UOp:
    return _sum_keep(u, axes) * _inverse(prod([u.shape[axis] for axis in axes]), u.dtype)


def _last_sum(u: UOp) -> UOp:
    return u.reduce(Ops.ADD, (u.ndim - 1,))


def _inverse(count: Sint, dtype: DType) -> UOp:
    """1 / count as a constant; NaN, as 0 / 0 is, for nothing."""
    count = plain(count)
    if isinstance(count, int):
        return UOp.const(1 / count if count else math.nan, dtype)
    return count.cast(dtype).alu(Ops.RECIPROCAL)


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing={smoothing}", because="it is a share of the probability",
                            fix="use a number from 0 to 1")
