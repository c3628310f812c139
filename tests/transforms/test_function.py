"""function: traced once, applied often, with gradients and state."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import whit
from whit import Tensor, TinyJit, UOp, function
from whit.helpers import ArgumentError, ShapeError


def counted(f: Any) -> tuple[Any, list[int]]:
    """The traced function, and a list that grows with every trace."""
    runs: list[int] = []

    def g(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return f(*args, **kwargs)

    return function(g), runs


def test_it_runs_once_for_each_kind_of_arguments() -> None:
    f, runs = counted(lambda x, n=1: x * n + 1)
    assert [f(Tensor([v])).item() for v in (1.0, 2.0, 3.0)] == [2.0, 3.0, 4.0] and len(runs) == 1
    assert f(Tensor([1.0, 2.0])).tolist() == [2.0, 3.0] and len(runs) == 2  # a shape
    assert f(Tensor([1])).tolist() == [2] and len(runs) == 3  # a dtype
    assert f(Tensor([1.0]), n=3).tolist() == [4.0] and len(runs) == 4  # a number
    assert f(Tensor([5.0]), n=3).tolist() == [16.0] and f(Tensor([5.0])).tolist() == [6.0] and len(runs) == 4
    assert f(Tensor([1.0]), n=3.0).tolist() == [4.0] and len(runs) == 5
    assert f(Tensor(1.0)).item() == 2.0 and len(runs) == 6


def test_trees() -> None:
    f, runs = counted(lambda p: {"a": p["x"] + p["l"][0], "same": p["x"], "n": 3})
    for v in (1.0, 2.0):
        out = f({"x": Tensor([v]), "l": [Tensor([10.0])]})
        assert out["a"].tolist() == [v + 10] and out["same"].tolist() == [v] and out["n"] == 3
    assert len(runs) == 1


def test_results_are_lazy_and_have_gradients() -> None:
    f, runs = counted(lambda x, w: (x @ w).tanh())
    x, w = Tensor([[1.0, 2.0]]), Tensor([[0.1], [0.2]], requires_grad=True)
    for _ in range(2):
        w.grad = None
        f(x, w).sum().backward()
        want = (1 - np.tanh(0.5) ** 2) * np.array([[1.0], [2.0]])
        assert w.grad is not None
        np.testing.assert_allclose(w.grad.numpy(), want, rtol=1e-5)
    assert whit.grad(lambda x: f(x, w).sum())(x).shape == (1, 2)
    assert whit.jvp(lambda x: f(x, w), [x], [x])[1].shape == (1, 1)
    many = whit.vmap(f, in_axes=(0, None))(Tensor([[[1.0, 2.0]], [[0.0, 0.0]]]), w)
    np.testing.assert_allclose(many.numpy()[:, 0, 0], [np.tanh(0.5), 0.0], rtol=1e-6)
    assert len(runs) == 1


def test_tensors_from_outside_are_read_anew() -> None:
    w, b = Tensor([2.0], requires_grad=True).realize(), Tensor([1.0])
    twin = Tensor([0.0])
    twin.replace(w)  # the same value in the same memory, but another tensor
    f, runs = counted(lambda x: x * w + b)
    assert f(Tensor([1.0])).tolist() == [3.0]
    w.assign(Tensor([5.0])).realize()
    b.replace(Tensor([7.0]))
    assert f(Tensor([1.0])).tolist() == [12.0] and twin.tolist() == [2.0]
    twin.assign(Tensor([100.0])).realize()
    assert f(Tensor([1.0])).tolist() == [12.0]
    f(Tensor([3.0])).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [3.0] and len(runs) == 1
    b.replace(b)
    b.uop = Tensor([[1.0], [2.0]]).uop  # another shape: traced again
    assert f(Tensor([1.0])).tolist() == [[6.0], [7.0]] and len(runs) == 2


def test_scalars_from_outside_count() -> None:
    scale = 2.0
    f = function(lambda x: x * scale)
    assert f(Tensor([1.0])).tolist() == [2.0]
    scale = 3.0
    assert f(Tensor([1.0])).tolist() == [3.0]

    class Model:
        def __init__(self) -> None:
            self.w, self.scale = Tensor([2.0]), 1

        @function
        def forward(self, x: Tensor) -> Tensor:
            return x * self.w * self.scale

    first, second = Model(), Model()
    second.w = Tensor([10.0])
    assert first.forward(Tensor([3.0])).tolist() == [6.0] and second.forward(Tensor([3.0])).tolist() == [30.0]
    first.scale = 2
    assert first.forward(Tensor([3.0])).tolist() == [12.0]


def test_random_numbers_are_new_ones_and_those_of_the_plain_function() -> None:
    def f(x: Tensor) -> Tensor:
        return x + Tensor.rand(2) + Tensor.randn(2)

    Tensor.manual_seed(4)
    want = [f(Tensor([0.0, 1.0])).tolist() for _ in range(3)]
    Tensor.manual_seed(4)
    g = function(f)
    assert [g(Tensor([0.0, 1.0])).tolist() for _ in range(3)] == want


def test_with_the_jit_custom_gradients_and_checkpoints() -> None:
    @function
    def f(x: Tensor) -> Tensor:
        return whit.custom_gradient(lambda x: (x * x, lambda g: 7 * x * g))(x)

    block = function(whit.checkpoint(lambda x: x.exp()))
    for v in (1.0, 2.0, 3.0):
        assert whit.grad(f)(Tensor(v)).item() == 7 * v
        assert whit.grad(whit.grad(f))(Tensor(v)).item() == 7.0
        assert whit.grad(block)(Tensor(v)).item() == pytest.approx(np.exp(v))
    assert whit.vmap(whit.grad(f))(Tensor([1.0, 2.0])).tolist() == [7.0, 14.0]
    assert whit.grad(lambda x: whit.vmap(f)(x).sum())(Tensor([1.0, 2.0])).tolist() == [7.0, 14.0]
    step = TinyJit(lambda x: (f(x) + block(x)).realize())
    for v in (0.0, 1.0, 2.0, 3.0):
        assert step(Tensor(v)).item() == pytest.approx(v * v + np.exp(v), rel=1e-6)
    inner = TinyJit(lambda x: (x + 1).realize())
    outer = function(lambda x: inner(x) * 2)
    assert [outer(Tensor(v)).item() for v in (1.0, 2.0, 3.0)] == [4.0, 6.0, 8.0]


def test_functions_inside_of_functions() -> None:
    inner, runs = counted(lambda x: x * 2)
    outer = function(lambda x: inner(x) + inner(x + 1))
    assert [outer(Tensor([v])).item() for v in (1.0, 2.0)] == [6.0, 10.0] and len(runs) == 1


def test_symbolic_sizes() -> None:
    f, runs = counted(lambda x: x.sum())
    n = UOp.variable("n", 1, 4)
    x = Tensor([1.0, 2.0, 3.0, 4.0])
    for size, want in ((2, 3.0), (3, 6.0), (2, 3.0)):
        assert f(x.shrink(((0, n.bind(size)),))).item() == want
    assert len(runs) == 2


def test_few_traces_are_kept() -> None:
    f, runs = counted(lambda x, n: x + n)
    for n in range(40):
        assert f(Tensor([0.0]), n).item() == n
    assert f(Tensor([0.0]), 39).item() == 39 and len(runs) == 40
    assert f(Tensor([0.0]), 0).item() == 0 and len(runs) == 41


def test_an_argument_that_dies_is_not_kept() -> None:
    f = function(lambda x: x * 2)
    x = Tensor([1.0]).realize()
    f(x).realize()
    live = len(Tensor.live)
    del x
    gc.collect()
    assert len(Tensor.live) == live - 1


def test_refused() -> None:
    x, state = Tensor([1.0]), Tensor([1.0]).realize()

    def assigns(x: Tensor) -> Tensor:
        state.assign(state + x)
        return x

    def writes(x: Tensor) -> Tensor:
        x[0] = 1.0
        return x

    for wrong in (assigns, writes):
        with pytest.raises(ArgumentError, match="function: it assigns to a tensor of shape"):
            function(wrong)(x)
    assert state.tolist() == [1.0] and x.tolist() == [1.0]
    with pytest.raises(ArgumentError, match="reading a value inside of function"):
        function(lambda x: x * x.item())(x)
    with pytest.raises(ArgumentError, match="reading a value inside of function"):
        function(lambda x: x * state.item())(x)
    with pytest.raises(ArgumentError, match="an argument is a ndarray"):
        function(lambda x: x)(np.ones(1))
    with pytest.raises(ShapeError):
        function(lambda x: x.reshape(3))(x)
    assert (state + x).tolist() == [2.0]
