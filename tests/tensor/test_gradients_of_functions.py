"""Gradients through indexing, products and the functions of neural networks, against PyTorch's."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensor.reference import evaluate
from whit.tensor import Tensor

rng = np.random.default_rng(2)


def values(*shape: int) -> Any:
    return rng.standard_normal(shape)


def check(mine: Callable[..., Any], torchs: Callable[..., Any], *arrays: Any) -> None:
    """Value and gradients of a random weighting of the result, for all float arguments."""
    ours = [Tensor(a) for a in arrays]
    theirs = [torch.from_numpy(np.asarray(a)).requires_grad_(np.asarray(a).dtype.kind == "f") for a in arrays]
    expected, got = torchs(*theirs), mine(*ours)
    weights = rng.standard_normal(tuple(expected.shape))
    (expected * torch.from_numpy(np.asarray(weights))).sum().backward()
    wanted = [o for o, t in zip(ours, theirs) if t.requires_grad]
    gradients = (got * Tensor(np.asarray(weights))).sum().gradient(*wanted)
    np.testing.assert_allclose(evaluate(got), expected.detach().numpy(), rtol=1e-7, atol=1e-9)
    for mine_, t in zip(gradients, [t for t in theirs if t.requires_grad], strict=True):
        np.testing.assert_allclose(evaluate(mine_), t.grad.numpy(), rtol=1e-6, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_convolutions(data: Any) -> None:
    groups, c, r = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(2)]
    stride = tuple(data.draw(st.integers(1, 4)) for _ in range(2))
    dilation = tuple(data.draw(st.integers(1, 2)) for _ in range(2))
    padding = tuple(data.draw(st.integers(0, 2)) for _ in range(2))
    size = [data.draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 7)) for k, d,
            p in zip(kernel, dilation, padding)]
    check(lambda x, w, b: x.conv2d(w, b, groups, stride, dilation, padding),
          lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups),
          values(2, groups * c, *size), values(groups * r, c, *kernel), values(groups * r))


SEEN = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 1, 0, 1]], bool)


@pytest.mark.parametrize("mine, torchs, arrays", [
    (lambda x, w: x.conv_transpose2d(w, stride=2, padding=1), lambda x,
     w: F.conv_transpose2d(x, w, stride=2, padding=1),
     (values(1, 2, 3, 4), values(2, 3, 3, 2))),
    (lambda x: x.max_pool2d(2), lambda x: F.max_pool2d(x, 2), (values(1, 2, 5, 6),)),
    (lambda x: x.max_pool2d(3, 2, 1, 1), lambda x: F.max_pool2d(x, 3, 2, 1), (values(1, 2, 6, 7),)),
    (lambda x: x.avg_pool2d(3, 2, 1, 1, False, False),
     lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (values(1, 2, 6, 7),)),
    (lambda x: x.softmax(1), lambda x: x.softmax(1), (values(3, 4, 2),)),
    (lambda x: x.log_softmax(), lambda x: x.log_softmax(-1), (values(3, 4),)),
    (lambda x: x.layernorm(), lambda x: F.layer_norm(x, (5,)), (values(3, 5),)),
    (lambda x, w: x.rms_norm(w), lambda x, w: F.rms_norm(x, (5,), w, 1e-6), (values(3, 5), values(5))),
    (lambda x: x.normalize(), lambda x: F.normalize(x), (values(3, 5),)),
    (lambda q, k, v: q.scaled_dot_product_attention(k, v, is_causal=True),
     lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
     (values(2, 4, 3), values(2, 4, 3), values(2, 4, 5))),
    (lambda q, k, v: q.scaled_dot_product_attention(k, v, Tensor(SEEN)),
     lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.from_numpy(SEEN)),
     (values(2, 4, 3), values(2, 4, 3), values(2, 4, 5))),
    (lambda a, b: a @ b, lambda a, b: a @ b, (values(2, 1, 3, 4), values(5, 4, 2))),
    (lambda a, b: a @ b, lambda a, b: a @ b, (values(4), values(5, 4, 2))),
    (lambda a, b: Tensor.einsum("iij,kj->ki", a, b), lambda a, b: torch.einsum("iij,kj->ki", a, b),
     (values(3, 3, 4), values(2, 4))),
    (lambda x: x.interpolate((5, 7)), lambda x: F.interpolate(x, (5, 7), mode="bilinear"),
     (values(1, 2, 3, 4),)),
    (lambda x: x.interpolate((5, 7), "cubic"), lambda x: F.interpolate(x, (5, 7), mode="bicubic"),
     (values(1, 2, 3, 4),)),
    (lambda x: x.interpolate((2, 5), "area"), lambda x: F.interpolate(x, (2, 5), mode="area"),
     (values(1, 2, 3, 4),)),
    (lambda x: x.interpolate((6, 4), "nearest"), lambda x: F.interpolate(x, (6, 4)), (values(1, 2, 3, 4),)),
])
def test_functions(mine: Any, torchs: Any, arrays: Any) -> None:
    check(mine, torchs, *arrays)


LABELS = np.array([1, 0, 4])


@pytest.mark.parametrize("mine, torchs", [
    (lambda x: x.cross_entropy(Tensor(LABELS), label_smoothing=0.1),
     lambda x: F.cross_entropy(x, torch.from_numpy(LABELS), label_smoothing=0.1)),
    (lambda x: x.cross_entropy(Tensor(LABELS), "none", ignore_index=0),
     lambda x: F.cross_entropy(x, torch.from_numpy(LABELS), reduction="none", ignore_index=0)),
    (lambda x: x.log_softmax().nll_loss(Tensor(LABELS)),
     lambda x: F.cross_entropy(x, torch.from_numpy(LABELS))),
    (lambda x: x.binary_crossentropy_logits(Tensor(np.full((3, 5), 0.3))),
     lambda x: F.binary_cross_entropy_with_logits(x, torch.full((3, 5), 0.3, dtype=torch.double))),
    (lambda x: x.huber_loss(Tensor(np.zeros((3, 5)))), lambda x: F.huber_loss(x, torch.zeros(3, 5).double())),
])
def test_losses(mine: Any, torchs: Any) -> None:
    check(mine, torchs, values(3, 5))


INDEX = np.array([[2, 0, 2], [1, 1, -1]])


@pytest.mark.parametrize("mine, torchs", [
    (lambda x: x[:, 1::2], lambda x: x[:, 1::2]),
    (lambda x: x[::-1, -2], lambda x: x.flip(0)[:, -2]),
    (lambda x: x[Tensor(INDEX)], lambda x: x[torch.from_numpy(INDEX)]),
    (lambda x: x[Tensor(INDEX), :, Tensor([0, 1, 1])], lambda x: x[torch.from_numpy(INDEX), :, [0, 1, 1]]),
    (lambda x: x.gather(1, Tensor(INDEX[None] % 3)),
     lambda x: x.gather(1, torch.from_numpy(INDEX[None] % 3))),
    (lambda x: x.index_add(0, Tensor([1, 1]), x[:2]), lambda x: x.index_add(0, torch.tensor([1, 1]), x[:2])),
    (lambda x: x.masked_fill(x > 0, 1.0), lambda x: x.masked_fill(x > 0, 1.0)),
])
def test_indexing(mine: Any, torchs: Any) -> None:
    check(mine, torchs, values(3, 4, 5))


@pytest.mark.parametrize("place", [(slice(None), 1), (slice(0, 3, 2), slice(1, 3)), ([2, 0],),
                                   (..., [0, 1, 0], None)])
@pytest.mark.parametrize("lazy", [False, True])
def test_writes(place: Any, lazy: bool) -> None:
    """The old value keeps its gradient where it was not overwritten; the new one gets it where it was written
    last."""
    x, shape = values(3, 4), np.zeros((3, 4))[place].shape
    v = values(*shape)

    def write(x: Any, v: Any) -> Any:
        y = Tensor((x * 1.0).uop) if lazy else Tensor(x.uop)
        y[place] = v
        return y

    winner = np.full((3, 4), -1)
    winner[place] = np.arange(v.size).reshape(shape)

    def torchs(x: Any, v: Any) -> Any:
        picked = v.reshape(-1)[torch.from_numpy(np.maximum(winner, 0))]
        return torch.where(torch.from_numpy(winner >= 0), picked, x)

    check(write, torchs, x, v)


@pytest.mark.parametrize("mine, torchs, shapes", [
    (lambda x, w: x.conv2d(w, padding=1), lambda x, w: F.conv2d(x, w, padding=1),
     [(1, 2, 4, 3), (2, 2, 3, 2)]),
    (lambda x: x.avg_pool2d(2).square(), lambda x: F.avg_pool2d(x, 2).square(), [(1, 2, 4, 5)]),
    (lambda x: x.softmax(), lambda x: x.softmax(-1), [(3, 4)]),
    (lambda x: x.layernorm(), lambda x: F.layer_norm(x, (4,)), [(3, 4)]),
    (lambda a, b: a @ b, lambda a, b: a @ b, [(2, 3), (3, 4)]),
    (lambda x: x.cross_entropy(Tensor(LABELS)), lambda x: F.cross_entropy(x, torch.from_numpy(LABELS)),
     [(3, 5)]),
    (lambda x: x[Tensor(INDEX)].square(), lambda x: x[torch.from_numpy(INDEX)].square(), [(3, 2)]),
])
def test_second_derivatives(mine: Any, torchs: Any, shapes: list[tuple[int, ...]]) -> None:
    arrays = [values(*shape) for shape in shapes]
    ours, theirs = [Tensor(a) for a in arrays], [torch.from_numpy(a).requires_grad_() for a in arrays]
    first = torch.autograd.grad(torchs(*theirs).square().sum(), theirs, create_graph=True)
    wanted = torch.autograd.grad(sum((g * g).sum() for g in first), theirs)
    total = mine(*ours).square().sum()
    squares = [(g * g).sum() for g in total.gradient(*ours)]
    for got, expected in zip(sum(squares[1:], squares[0]).gradient(*ours), wanted, strict=True):
        np.testing.assert_allclose(evaluate(got), expected.numpy(), rtol=1e-6, atol=1e-9)
