"""First values of parameters, assigned in place, with PyTorch's names. Values come from `Tensor.manual_seed`.

    weight <- values with a given spread;  the same tensor is returned, nothing else holds it

Glorot (Xavier) and He (Kaiming) initialisation keep the spread of activations, or of gradients, from layer to
layer: Glorot and Bengio 2010, He et al. 2015, Saxe et al. 2014 (orthogonal).
"""

from __future__ import annotations

import math
from typing import Any

from whit.helpers import ArgumentError, prod
from whit.tensor import Tensor
from whit.tensor.guard import guarded, show_argument
from whit.uop.uop import show_shape


@guarded
def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """By how much spread a nonlinearity takes away; param: the slope of "leaky_relu" below 0 (0.01).

    >>> calculate_gain("tanh")
    1.6666666666666667
    """
    slope = 0.01 if param is None else param
    gains = dict.fromkeys(("linear", "identity", "sigmoid", "conv1d", "conv2d", "conv3d"), 1.0)
    gains |= dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 1.0)
    gains |= {"tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}
    gains["leaky_relu"] = math.sqrt(2 / (1 + slope**2)) if isinstance(slope, (int, float)) else 0.0
    if nonlinearity not in gains or not gains[nonlinearity]:
        raise ArgumentError(
            f"calculate_gain({nonlinearity!r}, {param!r})",
            because="there is no such nonlinearity, or its slope is no number",
            fix=f"use one of {', '.join(gains)}",
        )
    return gains[nonlinearity]


@guarded
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Even between a and b.

    >>> uniform_(Tensor.zeros(2, 3), -1.0, 1.0).shape
    (2, 3)
    """
    _is_float("uniform_", tensor)
    if not a <= b:
        raise ArgumentError(f"uniform_ from {a} to {b}", because="the range is empty", fix="use a <= b")
    return _fill(tensor, Tensor.uniform(*tensor.shape, low=a, high=b, device=tensor.device))


@guarded
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal around `mean`."""
    _is_float("normal_", tensor)
    _spread("normal_", std)
    return _fill(tensor, Tensor.randn(*tensor.shape, device=tensor.device) * std + mean)


@guarded
def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Tensor:
    """Normal around `mean`, of values between a and b only: the inverse of the distribution function of an
    even number between its values there."""
    _is_float("trunc_normal_", tensor)
    _spread("trunc_normal_", std)
    if not a < b or std == 0:
        raise ArgumentError(
            f"trunc_normal_(std={std}, a={a}, b={b})",
            because="the range is empty, or the spread is 0",
            fix="use a < b and std > 0",
        )
    low, high = (math.erf((edge - mean) / std / math.sqrt(2)) for edge in (a, b))
    even = Tensor.uniform(*tensor.shape, low=low, high=high, device=tensor.device)
    values = even.erfinv() * (std * math.sqrt(2)) + mean
    return _fill(tensor, values.clip(a, b))


@guarded
def constant_(tensor: Tensor, val: float) -> Tensor:
    """`val` everywhere."""
    _is_tensor("constant_", tensor)
    return _fill(tensor, Tensor.full(tensor.shape, val, dtype=tensor.dtype, device=tensor.device))


@guarded
def ones_(tensor: Tensor) -> Tensor:
    """1 everywhere."""
    return constant_(tensor, 1.0)


@guarded
def zeros_(tensor: Tensor) -> Tensor:
    """0 everywhere."""
    return constant_(tensor, 0.0)


@guarded
def eye_(tensor: Tensor) -> Tensor:
    """A matrix with 1 on the diagonal and 0 elsewhere."""
    _has_axes("eye_", tensor, 2, 2)
    rows, columns = _sizes(tensor)
    return _fill(tensor, Tensor.eye(rows, columns, dtype=tensor.dtype, device=tensor.device))


@guarded
def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """A convolution, (out, in/groups, *kernel), that passes on as many channels as it can: 1 in the middle of
    the kernel from channel i to channel i of each group.

    >>> dirac_(Tensor.zeros(2, 1, 3)).tolist()
    [[[0.0, 1.0, 0.0]], [[0.0, 0.0, 0.0]]]
    """
    _has_axes("dirac_", tensor, 3, 5)
    out, inside, *kernel = _sizes(tensor)
    if groups < 1 or out % groups:
        raise ArgumentError(
            f"dirac_ of {out} channels in {groups} groups",
            because="groups are equal parts of the channels",
            fix=f"use a divisor of {out}",
        )
    middle = [size // 2 for size in kernel]
    number = sum([at * prod(kernel[i + 1 :]) for i, at in enumerate(middle)])
    channels = Tensor.eye(out // groups, inside, dtype=tensor.dtype, device=tensor.device)
    spot = Tensor.arange(prod(kernel), device=tensor.device).eq(number).reshape(1, 1, *kernel)
    whole = channels.repeat(groups, 1).reshape(out, inside, *[1] * len(kernel))
    return _fill(tensor, spot.where(whole, 0))


@guarded
def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Even within gain * sqrt(6 / (fan in + fan out)) (Glorot and Bengio 2010)."""
    bound = gain * math.sqrt(6 / sum(_fans("xavier_uniform_", tensor)))
    return uniform_(tensor, -bound, bound)


@guarded
def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Normal with deviation gain * sqrt(2 / (fan in + fan out)) (Glorot and Bengio 2010)."""
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(_fans("xavier_normal_", tensor))))


@guarded
def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Even within gain * sqrt(3 / fan) (He et al. 2015). a: the slope of "leaky_relu" below 0."""
    bound = math.sqrt(3) * _kaiming("kaiming_uniform_", tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


@guarded
def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Normal with deviation gain / sqrt(fan) (He et al. 2015). a: the slope of "leaky_relu" below 0."""
    return normal_(tensor, 0.0, _kaiming("kaiming_normal_", tensor, a, mode, nonlinearity))


@guarded
def orthogonal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """gain times a matrix whose rows, or columns if there are fewer, are orthogonal and of length 1, evenly
    among all such (Saxe et al. 2014); axes after the first count as one."""
    _has_axes("orthogonal_", tensor, 2, 1 << 30)
    rows, columns = tensor.shape[0], prod(_sizes(tensor)[1:])
    tall = Tensor.randn(max(rows, columns), min(rows, columns), device=tensor.device)
    q, r = tall.qr()
    q = q * r.diagonal().sign()  # without it, signs would depend on the algorithm
    q = q if rows >= columns else q.transpose(0, 1)
    return _fill(tensor, q.reshape(*tensor.shape) * gain)


@guarded
def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01) -> Tensor:
    """A matrix, normal with deviation `std`, of which ceil(sparsity * rows) elements of each column are 0,
    elsewhere in each (Martens 2010)."""
    _has_axes("sparse_", tensor, 2, 2)
    _spread("sparse_", std)
    if not 0 <= sparsity <= 1:
        raise ArgumentError(f"sparse_({sparsity})", because="it is a share", fix="use a number from 0 to 1")
    rows, columns = _sizes(tensor)
    order = Tensor.uniform(rows, columns, device=tensor.device).argsort(0).argsort(0)
    values = Tensor.randn(rows, columns, device=tensor.device) * std
    return _fill(tensor, (order >= math.ceil(sparsity * rows)).where(values, 0.0))


# ---- arguments ---------------------------------------------------------------------------------------------


def _fill(tensor: Tensor, values: Tensor) -> Tensor:
    """The tensor with new values, in memory; that it is to be trained stays so."""
    kept = tensor.requires_grad
    tensor.requires_grad = False
    tensor.assign(values.detach().cast(tensor.dtype).contiguous()).realize()
    tensor.requires_grad = kept
    return tensor


def _is_tensor(what: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"{what} of {show_argument(tensor)}", because="it is no tensor", fix="pass a parameter"
        )


def _is_float(what: str, tensor: Any) -> None:
    _is_tensor(what, tensor)
    if not tensor.dtype.is_float:
        raise ArgumentError(
            f"{what} of {show_argument(tensor)}",
            because="its values are not whole numbers",
            fix="pass a float tensor",
        )


def _spread(what: str, std: float) -> None:
    if not std >= 0:
        raise ArgumentError(f"{what}(std={std})", because="a deviation is from 0", fix="choose another")


def _sizes(tensor: Tensor) -> list[int]:
    return [int(size) for size in tensor.shape]


def _has_axes(what: str, tensor: Any, least: int, most: int) -> None:
    _is_float(what, tensor)
    if not least <= tensor.ndim <= most:
        count = f"{least}" if least == most else f"at least {least}" if most > 9 else f"{least} to {most}"
        raise ArgumentError(
            f"{what} of shape {show_shape(tensor.shape)}",
            because=f"it needs {count} axes",
            fix="pass a weight of such a shape, or reshape it",
        )


def _fans(what: str, tensor: Tensor) -> tuple[int, int]:
    """How many values meet in an output, and how many outputs a value reaches."""
    _has_axes(what, tensor, 2, 1 << 30)
    out, inside, *kernel = _sizes(tensor)
    return inside * prod(kernel), out * prod(kernel)


def _kaiming(what: str, tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    """gain / sqrt(fan)."""
    fans = dict(zip(("fan_in", "fan_out"), _fans(what, tensor), strict=True))
    if mode not in fans:
        raise ArgumentError(
            f"{what}(mode={mode!r})", because="there is no such mode", fix='use "fan_in" or "fan_out"'
        )
    return calculate_gain(nonlinearity, a) / math.sqrt(fans[mode])
