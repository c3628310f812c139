"""Reads and sums by index where comparing every place with every position would be slow: against torch and
NumPy, values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from whit import Context, Tensor, TinyJit, dtypes, grad, jvp, vmap
from whit.nn import Embedding
from whit.tensor.scatter import LEAST_PAIRS, add_slices
from whit.uop import Ops

rng = np.random.default_rng(0)
PLACES, POSITIONS = 3000, 200
assert PLACES * POSITIONS > LEAST_PAIRS


def near(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    want = want.detach().numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
    np.testing.assert_allclose(got.numpy(), want, rtol=tolerance, atol=tolerance * 10)


def repeated(shape: int | tuple[int, ...], size: int = PLACES) -> np.ndarray:
    """Indices of which some come several times."""
    found = rng.integers(0, size, shape)
    found.reshape(-1)[::3] = found.reshape(-1)[0]
    return found


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("shape", [(PLACES,), (PLACES, 5), (3, PLACES, 2)])
def test_gradient_of_a_read(shape: tuple[int, ...], device: str) -> None:
    axis = 1 if len(shape) == 3 else 0
    count = 100 if device == "PYTHON" else POSITIONS
    x, index = rng.standard_normal(shape), repeated(count)
    t = torch.tensor(x, requires_grad=True)
    taken = t.index_select(axis, torch.tensor(index))
    g = rng.standard_normal(tuple(taken.shape))
    (taken * torch.tensor(g)).sum().backward()
    w = Tensor(x, device=device, requires_grad=True)
    i = Tensor(index, device=device)
    out = w[:, i] if axis else w[i]
    (out * Tensor(g, device=device)).sum().backward()
    near(out, taken)
    near(w.grad, t.grad)


def test_embedding_in_a_captured_step() -> None:
    layer, words = Embedding(5000, 8), repeated((4, 32), 5000)
    other = torch.nn.Embedding(5000, 8)
    other.weight.data = torch.tensor(layer.weight.numpy())

    @TinyJit
    def step(words: Tensor) -> Tensor:
        layer.weight.grad = None
        layer(words).square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.realize()

    for _ in range(3):
        found = step(Tensor(words).realize())
    other(torch.tensor(words)).square().sum().backward()
    near(found, other.weight.grad)


def test_no_kernel_compares_all_pairs() -> None:
    """The work of a gradient is that of the positions and of the places, not of both multiplied."""
    w = Tensor(rng.standard_normal((PLACES, 4)).astype(np.float32), requires_grad=True)
    found = w[Tensor(repeated(POSITIONS))].sum().gradient(w)[0].uop
    sizes = [node.size for node in found.toposort() if isinstance(node.size, int)]
    assert max(sizes) <= PLACES * 4 and any(node.op is Ops.CALL for node in found.toposort())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8"])
def test_index_add(dtype: str) -> None:
    x = rng.integers(-3 * (dtype != "uint8"), 5, (2, PLACES)).astype(dtype)
    index = repeated(POSITIONS)
    source = rng.integers(0, 3, (2, POSITIONS)).astype(dtype)
    want = torch.tensor(x).index_add(1, torch.tensor(index), torch.tensor(source), alpha=2)
    got = Tensor(x).index_add(1, Tensor(index), Tensor(source), alpha=2)
    assert got.dtype.name == dtype
    near(got, want, 1e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_and_scatter_add(dim: int) -> None:
    shape = [40, 30, 20]
    shape[dim] = 600
    other = [30, 25, 20]
    other[dim] = 700
    x, index = rng.standard_normal(shape), repeated(tuple(other), 600)
    source = rng.standard_normal(other)
    t, s = torch.tensor(x, requires_grad=True), torch.tensor(source, requires_grad=True)
    a, b = Tensor(x, requires_grad=True), Tensor(source, requires_grad=True)
    i, n = torch.tensor(index), Tensor(index)
    want = [t.gather(dim, i), t.scatter_add(dim, i, s)]
    got = [a.gather(dim, n), a.scatter_add(dim, n, b)]
    for mine, theirs in zip(got, want, strict=True):
        near(mine, theirs)
    (want[0].sin().sum() + want[1].square().sum()).backward()
    (got[0].sin().sum() + got[1].square().sum()).backward()
    near(a.grad, t.grad)
    near(b.grad, s.grad)
    near(
        Tensor(x).scatter_reduce(dim, n, 2.0, "sum"),
        t.detach().scatter_add(dim, i, torch.full(other, 2.0).double()),
    )


def test_indices_outside() -> None:
    """Negative ones count from the end, others are left out; with CHECK=1 they are named."""
    x, source = Tensor.zeros(PLACES), Tensor(np.arange(1, POSITIONS + 1, dtype=np.float32))
    index = np.full(POSITIONS, PLACES + 7)
    index[:3] = [-1, 5, -PLACES - 1]
    got = x.index_add(0, Tensor(index), source).numpy()
    assert (got[-1], got[5], got.sum()) == (1, 2, 3)
    got = x.scatter_add(0, Tensor(index), source).numpy()
    assert (got[-1], got[5], got.sum()) == (1, 2, 3)
    large = np.array([2**32 + 1] * POSITIONS)
    assert x.index_add(0, Tensor(large), source).numpy().sum() == 0
    with Context(CHECK=1), pytest.raises(Exception, match="-3001 at position"):
        x.index_add(0, Tensor(index), source).realize()


def test_sums_of_halves_are_float32() -> None:
    x = Tensor.zeros(PLACES, dtype=dtypes.float16)
    source = Tensor(np.full(4096, 0.25, np.float16))
    got = x.index_add(0, Tensor(np.zeros(4096, np.int32)), source)
    assert got.dtype is dtypes.float16 and got[0].item() == 1024


def test_derivatives_of_derivatives() -> None:
    x, index = rng.standard_normal((PLACES, 2)), repeated(POSITIONS)
    v, i = rng.standard_normal((PLACES, 2)), Tensor(index)

    def f(w: Tensor) -> Tensor:
        return w[i].sin().square().sum()

    t = torch.tensor(x)

    def g(w: torch.Tensor) -> torch.Tensor:
        return w[torch.tensor(index)].sin().square().sum()

    want = torch.func.jvp(torch.func.grad(g), (t,), (torch.tensor(v),))
    got = jvp(grad(f), (Tensor(x),), (Tensor(v),))
    near(got[0], want[0])
    near(got[1], want[1])


def test_under_vmap() -> None:
    x, index = rng.standard_normal((3, PLACES, 2)), repeated((3, POSITIONS))

    def f(w: Tensor, i: Tensor) -> Tensor:
        return w[i].square().sum()

    got = vmap(grad(f))(Tensor(x), Tensor(index))
    for row in range(3):
        t = torch.tensor(x[row], requires_grad=True)
        t[torch.tensor(index[row])].square().sum().backward()
        near(got[row], t.grad)


def test_parts_of_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are shared out unevenly, or there are fewer than threads."""
    for threads, length in ((3, 10), (7, 3), (4, 1)):
        monkeypatch.setattr("whit.tensor.scatter.cpu_threads", lambda count=threads: count)
        index = rng.integers(0, length, 12)
        updates = rng.standard_normal((12, 3)).astype(np.float32)
        want = np.zeros((length, 3))
        np.add.at(want, index, updates)
        got = Tensor(add_slices(Tensor(index).uop, Tensor(updates).uop, 0, length))
        near(got, want)


@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_and_index_copy(dim: int) -> None:
    """The last write to a place stays, and only it has a gradient."""
    shape, other = [50, 40], [45, 30]
    shape[dim] = other[dim] = 700
    x, source, index = rng.standard_normal(shape), rng.standard_normal(other), repeated(tuple(other), 700)
    a, b = Tensor(x, requires_grad=True), Tensor(source, requires_grad=True)
    got = a.scatter(dim, Tensor(index), b)
    want, winners = x.copy(), {}
    for place in np.ndindex(*other):
        target = list(place)
        target[dim] = int(index[place])
        want[tuple(target)] = source[place]
        winners[tuple(target)] = place
    near(got, want, 0)
    weights = rng.standard_normal(shape)
    (got * Tensor(weights)).sum().backward()
    of_x, of_source = weights.copy(), np.zeros(other)
    for target, place in winners.items():
        of_x[target], of_source[place] = 0, weights[target]
    near(a.grad, of_x)
    near(b.grad, of_source)
    rows = repeated(400, 700)
    some = rng.standard_normal((50, 400) if dim else (400, 40))
    copied = x.copy()
    for position, row in enumerate(rows):
        if dim:
            copied[:, row] = some[:, position]
        else:
            copied[row] = some[position]
    near(Tensor(x).index_copy(dim, Tensor(rows), Tensor(some)), copied, 0)


def test_assignment_by_index() -> None:
    x, index = rng.standard_normal((PLACES, 3)), repeated(POSITIONS)
    values = rng.standard_normal((POSITIONS, 3))
    want = x.copy()
    for position, row in enumerate(index):
        want[row] = values[position]
    got = Tensor(x)
    got[Tensor(index)] = Tensor(values)
    near(got, want, 0)
