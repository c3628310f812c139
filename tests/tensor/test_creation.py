"""New tensors against NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensor.reference import evaluate
from whit import Tensor, Variable, dtypes
from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.uop import Ops


def same(got: Tensor, want: Any, kind: Any = None) -> None:
    result = evaluate(got)
    np.testing.assert_array_equal(result, np.asarray(want))
    assert kind is None or result.dtype == kind


def test_constants() -> None:
    same(Tensor.zeros(2, 3), np.zeros((2, 3)), np.float32)
    same(Tensor.ones((2, 0)), np.ones((2, 0)), np.float32)
    same(Tensor.ones(2, dtype="int64"), [1, 1], np.int64)
    same(Tensor.full((2,), 2.5), [2.5, 2.5], np.float32)
    same(Tensor.full((2,), True), [True, True], np.bool_)
    same(Tensor.full((), 3), 3, np.int32)
    same(Tensor.full((2,), Tensor(4)), [4, 4])
    x = Tensor.zeros(2, 2, dtype=dtypes.int8)
    same(x.ones_like(), np.ones((2, 2)), np.int8)
    same(x.zeros_like(dtype=dtypes.float32), np.zeros((2, 2)), np.float32)
    same(x.full_like(7), np.full((2, 2), 7), np.int8)
    assert Tensor.empty(3, 4).shape == (3, 4)
    assert x.empty_like().dtype is dtypes.int8
    for bad in (
        lambda: Tensor.zeros(-1),
        lambda: Tensor.zeros(2.5),
        lambda: Tensor.empty(Variable("n", 1, 4)),
    ):
        with pytest.raises(ShapeError):
            bad()


def test_constants_need_no_memory() -> None:
    for t in (Tensor.zeros(1000, 1000), Tensor.arange(10**6), Tensor.eye(500), Tensor.linspace(0, 1, 99)):
        assert not any(node.op is Ops.BUFFER for node in t.uop.toposort())


@settings(max_examples=60, deadline=None)
@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-4, 4).filter(bool))
def test_integer_ranges(start: int, stop: int, step: int) -> None:
    same(Tensor.arange(start, stop, step), np.arange(start, stop, step), np.int32)


@settings(max_examples=60, deadline=None)
@given(st.floats(-5, 5), st.floats(-5, 5), st.sampled_from([0.1, 0.25, 1.0, -0.3]))
def test_float_ranges(start: float, stop: float, step: float) -> None:
    want = np.arange(start, stop, step)
    got = evaluate(Tensor.arange(start, stop, step))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_ranges() -> None:
    same(Tensor.arange(5), np.arange(5), np.int32)
    same(Tensor.arange(3, dtype="uint8"), np.arange(3), np.uint8)
    same(Tensor.arange(2**31, 2**31 + 2), np.arange(2**31, 2**31 + 2), np.int64)
    same(Tensor.arange(3.0), np.arange(3.0), np.float32)
    same(Tensor.arange(0, 2, 0.5, dtype="float16"), np.arange(0, 2, 0.5), np.float16)
    assert evaluate(Tensor.arange(Variable("n", 1, 9).bind(4))).tolist() == [0, 1, 2, 3]
    for args in ((0, 5, 0), (0, float("inf")), (0, float("nan"))):
        with pytest.raises(ArgumentError):
            Tensor.arange(*args)
    for start, stop, steps in ((0, 1, 5), (3, -2, 7), (1, 1, 3), (0, 1, 1), (0, 1, 0)):
        np.testing.assert_allclose(
            evaluate(Tensor.linspace(start, stop, steps)), np.linspace(start, stop, steps), rtol=1e-6
        )
    assert evaluate(Tensor.linspace(0.1, 0.7, 4))[-1] == np.float32(0.7)


def test_eye_and_triangles() -> None:
    same(Tensor.eye(3), np.eye(3), np.float32)
    same(Tensor.eye(2, 4, dtype="int32"), np.eye(2, 4), np.int32)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    x[0, 0, 3] = np.nan
    for k in (-2, 0, 1):
        same(Tensor(x).tril(k), np.tril(x, k))
        same(Tensor(x).triu(k), np.triu(x, k))
    with pytest.raises(ShapeError):
        Tensor([1]).tril()


def test_meshgrid() -> None:
    a, b = np.arange(3), np.arange(4)
    for order in ("ij", "xy"):
        for got, want in zip(
            Tensor(a).meshgrid(Tensor(b), indexing=order), np.meshgrid(a, b, indexing=order)
        ):
            same(got, want)
    with pytest.raises(ArgumentError):
        Tensor(a).meshgrid(indexing="yx")


def test_from_blob() -> None:
    data = (ctypes.c_float * 6)(*range(6))
    got = Tensor.from_blob(ctypes.addressof(data), (2, 3), keep=data)
    same(got, np.arange(6, dtype=np.float32).reshape(2, 3))


def test_requires_grad() -> None:
    a, b = Tensor.zeros(3, requires_grad=True), Tensor.zeros(3, requires_grad=True)
    assert a.uop is not b.uop, "two parameters with equal starting values are two leaves"
    assert Tensor.zeros(3).uop is Tensor.zeros(3).uop
    with pytest.raises(DTypeError, match="only floats"):
        Tensor.zeros(3, dtype="int32", requires_grad=True)


def test_default_dtypes_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Tensor([1]) + 1.5).dtype is dtypes.float32 and Tensor([1]).exp().dtype is dtypes.float32
    monkeypatch.setattr(dtypes, "default_float", dtypes.float64)
    monkeypatch.setattr(dtypes, "default_int", dtypes.int64)
    assert (Tensor([1]) + 1.5).dtype is dtypes.float64 and Tensor([1]).exp().dtype is dtypes.float64
    assert Tensor([1.5]).dtype is dtypes.float64 and Tensor.zeros(2).dtype is dtypes.float64
    assert Tensor.rand(2).dtype is dtypes.float64 and Tensor.linspace(0, 1, 3).dtype is dtypes.float64
    assert Tensor.arange(3).dtype is dtypes.int64 and (Tensor([True]) + 1).dtype is dtypes.int64
