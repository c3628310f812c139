"""`Tensor.backward` and `Tensor.gradient`: the walk of `gradient.py` between tensors, with the checks of its
arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whit.autograd.gradient import gradient
from whit.helpers import ArgumentError, DeviceError, DTypeError, ShapeError
from whit.uop import UOp
from whit.uop.uop import show_shape

if TYPE_CHECKING:
    from whit.tensor import Tensor


def backward(loss: Tensor, upstream: Tensor | None = None) -> None:
    """Add d(loss)/d(t), times `upstream`, to `t.grad` of every live tensor t with requires_grad=True that
    the loss depends on.

    Shapes and dtypes: loss is a float with one element, or `upstream` has its shape; t.grad has t's shape
    and dtype. Errors: ShapeError for a loss of several elements without `upstream`, DTypeError for one that
    is not a float, ArgumentError if it depends on no tensor that requires a gradient. Nothing has changed
    then.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> _ = (x * x).sum().backward()
    >>> x.grad.tolist()
    [2.0, 4.0]
    """
    start = _upstream(loss, upstream, "backward")
    targets = [t for t in type(loss).live if t.requires_grad]
    results = gradient([loss.uop], [t.uop for t in targets], [start])
    if all(result is None for result in results):
        raise ArgumentError(
            "backward",
            because="the value depends on no tensor with requires_grad=True",
            fix="set requires_grad=True on what is trained, and do not detach what uses it",
        )
    for target, result in zip(targets, results, strict=True):
        if result is not None:
            new = type(loss)._wrap(result)
            target.grad = new if target.grad is None else target.grad + new


def gradients(
    output: Tensor, targets: Sequence[Tensor], upstream: Tensor | None = None, materialize: bool = False
) -> list[Tensor]:
    """d(output)/d(t), times `upstream`, for each target t. Touches no `.grad`.

    Shapes and dtypes: like the targets. `materialize`: zeros for targets that the output does not depend on.
    Errors: as `backward`; ArgumentError for a target that the output does not depend on.

    >>> x = Tensor([1.0, 2.0])
    >>> (x * x).sum().gradient(x)[0].tolist()
    [2.0, 4.0]
    """
    start = _upstream(output, upstream, "gradient")
    for i, target in enumerate(targets):
        if not target.dtype.is_float:
            raise DTypeError(
                f"gradient for target {i} of dtype {target.dtype}",
                because="only floats have gradients",
                fix="cast it to a float before it is used",
            )
    results = gradient([output.uop], [t.uop for t in targets], [start])
    found: list[Tensor] = []
    for i, (target, result) in enumerate(zip(targets, results, strict=True)):
        if result is None and not materialize:
            raise ArgumentError(
                f"gradient for target {i} of shape {show_shape(target.shape)}",
                because="the value does not depend on it through differentiable operations",
                fix="check that it was not detached, cast to integers or overwritten; mark it with "
                "requires_grad=True if values are read in between; "
                "materialize_grads=True gives zeros instead",
            )
        found.append(type(output)._wrap(_full(target.uop, 0) if result is None else result))
    return found


def _full(like: UOp, value: float) -> UOp:
    """A constant of the shape and dtype of another node."""
    return like.const_like(value).reshape((1,) * like.ndim).expand(like.shape)


def _upstream(output: Tensor, upstream: Tensor | None, what: str) -> UOp:
    """The gradient to start from: the given one, checked, or 1 for a scalar."""
    if not output.dtype.is_float:
        raise DTypeError(
            f"{what} of a {output.dtype} tensor",
            because="only floats have gradients",
            fix="compute the loss in a float dtype",
        )
    if upstream is None:
        if any(size != 1 for size in output.shape):
            raise ShapeError(
                f"{what} of shape {show_shape(output.shape)}",
                because="only a value of one element has a gradient by itself",
                fix="reduce it first, for example with .sum() or .mean(), or pass gradient=",
            )
        return _full(output.uop, 1)
    if upstream.shape != output.shape:
        shapes = f"{show_shape(output.shape)} with a gradient of shape {show_shape(upstream.shape)}"
        raise ShapeError(
            f"{what} of shape {shapes}",
            because="the shapes differ",
            fix="pass a gradient of the value's own shape",
        )
    if not upstream.dtype.is_float:
        raise DTypeError(
            f"{what} with a gradient of {upstream.dtype}",
            because="it must be a float",
            fix=f"cast it to {output.dtype}",
        )
    if upstream.uop.device is not None and output.uop.device not in (None, upstream.uop.device):
        raise DeviceError(
            f"{what} on {output.device} with a gradient on {upstream.device}",
            because="both must be on one device",
            fix=f"move it with .to({output.device!r})",
        )
    return upstream.uop.cast(output.dtype)
