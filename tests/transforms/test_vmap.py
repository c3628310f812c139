"""vmap against NumPy, against loops in Python and against torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import whit
from whit import Context, GlobalCounters, Tensor, TinyJit, UOp, dtypes
from whit.helpers import ArgumentError, ShapeError
from whit.uop.program import Program

rng = np.random.default_rng(5)
X, Y, B = rng.standard_normal((3, 4, 5)), rng.standard_normal((5, 2)), 3

# name, one function of a (4, 5) array that both NumPy (or torch) and whit understand, or one for each
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sum": (lambda x: x.sum(), lambda x: x.sum()),
    "softmax": (lambda x: x.softmax(-1), lambda x: torch.softmax(x, -1)),
    "matmul": (lambda x: x @ Tensor(Y), lambda x: x @ torch.tensor(Y)),
    "outer": (lambda x: x @ x.T, lambda x: x @ x.T),
    "slices": (lambda x: x[::2, 1:-1] + x[1:2, :3], lambda x: x[::2, 1:-1] + x[1:2, :3]),
    "indices": (lambda x: x[Tensor([2, 0]), 1:], lambda x: x[torch.tensor([2, 0]), 1:]),
    "setitem": (None, None),  # type: ignore[dict-item]  # below
    "cumsum": (lambda x: x.cumsum(1), lambda x: x.cumsum(1)),
    "sort": (lambda x: x.sort(1)[0], lambda x: x.sort(1)[0]),
    "argmax": (lambda x: x.argmax(0), lambda x: x.argmax(0).int()),
    "conv2d": (
        lambda x: x.reshape(1, 1, 4, 5).conv2d(Tensor(Y[:4].reshape(2, 1, 2, 2)), padding=1),
        lambda x: torch.conv2d(x.reshape(1, 1, 4, 5), torch.tensor(Y[:4].reshape(2, 1, 2, 2)), padding=1),
    ),
    "max_pool2d": (
        lambda x: x.reshape(1, 1, 4, 5).max_pool2d(2),
        lambda x: torch.max_pool2d(x.reshape(1, 1, 4, 5), 2),
    ),
    "var": (lambda x: x.var(0), lambda x: x.var(0)),
    "cat and stack": (
        lambda x: x.cat(x * 2, dim=0).stack(x.cat(x, dim=0), dim=1),
        lambda x: torch.stack([torch.cat([x, x * 2], 0), torch.cat([x, x], 0)], 1),
    ),
    "triu": (lambda x: x.triu(1), lambda x: x.triu(1)),
    "nothing of it": (lambda x: Tensor([1.0, 2.0]), lambda x: torch.tensor([1.0, 2.0])),
    "a view": (lambda x: x.T.reshape(2, 10), lambda x: x.T.reshape(2, 10)),
    "booleans": (lambda x: (x > 0) & (x.sum(0) > 0), lambda x: (x > 0) & (x.sum(0) > 0)),
    "bits": (lambda x: x.cast("float32").bitcast("int32") >> 3, lambda x: x.float().view(torch.int32) >> 3),
}


def set_items(x: Any) -> Any:
    y = x * 1
    y[1, 2:] = x[0, :3]
    return y


FUNCTIONS["setitem"] = (set_items, set_items)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    want = np.stack([theirs(torch.tensor(x)).numpy() for x in X])
    got = whit.vmap(ours)(Tensor(X)).numpy()
    assert got.dtype == want.dtype or want.dtype.kind in "if"
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_axis", [0, 1, 2, -1])
@pytest.mark.parametrize("out_axis", [0, 1, -1])
def test_axes(in_axis: int, out_axis: int) -> None:
    x = np.moveaxis(X, 0, in_axis)
    got = whit.vmap(lambda x: x @ Tensor(Y), in_axes=in_axis, out_axes=out_axis)(Tensor(x))
    np.testing.assert_allclose(got.numpy(), np.moveaxis(X @ Y, 0, out_axis), rtol=1e-12)


def test_several_arguments() -> None:
    a, b, c = rng.standard_normal((3, 2)), rng.standard_normal((2, 3)), rng.standard_normal(2)
    got = whit.vmap(lambda a, b, c: a * b + c, in_axes=(0, 1, None))(Tensor(a), Tensor(b), Tensor(c))
    np.testing.assert_allclose(got.numpy(), a * b.T + c)


def test_trees_and_what_is_no_tensor() -> None:
    def f(p: Any, flag: bool, scale: float) -> dict[str, Any]:
        return {"sum": p["a"] + p["b"][0] * scale if flag else p["a"], "same": Tensor(7.0)}

    p = {"a": Tensor([[1.0], [2.0]]), "b": [Tensor([10.0, 20.0])]}
    got = whit.vmap(f, in_axes=({"a": 0, "b": 0}, None, 0), out_axes={"sum": 0, "same": None})(p, True, 2.0)
    assert got["sum"].tolist() == [[21.0], [42.0]] and got["same"].item() == 7.0
    got = whit.vmap(f, in_axes=({"a": 0, "b": [None]}, None, None))(
        {"a": p["a"], "b": [Tensor(1.0)]}, True, 3.0
    )
    assert got["sum"].tolist() == [[4.0], [5.0]] and got["same"].tolist() == [7.0, 7.0]
    assert whit.vmap(lambda x, y: x + y)(Tensor([1.0]), y=Tensor([2.0])).tolist() == [3.0]


def test_nested() -> None:
    x, y = rng.standard_normal((3, 5)), rng.standard_normal((4, 5))
    pairs = whit.vmap(whit.vmap(lambda x, y: (x * y).sum(), in_axes=(None, 0)), in_axes=(0, None))
    np.testing.assert_allclose(pairs(Tensor(x), Tensor(y)).numpy(), x @ y.T)
    swapped = whit.vmap(whit.vmap(lambda x, y: x.dot(y), in_axes=(0, None)), in_axes=(None, 0))
    np.testing.assert_allclose(swapped(Tensor(x), Tensor(y)).numpy(), y @ x.T)
    closure = whit.vmap(lambda x: whit.vmap(lambda y: x - y)(Tensor(y)))(Tensor(x))
    np.testing.assert_allclose(closure.numpy(), x[:, None] - y)


def test_indices_that_differ() -> None:
    x, i = rng.standard_normal((3, 6, 2)), np.array([[0, 5, -1], [2, 2, 9], [-6, 3, -7]])
    got = whit.vmap(lambda x, i: x[i])(Tensor(x), Tensor(i)).numpy()
    inside = (i >= -6) & (i < 6)
    want = np.where(inside[:, :, None], np.stack([a[np.where(k, j, 0)] for a, j, k in zip(x, i, inside)]), 0)
    np.testing.assert_array_equal(got, want)
    got = whit.vmap(lambda i: Tensor(x[0])[i])(Tensor(i)).numpy()
    np.testing.assert_array_equal(got, np.where(inside[:, :, None], x[0][np.where(inside, i, 0)], 0))


def test_narrow_index_dtypes_of_large_batches() -> None:
    x = np.arange(300 * 3, dtype=np.float32).reshape(300, 3)
    i = np.tile(np.array([2, 0], np.uint8), (300, 1))
    got = whit.vmap(lambda x, i: x[i])(Tensor(x), Tensor(i)).numpy()
    np.testing.assert_array_equal(got, x[:, [2, 0]])


@pytest.mark.parametrize("name", ["softmax", "matmul", "indices", "sort", "conv2d", "cumsum", "setitem"])
def test_with_gradients(name: str) -> None:
    """Gradients per example and through the batch, and forward mode, against torch.func."""
    ours, theirs = FUNCTIONS[name]
    x = torch.tensor(X)

    def loss(x: Any) -> Any:
        return (ours(x) ** 2).sum()

    want = torch.stack([torch.func.grad(lambda x: (theirs(x.clone()) ** 2).sum())(one) for one in x]).numpy()
    np.testing.assert_allclose(whit.vmap(whit.grad(loss))(Tensor(X)).numpy(), want, rtol=1e-9, atol=1e-11)
    got = whit.grad(lambda x: whit.vmap(loss)(x).sum())(Tensor(X)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    change = rng.standard_normal(X.shape)
    got = whit.jvp(whit.vmap(loss), [Tensor(X)], [Tensor(change)])[1].numpy()
    np.testing.assert_allclose(got, (want * change).sum((1, 2)), rtol=1e-9, atol=1e-11)
    got = whit.vmap(lambda x, v: whit.jvp(loss, [x], [v])[1])(Tensor(X), Tensor(change)).numpy()
    np.testing.assert_allclose(got, (want * change).sum((1, 2)), rtol=1e-9, atol=1e-11)


def test_hessian_per_example() -> None:
    x = rng.standard_normal((4, 3))
    got = whit.vmap(whit.hessian(lambda x: (x.sin() * x.sum()).sum()))(Tensor(x)).numpy()
    want = torch.func.vmap(torch.func.hessian(lambda x: (x.sin() * x.sum()).sum()))(torch.tensor(x)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_under_the_jit_and_around_it() -> None:
    f = TinyJit(lambda x: (x * 2).sum().realize())
    mapped = TinyJit(lambda x: whit.vmap(f)(x).realize())
    for n in range(4):
        assert mapped(Tensor([[1.0 + n, 2.0], [3.0, 4.0]])).tolist() == [6.0 + 2 * n, 14.0]
        assert whit.vmap(f)(Tensor([[1.0 + n], [0.0]])).tolist() == [2.0 + 2 * n, 0.0]
    assert mapped.captures == 1


def test_one_kernel_for_all_examples() -> None:
    x = Tensor(X).realize()
    GlobalCounters.reset()
    whit.vmap(lambda x: x.softmax(-1))(x).realize()
    assert GlobalCounters.kernel_count == 1


def test_on_the_reference_device() -> None:
    with Context(DEV="PYTHON"):
        got = whit.vmap(lambda x: (x @ Tensor(Y)).softmax(-1))(Tensor(X))
        assert got.device == "PYTHON"
        np.testing.assert_allclose(got.numpy(), torch.softmax(torch.tensor(X @ Y), -1).numpy(), rtol=1e-12)


def test_symbolic_sizes_stay() -> None:
    n = UOp.variable("n", 1, 5).bind(3)
    x = Tensor(X).shrink(((0, 3), (0, 4), (0, n)))
    got = whit.vmap(lambda x: (x * x).sum(1))(x)
    np.testing.assert_allclose(got.numpy(), (X[:, :, :3] ** 2).sum(2), rtol=1e-12)


# ---- random numbers ----------------------------------------------------------------------------------------


def draws(x: Tensor) -> Tensor:
    return x + Tensor.rand(3) * Tensor.randn(2, 1) + Tensor.randint(1, high=100)


def test_random_numbers_are_those_of_a_loop() -> None:
    x = Tensor([1.0, 2.0, 3.0, 4.0])
    Tensor.manual_seed(11)
    want = [draws(x[n]).tolist() for n in range(4)] + [Tensor.rand(2).tolist()]
    Tensor.manual_seed(11)
    assert [*whit.vmap(draws)(x).tolist(), Tensor.rand(2).tolist()] == want


def test_nested_random_numbers_are_those_of_nested_loops() -> None:
    x = Tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def outer(row: Tensor) -> Tensor:
        return whit.vmap(draws)(row) + Tensor.rand(1)

    def loops(row: Tensor) -> Tensor:
        rows = [draws(row[n]) for n in range(2)]
        return rows[0].stack(rows[1]) + Tensor.rand(1)

    Tensor.manual_seed(5)
    want = [loops(x[n]).tolist() for n in range(3)] + [Tensor.rand(2).tolist()]
    Tensor.manual_seed(5)
    assert [*whit.vmap(outer)(x).tolist(), Tensor.rand(2).tolist()] == want


def test_random_numbers_of_replays_differ_and_are_those_of_loops() -> None:
    f = TinyJit(lambda x: whit.vmap(draws)(x).realize())
    x = Tensor([1.0, 2.0])
    Tensor.manual_seed(3)
    got = [f(x).tolist() for _ in range(4)]
    Tensor.manual_seed(3)
    assert got == [[draws(x[n]).tolist() for n in range(2)] for _ in range(4)]


def test_other_randomness() -> None:
    x = Tensor.zeros(3)
    same = whit.vmap(lambda x: x + Tensor.rand(2), randomness="same")(x).tolist()
    assert same[0] == same[1] == same[2]
    with pytest.raises(ArgumentError, match="random numbers inside"):
        whit.vmap(draws, randomness="error")(x)
    with pytest.raises(ArgumentError, match="randomness='some'"):
        whit.vmap(draws, randomness="some")


def test_dropout_differs_per_example() -> None:
    with Tensor.train():
        rows = whit.vmap(lambda x: x.dropout(0.5))(Tensor.ones(2, 64)).tolist()
    assert rows[0] != rows[1] and set(rows[0]) == {0.0, 2.0}


# ---- kernels by hand ---------------------------------------------------------------------------------------


def scaled(x: Tensor, y: Tensor) -> Tensor:
    """x * y + 1 in a kernel of one expression."""

    def kernel(out: Any, x: Any, y: Any) -> UOp:
        i, j = UOp.range(2), UOp.range(3)
        return UOp.sink(out.store((i, j), x[i, j] * y[j] + 1.0).end(i, j))

    def gradient(grads: Any, tensors: Any) -> Any:
        _, x, y = tensors
        return None, grads[0] * y, (grads[0] * x).sum(0)

    return Tensor.empty(2, 3, dtype=x.dtype).custom_kernel(x, y, fxn=kernel, grad_fxn=gradient)[0]


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_kernels(axes: Any) -> None:
    x, y = rng.standard_normal((4, 2, 3)), rng.standard_normal((4, 3))
    x, y = (a if axis == 0 else a[0] for a, axis in zip((x, y), axes))
    wide = y[:, None] if axes[1] == 0 else y
    got = whit.vmap(scaled, in_axes=axes)(Tensor(x), Tensor(y)).numpy()
    np.testing.assert_allclose(got, x * wide + 1)
    gx, gy = whit.grad(lambda x, y: (whit.vmap(scaled, in_axes=axes)(x, y) ** 2).sum(), (0, 1))(
        Tensor(x), Tensor(y)
    )
    tx, ty = torch.tensor(x, requires_grad=True), torch.tensor(y, requires_grad=True)
    ((tx * (ty[:, None] if axes[1] == 0 else ty) + 1) ** 2).sum().backward()
    np.testing.assert_allclose(gx.numpy(), tx.grad, rtol=1e-12)
    np.testing.assert_allclose(gy.numpy(), ty.grad, rtol=1e-12)
    per = whit.vmap(whit.grad(lambda x, y: (scaled(x, y) ** 2).sum(), (0, 1)), in_axes=axes)(
        Tensor(x), Tensor(y)
    )
    full = [np.broadcast_to(a, (4, *a.shape[-n:])) for a, n in ((x, 2), (y, 1))]
    for n in range(4):
        tx, ty = (torch.tensor(a[n].copy(), requires_grad=True) for a in full)
        ((tx * ty + 1) ** 2).sum().backward()
        np.testing.assert_allclose(per[0].numpy()[n], tx.grad, rtol=1e-12)
        np.testing.assert_allclose(per[1].numpy()[n], ty.grad, rtol=1e-12)


@pytest.mark.parametrize("rows,batch", [(2, 5), (5, 2)])
@pytest.mark.parametrize("parallel", [True, False])
def test_programs(rows: int, batch: int, parallel: bool) -> None:
    """Loops with state, written as programs; the examples are the parallel loop or one inside of it."""

    def running(x: Tensor) -> Tensor:
        def kernel(out: Any, x: Any) -> Program:
            p = Program("running")
            with p.parallel(rows) if parallel else p.loop(rows) as row:
                total = p.register(0.0, dtypes.float64)
                with p.loop(4) as i:
                    p.set(total, total.value + x[row, i])
                    p.store(out, (row, i), total.value)
            return p

        return Tensor.empty(rows, 4, dtype="float64").custom_kernel(x, fxn=kernel)[0]

    x = rng.standard_normal((batch, rows, 4))
    np.testing.assert_allclose(whit.vmap(running)(Tensor(x)).numpy(), x.cumsum(2), rtol=1e-12)
    twice = rng.standard_normal((3, batch, rows, 4))
    np.testing.assert_allclose(
        whit.vmap(whit.vmap(running))(Tensor(twice)).numpy(), twice.cumsum(3), rtol=1e-12
    )


# ---- what is refused ---------------------------------------------------------------------------------------


def test_reads_are_refused_by_name() -> None:
    x = Tensor([1.0, 2.0])
    for read in (Tensor.item, Tensor.tolist, Tensor.numpy, bool, np.asarray):
        with pytest.raises(ArgumentError, match="reading a value inside of vmap"):
            whit.vmap(lambda x, read=read: x * read(x))(x)
    kept: list[Tensor] = []
    whit.vmap(lambda x: kept.append(x * 2) or x)(x)  # type: ignore[func-returns-value]
    with pytest.raises(ArgumentError, match=r"inside of vmap"):
        kept[0].tolist()
    with pytest.raises(ArgumentError, match=r"made inside of vmap"):
        (kept[0] + x).realize()


def test_writes_are_refused_by_name() -> None:
    state, x = Tensor([1.0, 2.0]).realize(), Tensor([[1.0, 2.0]])

    def assigns(x: Tensor) -> Tensor:
        state.assign(x)
        return x

    def writes(x: Tensor) -> Tensor:
        x[0] = 3.0
        return x

    with pytest.raises(ArgumentError, match="assigns to a tensor from outside of shape"):
        whit.vmap(assigns)(x)
    assert state.tolist() == [1.0, 2.0]
    with pytest.raises(ArgumentError, match="assigns to an argument of shape"):
        whit.vmap(writes)(x)
    assert x.tolist() == [[1.0, 2.0]]


def test_backward_inside_is_refused() -> None:
    w = Tensor([2.0], requires_grad=True)

    def trains(x: Tensor) -> Tensor:
        (w * x).sum().backward()
        return x

    with pytest.raises(ArgumentError, match="assigns to a tensor from outside"):
        whit.vmap(trains)(Tensor([[1.0], [2.0]]))
    assert w.grad is None


def test_axes_that_do_not_fit() -> None:
    x = Tensor([[1.0, 2.0]])
    with pytest.raises(ShapeError, match=r"over axis 2 of shape \(1, 2\)"):
        whit.vmap(lambda x: x, in_axes=2)(x)
    with pytest.raises(ShapeError, match="lengths"):
        whit.vmap(lambda x, y: x, in_axes=(0, 1))(x, x)
    with pytest.raises(ArgumentError, match="vmap of nothing"):
        whit.vmap(lambda x: x, in_axes=None)(x)
    with pytest.raises(ArgumentError, match="for 1 arguments"):
        whit.vmap(lambda x: x, in_axes=(0, 0))(x)
    with pytest.raises(ArgumentError, match="different forms"):
        whit.vmap(lambda x: x[0], in_axes=([0, 0],))([x])
    with pytest.raises(ArgumentError, match="ndarray"):
        whit.vmap(lambda x, y: x)(x, np.ones(1))
    with pytest.raises(ShapeError, match="out_axes=3"):
        whit.vmap(lambda x: x, out_axes=3)(x)
    with pytest.raises(ArgumentError, match="out_axes is None"):
        whit.vmap(lambda x: x, out_axes=None)(x)
    with pytest.raises(ArgumentError, match="returned 'text'"):
        whit.vmap(lambda x: "text")(x)


def test_an_error_inside_leaves_everything_as_it_was() -> None:
    with pytest.raises(ShapeError):
        whit.vmap(lambda x: x.reshape(7))(Tensor([[1.0]]))
    step = TinyJit(lambda x: (x * 2).realize())
    for _ in range(3):
        step(Tensor([1.0]))
    assert step.captures == 1
