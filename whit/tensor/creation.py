"""New tensors: constants, ranges, memory of others, and masks of triangles. Constants and ranges cost no
memory."""

from __future__ import annotations

import math
from typing import Any, Self, TypeAlias

from whit.helpers import ArgumentError, ShapeError, ceildiv, prod
from whit.tensor import storage
from whit.tensor.base import iota, scalar_shape
from whit.tensor.movement import sizes
from whit.tensor.sorting import SortingMixin
from whit.uop import DType, Ops, PyConst, Shape, UOp, dtypes
from whit.uop.dtype import to_dtype
from whit.uop.uop import show_shape

DTypeLike: TypeAlias = "DType | str | None"


def checked_shape(shape: tuple[Any, ...], what: str) -> Shape:
    """Sizes as whole numbers >= 0 or symbolic expressions."""
    result = []
    for size in sizes(shape):
        if not isinstance(size, UOp):
            try:
                size = size.__index__()
            except (AttributeError, TypeError):
                raise ShapeError(
                    f"{what}{shape}", because=f"{size!r} is no size", fix="sizes are whole numbers"
                ) from None
            if size < 0:
                raise ShapeError(f"{what}{shape}", because="a size is negative", fix="sizes are 0 or more")
        result.append(size)
    return tuple(result)


class CreationMixin(SortingMixin):
    """Methods of the creation family."""

    @classmethod
    def _finish(cls, uop: UOp, device: str | None, requires_grad: bool | None) -> Self:
        """Place a new value on its device."""
        if device is not None:
            name = storage.device_name(device)
            if (uop.device or storage.default_device()) != name:
                uop = uop.copy_to(name)
        result = cls._wrap(uop)
        if requires_grad is not None:
            result.requires_grad = requires_grad
        return result

    # ---- constants

    @classmethod
    def full(
        cls,
        shape: Any,
        fill_value: PyConst,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """One value everywhere; the dtype is the value's unless given.

        >>> Tensor.full((2, 2), 7).tolist()
        [[7, 7], [7, 7]]
        """
        if isinstance(fill_value, (bool, int, float)):
            value = UOp.const(fill_value, dtypes.from_py(fill_value) if dtype is None else to_dtype(dtype))
        else:
            value = cls._of(fill_value).uop
            value = value if dtype is None else value.cast(to_dtype(dtype))
        known = checked_shape((shape,), "full")
        return cls._finish(scalar_shape(value, known), device, requires_grad)

    @classmethod
    def zeros(
        cls,
        *shape: Any,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Zeros of the default float dtype."""
        return cls.full(sizes(shape), 0, dtype or dtypes.default_float, device, requires_grad)

    @classmethod
    def ones(
        cls,
        *shape: Any,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Ones of the default float dtype."""
        return cls.full(sizes(shape), 1, dtype or dtypes.default_float, device, requires_grad)

    @classmethod
    def empty(
        cls,
        *shape: Any,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Memory whose contents nobody has set."""
        known = checked_shape(shape, "empty")
        if not all(isinstance(size, int) for size in known):
            raise ShapeError(
                f"empty{show_shape(known)}",
                because="memory needs sizes that are known",
                fix="use the Variable's upper bound, then shrink",
            )
        buffer = UOp.new_buffer(
            prod(known), to_dtype(dtype or dtypes.default_float), storage.device_name(device)
        )
        return cls._finish(buffer.reshape(known), None, requires_grad)

    def full_like(
        self,
        fill_value: PyConst,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """One value in this shape, dtype and device."""
        return self.full(
            self.shape, fill_value, dtype or self.dtype, device or self.uop.device, requires_grad
        )

    def zeros_like(
        self, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool | None = None
    ) -> Self:
        return self.full_like(0, dtype, device, requires_grad)

    def ones_like(
        self, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool | None = None
    ) -> Self:
        return self.full_like(1, dtype, device, requires_grad)

    def empty_like(
        self, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool | None = None
    ) -> Self:
        return self.empty(
            *self.shape, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad
        )

    def const_like(self, value: PyConst) -> Self:
        """A scalar constant of this dtype, which broadcasts."""
        if not isinstance(value, (bool, int, float)):
            raise ArgumentError(
                f"const_like({value!r})", because="it is no Python scalar", fix="pass a number"
            )
        return self._wrap(UOp.const(value, self.uop.dtype))

    # ---- ranges

    @classmethod
    def arange(
        cls,
        start: Any,
        stop: Any = None,
        step: Any = 1,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """start, start + step, … below stop; `arange(stop)` starts at 0. Integers give int32 (int64 where
        they do not fit), floats the default float; the length is NumPy's ceil((stop - start) / step).

        >>> Tensor.arange(5).tolist(), Tensor.arange(1, 2, 0.25).tolist()
        ([0, 1, 2, 3, 4], [1.0, 1.25, 1.5, 1.75])
        """
        if stop is None:
            start, stop = 0, start
        if isinstance(stop, UOp):
            if (start, step) != (0, 1):
                raise ArgumentError(
                    "arange with a symbolic stop",
                    because="start and step must be 0 and 1",
                    fix="compute arange(stop) * step + start",
                )
            return cls._finish(iota(stop, to_dtype(dtype or dtypes.default_int)), device, requires_grad)
        if step == 0 or not all(math.isfinite(value) for value in (start, stop, step)):
            raise ArgumentError(
                f"arange({start}, {stop}, {step})",
                because="the step is 0 or a limit is not finite",
                fix="use finite limits and a non-zero step",
            )
        whole = all(isinstance(value, int) for value in (start, stop, step))
        length = max(0, ceildiv(stop - start, step) if whole else math.ceil((stop - start) / step))
        last = start + step * max(length - 1, 0)
        natural = dtypes.from_py([int(start), int(last)] if whole else 0.0)
        want = natural if dtype is None else to_dtype(dtype)
        return cls._finish(cls._ramp(start, step, length, want), device, requires_grad)

    @classmethod
    def _ramp(cls, start: PyConst, step: PyConst, length: int, dtype: DType) -> UOp:
        """start + i * step. Narrow floats count in float32 (float32 above 2**24 in float64) and round
        once."""
        work = dtype
        if dtype.kind == "f" and dtype.bitsize < 64:
            work = dtypes.float32 if length < 1 << 24 else dtypes.float64
        elif dtype.is_bool or dtype.bitsize < 32:
            work = dtypes.int32
        if work.kind != "f" and not (isinstance(start, int) and isinstance(step, int)):
            work = dtypes.float64
        counter = iota(
            length, work if work.is_int else dtypes.int32 if length < 1 << 31 else dtypes.int64
        ).cast(work)
        result = counter if step == 1 else counter.alu(Ops.MUL, UOp.const(step, work))
        return (result if start == 0 else result.alu(Ops.ADD, UOp.const(start, work))).cast(dtype)

    @classmethod
    def linspace(
        cls,
        start: float,
        stop: float,
        steps: int,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """`steps` numbers evenly from start to stop, both included.

        >>> Tensor.linspace(0, 1, 5).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
        """
        if steps < 0:
            raise ArgumentError(
                f"linspace of {steps} steps", because="a count cannot be negative", fix="use 0 or more"
            )
        want = to_dtype(dtype or dtypes.default_float)
        work = (
            want
            if want.kind == "f" and want.bitsize >= 32
            else dtypes.float64
            if want.is_int
            else dtypes.float32
        )
        step = (stop - start) / (steps - 1) if steps > 1 else 0.0
        count = iota(steps)
        ramp = count.cast(work).alu(Ops.MUL, UOp.const(step, work)).alu(Ops.ADD, UOp.const(start, work))
        if steps > 1:  # the last one is exact
            ramp = count.equal(steps - 1).where(UOp.const(stop, work), ramp)
        return cls._finish(ramp.cast(want), device, requires_grad)

    @classmethod
    def eye(
        cls,
        n: int,
        m: int | None = None,
        dtype: DTypeLike = None,
        device: str | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        """Ones on the diagonal of an (n, m) matrix.

        >>> Tensor.eye(2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        rows, columns = checked_shape((n, n if m is None else m), "eye")
        same = UOp(
            Ops.CMPEQ, dtypes.bool, (iota(rows).reshape((rows, 1)), iota(columns).reshape((1, columns)))
        )
        return cls._finish(same.cast(to_dtype(dtype or dtypes.default_float)), device, requires_grad)

    @classmethod
    def from_blob(
        cls, address: int, shape: Any, dtype: DTypeLike = None, device: str | None = None, keep: object = None
    ) -> Self:
        """A tensor over memory at `address`, which must stay valid while the tensor lives; `keep` is an
        object that owns it. A CPU device computes there: what is written to the tensor is written to it."""
        import ctypes

        known = checked_shape(sizes((shape,)), "from_blob")
        want = to_dtype(dtype or dtypes.default_float)
        nbytes = prod(known) * want.itemsize
        data = memoryview((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else memoryview(b"")
        buffer = UOp.new_buffer(prod(known), want, storage.device_name(device))
        storage.put(buffer, data, storage.Lent(address, keep))
        return cls._wrap(buffer.reshape(known))

    # ---- grids and triangles

    def meshgrid(self, *others: Self, indexing: str = "ij") -> tuple[Self, ...]:
        """Vectors spread over a grid, one tensor of the grid's shape per vector. indexing: "ij" or "xy"."""
        if indexing not in ("ij", "xy"):
            raise ArgumentError(
                f"meshgrid(indexing={indexing!r})", because="there is no such order", fix='use "ij" or "xy"'
            )
        vectors = [self, *others]
        if any(vector.ndim > 1 for vector in vectors):
            raise ShapeError(
                f"meshgrid of {' and '.join(show_shape(v.shape) for v in vectors)}",
                because="it takes scalars and vectors",
                fix="flatten them first",
            )
        axes = list(range(len(vectors)))
        if indexing == "xy" and len(vectors) > 1:
            axes[0], axes[1] = 1, 0
        grid: list[Any] = [1] * len(vectors)
        for vector, axis in zip(vectors, axes):
            grid[axis] = vector.numel()
        return tuple(
            [
                vector.reshape(*[-1 if a == axis else 1 for a in range(len(grid))]).expand(*grid)
                for vector, axis in zip(vectors, axes)
            ]
        )

    def tril(self, diagonal: int = 0) -> Self:
        """Elements on and below the diagonal of the last two axes, zeros above."""
        return self._triangle(diagonal, True)

    def triu(self, diagonal: int = 0) -> Self:
        """Elements on and above the diagonal of the last two axes, zeros below."""
        return self._triangle(diagonal, False)

    def _triangle(self, diagonal: int, lower: bool) -> Self:
        if self.ndim < 2:
            raise ShapeError(
                f"{'tril' if lower else 'triu'} of shape {show_shape(self.shape)}",
                because="a triangle needs two axes",
                fix="reshape to a matrix first",
            )
        rows, columns = self.shape[-2:]
        i, j = self._wrap(iota(rows).reshape((rows, 1))), self._wrap(iota(columns).reshape((1, columns)))
        limit = i + diagonal
        return (j <= limit if lower else j >= limit).where(self, self.const_like(0))
