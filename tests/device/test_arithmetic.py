"""Every op in every type on every device, on values at which arithmetic goes wrong."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from tests.device.kernels import DEVICES, NUMPY, Array, alu, elementwise, same
from whit.runtime.device import Device
from whit.uop import DType, Op, Ops, UOp, dtypes

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"),
              pytest.mark.parametrize("device", DEVICES)]
NARROW = (dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.float16, dtypes.bfloat16)


def nasty(dtype: DType) -> Array:
    """Zeros, limits, ties, denormals, infinities, NaN, and some ordinary values."""
    if dtype.is_bool:
        return np.array([False, True])
    kind = NUMPY[dtype]
    if dtype.is_float:
        info = dtypes.finfo(dtype)
        tiny = math.ldexp(1.0, 1 - info.bias - info.mantissa)
        values = [0.0, -0.0, 1.0, -1.0, 0.5, -2.75, 3.0, 7.5, 1e-3, -200.0, info.max, -info.max, tiny,
                  -3 * tiny,
                  math.inf, -math.inf, math.nan, math.ldexp(1.0, 1 - info.bias)]
        return np.array(values, np.float64).astype(kind)
    top = np.iinfo(kind)
    candidates = (0, 1, 2, 3, 7, 8, 100, 31, 63, 65, top.max, top.max - 1, top.min, top.min + 1, -1, -2, -7,
                  -100)
    return np.array([v for v in candidates if top.min <= v <= top.max], kind)


def pairs(dtype: DType) -> tuple[Array, Array]:
    values = nasty(dtype)
    rows = np.array(list(itertools.product(range(len(values)), repeat=2)))
    return values[rows[:, 0]], values[rows[:, 1]]


def in_type(values: list[int], dtype: DType) -> Array:
    """Python integers in two's complement."""
    return np.array([v & ((1 << dtype.bitsize) - 1) for v in values], np.uint64).astype(NUMPY[dtype])


def truncated(a: int, b: int) -> int:
    return 0 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


INTEGER: dict[Op, Callable[[int, int], int]] = {
    Ops.ADD: lambda a, b: a + b, Ops.SUB: lambda a, b: a - b, Ops.MUL: lambda a, b: a * b,
    Ops.MAX: max, Ops.MIN: min,
    Ops.AND: lambda a, b: a & b, Ops.OR: lambda a, b: a | b, Ops.XOR: lambda a, b: a ^ b,
    Ops.FLOORDIV: lambda a, b: a // b if b else 0, Ops.FLOORMOD: lambda a, b: a % b if b else 0,
    Ops.TRUNCDIV: truncated, Ops.TRUNCMOD: lambda a, b: a - b * truncated(a, b) if b else 0}
COMPARE: dict[Op, Any] = {Ops.CMPLT: np.less, Ops.CMPLE: np.less_equal, Ops.CMPEQ: np.equal,
                          Ops.CMPNE: np.not_equal}
FLOAT: dict[Op, Any] = {Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.FDIV: np.divide}


@pytest.mark.parametrize("dtype", dtypes.ints, ids=lambda d: d.name)
def test_integers(device: str, dtype: DType) -> None:
    x, y = pairs(dtype)
    a, b = x.tolist(), y.tolist()
    results = elementwise(device, [x, y],
                          [*map(alu, INTEGER), *map(alu, COMPARE), lambda u, v: u.alu(Ops.NEG)])
    for (op, meaning), got in zip(INTEGER.items(), results, strict=False):
        expected = in_type([meaning(p, q) for p, q in zip(a, b, strict=True)], dtype)
        np.testing.assert_array_equal(got, expected, err_msg=op.name)
    for (op, function), got in zip(COMPARE.items(), results[len(INTEGER):], strict=False):
        np.testing.assert_array_equal(got, function(x, y), err_msg=op.name)
    np.testing.assert_array_equal(results[-1], in_type([-v for v in a], dtype))


@pytest.mark.parametrize("dtype", dtypes.ints, ids=lambda d: d.name)
def test_shifts(device: str, dtype: DType) -> None:
    x, y = pairs(dtype)
    width = dtype.bitsize
    left, right = elementwise(device, [x, y], [alu(Ops.SHL), alu(Ops.SHR)])
    a, b = x.tolist(), y.tolist()
    np.testing.assert_array_equal(left,
                                  in_type([p << q if 0 <= q < width else 0 for p,
                                           q in zip(a, b, strict=True)], dtype))
    np.testing.assert_array_equal(right,
                                  in_type([p >> q if 0 <= q < width else -(p < 0) for p,
                                           q in zip(a, b, strict=True)], dtype))


def test_products_of_packed_integers(device: str) -> None:
    """DOT ops on random words, by the instruction or part by part, against views of memory in 64 bits."""
    rng = np.random.default_rng(1)
    x, y, z = rng.integers(-(1 << 31), 1 << 31, (3, 256)).astype(np.int32)
    x[:4], y[:4] = [-0x7F7F7F80, -1, 0x7F7F7F7F, -(1 << 31)], [-0x7F7F7F80, -0x7F7F7F80, -1, 0x00008000]
    kinds = {Ops.DOT4: (np.int8, np.int8), Ops.DOT4U: (np.uint8, np.int8), Ops.DOT2: (np.int16, np.int16)}
    got = elementwise(device, [x, y, z], [lambda u, v, w, op=op: u.alu(op, v, w) for op in kinds])
    for result, (first, second) in zip(got, kinds.values(), strict=True):
        products = x.view(first).astype(np.int64) * y.view(second).astype(np.int64)
        same(result, (z + products.reshape(256, -1).sum(1)).astype(np.int32))


@pytest.mark.parametrize("dtype", [dtypes.int8, dtypes.int32, dtypes.uint32, dtypes.int64],
                         ids=lambda d: d.name)
def test_division_by_constants(device: str, dtype: DType) -> None:
    x = nasty(dtype)
    divisors = [1, 2, 3, 7, 8, 100, 0] + ([] if dtype.is_unsigned else [-1, -2, -5])
    ops = (Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD)
    cases = [(op, d) for op in ops for d in divisors]

    def by(op: Op, divisor: int) -> Callable[[UOp], UOp]:
        return lambda u: u.alu(op, u.const_like(divisor))
    results = elementwise(device, [x], [by(op, d) for op, d in cases])
    for (op, divisor), got in zip(cases, results, strict=True):
        expected = in_type([INTEGER[op](v, divisor) for v in x.tolist()], dtype)
        np.testing.assert_array_equal(got, expected, err_msg=f"{op.name} by {divisor}")


def test_bools(device: str) -> None:
    x, y = pairs(dtypes.bool)
    ops = {Ops.ADD: np.logical_or, Ops.MUL: np.logical_and, Ops.MAX: np.logical_or, Ops.MIN: np.logical_and,
           Ops.AND: np.logical_and,
           Ops.OR: np.logical_or, Ops.XOR: np.logical_xor, **COMPARE}
    for (op, function), got in zip(ops.items(), elementwise(device, [x, y], [*map(alu, ops)]), strict=True):
        np.testing.assert_array_equal(got, function(x, y), err_msg=op.name)


@pytest.mark.parametrize("dtype", dtypes.floats, ids=lambda d: d.name)
def test_floats(device: str, dtype: DType) -> None:
    """+ - * / compare, max, min, and what is exact in one operand; narrow types as float32, rounded."""
    x, y = pairs(dtype)
    kind = NUMPY[dtype]
    wide = (lambda v: v.astype(np.float32)) if dtype in NARROW else (lambda v: v)
    unary = {Ops.NEG: np.negative, Ops.SQRT: np.sqrt, Ops.TRUNC: np.trunc, Ops.FLOOR: np.floor,
             Ops.RECIPROCAL: lambda v: v.dtype.type(1) / v}
    extremes = {Ops.MAX: np.maximum, Ops.MIN: np.minimum}
    functions = [*map(alu, FLOAT), *map(alu, COMPARE), *map(alu, extremes)]
    results = elementwise(device, [x, y], functions + [lambda u, v, op=op: u.alu(op) for op in unary])
    for function in FLOAT.values():
        same(results.pop(0), function(wide(x), wide(y)).astype(kind))
    for op, function in COMPARE.items():
        np.testing.assert_array_equal(results.pop(0), function(wide(x), wide(y)), err_msg=op.name)
    for function in extremes.values():  # of two zeros either may come out
        np.testing.assert_array_equal(results.pop(0).astype(np.float64),
                                      function(wide(x), wide(y)).astype(np.float64))
    for function in unary.values():
        same(results.pop(0), function(wide(x)).astype(kind))


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64], ids=lambda d: d.name)
def test_choices_and_multiply_add(device: str, dtype: DType) -> None:
    """x * y + y rounds once where the device has it, twice elsewhere."""
    x, y = pairs(dtype)
    chosen, fused = elementwise(device, [x, y], [lambda u, v: u.lt(v).where(u, v),
                                                 lambda u, v: u.alu(Ops.MULACC, v, v)])
    same(chosen, np.where(x < y, x, y))
    if Ops.MULACC not in Device.get(device).target.native:
        same(fused, x * y + y)
        return
    product = x.astype(np.longdouble) * y + y  # exact enough to tell NaN, inf and 0
    np.testing.assert_allclose(fused, product.astype(x.dtype), rtol=4 * np.finfo(x.dtype).eps)


FUNCTIONS = {Ops.EXP2: np.exp2, Ops.LOG2: np.log2, Ops.SIN: np.sin, Ops.ERF: None}


def truth(op: Op, x: Array) -> Array:
    """Long doubles; erf from mpmath."""
    if op is Ops.ERF:
        return np.array([float("nan") if math.isnan(v) else float(mpmath.erf(v)) for v in x.tolist()],
                        np.longdouble)
    return FUNCTIONS[op](x.astype(np.longdouble))


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64],
                         ids=lambda d: d.name)
def test_functions(device: str, dtype: DType) -> None:
    """At most 2 ulp (erf in float64: 4), everywhere."""
    rng = np.random.default_rng(0)
    spread = rng.normal(size=100) * 10.0 ** rng.integers(-6, 12, 100)
    x = np.concatenate([nasty(dtype),
                        np.concatenate([spread, rng.uniform(-6, 6, 200),
                                        rng.uniform(0, 2, 100)]).astype(NUMPY[dtype])])
    for op, got in zip(FUNCTIONS, elementwise(device, [x], [*map(alu, FUNCTIONS)]), strict=True):
        close(got, truth(op, x.astype(np.float64)), 4 if op is Ops.ERF and dtype is dtypes.float64 else 2,
              op.name)


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.float32, dtypes.float64], ids=lambda d: d.name)
def test_powers(device: str, dtype: DType) -> None:
    rng = np.random.default_rng(1)
    x, y = pairs(dtype)
    x = np.concatenate([x, np.abs(rng.normal(size=200)).astype(x.dtype)])
    y = np.concatenate([y, (rng.normal(size=200) * 9).astype(x.dtype)])
    got, = elementwise(device, [x, y], [alu(Ops.POW)])
    close(got, np.power(x.astype(np.longdouble), y.astype(np.longdouble)), 2, "POW")


def close(got: Array, expected: Array, ulp: float, title: str) -> None:
    """Within `ulp` units of the last place of the type; NaN, infinities and zeros exactly."""
    near = expected.astype(np.float64).astype(got.dtype)
    info = dtypes.finfo(next(d for d, kind in NUMPY.items() if np.dtype(kind) == got.dtype))
    a, b = got.astype(np.longdouble), near.astype(np.longdouble)
    finite = np.isfinite(a) & np.isfinite(b)
    np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=title)
    _, exponent = np.frexp(b[finite].astype(np.float64))
    place = np.ldexp(1.0, np.maximum(exponent - 1, 1 - info.bias) - info.mantissa)
    error = np.abs(a[finite] - expected[finite]) / place
    assert error.size == 0 or error.max() <= ulp, (title, error.max(), a[finite][error.argmax()],
                                                   b[finite][error.argmax()])


def test_threefry(device: str) -> None:
    """Random123's known answers."""
    counter = np.array([0, 0xFFFFFFFFFFFFFFFF, 0x85A308D3243F6A88], np.uint64)
    key = np.array([0, 0xFFFFFFFFFFFFFFFF, 0x0370734413198A2E], np.uint64)
    got, = elementwise(device, [counter, key], [alu(Ops.THREEFRY)])
    assert [hex(v) for v in got.tolist()] == ["0x99ba4efe6b200159", "0xbb002be71cb996fc",
                                              "0x483df7a0c4923a9c"]


@pytest.mark.parametrize("before", dtypes.all, ids=lambda d: d.name)
def test_casts(device: str, before: DType) -> None:
    """To every type: floats saturate in integers and NaN is 0; narrow floats round to nearest, ties to
    even."""
    x = nasty(before)
    if before.is_float:
        x = np.concatenate([x,
                            np.array([127.5, 128.0, -129.0, 255.9, 40000.0, 3e9, 1e19, -1e19, 2.5,
                                      3.5]).astype(x.dtype)])
    after = [d for d in dtypes.all if d is not before]
    for dtype, got in zip(after, elementwise(device, [x], [lambda u, d=d: u.cast(d) for d in after]),
                          strict=True):
        same(got, cast(x, before, dtype))


def cast(x: Array, before: DType, after: DType) -> Array:
    kind = NUMPY[after]
    if after.is_bool:
        return x.astype(np.float64) != 0 if before.is_float else x != 0
    if after.is_float:
        if after in NARROW:  # every value of `nasty` is exact in float64
            return x.astype(np.float64 if after is dtypes.float16 else np.float32).astype(kind)
        return x.astype(np.float64).astype(kind) if before in NARROW else x.astype(kind)
    if not before.is_float:
        return in_type([int(v) for v in x.tolist()], after)
    info = np.iinfo(kind)

    def whole(v: float) -> int:
        if math.isnan(v):
            return 0
        return int(min(max(v, info.min), info.max)) if math.isfinite(v) else info.max if v > 0 else info.min
    limits = [whole(v) for v in x.astype(np.float64).tolist()]
    return np.array(limits, dtype=object).astype(kind)


@pytest.mark.parametrize("dtype",
                         [dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64,
                          dtypes.fp8e4m3], ids=lambda d: d.name)
def test_bitcasts(device: str, dtype: DType) -> None:
    number = np.dtype(f"u{dtype.itemsize}")
    unsigned = next(d for d, kind in NUMPY.items() if np.dtype(kind) == number)
    x = nasty(dtype)
    bits, back = elementwise(device, [x.view(number)],
                             [lambda u: u.bitcast(dtype).bitcast(unsigned), lambda u: u.bitcast(dtype)])
    np.testing.assert_array_equal(bits, x.view(number))
    same(back, x)
