"""Sorting, selection, searches and counts against NumPy and PyTorch: every way that a row is sorted, dtypes,
equal keys, NaN and signed zeros, both devices; gradients; sizes that are computed; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import CLANG, GCC
from whit import Tensor, TinyJit, Variable, dtypes
from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.tensor import sorting

KINDS = ["float32", "float64", "float16", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"]
KINDS += ["bool"]
rng = np.random.default_rng(7)


def sample(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values with repetitions, the extremes of the dtype, NaN and both zeros."""
    if kind == "bool":
        return rng.random(shape) < 0.5
    if kind.startswith("float"):
        x = (rng.normal(size=shape) * 3).round(1).astype(kind)
        special = rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], kind), shape)
        return np.where(rng.random(shape) < 0.2, special, x)
    info = np.iinfo(kind)
    x = rng.integers(0, 20, shape).astype(kind)
    return np.where(rng.random(shape) < 0.2, rng.choice(np.array([info.min, info.max], kind), shape), x)


def ordered(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    """The stable order: NumPy's, and for descending that of the flipped array, flipped."""
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    return np.flip(x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 64, 65, 300, 5000])
def test_sort_of_every_dtype_and_length(kind: str, n: int) -> None:
    x = sample(kind, (2, n))
    for descending in (False, True):
        values, order = Tensor(x).sort(1, descending)
        want = ordered(x, 1, descending)
        np.testing.assert_array_equal(order.numpy(), want)
        found = values.numpy()
        np.testing.assert_array_equal(found, np.take_along_axis(x, want, 1))
        if kind.startswith("float"):  # zeros keep their signs
            np.testing.assert_array_equal(np.signbit(found), np.signbit(np.take_along_axis(x, want, 1)))


@pytest.mark.parametrize("device", ["PYTHON", CLANG, GCC])
@pytest.mark.parametrize(("kind", "n"), [("float32", 40), ("float16", 90), ("int64", 90), ("bfloat16", 90)])
def test_sort_on_other_devices(device: str, kind: str, n: int) -> None:
    x = sample("float32" if kind == "bfloat16" else kind, (2, n))
    t = Tensor(x, device=device).cast(getattr(dtypes, kind))
    x = t.cast(dtypes.float32).numpy() if kind == "bfloat16" else x
    values, order = t.sort(1)
    np.testing.assert_array_equal(order.numpy(), ordered(x, 1, False))
    np.testing.assert_array_equal(values.cast(dtypes.float64).numpy(), np.sort(x, 1).astype(np.float64))


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("n", [100, 101, 257, 1000])
def test_long_rows_are_cut_and_merged(parts: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_parts", lambda rows, size: parts)
    for kind in ("float32", "int64"):
        x = sample(kind, (2, n))
        t = Tensor(x.astype(kind))
        for descending in (False, True):
            values, order = t.sort(1, descending)
            want = ordered(x, 1, descending)
            np.testing.assert_array_equal(order.numpy(), want)
            np.testing.assert_array_equal(values.numpy(), np.take_along_axis(x, want, 1))
    y = Tensor(rng.permutation(n).astype(np.float32), requires_grad=True)
    (y.sort()[0] * Tensor(np.arange(n, dtype=np.float32))).sum().backward()
    assert y.grad is not None
    np.testing.assert_array_equal(y.grad.numpy(), np.argsort(np.argsort(y.numpy())))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_sort_along_any_axis(axis: int) -> None:
    x = sample("float32", (4, 70, 3))
    values, order = Tensor(x).sort(axis)
    np.testing.assert_array_equal(values.numpy(), np.sort(x, axis))
    np.testing.assert_array_equal(order.numpy(), np.argsort(x, axis, kind="stable"))
    np.testing.assert_array_equal(Tensor(x).argsort(axis, descending=True).numpy(), ordered(x, axis, True))
    np.testing.assert_array_equal(Tensor(x).msort().numpy(), np.sort(x, 0))


def test_sort_of_a_view_and_of_an_expression() -> None:
    x = sample("float32", (80, 6))
    t = Tensor(x).realize()
    np.testing.assert_array_equal(t[10:20].sort(0)[0].numpy(), np.sort(x[10:20], 0))
    np.testing.assert_array_equal((t.T * 2).sort(1)[0].numpy(), np.sort(x.T * 2, 1))
    np.testing.assert_array_equal((t.sort(0)[0] + 1).numpy(), np.sort(x, 0) + 1)


def test_empty_single_and_scalar() -> None:
    assert [t.tolist() for t in Tensor(3.0).sort()] == [3.0, 0]
    assert Tensor.zeros(0, 3).sort(0)[0].shape == (0, 3)
    assert Tensor.zeros(3, 0).sort(0)[1].shape == (3, 0)
    assert [t.tolist() for t in Tensor([[5], [4]]).sort(1)] == [[[5], [4]], [[0], [0]]]


@pytest.mark.parametrize("k", [1, 3, 8, 32, 33, 200])
@pytest.mark.parametrize("kind", ["float32", "float16", "int32", "uint8", "int64", "float64"])
def test_topk(k: int, kind: str) -> None:
    x = sample(kind, (3, 431))
    for largest in (True, False):
        values, order = Tensor(x).topk(k, 1, largest)
        want = ordered(x, 1, largest)[:, :k]
        np.testing.assert_array_equal(order.numpy(), want)
        np.testing.assert_array_equal(values.numpy(), np.take_along_axis(x, want, 1))


RISING = np.arange(500)


@pytest.mark.parametrize("x", [RISING, RISING[::-1].copy(), RISING * 0, np.full(500, -np.inf)])
def test_topk_of_rising_falling_and_equal_values(x: np.ndarray) -> None:
    for device in ("CPU", "PYTHON"):
        values, order = Tensor(x.astype(np.float32), device=device).topk(5)
        np.testing.assert_array_equal(order.numpy(), ordered(x, 0, True)[:5])
        np.testing.assert_array_equal(values.numpy(), x[ordered(x, 0, True)[:5]])


def test_topk_along_an_inner_axis() -> None:
    x = sample("float32", (3, 100, 2))
    got = Tensor(x).topk(4, 1)[1].numpy()
    np.testing.assert_array_equal(got, ordered(x, 1, True)[:, :4])


GRADIENTS: list[tuple[str, Any, Any]] = [
    ("sort", lambda x: x.sort(1)[0], lambda x: x.sort(1)[0]),
    ("sort descending", lambda x: x.sort(0, True)[0], lambda x: x.sort(0, True)[0]),
    ("topk", lambda x: x.topk(3, 1)[0], lambda x: x.topk(3, 1)[0]),
    ("kthvalue", lambda x: x.kthvalue(4, 1)[0], lambda x: x.kthvalue(4, 1)[0]),
    ("median", lambda x: x.median(1)[0], lambda x: x.median(1)[0]),
    ("quantile", lambda x: x.quantile(0.3, 1), lambda x: x.quantile(0.3, 1)),
    ("quantiles", lambda x: x.quantile(Tensor([0.1, 0.5]), 1),
     lambda x: x.quantile(torch.tensor([0.1, 0.5]), 1)),
]


@pytest.mark.parametrize(("name", "ours", "theirs"), GRADIENTS, ids=[g[0] for g in GRADIENTS])
@pytest.mark.parametrize("n", [9, 100])
def test_gradients(name: str, ours: Any, theirs: Any, n: int) -> None:
    x = rng.normal(size=(5, n)).astype(np.float32)
    weight = np.cos(np.arange(5 * n)).astype(np.float32)
    t = Tensor(x, requires_grad=True)
    made = ours(t)
    (made * made * Tensor(weight[: made.numel()]).reshape(*made.shape)).sum().backward()
    p = torch.tensor(x, requires_grad=True)
    other = theirs(p)
    (other * other * torch.tensor(weight[: other.numel()]).reshape(other.shape)).sum().backward()
    assert t.grad is not None
    assert p.grad is not None
    np.testing.assert_allclose(made.numpy(), other.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(t.grad.numpy(), p.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_second_derivative_of_sort() -> None:
    x = rng.normal(size=(70,)).astype(np.float32)
    t = Tensor(x)
    weight = np.arange(70, dtype=np.float32)
    (first,) = ((t.sort()[0] ** 3) * Tensor(weight)).sum().gradient(t)  # a graph, which has a gradient too
    (second,) = first.sum().gradient(t)
    want = np.empty(70, np.float32)
    want[np.argsort(x)] = weight * 6 * np.sort(x)
    np.testing.assert_allclose(second.numpy(), want, rtol=1e-4)


def test_jit() -> None:
    step = TinyJit(lambda t: t.sort(1)[0] + t.topk(2, 1)[0].sum(1, keepdim=True))
    for _ in range(4):
        x = sample("float32", (4, 90))
        x[~np.isfinite(x)] = 3
        got = step(Tensor(x).realize()).numpy()
        want = np.sort(x, 1) + np.sort(x, 1)[:, -2:].sum(1, keepdims=True)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_rows_of_a_symbolic_count() -> None:
    x = sample("float32", (6, 80))
    rows = Variable("rows", 1, 6).bind(4)
    got = Tensor(x).realize()[:rows].sort(1)[0].sum(0)
    np.testing.assert_allclose(got.numpy(), np.sort(x[:4], 1).sum(0), rtol=1e-5)


# ---- median, quantile, mode --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (8,), (3, 5), (4, 66)])
def test_median_and_quantile(shape: tuple[int, ...]) -> None:
    x = rng.normal(size=shape).astype(np.float32)
    t, p = Tensor(x), torch.tensor(x)
    assert t.median().item() == pytest.approx(float(np.median(x)), rel=1e-6)
    for keepdim in (False, True):
        got, want = t.median(-1, keepdim), p.median(-1, keepdim)
        np.testing.assert_array_equal(got[0].numpy(), want.values.numpy())
        np.testing.assert_array_equal(got[1].numpy(), want.indices.numpy())
        for way in ("linear", "lower", "higher", "midpoint", "nearest"):
            for q in (0.0, 0.25, 0.61, 1.0, [0.1, 0.9]):
                shares = Tensor(q) if isinstance(q, list) else q
                other = torch.tensor(q, dtype=torch.float32) if isinstance(q, list) else q
                got_q = t.quantile(shares, -1, keepdim, way).numpy()
                want_q = p.quantile(other, -1, keepdim, interpolation=way).numpy()
                np.testing.assert_allclose(got_q, want_q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(t.quantile(0.3).numpy(), np.quantile(x, 0.3), rtol=1e-5)
    got_two = t.quantile(Tensor([0.3, 0.5]), None, True).numpy()
    np.testing.assert_allclose(got_two, np.quantile(x, [0.3, 0.5], keepdims=True), rtol=1e-5, atol=1e-6)


def test_nan_in_medians() -> None:
    x = np.array([[1, np.nan, 0, 4, np.nan], [3, 1, 2, 9, 5], [np.nan] * 5], np.float32)
    t, p = Tensor(x), torch.tensor(x)
    got, want = t.median(1), p.median(1)
    np.testing.assert_array_equal(got[0].numpy(), want.values.numpy())
    np.testing.assert_array_equal(got[1].numpy(), want.indices.numpy())
    np.testing.assert_array_equal(t.quantile(0.4, 1).numpy(), [np.nan, np.quantile(x[1], 0.4), np.nan])
    np.testing.assert_allclose(t.nanquantile(0.4, 1).numpy(), p.nanquantile(0.4, 1).numpy(), rtol=1e-6)
    np.testing.assert_allclose(t.nanmedian().item(), np.nanmedian(x), rtol=1e-6)


def test_mode_and_kthvalue() -> None:
    x = rng.integers(0, 6, (5, 90)).astype(np.int32)
    t, p = Tensor(x), torch.tensor(x)
    for keepdim in (False, True):
        values, places = t.mode(1, keepdim)
        np.testing.assert_array_equal(values.numpy(), p.mode(1, keepdim).values.numpy())
        np.testing.assert_array_equal(np.take_along_axis(x, places.numpy().reshape(5, 1), 1).reshape(-1),
                                      values.numpy().reshape(-1))
        np.testing.assert_array_equal(t.kthvalue(11, 1, keepdim)[0].numpy(),
                                      p.kthvalue(11, 1, keepdim).values.numpy())
    with pytest.raises(ArgumentError, match="k runs from 1 to 90"):
        t.kthvalue(0)


# ---- searches and counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float64", "int32", "uint8"])
@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
def test_searchsorted(kind: str, device: str) -> None:
    for n in (1, 2, 7, 8, 33):
        x, v = np.sort(sample(kind, (n,))), sample(kind, (4, 5))
        for side in ("left", "right"):
            got = Tensor(x, device=device).searchsorted(Tensor(v, device=device), side=side)
            np.testing.assert_array_equal(got.numpy(), np.searchsorted(x, v, side))
    rows, wanted = np.sort(sample(kind, (3, 20)), 1), sample(kind, (3, 6))
    got_rows = Tensor(rows, device=device).searchsorted(Tensor(wanted, device=device), right=True).numpy()
    np.testing.assert_array_equal(got_rows, [np.searchsorted(a, b, "right") for a, b in zip(rows, wanted)])
    got_buckets = Tensor(wanted).bucketize(Tensor(rows[0])).numpy()
    np.testing.assert_array_equal(got_buckets, np.searchsorted(rows[0], wanted))


def test_searchsorted_with_a_sorter_and_of_nothing() -> None:
    x = rng.permutation(30).astype(np.float32)
    order = np.argsort(x)
    got = Tensor(x).searchsorted(Tensor([3.5, 40.0]), sorter=Tensor(order.astype(np.int32)))
    assert got.tolist() == [4, 30]
    assert Tensor([1.0]).searchsorted(Tensor.zeros(0)).shape == (0,)
    assert Tensor.zeros(0).searchsorted(Tensor([1.0, 2.0])).tolist() == [0, 0]
    with pytest.raises(ArgumentError, match="no such side"):
        Tensor(x).searchsorted(Tensor([1.0]), side="middle")
    with pytest.raises(ShapeError, match="leading axes differ"):
        Tensor.zeros(2, 3).searchsorted(Tensor.zeros(3, 3))


@pytest.mark.parametrize("kind", ["float32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(1,), (50,), (9, 11), (0,)])
def test_unique(kind: str, shape: tuple[int, ...]) -> None:
    x = sample(kind, shape)
    got = Tensor(x).unique(return_inverse=True, return_counts=True, return_index=True)
    want = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    np.testing.assert_array_equal(Tensor(x).unique().numpy(), want[0])
    if kind == "float32":
        other = Tensor(x).unique(equal_nan=False)
        np.testing.assert_array_equal(other.numpy(), np.unique(x, equal_nan=False))


def test_unique_slices_and_runs() -> None:
    x = rng.integers(0, 2, (20, 3)).astype(np.int32)
    for axis in (0, 1):
        got = Tensor(x).unique(return_inverse=True, return_counts=True, dim=axis)
        want = np.unique(x, return_inverse=True, return_counts=True, axis=axis)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
    runs = np.array([1, 1, 2, 2, 2, 1, 3], np.int32)
    ours = Tensor(runs).unique_consecutive(True, True)
    theirs = torch.unique_consecutive(torch.tensor(runs), True, True)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_bincount_and_histc() -> None:
    x = rng.integers(0, 9, 100).astype(np.int32)
    weights = rng.normal(size=100).astype(np.float32)
    np.testing.assert_array_equal(Tensor(x).bincount().numpy(), np.bincount(x))
    np.testing.assert_array_equal(Tensor(x).bincount(minlength=20).numpy(), np.bincount(x, minlength=20))
    got_sums = Tensor(x).bincount(Tensor(weights)).numpy()
    np.testing.assert_allclose(got_sums, np.bincount(x, weights), rtol=1e-4, atol=1e-5)
    assert Tensor.zeros(0, dtype="int32").bincount(minlength=2).tolist() == [0, 0]
    for low, high in ((0, 0), (-1, 1), (-0.5, 2)):
        got = Tensor(weights).histc(7, low, high).numpy()
        np.testing.assert_array_equal(got, torch.histc(torch.tensor(weights), 7, low, high).numpy())
    with pytest.raises(ArgumentError, match="negative"):
        Tensor([-1, 2]).bincount()
    with pytest.raises(DTypeError, match="whole numbers"):
        Tensor([1.0]).bincount()
    with pytest.raises(ArgumentError, match="no finite range"):
        Tensor([1.0]).histc(3, 2, 1)


def test_masked_select_and_nonzero() -> None:
    for shape in [(0,), (1,), (40,), (5, 8), (3, 1, 4)]:
        x = sample("float32", shape)
        x[rng.random(shape) < 0.4] = 0
        got = Tensor(x).nonzero().numpy()
        np.testing.assert_array_equal(got, np.argwhere(x))
        np.testing.assert_array_equal(Tensor(x).masked_select(Tensor(x != 0)).numpy(), x[x != 0])
    wide = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert wide.masked_select(Tensor([True, False, True])).tolist() == [0, 2, 3, 5]


def test_what_is_refused() -> None:
    n = Variable("n", 1, 8).bind(3)
    with pytest.raises(ShapeError, match="symbolic"):
        Tensor.arange(8).contiguous().realize()[:n].sort()
    with pytest.raises(ArgumentError, match="smaller k"):
        Tensor([1, 2]).topk(3)
    with pytest.raises(ArgumentError, match="share"):
        Tensor([1.0]).quantile(1.5)
    with pytest.raises(ArgumentError, match="no such way"):
        Tensor([1.0]).quantile(0.5, interpolation="cubic")
    with pytest.raises(ShapeError, match="the axis is empty"):
        Tensor.zeros(0).median()
