"""Every op that the CPU renderers spell, in every type it takes, against NumPy on nasty values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.devices import CLANG, GCC
from tests.runtime.linear_kernels import NUMPY, Kernel, buffer, elementwise, program, read, run
from whit.runtime.device import Device
from whit.uop import DType, Op, Ops, UOp, dtypes

DEVICES = [
    "CPU",
    CLANG,
    GCC,
]
FLOATS = [dtypes.float32, dtypes.float64]
INTS = list(dtypes.ints)
LANES = [1, 8]


def nasty(dtype: DType) -> np.ndarray[Any, Any]:
    """Values at which arithmetic goes wrong, and some ordinary ones."""
    kind = NUMPY[dtype]
    if dtype is dtypes.bool:
        return np.array([False, True])
    if dtype.is_float:
        tiny = float(np.finfo(kind).smallest_subnormal) if dtype in (*FLOATS, dtypes.float16) else 2.0**-16
        return np.array(
            [
                0.0,
                -0.0,
                1.0,
                -1.0,
                0.5,
                -2.75,
                3.3e2,
                -7.7e-3,
                math.inf,
                -math.inf,
                math.nan,
                tiny,
                -3 * tiny,
                1e-3,
                200.0,
                2.5,
            ]
        ).astype(kind)
    info = np.iinfo(kind)
    candidates = (
        0,
        1,
        2,
        3,
        7,
        100,
        info.max,
        info.max - 1,
        info.min,
        info.min + 1,
        -1,
        -2,
        -7,
        -128,
        65,
        31,
    )
    return np.array(([v for v in candidates if info.min <= v <= info.max] + [5] * 8)[:16], dtype=kind)


def pairs(dtype: DType) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    grid = np.array(
        list(itertools.product(range(len(nasty(dtype))), repeat=2)) * (8 if dtype is dtypes.bool else 1)
    )
    return nasty(dtype)[grid[:, 0]], nasty(dtype)[grid[:, 1]]


def same(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Equal bits, except that all NaNs are one and zeros have equal signs."""
    assert got.dtype == expected.dtype
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected)
        return
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a[~np.isnan(b)]), np.signbit(b[~np.isnan(b)]))


def python_ints(function: Any, dtype: DType, *arrays: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The function on Python integers, wrapped in two's complement."""
    mask = (1 << dtype.bitsize) - 1
    values = [function(*[int(v) for v in row]) & mask for row in zip(*arrays)]
    return np.array(values, dtype=np.uint64).astype(NUMPY[dtype])


def truncated(a: int, b: int) -> int:
    return 0 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


INT_BINARY: dict[Op, Any] = {
    Ops.ADD: lambda a, b: a + b,
    Ops.SUB: lambda a, b: a - b,
    Ops.MUL: lambda a, b: a * b,
    Ops.AND: lambda a, b: a & b,
    Ops.OR: lambda a, b: a | b,
    Ops.XOR: lambda a, b: a ^ b,
    Ops.MAX: max,
    Ops.MIN: min,
    Ops.TRUNCDIV: truncated,
    Ops.TRUNCMOD: lambda a, b: 0 if b == 0 else a - b * truncated(a, b),
    Ops.FLOORDIV: lambda a, b: 0 if b == 0 else a // b,
    Ops.FLOORMOD: lambda a, b: 0 if b == 0 else a % b,
}
FLOAT_BINARY: dict[Op, Any] = {
    Ops.ADD: np.add,
    Ops.SUB: np.subtract,
    Ops.MUL: np.multiply,
    Ops.FDIV: np.divide,
}
COMPARE: dict[Op, Any] = {
    Ops.CMPLT: np.less,
    Ops.CMPLE: np.less_equal,
    Ops.CMPEQ: np.equal,
    Ops.CMPNE: np.not_equal,
}


def binary(
    device: str, op: Op, dtype: DType, result: DType, a: Any, b: Any, lanes: int
) -> np.ndarray[Any, Any]:
    return elementwise(device, lambda k, x, y: k.alu(op, x, y), result, (a, b), (dtype, dtype), lanes)


def several(
    device: str, ops: list[Op], dtype: DType, result: DType, arrays: Any, lanes: int
) -> list[np.ndarray[Any, Any]]:
    """One kernel that computes every op into its own part of the output: fewer compilations."""
    kernel, size = Kernel(), len(arrays[0])
    out = kernel.param(0, result)
    sources = [kernel.param(i + 1, dtype) for i in range(len(arrays))]
    loop = kernel.range(size // lanes)
    index = kernel.alu(Ops.MUL, loop, kernel.const(lanes)) if lanes > 1 else loop
    loaded = [kernel.load(source, index, lanes) for source in sources]
    for position, op in enumerate(ops):
        place = kernel.alu(Ops.ADD, index, kernel.const(position * size))
        kernel.store(out, place, kernel.alu(op, *loaded[: op.arity]))
    kernel.end(loop)
    return np.split(run(device, kernel.linear(), np.zeros(size * len(ops), NUMPY[result]), *arrays), len(ops))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integer_arithmetic_wraps(device: str, lanes: int, dtype: DType) -> None:
    a, b = pairs(dtype)
    for op, got in zip(INT_BINARY, several(device, list(INT_BINARY), dtype, dtype, (a, b), lanes)):
        np.testing.assert_array_equal(got, python_ints(INT_BINARY[op], dtype, a, b), err_msg=f"{op} {dtype}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_arithmetic(device: str, lanes: int, dtype: DType) -> None:
    a, b = pairs(dtype)
    with np.errstate(all="ignore"):
        for op, got in zip(FLOAT_BINARY, several(device, list(FLOAT_BINARY), dtype, dtype, (a, b), lanes)):
            same(got, FLOAT_BINARY[op](a, b))
        for op, got in zip(
            (Ops.MAX, Ops.MIN), several(device, [Ops.MAX, Ops.MIN], dtype, dtype, (a, b), lanes)
        ):
            np.testing.assert_array_equal(got, (np.maximum if op is Ops.MAX else np.minimum)(a, b))
        unary = {
            Ops.NEG: np.negative,
            Ops.SQRT: np.sqrt,
            Ops.TRUNC: np.trunc,
            Ops.FLOOR: np.floor,
            Ops.RECIPROCAL: lambda x: (1 / x).astype(x.dtype),
        }
        for op, got in zip(unary, several(device, list(unary), dtype, dtype, (a,), lanes)):
            same(got, unary[op](a))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [*INTS, *FLOATS, dtypes.bool], ids=str)
def test_compare_and_where(device: str, lanes: int, dtype: DType) -> None:
    a, b = pairs(dtype)
    for op, got in zip(COMPARE, several(device, list(COMPARE), dtype, dtypes.bool, (a, b), lanes)):
        np.testing.assert_array_equal(got, COMPARE[op](a, b), err_msg=f"{op} {dtype}")
    chosen = elementwise(
        device,
        lambda k, x, y: k.alu(Ops.WHERE, k.alu(Ops.CMPLT, x, y), y, x),
        dtype,
        (a, b),
        (dtype, dtype),
        lanes,
    )
    same(chosen, np.where(a < b, b, a))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
def test_bools(device: str, lanes: int) -> None:
    a, b = pairs(dtypes.bool)
    ops = {
        Ops.ADD: np.logical_or,
        Ops.MUL: np.logical_and,
        Ops.MAX: np.logical_or,
        Ops.MIN: np.logical_and,
        Ops.AND: np.logical_and,
        Ops.OR: np.logical_or,
        Ops.XOR: np.logical_xor,
    }
    for op, got in zip(ops, several(device, list(ops), dtypes.bool, dtypes.bool, (a, b), lanes)):
        np.testing.assert_array_equal(got, ops[op](a, b), err_msg=str(op))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    "dtype", [dtypes.int8, dtypes.uint8, dtypes.int32, dtypes.uint32, dtypes.int64, dtypes.uint64], ids=str
)
def test_shifts(device: str, lanes: int, dtype: DType) -> None:
    a, b = pairs(dtype)
    width = dtype.bitsize
    b = np.where(b > 100, b, b % NUMPY[dtype](width + 4)).astype(b.dtype)
    left = python_ints(lambda x, y: x << y if 0 <= y < width else 0, dtype, a, b)
    right = python_ints(lambda x, y: x >> y if 0 <= y < width else (-1 if x < 0 else 0), dtype, a, b)
    got = several(device, [Ops.SHL, Ops.SHR], dtype, dtype, (a, b), lanes)
    np.testing.assert_array_equal(got[0], left)
    np.testing.assert_array_equal(got[1], right)
    for amount in (0, 1, width - 1, width):

        def shifted(k: Kernel, x: UOp, amount: int = amount) -> UOp:
            by = k.const(amount, x.dtype)
            return k.alu(Ops.XOR, k.alu(Ops.SHL, x, by), k.alu(Ops.SHR, x, by))

        expected = python_ints(
            lambda x, n=amount: (x << n if n < width else 0) ^ (x >> n if n < width else -1 if x < 0 else 0),
            dtype,
            a,
        )
        np.testing.assert_array_equal(elementwise(device, shifted, dtype, (a,), (dtype,), lanes), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [*FLOATS, dtypes.int32, dtypes.uint8], ids=str)
def test_multiply_accumulate(device: str, lanes: int, dtype: DType) -> None:
    a, b = pairs(dtype)
    c = a[::-1].copy()
    got = several(device, [Ops.MULACC], dtype, dtype, (a, b, c), lanes)[0]
    if not dtype.is_float:
        np.testing.assert_array_equal(got, python_ints(lambda x, y, z: x * y + z, dtype, a, b, c))
        return
    with np.errstate(all="ignore"):
        wide = np.longdouble if dtype is dtypes.float64 else np.float64
        expected = (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-15 if dtype is dtypes.float64 else 1e-7)
    one, eps = (1.0 + 2.0**-20), 2.0**-40  # one rounding: (1 + e)^2 - (1 + 2e) = e^2
    if dtype is dtypes.float32:
        x, z = np.full(8, one, np.float32), np.full(8, -(1 + 2.0**-19), np.float32)
        np.testing.assert_array_equal(
            several(device, [Ops.MULACC], dtype, dtype, (x, x, z), lanes)[0], np.float32(eps)
        )


@pytest.mark.skipif(Ops.LDEXP not in Device.get("CPU").target.native, reason="no such instruction")
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scaling_by_powers_of_two(lanes: int, dtype: DType) -> None:
    """LDEXP against NumPy: rounded once among the denormals, infinities, NaN and signed zeros kept."""
    info, kind = np.finfo(NUMPY[dtype]), NUMPY[dtype]
    x = [1.0, -1.5, 0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.tiny, info.smallest_subnormal]
    x += [1 + info.eps, 3.0]
    k = [0.0, 1.0, -1.0, 30.0, -30.0, info.minexp, info.maxexp, info.minexp - 20, 3000.0, -3000.0]
    both = np.array(list(itertools.product(x, k)), kind).T
    a, b = (np.resize(side, 480) for side in both)
    got = several("CPU", [Ops.LDEXP], dtype, dtype, (a, b), lanes)[0]
    with np.errstate(all="ignore"):
        expected = np.ldexp(a, b.astype(np.int32))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


def cast_expected(values: np.ndarray[Any, Any], source: DType, target: DType) -> np.ndarray[Any, Any]:
    """NumPy's and ml_dtypes' conversion, with float to integer saturating and NaN giving 0."""
    with np.errstate(all="ignore"):
        if target is dtypes.bool:
            return values.astype(np.float64) != 0 if source.is_float else values != 0
        if source.is_float and target.is_int:
            low, high = int(target.min), int(target.max)
            wide = values.astype(np.float64).tolist()
            whole = [0 if math.isnan(v) else low if v < low else high if v > high else int(v) for v in wide]
            return np.array(whole, dtype=NUMPY[target])
        return values.astype(NUMPY[target])


def cast_inputs(source: DType) -> np.ndarray[Any, Any]:
    values = nasty(source)
    if source.is_float:
        rng = np.random.default_rng(0)
        edges = [
            449.0,
            464.0,
            465.0,
            57344,
            61440,
            65520,
            3e38,
            2.0**63,
            -(2.0**63),
            2.0**64,
            2.0**31,
            255.5,
            -0.9,
            128,
            -129.0,
        ]
        with np.errstate(all="ignore"):
            more = [*(rng.normal(size=401) * 10.0 ** rng.integers(-9, 9, 401)), *edges]
            values = np.concatenate([values, np.array(more).astype(NUMPY[source])])
    return np.resize(values, len(values) // 8 * 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("source", dtypes.all, ids=str)
def test_casts(device: str, lanes: int, source: DType) -> None:
    """One kernel that casts to every other type, each into a buffer of its own."""
    values, targets = cast_inputs(source), [t for t in dtypes.all if t is not source]
    kernel = Kernel()
    memory = kernel.param(len(targets), source)
    outputs = [kernel.param(slot, target) for slot, target in enumerate(targets)]
    loop = kernel.range(len(values) // lanes)
    index = kernel.alu(Ops.MUL, loop, kernel.const(lanes))
    value = kernel.load(memory, index, lanes)
    for output, target in zip(outputs, targets):
        kernel.store(output, index, kernel.add(Ops.CAST, target.vec(lanes), value))
    kernel.end(loop)
    buffers = [buffer(device, np.zeros(len(values), NUMPY[t])) for t in targets] + [buffer(device, values)]
    program(device, kernel.linear())([b.handle for b in buffers], [])
    for target, result in zip(targets, buffers):
        same(read(result, NUMPY[target], len(values)), cast_expected(values, source, target))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2], ids=str)
def test_small_floats_every_bit_pattern(device: str, dtype: DType) -> None:
    bits = np.arange(1 << dtype.bitsize, dtype=np.uint16 if dtype.bitsize == 16 else np.uint8)
    values = bits.view(NUMPY[dtype])
    got = elementwise(
        device, lambda k, x: k.add(Ops.CAST, dtypes.float32.vec(8), x), dtypes.float32, (values,), (dtype,), 8
    )
    same(got, values.astype(np.float32))
    back = elementwise(
        device, lambda k, x: k.add(Ops.CAST, dtype.vec(8), x), dtype, (got,), (dtypes.float32,), 8
    )
    same(back, values)


@pytest.mark.parametrize("device", DEVICES)
def test_bitcast(device: str) -> None:
    values = nasty(dtypes.float32)
    for lanes in LANES:
        got = elementwise(
            device,
            lambda k, x: k.add(Ops.BITCAST, dtypes.int32.vec(x.dtype.count), x),
            dtypes.int32,
            (values,),
            (dtypes.float32,),
            lanes,
        )
        np.testing.assert_array_equal(got, values.view(np.int32))
    half = nasty(dtypes.float16)
    got = elementwise(
        device,
        lambda k, x: k.add(Ops.BITCAST, dtypes.uint16.vec(8), x),
        dtypes.uint16,
        (half,),
        (dtypes.float16,),
        8,
    )
    np.testing.assert_array_equal(got, half.view(np.uint16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_arithmetic_on_small_floats_rounds_once(device: str, dtype: DType) -> None:
    a, b = pairs(dtype)
    ops = {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.FDIV: np.divide}
    with np.errstate(all="ignore"):
        for op, got in zip(ops, several(device, list(ops), dtype, dtype, (a, b), 8)):
            same(got, ops[op](a, b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", LANES)
def test_products_and_sums_round_one_by_one(device: str, lanes: int) -> None:
    """x * x + z with z = -round(x * x) is 0 when the product is rounded first; a fused multiply-add would
    give the rest."""
    x = np.full(8, 1.0 + 2.0**-20, np.float32)
    z = -(x * x)
    got = elementwise(
        device,
        lambda k, a, c: k.alu(Ops.ADD, k.alu(Ops.MUL, a, a), c),
        dtypes.float32,
        (x, z),
        (dtypes.float32,) * 2,
        lanes,
    )
    np.testing.assert_array_equal(got, np.zeros(8))
