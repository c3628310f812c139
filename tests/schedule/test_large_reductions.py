"""Long reductions to a few elements: two kernels, the first shared by all threads, whatever the length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from whit import Tensor
from whit.codegen.heuristics import choose
from whit.codegen.lower import prepare
from whit.codegen.opts import OptKind
from whit.runtime.device import Device
from whit.schedule import schedule
from whit.uop import UOp

LENGTHS = [1 << 20, 1_000_003, 3 * 333_667, 700_001]  # a power of two, primes, three times a prime


def kernels(value: Tensor) -> list[UOp]:
    plan, _, _ = schedule([value.uop])
    return [call.ast for call in plan.calls if call.ast is not None]


@pytest.mark.parametrize("length", LENGTHS)
def test_threads_share_sums_of_any_length(length: int) -> None:
    found = kernels(Tensor.empty(length).sum())
    assert len(found) == 2
    target = Device.get("CPU").target._replace(threads=4)
    first = [opt for opt in choose(prepare(found[0]), target) if opt.kind is OptKind.THREAD]
    assert first and first[0].amount % 4 == 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_values(length: int, name: str) -> None:
    data = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    data[-1] = {"sum": 5.0, "max": 9.0, "min": -9.0}[name]  # the last element counts
    got = getattr(Tensor(data), name)().item()
    want = getattr(data.astype(np.float64), name)()
    assert got == pytest.approx(want, rel=1e-5, abs=1e-2 if name == "sum" else 0)


def test_integers_are_exact_and_nan_is_kept() -> None:
    numbers = np.random.default_rng(0).integers(-(10**12), 10**12, 1_000_003)
    assert Tensor(numbers).sum().item() == numbers.sum()
    values = np.zeros(1_000_003, np.float32)
    values[-2] = np.nan
    assert np.isnan(Tensor(values).max().item()) and np.isnan(Tensor(values).sum().item())


@pytest.mark.parametrize(("shape", "axis"), [((3, 300_007), 1), ((300_007, 3), 0), ((2, 1009, 1013), (1, 2))])
def test_a_few_sums(shape: tuple[int, ...], axis: Any) -> None:
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    got = Tensor(data).sum(axis).numpy()
    np.testing.assert_allclose(got, data.astype(np.float64).sum(axis), rtol=1e-4, atol=1e-2)


def test_gradients_pass_through() -> None:
    data = np.random.default_rng(2).standard_normal(500_009).astype(np.float32)
    x = Tensor(data, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), 2 * data, rtol=1e-6)
