"""New arrays."""

from __future__ import annotations

from typing import Any

from whit.helpers import ArgumentError, DTypeError
from whit.tensor import Tensor
from whit.tensor.storage import device_name
from whit.uop import DType, dtypes
from whit.uop.uop import show_shape


def _named(device: Any) -> str | None:
    return None if device is None else device_name(device)


def asarray(
    obj: Any, /, *, dtype: DType | None = None, device: Any = None, copy: bool | None = None
) -> Tensor:
    """A tensor of Python scalars, nested lists, another tensor, or an array of another library. A tensor that
    needs no change is itself, unless copy=True; copy=False raises ArgumentError where a copy is needed.

    >>> asarray([1, 2], dtype=dtypes.float64).tolist()
    [1.0, 2.0]
    """
    place = _named(device)
    if isinstance(obj, Tensor):
        result = obj if place is None else obj.to(place)
        result = result if dtype is None else result.cast(dtype)
        if result is not obj and copy is False:
            raise ArgumentError(
                f"asarray of a {obj.dtype} tensor on {obj.device}, copy=False",
                because=f"{result.dtype} on {result.device} is asked for",
                fix="leave copy out",
            )
        return Tensor._wrap(result.uop) if copy and result is obj else result
    if isinstance(obj, complex) or _has_complex(obj):
        raise DTypeError(
            "asarray of complex numbers", because="whit has no complex dtype", fix="pass real parts"
        )
    if copy is False and not hasattr(obj, "__array__"):
        raise ArgumentError(
            f"asarray({type(obj).__name__}, copy=False)", because="it has to be copied", fix="leave copy out"
        )
    if hasattr(obj, "__array__") and copy:
        import numpy as np

        obj = np.array(obj)
    return Tensor(obj, place, dtype)


def _has_complex(obj: Any) -> bool:
    return isinstance(obj, (list, tuple)) and any(isinstance(x, complex) or _has_complex(x) for x in obj)


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Tensor:
    """A tensor over the memory of anything with `__dlpack__`; see Tensor.from_dlpack."""
    return Tensor.from_dlpack(x, _named(device), copy)


def arange(
    start: Any, /, stop: Any = None, step: Any = 1, *, dtype: DType | None = None, device: Any = None
) -> Tensor:
    """start, start + step, … below stop; arange(stop) starts at 0."""
    return Tensor.arange(start, stop, step, dtype=dtype, device=_named(device))


def linspace(
    start: Any,
    stop: Any,
    /,
    num: int,
    *,
    dtype: DType | None = None,
    device: Any = None,
    endpoint: bool = True,
) -> Tensor:
    """`num` numbers evenly from start to stop; without endpoint, stop would be the next one.

    >>> linspace(0, 1, 4, endpoint=False).tolist()
    [0.0, 0.25, 0.5, 0.75]
    """
    start, stop = float(start), float(stop)
    if endpoint or num < 1:
        return Tensor.linspace(start, stop, num, dtype=dtype, device=_named(device))
    return Tensor.linspace(start, stop, num + 1, dtype=dtype, device=_named(device))[:num]


def empty(shape: Any, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """Memory whose contents nobody has set."""
    return Tensor.empty(shape, dtype=dtype, device=_named(device))


def zeros(shape: Any, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """Zeros."""
    return Tensor.zeros(shape, dtype=dtype, device=_named(device))


def ones(shape: Any, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """Ones."""
    return Tensor.ones(shape, dtype=dtype, device=_named(device))


def full(shape: Any, fill_value: Any, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """One value everywhere."""
    return Tensor.full(shape, fill_value, dtype=dtype, device=_named(device))


def empty_like(x: Tensor, /, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """`empty` in the shape, dtype and device of x."""
    return x.empty_like(dtype=dtype, device=_named(device))


def zeros_like(x: Tensor, /, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """Zeros in the shape, dtype and device of x."""
    return x.zeros_like(dtype=dtype, device=_named(device))


def ones_like(x: Tensor, /, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """Ones in the shape, dtype and device of x."""
    return x.ones_like(dtype=dtype, device=_named(device))


def full_like(x: Tensor, /, fill_value: Any, *, dtype: DType | None = None, device: Any = None) -> Tensor:
    """One value in the shape, dtype and device of x."""
    return x.full_like(fill_value, dtype=dtype, device=_named(device))


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: DType | None = None, device: Any = None
) -> Tensor:
    """Ones on the k-th diagonal of a matrix.

    >>> eye(2, 3, k=1).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    columns = n_rows if n_cols is None else n_cols
    if k == 0:
        return Tensor.eye(n_rows, columns, dtype=dtype, device=_named(device))
    on = Tensor.arange(n_rows).reshape(-1, 1) + k
    result = on.eq(Tensor.arange(columns)).cast(dtype or dtypes.default_float)
    return result if device is None else result.to(_named(device))


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> tuple[Tensor, ...]:
    """Vectors spread over a grid."""
    if not arrays:
        return ()
    if indexing == "xy" and len(arrays) == 1:
        return (arrays[0].reshape(-1),)
    return arrays[0].meshgrid(*arrays[1:], indexing=indexing)


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """Elements on and below the k-th diagonal of the last two axes, zeros above."""
    _matrix("tril", x)
    return x.tril(k)


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """Elements on and above the k-th diagonal of the last two axes, zeros below."""
    _matrix("triu", x)
    return x.triu(k)


def _matrix(what: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.ndim < 2:
        shown = show_shape(x.shape) if isinstance(x, Tensor) else repr(x)
        raise ArgumentError(f"{what} of {shown}", because="it takes matrices", fix="reshape to two axes")
