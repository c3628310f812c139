"""Running reductions against NumPy and PyTorch: axes, dtypes, special values, gradients of two orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import CLANG, GCC
from whit import Tensor, TinyJit

rng = np.random.default_rng(3)


@pytest.mark.parametrize("device", ["CPU", "PYTHON", CLANG, GCC])
@pytest.mark.parametrize("shape", [(1,), (17,), (3, 5), (2, 4, 3), (2, 1, 2)])
def test_values_along_every_axis(device: str, shape: tuple[int, ...]) -> None:
    x = rng.normal(size=shape).astype(np.float32)
    t, p = Tensor(x, device=device), torch.tensor(x)
    for axis in range(-1, len(shape)):
        np.testing.assert_allclose(t.cumsum(axis).numpy(), np.cumsum(x, axis), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(t.cumprod(axis).numpy(), np.cumprod(x, axis), rtol=1e-5, atol=1e-6)
        want_log = p.logcumsumexp(axis).numpy()
        np.testing.assert_allclose(t.logcumsumexp(axis).numpy(), want_log, rtol=1e-5, atol=1e-5)
        for name in ("cummax", "cummin"):
            got, want = getattr(t, name)(axis), getattr(torch, name)(p, axis)
            np.testing.assert_array_equal(got[0].numpy(), want.values.numpy())
            np.testing.assert_array_equal(got[1].numpy(), want.indices.numpy())


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "int64", "uint64", "float16", "float64", "bool"])
def test_dtypes(kind: str) -> None:
    x = rng.integers(0, 2 if kind == "bool" else 4, (3, 30)).astype(kind)
    wide = {"int8": "int32", "uint8": "uint32", "bool": "int32"}.get(kind, kind)
    got = Tensor(x).cumsum(1)
    assert got.dtype.name == wide
    np.testing.assert_array_equal(got.numpy(), np.cumsum(x, 1, dtype=wide))
    np.testing.assert_array_equal(Tensor(x).cummax(1)[0].numpy(), np.maximum.accumulate(x, 1))


def test_halves_are_added_in_float32() -> None:
    x = np.full(5000, 0.1, np.float16)
    want = np.cumsum(x.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(Tensor(x).cumsum().numpy(), want)


def test_special_values() -> None:
    rows = [[1, np.nan, 3, 0], [np.inf, 1, -np.inf, 2], [-np.inf, -np.inf, 5, np.inf], [5, 5, 4, 5]]
    x = np.array(rows, np.float32)
    t, p = Tensor(x), torch.tensor(x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(t.cumsum(1).numpy(), np.cumsum(x, 1))
        np.testing.assert_array_equal(t.cumprod(1).numpy(), np.cumprod(x, 1))
    np.testing.assert_allclose(t.logcumsumexp(1).numpy(), p.logcumsumexp(1).numpy(), rtol=1e-5)
    for name in ("cummax", "cummin"):
        got, want = getattr(t, name)(1), getattr(torch, name)(p, 1)
        np.testing.assert_array_equal(got[0].numpy(), want.values.numpy())
        np.testing.assert_array_equal(got[1].numpy(), want.indices.numpy())
    assert Tensor.zeros(0, 3).cumsum().shape == (0, 3)
    assert Tensor(2.0).cumsum().item() == 2.0


CASES: list[tuple[str, Any]] = [
    ("cumsum", lambda x, axis: x.cumsum(axis)),
    ("cumprod", lambda x, axis: x.cumprod(axis)),
    ("logcumsumexp", lambda x, axis: x.logcumsumexp(axis)),
    ("cummax", lambda x, axis: x.cummax(axis)[0]),
    ("cummin", lambda x, axis: x.cummin(axis)[0]),
]


@pytest.mark.parametrize(("name", "function"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_gradients_to_the_second_order(name: str, function: Any, axis: int, zeros: int) -> None:
    x = rng.normal(size=(6, 5))
    x[rng.integers(0, 6, zeros), rng.integers(0, 5, zeros)] = 0
    weight = np.cos(np.arange(30)).reshape(6, 5)
    t, p = Tensor(x), torch.tensor(x, requires_grad=True)
    made, other = function(t, axis), function(p, axis)
    (first,) = (made * made * Tensor(weight)).sum().gradient(t)
    (want,) = torch.autograd.grad((other * other * torch.tensor(weight)).sum(), p, create_graph=True)
    (second,) = (first * Tensor(weight.T.reshape(6, 5))).sum().gradient(t, materialize_grads=True)
    np.testing.assert_allclose(first.numpy(), want.detach().numpy(), rtol=1e-9, atol=1e-9)
    (want2,) = torch.autograd.grad((want * torch.tensor(weight.T.reshape(6, 5))).sum(), p)
    np.testing.assert_allclose(second.numpy(), want2.numpy(), rtol=1e-8, atol=1e-8)


def test_jit_and_long_rows() -> None:
    step = TinyJit(lambda t: t.cumsum())
    for _ in range(3):
        x = rng.integers(-9, 9, 100_000).astype(np.int32)
        np.testing.assert_array_equal(step(Tensor(x).realize()).numpy(), np.cumsum(x))
