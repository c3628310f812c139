"""Reductions, running reductions and sorting against NumPy and PyTorch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensor.reference import evaluate
from whit import Tensor, dtypes
from whit.helpers import ArgumentError, ShapeError

SHAPES = [(), (1,), (7,), (2, 3), (3, 1, 5), (2, 3, 5, 2)]
WIDENED = {
    np.bool_: np.int32,
    np.int8: np.int32,
    np.int16: np.int32,
    np.uint8: np.uint32,
    np.uint16: np.uint32,
}


@st.composite
def arrays(
    draw: Any, kinds: Any = (np.float32, np.int32, np.bool_, np.int8, np.uint16, np.float16), low: int = 1
) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(low, 5), max_size=3)))
    kind = draw(st.sampled_from(kinds))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return np.asarray(rng.integers(0, 5, shape)).astype(kind)


@st.composite
def with_axis(draw: Any, **options: Any) -> tuple[np.ndarray, Any, bool]:
    x = draw(arrays(**options))
    axes: list[Any] = [None, *range(-x.ndim, x.ndim)]
    if x.ndim > 1:
        axes += [(0, 1), (-1, 0), ()]
    return x, draw(st.sampled_from(axes)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(with_axis(), st.sampled_from(["sum", "prod", "max", "min", "any", "all"]))
def test_reduction(case: tuple[np.ndarray, Any, bool], name: str) -> None:
    x, axis, keepdim = case
    got = evaluate(getattr(Tensor(x), name)(axis, keepdim))
    kind = WIDENED.get(x.dtype.type, x.dtype.type)
    if name in ("sum", "prod"):
        want = getattr(np, name)(
            x.astype(np.float64) if kind == np.float16 else x.astype(kind), axis=axis, keepdims=keepdim
        )
        with np.errstate(all="ignore"):
            want = np.asarray(want).astype(kind)
        assert got.dtype == kind
    else:
        want = getattr(np, name)(x, axis=axis, keepdims=keepdim)
    assert got.shape == np.shape(want)
    np.testing.assert_array_equal(got, want)


@settings(max_examples=40, deadline=None)
@given(with_axis(kinds=(np.float32, np.float64, np.int16)))
def test_statistics(case: tuple[np.ndarray, Any, bool]) -> None:
    x, axis, keepdim = case
    t = Tensor(x)
    tol: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(evaluate(t.mean(axis, keepdim)), wide.mean(axis, keepdims=keepdim), **tol)
        for correction in (0, 1):
            count = x.size if axis is None else np.prod([x.shape[a] for a in np.atleast_1d(axis).astype(int)])
            if count > correction:
                want = wide.var(axis, ddof=correction, keepdims=keepdim)
                np.testing.assert_allclose(evaluate(t.var(axis, keepdim, correction)), want, **tol)
                np.testing.assert_allclose(evaluate(t.std(axis, keepdim, correction)), np.sqrt(want), **tol)
        np.testing.assert_allclose(
            evaluate(t.var_mean(axis, keepdim, 0)[1]), wide.mean(axis, keepdims=keepdim), **tol
        )
        want = np.log(np.exp(wide).sum(axis, keepdims=keepdim))
        np.testing.assert_allclose(evaluate(t.logsumexp(axis, keepdim)), want, **tol)


@settings(max_examples=40, deadline=None)
@given(with_axis(kinds=(np.float32, np.int32, np.bool_, np.uint8)), st.sampled_from(["argmax", "argmin"]))
def test_positions(case: tuple[np.ndarray, Any, bool], name: str) -> None:
    x, axis, keepdim = case
    if isinstance(axis, tuple):
        return
    got = evaluate(getattr(Tensor(x), name)(axis, keepdim))
    np.testing.assert_array_equal(got, getattr(np, name)(x, axis=axis, keepdims=keepdim))
    assert got.dtype == np.int32


def test_nan_and_infinities() -> None:
    x = np.array([[1.0, np.nan, 3.0, np.nan], [np.inf, -np.inf, 0.0, 1.0], [-np.inf] * 4], np.float32)
    t = Tensor(x)
    with np.errstate(all="ignore"):
        for name in ("max", "min", "sum", "argmax", "argmin"):
            np.testing.assert_array_equal(evaluate(getattr(t, name)(1)), getattr(np, name)(x, axis=1))
    np.testing.assert_array_equal(evaluate(t.logsumexp(1)), np.array([np.nan, np.inf, -np.inf], np.float32))


def test_ignoring_nan() -> None:
    x = np.array([[1.0, np.nan, 3.0], [np.nan] * 3, [-np.inf, 2.0, np.nan]], np.float32)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for name in ("nansum", "nanmean", "nanmax", "nanmin"):
            np.testing.assert_array_equal(evaluate(getattr(Tensor(x), name)(1)), getattr(np, name)(x, axis=1))


def test_half_sums_do_not_stop_growing() -> None:
    x = np.ones(5000, np.float16)
    assert evaluate(Tensor(x).sum()) == 5000 and evaluate(Tensor(x).sum()).dtype == np.float16
    assert evaluate(Tensor(x).mean()) == 1
    big = np.full(3, 60000, np.float16)
    assert evaluate(Tensor(big).mean()) == 60000  # the sum overflows float16, the mean does not
    assert evaluate(Tensor(np.full(1000, 100, np.uint8)).sum()) == 100000
    assert evaluate(Tensor([1, 2]).sum(dtype=dtypes.float64)).dtype == np.float64


def test_empty() -> None:
    x = Tensor.zeros(0, 3)
    assert evaluate(x.sum()) == 0 and evaluate(x.prod()) == 1
    np.testing.assert_array_equal(evaluate(x.sum(0)), np.zeros(3))
    assert evaluate(x.sum(1)).shape == (0,)
    assert not evaluate(x.bool().any()) and evaluate(x.bool().all())
    assert np.isnan(evaluate(x.mean())) and evaluate(x.logsumexp()) == -np.inf
    assert evaluate(x.max(1)).shape == (0,)
    assert evaluate(x.cumsum(0)).shape == (0, 3)
    for name in ("max", "min", "argmax"):
        with pytest.raises(ShapeError, match="no element"):
            getattr(x, name)()


def test_bad_axes() -> None:
    x = Tensor.zeros(2, 3)
    for axis, why in (
        (2, "axes run from -2 to 1"),
        (-3, "axes run"),
        ((0, 0), "named twice"),
        ((0, -2), "named twice"),
        (1.5, "whole number"),
    ):
        with pytest.raises(ShapeError, match=why):
            x.sum(axis)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="scalar"):
        Tensor(1.0).sum(1)
    assert evaluate(Tensor(2.0).sum(0)) == 2 and evaluate(Tensor(2.0).max(-1)) == 2


@settings(max_examples=40, deadline=None)
@given(arrays(kinds=(np.float32, np.int32, np.int8, np.bool_), low=0), st.data())
def test_running(x: np.ndarray, data: Any) -> None:
    if not x.ndim:
        x = x.reshape(1)
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    t = Tensor(x)
    kind = WIDENED.get(x.dtype.type, x.dtype.type)
    np.testing.assert_allclose(evaluate(t.cumsum(axis)), np.cumsum(x, axis, dtype=kind), rtol=1e-6)
    np.testing.assert_allclose(evaluate(t.cumprod(axis)), np.cumprod(x, axis, dtype=kind), rtol=1e-6)
    if x.size:
        for name in ("cummax", "cummin"):
            values, places = getattr(t, name)(axis)
            expected = getattr(torch, name)(torch.from_numpy(x), axis)
            np.testing.assert_array_equal(evaluate(values), expected.values.numpy())
            np.testing.assert_array_equal(evaluate(places), expected.indices.numpy())


@pytest.mark.parametrize("n", [5, 16, 17, 64, 131])
def test_running_over_rows(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((2, n))
    x[1, n // 2] = np.nan
    np.testing.assert_allclose(evaluate(Tensor(x).cumsum(1)), np.cumsum(x, 1), rtol=1e-12)
    np.testing.assert_allclose(evaluate(Tensor(x).cummax(1)[0]), np.maximum.accumulate(x, 1))
    np.testing.assert_allclose(evaluate(Tensor(x).cumprod(1)), np.cumprod(x, 1), rtol=1e-10)


def test_long_running_sum() -> None:
    x = np.random.default_rng(0).integers(-9, 9, 3000)
    np.testing.assert_array_equal(evaluate(Tensor(x.astype(np.int32)).cumsum()), np.cumsum(x))


def test_logcumsumexp() -> None:
    x = np.array([[-1000.0, 0.0, 1000.0], [-np.inf, -np.inf, 2.0], [3.0, 1.0, 2.0]], np.float32)
    want = np.logaddexp.accumulate(x.astype(np.float64), axis=1)
    np.testing.assert_allclose(evaluate(Tensor(x).logcumsumexp(1)), want, rtol=1e-6)
    np.testing.assert_allclose(evaluate(Tensor(x.T.copy()).logcumsumexp(0)), want.T, rtol=1e-6)


@st.composite
def sortable(draw: Any) -> tuple[np.ndarray, int]:
    shape = draw(st.sampled_from([(1,), (2,), (7,), (2, 5), (3, 8), (2, 3, 4)]))
    kind = draw(st.sampled_from([np.float32, np.int8, np.uint8, np.int64, np.uint64, np.float16, np.bool_]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if np.issubdtype(kind, np.floating):
        pool = np.array([0.0, -0.0, 1, -1, np.nan, np.inf, -np.inf, 2.5, -7], kind)
    elif kind == np.bool_:
        pool = np.array([False, True])
    else:
        info = np.iinfo(kind)
        pool = np.array([info.min, info.max, 0, 1, 5, 5], kind)
    return rng.choice(pool, shape), draw(st.integers(-len(shape), len(shape) - 1))


@settings(max_examples=30, deadline=None)
@given(sortable(), st.booleans())
def test_sort(case: tuple[np.ndarray, int], descending: bool) -> None:
    x, axis = case
    values, order = Tensor(x).sort(axis, descending)
    want_order = np.argsort(x, axis=axis, kind="stable")
    if descending:  # PyTorch's order: stable, NaN first
        key = np.flip(x, axis)
        want_order = np.flip(x.shape[axis] - 1 - np.argsort(key, axis=axis, kind="stable"), axis)
    np.testing.assert_array_equal(evaluate(order), want_order)
    np.testing.assert_array_equal(evaluate(values), np.take_along_axis(x, want_order, axis))


def test_topk() -> None:
    x = np.random.default_rng(1).standard_normal((3, 11)).astype(np.float32)
    for largest in (True, False):
        values, places = Tensor(x).topk(4, 1, largest)
        want = torch.from_numpy(x).topk(4, 1, largest)
        np.testing.assert_array_equal(evaluate(values), want.values.numpy())
        np.testing.assert_array_equal(evaluate(places), want.indices.numpy())
    with pytest.raises(ArgumentError, match="smaller k"):
        Tensor(x).topk(12)


def test_long_sort() -> None:
    x = np.random.default_rng(2).integers(0, 50, 700).astype(np.int32)
    values, order = Tensor(x).sort()
    np.testing.assert_array_equal(evaluate(order), np.argsort(x, kind="stable"))
    np.testing.assert_array_equal(evaluate(values), np.sort(x))


def test_allclose() -> None:
    assert Tensor([1.0, 2.0]).allclose(Tensor([1.0, 2.0 + 1e-7]))
    assert not Tensor([1.0]).allclose(Tensor([math.nan]))
