"""Layers: objects with parameters that are called on tensors. Names, shapes and first values of parameters
are PyTorch's.

The first values come from `Tensor.uniform` and `Tensor.randn`, so `Tensor.manual_seed` repeats them. Layers
that behave differently in training look at the TRAINING setting (`with Context(TRAINING=1)`, `with
Tensor.train()`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from whit.helpers import TRAINING, ArgumentError, DTypeError, ShapeError, prod
from whit.tensor import Tensor, hooks
from whit.tensor.guard import guard
from whit.tensor.tensor import buffer_of, pack
from whit.uop import DType, Ops, dtypes
from whit.uop.uop import show_shape

Size = int | Sequence[int]
MAX_PENDING = 16  # updates of running statistics that may wait to be computed


def parameter(value: Tensor) -> Tensor:
    """A tensor to be trained."""
    value.requires_grad = True
    return value


def filled(
    shape: Sequence[int], value: float, dtype: DType = dtypes.float32, device: str | None = None
) -> Tensor:
    """A tensor of one value in memory of its own, assignable in place from the start; runs no kernel."""
    data = memoryview(pack([value], dtype) * prod(shape))
    result = Tensor(buffer_of(data, tuple(shape), dtype, device))
    result.requires_grad = False
    return result


def uniform(*shape: int, bound: float) -> Tensor:
    """A parameter drawn evenly from -bound to bound; it gets memory at first use, so it is drawn once."""
    return parameter(Tensor.uniform(*shape, low=-bound, high=bound).contiguous())


def _positive(layer: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size <= 0:
            raise ArgumentError(
                f"{layer}({name}={size!r})",
                because="it must be a positive whole number",
                fix=f"choose {name} >= 1",
            )


def _sizes(layer: str, value: Size, count: int) -> tuple[int, ...]:
    """One number for all spatial axes, or one per axis."""
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) != count:
        raise ArgumentError(
            f"{layer} with {sizes}",
            because=f"it has {count} spatial axes",
            fix=f"give one number, or {count} of them",
        )
    return sizes


def _is_tensor(layer: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(
            f"{layer} of a {type(x).__name__}", because="layers take tensors", fix="wrap it: Tensor(x)"
        )


def _channels(layer: str, x: Tensor, count: int, axis: int) -> None:
    """The axis of features must be there and have the layer's size: the mistake is reported where it was
    made."""
    _is_tensor(layer, x)
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != count:
        raise ShapeError(
            f"{layer} of shape {show_shape(x.shape)}",
            because=f"axis {axis} must have size {count}",
            fix=f"move the axis of size {count} there, or build the layer with another size",
        )


class Linear:
    """y = x @ weight.T + bias.

    Shapes: x (..., in_features) -> (..., out_features); weight (out_features, in_features), bias
    (out_features,). Starts uniform within 1/sqrt(in_features).

    >>> Linear(3, 2)(Tensor.ones(4, 3)).shape
    (4, 2)
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        _positive("Linear", in_features=in_features, out_features=out_features)
        bound = 1 / math.sqrt(in_features)
        self.weight = uniform(out_features, in_features, bound=bound)
        self.bias = uniform(out_features, bound=bound) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        _channels("Linear", x, self.weight.shape[1], -1)
        return x.linear(self.weight.transpose(0, 1), self.bias)


class _Conv:
    """What the convolutions of all ranks share. Starts uniform within 1/sqrt(fan in)."""

    rank: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        name = type(self).__name__
        _positive(name, in_channels=in_channels, out_channels=out_channels, groups=groups)
        self.kernel_size = _sizes(name, kernel_size, self.rank)
        for size in self.kernel_size:
            _positive(name, kernel_size=size)
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(
                f"{name}({in_channels}, {out_channels}, groups={groups})",
                because="both channel counts must be multiples of groups",
                fix="choose another groups",
            )
        self.stride, self.dilation = _sizes(name, stride, self.rank), _sizes(name, dilation, self.rank)
        self.groups, self.in_channels = groups, in_channels
        self.padding = self._padding(name, padding)
        bound = 1 / math.sqrt(in_channels // groups * prod(self.kernel_size))
        self.weight = uniform(out_channels, in_channels // groups, *self.kernel_size, bound=bound)
        self.bias = uniform(out_channels, bound=bound) if bias else None

    def _padding(self, name: str, padding: Size | str) -> list[int]:
        """(before, after) for each axis from the last to the first."""
        if not isinstance(padding, str):
            return [amount for size in reversed(_sizes(name, padding, self.rank)) for amount in (size, size)]
        if padding == "valid":
            return [0, 0] * self.rank
        if padding != "same" or any(step != 1 for step in self.stride):
            raise ArgumentError(
                f"{name}(padding={padding!r}, stride={self.stride})",
                because='text padding is "valid", or "same" with stride 1',
                fix="give the padding as numbers",
            )
        totals = [
            d * (k - 1) for d, k in zip(reversed(self.dilation), reversed(self.kernel_size), strict=True)
        ]
        return [amount for total in totals for amount in (total // 2, total - total // 2)]

    def __call__(self, x: Tensor) -> Tensor:
        _channels(type(self).__name__, x, self.in_channels, -self.rank - 1)
        return x.conv2d(self.weight, self.bias, self.groups, self.stride, self.dilation, self.padding)


class Conv1d(_Conv):
    """Convolution along one axis. Shapes: x (n, in, length) -> (n, out, length'); weight (out, in/groups,
    kernel).

    `padding` may be numbers, "valid" or "same".

    >>> Conv1d(2, 4, 3)(Tensor.ones(1, 2, 8)).shape
    (1, 4, 6)
    """

    rank = 1


class Conv2d(_Conv):
    """Convolution over images. Shapes: x (n, in, h, w) -> (n, out, h', w'); weight (out, in/groups, kh, kw).

    `padding` may be numbers, "valid" or "same".

    >>> Conv2d(3, 8, 5, stride=2, padding=2)(Tensor.ones(1, 3, 8, 8)).shape
    (1, 8, 4, 4)
    """

    rank = 2


class Conv3d(_Conv):
    """Convolution over volumes. Shapes: x (n, in, d, h, w) -> (n, out, d', h', w'); weight (out, in/groups,
    kd, kh, kw).

    `padding` may be numbers, "valid" or "same".

    >>> Conv3d(1, 2, 3, padding="same")(Tensor.ones(1, 1, 4, 5, 6)).shape
    (1, 2, 4, 5, 6)
    """

    rank = 3


class _ConvTranspose:
    """What the transposes of convolutions of all ranks share. Starts uniform within 1/sqrt(fan in)."""

    rank: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
    ) -> None:
        name, rank = type(self).__name__, self.rank
        _positive(name, in_channels=in_channels, out_channels=out_channels, groups=groups)
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(
                f"{name}({in_channels}, {out_channels}, groups={groups})",
                because="both channel counts must be multiples of groups",
                fix="choose another groups",
            )
        kernel = _sizes(name, kernel_size, rank)
        self.stride, self.padding = _sizes(name, stride, rank), _sizes(name, padding, rank)
        self.dilation, self.output_padding = _sizes(name, dilation, rank), _sizes(name, output_padding, rank)
        self.groups, self.in_channels = groups, in_channels
        bound = 1 / math.sqrt(out_channels // groups * prod(kernel))
        self.weight = uniform(in_channels, out_channels // groups, *kernel, bound=bound)
        self.bias = uniform(out_channels, bound=bound) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        _channels(type(self).__name__, x, self.in_channels, -self.rank - 1)
        return x.conv_transpose2d(
            self.weight, self.bias, self.groups, self.stride, self.dilation, self.padding, self.output_padding
        )


class ConvTranspose1d(_ConvTranspose):
    """The transpose of Conv1d. Shapes: x (n, in, length) -> (n, out, length'); weight (in, out/groups,
    kernel); length' as of `ConvTranspose2d`.

    >>> ConvTranspose1d(2, 3, 4, stride=2)(Tensor.ones(1, 2, 5)).shape
    (1, 3, 12)
    """

    rank = 1


class ConvTranspose2d(_ConvTranspose):
    """The transpose of Conv2d: scatters each input pixel through the kernel.

    Shapes: x (n, in, h, w) -> (n, out, h', w') with h' = (h-1)*stride - 2*padding + dilation*(kh-1) +
    output_padding + 1; weight (in, out/groups, kh, kw).

    >>> ConvTranspose2d(2, 3, 2, stride=2)(Tensor.ones(1, 2, 4, 4)).shape
    (1, 3, 8, 8)
    """

    rank = 2


class ConvTranspose3d(_ConvTranspose):
    """The transpose of Conv3d. Shapes: x (n, in, d, h, w) -> (n, out, d', h', w'); weight (in, out/groups,
    kd, kh, kw); sizes as of `ConvTranspose2d`.

    >>> ConvTranspose3d(1, 1, 2, stride=2)(Tensor.ones(1, 1, 2, 3, 4)).shape
    (1, 1, 4, 6, 8)
    """

    rank = 3


# ---- normalisation -----------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    """Statistics of narrow floats are taken in float32; integers have no place for fractions."""
    if not x.dtype.is_float:
        raise DTypeError(
            f"normalise a tensor of {x.dtype}",
            because="the result would be rounded to integers",
            fix="cast it to a float dtype first",
        )
    return x.cast(dtypes.float32) if x.dtype.itemsize < 4 else x


def _normalize(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Zero mean and unit (biased) variance over axes; in float32 at least."""
    centred = _wide(x) - _wide(x).mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: int) -> Tensor:
    """x * weight + bias, both along one axis of channels."""
    shape = [1] * x.ndim
    shape[axis] = -1
    if weight is not None:
        x = x * weight.reshape(*shape)
    return x if bias is None else x + bias.reshape(*shape)


class BatchNorm:
    """Normalise each channel over the batch and space (Ioffe and Szegedy 2015).

    In training by the batch's own mean and variance, which also move running_mean and running_var by
    `momentum` (None: their plain average); otherwise by these. Serves 1d, 2d and 3d.
    Shapes: x (n, num_features, ...) -> the same; weight, bias and statistics (num_features,).

    >>> BatchNorm(3)(Tensor.ones(2, 3, 4, 4)).shape
    (2, 3, 4, 4)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        track_running_stats: bool = True,
        momentum: float | None = 0.1,
    ) -> None:
        _positive("BatchNorm", num_features=num_features)
        self.num_features, self.eps, self.momentum, self.track_running_stats = (
            num_features,
            eps,
            momentum,
            track_running_stats,
        )
        self.weight = parameter(filled((num_features,), 1)) if affine else None
        self.bias = parameter(filled((num_features,), 0)) if affine else None
        self.num_batches_tracked = filled((), 0, dtypes.int64)
        if track_running_stats:
            self.running_mean, self.running_var = filled((num_features,), 0), filled((num_features,), 1)

    def __call__(self, x: Tensor) -> Tensor:
        _channels("BatchNorm", x, self.num_features, 1)
        axes = (0, *range(2, x.ndim))
        shape = (1, self.num_features, *[1] * (x.ndim - 2))
        wide = _wide(x)
        if TRAINING or not self.track_running_stats:
            mean = wide.mean(axes)
            centred = wide - mean.reshape(*shape)
            var = centred.square().mean(axes)
            if self.track_running_stats:
                self._track(mean.detach(), var.detach(), prod([x.shape[axis] for axis in axes]))
        else:
            mean, var = self.running_mean, self.running_var
            centred = wide - mean.reshape(*shape)
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        out = centred * scale.reshape(*shape)
        return (out if self.bias is None else out + self.bias.reshape(*shape)).cast(x.dtype)

    def _track(self, mean: Tensor, var: Tensor, count: Any) -> None:
        """Move the running statistics; the variance unbiased, as PyTorch does."""
        if isinstance(count, int) and count < 2:
            raise ShapeError(
                f"BatchNorm of {count} value a channel in training",
                because="its variance is not defined",
                fix="use a larger batch, or evaluate outside of training",
            )
        self._bound_pending()
        self.num_batches_tracked.assign(self.num_batches_tracked + 1)
        rate = (
            self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.cast(dtypes.float32)
        )
        unbiased = var * (count / (count - 1))
        self.running_mean.assign((self.running_mean * (1 - rate) + mean * rate).cast(self.running_mean.dtype))
        self.running_var.assign(
            (self.running_var * (1 - rate) + unbiased * rate).cast(self.running_var.dtype)
        )

    def _bound_pending(self) -> None:
        """Statistics that nobody asks for would hold the graph of every batch so far: compute them now and
        then."""
        pending, node = 0, self.running_mean.uop
        while node.op is Ops.AFTER:
            pending, node = pending + 1, node.src[0]
        if pending >= MAX_PENDING:
            hooks.realize([self.running_mean, self.running_var, self.num_batches_tracked])


BatchNorm1d = BatchNorm2d = BatchNorm3d = BatchNorm


class LayerNorm:
    """Normalise over the last axes, which have the shape `normalized_shape`, then scale and shift (Ba et al.
    2016).

    Shapes: x (..., *normalized_shape) -> the same; weight and bias of normalized_shape.

    >>> LayerNorm(4)(Tensor.ones(2, 4)).shape
    (2, 4)
    """

    def __init__(
        self, normalized_shape: Size, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True
    ) -> None:
        self.normalized_shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        for size in self.normalized_shape:
            _positive("LayerNorm", normalized_shape=size)
        self.axes, self.eps = tuple(range(-len(self.normalized_shape), 0)), eps
        self.weight = parameter(filled(self.normalized_shape, 1)) if elementwise_affine else None
        self.bias = parameter(filled(self.normalized_shape, 0)) if elementwise_affine and bias else None

    def __call__(self, x: Tensor) -> Tensor:
        _is_tensor(type(self).__name__, x)
        if x.shape[-len(self.axes) :] != self.normalized_shape:
            raise ShapeError(
                f"LayerNorm of shape {show_shape(x.shape)}",
                because=f"it normalises the last axes {show_shape(self.normalized_shape)}",
                fix="build the layer with the sizes of the last axes",
            )
        out = _normalize(x, self.axes, self.eps)
        out = out if self.weight is None else out * self.weight
        return (out if self.bias is None else out + self.bias).cast(x.dtype)


class LayerNorm2d(LayerNorm):
    """LayerNorm over the channels of images. Shapes: x (n, c, h, w) -> the same.

    >>> LayerNorm2d(3)(Tensor.ones(2, 3, 4, 4)).shape
    (2, 3, 4, 4)
    """

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RMSNorm:
    """Scale each row to unit root-mean-square, then by `weight` (Zhang and Sennrich 2019).

    Shapes: x (..., dim) -> the same; weight (dim,). The mean is taken in float32 at least.

    >>> RMSNorm(2)(Tensor([[3.0, 4.0]])).shape
    (1, 2)
    """

    def __init__(self, dim: int, eps: float = 1e-6, elementwise_affine: bool = True) -> None:
        _positive("RMSNorm", dim=dim)
        self.dim, self.eps = dim, eps
        self.weight = parameter(filled((dim,), 1)) if elementwise_affine else None

    def __call__(self, x: Tensor) -> Tensor:
        _channels("RMSNorm", x, self.dim, -1)
        wide = _wide(x)
        out = (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).cast(x.dtype)
        return out if self.weight is None else out * self.weight


class GroupNorm:
    """Normalise groups of channels together (Wu and He 2018).

    Shapes: x (n, num_channels, ...) -> the same; weight and bias (num_channels,).

    >>> GroupNorm(2, 6)(Tensor.ones(2, 6, 4)).shape
    (2, 6, 4)
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        _positive("GroupNorm", num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            raise ArgumentError(
                f"GroupNorm({num_groups}, {num_channels})",
                because="the groups would differ in size",
                fix="choose a num_groups that divides num_channels",
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = parameter(filled((num_channels,), 1)) if affine else None
        self.bias = parameter(filled((num_channels,), 0)) if affine else None

    def __call__(self, x: Tensor) -> Tensor:
        _channels(type(self).__name__, x, self.num_channels, 1)
        grouped = x.reshape(x.shape[0], self.num_groups, prod(x.shape[1:]) // self.num_groups)
        return _affine(_normalize(grouped, (2,), self.eps).reshape(*x.shape), self.weight, self.bias, 1).cast(
            x.dtype
        )


class InstanceNorm(GroupNorm):
    """Normalise each channel of each sample (Ulyanov et al. 2016). Shapes: x (n, num_features, ...) -> the
    same.

    >>> InstanceNorm(3)(Tensor.ones(2, 3, 4)).shape
    (2, 3, 4)
    """

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(num_features, num_features, eps, affine)


# ---- the others --------------------------------------------------------------------------------------------


class Embedding:
    """Rows of `weight` by number. Shapes: idx of integers (...) -> (..., embed_size); weight (vocab_size,
    embed_size).

    Starts normal with deviation 1. A negative number counts from the end; one outside of the
    vocabulary gives a row of zeros.

    >>> Embedding(10, 4)(Tensor([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    def __init__(self, vocab_size: int, embed_size: int) -> None:
        _positive("Embedding", vocab_size=vocab_size, embed_size=embed_size)
        self.vocab_size, self.embed_size = vocab_size, embed_size
        self.weight = parameter(Tensor.randn(vocab_size, embed_size).contiguous())

    def __call__(self, idx: Tensor) -> Tensor:
        _is_tensor("Embedding", idx)
        if not idx.dtype.is_int:
            raise ArgumentError(
                f"Embedding of {idx.dtype}",
                because="rows are chosen by whole numbers",
                fix="cast the numbers to an integer dtype",
            )
        return self.weight[idx]


class Dropout:
    """In training: zero each element with probability p and scale the others by 1/(1-p). Otherwise: nothing.

    >>> Dropout(0.5)(Tensor([1.0])).tolist()
    [1.0]
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ArgumentError(
                f"Dropout({p})", because="a probability is from 0 to 1", fix="choose such a p"
            )
        self.p = p

    def __call__(self, x: Tensor) -> Tensor:
        _is_tensor("Dropout", x)
        return x.dropout(self.p)


class LSTMCell:
    """One step of a long short-term memory (Hochreiter and Schmidhuber 1997), with PyTorch's order of gates:
    i, f, g, o.

    Shapes: x (n, input_size), state (h, c) of (n, hidden_size) each, zeros if None -> the new (h, c); all
    without n for one example.

    >>> h, c = LSTMCell(3, 5)(Tensor.ones(2, 3))
    >>> h.shape, c.shape
    ((2, 5), (2, 5))
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        _positive("LSTMCell", input_size=input_size, hidden_size=hidden_size)
        bound = 1 / math.sqrt(hidden_size)
        self.hidden_size = hidden_size
        self.weight_ih = uniform(hidden_size * 4, input_size, bound=bound)
        self.weight_hh = uniform(hidden_size * 4, hidden_size, bound=bound)
        self.bias_ih = uniform(hidden_size * 4, bound=bound) if bias else None
        self.bias_hh = uniform(hidden_size * 4, bound=bound) if bias else None

    def __call__(self, x: Tensor, hc: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        _channels("LSTMCell", x, self.weight_ih.shape[1], -1)
        if hc is None:
            zero = Tensor.zeros(*x.shape[:-1], self.hidden_size, dtype=x.dtype, device=x.device)
            hc = (zero, zero)
        if not isinstance(hc, (tuple, list)) or len(hc) != 2 or not all(isinstance(t, Tensor) for t in hc):
            raise ArgumentError(
                f"LSTMCell with state {repr(hc)[:60]}",
                because="it takes (h, c)",
                fix="pass two tensors, or nothing",
            )
        if x.ndim == 1:
            h, c = self(x.unsqueeze(0), (hc[0].unsqueeze(0), hc[1].unsqueeze(0)))
            return h.squeeze(0), c.squeeze(0)
        gates = x.linear(self.weight_ih.transpose(0, 1), self.bias_ih)
        gates = gates + hc[0].linear(self.weight_hh.transpose(0, 1), self.bias_hh)
        gates = gates.reshape(x.shape[0], 4, self.hidden_size)
        i, f, g, o = gates[:, 0].sigmoid(), gates[:, 1].sigmoid(), gates[:, 2].tanh(), gates[:, 3].sigmoid()
        c = f * hc[1] + i * g
        return o * c.tanh(), c


for _class in (
    Linear,
    _Conv,
    Conv1d,
    Conv2d,
    _ConvTranspose,
    BatchNorm,
    LayerNorm,
    LayerNorm2d,
    RMSNorm,
    GroupNorm,
    InstanceNorm,
    Embedding,
    Dropout,
    LSTMCell,
):
    if "__init__" in vars(_class):
        guard(_class, ["__init__"])
