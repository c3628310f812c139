"""Integer division, bools, threefry and storage-only floats against Python integers, NumPy, ml_dtypes and
published vectors."""
from __future__ import annotations

import operator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.codegen.numpy_evaluator import NUMPY, compute, evaluate, operand
from whit.codegen.decompose import decompose
from whit.codegen.target import Target
from whit.uop import ALU, AxisType, DType, Op, Ops, ParamArg, UOp, dtypes
from whit.uop.uop import alu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow and NaN are what is tested
LEAST = frozenset({Ops.ADD, Ops.MUL, Ops.AND, Ops.OR, Ops.XOR, Ops.SHL, Ops.SHR, Ops.CMPLT, Ops.CMPLE,
                   Ops.CMPEQ, Ops.CMPNE,
                   Ops.WHERE, Ops.FDIV, Ops.TRUNCDIV})
POOR = Target("poor", "c", native=LEAST)
SMALL = {dtypes.float16: np.dtype(np.float16), dtypes.bfloat16: np.dtype(ml_dtypes.bfloat16),
         dtypes.fp8e4m3: np.dtype(ml_dtypes.float8_e4m3fn), dtypes.fp8e5m2: np.dtype(ml_dtypes.float8_e5m2)}
STORING = Target("storing", "c", native=frozenset(ALU), storage_only=tuple(SMALL))
BITS = {8: dtypes.uint8, 16: dtypes.uint16}


def lowered(value: UOp, target: Target = POOR) -> UOp:
    root = decompose(UOp.sink(value), target).src[0]
    assert all(node.op in target.native for node in root.toposort() if node.op in ALU)
    return root


def nasty(dtype: DType) -> np.ndarray:
    info = np.iinfo(NUMPY[dtype])
    values = [0, 1, 2, 3, 7, 8, 100, info.max, info.max - 1, info.min, info.min + 1, info.max // 2]
    values += [-1, -2, -3, -7, -8, -100] if info.min < 0 else []
    return np.array(values, NUMPY[dtype])


# ---- integers


@pytest.mark.parametrize("op", [Ops.CMPEQ, Ops.CMPNE], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", [dtypes.int64, dtypes.uint64], ids=lambda d: d.name)
def test_labels_and_counters(op: Op, dtype: DType) -> None:
    """A label of 64 bits equals a counter of a loop where it does, also when it fits no 32 bits."""
    counter = UOp.range(1000, AxisType.REDUCE, 0)
    labels = [0, 1, 999, 1000, 1 << 31, (1 << 32) + 5, (1 << 63) - 1, 5]
    labels += [-1, -5, -(1 << 63)] if dtype is dtypes.int64 else [(1 << 64) - 1, (1 << 64) - 995]
    for order in (1, -1):
        root = lowered(alu(op, *(operand(dtype), counter.cast(dtype))[::order]), STORING)
        (wide,) = {n.dtype for n in root.toposort() if n.op is Ops.CAST and n.src[0] is counter}
        assert wide is dtypes.int32
        for k in (0, 5, 999):
            got = compute(root.substitute({counter: UOp.index(k)}), np.array(labels, NUMPY[dtype]))
            assert got.tolist() == [(label == k) is (op is Ops.CMPEQ) for label in labels]


def wrapped(value: int, dtype: DType) -> int:
    value &= (1 << dtype.bitsize) - 1
    return value - (1 << dtype.bitsize) if dtype.kind == "i" and value >> (dtype.bitsize - 1) else value


@pytest.mark.parametrize("dtype", dtypes.ints, ids=lambda d: d.name)
@pytest.mark.parametrize("op", [Ops.FLOORDIV, Ops.FLOORMOD], ids=lambda v: v.name)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8, 64, 100, -1, -2, -3])
def test_floor_division_by_constants(op: Op, dtype: DType, divisor: int) -> None:
    if dtype.is_unsigned and divisor < 0:
        pytest.skip("unsigned")
    x = nasty(dtype)
    if divisor == -1:
        x = x[x != np.iinfo(x.dtype).min]  # the evaluator divides as the machine does
    got = compute(lowered(alu(op, operand(dtype), UOp.const(divisor, dtype))), x)
    expected = [wrapped(v // divisor if op is Ops.FLOORDIV else v % divisor, dtype) for v in x.tolist()]
    assert got.tolist() == expected


@pytest.mark.parametrize("dtype", dtypes.ints, ids=lambda d: d.name)
@pytest.mark.parametrize("op", [Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCMOD], ids=lambda v: v.name)
def test_division_by_values(op: Op, dtype: DType) -> None:
    x, y = (grid.ravel() for grid in np.meshgrid(nasty(dtype), nasty(dtype)))
    keep = (y != 0) & ~((x == np.iinfo(x.dtype).min) & (y.astype(object) == -1))
    x, y = x[keep], y[keep]
    got = compute(lowered(alu(op, operand(dtype), operand(dtype, 1))), x, y)

    def meaning(a: int, b: int) -> int:
        if op is Ops.TRUNCMOD:
            return a - b * (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)
        return a // b if op is Ops.FLOORDIV else a % b
    assert got.tolist() == [wrapped(meaning(a, b), dtype) for a,
                            b in zip(x.tolist(), y.tolist(), strict=True)]


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("offset", [0, -1, -7, -100])
def test_addresses_keep_floor_division_with_dividends_from_zero_on(offset: int, divisor: int) -> None:
    r = UOp.range(50, AxisType.LOOP, 1)
    values = np.arange(50)
    for op in (Ops.FLOORDIV, Ops.FLOORMOD):
        root = decompose(alu(op, r + offset, UOp.index(divisor)), POOR)
        assert all(n.src[0].vmin >= 0 for n in root.toposort() if n.op in (Ops.FLOORDIV, Ops.FLOORMOD))
        got = [_python(root, {r: v}) for v in values.tolist()]
        function = operator.floordiv if op is Ops.FLOORDIV else operator.mod
        assert got == [function(v + offset, divisor) for v in values.tolist()]


def _python(node: UOp, values: dict[UOp, int]) -> int:
    if node.op is Ops.CONST:
        return int(node.arg)
    if node in values:
        return values[node]
    a, b = (_python(s, values) for s in node.src)
    return {Ops.ADD: a + b, Ops.MUL: a * b, Ops.FLOORDIV: a // (b or 1), Ops.FLOORMOD: a % (b or 1),
            Ops.SHR: a >> max(b, 0), Ops.AND: a & b}[node.op]


@pytest.mark.parametrize("dtype",
                         [dtypes.int8, dtypes.uint8, dtypes.int64, dtypes.uint64, dtypes.float32,
                          dtypes.float64],
                         ids=lambda d: d.name)
@pytest.mark.parametrize("op", [Ops.MAX, Ops.MIN, Ops.SUB, Ops.NEG], ids=lambda v: v.name)
def test_what_comparisons_and_products_express(op: Op, dtype: DType) -> None:
    base = np.array([0.0, 1.5, -2.5, np.inf, -np.inf, np.nan],
                    NUMPY[dtype]) if dtype.is_float else nasty(dtype)
    x, y = (grid.ravel() for grid in np.meshgrid(base, base))
    operands = [operand(dtype, slot) for slot in range(op.arity or 1)]
    got = compute(lowered(alu(op, *operands)), x, y)
    with np.errstate(all="ignore"):
        function = {Ops.MAX: np.maximum, Ops.MIN: np.minimum, Ops.SUB: np.subtract, Ops.NEG: np.negative}[op]
        np.testing.assert_array_equal(got, function(*[x, y][:len(operands)]))


@pytest.mark.parametrize(("op", "function"), [
    (Ops.ADD, np.logical_or), (Ops.MAX, np.logical_or), (Ops.MUL, np.logical_and), (Ops.MIN, np.logical_and),
    (Ops.CMPLT, np.less),
    (Ops.CMPLE, np.less_equal), (Ops.CMPEQ, np.equal), (Ops.CMPNE, np.not_equal)],
    ids=lambda v: getattr(v, "name", ""))
def test_bools(op: Op, function: np.ufunc) -> None:
    x, y = np.array([False, False, True, True]), np.array([False, True, False, True])
    root = lowered(alu(op, operand(dtypes.bool), operand(dtypes.bool, 1)))
    assert {n.op for n in root.toposort()} <= {Ops.AND, Ops.OR, Ops.XOR, Ops.CONST, Ops.INDEX, Ops.PARAM,
                                               Ops.RANGE}
    np.testing.assert_array_equal(compute(root, x, y), function(x, y))


def test_cast_to_bool_asks_for_zero() -> None:
    x = np.array([0.0, -0.0, 0.3, -1.0, np.nan, np.inf, 1e-45], np.float32)
    got = compute(lowered(operand(dtypes.float32).cast(dtypes.bool)), x)
    np.testing.assert_array_equal(got, x.astype(bool))


@pytest.mark.parametrize("divisor", [2.0, 0.25, -8.0, 3.0, 2.0**-130, 2.0**126])
def test_division_by_a_constant_is_exact(divisor: float) -> None:
    x = np.array([0.0, -0.0, 1.0, 3.3, -1e-40, 1e38, np.inf, np.nan], np.float32)
    root = lowered(operand(dtypes.float32) / UOp.const(divisor, dtypes.float32))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(compute(root, x), x / np.float32(divisor))
    assert any(n.op is Ops.FDIV for n in root.toposort()) == (divisor not in (2.0, 0.25, -8.0))


# ---- random numbers


@pytest.mark.parametrize(("counter", "key", "result"), [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
])
def test_threefry_known_answers(counter: tuple[int, int], key: tuple[int, int],
                                result: tuple[int, int]) -> None:
    """The vectors that come with Random123 (kat_vectors, threefry2x32 20)."""
    root = lowered(alu(Ops.THREEFRY, operand(dtypes.uint64), operand(dtypes.uint64, 1)),
                   Target("t", "c", native=frozenset(ALU) - {
        Ops.THREEFRY}))
    words = [np.array([low | high << 32], np.uint64) for low, high in (counter, key)]
    got = int(compute(root, *words)[0])
    assert (got & 0xFFFFFFFF, got >> 32) == result


# ---- storage-only floats


def read(dtype: DType, slot: int = 0) -> UOp:
    return operand(dtype, slot)


def bits_of(value: UOp, dtype: DType) -> UOp:
    """What a STORE of the value writes."""
    r = UOp.range(1 << 20, AxisType.LOOP, 0)
    store = UOp(Ops.STORE, dtypes.void, (UOp(Ops.PARAM, dtype, (), ParamArg(9, 1 << 20)), r, value))
    result = decompose(UOp.sink(store.end(r)), STORING).src[0].src[0]
    assert result.src[0].dtype is BITS[dtype.bitsize] is result.src[2].dtype
    return result.src[2]


def patterns(dtype: DType) -> np.ndarray:
    return np.arange(1 << dtype.bitsize, dtype=np.uint16 if dtype.bitsize == 16 else np.uint8)


def same_floats(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal values, with equal signs; all NaNs are one."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(got, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(expected[number]))


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
def test_widening(dtype: DType) -> None:
    number = patterns(dtype)
    same_floats(compute(lowered(read(dtype).cast(dtypes.float32), STORING), number),
                number.view(SMALL[dtype]).astype(np.float32))


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
def test_copies_keep_every_bit(dtype: DType) -> None:
    number = patterns(dtype)
    root = bits_of(read(dtype), dtype)
    assert root.op is Ops.INDEX
    np.testing.assert_array_equal(compute(root, number), number)
    np.testing.assert_array_equal(compute(lowered(read(dtype).bitcast(BITS[dtype.bitsize]), STORING), number),
                                  number)


def interesting_floats(dtype: DType) -> np.ndarray:
    """Every value of the narrow type, the ties between neighbours, what is just beside both, and random
    bits."""
    values = np.unique(patterns(dtype).view(SMALL[dtype]).astype(np.float64))
    values = values[np.isfinite(values)]
    ties = (values[:-1] + values[1:]) / 2
    largest = values[-1]
    top = largest + (largest - values[-2]) / 2
    base = np.concatenate([values, ties, [top, -top, 2 * top, np.inf, -np.inf, np.nan]]).astype(np.float32)
    rng = np.random.default_rng(3)
    anything = rng.integers(0, 1 << 32, 50_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([base, np.nextafter(base, np.float32(np.inf)),
                           np.nextafter(base, np.float32(-np.inf)), anything])


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
def test_narrowing(dtype: DType) -> None:
    x = interesting_floats(dtype)
    stored = compute(bits_of(operand(dtypes.float32).cast(dtype), dtype), x)
    with np.errstate(all="ignore"):
        expected = x.astype(SMALL[dtype])
    same_floats(np.ascontiguousarray(stored).view(SMALL[dtype]), expected)
    rounded = compute(lowered(operand(dtypes.float32).cast(dtype).cast(dtypes.float32), STORING), x)
    same_floats(rounded, expected.astype(np.float32))


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
def test_narrowing_doubles_rounds_once(dtype: DType) -> None:
    """Just beside a tie, by less than float32 can tell; expected: the nearest value in exact arithmetic."""
    values = np.unique(patterns(dtype).view(SMALL[dtype]).astype(np.float64))
    values = values[np.isfinite(values)]
    some = np.random.default_rng(1).integers(0, len(values) - 1, 300)
    low, high = values[some], values[some + 1]
    tie = (low + high) / 2
    x = np.concatenate([np.nextafter(tie, np.inf), np.nextafter(tie, -np.inf), low,
                        [np.inf, -np.inf, np.nan, 1e300]])
    with np.errstate(all="ignore"):
        expected = np.concatenate([high, low, low,
                                   np.array([np.inf, -np.inf, np.nan, 1e300]).astype(SMALL[dtype])])
    for a, t in zip(x[:300], tie, strict=True):
        assert Fraction(float(a)) > Fraction(float(t))
    got = compute(lowered(operand(dtypes.float64).cast(dtype).cast(dtypes.float32), STORING), x)
    np.testing.assert_array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
@pytest.mark.parametrize("before", [dtypes.int8, dtypes.uint16, dtypes.int32, dtypes.uint32],
                         ids=lambda d: d.name)
def test_integers_round_once(before: DType, dtype: DType) -> None:
    info = np.iinfo(NUMPY[before])
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.integers(info.min, info.max, 2000, endpoint=True), nasty(before).astype(np.int64),
                        np.clip((1 << 30) + (1 << 22) + np.arange(-2, 3), info.min,
                                info.max)]).astype(NUMPY[before])
    got = compute(lowered(operand(before).cast(dtype).cast(dtypes.float32), STORING), x)
    grid = np.unique(patterns(dtype).view(SMALL[dtype]).astype(np.float64))
    grid = grid[np.isfinite(grid)]
    with np.errstate(all="ignore"):
        via_double = x.astype(np.float64).astype(np.float16).astype(np.float32)
    if dtype is dtypes.float16:
        np.testing.assert_array_equal(got, via_double)
        return
    finite = np.isfinite(got)
    places = np.clip(np.searchsorted(grid, x.astype(np.float64)), 1, len(grid) - 1)
    distance = np.minimum(np.abs(grid[places] - x.astype(np.float64)),
                          np.abs(grid[places - 1] - x.astype(np.float64)))
    np.testing.assert_array_equal(np.abs(got.astype(np.float64) - x.astype(np.float64))[finite],
                                  distance[finite])


FLOAT_OPS = {Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.FDIV: np.divide,
             Ops.MAX: np.maximum,
             Ops.MIN: np.minimum}


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.name)
@pytest.mark.parametrize("op", FLOAT_OPS, ids=lambda v: v.name)
def test_arithmetic_equals_numpy(op: Op, dtype: DType) -> None:
    """All pairs of the 8-bit types, random pairs of the others."""
    if dtype.bitsize == 8:
        a, b = (grid.ravel() for grid in np.meshgrid(patterns(dtype), patterns(dtype)))
    else:
        a, b = np.random.default_rng(5).integers(0, 65536, (2, 60_000)).astype(np.uint16)
    x, y = a.view(SMALL[dtype]), b.view(SMALL[dtype])
    got = compute(bits_of(alu(op, read(dtype), read(dtype, 1)), dtype), a, b)
    with np.errstate(all="ignore"):
        expected = FLOAT_OPS[op](x.astype(np.float32), y.astype(np.float32)).astype(SMALL[dtype])
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(SMALL[dtype]).astype(np.float32),
                                  expected.astype(np.float32))


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=lambda d: d.name)
def test_every_step_rounds(dtype: DType) -> None:
    """(x + y) * y - x in steps of the narrow type, as NumPy computes it."""
    a, b = np.random.default_rng(6).integers(0, 65536, (2, 40_000)).astype(np.uint16)
    x, y = a.view(SMALL[dtype]), b.view(SMALL[dtype])
    u, v = read(dtype), read(dtype, 1)
    got = compute(bits_of((u + v) * v - u, dtype), a, b)
    with np.errstate(all="ignore"):
        expected = (x + y) * y - x
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(SMALL[dtype]).astype(np.float32),
                                  expected.astype(np.float32))


def test_casts_between_narrow_types() -> None:
    for before in SMALL:
        for after in SMALL:
            if before is after:
                continue
            number = patterns(before)
            got = compute(bits_of(read(before).cast(after), after), number)
            with np.errstate(all="ignore"):
                expected = number.view(SMALL[before]).astype(np.float32).astype(SMALL[after])
            same_floats(np.ascontiguousarray(got).view(SMALL[after]), expected)


def test_kernels_without_narrow_floats_are_untouched() -> None:
    r = UOp.range(4, AxisType.LOOP, 0)
    param = UOp(Ops.PARAM, dtypes.float32, (), ParamArg(0, 4))
    sink = UOp.sink(UOp(Ops.STORE, dtypes.void,
                        (param, r, UOp(Ops.INDEX, dtypes.float32, (param, r)) * 2.0)).end(r))
    assert decompose(sink, STORING) is sink


def test_reductions_are_carried_in_float32() -> None:
    r, k = UOp.range(4, AxisType.LOOP, 0), UOp.range(8, AxisType.REDUCE, 1)
    value = UOp(Ops.INDEX, dtypes.float16, (UOp(Ops.PARAM, dtypes.float16, (), ParamArg(0, 32)), r * 8 + k))
    root = decompose(UOp.sink(value.reduce_ranges(Ops.ADD, k)), STORING)
    reduces = [n for n in root.toposort() if n.op is Ops.REDUCE]
    assert [n.dtype for n in reduces] == [dtypes.float32]
    assert dtypes.float16 not in {n.dtype for n in root.toposort()}


def test_evaluator_itself() -> None:
    """fused() rounds once: 1 + 2**-12 squared is halfway between float32s until the addend decides."""
    x, y, z = operand(dtypes.float32), operand(dtypes.float32, 1), operand(dtypes.float32, 2)
    a = np.array([1 + 2.0**-12], np.float32)
    node = alu(Ops.MULACC, x, y, z)
    for addend in (2.0**-60, -2.0**-60):
        got = evaluate(node, {x: a, y: a, z: np.array([addend], np.float32)})
        exact = Fraction(float(a[0])) ** 2 + Fraction(addend)
        neighbours = [np.float32(1 + 2.0**-11), np.nextafter(np.float32(1 + 2.0**-11), np.float32(2))]
        assert got[0] == min(neighbours, key=lambda n: abs(Fraction(float(n)) - exact))
