"""Grids of positions, folds, tables, alignments, pools against PyTorch in float64: values and gradients."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whit import Tensor
from whit.helpers import ArgumentError, DTypeError, ShapeError

F = torch.nn.functional


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def compare(ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Values, and the gradients of a weighted sum, with respect to every array."""
    mine = [Tensor(a, requires_grad=True) for a in arrays]
    other = [torch.tensor(a, requires_grad=True) for a in arrays]
    y, z = ours(*mine), theirs(*other)
    assert y.shape == tuple(z.shape)
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-9, atol=1e-11)
    weights = normal(*z.shape, seed=9)
    (y * Tensor(weights)).sum().backward()
    (z * torch.tensor(weights)).sum().backward()
    for a, b in zip(mine, other, strict=True):
        assert a.grad is not None and b.grad is not None
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 1, 1, 3), (2, 1, 3, 2, 4)])
def test_affine_grid(size: tuple[int, ...], align: bool) -> None:
    rank = len(size) - 2
    compare(lambda t: t.affine_grid(size, align), lambda t: F.affine_grid(t, list(size), align_corners=align),
            normal(size[0], rank, rank + 1))


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", pytest.param("bicubic", marks=pytest.mark.slow)])
def test_grid_sample(mode: str, padding: str, align: bool) -> None:
    compare(lambda x, g: x.grid_sample(g, mode, padding, align),
            lambda x, g: F.grid_sample(x, g, mode, padding, align_corners=align),
            normal(2, 3, 4, 5), normal(2, 3, 7, 2, seed=1) * 1.3)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_nearest_and_volumes(padding: str) -> None:
    x, g = normal(2, 2, 3, 4), normal(2, 3, 5, 2, seed=1)
    compare(lambda x: x.grid_sample(Tensor(g), "nearest", padding),
            lambda x: F.grid_sample(x, torch.tensor(g), "nearest", padding, align_corners=False), x)
    compare(lambda x, g: x.grid_sample(g, "bilinear", padding),
            lambda x, g: F.grid_sample(x, g, "bilinear", padding, align_corners=False),
            normal(1, 2, 3, 4, 2), normal(1, 2, 2, 3, 3, seed=2))


def test_grid_sample_never_reads_what_lies_outside() -> None:
    x = Tensor([[[[np.inf, 1.0]]]])
    assert x.grid_sample(Tensor([[[[5.0, 5.0]]]])).tolist() == [[[[0.0]]]]


@pytest.mark.parametrize(("size", "kernel", "dilation", "padding", "stride"), [
    ((4, 5), (2, 3), 1, 0, 1), ((7, 8), 3, 1, 1, 2), ((9, 7), (3, 2), (2, 1), (1, 0), (1, 3)),
    ((4, 4), 2, 1, 0, 2)])
def test_fold(size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> None:
    image = torch.zeros(2, 3, *size)
    windows = F.unfold(image, kernel, dilation, padding, stride)
    args = (size, kernel, dilation, padding, stride)
    compare(lambda x: x.fold(*args), lambda x: F.fold(x, *args), normal(*windows.shape))
    compare(lambda x: x.fold(*args), lambda x: F.fold(x, *args), normal(*windows.shape[1:]))


def test_embedding() -> None:
    idx = np.array([[0, 2], [2, 1]])
    for pad in (None, 2):
        compare(lambda w, pad=pad: Tensor(idx).embedding(w, pad),
                lambda w, pad=pad: F.embedding(torch.tensor(idx), w, pad), normal(4, 3))


CTC = [([6, 6, 6], [3, 2, 1]), ([6, 4, 1], [3, 1, 0]), ([5, 3, 6], [0, 3, 2])]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("ends", "counts"), CTC)
def test_ctc_loss(ends: list[int], counts: list[int], reduction: str) -> None:
    targets = np.array([[1, 1, 2], [3, 4, 1], [2, 1, 2]])
    lengths = np.array(ends), np.array(counts)
    compare(lambda x: x.log_softmax(2).ctc_loss(Tensor(targets), *map(Tensor, lengths), reduction=reduction),
            lambda x: F.ctc_loss(x.log_softmax(2), torch.tensor(targets), *map(torch.tensor, lengths),
                                 reduction=reduction), normal(6, 3, 5))


def test_ctc_loss_of_what_cannot_be() -> None:
    targets, ends, counts = np.array([[1, 1, 2], [1, 2, 3]]), np.array([3, 5]), np.array([3, 2])
    x = normal(5, 2, 4)
    lost = Tensor(x).log_softmax(2).ctc_loss(Tensor(targets), Tensor(ends), Tensor(counts), reduction="none")
    assert lost[0].item() == np.inf
    compare(lambda x: x.log_softmax(2).ctc_loss(Tensor(targets), Tensor(ends), Tensor(counts), blank=3,
                                                zero_infinity=True),
            lambda x: F.ctc_loss(x.log_softmax(2), torch.tensor(targets), torch.tensor(ends),
                                 torch.tensor(counts), blank=3, zero_infinity=True), x)


@pytest.mark.parametrize("rank", [1, 3])
def test_pools(rank: int) -> None:
    x = normal(2, 3, *(7, 5, 6)[:rank])
    for name, args in (("avg_pool", (2, 1, 1)), ("max_pool", (3, 2, 1)), ("adaptive_avg_pool", (3,)),
                       ("adaptive_max_pool", (2,))):
        compare(lambda x, n=name, a=args: getattr(x, f"{n}{rank}d")(*a),
                lambda x, n=name, a=args: getattr(F, f"{n}{rank}d")(x, *a), x)


def test_bad_input() -> None:
    image, grid = Tensor.ones(1, 1, 2, 2), Tensor.zeros(1, 1, 1, 2)
    for kind, call in (
        (ShapeError, lambda: image.grid_sample(Tensor.zeros(1, 1, 1, 3))),
        (ArgumentError, lambda: image.grid_sample(grid, "cubic")),
        (ArgumentError, lambda: image.grid_sample(grid, padding_mode="mirror")),
        (DTypeError, lambda: Tensor.ones(1, 1, 2, 2, dtype="int32").grid_sample(grid)),
        (ShapeError, lambda: image.affine_grid((1, 1, 2, 2))),
        (ShapeError, lambda: Tensor.ones(1, 4, 3).fold((3, 3), 2)),
        (ArgumentError, lambda: Tensor.ones(1, 4, 4).fold((3, 3), 0)),
        (DTypeError, lambda: Tensor([1.0]).embedding(Tensor.ones(2, 2))),
        (ShapeError, lambda: Tensor([1]).embedding(Tensor.ones(2))),
        (ShapeError, lambda: Tensor.ones(2, 2).ctc_loss(Tensor([[1]]), [1], [1])),
        (ArgumentError, lambda: Tensor.ones(2, 1, 2).ctc_loss(Tensor([[1]]), [1], [1], blank=2)),
    ):
        with pytest.raises(kind):
            call()
