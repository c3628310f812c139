"""What every family of tensor operations stands on: the node, the registry of live tensors, operands and
promotion.

The families form one tower of mixins, each built on those before it: elementwise, movement, reduce, creation,
random, indexing, linalg, functional; `Tensor` is the top. A method may use any family below its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Self, TypeAlias

from whit.helpers import DeviceError, DTypeError, ShapeError, all_int, prod
from whit.tensor.storage import default_device
from whit.uop import DType, Op, Ops, PyConst, Shape, Sint, UOp, dtypes, promote
from whit.uop.dtype import common_dtype, strong
from whit.uop.uop import show_shape

_WEAK: dict[type, DType] = {bool: dtypes.bool, int: dtypes.weakint, float: dtypes.weakfloat}


class _LiveRef(weakref.ref["TensorBase"]):
    __slots__ = ("key",)
    key: int


class LiveSet:
    """All tensors that exist, by identity (a WeakSet would compare them with ==, which tensors do
    elementwise)."""

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}

    def add(self, tensor: TensorBase) -> None:
        ref: Any = _LiveRef(tensor, self._forget)
        ref.key = id(tensor)
        self._refs[ref.key] = ref

    def _forget(self, ref: Any) -> None:
        found: Any = self._refs.get(ref.key)
        if found is ref:
            del self._refs[ref.key]

    def __contains__(self, tensor: object) -> bool:
        ref: Any = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[Any]:
        for ref in list(self._refs.values()):
            tensor = ref()
            if tensor is not None:
                yield tensor


class SizeOf:
    """What `x.size` answers when it is called."""

    shape: Shape

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __call__(self, dim: int | None = None) -> Any:
        if dim is None:
            return self.shape
        if not isinstance(dim, int) or not -len(self.shape) <= dim < len(self.shape):
            raise ShapeError(
                f"size({dim!r}) of shape {show_shape(self.shape)}",
                because=f"axes run from {-len(self.shape)} to {len(self.shape) - 1}",
                fix="choose one of these",
            )
        return self.shape[dim]


class Size(int, SizeOf):
    """The number of elements, which can be called."""

    def __new__(cls, shape: Shape) -> Self:
        self = int.__new__(cls, prod(shape))
        self.shape = shape
        return self

    def __init__(self, shape: Shape) -> None:
        """All is done."""

    def __reduce__(self) -> tuple[Any, ...]:  # a plain number where it is stored
        return int, (int(self),)


class TensorBase:
    """The state of a tensor: `uop` (its value as a graph), `grad`, `requires_grad`."""

    live: ClassVar[LiveSet] = LiveSet()
    __array_ufunc__ = None  # NumPy's operators step back, so that array + tensor is a tensor
    uop: UOp
    grad: Self | None = None
    _requires_grad: bool | None = None
    gradients_wanted: ClassVar[bool] = False  # whether any tensor was ever marked

    @classmethod
    def _wrap(cls, uop: UOp) -> Self:
        """A tensor of a node: the fast constructor that every operation uses."""
        self = object.__new__(cls)
        self.uop = uop
        ref = _LiveRef(self, _forget)
        ref.key = id(self)
        _refs[ref.key] = ref
        return self

    @classmethod
    def _of(cls, value: Any) -> Self:
        """A tensor as it is; anything else (scalar, array, list) as a tensor."""
        return value if isinstance(value, cls) else cls(value)  # type: ignore[call-arg]  # Tensor.__init__ takes it

    # ---- properties

    @property
    def shape(self) -> Any:
        """The sizes; a symbolic size is an index expression of Variables."""
        return self.uop.shape

    @property
    def dtype(self) -> DType:
        return self.uop.dtype

    @property
    def device(self) -> str:
        """Where the value is; constants are everywhere and report the default device."""
        return self.uop.device or default_device()

    @property
    def ndim(self) -> int:
        return len(self.uop.shape)

    @property
    def requires_grad(self) -> bool | None:
        """True: `backward` fills `grad`. None: not decided (an optimiser sets True). False: never."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool | None) -> None:
        if value:
            if not self.uop.dtype.is_float:
                raise DTypeError(
                    f"requires_grad of a {self.uop.dtype} tensor",
                    because="only floats have gradients",
                    fix="cast it to a float dtype first",
                )
            if self.uop.device is None:
                self.uop = _unique(self.uop)
            TensorBase.gradients_wanted = True
        self._requires_grad = value

    @property
    def is_param(self) -> bool:
        """Whether `backward` fills `grad`: requires_grad under tinygrad's name."""
        return bool(self._requires_grad)

    def is_param_(self, is_param: bool = True) -> Self:
        """Set requires_grad; returns self.

        >>> Tensor([1.0]).is_param_().requires_grad
        True
        """
        self.requires_grad = is_param
        return self

    def numel(self) -> Sint:
        """The number of elements.

        >>> Tensor.zeros(2, 3).numel()
        6
        """
        return prod(self.uop.shape)  # type: ignore[no-any-return]

    @property
    def size(self) -> Any:
        """The number of elements (NumPy's `x.size`), which can be called as PyTorch's: `x.size()` is the
        shape, `x.size(dim)` the size of one axis. A tensor with symbolic sizes has no number, only the calls.

        >>> x = Tensor.zeros(2, 3)
        >>> x.size, x.size(), x.size(-1)
        (6, (2, 3), 3)
        """
        shape = self.uop.shape
        return Size(shape) if all_int(shape) else SizeOf(shape)

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.uop.dtype.itemsize

    def nbytes(self) -> Sint:
        """Bytes of all elements."""
        return self.numel() * self.uop.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.uop.dtype.is_float

    @property
    def max_shape(self) -> tuple[int, ...]:
        """The shape with symbolic sizes at their greatest."""
        return tuple([size if isinstance(size, int) else int(size.vmax) for size in self.uop.shape])

    def max_numel(self) -> int:
        """The number of elements when symbolic sizes are at their greatest."""
        return int(prod(self.max_shape))

    # ---- memory

    def contiguous(self) -> Self:
        """The value in row-major memory of its own; itself if it already is."""
        below = self.uop
        while below.op is Ops.RESHAPE:
            below = below.src[0]
        if below.op in (Ops.BUFFER, Ops.AFTER, Ops.CONTIGUOUS):
            return self
        return self._wrap(self.uop.contiguous())

    # ---- operands

    def _operands(self, other: Any, what: str) -> tuple[UOp, UOp]:
        """Both operands in their common dtype. A Python scalar becomes a CONST of shape ()."""
        a = self.uop
        weak = _WEAK.get(type(other))
        if weak is not None:
            dtype = a.dtype
            if weak is not dtypes.bool or dtype is not dtypes.bool:
                common = strong(promote(dtype, weak))
                if common is not dtype:
                    a, dtype = a.cast(common), common
            if weak is dtypes.weakint and dtype.kind != "f":
                check_range(other, dtype, what)
            return a, UOp.const(other, dtype)
        b: UOp = other.uop if isinstance(other, TensorBase) else self._of(other).uop
        if a.dtype is not b.dtype:
            common = common_dtype(a.dtype, b.dtype)
            a, b = a.cast(common), b.cast(common)
        if a.device is not b.device and a.device != b.device:
            check_devices(what, a, b)
        return a, b

    def _broadcast_binary(self, op: Op, other: Any, what: str, reverse: bool = False) -> Self:
        """`op` of self and other (or other and self when `reverse`), promoted and broadcast."""
        a, b = self._operands(other, what)
        if reverse:
            a, b = b, a
        return self._apply(op, what, a, b)

    @classmethod
    def _apply(cls, op: Op, what: str, *operands: UOp) -> Self:
        """An elementwise op on nodes that agree in dtype; shape errors name the operation."""
        dtype = dtypes.bool if op.category == "compare" else operands[-1].dtype
        try:
            return cls._wrap(UOp(op, dtype, operands))
        except ShapeError:
            shapes = " and ".join(show_shape(u.shape) for u in operands)
            raise ShapeError(
                f"{what} of shapes {shapes}",
                because="aligned at the right, sizes must agree or be 1",
                fix="reshape or expand one of them",
            ) from None

    # ---- axes

    def _axis(self, axis: int, what: str, extra: int = 0) -> int:
        """A non-negative axis number. `extra` allows positions past the end (for new axes)."""
        ndim = len(self.uop.shape) + extra
        try:
            number = int(axis.__index__())
        except (AttributeError, TypeError):
            raise ShapeError(
                f"{what}: axis {axis!r}", because="an axis is a whole number", fix="pass an int"
            ) from None
        if not -ndim <= number < max(ndim, 0):
            if ndim == 0:
                raise ShapeError(
                    f"{what}: axis {number} of a scalar",
                    because="shape () has no axes",
                    fix="reshape it to (1,) first",
                )
            raise ShapeError(
                f"{what}: axis {number} of shape {show_shape(self.uop.shape)}",
                because=f"axes run from {-ndim} to {ndim - 1}",
                fix="choose one of these",
            )
        return number + ndim if number < 0 else number

    def _axes(self, axis: int | tuple[int, ...] | list[int] | None, what: str) -> tuple[int, ...]:
        """Distinct non-negative axes in rising order; None means all."""
        if axis is None:
            return tuple(range(len(self.uop.shape)))
        if not isinstance(axis, (tuple, list)):
            scalar = not self.uop.shape and isinstance(axis, int) and axis in (0, -1)
            return () if scalar else (self._axis(axis, what),)
        axes = [self._axis(a, what) for a in axis]
        if len(set(axes)) != len(axes):
            raise ShapeError(
                f"{what} over axes {tuple(axis)}", because="an axis is named twice", fix="name each axis once"
            )
        return tuple(sorted(axes))


Scalar: TypeAlias = PyConst
_refs, _forget = TensorBase.live._refs, TensorBase.live._forget


def check_range(value: int, dtype: DType, what: str) -> None:
    """A Python integer must fit the integer dtype that it takes."""
    if not dtype.min <= value <= dtype.max:
        raise DTypeError(
            f"{what} of a {dtype} tensor and the integer {value}",
            because=f"{dtype} holds {dtype.min} to {dtype.max}",
            fix="cast the tensor to a wider dtype first",
        )


def check_devices(what: str, *operands: UOp) -> None:
    """Operands with a device must share it; constants have none."""
    devices = sorted({u.device for u in operands if u.device is not None})
    if len(devices) > 1:
        raise DeviceError(
            f"{what} of tensors on {' and '.join(devices)}",
            because="operands must be on one device",
            fix=f"move one with .to({devices[0]!r})",
        )


def iota(length: Sint, dtype: DType = dtypes.int32) -> UOp:
    """0, 1, 2, … of shape (length,)."""
    return UOp(Ops.IOTA, dtype, (), length)


def scalar_shape(uop: UOp, shape: Shape) -> UOp:
    """A node of shape () repeated to `shape`, at no cost."""
    return uop.reshape((1,) * len(shape)).expand(tuple(shape))


def _unique(uop: UOp) -> UOp:
    """A leaf of its own for a graph of constants: equal nodes are one object, and two parameters that both
    start as zeros(3) must not share a gradient."""
    from whit.uop.uop import fresh_uid

    if any(node.op is Ops.DETACH and node.arg is not None for node in uop.toposort()):
        return uop
    return UOp(Ops.DETACH, uop.dtype, (uop,), fresh_uid())
