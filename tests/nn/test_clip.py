"""Norms of gradients and clipping against torch.nn.utils."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whit import GlobalCounters, Tensor, TinyJit
from whit.helpers import ArgumentError, NumericError
from whit.nn.clip import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm, nonfinite
from whit.nn.optim import SGD

SHAPES = [(4, 5), (5,), (), (0, 3), (2, 3, 7)]
ORDERS = [1, 2, 3, 0.5, 2.5, math.inf]


def values(seed: int = 0, dtype: Any = np.float32) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [np.asarray(generator.normal(size=shape) * 3, dtype) for shape in SHAPES]


def both(dtype: Any = np.float32, realized: bool = True) -> tuple[list[Tensor], list[Any]]:
    """Parameters of equal gradients in whit and in PyTorch; the third one has none."""
    ours = [Tensor(v, requires_grad=True) for v in values(0, dtype)]
    theirs = [torch.tensor(v, requires_grad=True) for v in values(0, dtype)]
    for i, (a, b, grad) in enumerate(zip(ours, theirs, values(1, dtype), strict=True)):
        if i != 2:
            a.grad, b.grad = Tensor(grad.copy()) if realized else Tensor(grad.copy()) * 1, torch.tensor(grad)
    return ours, theirs


def same_grads(ours: list[Tensor], theirs: list[Any], rtol: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert a.grad.dtype is a.dtype
            np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=rtol)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ORDERS)
def test_total_norm(order: float, dtype: Any) -> None:
    ours = get_total_norm([Tensor(v) for v in values(0, dtype)], order)
    theirs = torch.nn.utils.get_total_norm([torch.tensor(v) for v in values(0, dtype) if v.size], order)
    assert ours.shape == () and ours.dtype.itemsize == np.dtype(dtype).itemsize
    np.testing.assert_allclose(ours.item(), theirs.item(), rtol=1e-14 if dtype is np.float64 else 2e-6)


@pytest.mark.parametrize("realized", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("limit", [0.0, 0.7, 1e6])
@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_clip_by_norm(order: float, limit: float, dtype: Any, realized: bool) -> None:
    ours, theirs = both(dtype, realized)
    kept = [p.grad for p in ours]
    rtol = 1e-13 if dtype is np.float64 else 3e-6
    norm = clip_grad_norm_(ours, limit, order)
    want = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], limit, order)
    np.testing.assert_allclose(norm.item(), want.item(), rtol=rtol)
    same_grads(ours, theirs, rtol)
    assert all(p.grad is grad for p, grad in zip(ours, kept, strict=True))  # changed in place


@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_clip_by_value(limit: float) -> None:
    ours, theirs = both()
    clip_grad_value_(ours, limit)
    torch.nn.utils.clip_grad_value_(theirs, limit)
    same_grads(ours, theirs, 0)


def test_clip_with_a_norm_that_is_known() -> None:
    ours, theirs = both()
    clip_grads_with_norm_(ours, 2.0, Tensor([5.0]))
    torch.nn.utils.clip_grads_with_norm_(theirs, 2.0, torch.tensor(5.0))
    same_grads(ours, theirs, 1e-6)


def test_one_tensor_is_enough_and_no_gradient_is_norm_zero() -> None:
    w = Tensor([3.0, 4.0], requires_grad=True)
    assert clip_grad_norm_(w, 1.0).item() == 0.0 and get_total_norm([]).item() == 0.0
    w.grad = Tensor([3.0, 4.0])
    assert clip_grad_norm_(w, 10.0).item() == 5.0 and w.grad.tolist() == [3.0, 4.0]
    clip_grad_value_(w, 3.5)
    assert w.grad.tolist() == [3.0, 3.5]


def test_a_gradient_that_two_parameters_share_counts_once() -> None:
    grad = Tensor([3.0, 4.0])
    a, b = Tensor([1.0, 2.0]), Tensor([1.0, 2.0])
    a.grad = b.grad = grad
    assert clip_grad_norm_([a, b, a], 1.0).item() == 5.0
    np.testing.assert_allclose(grad.numpy(), [0.6, 0.8], rtol=1e-6)


def test_halves_are_summed_in_float32() -> None:
    """300² is beyond float16."""
    w = Tensor([0.0, 0.0], dtype="float16", requires_grad=True)
    w.grad = Tensor([300.0, 400.0], dtype="float16")
    norm = clip_grad_norm_([w], 5.0)
    assert norm.dtype.name == "float32" and norm.item() == 500.0
    assert w.grad.dtype.name == "float16" and w.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("order", [1, 2, math.inf])
def test_norms_that_are_not_finite(bad: float, order: float) -> None:
    ours, theirs = both()
    for p, grad in ((ours, Tensor), (theirs, torch.tensor)):
        p[1].grad = grad([1.0, bad, 2.0, 3.0, 4.0])  # type: ignore[operator]
    before = [p.grad.numpy() for p in ours if p.grad is not None]
    with pytest.raises(NumericError, match="the norm is"):
        clip_grad_norm_(ours, 1.0, order, error_if_nonfinite=True)
    for a, b in zip(before, [p.grad.numpy() for p in ours if p.grad is not None], strict=True):
        np.testing.assert_array_equal(a, b)
    norm = clip_grad_norm_(ours, 1.0, order)
    want = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], 1.0, order)
    np.testing.assert_equal(norm.item(), want.item())
    same_grads(ours, theirs, 1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38, 0.0])
def test_whether_something_is_not_finite(bad: float) -> None:
    found = nonfinite([Tensor([1.0, 2.0]), Tensor([[1.0], [bad]])])
    assert found.item() == (not math.isfinite(bad)) and nonfinite([]).item() is False


def test_a_few_kernels_for_sixty_gradients() -> None:
    shapes = [(3 + i, 5 + 2 * i) for i in range(30)] + [(3 + i,) for i in range(30)]
    grads = [Tensor(np.ones(shape, np.float32)).realize() for shape in shapes]
    for order in (1, 2, 3, math.inf):
        GlobalCounters.reset()
        norm = get_total_norm(grads, order)
        assert GlobalCounters.kernel_count == 0  # lazily
        norm.realize()
        assert GlobalCounters.kernel_count <= 6


def test_clipped_steps_are_captured() -> None:
    """Whole steps replay, with the norm as a result."""
    start = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
    ours, theirs = Tensor(start), torch.tensor(start, requires_grad=True)
    optimizer, toptimizer = SGD([ours], lr=0.5), torch.optim.SGD([theirs], lr=0.5)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (x @ ours).square().sum().backward()
        norm = clip_grad_norm_([ours], 1.0)
        optimizer.step()
        return norm.realize()

    for i in range(5):
        x = np.random.default_rng(i).normal(size=(2, 4)).astype(np.float32)
        norm = step(Tensor(x).realize())
        toptimizer.zero_grad()
        (torch.tensor(x) @ theirs).square().sum().backward()
        want = torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        toptimizer.step()
        np.testing.assert_allclose(norm.item(), want.item(), rtol=1e-5)
        np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: clip_grad_norm_([Tensor([1.0])], -1.0), "a number from 0"),
        (lambda: clip_grad_norm_([Tensor([1.0])], math.nan), "a number from 0"),
        (lambda: clip_grad_norm_([Tensor([1.0])], "1"), "a number from 0"),  # type: ignore[arg-type]
        (lambda: clip_grad_norm_([Tensor([1.0])], 1.0, 0), "an order above 0"),
        (lambda: clip_grad_norm_([Tensor([1.0])], 1.0, "two"), "an order above 0"),  # type: ignore[arg-type]
        (lambda: clip_grad_norm_([1.0], 1.0), "float tensors"),  # type: ignore[list-item]
        (lambda: clip_grad_norm_(3.0, 1.0), "float tensors"),  # type: ignore[arg-type]
        (lambda: get_total_norm([Tensor([1])]), "float tensors"),
        (lambda: clip_grad_value_([Tensor([1.0])], -0.1), "a number from 0"),
        (lambda: clip_grads_with_norm_([Tensor([1.0])], 1.0, 3.0), "one element"),  # type: ignore[arg-type]
        (lambda: clip_grads_with_norm_([Tensor([1.0])], 1.0, Tensor([1.0, 2.0])), "one element"),
    ],
)
def test_refused(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        call()
