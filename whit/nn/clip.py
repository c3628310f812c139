"""Gradients kept within bounds: by the norm of all of them together, or element by element.

Nothing is computed here: norms and clipped gradients are lazy, and are part of the next optimiser step, or of
a captured (JIT) one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from whit.helpers import ArgumentError, NumericError
from whit.tensor import Tensor
from whit.tensor.guard import show_argument
from whit.uop import dtypes


def get_total_norm(
    tensors: Iterable[Tensor] | Tensor, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """The norm of all elements of several tensors, as if they were one vector: (sum of |x|^p)^(1/p), the
    greatest |x| for p = inf.

    Shapes:  any -> (); of no tensors: 0
    Dtypes:  any floats -> float64 if one of them is, else float32, in which sums are taken
    Errors:  ArgumentError for what is no float tensor and for p not above 0; NumericError where
             `error_if_nonfinite` is set and the norm is inf or NaN (it is computed at once then)

    >>> get_total_norm([Tensor([3.0]), Tensor([[4.0, 12.0]])]).item()
    13.0
    """
    given = float_tensors("get_total_norm", tensors)
    power = _power("get_total_norm", norm_type)
    wide = dtypes.float64 if any(t.dtype is dtypes.float64 for t in given) else dtypes.float32
    parts = [t.detach().cast(wide) for t in given if t.numel() != 0]
    if not parts:
        return Tensor(0.0, dtype=wide)
    norm = _norm([part.to(parts[0].device) for part in parts], power)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise NumericError(
            f"get_total_norm of {len(given)} tensors with norm_type={norm_type}",
            because=f"the norm is {norm.item()}",
            fix="look for the first NaN with whit.detect_nan, or pass error_if_nonfinite=False",
        )
    return norm


def clip_grads_with_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, total_norm: Tensor) -> None:
    """Scale the gradients of parameters by max_norm / (total_norm + 1e-6), if that is below 1.

    Shapes:  total_norm has one element
    Dtypes:  each gradient keeps its own; it is scaled in total_norm's dtype, narrow ones in float32
    Errors:  ArgumentError for what is no tensor, and for max_norm below 0

    >>> weight = Tensor([1.0], requires_grad=True)
    >>> _ = (weight * 8).sum().backward()
    >>> clip_grads_with_norm_([weight], max_norm=1.0, total_norm=Tensor(16.0))
    >>> weight.grad.round(decimals=3).tolist()
    [0.5]
    """
    _bound("clip_grads_with_norm_", "max_norm", max_norm)
    grads = _gradients("clip_grads_with_norm_", parameters)
    if not isinstance(total_norm, Tensor) or total_norm.numel() != 1:
        raise ArgumentError(
            f"clip_grads_with_norm_ with total_norm {show_argument(total_norm)}",
            because="a norm is a tensor of one element",
            fix="pass what get_total_norm returns",
        )
    scale = (max_norm / (total_norm.detach().reshape(()) + 1e-6)).minimum(1.0)
    for grad in grads:
        own = scale.to(grad.device)
        wide = own.cast(dtypes.float64) if grad.dtype is dtypes.float64 else own
        _overwrite(grad, (grad.cast(wide.dtype) * wide).cast(grad.dtype))


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of parameters so that their common norm is at most `max_norm`; the norm that they
    had. Parameters without a gradient do not count.

    A norm that is inf or NaN makes gradients 0 or NaN. With `error_if_nonfinite` it raises, and leaves them.

    Shapes:  any -> ()
    Dtypes:  as `get_total_norm`; each gradient keeps its own
    Errors:  ArgumentError for what is no tensor, for max_norm below 0 and norm_type not above 0; NumericError

    >>> weight = Tensor([1.0, 1.0], requires_grad=True)
    >>> _ = (weight * Tensor([3.0, 4.0])).sum().backward()
    >>> clip_grad_norm_([weight], max_norm=1.0).item()
    5.0
    >>> weight.grad.round(decimals=3).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    _bound("clip_grad_norm_", "max_norm", max_norm)
    _power("clip_grad_norm_", norm_type)
    parameters = float_tensors("clip_grad_norm_", parameters)
    grads = _gradients("clip_grad_norm_", parameters)
    norm = get_total_norm(grads, norm_type, error_if_nonfinite)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def clip_grad_value_(parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Bring each element of the gradients of parameters into -clip_value … clip_value; NaN stays.

    Shapes:  any
    Dtypes:  each gradient keeps its own
    Errors:  ArgumentError for what is no tensor, and for clip_value below 0

    >>> weight = Tensor([1.0, 1.0], requires_grad=True)
    >>> _ = (weight * Tensor([-3.0, 0.25])).sum().backward()
    >>> clip_grad_value_([weight], 0.5)
    >>> weight.grad.tolist()
    [-0.5, 0.25]
    """
    _bound("clip_grad_value_", "clip_value", clip_value)
    for grad in _gradients("clip_grad_value_", parameters):
        _overwrite(grad, grad.clip(-clip_value, clip_value))


def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether some element is inf or NaN: a bool of shape (). x * 0 is NaN for these and 0 for others, so one
    sum tells."""
    parts = [(t.detach() * 0.0).cast(dtypes.float32).sum() for t in tensors]
    return _chained(parts).ne(0.0) if parts else Tensor(False)


def _norm(parts: Sequence[Tensor], power: float) -> Tensor:
    """The norm of tensors that have elements."""
    if power == math.inf:
        found = [part.abs().max() for part in parts]
        greatest = found[0]
        for value in found[1:]:
            greatest = greatest.maximum(value)
        return greatest
    if power == 1:
        return _chained([part.abs().sum() for part in parts])
    if power == 2:
        return _chained([part.square().sum() for part in parts]).sqrt()
    return _chained([(part.abs() ** power).sum() for part in parts]) ** (1 / power)


def _chained(parts: Sequence[Tensor]) -> Tensor:
    """The sum of scalars. Terms of one expression share kernels, where rows of a stack would not."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _overwrite(grad: Tensor, value: Tensor) -> None:
    """Change a gradient in place: who holds the tensor sees it, who computed with it before does not."""
    grad.assign(value.detach())


# ---- arguments ---------------------------------------------------------------------------------------------


def float_tensors(what: str, tensors: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """The tensors as a list; ArgumentError for what is no float tensor."""
    given: list[Any] = [tensors]
    if not isinstance(tensors, Tensor) and hasattr(tensors, "__iter__"):
        given = list(tensors)
    for tensor in given:
        if not isinstance(tensor, Tensor) or not tensor.dtype.is_float:
            raise ArgumentError(
                f"{what} of {show_argument(tensor)}",
                because="it takes float tensors",
                fix="pass nn.state.get_parameters(model)",
            )
    return given


def _gradients(what: str, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """The distinct gradients of parameters."""
    grads = [p.grad for p in float_tensors(what, parameters) if p.grad is not None]
    return list({id(grad): grad for grad in grads}.values())


def _power(what: str, norm_type: float) -> float:
    try:
        power = float(norm_type)
    except (TypeError, ValueError):
        power = math.nan
    if not power > 0:
        raise ArgumentError(
            f"{what}(norm_type={norm_type!r})",
            because="a norm has an order above 0",
            fix="use 1, 2, math.inf, or another number above 0",
        )
    return power


def _bound(what: str, name: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(
            f"{what}({name}={show_argument(value)})",
            because="it must be a number from 0",
            fix="choose another",
        )
