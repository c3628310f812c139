"""Every function of the standard against array-api-strict, over random values and the special ones."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest

import whit.array_api as xp
from tests.tensor.reference import DEVICE
from whit import Tensor
from whit.helpers import WhitError

pytestmark = pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")

strict.set_array_api_strict_flags(api_version="2024.12")
FLOATS = ["float32", "float64"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMBERS = [*INTS, *FLOATS]
ALL = ["bool", *NUMBERS]
if "--slow" in sys.argv:
    CHOSEN = ALL
else:  # one of each kind and size
    CHOSEN = ["bool", "int8", "int32", "int64", "uint16", "uint64", *FLOATS]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    -3.0,
    0.5,
    -2.5,
    math.inf,
    -math.inf,
    math.nan,
    math.pi / 2,
    1e-30,
    1e30,
]
TOLERANCE = {"float32": 3e-6, "float64": 1e-12}


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, special: bool = False) -> Any:
    """Random values of a dtype, small ones mostly, so that integers do not overflow."""
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype in FLOATS:
        x = np.asarray(rng.normal(size=shape)) * rng.choice([0.1, 1, 10], shape)
        if special and x.size:
            x.reshape(-1)[: len(SPECIAL)] = SPECIAL[: x.size]
        return np.asarray(x, dtype)
    low = 0 if dtype[0] == "u" else -9
    return np.asarray(rng.integers(low, 10, shape), dtype)


def chosen(dtypes: list[str]) -> list[str]:
    return [d for d in dtypes if d in CHOSEN]


def both(x: Any) -> tuple[Tensor, Any]:
    return xp.asarray(x), strict.asarray(x)


def as_numpy(x: Any) -> Any:
    return np.asarray(x.numpy() if isinstance(x, Tensor) else x._array)


def name_of(dtype: Any) -> str:
    return dtype.name if hasattr(dtype, "name") else str(dtype).rsplit(".", 1)[-1]


def same(got: Any, expected: Any, exact: bool = False, dtypes: bool = True) -> None:
    """Equal shapes, dtypes (indices: both integers) and values."""
    if isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for g, e in zip(got, expected):
            same(g, e, exact, dtypes)
        return
    g, e = as_numpy(got), as_numpy(expected)
    assert g.shape == e.shape, (g.shape, e.shape)
    if dtypes:
        assert g.dtype == e.dtype, (g.dtype, e.dtype)
    else:
        assert g.dtype.kind == e.dtype.kind, (g.dtype, e.dtype)
    if exact or e.dtype.kind != "f":
        np.testing.assert_array_equal(g, e)
    else:
        rtol = TOLERANCE[e.dtype.name]
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(g, e, rtol, rtol)


def test_names_and_signatures() -> None:
    left_out = {"complex64", "complex128", "Device", "ModuleType", "fft"}
    for name in dir(strict):
        if name.startswith("_") or name in left_out or "strict" in name.lower():
            continue
        assert hasattr(xp, name), name
        theirs, mine = getattr(strict, name), getattr(xp, name)
        if inspect.isfunction(theirs) and name != "expand_dims":
            kinds = [
                [(p.name, p.kind) for p in inspect.signature(f).parameters.values()] for f in (mine, theirs)
            ]
            assert kinds[0] == kinds[1], name
    for name in ("__array_api_version__", "__array_namespace_info__", "e", "pi", "inf", "nan", "newaxis"):
        assert hasattr(xp, name)
    methods = [n for n in dir(strict.asarray(1)) if n.startswith("__") and "setstate" not in n]
    for name in methods:
        if name not in ("__buffer__", "__array__", "__init_subclass__", "__getstate__", "__slots__"):
            assert hasattr(Tensor, name), name
    for name in ("device", "dtype", "mT", "ndim", "shape", "size", "T", "to_device"):
        assert hasattr(Tensor([[1]]), name)


# ---- elementwise

ONE: list[tuple[list[str], str]] = [
    (FLOATS, "acos acosh asin asinh atan atanh cos cosh exp expm1 log log1p log2 log10 reciprocal sin sinh"),
    (FLOATS, "sqrt tan tanh signbit"),
    (NUMBERS, "abs ceil floor isfinite isinf isnan negative positive round sign square trunc"),
    (["bool", *INTS], "bitwise_invert"),
    (["bool"], "logical_not"),
]
TWO: list[tuple[list[str], str]] = [
    (FLOATS, "atan2 copysign divide hypot logaddexp nextafter"),
    (NUMBERS, "add floor_divide greater greater_equal less less_equal maximum minimum multiply"),
    (NUMBERS, "pow remainder subtract"),
    (ALL, "equal not_equal"),
    (["bool", *INTS], "bitwise_and bitwise_or bitwise_xor"),
    (INTS, "bitwise_left_shift bitwise_right_shift"),
    (["bool"], "logical_and logical_or logical_xor"),
]


def cases(table: list[tuple[list[str], str]]) -> list[tuple[str, list[str]]]:
    return [(name, kinds) for kinds, names in table for name in names.split()]


@pytest.mark.parametrize("name, kinds", cases(ONE))
def test_functions_of_one(name: str, kinds: list[str]) -> None:
    rng = np.random.default_rng(len(name))
    for dtype in chosen(kinds):
        for shape in ((40,), (), (0,), (2, 1, 7)):
            x = values(rng, shape, dtype, special=True)
            if name == "tan":  # beside its poles float32 has no digit left
                with np.errstate(invalid="ignore"):
                    x = np.where(np.abs(np.cos(x)) < 1e-3, 0, x)
            mine, theirs = both(x)
            with np.errstate(all="ignore"):
                expected = getattr(strict, name)(theirs)
            same(getattr(xp, name)(mine), expected)
            if dtype in FLOATS and name not in ("exp", "log"):
                zero = as_numpy(expected) == 0
                if expected.dtype in (strict.float32, strict.float64):
                    got = as_numpy(getattr(xp, name)(mine))
                    np.testing.assert_array_equal(np.signbit(got)[zero], np.signbit(as_numpy(expected))[zero])


@pytest.mark.parametrize("name, kinds", cases(TWO))
def test_functions_of_two(name: str, kinds: list[str]) -> None:
    rng = np.random.default_rng(len(name))
    for dtype in chosen(kinds):
        pairs = [((30,), (30,)), ((3, 1), (1, 4)), ((), (5,)), ((0, 2), (2,))]
        for left, right in pairs:
            a, b = values(rng, left, dtype, True), values(rng, right, dtype, True)
            if left == (30,) and dtype in FLOATS:  # every pair of special values
                a, b = (np.array(v, dtype) for v in zip(*itertools.product(SPECIAL, SPECIAL)))
            if name in ("floor_divide", "remainder"):  # quotients beyond 2**100: docs/semantics.md
                b = np.where((np.abs(b) < 1e-9) & (np.abs(a) > 1e9), 1, b)
            if dtype in INTS and name in ("floor_divide", "remainder"):
                b = np.where(b == 0, 1, b).astype(dtype)
            if dtype in INTS and name in ("pow", "bitwise_left_shift", "bitwise_right_shift"):
                b = np.abs(b) % 6
            (mine, theirs), (mine2, theirs2) = both(a), both(b.astype(dtype))
            with np.errstate(all="ignore"):
                expected = getattr(strict, name)(theirs, theirs2)
            same(getattr(xp, name)(mine, mine2), expected)
    if name in ("nextafter", "atan2"):
        return
    dtype = kinds[-1]
    scalar = True if dtype == "bool" else 2
    mine, theirs = both(values(rng, (5,), dtype))
    with np.errstate(all="ignore"):
        same(getattr(xp, name)(mine, scalar), getattr(strict, name)(theirs, scalar))
        same(getattr(xp, name)(scalar, mine), getattr(strict, name)(scalar, theirs))


OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "+": (lambda a, b: a + b, NUMBERS),
    "-": (lambda a, b: a - b, NUMBERS),
    "*": (lambda a, b: a * b, NUMBERS),
    "/": (lambda a, b: a / b, FLOATS),
    "//": (lambda a, b: a // b, FLOATS),
    "%": (lambda a, b: a % b, FLOATS),
    "**": (lambda a, b: a**b, FLOATS),
    "&": (lambda a, b: a & b, ["bool", *INTS]),
    "|": (lambda a, b: a | b, ["bool", *INTS]),
    "^": (lambda a, b: a ^ b, ["bool", *INTS]),
    "<": (lambda a, b: a < b, NUMBERS),
    "<=": (lambda a, b: a <= b, NUMBERS),
    ">": (lambda a, b: a > b, NUMBERS),
    ">=": (lambda a, b: a >= b, NUMBERS),
    "==": (lambda a, b: a == b, ALL),
    "!=": (lambda a, b: a != b, ALL),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    rng = np.random.default_rng(3)
    function, kinds = OPERATORS[name]
    for dtype in chosen(kinds):
        (a, s), (b, t) = both(values(rng, (3, 4), dtype)), both(values(rng, (4,), dtype))
        scalar: Any = True if dtype == "bool" else 3
        with np.errstate(all="ignore"):
            same(function(a, b), function(s, t))
            same(function(a, scalar), function(s, scalar))
            same(function(scalar, a), function(scalar, s))


def test_promotion_table() -> None:
    signed = [d for d in NUMBERS if d[0] == "i"]
    unsigned = [d for d in NUMBERS if d[0] == "u"]
    pairs = [*itertools.product(signed, signed), *itertools.product(unsigned, unsigned)]
    pairs += [(a, b) for a, b in itertools.product(signed, unsigned) if b != "uint64"]
    pairs += [*itertools.product(FLOATS, FLOATS), ("bool", "bool")]
    for a, b in pairs:
        mine, theirs = (m.result_type(getattr(m, a), getattr(m, b)) for m in (xp, strict))
        assert name_of(mine) == name_of(theirs), (a, b)
        assert (xp.ones(1, dtype=getattr(xp, a)) * xp.ones(1, dtype=getattr(xp, b))).dtype is mine
        assert xp.can_cast(getattr(xp, a), getattr(xp, b)) is strict.can_cast(
            getattr(strict, a), getattr(strict, b)
        )
    for dtype in ALL:
        for kind in ("bool", "signed integer", "unsigned integer", "integral", "real floating", "numeric"):
            assert xp.isdtype(getattr(xp, dtype), kind) is strict.isdtype(getattr(strict, dtype), kind)
    for dtype in FLOATS:
        mine, theirs = xp.finfo(getattr(xp, dtype)), strict.finfo(getattr(strict, dtype))
        for part in ("bits", "eps", "max", "min", "smallest_normal"):
            assert getattr(mine, part) == getattr(theirs, part)
    for dtype in INTS:
        mine, theirs = xp.iinfo(getattr(xp, dtype)), strict.iinfo(getattr(strict, dtype))
        assert (mine.bits, mine.min, mine.max) == (theirs.bits, theirs.min, theirs.max)
    assert xp.result_type(xp.float32, 1.0) is xp.float32 and xp.result_type(xp.asarray([1]), 1) is xp.int32


def test_clip_where_and_casts() -> None:
    rng = np.random.default_rng(0)
    for dtype in chosen(NUMBERS):
        mine, theirs = both(values(rng, (4, 5), dtype, special=True))
        low, high = both(values(rng, (5,), dtype)), both(values(rng, (4, 1), dtype))
        for k in ((1, 3), (None, 2), (1, None)):
            same(xp.clip(mine, *k), strict.clip(theirs, *k))
        same(xp.clip(mine, low[0]), strict.clip(theirs, low[1]))
        same(xp.where(mine > 0, mine, high[0]), strict.where(theirs > 0, theirs, high[1]))
        same(xp.where(mine > 0, mine, 1), strict.where(theirs > 0, theirs, 1))
        finite = both(np.abs(values(rng, (6,), dtype)))
        for to in ALL:
            same(xp.astype(finite[0], getattr(xp, to)), strict.astype(finite[1], getattr(strict, to)))
    x = xp.asarray([1, 2])
    copy = xp.astype(x, xp.int32)
    copy[0] = 7
    assert x.tolist() == [1, 2] and xp.astype(x, xp.int32, copy=False) is x


# ---- creation


def test_creation() -> None:
    for dtype in chosen(ALL):
        a, b = getattr(xp, dtype), getattr(strict, dtype)
        for shape in ((2, 3), (), (0, 2), 4):
            same(xp.zeros(shape, dtype=a), strict.zeros(shape, dtype=b))
            same(xp.ones(shape, dtype=a), strict.ones(shape, dtype=b))
            same(xp.full(shape, 1, dtype=a), strict.full(shape, dtype == "bool" or 1, dtype=b))
            assert xp.empty(shape, dtype=a).shape == strict.empty(shape, dtype=b).shape
        x, y = xp.ones((2, 3), dtype=a), strict.ones((2, 3), dtype=b)
        same(xp.zeros_like(x), strict.zeros_like(y))
        same(xp.ones_like(x), strict.ones_like(y))
        same(
            xp.full_like(x, 0 if dtype != "bool" else False),
            strict.full_like(y, 0 if dtype != "bool" else False),
        )
        assert xp.empty_like(x).dtype is a
        for k in (-1, 0, 2):
            same(xp.eye(3, 4, k=k, dtype=a), strict.eye(3, 4, k=k, dtype=b))
            same(xp.tril(x, k=k), strict.tril(y, k=k))
            same(xp.triu(x, k=k), strict.triu(y, k=k))
    for args in ((5,), (2, 9), (2, 9, 3), (9, 2, -2), (3, 3), (0, 1, 0.25)):
        for dtype in ("int32", "float64", "int64"):
            if dtype == "float64" or all(isinstance(a, int) for a in args):
                same(
                    xp.arange(*args, dtype=getattr(xp, dtype)),
                    strict.arange(*args, dtype=getattr(strict, dtype)),
                )
    for num, endpoint in itertools.product((0, 1, 2, 7), (True, False)):
        same(
            xp.linspace(-1, 3, num, endpoint=endpoint, dtype=xp.float64),
            strict.linspace(-1, 3, num, endpoint=endpoint, dtype=strict.float64),
        )
    a, b = both(np.arange(3.0)), both(np.arange(2.0))
    for indexing in ("xy", "ij"):
        same(xp.meshgrid(a[0], b[0], indexing=indexing), strict.meshgrid(a[1], b[1], indexing=indexing))
    same(xp.meshgrid(a[0]), strict.meshgrid(a[1]))


def test_asarray() -> None:
    assert xp.asarray(True).dtype is xp.bool and xp.asarray([1, 2.5]).dtype is xp.float32
    assert xp.asarray(2**40).dtype is xp.int64 and xp.asarray([[1], [2]]).shape == (2, 1)
    x = xp.asarray([1, 2])
    assert xp.asarray(x) is x and xp.asarray(x, copy=True) is not x and xp.asarray(x, copy=False) is x
    array = np.arange(3.0)
    shared, own = xp.asarray(array), xp.asarray(array, copy=True)
    array[0] = 5
    assert own.tolist() == [0, 1, 2] and (shared.tolist() == [5, 1, 2] or not DEVICE.startswith("CPU"))
    for bad in (
        lambda: xp.asarray(1j),
        lambda: xp.asarray([1], copy=False),
        lambda: xp.asarray(x, dtype=xp.float32, copy=False),
        lambda: xp.asarray("a"),
    ):
        with pytest.raises(WhitError):
            bad()
    assert xp.from_dlpack(np.arange(3)).tolist() == [0, 1, 2]


def test_info() -> None:
    info = xp.__array_namespace_info__()
    assert info.default_device() in info.devices() and info.capabilities()["boolean indexing"]
    assert info.default_dtypes()["real floating"] is xp.float32
    theirs = strict.__array_namespace_info__()
    for kind in (None, "bool", "integral", "real floating", ("bool", "unsigned integer")):
        assert set(info.dtypes(kind=kind)) == {n for n in theirs.dtypes(kind=kind) if "complex" not in n}
    assert Tensor([1]).__array_namespace__(api_version="2024.12") is xp
    with pytest.raises(WhitError):
        Tensor([1]).__array_namespace__(api_version="1999.01")


# ---- statistics

REDUCTIONS = {"sum": NUMBERS, "prod": NUMBERS, "max": NUMBERS, "min": NUMBERS, "all": ALL, "any": ALL}
REDUCTIONS |= {"mean": FLOATS, "std": FLOATS, "var": FLOATS, "count_nonzero": ALL}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    rng = np.random.default_rng(1)
    function, peer = getattr(xp, name), getattr(strict, name)
    for dtype in chosen(REDUCTIONS[name]):
        x = values(rng, (3, 4, 5), dtype)
        mine, theirs = both(np.clip(x, 0, 2) if name == "prod" else x)
        small = dtype in INTS[:2] + INTS[4:6] + ["int32", "uint32"]
        for axis, keep in (
            (None, False),
            (0, True),
            (-1, False),
            ((0, 2), True),
            ((), False),
            ((2, -2), False),
        ):
            got, want = function(mine, axis=axis, keepdims=keep), peer(theirs, axis=axis, keepdims=keep)
            same(got, want, dtypes=not (name == "count_nonzero" or (name in ("sum", "prod") and small)))
        if name in ("sum", "prod"):
            same(function(mine, dtype=xp.float64), peer(strict.astype(theirs, strict.float64)))
            assert function(mine).dtype is (
                mine.dtype if dtype not in ALL[1:3] + ALL[5:7] else function(mine).dtype
            )
        if name in ("std", "var"):
            same(function(mine, correction=1.5, axis=1), peer(theirs, correction=1.5, axis=1))
    empty = both(np.zeros((0, 3), "float32"))
    if name not in ("max", "min", "mean", "std", "var"):
        same(function(empty[0], axis=0), peer(empty[1], axis=0), dtypes=name != "count_nonzero")


@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
def test_running_reductions(name: str) -> None:
    rng = np.random.default_rng(1)
    for dtype in ("int32", "int64", "uint64", "float32", "float64"):
        mine, theirs = both(np.clip(values(rng, (3, 4), dtype), 0, 2))
        for axis, initial in itertools.product((0, 1, -1), (False, True)):
            same(
                getattr(xp, name)(mine, axis=axis, include_initial=initial),
                getattr(strict, name)(theirs, axis=axis, include_initial=initial),
                dtypes=dtype != "int32",
            )
        same(getattr(xp, name)(mine[0]), getattr(strict, name)(theirs[0, :]), dtypes=dtype != "int32")
        same(
            getattr(xp, name)(mine[0], dtype=xp.float64),
            getattr(strict, name)(theirs[0, :], dtype=strict.float64),
        )


def test_searching_and_sorting() -> None:
    rng = np.random.default_rng(2)
    for dtype in chosen(NUMBERS):
        mine, theirs = both(values(rng, (4, 9), dtype))
        for axis in (0, -1):
            for down in (False, True):
                same(
                    xp.sort(mine, axis=axis, descending=down), strict.sort(theirs, axis=axis, descending=down)
                )
                same(
                    xp.argsort(mine, axis=axis, descending=down),
                    strict.argsort(theirs, axis=axis, descending=down),
                    dtypes=False,
                )
            for name in ("argmax", "argmin"):
                for keep in (False, True):
                    same(
                        getattr(xp, name)(mine, axis=axis, keepdims=keep),
                        getattr(strict, name)(theirs, axis=axis, keepdims=keep),
                        dtypes=False,
                    )
        same(xp.argmax(mine), strict.argmax(theirs), dtypes=False)
        same(xp.argmax(mine, keepdims=True), strict.argmax(theirs, keepdims=True), dtypes=False)
        same(xp.nonzero(mine), strict.nonzero(theirs), dtypes=False)
        row, peer = both(np.sort(values(rng, (9,), dtype)))
        for side in ("left", "right"):
            same(
                xp.searchsorted(row, mine, side=side),
                strict.searchsorted(peer, theirs, side=side),
                dtypes=False,
            )
        order = rng.permutation(9)
        back = np.argsort(order)
        same(
            xp.searchsorted(row[xp.asarray(back)], mine, sorter=xp.asarray(order)),
            strict.searchsorted(peer, theirs),
            dtypes=False,
        )


def test_sets() -> None:
    rng = np.random.default_rng(2)
    for dtype in chosen(ALL):
        for shape in ((3, 4), (0,), ()):
            mine, theirs = both(values(rng, shape, dtype))
            for name in ("unique_all", "unique_counts", "unique_inverse"):
                got, want = getattr(xp, name)(mine), getattr(strict, name)(theirs)
                assert got._fields == want._fields
                same(got.values, want.values)
                same(tuple(got)[1:], tuple(want)[1:], dtypes=False)
            same(xp.unique_values(mine), strict.unique_values(theirs))
            same(xp.isin(mine, mine), strict.asarray(np.ones(shape, bool)))
    nan = xp.unique_all(xp.asarray([math.nan, 1.0, math.nan, -0.0, 0.0]))
    assert nan.counts.tolist() == [2, 1, 1, 1] and nan.indices.tolist() == [3, 1, 0, 2]


# ---- manipulation


def calls() -> Sequence[tuple[str, Callable[[Any, Any], Any]]]:
    return [
        ("broadcast_arrays", lambda m, x: m.broadcast_arrays(x, x[:1, ...])),
        ("broadcast_to", lambda m, x: m.broadcast_to(x, (2, 3, 4))),
        ("concat", lambda m, x: m.concat([x, x[:2, ...]])),
        ("concat", lambda m, x: m.concat([x, x], axis=None)),
        ("concat", lambda m, x: m.concat([x, x], axis=-1)),
        ("expand_dims", lambda m, x: m.expand_dims(x, axis=1)),
        ("flip", lambda m, x: m.flip(x)),
        ("flip", lambda m, x: m.flip(x, axis=(0, -1))),
        ("moveaxis", lambda m, x: m.moveaxis(m.broadcast_to(x, (2, 3, 4)), (0, 2), (-1, 0))),
        ("permute_dims", lambda m, x: m.permute_dims(x, (1, 0))),
        ("repeat", lambda m, x: m.repeat(x, 3)),
        ("repeat", lambda m, x: m.repeat(x, m.asarray([2, 0, 1]), axis=0)),
        ("reshape", lambda m, x: m.reshape(x, (2, -1))),
        ("roll", lambda m, x: m.roll(x, 5)),
        ("roll", lambda m, x: m.roll(x, (1, -2), axis=(0, 1))),
        ("squeeze", lambda m, x: m.squeeze(x[:1, :], axis=0)),
        ("stack", lambda m, x: m.stack([x, x], axis=-1)),
        ("tile", lambda m, x: m.tile(x, (2,))),
        ("tile", lambda m, x: m.tile(x, (2, 1, 3))),
        ("unstack", lambda m, x: m.unstack(x, axis=1)),
        ("diff", lambda m, x: m.diff(x)),
        ("diff", lambda m, x: m.diff(x, axis=0, n=2, prepend=x)),
        ("take", lambda m, x: m.take(x, m.asarray([2, 0]), axis=0)),
        ("take_along_axis", lambda m, x: m.take_along_axis(x, m.asarray([[2, 0], [1, 1], [3, 0]]), axis=1)),
        ("matmul", lambda m, x: m.matmul(x, m.matrix_transpose(x))),
        ("matmul", lambda m, x: x @ x[0, :]),
        ("tensordot", lambda m, x: m.tensordot(x, x, axes=((0, 1), (0, 1)))),
        ("vecdot", lambda m, x: m.vecdot(x, x)),
        ("vecdot", lambda m, x: m.vecdot(x, x, axis=-2)),
        ("outer", lambda m, x: m.linalg.outer(x[0, :], x[1, :])),
        ("cross", lambda m, x: m.linalg.cross(x[:, :3], x[:, 1:])),
        ("diagonal", lambda m, x: m.linalg.diagonal(x, offset=1)),
    ]


@pytest.mark.parametrize("at", range(len(calls())), ids=[f"{n}{i}" for i, (n, _) in enumerate(calls())])
def test_manipulation(at: int) -> None:
    name, call = calls()[at]
    rng = np.random.default_rng(4)
    sums = name in ("matmul", "tensordot", "vecdot", "outer", "cross")
    for dtype in chosen(NUMBERS if sums or name == "diff" else ALL):
        x = values(rng, (3, 4), dtype)
        mine, theirs = both(x % 3 if sums and dtype in INTS else x)
        same(call(xp, mine), call(strict, theirs))


def test_bad_calls_of_the_namespace() -> None:
    x = xp.asarray([[1.0, 2.0]])
    for bad in (
        lambda: xp.squeeze(x, axis=1),
        lambda: xp.concat([]),
        lambda: xp.stack([]),
        lambda: xp.reshape(x, (2, 1), copy=False),
        lambda: xp.tril(xp.asarray([1])),
        lambda: xp.matmul(x, xp.asarray(1.0)),
        lambda: xp.vecdot(x, x, axis=0),
        lambda: xp.cumulative_sum(x),
        lambda: xp.take(x, xp.asarray([0])),
        lambda: xp.nonzero(xp.asarray(1)),
        lambda: xp.searchsorted(x[0], x, side="middle"),
        lambda: xp.add(1, 2),
        lambda: xp.sin(1.0),
        lambda: xp.isdtype(xp.int8, "number"),
        lambda: xp.result_type(),
        lambda: xp.finfo("float32"),
        lambda: xp.iinfo(xp.float32),
        lambda: xp.moveaxis(x, (0, 0), (0, 1)),
        lambda: xp.repeat(x, xp.asarray([1, 2]), axis=0),
        lambda: xp.linalg.outer(x, x),
        lambda: xp.linalg.matrix_norm(x, ord=3),
        lambda: xp.zeros(2, device="nowhere"),
    ):
        with pytest.raises(WhitError):
            bad()


# ---- norms


def test_vector_and_matrix_norms() -> None:
    rng = np.random.default_rng(5)
    for dtype in FLOATS:
        mine, theirs = both(values(rng, (3, 4, 5), dtype))
        for ord, axis, keep in itertools.product(
            (0, 1, 2, 3, 0.5, -2, math.inf, -math.inf), (None, (1, 2)), (False, True)
        ):
            same(
                xp.linalg.vector_norm(mine, axis=axis, keepdims=keep, ord=ord),
                strict.linalg.vector_norm(theirs, axis=axis, keepdims=keep, ord=ord),
            )
        for ord, keep in itertools.product(("fro", 1, -1, math.inf, -math.inf), (False, True)):
            same(
                xp.linalg.matrix_norm(mine, keepdims=keep, ord=ord),
                strict.linalg.matrix_norm(theirs, keepdims=keep, ord=ord),
            )
        same(xp.linalg.trace(mine, offset=1), strict.linalg.trace(theirs, offset=1))
    huge = xp.asarray([3e30, 4e30])
    assert xp.linalg.vector_norm(huge).item() == pytest.approx(5e30)
