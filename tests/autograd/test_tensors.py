"""`backward` and `gradient` of tensors: what is filled, accumulated and refused. The truth is PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whit import GlobalCounters, Tensor, Variable
from whit.helpers import ArgumentError, DTypeError, ShapeError


def close(got: Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None and want is not None
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=2e-5, atol=1e-6)


def pair(*shape: int, seed: int = 0) -> tuple[Tensor, torch.Tensor]:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)


def test_backward_fills_grad() -> None:
    (x, tx), (w, tw) = pair(4, 3), pair(3, 5, seed=1)
    (x @ w).relu().square().mean().backward()
    (tx @ tw).relu().square().mean().backward()
    close(x.grad, tx.grad)
    close(w.grad, tw.grad)


def test_gradients_accumulate() -> None:
    x, tx = pair(3)
    for factor in (1.0, 2.0):
        (x.exp() * factor).sum().backward()
        (tx.exp() * factor).sum().backward()
    close(x.grad, tx.grad)


def test_backward_of_several_values_with_a_gradient() -> None:
    (x, tx), (g, tg) = pair(2, 3), pair(2, 3, seed=1)
    x.sigmoid().backward(g)
    tx.sigmoid().backward(tg.detach())
    close(x.grad, tx.grad)


def test_gradient_touches_no_grad() -> None:
    x, tx = pair(3)
    (g,) = (x * x.sin()).sum().gradient(x)
    close(g, torch.autograd.grad((tx * tx.sin()).sum(), tx)[0])
    assert x.grad is None


def test_targets_need_no_mark_and_may_be_inner_values() -> None:
    x = Tensor([1.0, 2.0])
    y = x * x
    loss = (y * y).sum()
    assert [g.tolist() for g in loss.gradient(x, y)] == [[4.0, 32.0], [2.0, 8.0]]


def test_second_derivatives() -> None:
    x, tx = pair(4)
    (first,) = (x.exp() * x.sin()).sum().gradient(x)
    (second,) = first.square().sum().gradient(x)
    (tfirst,) = torch.autograd.grad((tx.exp() * tx.sin()).sum(), tx, create_graph=True)
    close(second, torch.autograd.grad(tfirst.square().sum(), tx)[0])


def test_a_gradient_penalty_trains() -> None:
    (x, tx), (w, tw) = pair(4, 3), pair(3, 1, seed=1)
    (slope,) = (x @ w).tanh().sum().gradient(x)
    slope.square().sum().backward()
    (tslope,) = torch.autograd.grad((tx @ tw).tanh().sum(), tx, create_graph=True)
    tslope.square().sum().backward()
    close(w.grad, tw.grad)


def test_a_reshaped_leaf() -> None:
    x, tx = pair(2, 6)
    (x.reshape(3, 4).transpose(0, 1) * x.reshape(4, 3)).sum().backward()
    (tx.reshape(3, 4).transpose(0, 1) * tx.reshape(4, 3)).sum().backward()
    close(x.grad, tx.grad)


def test_a_leaf_that_is_a_piece_of_memory() -> None:
    values = np.arange(12, dtype=np.float32).reshape(2, 6)
    x, tx = Tensor(values).realize()[1], torch.tensor(values)[1].clone().requires_grad_()
    x.requires_grad = True
    (x.reshape(3, 2).exp().log() * x.reshape(2, 3).reshape(3, 2)).sum().backward()
    (tx.reshape(3, 2) * tx.reshape(2, 3).reshape(3, 2)).sum().backward()
    close(x.grad, tx.grad)


def test_a_reshaped_inner_target() -> None:
    x = Tensor([1.0, 2.0, 3.0, 4.0])
    flat = x * x
    y = flat.reshape(2, 2)
    loss = (y.reshape(1, 4) * 3).sum() + y.reshape(4, 1).reshape(1, 2, 2).sum() + y.sum() + flat.sum() * 10
    gy, gx = loss.gradient(y, x)
    assert gy.tolist() == [[5.0, 5.0], [5.0, 5.0]] and gx.tolist() == [30.0, 60.0, 90.0, 120.0]


def test_equal_constants_have_their_own_gradients() -> None:
    a, b = Tensor.zeros(3, requires_grad=True), Tensor.zeros(3, requires_grad=True)
    (a * 2 + b * 5).sum().backward()
    assert a.grad is not None and b.grad is not None
    assert a.grad.tolist() == [2.0] * 3 and b.grad.tolist() == [5.0] * 3


def test_random_leaves_have_their_own_gradients() -> None:
    Tensor.manual_seed(3)
    a = Tensor.rand(3, requires_grad=True)
    Tensor.manual_seed(3)
    b = Tensor.rand(3, requires_grad=True)
    (a * 2 + b * 5).sum().backward()
    assert a.grad is not None and b.grad is not None
    assert a.grad.tolist() == [2.0] * 3 and b.grad.tolist() == [5.0] * 3


def test_detached_and_unmarked_tensors_get_nothing() -> None:
    x, y, z = (Tensor([1.0, 2.0], requires_grad=flag) for flag in (True, None, True))
    (x * y * z.detach()).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 4.0] and y.grad is None and z.grad is None


def test_a_mark_that_comes_late_counts() -> None:
    x = Tensor([1.0, 2.0])
    loss = (x * x).sum()
    x.requires_grad = True
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 4.0]


def test_a_leaf_realized_after_its_use() -> None:
    x = Tensor.ones(2, requires_grad=True)
    loss = (x * 3).sum()
    x.realize()
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]


def test_a_value_read_before_backward() -> None:
    x, tx = pair(3)
    loss = x.exp().sum()
    assert loss.item() == pytest.approx(tx.exp().sum().item(), rel=1e-5)
    loss.backward()
    tx.exp().sum().backward()
    close(x.grad, tx.grad)


def test_an_inner_value_realized_before_backward() -> None:
    x, tx = pair(3)
    inner = x.exp().realize()
    (inner * inner).sum().backward()
    (tx.exp() ** 2).sum().backward()
    close(x.grad, tx.grad)


def test_narrow_floats() -> None:
    x = Tensor([1.0, 2.0, 3.0], dtype="float16", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None and x.grad.dtype.name == "float16" and x.grad.tolist() == [2.0, 4.0, 6.0]


def test_writes_pass_gradients() -> None:
    (x, tx), (v, tv) = pair(4, 3), pair(2, 3, seed=1)
    y, ty = x * 2, tx * 2
    y[1:3] = v * 3
    ty = torch.cat([ty[:1], tv * 3, ty[3:]])
    (y * y).sum().backward()
    (ty * ty).sum().backward()
    close(x.grad, tx.grad)
    close(v.grad, tv.grad)


def test_integer_indexing() -> None:
    x, tx = pair(5, 3)
    rows = [0, 4, 4, 2, -1]
    x[Tensor(rows)].square().sum().backward()
    tx[torch.tensor(rows)].square().sum().backward()
    close(x.grad, tx.grad)


# ---- refused ----


def test_refused() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(ShapeError, match=r"one element.*\.sum\(\)"):
        (x * 2).backward()
    with pytest.raises(DTypeError, match="only floats have gradients"):
        x.int().sum().backward()
    with pytest.raises(ShapeError, match="shapes differ"):
        (x * 2).backward(Tensor([1.0]))
    with pytest.raises(DTypeError, match="must be a float"):
        (x * 2).backward(Tensor([1, 2]))
    with pytest.raises(ArgumentError, match="depends on no tensor with requires_grad"):
        (x.detach() * 2).sum().backward()
    with pytest.raises(ArgumentError, match="does not depend on it"):
        (x * 2).sum().gradient(x, Tensor([1.0]))
    with pytest.raises(DTypeError, match="target 1 of dtype int32"):
        (x * 2).sum().gradient(x, Tensor([1]))
    assert x.grad is None


def test_zeros_for_what_is_not_reached() -> None:
    x, y = Tensor([1.0, 2.0]), Tensor([[1.0], [2.0]])
    gx, gy = (x * 2).sum().gradient(x, y, materialize_grads=True)
    assert gx.tolist() == [2.0, 2.0] and gy.tolist() == [[0.0], [0.0]]


def test_history_ends_where_a_value_was_overwritten() -> None:
    """The values that the gradient needs are gone: an error, not a wrong number."""
    x = Tensor([1.0, 2.0], requires_grad=True)
    loss = (x * x).sum()
    assert loss.item() == 5.0
    x.assign(Tensor([3.0, 4.0])).realize()
    with pytest.raises(ArgumentError, match="depends on no tensor"):
        loss.backward()
    inner = (x * x).realize()
    inner.assign(Tensor([0.0, 0.0])).realize()
    with pytest.raises(ArgumentError, match="depends on no tensor"):
        inner.sum().backward()


def test_history_dies_with_its_value() -> None:
    from whit.autograd.gradient import origins

    before = len(origins)
    x = Tensor([1.0, 2.0], requires_grad=True)
    inner = x.exp().realize()
    assert len(origins) == before + 1
    del inner
    assert len(origins) == before


@pytest.mark.parametrize("count", [1, 4, 6])
def test_symbolic_sizes(count: int) -> None:
    values = np.random.default_rng(0).uniform(0.5, 1.5, 6).astype(np.float32)
    x, tx = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    y, ty = x[: Variable("n", 1, 6).bind(count)], tx[:count]
    (y.softmax().square().sum() + y.max() + y.prod() + Tensor.cat(y, y * 2).exp().sum() + x.sum()).backward()
    total = (
        ty.softmax(0).square().sum() + ty.max() + ty.prod() + torch.cat([ty, ty * 2]).exp().sum() + tx.sum()
    )
    total.backward()
    close(x.grad, tx.grad)


def test_a_realized_inner_value_is_not_computed_again() -> None:
    x, w = Tensor.rand(64, 64).realize(), Tensor.rand(64, 64).realize()
    w.requires_grad = True
    inner = (x @ w).exp()
    loss = inner.square().sum()
    inner.realize()
    before = GlobalCounters.global_ops
    loss.realize()
    assert GlobalCounters.global_ops - before < 64 * 64 * 64


@pytest.mark.parametrize(
    "name", ["clip", "relu", "relu6", "hardtanh", "std", "abs", "max", "max_pool", "sqrt"]
)
def test_points_without_a_derivative_follow_pytorch(name: str) -> None:
    values = np.array([[-1.0, 0.0, 1.0, 1.0], [6.0, 6.0, 0.0, 2.0], [3.0, 3.0, 3.0, 3.0]], np.float32)
    x, tx = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    pairs = {
        "clip": lambda: (x.clip(0, 6), tx.clamp(0, 6)),
        "relu": lambda: (x.relu(), tx.relu()),
        "relu6": lambda: (x.relu6(), torch.nn.functional.relu6(tx)),
        "hardtanh": lambda: (x.hardtanh(), torch.nn.functional.hardtanh(tx)),
        "std": lambda: (x.std(1), tx.std(1)),
        "abs": lambda: (x.abs(), tx.abs()),
        "max": lambda: (x.max(1), tx.amax(1)),
        "max_pool": lambda: (x.reshape(1, 1, 3, 4).max_pool2d((1, 2)), tx.unfold(1, 2, 2).amax(-1)),
        "sqrt": lambda: (x.relu().sqrt() * 0, tx.relu().sqrt() * 0),
    }
    ours, theirs = pairs[name]()
    ours.sum().backward()
    theirs.sum().backward()
    close(x.grad, tx.grad)
