"""The extension for linear algebra against array-api-strict, and by what defines the results."""

from __future__ import annotations

import math
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest

import whit.array_api as xp
from tests.tensor.reference import DEVICE
from whit.helpers import WhitError

pytestmark = pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")
TOLERANCE = {"float32": 2e-4, "float64": 1e-9}


def matrices(shape: tuple[int, ...], dtype: str) -> Any:
    return np.random.default_rng(shape[-1]).normal(size=shape).astype(dtype)


def close(got: Any, want: Any, dtype: str) -> None:
    want = np.asarray(want._array if hasattr(want, "_array") else want)
    assert got.dtype.name == dtype and got.shape == want.shape
    np.testing.assert_allclose(got.numpy(), want, TOLERANCE[dtype], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_square_matrices(dtype: str) -> None:
    x = matrices((2, 4, 4), dtype)
    positive = (x @ x.swapaxes(-1, -2) + np.eye(4)).astype(dtype)
    mine, theirs = xp.asarray(x), strict.asarray(x)
    for upper in (False, True):
        got = xp.linalg.cholesky(xp.asarray(positive), upper=upper)
        close(got, strict.linalg.cholesky(strict.asarray(positive), upper=upper), dtype)
    close(xp.linalg.det(mine), strict.linalg.det(theirs), dtype)
    close(xp.linalg.inv(mine), strict.linalg.inv(theirs), dtype)
    for got, want in zip(xp.linalg.slogdet(mine), strict.linalg.slogdet(theirs)):
        close(got, want, dtype)
    for n in (0, 1, 3, -2):
        close(xp.linalg.matrix_power(mine, n), strict.linalg.matrix_power(theirs, n), dtype)
    for b in (matrices((2, 4, 3), dtype), matrices((4, 1), dtype), matrices((4,), dtype)):
        close(xp.linalg.solve(mine, xp.asarray(b)), strict.linalg.solve(theirs, strict.asarray(b)), dtype)
    values, vectors = xp.linalg.eigh(xp.asarray(positive))
    close(values, strict.linalg.eigvalsh(strict.asarray(positive)), dtype)
    close(xp.linalg.eigvalsh(xp.asarray(positive)), values.numpy(), dtype)
    close((vectors * xp.expand_dims(values, axis=-2)) @ vectors.mT, positive, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5)])
def test_of_any_matrices(shape: tuple[int, ...], dtype: str) -> None:
    x = matrices(shape, dtype)
    mine, theirs = xp.asarray(x), strict.asarray(x)
    for mode in ("reduced", "complete"):
        q, r = xp.linalg.qr(mine, mode=mode)
        close(q @ r, x, dtype)
        assert q.shape == strict.linalg.qr(theirs, mode=mode).Q.shape
        close(q.mT @ q, np.broadcast_to(np.eye(q.shape[-1]), (*shape[:-2], *[q.shape[-1]] * 2)), dtype)
    for full in (False, True):
        u, s, vh = xp.linalg.svd(mine, full_matrices=full)
        k = s.shape[-1]
        close((u[..., :k] * xp.expand_dims(s, axis=-2)) @ vh[..., :k, :], x, dtype)
        assert u.shape == strict.linalg.svd(theirs, full_matrices=full).U.shape
    close(xp.linalg.svdvals(mine), strict.linalg.svdvals(theirs), dtype)
    close(xp.linalg.pinv(mine), strict.linalg.pinv(theirs), dtype)
    assert xp.linalg.matrix_rank(mine).tolist() == np.linalg.matrix_rank(x).tolist()
    for ord in ("fro", "nuc", 2, -2, 1, math.inf):
        for keep in (False, True):
            got = xp.linalg.matrix_norm(mine, ord=ord, keepdims=keep)
            close(got, strict.linalg.matrix_norm(theirs, ord=ord, keepdims=keep), dtype)


def test_refuses_by_name() -> None:
    x = xp.ones((2, 3))
    for name in ("cholesky", "det", "eigh", "inv", "slogdet"):
        with pytest.raises(WhitError, match="square"):
            getattr(xp.linalg, name)(x)
    for name in ("qr", "svd", "pinv", "matrix_rank", "matrix_norm"):
        with pytest.raises(WhitError, match="matri"):
            getattr(xp.linalg, name)(x[0])
    low = xp.asarray([[1.0, 2.0], [2.0, 4.0]])
    assert xp.linalg.matrix_rank(low).item() == 1
    assert xp.linalg.matrix_rank(xp.eye(3), rtol=2.0).item() == 0
