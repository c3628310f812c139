"""Kernels and schedules stay small however a graph is made: nothing is computed at very many places, and no
kernel holds so much that compiling takes long."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from whit import Tensor
from whit.schedule import schedule
from whit.schedule.memory import ALIGN, Lifetime, in_order_of_use, largest_first, plan
from whit.uop import Ops, UOp

LARGEST = 1500  # nodes of a kernel


def kernels(*tensors: Tensor) -> list[UOp]:
    made, _, _ = schedule([t.uop for t in tensors])
    return [call.ast for call in made.calls if call.ast is not None]


def ops_of(kernel: UOp) -> int:
    return sum([n.op.is_alu and n.dtype.is_float for n in kernel.toposort()])


def test_a_diamond_of_functions_is_cut() -> None:
    """sin(y) * y + y, 100 times: each value is used twice, at one place."""
    x = Tensor.linspace(0.1, 0.3, 64).realize()
    y, want = x, x.numpy().astype(np.float64)
    for _ in range(100):
        y, want = y.sin() * y * 0.01 + y, np.sin(want) * want * 0.01 + want
    found = kernels(y)
    assert len(found) > 2 and max(map(ops_of, found)) < 600
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-4)


def test_cut_kernels_are_not_joined_again() -> None:
    x = Tensor.ones(64).contiguous().realize()
    y = x
    for number in range(2000):
        y = y + x if number % 2 else y * 1.0001
    found = kernels(y)
    assert max(map(ops_of, found)) < 800
    want = np.float64(1)
    for number in range(2000):
        want = want + 1 if number % 2 else want * 1.0001
    np.testing.assert_allclose(y.numpy(), np.full(64, want), rtol=1e-4)


def second(function: Any, x: Any, lib: Any) -> Any:
    """The gradient of the squared gradient."""
    total = (function(x) ** 2).sum()
    if lib is Tensor:
        (first,) = total.gradient(x)
        return (first**2).sum().gradient(x)[0]
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    return torch.autograd.grad((first**2).sum(), x)[0]


@pytest.mark.parametrize("shape", [(2, 5), (3, 2, 2)])
def test_second_derivatives_of_nested_softmaxes(shape: tuple[int, ...]) -> None:
    """Tiny tensors: computing everything again would be cheap, compiling it is not."""
    values = np.random.default_rng(3).uniform(-1, 1, shape)

    def function(x: Any) -> Any:
        return ((x @ x.transpose(-1, -2)).softmax(-1).softmax(-1) @ x).softmax(-1)

    x, t = Tensor(values), torch.tensor(values, requires_grad=True)
    found = second(function, x, Tensor)
    sizes = [len(kernel.toposort()) for kernel in kernels(found)]
    assert max(sizes) < LARGEST, sizes
    wanted = second(function, t, torch)
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-6, atol=1e-12)


def test_a_reduction_wanted_at_many_places_is_computed_once() -> None:
    x = Tensor(np.arange(12.0).reshape(3, 4))
    total = x.square().sum(1)  # (3,)
    parts = [total[n % 3 : n % 3 + 1] * float(n) for n in range(20)]
    joined = Tensor.cat(*parts)
    reduces = sum([n.op is Ops.REDUCE for kernel in kernels(joined) for n in kernel.toposort()])
    assert reduces <= 8
    sums = np.square(np.arange(12.0).reshape(3, 4)).sum(1)
    np.testing.assert_array_equal(joined.numpy(), [sums[n % 3] * n for n in range(20)])


# ---- memory ------------------------------------------------------------------------------------------------


def lifetimes(seed: int, count: int) -> list[Lifetime]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        first = draw.randrange(30)
        found.append(Lifetime(draw.choice([0, 1, 64, 100, 4096]), first, first + draw.randrange(8)))
    return found


def together(items: list[Lifetime]) -> list[tuple[int, int]]:
    """Pairs that are alive at one time."""
    everyone = range(len(items))
    return [(a, b) for a in everyone for b in everyone
            if a != b and items[a].first <= items[b].last and items[b].first <= items[a].last]


def peak(items: list[Lifetime]) -> int:
    """The most bytes that are alive at one time: no plan needs less."""
    rounded = [-(-item.nbytes // ALIGN) * ALIGN for item in items]
    alive = [[n for n, i in zip(rounded, items, strict=True) if i.first <= t <= i.last] for t in range(40)]
    return max(map(sum, alive))


@pytest.mark.parametrize("planner", [largest_first, in_order_of_use])
@pytest.mark.parametrize("seed", range(5))
def test_memory_plans_never_overlap_and_waste_little(planner: Any, seed: int) -> None:
    items = lifetimes(seed, 60)
    offsets, size = planner(items)
    for a, b in together(items):
        if items[a].nbytes and items[b].nbytes:
            assert offsets[a] + items[a].nbytes <= offsets[b] or offsets[b] + items[b].nbytes <= offsets[a]
    assert all(offset % ALIGN == 0 for offset in offsets)
    ends = [offset + -(-item.nbytes // ALIGN) * ALIGN for offset, item in zip(offsets, items, strict=True)]
    assert max(ends) <= size <= 1.5 * peak(items)


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_come_first_each_as_low_as_it_can(seed: int) -> None:
    items = lifetimes(seed, 60)
    offsets, _ = largest_first(items)
    alive = together(items)
    for a in range(60):
        larger = [b for x, b in alive if x == a and (items[b].nbytes, -b) > (items[a].nbytes, -a)]
        for place in range(0, offsets[a], ALIGN):  # a lower place would meet an item placed before
            assert any(offsets[b] < place + max(1, items[a].nbytes) and place < offsets[b] + items[b].nbytes
                       for b in larger)


def test_large_temporaries_start_at_a_page() -> None:
    items = [Lifetime(nbytes, 0, 1) for nbytes in (5000, 64, 9000, 4096, 4095, 5000)]
    offsets, _ = largest_first(items)
    assert all(offset % 4096 == 0 for offset, item in zip(offsets, items, strict=True) if item.nbytes >= 4096)
    assert offsets[1] % 4096 and offsets[1] < 9000 + 4096  # small ones fill what is left between


def test_many_temporaries_are_planned_in_order_of_use() -> None:
    """Activations that all live until their gradient."""
    count = 3000
    items = [Lifetime(1024, n, 2 * count - n) for n in range(count)] \
        + [Lifetime(512, n, n + 1) for n in range(2 * count)]
    offsets, size = plan(items)
    assert (offsets, size) == in_order_of_use(items)
    most = max((n + 1) * 1024 + 2 * 512 for n in range(count))
    assert most <= size <= 1.01 * most


# ---- writes that wait for each other -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_exchanged_contents(seed: int) -> None:
    """Tensors take each other's contents at once, in several permutations one after another, with readers of
    old versions in between."""
    draw = random.Random(seed)
    count = draw.choice([2, 5, 12])
    wanted = [np.arange(4.0) + 10 * n for n in range(count)]
    tensors = [Tensor(w).contiguous().realize() for w in wanted]
    readers, expected = [], []
    for _ in range(draw.choice([1, 2, 3])):
        order = draw.sample(range(count), count)
        scale = draw.choice([1.0, 2.0])
        old = [t * scale for t in tensors]
        if draw.random() < 0.7:
            n = draw.randrange(count)
            readers.append(tensors[n].sum() + old[order[n]].sum())
            expected.append(wanted[n].sum() + (wanted[order[n]] * scale).sum())
        for tensor, source in zip(tensors, order, strict=True):
            tensor.assign(old[source])
        wanted = [wanted[source] * scale for source in order]
    Tensor.realize(*tensors, *readers)
    for tensor, want in zip(tensors, wanted, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), want)
    for reader, total in zip(readers, expected, strict=True):
        assert reader.item() == total
