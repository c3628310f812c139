"""Random numbers: distributions, repeatability, independence of order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.tensor.reference import evaluate
from whit import Tensor, dtypes
from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.tensor import random as random_module
from whit.tensor import storage

N = 4000


def setup_function() -> None:
    Tensor.manual_seed(1234)


def test_order_of_evaluation_does_not_matter() -> None:
    a, b = Tensor.rand(5), Tensor.rand(5)
    first = evaluate(b).tolist(), evaluate(a).tolist()
    Tensor.manual_seed(1234)
    a, b = Tensor.rand(5), Tensor.rand(5)
    assert (evaluate(a).tolist(), evaluate(b).tolist()) == first[::-1]
    assert first[0] != first[1]
    Tensor.manual_seed(1235)
    assert evaluate(Tensor.rand(5)).tolist() != first[1]


def test_threefry_vector() -> None:
    """Salmon et al. 2011, known-answer file of the reference implementation: threefry2x32, 20 rounds."""
    from whit.uop import Ops, UOp

    for counter, key, want in (
        (0, 0, (0x6B200159, 0x99BA4EFE)),
        ((1 << 64) - 1, (1 << 64) - 1, (0x1CB996FC, 0xBB002BE7)),
        (0x85A308D3243F6A88, 0x0370734413198A2E, (0xC4923A9C, 0x483DF7A0)),
    ):
        node = UOp.const(counter, dtypes.uint64).alu(Ops.THREEFRY, UOp.const(key, dtypes.uint64))
        word = int(evaluate(Tensor._wrap(node)))
        assert (word & 0xFFFFFFFF, word >> 32) == want


def test_key_buffers() -> None:
    t = Tensor.rand(7)
    buffers = [node for node in t.uop.toposort() if node in random_module.key_buffers]
    assert len(buffers) == 1
    assert random_module.key_buffers[buffers[0]] == (1234, 7)
    assert bytes(storage.peek(buffers[0]) or b"") == random_module.key_bytes(1234, 0)
    assert random_module.next_key(3) == (1234, 7) and random_module.next_key(1) == (1234, 10)


def test_uniform() -> None:
    x = evaluate(Tensor.rand(N))
    assert x.dtype == np.float32 and x.min() >= 0 and x.max() < 1
    assert abs(x.mean() - 0.5) < 0.02 and abs(x.var() - 1 / 12) < 0.005
    counts, _ = np.histogram(x, 10, (0, 1))
    assert ((counts - N / 10) ** 2 / (N / 10)).sum() < 33  # chi-square, 9 degrees of freedom, 1e-4
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.06
    assert np.all(x * 2**24 == np.floor(x * 2**24))
    for name in ("float16", "bfloat16", "float64"):
        y = evaluate(Tensor.rand(500, dtype=name)).astype(np.float64)
        assert y.min() >= 0 and y.max() < 1 and abs(y.mean() - 0.5) < 0.06
    y = evaluate(Tensor.uniform(500, low=-3.0, high=1.0))
    assert y.min() >= -3 and y.max() < 1 and abs(y.mean() + 1) < 0.2


def test_normal() -> None:
    x = evaluate(Tensor.randn(N)).astype(np.float64)
    assert np.all(np.isfinite(x)) and abs(x.mean()) < 0.06 and abs(x.std() - 1) < 0.05
    assert abs((x**3).mean()) < 0.2 and abs((x**4).mean() - 3) < 0.5
    grid = np.sort(x)
    cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in grid])
    assert np.abs(cdf - (np.arange(N) + 0.5) / N).max() < 0.035  # Kolmogorov-Smirnov, 1e-4
    y = evaluate(Tensor.normal(N, mean=3.0, std=0.5))
    assert abs(y.mean() - 3) < 0.04 and abs(y.std() - 0.5) < 0.03


def test_integers() -> None:
    x = evaluate(Tensor.randint(N, low=-3, high=4))
    assert x.dtype == np.int32 and set(np.unique(x)) == set(range(-3, 4))
    assert ((np.bincount(x + 3) - N / 7) ** 2 / (N / 7)).sum() < 28
    big = evaluate(Tensor.randint(50, low=-(2**62), high=2**62, dtype="int64"))
    assert big.min() < -(2**60) and big.max() > 2**60
    assert evaluate(Tensor.randint(100, low=0, high=256, dtype="uint8")).dtype == np.uint8
    assert Tensor.random_bits(3).dtype is dtypes.uint32
    with pytest.raises(ArgumentError):
        Tensor.randint(3, low=2, high=2)
    with pytest.raises(DTypeError):
        Tensor.randint(3, low=0, high=300, dtype="uint8")
    with pytest.raises(DTypeError):
        Tensor.rand(3, dtype="int32")


def test_initialisers() -> None:
    for name, bound in (
        ("scaled_uniform", 1 / math.sqrt(40 * 25)),
        ("glorot_uniform", math.sqrt(6 / 65)),
        ("kaiming_uniform", math.sqrt(6 / (1.0001 * 25))),
    ):
        x = evaluate(getattr(Tensor, name)(40, 25))
        assert np.abs(x).max() <= bound and np.abs(x).max() > bound * 0.95, name
    x = evaluate(Tensor.kaiming_normal(40, 25))
    assert abs(x.std() - math.sqrt(2 / (1.0001 * 25))) < 0.03
    with pytest.raises(ShapeError):
        Tensor.glorot_uniform()


def test_permutations_and_draws() -> None:
    x = evaluate(Tensor.randperm(50))
    assert sorted(x.tolist()) == list(range(50)) and x.tolist() != list(range(50))
    weights = np.array([1.0, 0.0, 3.0, 6.0], np.float32)
    draws = evaluate(Tensor(weights).multinomial(2000, replacement=True))
    share = np.bincount(draws, minlength=4) / 2000
    np.testing.assert_allclose(share, weights / 10, atol=0.05)
    assert share[1] == 0
    rows = evaluate(Tensor(np.ones((30, 5), np.float32)).multinomial(5))
    assert all(sorted(row) == [0, 1, 2, 3, 4] for row in rows.tolist())
    with pytest.raises(ArgumentError, match="replacement"):
        Tensor(weights).multinomial(5)


def test_shapes() -> None:
    assert (
        Tensor.rand().shape == ()
        and Tensor.rand(0, 3).shape == (0, 3)
        and Tensor.randn((2, 3)).shape == (2, 3)
    )
    assert Tensor.zeros(2, 2).rand_like().shape == (2, 2) and Tensor.zeros(3).randn_like().shape == (3,)
    assert evaluate(Tensor.rand(0)).shape == (0,)
