"""The meaning of ops on NumPy scalars: the truth that rules, bounds and folding are compared with."""
from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from whit.uop import DType, Op, Ops, dtypes
from whit.uop.ops import COMPARE

NUMPY = {dtypes.bool: np.bool_, dtypes.int8: np.int8, dtypes.uint8: np.uint8, dtypes.int16: np.int16,
         dtypes.uint16: np.uint16, dtypes.int32: np.int32, dtypes.uint32: np.uint32, dtypes.int64: np.int64,
         dtypes.uint64: np.uint64, dtypes.float16: np.float16, dtypes.float32: np.float32,
         dtypes.float64: np.float64,
         dtypes.bfloat16: ml_dtypes.bfloat16, dtypes.fp8e4m3: ml_dtypes.float8_e4m3fn,
         dtypes.fp8e5m2: ml_dtypes.float8_e5m2}
TYPES = list(NUMPY)


def nasty(dtype: DType) -> list[Any]:
    """0, -0.0, inf, NaN, denormals, extremes, neighbours of powers of two."""
    if dtype.is_bool:
        return [False, True]
    if dtype.is_float:
        t = NUMPY[dtype]
        info = ml_dtypes.finfo(t)
        numbers = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -2.5, float(info.max), -float(info.max), float(info.tiny),
                   float(info.smallest_subnormal), -float(info.smallest_subnormal), math.nan, math.inf,
                   -math.inf]
        return [float(t(v)) for v in numbers]
    values = {0, 1, 2, 3, 5, 7, 8, 127, -1, -2, -7, int(dtype.min), int(dtype.min) + 1, int(dtype.max),
              int(dtype.max) - 1}
    return sorted(v for v in values if dtype.min <= v <= dtype.max)


# ---- the truth: NumPy scalars, and ml_dtypes for the narrow floats -----------------------------------------


def numpy_value(value: Any, dtype: DType) -> Any:
    return NUMPY[dtype](value)


def wide(x: Any) -> Any:
    """Narrow floats compute in float64, and the result rounds once."""
    return np.float64(x) \
        if x.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32") else x


def floor_div(a: Any, b: Any) -> int:
    return 0 if b == 0 else int(a) // int(b)


def trunc_div(a: Any, b: Any) -> int:
    return 0 if b == 0 \
        else int(math.copysign(1, int(a)) * math.copysign(1, int(b))) * (abs(int(a)) // abs(int(b)))


def wrapped(value: int, dtype: DType) -> Any:
    return np.array(value % (1 << dtype.bitsize), dtype=f"u{dtype.itemsize}").astype(NUMPY[dtype])[()]


def calculate(op: Op, dtype: DType, args: list[Any]) -> Any:
    """One op on NumPy scalars."""
    a, b = args[0], args[1] if len(args) > 1 else None
    if op is Ops.WHERE:
        return args[1] if a else args[2]
    if op in COMPARE:
        compare = {Ops.CMPLT: np.less, Ops.CMPLE: np.less_equal, Ops.CMPEQ: np.equal,
                   Ops.CMPNE: np.not_equal}[op]
        return np.bool_(compare(wide(a) if dtype.is_float else a, wide(b) if dtype.is_float else b))
    if dtype.is_bool:
        return {Ops.AND: np.logical_and, Ops.OR: np.logical_or, Ops.XOR: np.logical_xor,
                Ops.ADD: np.logical_or,
                Ops.MUL: np.logical_and, Ops.MAX: np.logical_or, Ops.MIN: np.logical_and}[op](a, b)
    if dtype.is_float:
        x, y = wide(a), wide(b) if b is not None else None
        call: dict[Op, Any] = {Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply,
                               Ops.FDIV: np.divide,
                               Ops.MAX: np.maximum, Ops.MIN: np.minimum, Ops.NEG: np.negative}
        return NUMPY[dtype](call[op](x, y) if y is not None else call[op](x))
    i, j = int(a), int(b) if b is not None else 0
    width = dtype.bitsize
    exact = {Ops.ADD: lambda: i + j, Ops.SUB: lambda: i - j, Ops.MUL: lambda: i * j, Ops.NEG: lambda: -i,
             Ops.FLOORDIV: lambda: floor_div(i, j), Ops.TRUNCDIV: lambda: trunc_div(i, j),
             Ops.FLOORMOD: lambda: 0 if j == 0 else i % j, Ops.TRUNCMOD: lambda: 0 if j == 0
             else i - j * trunc_div(i, j),
             Ops.MAX: lambda: max(i, j), Ops.MIN: lambda: min(i, j), Ops.AND: lambda: i & j,
             Ops.OR: lambda: i | j,
             Ops.XOR: lambda: i ^ j, Ops.SHL: lambda: i << j if 0 <= j < width else 0,
             Ops.SHR: lambda: i >> j if 0 <= j < width else (-1 if i < 0 else 0)}[op]()
    return wrapped(exact, dtype)


def converted(value: Any, source: DType, target: DType) -> Any:
    """CAST: floats beyond an integer type saturate and NaN gives 0; integers wrap; bool tests for
    non-zero."""
    if target.is_bool:
        return np.bool_(value != 0)
    if target.is_float:
        exact = float(value) if source.is_float or source.is_bool else int(value)
        with np.errstate(over="ignore"):
            return NUMPY[target](np.float64(exact) if target is not dtypes.float32 else np.float32(exact))
    if source.is_float:
        number = float(value)
        if number != number:
            return NUMPY[target](0)
        return NUMPY[target](int(target.min) if number <= target.min else int(target.max)
                             if number >= target.max
                             else int(number))
    return wrapped(int(value), target)
