"""Kernels that somebody gives: `Tensor.custom_kernel`, and the door through which whit's own algorithms come
(sorting, scans, decompositions)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.tensor.base import TensorBase, check_devices
from whit.tensor.reduce import ReduceMixin
from whit.tensor.storage import default_device
from whit.uop import DType, Ops, Shape, Sint, UOp, dtypes
from whit.uop.args import CallArg, RangeArg
from whit.uop.program import Program, arrays_of, param, with_slots
from whit.uop.symbolic import simplify
from whit.uop.uop import show_shape

Gradient = Callable[[list[UOp | None], list[UOp], tuple[UOp, ...]], Sequence[UOp | None]]


class CustomMixin(ReduceMixin):
    """A method; what it is built of are functions, since other families need them."""

    def custom_kernel(self, *others: Self, fxn: Callable[..., Any],
                      grad_fxn: Callable[..., Sequence[Self | None]] | None = None) -> list[Self]:
        """One kernel written by hand. `fxn` gets a `whit.uop.program.Array` for this tensor and each of the
        others and returns a kernel: `UOp.sink(…)` of stores, or a `Program` (docs/custom-kernels.md).

        Returns the tensors, those that the kernel stores to with what it wrote there; of these only shape,
        dtype and device matter before (`Tensor.empty`), and elements that it does not write hold anything.

        `grad_fxn(gradients, tensors)`: from the gradients of the written tensors, in order, and all
        tensors after the kernel, to one gradient (or None) for each; those of written ones are ignored.
        Errors: IRError for what is no kernel, DeviceError, ArgumentError if it writes nothing.

        >>> from whit.uop import UOp
        >>> def double(y, x):
        ...     i = UOp.range(3)
        ...     return UOp.sink(y.store(i, x[i] * 2).end(i))
        >>> Tensor.empty(3).custom_kernel(Tensor([1.0, 2.0, 3.0]), fxn=double)[0].tolist()
        [2.0, 4.0, 6.0]
        """
        tensors = [self, *others]
        for tensor in tensors:
            if not isinstance(tensor, TensorBase):
                raise ArgumentError(f"custom_kernel of {repr(tensor)[:60]}", because="it takes tensors",
                                    fix="wrap it: Tensor(…)")
        for name, function in (("fxn", fxn), ("grad_fxn", grad_fxn)):
            if not (callable(function) or (function is None and name == "grad_fxn")):
                raise ArgumentError(f"custom_kernel({name}={repr(function)[:60]})",
                                    because=f"a {type(function).__name__} cannot be called",
                                    fix="pass a function that builds the kernel")
        check_devices("custom_kernel", *[t.uop for t in tensors])
        kernel = _kernel_of(fxn(*[param(n, unbound(t.shape), t.dtype) for n, t in enumerate(tensors)]))
        from whit.uop.spec import verify_kernel

        verify_kernel(kernel, "given to custom_kernel")
        params, stored = arrays_of(kernel)
        written = [n for n in range(len(tensors)) if n in stored]
        if not written or any(slot >= len(tensors) for slot in params):
            why = "it has a parameter that is none" if written else "the kernel stores to none"
            raise ArgumentError("custom_kernel", because=why + " of the tensors",
                                fix="use the arrays that the function is given")
        order = [*written, *[n for n in range(len(tensors)) if n not in stored]]
        values = [tensors[n].uop for n in order[len(written):]]
        outputs = [(tensors[n].shape, tensors[n].dtype) for n in written]
        gradient: Any = None if grad_fxn is None else _TensorGradient(grad_fxn, type(self), tuple(order))
        slots = [order.index(n) for n in range(len(tensors))]
        results = run(with_slots(_renumbered(kernel), slots), values, outputs, self.device, gradient)
        made = list(tensors)
        for n, result in zip(written, results, strict=True):
            made[n] = self._wrap(result)
        return made


def run(kernel: UOp, values: Sequence[UOp], outputs: Sequence[tuple[Shape, DType]],
        device: str | None = None, gradient: Gradient | None = None) -> list[UOp]:
    """The values that a kernel writes. Its first PARAMs are the outputs, of these shapes and dtypes, the
    others the values.

    `gradient(upstreams, outputs, values)`: from the gradients of the outputs (None: zero), the outputs and
    the values to a gradient (or None) for each value.
    """
    where = device or next((value.device for value in values if value.device), None) or default_device()
    placed = tuple([value if value.device is not None else value.copy_to(where) for value in values])
    call = UOp(Ops.CALL, dtypes.void, placed, CallArg(kernel, tuple(outputs), where, gradient))
    return [UOp(Ops.OUTPUT, dtype, (call,), (n, tuple(shape))) for n, (shape, dtype) in enumerate(outputs)]


class _TensorGradient(NamedTuple):
    """A gradient function between tensors as one between nodes. `order`: outputs first, as the kernel has
    them."""

    function: Callable[..., Any]
    kind: type[CustomMixin]
    order: tuple[int, ...]

    def __call__(self, upstreams: list[UOp | None], outputs: list[UOp],
                 values: tuple[UOp, ...]) -> list[UOp | None]:
        wrap, count = self.kind._wrap, len(outputs)
        tensors: dict[int, Any] = {n: wrap(u) for n, u in zip(self.order, [*outputs, *values], strict=True)}
        given = [wrap(zeros_like(out) if g is None else g) for g, out in zip(upstreams, outputs, strict=True)]
        found = self.function(given, [tensors[n] for n in range(len(tensors))])
        if len(found) != len(tensors):
            raise ArgumentError(f"grad_fxn returned {len(found)} gradients", because=f"the kernel has "
                                f"{len(tensors)} tensors", fix="return one, or None, for each")
        parts: list[UOp | None] = []
        for n, value in zip(self.order[count:], values, strict=True):
            part = found[n]
            if part is not None and part.shape != value.shape:
                raise ShapeError(f"grad_fxn: a gradient of shape {show_shape(part.shape)} for tensor {n}",
                                 because=f"the tensor has shape {show_shape(value.shape)}",
                                 fix="return a gradient of the tensor's shape")
            if part is not None and not part.dtype.is_float:
                raise DTypeError(f"grad_fxn: a gradient of {part.dtype} for tensor {n}",
                                 because="gradients are floats", fix=f"cast it to {value.dtype}")
            parts.append(None if part is None else part.uop.cast(value.dtype))
        return parts


class Backward:
    """A gradient function of whit's own kernels, between tensors: `function(gradients, outputs, values,
    *args)` with None for gradients that are zero, to a gradient (or None) for each value. Equal ones are
    equal, so that equal calls are one node."""

    __slots__ = ("args", "function", "kind")

    def __init__(self, function: Callable[..., Sequence[Any]], kind: type[Any],
                 args: tuple[Any, ...] = ()) -> None:
        self.function, self.kind, self.args = function, kind, args

    def _parts(self) -> tuple[Any, ...]:
        return self.function, self.kind, self.args

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backward) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __call__(self, upstreams: list[UOp | None], outputs: list[UOp],
                 values: tuple[UOp, ...]) -> list[UOp | None]:
        wrap = self.kind._wrap
        given = [None if g is None else wrap(g) for g in upstreams]
        found = self.function(given, [wrap(u) for u in outputs], [wrap(u) for u in values], *self.args)
        return [None if part is None else part.uop for part in found]


def zeros_like(node: UOp) -> UOp:
    """Zeros of a node's shape and dtype."""
    return node.const_like(0).reshape((1,) * node.ndim).expand(node.shape)


def unbound(shape: Shape) -> Shape:
    """The sizes as a kernel sees them: in VARs, whatever these are bound to."""
    return tuple([_unbound(size) for size in shape])


def _unbound(size: Sint) -> Sint:
    if isinstance(size, int):
        return size
    return simplify(size.substitute({n: n.src[0] for n in size.toposort() if n.op is Ops.BIND}))


def _kernel_of(made: Any) -> UOp:
    """What the function returned as a kernel."""
    if isinstance(made, Program):
        return made.finish()
    if not isinstance(made, UOp):
        raise ArgumentError(f"custom_kernel: the function returned {repr(made)[:60]}",
                            because="it is no kernel", fix="return UOp.sink(…) of stores, or a Program")
    return UOp.sink(made) if made.op in (Ops.END, Ops.STORE) else made


def _renumbered(kernel: UOp) -> UOp:
    """Loops numbered from 0 in their order, so that equal kernels are one object. A program's are already."""
    if kernel.op is Ops.LINEAR:
        return kernel
    loops = sorted([n for n in kernel.toposort() if n.op is Ops.RANGE], key=lambda r: int(r.arg.uid))
    changes: dict[UOp, UOp] = {}
    for number, loop in enumerate(loops):  # a loop's size may name an outer one
        changes[loop] = UOp(Ops.RANGE, loop.dtype, (loop.src[0].substitute(changes),),
                            RangeArg(number, loop.arg.axis))
    return kernel.substitute(changes)
