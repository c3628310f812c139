"""Promotion against JAX's published table, names, limits, and bounds of nodes against enumeration."""
from __future__ import annotations

import itertools
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numpy_values import calculate, converted
from whit.helpers import DTypeError
from whit.uop import DType, Ops, ParamArg, UOp, dtypes, promote
from whit.uop.dtype import dtype_of_name, float_of, strong, to_dtype

# jax.readthedocs.io, "Type promotion semantics": the table of jnp.promote_types, with i* and f* for Python
# scalars
NAMES = ["b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "bf", "f2", "f4", "f8", "i*", "f*"]
TABLE = """
b1 u1 u2 u4 u8 i1 i2 i4 i8 bf f2 f4 f8 i* f*
u1 u1 u2 u4 u8 i2 i2 i4 i8 bf f2 f4 f8 u1 f*
u2 u2 u2 u4 u8 i4 i4 i4 i8 bf f2 f4 f8 u2 f*
u4 u4 u4 u4 u8 i8 i8 i8 i8 bf f2 f4 f8 u4 f*
u8 u8 u8 u8 u8 f* f* f* f* bf f2 f4 f8 u8 f*
i1 i2 i4 i8 f* i1 i2 i4 i8 bf f2 f4 f8 i1 f*
i2 i2 i4 i8 f* i2 i2 i4 i8 bf f2 f4 f8 i2 f*
i4 i4 i4 i8 f* i4 i4 i4 i8 bf f2 f4 f8 i4 f*
i8 i8 i8 i8 f* i8 i8 i8 i8 bf f2 f4 f8 i8 f*
bf bf bf bf bf bf bf bf bf bf f4 f4 f8 bf bf
f2 f2 f2 f2 f2 f2 f2 f2 f2 f4 f2 f4 f8 f2 f2
f4 f4 f4 f4 f4 f4 f4 f4 f4 f4 f4 f4 f8 f4 f4
f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8 f8
i* u1 u2 u4 u8 i1 i2 i4 i8 bf f2 f4 f8 i* f*
f* f* f* f* f* f* f* f* f* bf f2 f4 f8 f* f*
"""
SHORT = {"b1": dtypes.bool, "u1": dtypes.uint8, "u2": dtypes.uint16, "u4": dtypes.uint32, "u8": dtypes.uint64,
         "i1": dtypes.int8, "i2": dtypes.int16, "i4": dtypes.int32, "i8": dtypes.int64, "bf": dtypes.bfloat16,
         "f2": dtypes.float16, "f4": dtypes.float32, "f8": dtypes.float64, "i*": dtypes.weakint,
         "f*": dtypes.weakfloat}


def test_promotion_is_the_published_table() -> None:
    for a, row in zip(NAMES, TABLE.strip().split("\n"), strict=True):
        for b, expected in zip(NAMES, row.split(), strict=True):
            assert promote(SHORT[a], SHORT[b]) is SHORT[expected], (a, b)


def test_eight_bit_floats_promote_with_nothing_but_integers_and_scalars() -> None:
    for fp8 in dtypes.fp8s:
        for other in (dtypes.bool, *dtypes.ints, dtypes.weakint, dtypes.weakfloat, fp8):
            assert promote(fp8, other) is fp8
        for other in (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64):
            with pytest.raises(DTypeError, match="no implicit promotion"):
                promote(fp8, other)
    with pytest.raises(DTypeError):
        promote(*dtypes.fp8s)


def test_promotion_is_commutative_and_associative() -> None:
    kinds = [*SHORT.values()]
    for a, b, c in itertools.product(kinds, repeat=3):
        assert promote(a, promote(b, c)) is promote(promote(a, b), c) is promote(a, b, c)


def test_names_and_aliases() -> None:
    for dtype in (*dtypes.all, dtypes.index, dtypes.void):
        assert dtype_of_name(dtype.name) is dtype is to_dtype(dtype.name) is to_dtype(dtype)
        if dtype.bitsize:
            assert dtype_of_name(f"{dtype.name}x8") is dtype.vec(8) and dtype.vec(8).scalar is dtype
    assert dtype_of_name("float") is dtypes.float32 and dtype_of_name("long") is dtypes.int64
    assert dtypes.float32.vec(1) is dtypes.float32 and dtypes.float32.vec(4).vec(2) is dtypes.float32.vec(2)
    assert dtypes.float32.vec(4).itemsize == 16 and dtypes.bool.itemsize == 1 and dtypes.void.itemsize == 0


def test_limits_are_those_of_numpy() -> None:
    for dtype in dtypes.ints:
        info = np.iinfo(dtype.name)
        assert (dtype.min, dtype.max, dtype.itemsize) == (info.min, info.max, info.dtype.itemsize)
    special = {"bfloat16": ml_dtypes.bfloat16, "fp8e4m3": ml_dtypes.float8_e4m3fn,
               "fp8e5m2": ml_dtypes.float8_e5m2}
    for dtype in dtypes.floats:
        info = ml_dtypes.finfo(special.get(dtype.name, dtype.name))
        ours = dtypes.finfo(dtype)
        assert ours.max == float(info.max) and ours.mantissa == info.nmant and ours.exponent == info.nexp
        assert 2.0 ** (1 - ours.bias) == float(info.tiny)


def test_python_values() -> None:
    assert dtypes.from_py(True) is dtypes.bool and dtypes.from_py(1) is dtypes.int32 \
        and dtypes.from_py(1.5) is dtypes.float32
    assert dtypes.from_py(1 << 40) is dtypes.int64 and dtypes.from_py(1 << 63) is dtypes.uint64
    assert dtypes.from_py([]) is dtypes.float32 and dtypes.from_py([[True], [2]]) is dtypes.int32
    for value in (1 << 64, -(1 << 63) - 1, "1", None, 1j):
        with pytest.raises(DTypeError):
            dtypes.from_py(value)
    assert strong(dtypes.weakint) is dtypes.int32 and float_of(dtypes.int8) is dtypes.float32
    with pytest.raises(DTypeError):
        dtypes.finfo(dtypes.int8)


# ---- bounds ------------------------------------------------------------------------------------------------

NARROW = {dtypes.int8: np.int8, dtypes.uint8: np.uint8, dtypes.bool: np.bool_}


def small(rng: random.Random, dtype: DType, depth: int, leaf: dict[DType, UOp]) -> UOp:
    if depth == 0 or rng.random() < 0.1:
        limit = (0, 1) if dtype.is_bool else (0, 200) if dtype.is_unsigned else (-100, 100)
        return leaf[dtype] if rng.random() < 0.6 \
            else UOp.const(rng.choice([*limit, 1, 3, 7, rng.randint(*limit)]), dtype)

    def some(kind: DType) -> UOp:
        return small(rng, kind, depth - 1, leaf)
    if dtype.is_bool:
        kind = rng.choice([dtypes.int8, dtypes.uint8])
        return rng.choice([
            lambda: UOp(rng.choice([Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE]), dtype,
                        (some(kind), some(kind))),
            lambda: UOp(rng.choice([Ops.AND, Ops.OR, Ops.XOR]), dtype, (some(dtype), some(dtype)))])()
    return rng.choice([
        lambda: UOp(rng.choice([Ops.ADD, Ops.SUB, Ops.MUL, Ops.MAX, Ops.MIN, Ops.AND, Ops.OR, Ops.XOR,
                                Ops.FLOORDIV, Ops.FLOORMOD,
                                Ops.TRUNCDIV, Ops.TRUNCMOD, Ops.SHR, Ops.SHL]), dtype,
                    (some(dtype), some(dtype))),
        lambda: UOp(Ops.CAST, dtype, (some(rng.choice(list(NARROW))),)),
        lambda: some(dtypes.bool).where(some(dtype), some(dtype)),
                       lambda: UOp(Ops.NEG, dtype, (some(dtype),))])()


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 1 << 48))
def test_bounds_hold_for_every_value(seed: int) -> None:
    rng = random.Random(seed)
    names = {d: UOp(Ops.INDEX, d, (UOp(Ops.PARAM, d, (), ParamArg(n, 1)), UOp.index(0))) for n,
             d in enumerate(NARROW)}
    root = small(rng, rng.choice(list(NARROW)), rng.randint(1, 4), names)
    for _ in range(60):
        at: dict[UOp,
                 Any] = {u: NARROW[d](rng.choice([0, 1]) if d.is_bool
                                      else rng.randint(int(d.min), int(d.max)))
                              for d, u in names.items()}
        for node in root.toposort():
            if node in at or node.op in (Ops.PARAM,) or node.dtype is dtypes.index:
                continue
            if node.op is Ops.CONST:
                at[node] = NARROW[node.dtype](node.arg)
            elif node.op is Ops.CAST:
                at[node] = converted(at[node.src[0]], node.src[0].dtype, node.dtype)
            else:
                with np.errstate(all="ignore"):
                    at[node] = calculate(node.op, node.src[-1].dtype, [at[s] for s in node.src])
            assert node.vmin <= at[node] <= node.vmax, f"{node}: {at[node]} is not within {node.bounds}"
