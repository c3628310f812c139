"""Transcendental functions against NumPy's long doubles, libm and mpmath, in units in the last place."""
from __future__ import annotations

import math
from functools import lru_cache

import mpmath
import numpy as np
import pytest

from tests.codegen.numpy_evaluator import NUMPY, compute, operand
from whit.codegen import transcendental
from whit.codegen.decompose import decompose
from whit.codegen.target import Target
from whit.helpers import CompileError
from whit.uop import ALU, DType, Op, Ops, UOp, dtypes
from whit.uop.uop import alu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow and NaN are what is tested
BASIC = frozenset(ALU) - {Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.ERF, Ops.POW, Ops.RECIPROCAL, Ops.THREEFRY,
                          Ops.FLOORDIV, Ops.FLOORMOD, Ops.LDEXP}
FUSED = Target("fused", "c", native=BASIC)
SCALING = Target("scaling", "c", native=BASIC | {Ops.LDEXP})
PLAIN = Target("plain", "c", native=BASIC - {Ops.MULACC, Ops.TRUNC, Ops.FLOOR})
F32, F64 = dtypes.float32, dtypes.float64
# op, dtype -> the promised greatest error with and without fused multiply-add
BOUNDS = {(Ops.EXP2, F32): (1.0, 1.2), (Ops.LOG2, F32): (1.5, 1.5), (Ops.SIN, F32): (2.0, 2.0),
          (Ops.ERF, F32): (2.0, 2.0),
          (Ops.POW, F32): (1.0, 1.0), (Ops.EXP2, F64): (1.0, 1.2), (Ops.LOG2, F64): (1.0, 1.0),
          (Ops.SIN, F64): (2.0, 2.0),
          (Ops.ERF, F64): (3.0, 4.0), (Ops.POW, F64): (2.0, 2.0)}
UNARY = (Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.ERF)


def expand(op: Op, dtype: DType, target: Target) -> UOp:
    sources = [operand(dtype, slot) for slot in range(op.arity or 1)]
    return decompose(UOp.sink(alu(op, *sources)), target).src[0]


@lru_cache(None)
def inputs(dtype: DType, count: int) -> np.ndarray:
    """Random bit patterns, every exponent with special fractions of both signs, and dense ranges where things
    happen."""
    rng = np.random.default_rng(dtype.bitsize)
    kind, mantissa = NUMPY[dtype], 23 if dtype is F32 else 52
    unsigned = np.dtype(f"u{dtype.itemsize}").type
    top = (1 << dtype.bitsize) - 1
    anything = rng.integers(0, top, count, dtype=np.uint64, endpoint=True)
    exponents = range(256) if dtype is F32 else [0, 1, 2, *range(3, 2047, 40), 1022, 1023, 1024, 2046, 2047]
    sqrt_half = 0x3504F3 if dtype is F32 else 0x6A09E667F3BCD
    edges = [(sign << (dtype.bitsize - 1)) | (e << mantissa) | fraction for e in exponents for sign in (0, 1)
             for fraction in (0, 1, (1 << mantissa) - 1, sqrt_half, sqrt_half + 1)]
    wide = 160.0 if dtype is F32 else 1090.0
    dense = [rng.uniform(-a, a, count // 4) for a in (1.0, 4.0, 20.0, wide, 1e4)]
    turns = np.pi / 2 * rng.integers(1, 1 << 20, count // 8)  # where sin is hardest
    parts = [anything.astype(unsigned).view(kind),
             np.array(edges, dtype=np.uint64).astype(unsigned).view(kind), *dense, turns]
    return np.concatenate([part.astype(kind) for part in parts])


def ulps(got: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Distance from a long-double truth in units of the result's last place; huge where NaN, inf or the sign
    of 0 is wrong."""
    with np.errstate(all="ignore"):
        near = truth.astype(got.dtype)
        finite = np.isfinite(near) & np.isfinite(got)
        place = np.spacing(np.abs(np.where(finite, near, 1))).astype(np.longdouble)
        error = np.where(finite, np.abs(got.astype(np.longdouble) - truth) / place, 0)
        infinite = np.isinf(near) | np.isinf(got)
        wrong = (np.isnan(got) != np.isnan(near)) | (infinite & (got != near))
        wrong |= (near == 0) & (got == 0) & (np.signbit(near) != np.signbit(got)) & (truth == 0)
    return np.where(wrong, np.inf, error).astype(np.float64)


def long_double(op: Op, *xs: np.ndarray) -> np.ndarray:
    """Truth for float32: glibc's long-double functions, and its double erf."""
    with np.errstate(all="ignore"):
        if op is Ops.ERF:
            return np.array([math.erf(x) for x in xs[0].tolist()], dtype=np.longdouble)
        function = {Ops.EXP2: np.exp2, Ops.LOG2: np.log2, Ops.SIN: np.sin, Ops.POW: np.power}[op]
        return function(*[x.astype(np.longdouble) for x in xs])


def exact(op: Op, *xs: np.ndarray) -> list[mpmath.mpf]:
    """Truth from mpmath, with enough precision for sin(1e308)."""
    with mpmath.workprec(1300 if op is Ops.SIN else 160):
        return [_exact(op, *[mpmath.mpf(float(v)) for v in row]) for row in zip(*xs, strict=True)]


def _exact(op: Op, x: mpmath.mpf, y: mpmath.mpf | None = None) -> mpmath.mpf:
    if op is Ops.ERF:
        return mpmath.erf(x) if not mpmath.isnan(x) else x
    if op is Ops.LOG2:
        if x == 0:
            return -mpmath.inf
        return mpmath.log(x, 2) if x > 0 and mpmath.isfinite(x) else x if x > 0 else mpmath.nan
    if op is Ops.SIN:
        return mpmath.sin(x) if mpmath.isfinite(x) else mpmath.nan
    power = x if op is Ops.EXP2 else y * mpmath.log(x, 2)
    if mpmath.isnan(power):
        return power
    return mpmath.mpf(2) ** power if abs(power) < 1200 else mpmath.inf if power > 0 else mpmath.mpf(0)


def ulps_exact(got: np.ndarray, truth: list[mpmath.mpf]) -> np.ndarray:
    errors = np.zeros(len(got))
    for i, (g, t) in enumerate(zip(got.tolist(), truth, strict=True)):
        near = float(t)
        if np.isnan(near) or np.isinf(near) or np.isinf(g) or np.isnan(g):
            errors[i] = 0 if (g == near or (np.isnan(near) and np.isnan(g))) else np.inf
        else:
            errors[i] = float(abs(mpmath.mpf(g) - t) / mpmath.mpf(float(np.spacing(abs(near)))))
    return errors


@lru_cache(None)
def truth_of(op: Op, dtype: DType, count: int) -> tuple[tuple[np.ndarray, ...],
                                                        np.ndarray | list[mpmath.mpf]]:
    xs: tuple[np.ndarray, ...] = (inputs(dtype, count),)
    if op is Ops.POW:
        xs = power_inputs(dtype, count)
    return xs, long_double(op, *xs) if dtype is F32 else exact(op, *xs)


def power_inputs(dtype: DType, count: int) -> tuple[np.ndarray, ...]:
    """Positive bases with exponents that keep most results finite, and bases near 1 with huge exponents."""
    rng = np.random.default_rng(7)
    x = np.abs(inputs(dtype, count))
    x = x[(x > 0) & np.isfinite(x)]
    with np.errstate(all="ignore"):
        y = rng.uniform(-1, 1, x.size) * (140 if dtype is F32 else 1070) / np.maximum(np.abs(np.log2(x)),
                                                                                      1e-6)
    return x, y.astype(x.dtype)


def worst(op: Op, dtype: DType, target: Target, count: int) -> tuple[float, object]:
    """(greatest error in ulp, where)."""
    xs, truth = truth_of(op, dtype, count)
    got = compute(expand(op, dtype, target), *xs)
    assert got.dtype == NUMPY[dtype]
    errors = ulps(got, truth) if dtype is F32 else ulps_exact(got, truth)
    at = int(errors.argmax())
    return float(errors[at]), [x[at] for x in xs]


@pytest.mark.parametrize("target", [FUSED, PLAIN], ids=["fused", "plain"])
@pytest.mark.parametrize(("op", "dtype"), BOUNDS, ids=lambda v: v.name)
def test_error_bound(op: Op, dtype: DType, target: Target) -> None:
    error, where = worst(op, dtype, target, 40_000 if dtype is F32 else 400)
    assert error <= BOUNDS[op, dtype][target is PLAIN], where


@pytest.mark.parametrize("target", [SCALING, SCALING._replace(native=SCALING.native - {Ops.MULACC})],
                         ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_error_bound_where_scaling_is_an_instruction(dtype: DType, target: Target) -> None:
    assert Ops.LDEXP in {n.op for n in expand(Ops.EXP2, dtype, target).toposort()}
    error, where = worst(Ops.EXP2, dtype, target, 40_000 if dtype is F32 else 400)
    assert error <= BOUNDS[Ops.EXP2, dtype][Ops.MULACC not in target.native], where


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), BOUNDS, ids=lambda v: v.name)
def test_error_bound_dense(op: Op, dtype: DType) -> None:
    error, where = worst(op, dtype, FUSED, 1_000_000 if dtype is F32 else 20_000)
    assert error <= BOUNDS[op, dtype][0], where


@pytest.mark.parametrize(("op", "dtype", "table"), [
    (Ops.EXP2, F32, "EXP2"), (Ops.LOG2, F32, "LOG2"), (Ops.SIN, F32, "SIN"), (Ops.SIN, F32, "COS"),
    (Ops.ERF, F32, "ERF_SMALL"),
    (Ops.ERF, F32, "ERF_LARGE"), (Ops.EXP2, F64, "EXP2"), (Ops.SIN, F64, "SIN"), (Ops.SIN, F64, "COS"),
    (Ops.LOG2, F64, "ATANH"),
    (Ops.POW, F32, "LOG2_FAST"), (Ops.POW, F32, "EXP2_7"),
], ids=lambda v: getattr(v, "name", v))
def test_wrong_coefficient_is_noticed(op: Op, dtype: DType, table: str,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(transcendental, table)
    coefficients = whole[dtype] if isinstance(whole, dict) else whole
    for position in range(len(coefficients)):
        factor = 4 if position < len(coefficients) - 2 else 1000  # the last ones have digits to spare
        wrong = tuple(c * factor if i == position else c for i, c in enumerate(coefficients))
        monkeypatch.setattr(transcendental, table,
                            {**whole, dtype: wrong} if isinstance(whole, dict) else wrong)
        assert worst(op, dtype, FUSED, 8_000 if dtype is F32 else 100)[0] > BOUNDS[op, dtype][0], position


def power_of_e(dtype: DType, sign: float, order: int = 1, target: Target = FUSED) -> UOp:
    factors = (operand(dtype), UOp.const(sign / math.log(2), dtype))[::order]
    return decompose(UOp.sink(alu(Ops.EXP2, alu(Ops.MUL, *factors))), target).src[0]


def worst_power_of_e(dtype: DType, sign: float, order: int, count: int,
                     target: Target = FUSED) -> tuple[float, float]:
    """The greatest error and where."""
    x = inputs(dtype, count)
    got = compute(power_of_e(dtype, sign, order, target), x)
    if dtype is F32:
        error = ulps(got, np.exp(sign * x.astype(np.longdouble)))
    else:
        with mpmath.workprec(160):
            error = ulps_exact(got, [mpmath.exp(sign * mpmath.mpf(float(v))) if abs(v) < 1e4 or v != v
                                     else mpmath.inf if sign * v > 0 else mpmath.mpf(0) for v in x])
    return float(error.max()), float(x[error.argmax()])


@pytest.mark.parametrize("target", [FUSED, SCALING], ids=lambda t: t.key)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_powers_of_e(dtype: DType, sign: float, target: Target) -> None:
    """exp2(x * log2(e)) is e**x to 1 ulp: the product is not rounded."""
    for order in (1, -1):
        error, where = worst_power_of_e(dtype, sign, order, 40_000 if dtype is F32 else 400, target)
        assert error <= 1, where


@pytest.mark.parametrize("table", ["EXP", "LN2"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_wrong_coefficient_of_e_is_noticed(dtype: DType, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(transcendental, table)
    for position in range(len(whole[dtype])):
        wrong = list(whole[dtype])
        wrong[position] *= 1000 if wrong[position] < 1e-6 else 4
        monkeypatch.setattr(transcendental, table, {**whole, dtype: tuple(wrong)})
        assert worst_power_of_e(dtype, 1.0, 1, 8_000 if dtype is F32 else 100)[0] > 1, position


SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e30,
           -1e30, 1e-40, -1e-40,
           2.0**24 + 2, 2.0**53, 1e19]


@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_special_cases_of_pow(dtype: DType) -> None:
    x, y = (grid.ravel().astype(NUMPY[dtype]) for grid in np.meshgrid(SPECIAL, SPECIAL))
    got = compute(expand(Ops.POW, dtype, FUSED), x, y)
    with np.errstate(all="ignore"):
        expected = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
    special = ~np.isfinite(expected.astype(got.dtype)) | (expected == 0) | (np.abs(expected) == 1)
    np.testing.assert_array_equal(got[special], expected[special].astype(got.dtype))
    np.testing.assert_array_equal(np.signbit(got[expected == 0]), np.signbit(expected[expected == 0]))
    assert ulps(got, expected).max() <= 2


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, -1.0, 0.5])
def test_constant_exponents(exponent: float) -> None:
    x = np.array(SPECIAL, np.float32)
    got = compute(decompose(UOp.sink(alu(Ops.POW, operand(F32), UOp.const(exponent, F32))), FUSED).src[0], x)
    with np.errstate(all="ignore"):
        expected = np.power(x.astype(np.longdouble), np.longdouble(exponent)).astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[expected == 0]), np.signbit(expected[expected == 0]))


def test_sine_of_the_hardest_arguments() -> None:
    """6381956970095103 * 2**797 is the double closest to a multiple of pi/2 (Muller et al., Handbook,
    11.3)."""
    x = np.array([6381956970095103 * 2.0**797, 1e22, 2.0**1023, np.pi, np.pi * 2.0**60])
    assert ulps_exact(compute(expand(Ops.SIN, F64, FUSED), x), exact(Ops.SIN, x)).max() <= 2
    y = np.array([16367173 * 2.0**72, 3.4e38, 1e10, np.pi, 2.0**100], np.float32)
    assert ulps(compute(expand(Ops.SIN, F32, FUSED), y), long_double(Ops.SIN, y)).max() <= 2


def test_bits_of_two_over_pi() -> None:
    with mpmath.workprec(2000):
        for lead, count in ((25, 7), (54, 38)):
            whole = int(mpmath.floor(2 / mpmath.pi * mpmath.mpf(2) ** (32 * count - lead)))
            words = transcendental.two_over_pi(lead, count)
            assert sum(w << (32 * (count - 1 - i)) for i, w in enumerate(words)) == whole


@pytest.mark.parametrize("op", [Ops.TRUNC, Ops.FLOOR], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda d: d.name)
def test_rounding_to_whole_numbers_by_addition(op: Op, dtype: DType) -> None:
    x = np.concatenate([inputs(dtype, 4000), np.arange(-20, 20).astype(NUMPY[dtype]) / 4])
    got = compute(expand(op, dtype, PLAIN), x)
    expected = {Ops.TRUNC: np.trunc, Ops.FLOOR: np.floor}[op](x)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(x)]), np.signbit(expected[~np.isnan(x)]))


@pytest.mark.parametrize("op", UNARY, ids=lambda v: v.name)
def test_functions_of_halves(op: Op) -> None:
    """All 65536 values: at most the last bit differs from the correctly rounded result, and that hardly
    ever."""
    half = np.arange(65536, dtype=np.uint16)
    x = half.view(np.float16)
    target = Target("halves", "c", native=BASIC, storage_only=(dtypes.float16, dtypes.bfloat16))
    root = decompose(UOp.sink(alu(op, operand(dtypes.float16)).bitcast(dtypes.uint16)), target).src[0]
    got = compute(root, half).view(np.float16)
    truth = long_double(op, x)
    assert ulps(got, truth).max() < 0.51
    with np.errstate(all="ignore"):
        agree = (got == truth.astype(np.float16)) | np.isnan(got)
    assert agree.mean() > 0.999


def test_type_without_a_way_is_an_error() -> None:
    with pytest.raises(CompileError, match="SQRT on float32"):
        expand(Ops.SQRT, F32, Target("none", "c", native=frozenset({Ops.ADD})))


def test_exp2_is_short() -> None:
    """The most frequent function (softmax) must not grow."""
    nodes = [n for n in expand(Ops.EXP2, F32,
                               FUSED).toposort() if n.op.is_elementwise and n.op is not Ops.BITCAST]
    assert len(nodes) <= 21
    nodes = [n for n in power_of_e(F32, 1.0).toposort() if n.op.is_elementwise and n.op is not Ops.BITCAST]
    assert len(nodes) <= 20
    nodes = [n for n in power_of_e(F32, 1.0, 1, SCALING).toposort() if n.op.is_elementwise]
    assert len(nodes) <= 15  # the two limits are a comparison and a choice each, but one instruction
