"""docs/semantics.md, rule by rule, on every device. Expected values are written out, or NumPy's."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.device.kernels import DEVICES
from whit import Context, Tensor, dtypes
from whit.helpers import ArgumentError, DTypeError, IndexingError, ShapeError

INF, NAN = math.inf, math.nan
LEAST = -(2**31)


def _often(device: Any) -> Any:
    """Compilers of C take long for many small kernels."""
    if device in ("CPU", "PYTHON"):
        return device
    return pytest.param(*device.values, marks=[*device.marks, pytest.mark.slow])


@pytest.fixture(params=[_often(d) for d in DEVICES], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with Context(DEV=request.param):
        yield str(request.param)


def t(values: Any, dtype: str = "float32") -> Tensor:
    """A tensor in memory, so that nothing is computed by the compiler."""
    return Tensor(values, dtype=dtype).realize()


def check(got: Tensor, expected: Any, dtype: str | None = None) -> None:
    np.testing.assert_array_equal(np.array(got.tolist(), float), np.array(expected, float))
    assert dtype is None or got.dtype.name == dtype


def signs(x: Tensor) -> list[bool]:
    return np.signbit(np.array(x.tolist())).tolist()  # type: ignore[no-any-return]


def test_every_rule_has_a_test() -> None:
    text = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()
    rules = re.findall(r"^- `(\w+)`:", text, re.MULTILINE)
    assert len(rules) > 30 and all(f"test_{rule}" in globals() for rule in rules)


# ---- floats


def test_nan_passes() -> None:
    x, y = t([NAN, 1.0, NAN]), t([1.0, NAN, NAN])
    for result in (x + y, x * y, x / y, x.maximum(y), x.minimum(y)):
        check(result, [NAN] * 3)
    check(x.relu(), [NAN, 1, NAN])
    check(x.clip(0, 2), [NAN, 1, NAN])
    for result in (x.sum(), x.max(), x.min(), x.mean(), x.prod()):
        assert math.isnan(result.item())
    check(x.fmax(y), [1, 1, NAN])
    check(x.fmin(y), [1, 1, NAN])
    assert x.nansum().item() == 1 and x.nanmax().item() == 1
    for result in (x == x, x < y, x >= y):
        assert not result.tolist()[0]
    assert (x != x).tolist() == [True, False, True]


def test_nan_sorts_last() -> None:
    x = t([1.0, NAN, -INF, INF, 0.0, NAN])
    check(x.sort()[0], [-INF, 0, 1, INF, NAN, NAN])
    assert x.argmax().item() == 1 and x.argmin().item() == 1


def test_infinities_are_numbers() -> None:
    x = t([INF, -INF])
    for result in (x - x, x * 0, x / x):
        check(result, [NAN, NAN])
    check(x + 1, [INF, -INF])
    check(1 / x, [0, 0])
    check(x * -2, [-INF, INF])
    check(t([3e38]) * 10, [INF])


def test_float_division_by_zero() -> None:
    x, zero, minus = t([1.0, -1.0, 0.0]), t([0.0] * 3), t([-0.0] * 3)
    check(x / zero, [INF, -INF, NAN])
    check(x / minus, [-INF, INF, NAN])
    check(x // zero, [INF, -INF, NAN])
    check(x % zero, [NAN] * 3)


def test_signed_zeros() -> None:
    x = t([-0.0, 0.0])
    assert (x == t([0.0, -0.0])).tolist() == [True, True]
    assert signs(x * 2) == [True, False] and signs(-x) == [False, True] and signs(x + -0.0) == [True, False]
    assert signs(x.abs()) == [False, False] and signs(x.sign()) == [False, False]
    assert signs(t([-0.4]).round()) == [True] and signs(x.sqrt()) == [True, False]
    assert x.maximum(-x).tolist() == [0, 0]


def test_rounding_is_half_to_even() -> None:
    check(t([0.5, 1.5, 2.5, -0.5, -1.5]).round(), [0, 2, 2, 0, -2])
    check(t([2049.0, 2051.0]).half(), [2048, 2052], "float16")
    check(t([257.0, 259.0]).bfloat16(), [256, 260], "bfloat16")
    check(t([17.0, 19.0]).cast("fp8e4m3"), [16, 20])
    check(t([2.0**53 + 2, 16777217.0, 16777219.0], "float64").float()[1:], [16777216, 16777220])


def test_denormals_count() -> None:
    assert (t([1e-45]) * 1).item() == np.float32(1e-45) and (t([1e-38]) / 4).item() > 0
    assert (t([1e-45]) + t([1e-45])).item() == np.float32(3e-45)
    assert t([6e-8], "float16").float().item() == np.float16(6e-8)


def test_domain_errors_are_nan() -> None:
    check(t([-1.0, 4.0]).sqrt(), [NAN, 2])
    check(t([-1.0, 0.0]).log(), [NAN, -INF])
    check(t([2.0]).asin(), [NAN])
    check(t([0.0]).acosh(), [NAN])
    check(t([-8.0, 0.0]) ** t([1 / 3, -1.0]), [NAN, INF])
    check(t([NAN, 1.0]) ** t([0.0, NAN]), [1, 1])


def test_float_remainder_is_exact() -> None:
    x, y = t([1e30, -1e20, 7.5, -7.5]), t([3.7, 3.7, 2.0, 2.0])
    check(x % y, np.mod(np.array(x.tolist(), np.float32), np.array(y.tolist(), np.float32)))
    check(x.fmod(y), np.fmod(np.array(x.tolist(), np.float32), np.array(y.tolist(), np.float32)))


def test_equal_expressions_give_equal_bits() -> None:
    x = t(np.random.default_rng(0).normal(size=40).astype(np.float32))
    y = (x * 1.1 + 0.3).sin()
    assert (y == y.max()).any().item() and (y.clone() == (x * 1.1 + 0.3).sin()).all().item()


# ---- integers


def test_integers_wrap() -> None:
    top = t([2**31 - 1], "int32")
    check(top + 1, [LEAST])
    check(top * 2, [-2])
    check(t([LEAST], "int32").abs(), [LEAST])
    check(t([0], "uint8") - 1, [255])
    check(-t([1], "uint8"), [255])
    check(t([3], "int8") ** 5, [243 - 256])
    check(t([3], "int8") << 6, [-64])


def test_integer_division_by_zero() -> None:
    x, zero = t([7, -7, 0], "int32"), t([0, 0, 0], "int32")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        a, b = np.array([7, -7, 0]), np.array([0, 0, 0])
        check(x // zero, a // b, "int32")
        check(x % zero, a % b, "int32")
        check(x.fmod(zero), np.fmod(a, b), "int32")
    check(x / zero, [INF, -INF, NAN], "float32")
    check(t([LEAST], "int32") // t([-1], "int32"), [LEAST])
    check(t([LEAST], "int32") % t([-1], "int32"), [0])


def test_integer_division_floors() -> None:
    x, y = t([7, -7, 7, -7], "int32"), t([2, 2, -2, -2], "int32")
    check(x // y, [3, -4, -4, 3])
    check(x % y, [1, 1, -1, -1])
    check(x.idiv(y), [3, -3, -3, 3])
    check(x.fmod(y), [1, -1, 1, -1])


def test_integer_powers() -> None:
    with pytest.raises(ArgumentError):
        t([2], "int32") ** -1
    check(t([2, -1, 0, 1, -1], "int32") ** t([-1, -3, -1, -5, -2], "int32"), [0, -1, 0, 1, 1], "int32")


def test_shifts() -> None:
    check(t([1, 1, 1, -1], "int32") << t([31, 32, -1, 1], "int32"), [LEAST, 0, 0, -2])
    check(t([-8, -8, 8, -8], "int32") >> t([1, 32, 40, -1], "int32"), [-4, -1, 0, -1])
    check(t([200, 200], "uint8") >> t([1, 8], "uint8"), [100, 0])


def test_bools_are_logic() -> None:
    x, y = t([True, True, False], "bool"), t([True, False, False], "bool")
    assert (x + y).tolist() == [True, True, False] and (x * y).tolist() == [True, False, False]
    for bad in (lambda: x - y, lambda: -x):
        with pytest.raises(DTypeError):
            bad()


def test_python_integers_must_fit() -> None:
    x = t([1, -1], "int8")
    for bad in (lambda: x + 300, lambda: x * -129, lambda: t([1], "uint8") - -1):
        with pytest.raises(DTypeError):
            bad()
    assert (x < 300).tolist() == [True, True] and (x > -(10**30)).tolist() == [True, True]
    assert (t([1], "uint8") == -1).tolist() == [False]


# ---- conversions


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_float_to_integer(dtype: str) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    got = t([1e30, -1e30, INF, -INF, NAN, 2.9, -0.9]).cast(dtype).tolist()
    assert got == [high, low, high, low, 0, 2, 0]
    assert t([-2.9]).cast(dtype).item() == max(-2, low)


def test_integer_to_integer() -> None:
    values = [300, -129, -1, 2**31 - 1]
    for dtype in ("int8", "uint8", "int16", "uint64"):
        check(t(values, "int32").cast(dtype), np.array(values, np.int32).astype(dtype))
    check(t([2**63 + 5], "uint64").cast("int64").cast("int32"), [5])


def test_to_bool() -> None:
    assert t([0.0, -0.0, NAN, 1e-45, -INF]).bool().tolist() == [False, False, True, True, True]
    assert t([0, 256], "int32").bool().tolist() == [False, True]


def test_float_overflow() -> None:
    x = t([1e9, -1e9, INF, NAN, 448.0, 464.0, 57344.0])
    check(x.cast("fp8e4m3"), [NAN, NAN, NAN, NAN, 448, 448, NAN])
    check(x.cast("fp8e5m2"), [INF, -INF, INF, NAN, 448, 448, 57344])
    check(x.half(), [INF, -INF, INF, NAN, 448, 464, 57344])
    check(t([1e39, -1e39], "float64").float(), [INF, -INF])
    check(t([3.4e38]).bfloat16(), [INF])


# ---- promotion


def test_promotion_is_jaxs() -> None:
    cases = {
        ("int8", "uint8"): "int16",
        ("int32", "float16"): "float16",
        ("float16", "bfloat16"): "float32",
        ("int64", "uint64"): "float32",
        ("uint32", "int8"): "int64",
        ("bool", "uint8"): "uint8",
        ("int64", "float32"): "float32",
        ("float32", "float64"): "float64",
    }
    for (a, b), want in cases.items():
        check(t([1], a) + t([1], b), [2], want)
        check(t([0], b).cat(t([1], a)), [0, 1], want)


def test_python_scalars_are_weak() -> None:
    check(t([1], "int8") + 1, [2], "int8")
    check(t([1.0], "float16") + 1.5, [2.5], "float16")
    check(t([1], "int32") + 1.5, [2.5], "float32")
    check(t([True], "bool") + 1, [2], "int32")
    check(t([1.0], "fp8e4m3") * 2, [2], "fp8e4m3")


def test_fp8_promotes_with_nothing() -> None:
    for other in ("fp8e5m2", "float16", "float32"):
        with pytest.raises(DTypeError):
            t([1.0], "fp8e4m3") + t([1.0], other)


def test_assignment_converts() -> None:
    x = t([1, 2, 3], "int32")
    x[1] = 7.9
    x[2:] = Tensor([-1.5])
    check(x, [1, 7, -1], "int32")
    with pytest.raises(DTypeError):
        x.assign(Tensor([1.0, 2.0, 3.0]))


# ---- reductions


def test_small_integers_widen() -> None:
    check(t([100, 100], "int8").sum(), 200, "int32")
    check(t([200, 200], "uint8").prod(), 40000, "uint32")
    check(t([True, True], "bool").sum(), 2, "int32")
    check(t([100, 100], "int16").cumsum(), [100, 200], "int32")
    check(t([2**31 - 1, 1], "int32").sum(), LEAST, "int32")
    check(t([2**40, 1], "int64").sum(), 2**40 + 1, "int64")
    check(t([1, 2], "int16").mean(), 1.5, "float32")


def test_halves_add_up_in_float32() -> None:
    ones = Tensor(np.ones(4096, np.float16)).realize()
    check(ones.sum(), 4096, "float16")
    check(ones.mean(), 1, "float16")
    check(ones.reshape(1, -1) @ ones.reshape(-1, 1), [[4096]], "float16")
    check(Tensor(np.ones(1000, np.float32)).bfloat16().realize().sum(), 1000, "bfloat16")
    check(t([1.0] * 20, "fp8e4m3").sum(), 20, "fp8e4m3")
    assert ones.softmax().sum().item() == 1


def test_tiny_bfloat16_products() -> None:
    """Subnormal factors are taken exactly or as 0; ordinary ones beside them count in full, and elementwise
    products are exact."""
    size, tiny = 64, 2.0**-130
    a = np.full((size, size), tiny, np.float32)
    a[:, 0] = 3.0
    left, right = Tensor(a).bfloat16(), Tensor.full((size, size), 2.0**100).bfloat16()
    got = (left @ right).float().numpy()
    kept = 3 * 2.0**100 + (size - 1) * 2.0**-30
    assert np.isin(got, np.float32([kept, 3 * 2.0**100])).all()
    assert ((left * right).float().numpy()[:, 1:] == 2.0**-30).all()


def test_empty_reductions() -> None:
    x = Tensor.zeros(0)
    assert x.sum().item() == 0 and x.prod().item() == 1
    assert x.any().item() is False and x.all().item() is True
    for result in (x.mean(), x.var(), x.std()):
        assert math.isnan(result.item())
    assert x.logsumexp().item() == -INF
    for name in ("max", "min", "argmax", "argmin"):
        with pytest.raises(ShapeError):
            getattr(x, name)()
    assert Tensor.zeros(2, 0).sum(1).tolist() == [0, 0]


# ---- indices


def test_indices_out_of_range() -> None:
    x = t([10.0, 20.0, 30.0])
    for bad in (lambda: x[3], lambda: x[-4], lambda: x[[0, 3]], lambda: x[np.array([-4])]):
        with pytest.raises(IndexingError):
            bad()
    out = Tensor([0, 3, -1, -4, 2**31 - 1])
    check(x[out], [10, 0, 30, 0, 0])
    check(x.gather(0, out), [10, 0, 30, 0, 0])
    check(x.take(out), [10, 0, 30, 0, 0])
    y = x.clone()
    y[out] = 5
    check(y, [5, 20, 5])
    check(x.scatter(0, out, 7.0), [7, 20, 7])
    check(x.index_add(0, out, Tensor.ones(5)), [11, 20, 31])
    with Context(CHECK=1):
        check(x[Tensor([0, -3])], [10, 10])
        for bad in (
            lambda: x[out],
            lambda: x.gather(0, out),
            lambda: x.take(out),
            lambda: x.scatter(0, out, 7.0),
            lambda: x.index_add(0, out, Tensor.ones(5)),
            lambda: x.index_select(0, out),
            lambda: y.__setitem__(out, 1),
        ):
            with pytest.raises(IndexingError, match=r"3 at position \(1,\)"):
                bad()
        with pytest.raises(IndexingError, match=r"-9 at position \(1, 0\).*axis 1"):
            t([[1.0, 2.0]])[Tensor([[0], [0]]), Tensor([[1], [-9]])]


def test_the_last_write_wins() -> None:
    x = t([0, 0, 0], "int32")
    x[Tensor([1, 1, 0])] = Tensor([5, 6, 7])
    check(x, [7, 6, 0])
    zero, index, source = t([0, 0, 0], "int32"), Tensor([1, 1, 0]), Tensor([5, 6, 7])
    check(zero.scatter(0, index, source), [7, 6, 0])
    check(zero.index_add(0, index, source), [7, 11, 0])
    check(zero.scatter_reduce(0, index, source, "prod", include_self=False), [7, 30, 0])


def test_masks_select_now() -> None:
    a = np.arange(6).reshape(2, 3)
    x = t(a, "int32")
    check(x[x > 2], a[a > 2])
    check(x[x.sum(1) > 3], a[a.sum(1) > 3])
    check(x[:, x[0] > 0], a[:, a[0] > 0])
    check(x[x > 9], [])
    y = Tensor(a.copy())
    y[y > 2] = Tensor([30, 40, 50])
    check(y, [[0, 1, 2], [30, 40, 50]])
    y[y > 35] = 1
    check(y, [[0, 1, 2], [30, 1, 1]])


def test_readers_keep_what_they_read() -> None:
    x = t([1, 2, 3, 4], "int32")
    before, view = x + 0, x[:2]
    x[1:] = x[:-1]
    check(x, [1, 1, 2, 3])
    x[:-1] = x[1:]
    check(x, [1, 2, 3, 3])
    view[0] = 9
    check(x, [1, 2, 3, 3])
    check(before, [1, 2, 3, 4])
    y = x
    x += 1
    check(y, [1, 2, 3, 3])
    check(x, [2, 3, 4, 4])


# ---- interchange


def test_arrays_are_shared_to_read(device: str) -> None:
    a = np.arange(3, dtype=np.float32)
    x = Tensor(a)
    a[0] = 9
    check(x, [9 if device.startswith("CPU") else 0, 1, 2])
    x[1] = 5
    assert x.tolist()[1] == 5 and a[1] == 1


def test_dlpack_shares_both_ways(device: str) -> None:
    theirs = torch.arange(3.0)
    x = Tensor.from_dlpack(theirs)
    own = x.numpy()
    if device.startswith("CPU"):
        x[1] = 5
        x.realize()
        np.asarray(x)[2] = 7
        torch.from_dlpack(x)[0] = 3
        assert theirs.tolist() == [3, 5, 7] == x.tolist()
    assert own.tolist() == [0, 1, 2]


def test_dtypes_of_this_page_exist() -> None:
    assert dtypes.default_float is dtypes.float32 and dtypes.default_int is dtypes.int32
