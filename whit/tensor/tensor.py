"""`Tensor`: construction from data, reading data out, realisation, assignment; the operations come from the mixins."""
from __future__ import annotations

import array
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Self

from whit.helpers import TRAINING, ArgumentError, Context, DeviceError, DTypeError, ShapeError, all_int, prod
from whit.tensor import storage
from whit.tensor.base import TensorBase, check_devices, scalar_shape
from whit.tensor.functional import FunctionalMixin
from whit.tensor.storage import device_name, hooks
from whit.uop import DType, Ops, Shape, UOp, dtypes
from whit.uop.dtype import FLOAT_INFO, to_dtype, wrap
from whit.uop.uop import show_shape


class _TensorType(type):
    """Makes `Tensor.training` a view of the TRAINING setting."""

    @property
    def training(cls) -> bool:
        return bool(TRAINING.value)

    @training.setter
    def training(cls, value: bool) -> None:
        TRAINING.value = int(value)


class Tensor(FunctionalMixin, metaclass=_TensorType):
    """A multi-dimensional array whose value is a lazy graph.

    Tensor(data, dtype=None, device=None, requires_grad=None). `data`: a Python scalar, nested lists of them (ragged ones
    raise ShapeError), bytes (uint8), a NumPy array or anything with `__array__` (copied), a Tensor, or a symbolic integer.

    >>> (Tensor([1, 2, 3]) + 0.5).tolist()
    [1.5, 2.5, 3.5]
    """

    def __init__(self, data: Any, device: str | None = None, dtype: DType | str | None = None,
                 requires_grad: bool | None = None) -> None:
        want = None if dtype is None else to_dtype(dtype)
        uop = _node_of(data, want, None if device is None else device_name(device))
        self.uop = uop if want is None else uop.cast(want)
        TensorBase.live.add(self)
        if requires_grad is not None:
            self.requires_grad = requires_grad


# ---- nodes of Python data


def _node_of(data: Any, dtype: DType | None, device: str | None) -> UOp:
    """The graph of anything that `Tensor(...)` takes."""
    if isinstance(data, (bool, int, float)):
        chosen = dtypes.from_py(data) if dtype is None or not isinstance(data, int) or dtype.is_float else dtype
        return move(UOp.const(data, chosen), device)
    if isinstance(data, TensorBase):
        return move(data.uop, device)
    if isinstance(data, UOp):
        return move(data.cast(dtypes.default_int) if data.dtype is dtypes.index else data, device)
    if isinstance(data, (list, tuple)):
        return _node_of_list(data, dtype, device)
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = memoryview(bytes(data))
        return buffer_of(view, (len(view),), dtypes.uint8, device)
    if hasattr(data, "__array__"):
        return _node_of_array(data, device)
    raise ArgumentError(f"Tensor({type(data).__name__})", because="this type holds no numbers that a tensor can take",
                        fix="pass a scalar, nested lists, bytes, a NumPy array or a Tensor")


def buffer_of(data: memoryview, shape: Shape, dtype: DType, device: str | None, keep: object = None) -> UOp:
    """A new BUFFER with these bytes, seen as `shape`. `data` must not change afterwards."""
    buffer = UOp.new_buffer(prod(shape), dtype, device or storage.default_device())
    storage.put(buffer, data, keep)
    return buffer.reshape(tuple(shape))


def move(uop: UOp, device: str | None) -> UOp:
    """The value on a device; constants move by themselves when they are asked for where the default is."""
    if device is None or (uop.device or storage.default_device()) == device:
        return uop
    return uop.copy_to(device)


def _node_of_list(data: Sequence[Any], dtype: DType | None, device: str | None) -> UOp:
    """Nested lists; items may be tensors or arrays, which are stacked."""
    shape: list[int] = []
    level: Any = data
    while isinstance(level, (list, tuple)):
        shape.append(len(level))
        level = level[0] if level else None
    flat: list[Any] = list(data)
    for depth, size in enumerate(shape[1:], 1):
        if not all(isinstance(row, (list, tuple)) and len(row) == size for row in flat):
            lengths = sorted({str(len(row)) if isinstance(row, (list, tuple)) else "a scalar" for row in flat})
            raise ShapeError("Tensor of nested lists", because=f"at depth {depth} the lengths are {', '.join(lengths)}",
                             fix="give every row the same length")
        flat = [item for row in flat for item in row]
    if any(hasattr(item, "__array__") or isinstance(item, UOp) for item in flat):
        stacked = Tensor.stack(*[Tensor(item) for item in flat]).reshape(*shape, *Tensor(flat[0]).shape)
        return move(stacked.uop, device)
    if any(isinstance(item, (list, tuple)) for item in flat):
        raise ShapeError("Tensor of nested lists", because="some rows are scalars and some are lists",
                         fix="give every row the same depth")
    chosen = dtype if dtype is not None else dtypes.from_py(flat)
    return buffer_of(memoryview(pack(flat, chosen)), tuple(shape), chosen, device)


def pack(values: Sequence[Any], dtype: DType) -> bytes:
    """Python scalars as bytes of a dtype; floats round, integers must fit.

    >>> pack([1, 2], dtypes.int16)
    b'\\x01\\x00\\x02\\x00'
    """
    try:
        if dtype.fmt and dtype.fmt not in "?e":
            return array.array(dtype.fmt, values).tobytes()
    except (OverflowError, TypeError):
        pass  # a float for an integer dtype, or too large a value: one by one below
    if dtype.kind in "iu":
        values = [_fitting(value, dtype) for value in values]
    else:
        values = [wrap(value, dtype) for value in values]
    if dtype.fmt:
        return struct.pack(f"{len(values)}{dtype.fmt}", *values)
    return b"".join([encode_float(value, dtype) for value in values])


def _fitting(value: Any, dtype: DType) -> int:
    number = int(value)
    if not dtype.min <= number <= dtype.max:
        raise DTypeError(f"Tensor({value}, dtype={dtype})", because=f"{dtype} holds {dtype.min} to {dtype.max}",
                         fix="choose a wider dtype")
    return number


def encode_float(value: float, dtype: DType) -> bytes:
    """The bits of an already rounded bfloat16 or 8-bit float."""
    if dtype is dtypes.bfloat16:
        return struct.pack("f", value)[2:]
    info = FLOAT_INFO[dtype]
    sign = 0x80 if struct.pack(">d", value)[0] & 0x80 else 0
    if value != value:
        return bytes([sign | 0x7F])
    magnitude = abs(value)
    if magnitude == float("inf"):
        return bytes([sign | ((1 << info.exponent) - 1) << info.mantissa])
    if magnitude == 0:
        return bytes([sign])
    exponent = max(0, int(struct.unpack(">Q", struct.pack(">d", magnitude))[0] >> 52) - 1023 + info.bias)
    step = 2.0 ** (max(exponent, 1) - info.bias - info.mantissa)
    fraction = int(magnitude / step)
    return bytes([sign | (fraction if exponent == 0 else (exponent - 1 << info.mantissa) + fraction)])


def _node_of_array(data: Any, device: str | None) -> UOp:
    """A NumPy array (or what `__array__` gives), copied."""
    import numpy as np
    array_ = np.asarray(data)
    name = {"float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2"}.get(array_.dtype.name, array_.dtype.name)
    if name not in {d.name for d in dtypes.all}:
        raise DTypeError(f"Tensor of a NumPy array of {array_.dtype}", because="whit has no such dtype",
                         fix="convert it with .astype first")
    copied = np.array(array_, dtype=array_.dtype.newbyteorder("="), order="C", copy=True)
    data_ = memoryview(copied.reshape(-1).view(np.uint8)) if copied.size else memoryview(b"")
    return buffer_of(data_, array_.shape, to_dtype(name), device)
