"""The op table: every row is asked every question, and its stated facts are tried on values."""
from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whit.uop import Op, Ops, dtypes
from whit.uop.__main__ import op_table
from whit.uop.dtype import FLOAT_INFO, dtype_of_name, wrap
from whit.uop.ops import COMPARE, REDUCTIONS, all_ops

WHOLE = [-128, -7, -1, 0, 1, 2, 5, 127]
REAL = [0.0, -0.0, 1.0, -2.5, 1e300, -1e-300, math.inf, -math.inf, math.nan]
WITH_MEANING = [op for op in all_ops() if op.meaning is not None]


def test_every_row_is_complete() -> None:
    for op in all_ops():
        assert op.name.isupper() and op.doc and op.doc.isprintable()
        assert getattr(Ops, op.name) is op
        assert op.takes in ("any", "number", "float", "int", "bitwise")
        assert op.is_alu == (op.meaning is not None), f"{op}: an ALU op says what it computes, others do not"
        assert op.is_alu <= op.is_elementwise
        expected = {"unary": 1, "binary": 2, "compare": 2, "ternary": 3, "cast": 1,
                    "movement": 1}.get(op.category)
        assert expected is None or op.arity == expected
        if op.commutative or op.associative or op.idempotent:
            assert op.arity == 2


def test_the_table_prints_every_op_once() -> None:
    names = [line.split()[0] for line in op_table().split("\n")[1:] if line[0] != " "]
    assert names == [op.name for op in all_ops()]


def same(a: Any, b: Any) -> bool:
    return (a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a == b == 0)


def values_for(op: Op) -> list[Any]:
    return REAL if op.takes == "float" else WHOLE if op.takes in ("int", "bitwise") else [*WHOLE, *REAL]


@pytest.mark.parametrize("op", [op for op in WITH_MEANING if op.commutative], ids=lambda op: op.name)
def test_commutative_means_swappable(op: Op) -> None:
    assert op.meaning is not None
    for a, b in itertools.product(values_for(op), repeat=2):
        assert same(op.meaning(a, b), op.meaning(b, a)), (a, b)


@pytest.mark.parametrize("op", [op for op in WITH_MEANING if op.associative], ids=lambda op: op.name)
def test_associative_means_regroupable_on_integers(op: Op) -> None:
    assert op.meaning is not None
    for a, b, c in itertools.product(WHOLE, repeat=3):
        left, right = op.meaning(op.meaning(a, b), c), op.meaning(a, op.meaning(b, c))
        assert wrap(left, dtypes.int8) == wrap(right, dtypes.int8)


@pytest.mark.parametrize("op", [op for op in WITH_MEANING if op.idempotent], ids=lambda op: op.name)
def test_idempotent_means_repeatable(op: Op) -> None:
    assert op.meaning is not None
    for a in values_for(op):
        assert same(op.meaning(a, a), a)


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.name)
def test_the_identity_of_a_reduction_changes_nothing(op: Op) -> None:
    assert op.meaning is not None
    for a in WHOLE:
        identity = op.identity if op.identity is not None else \
            dtypes.int8.min if op is Ops.MAX else dtypes.int8.max
        assert op.meaning(identity, a) == a


NUMPY: dict[Op, Any] = {
    Ops.NEG: np.negative, Ops.RECIPROCAL: np.reciprocal, Ops.SQRT: np.sqrt, Ops.EXP2: np.exp2,
                        Ops.LOG2: np.log2,
    Ops.SIN: np.sin, Ops.TRUNC: np.trunc, Ops.FLOOR: np.floor, Ops.ADD: np.add, Ops.SUB: np.subtract,
                        Ops.MUL: np.multiply,
    Ops.FDIV: np.divide, Ops.MAX: np.maximum, Ops.MIN: np.minimum, Ops.POW: np.power, Ops.CMPLT: np.less,
    Ops.CMPLE: np.less_equal, Ops.CMPEQ: np.equal, Ops.CMPNE: np.not_equal}


@pytest.mark.parametrize("op", list(NUMPY), ids=lambda op: op.name)
def test_the_meaning_on_floats_is_that_of_numpy(op: Op) -> None:
    assert op.meaning is not None
    for args in itertools.product(REAL, repeat=op.arity or 1):
        with np.errstate(all="ignore"):
            expected = NUMPY[op](*[np.float64(a) for a in args])
        got = op.meaning(*args)
        if op in COMPARE:
            assert got == bool(expected)
        else:
            assert np.isclose(got, expected, rtol=1e-14, atol=0, equal_nan=True), (args, got, expected)
            if op not in (Ops.MAX, Ops.MIN) and expected == 0:  # of zeros, MAX and MIN may give either
                assert math.copysign(1, got) == math.copysign(1, expected), args


def test_the_meaning_on_integers_is_that_of_numpy_and_c() -> None:
    for a, b in itertools.product(WHOLE, repeat=2):
        x, y = np.int64(a), np.int64(b)
        for op, function in ((Ops.ADD, np.add), (Ops.SUB, np.subtract), (Ops.MUL, np.multiply),
                             (Ops.MAX, np.maximum),
                             (Ops.MIN, np.minimum), (Ops.AND, np.bitwise_and), (Ops.OR, np.bitwise_or),
                             (Ops.XOR, np.bitwise_xor)):
            assert op.meaning is not None and op.meaning(a, b) == function(x, y)
        if b == 0:
            for op in (Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD):
                assert op.meaning is not None and op.meaning(a, b) == 0
        else:
            assert Ops.FLOORDIV.meaning and Ops.FLOORDIV.meaning(a, b) == np.floor_divide(x, y)
            assert Ops.FLOORMOD.meaning and Ops.FLOORMOD.meaning(a, b) == np.remainder(x, y)
            assert Ops.TRUNCDIV.meaning and Ops.TRUNCDIV.meaning(a, b) == int(np.trunc(a / b))
            assert Ops.TRUNCMOD.meaning and Ops.TRUNCMOD.meaning(a, b) == np.fmod(x, y)
        if 0 <= b < 63:
            assert Ops.SHL.meaning and Ops.SHL.meaning(a, b) == a * 2 ** b
            assert Ops.SHR.meaning and Ops.SHR.meaning(a, b) == np.right_shift(x, y)


def test_ldexp_scales_by_powers_of_two() -> None:
    assert Ops.LDEXP.meaning is not None
    for x in (*REAL, 5e-324, 1.7e308):
        for k in (-2000.0, -1074.0, -53.0, -1.0, -0.0, 0.0, 1.0, 1023.0, 2000.0):
            with np.errstate(over="ignore", under="ignore"):
                assert same(Ops.LDEXP.meaning(x, k), float(np.ldexp(np.float64(x), int(k)))), (x, k)
    assert Ops.LDEXP.meaning(1.0, math.inf) == math.inf and Ops.LDEXP.meaning(3.0, -math.inf) == 0
    assert math.isnan(float(Ops.LDEXP.meaning(1.0, math.nan)))


def test_threefry_is_the_published_function() -> None:
    # known answers of Random123 for threefry2x32, 20 rounds: counter, key, result; words are (low, high)
    def word(low: int, high: int) -> int:
        return high << 32 | low
    meaning = Ops.THREEFRY.meaning
    assert meaning is not None
    assert meaning(word(0, 0), word(0, 0)) == word(0x6b200159, 0x99ba4efe)
    ones = 0xffffffff
    assert meaning(word(ones, ones), word(ones, ones)) == word(0x1cb996fc, 0xbb002be7)
    assert meaning(word(0x243f6a88, 0x85a308d3), word(0x13198a2e, 0x03707344)) == word(0xc4923a9c, 0x483df7a0)


def test_float_rounding_is_that_of_ml_dtypes() -> None:
    import ml_dtypes
    kinds = {dtypes.float16: np.float16, dtypes.float32: np.float32, dtypes.bfloat16: ml_dtypes.bfloat16,
             dtypes.fp8e4m3: ml_dtypes.float8_e4m3fn, dtypes.fp8e5m2: ml_dtypes.float8_e5m2}
    rng = np.random.default_rng(0)
    for dtype, numpy_type in kinds.items():
        info = FLOAT_INFO[dtype]
        scale = np.exp2(rng.uniform(-info.bias - info.mantissa - 2, info.bias + 2, 3000))
        values = [0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max,
                  *(rng.standard_normal(3000) * scale)]
        for value in values:
            with np.errstate(over="ignore"):
                expected = float(np.float64(value).astype(numpy_type))
            got = float(wrap(float(value), dtype))
            assert (got != got and expected != expected) or (
                got == expected and math.copysign(1, got) == math.copysign(1, expected)), (dtype, value, got,
                                                                                           expected)


def test_integers_wrap_as_numpy_does() -> None:
    for dtype in dtypes.ints:
        for value in (0, -1, 127, 128, 255, 256, -129, 1 << 31, (1 << 63) - 1, -(1 << 63), 1 << 64,
                      12345678901234567890):
            raw = np.array(value % (1 << 64), np.uint64).astype(f"u{dtype.itemsize}")
            expected = raw.view(f"{'u' if dtype.is_unsigned else 'i'}{dtype.itemsize}")
            assert wrap(value, dtype) == int(expected)


@pytest.mark.parametrize("name",
                         ["float33", "", "x4", "float32x", "float32x0", "float32x²", "int8x-2", "None"])
def test_unknown_dtype_names(name: str) -> None:
    with pytest.raises(TypeError, match="no such type"):
        dtype_of_name(name)


def test_the_page_of_settings_is_up_to_date() -> None:
    made = subprocess.run([sys.executable, "-m", "whit.uop", "settings"], capture_output=True, text=True,
                          check=True)
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == made.stdout, "run: python -m whit.uop settings > docs/settings.md"
