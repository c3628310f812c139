"""Custom gradients and checkpoints: values and derivatives against PyTorch, memory by the allocator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import whit
from whit import Tensor, TinyJit
from whit.helpers import ArgumentError, DTypeError, ShapeError
from whit.runtime.memory import memory

rng = np.random.default_rng(9)


# ---- custom gradients --------------------------------------------------------------------------------------


@whit.custom_gradient
def reversed_gradient(x: Tensor) -> Any:
    return x, lambda g: -2 * g


@whit.custom_gradient
def squared(x: Tensor) -> Any:
    """x * x with a gradient that is written out."""
    return (x * x).contiguous(), lambda g: 2 * x * g


@whit.custom_gradient
def product_and_sum(p: Any, y: Tensor, _: str) -> Any:
    """Two arguments that matter, one of them a tree, and two results; wrong on purpose by factors."""
    x = p["x"]
    return [x * y, x + y], lambda g: ({"x": 10 * g[0] * y + g[1]}, 100 * (g[0] * x) + g[1], None)


def test_the_given_gradient_counts() -> None:
    x = Tensor([1.0, 2.0])
    assert reversed_gradient(x).tolist() == [1.0, 2.0]
    assert whit.grad(lambda x: (reversed_gradient(x) * Tensor([1.0, 3.0])).sum())(x).tolist() == [-2.0, -6.0]


def test_by_backward() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    (reversed_gradient(x) * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-6.0, -6.0]


@pytest.mark.parametrize("memory_first", [False, True])
def test_a_value_that_is_read_first(memory_first: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = reversed_gradient(x)
        y.tolist()
        y = y.reshape(2, 1)
        y.realize()
        return (y * y).sum()

    x = Tensor([1.0, 2.0])
    if memory_first:
        x.realize()
    assert whit.grad(f)(x).tolist() == [-4.0, -8.0]
    x.requires_grad = True
    f(x).backward()
    assert x.grad is not None and x.grad.tolist() == [-4.0, -8.0]


def test_any_order_and_both_modes() -> None:
    cube = lambda x: squared(x) * x  # noqa: E731
    assert whit.grad(cube)(Tensor(2.0)).item() == 12.0
    assert whit.grad(whit.grad(cube))(Tensor(2.0)).item() == 12.0
    assert whit.grad(whit.grad(whit.grad(cube)))(Tensor(2.0)).item() == 6.0
    assert whit.jvp(cube, [Tensor(2.0)], [Tensor(1.0)])[1].item() == 12.0
    assert whit.jvp(reversed_gradient, [Tensor(2.0)], [Tensor(1.0)])[1].item() == -2.0
    assert whit.hessian(cube)(Tensor(2.0)).item() == 12.0
    assert whit.jacfwd(whit.jacfwd(cube))(Tensor(2.0)).item() == 12.0


def test_trees_and_several_results() -> None:
    p, y = {"x": Tensor([1.0, 2.0])}, Tensor([3.0, 4.0])
    value, pull = whit.vjp(lambda p, y: product_and_sum(p, y, "no tensor"), p, y)
    assert [v.tolist() for v in value] == [[3.0, 8.0], [4.0, 6.0]]
    gp, gy = pull([Tensor([1.0, 1.0]), Tensor([0.5, 0.5])])
    assert gp["x"].tolist() == [30.5, 40.5] and gy.tolist() == [100.5, 200.5]
    one = whit.grad(lambda p: product_and_sum(p, y, "")[1].sum())(p)
    assert one["x"].tolist() == [1.0, 1.0]
    change = whit.jvp(lambda p: product_and_sum(p, y, ""), [p], [{"x": Tensor([1.0, 0.0])}])[1]
    assert [c.tolist() for c in change] == [[30.0, 0.0], [1.0, 0.0]]


def test_in_batches() -> None:
    x = Tensor([1.0, 2.0, 3.0])
    assert whit.vmap(whit.grad(squared))(x).tolist() == [2.0, 4.0, 6.0]
    assert whit.grad(lambda x: whit.vmap(squared)(x).sum())(x).tolist() == [2.0, 4.0, 6.0]
    assert whit.hessian(lambda x: whit.vmap(squared)(x).sum())(x).tolist() == [
        [2.0 * (i == j) for j in range(3)] for i in range(3)
    ]
    assert whit.jvp(whit.vmap(squared), [x], [Tensor([1.0, 0.0, 1.0])])[1].tolist() == [2.0, 0.0, 6.0]
    shared = whit.grad(lambda y: whit.vmap(lambda x: sum(product_and_sum({"x": x}, y, "")))(x).sum())(
        Tensor(5.0)
    )
    assert shared.item() == 603.0  # 100 * (1 + 2 + 3) + 3


def test_under_the_jit() -> None:
    step = TinyJit(lambda x: whit.grad(lambda x: squared(reversed_gradient(x)).sum())(x).realize())
    for n in range(4):
        assert step(Tensor([n + 1.0])).tolist() == [-4.0 * (n + 1)]
    assert step.captures == 1


def test_what_does_not_fit_is_refused() -> None:
    x = Tensor([1.0, 2.0])

    def of(value: Any) -> Any:
        return whit.custom_gradient(lambda x: value)(x)

    def with_gradient(g: Any) -> Any:
        return whit.grad(lambda x: whit.custom_gradient(lambda x: (x, lambda _: g))(x).sum())(x)

    for wrong in (x, (x, x), (x, lambda g: g, 1)):
        with pytest.raises(ArgumentError, match="a pair of a value and a function"):
            of(wrong)
    with pytest.raises(ArgumentError, match="not made of tensors"):
        of((3, lambda g: g))
    with pytest.raises(ArgumentError, match="1 gradients"):
        whit.grad(lambda x: whit.custom_gradient(lambda x, y: (x, lambda g: g))(x, x).sum())(x)
    with pytest.raises(ShapeError, match=r"a gradient of shape \(3,\)"):
        with_gradient(Tensor.ones(3))
    with pytest.raises(DTypeError, match="a gradient of int32"):
        with_gradient(Tensor([1, 2]))
    with pytest.raises(ArgumentError, match="of another form"):
        with_gradient([x, x])
    assert with_gradient(None).tolist() == [0.0, 0.0]


# ---- checkpoint --------------------------------------------------------------------------------------------

W1, W2 = rng.standard_normal((4, 8)) / 2, rng.standard_normal((8, 4)) / 3
X = rng.standard_normal((3, 4))


def layer(x: Any, w1: Any, w2: Any) -> Any:
    h = x @ w1
    return x + (h / (h * h + 1)) @ w2


def net(wrap: Any) -> Any:
    def f(x: Any, w1: Any, w2: Any) -> Any:
        for _ in range(2):
            x = wrap(layer)(x, w1, w2)
        return (x * x).sum()

    return f


def in_torch() -> list[np.ndarray[Any, Any]]:
    x, w1, w2 = (torch.tensor(a, requires_grad=True) for a in (X, W1, W2))
    net(lambda f: f)(x, w1, w2).backward()
    return [t.grad.numpy() for t in (x, w1, w2)]


def test_gradients_of_checkpoints() -> None:
    given = [Tensor(a) for a in (X, W1, W2)]
    got = whit.grad(net(whit.checkpoint), (0, 1, 2))(*given)
    plain = whit.grad(net(lambda f: f), (0, 1, 2))(*given)
    for g, p, want in zip(got, plain, in_torch(), strict=True):
        np.testing.assert_allclose(g.numpy(), want, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(g.numpy(), p.numpy(), rtol=1e-13, atol=1e-14)


def test_tensors_from_outside_get_their_gradients() -> None:
    x, w1, w2 = (Tensor(a, requires_grad=True) for a in (X, W1, W2))
    block = whit.checkpoint(lambda x: layer(x, w1, w2))
    (block(block(x)) ** 2).sum().backward()
    for t, want in zip((x, w1, w2), in_torch(), strict=True):
        assert t.grad is not None
        np.testing.assert_allclose(t.grad.numpy(), want, rtol=1e-10, atol=1e-12)


def test_what_depends_on_what_from_outside() -> None:
    """Of two tensors from outside one may be made of the other."""
    x, w = (torch.tensor(a, requires_grad=True) for a in (X, X + 1))
    v = w * w
    (x * v + w).sin().sum().backward()
    ours, ow = Tensor(X, requires_grad=True), Tensor(X + 1, requires_grad=True)
    ov = ow * ow
    whit.checkpoint(lambda x: (x * ov + ow).sin())(ours).sum().backward()
    assert ours.grad is not None and ow.grad is not None
    np.testing.assert_allclose(ours.grad.numpy(), x.grad, rtol=1e-10)
    np.testing.assert_allclose(ow.grad.numpy(), w.grad, rtol=1e-10)


def test_checkpoints_compose() -> None:
    given = [Tensor(a) for a in (X, W1, W2)]
    many = Tensor(rng.standard_normal((2, *X.shape)))
    plain, saved = net(lambda f: f), net(whit.checkpoint)
    nested = whit.checkpoint(saved)
    for f, g in [
        (lambda f: whit.vmap(whit.grad(f), in_axes=(0, None, None))(many, *given[1:]),) * 2,
        (lambda f: whit.grad(lambda w: whit.vmap(lambda x: f(x, w, given[2]))(many).sum())(given[1]),) * 2,
        (lambda f: whit.jvp(f, given, [g * 0.5 for g in given])[1],) * 2,
        (lambda f: whit.hessian(lambda x: f(x, *given[1:]))(given[0][:1]),) * 2,
    ]:
        want = f(plain).numpy()
        for other in (saved, nested):
            np.testing.assert_allclose(g(other).numpy(), want, rtol=1e-9, atol=1e-11)


def test_random_numbers_are_the_same_both_times() -> None:
    """d/dx sum(dropout(x) * x) is twice the mask that the forward pass shows."""
    block = whit.checkpoint(lambda x: x.dropout(0.5))
    with Tensor.train():
        value, pull = whit.vjp(block, Tensor.ones(64))
        mask, g = value.tolist(), pull(Tensor.ones(64)).tolist()
    assert g == mask and set(mask) == {0.0, 2.0}


def test_trees_and_whole_numbers() -> None:
    block = whit.checkpoint(lambda p, scale: {"y": p["x"] * scale, "n": p["n"] + 1, "x": p["x"]})
    out = block({"x": Tensor([2.0]), "n": Tensor([1])}, scale=3.0)
    assert out["y"].tolist() == [6.0] and out["n"].tolist() == [2]
    g = whit.grad(lambda x: sum(block({"x": x, "n": Tensor([1])}, scale=3.0)[k].sum() for k in "yx"))(
        Tensor([2.0])
    )
    assert g.tolist() == [4.0]


def test_under_the_jit_with_weights_that_change() -> None:
    w = Tensor([[0.5]]).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        g = whit.grad(lambda w: whit.checkpoint(lambda x: (x @ w).exp())(x).sum())(w)
        w.assign(w - 0.1 * g)
        return g.realize()

    want = 0.5
    for _ in range(5):
        g = step(Tensor([[1.0]])).item()
        assert g == pytest.approx(np.exp(want), rel=1e-5)
        want -= 0.1 * np.exp(want)


def test_checkpoints_take_less_memory() -> None:
    """Peak of the allocator over a backward pass, less what was there before."""
    width, rows, layers = 64, 512, 6
    ws = [
        [
            Tensor(rng.standard_normal(shape).astype(np.float32) / 8).realize()
            for shape in ((width, 4 * width), (4 * width, width))
        ]
        for _ in range(layers)
    ]
    x = Tensor(rng.standard_normal((rows, width)).astype(np.float32)).realize()

    def peak(wrap: Any) -> tuple[int, list[Any]]:
        f = wrap(lambda x, w1, w2: x + ((x @ w1).tanh() @ w2).tanh())

        def loss(ws: Any, x: Tensor) -> Tensor:
            for w in ws:
                x = f(x, *w)
            return (x * x).sum()

        for _ in range(2):  # the first time compiles
            before = memory.most = memory.used
            gradients = [g for pair in whit.grad(loss)(ws, x) for g in pair]
            Tensor.realize_all(gradients)
            used = memory.most - before
            values = [g.numpy() for g in gradients]
            del gradients
        return used, values

    plain, want = peak(lambda f: f)
    saved, got = peak(whit.checkpoint)
    assert saved < 0.6 * plain, f"{saved} of {plain} bytes"
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * np.abs(w).max())


def test_what_a_checkpoint_refuses() -> None:
    x = Tensor([1.0])
    with pytest.raises(ArgumentError, match="not made of tensors"):
        whit.checkpoint(lambda x: 3)(x)
    state = Tensor([0.0]).realize()

    def assigns(x: Tensor) -> Tensor:
        state.assign(x)
        return state * 1

    with pytest.raises(ArgumentError, match="checkpoint: the function assigns"):
        whit.checkpoint(assigns)(x)
