"""Dtypes by the standard's names, their limits, and promotion."""

from __future__ import annotations

from typing import Any, NamedTuple

from whit.helpers import ArgumentError, DTypeError
from whit.tensor import Tensor
from whit.tensor.storage import device_name
from whit.uop import DType, dtypes, promote
from whit.uop.dtype import strong

INTEGRAL = {
    "signed integer": dtypes.sints,
    "unsigned integer": dtypes.uints,
}
# what the standard knows; whit's narrow floats stand beside them
KINDS: dict[str, tuple[DType, ...]] = {
    "bool": (dtypes.bool,),
    **INTEGRAL,
    "integral": (*dtypes.sints, *dtypes.uints),
    "real floating": dtypes.floats,
    "complex floating": (),
    "numeric": (*dtypes.sints, *dtypes.uints, *dtypes.floats),
}
STANDARD = (dtypes.bool, *dtypes.sints, *dtypes.uints, dtypes.float32, dtypes.float64)


class FloatLimits(NamedTuple):
    """What `finfo` tells of a float dtype."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


class IntLimits(NamedTuple):
    """What `iinfo` tells of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


def _dtype_of(type: Any, what: str) -> DType:
    if isinstance(type, Tensor):
        return type.dtype
    if isinstance(type, DType):
        return type
    raise DTypeError(f"{what}({type!r})", because="it is neither a dtype nor a tensor", fix="pass one")


def finfo(type: Any, /) -> FloatLimits:
    """Limits of a float dtype, or of a tensor's.

    >>> finfo(dtypes.float32).eps == 2.0**-23
    True
    """
    dtype = _dtype_of(type, "finfo")
    info = dtypes.finfo(dtype)
    return FloatLimits(dtype.bitsize, 2.0**-info.mantissa, info.max, -info.max, 2.0 ** (1 - info.bias), dtype)


def iinfo(type: Any, /) -> IntLimits:
    """Limits of an integer dtype, or of a tensor's.

    >>> iinfo(dtypes.int8).min
    -128
    """
    dtype = _dtype_of(type, "iinfo")
    if not dtype.is_int:
        raise DTypeError(f"iinfo({dtype})", because="it is no integer dtype", fix="use finfo for floats")
    return IntLimits(dtype.bitsize, int(dtype.max), int(dtype.min), dtype)


def isdtype(dtype: DType, kind: Any) -> bool:
    """Whether a dtype is another, of a kind ("bool", "signed integer", "unsigned integer", "integral", "real
    floating", "complex floating", "numeric"), or one of a tuple of these.

    >>> isdtype(dtypes.int8, "integral"), isdtype(dtypes.bool, ("numeric", dtypes.bool))
    (True, True)
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, DType):
        return dtype is kind
    if kind not in KINDS:
        raise ArgumentError(
            f"isdtype(…, {kind!r})", because="there is no such kind", fix="use one of " + ", ".join(KINDS)
        )
    return dtype in KINDS[kind]


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype of an operation on these tensors, dtypes and Python scalars.

    >>> result_type(dtypes.int8, dtypes.uint8), result_type(dtypes.float64, 1)
    (dtypes.int16, dtypes.float64)
    """
    weak = {bool: dtypes.bool, int: dtypes.weakint, float: dtypes.weakfloat}
    found = [weak.get(type(a)) or _dtype_of(a, "result_type") for a in arrays_and_dtypes]
    if not found:
        raise ArgumentError("result_type()", because="there is nothing to promote", fix="pass a dtype")
    return strong(promote(*found))


def can_cast(from_: Any, to: DType, /) -> bool:
    """Whether promotion leads from one dtype (or a tensor's) to another.

    >>> can_cast(dtypes.int8, dtypes.int16), can_cast(dtypes.int16, dtypes.int8)
    (True, False)
    """
    before = _dtype_of(from_, "can_cast")
    try:
        return promote(before, _dtype_of(to, "can_cast")) is to
    except DTypeError:  # the 8-bit floats promote with nothing
        return False


def astype(x: Tensor, dtype: DType, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """The values in another dtype (and on another device). A write to the result never reaches x."""
    if device is not None:
        x = x.to(device_name(device))
    result = x.cast(dtype)
    return Tensor._wrap(result.uop) if copy and result is x else result
