"""The work of schedule and codegen grows with the graph, not with its square: counted in executed lines of
Python, which no other load of the machine changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from whit import Device, Tensor
from whit.codegen import generate
from whit.schedule.schedule import graph_key, make_schedule
from whit.uop import UOp


def lines_of(work: Callable[[], Any]) -> int:
    """Lines of Python that a call executes in this thread."""
    count = 0
    me = threading.get_ident()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line" and threading.get_ident() == me
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def leaf(*shape: int) -> Tensor:
    return Tensor.empty(*shape).realize()


def chain(n: int) -> list[Tensor]:
    """One value through n operations."""
    x = leaf(64)
    y = x
    for number in range(n):
        y = y + x if number % 2 else y * x
    return [y]


def functions(n: int) -> list[Tensor]:
    """Each value is used twice."""
    x = leaf(64)
    for _ in range(n):
        x = x.exp2() * x + x
    return [x]


def outputs(n: int) -> list[Tensor]:
    """Many results of one input."""
    x = leaf(64)
    return [x * float(number) + 1 for number in range(n)]


def tree(n: int) -> list[Tensor]:
    """A sum of n inputs, as wide as it is high."""
    found = [leaf(16) for _ in range(n)]
    while len(found) > 1:
        found = [a + b for a, b in zip(found[::2], found[1::2], strict=False)] + found[len(found) // 2 * 2 :]
    return found


def kernels(n: int) -> list[Tensor]:
    """One kernel after another."""
    x = y = leaf(16, 16)
    for _ in range(n):
        y = (y @ x).contiguous()
    return [y]


def updates(n: int) -> list[Tensor]:
    """An optimiser's step: tensors of few shapes, each overwritten."""
    found = [leaf(16 + number % 5) for number in range(n)]
    for x in found:
        x.assign(x * 0.9 + 1)
    return found


def writes(n: int) -> list[Tensor]:
    """Version after version of one memory."""
    x = leaf(64)
    for number in range(n):
        x[number % 64] = float(number)
    return [x]


def normalised(n: int) -> list[Tensor]:
    """Reductions and what uses them, as in a transformer without its matmuls."""
    x = leaf(16, 32)
    for _ in range(n):
        x = x + (x * 2).softmax()
    return [x]


def gradients(n: int) -> list[Tensor]:
    """Forward, backward; every activation lives until its gradient."""
    weights = [leaf(16, 16) for _ in range(n)]
    x = leaf(16, 16)
    for weight in weights:
        x = (x @ weight).tanh()
    return x.sum().gradient(*weights)


def perceptrons(n: int) -> list[Tensor]:
    """Layers whose products are much larger than what they are made of, with masks from the way there."""
    weights, biases = [leaf(64, 64) for _ in range(n)], [leaf(64) for _ in range(n)]
    x = leaf(32, 64)
    for weight, bias in zip(weights, biases, strict=True):
        x = (x @ weight + bias).relu()
    return x.sum().gradient(*weights, *biases)


def joined(n: int) -> list[Tensor]:
    """cat of n tensors."""
    return [Tensor.cat(*[leaf(8) for _ in range(n)])]


def copies(n: int) -> list[Tensor]:
    """Back and forth between two devices."""
    x = leaf(16)
    for number in range(n):
        x = (x + 1).to("CPU:1" if number % 2 else "CPU")
    return [x]


def swaps(n: int) -> list[Tensor]:
    """Pairs that exchange their contents: each needs a copy of an old version."""
    pairs = [(leaf(8), leaf(8)) for _ in range(n)]
    for a, b in pairs:
        old = a + 0
        a.assign(b + 0)
        b.assign(old)
    return [t for pair in pairs for t in pair]


def attention(n: int) -> list[Tensor]:
    """Layers of attention, forward and backward."""
    weights = [leaf(3, 16, 16) for _ in range(n)]
    x = leaf(2, 8, 16)
    for weight in weights:
        q, k, v = [(x @ weight[part]).reshape(2, 8, 2, 8).transpose(1, 2) for part in range(3)]
        x = x + q.scaled_dot_product_attention(k, v, is_causal=True).transpose(1, 2).reshape(2, 8, 16)
    return x.sum().gradient(*weights)


FACTOR = 4
LEEWAY = 1.3  # beyond proportional


def lines_to_schedule(make: Callable[[int], list[Tensor]], n: int) -> int:
    roots = [t.uop for t in make(n)]
    return lines_of(lambda: make_schedule(roots, graph_key(roots).buffers))


SCHEDULED = [(chain, 24), (functions, 16), (outputs, 24), (tree, 24), (kernels, 16), (updates, 20),
             (writes, 24), (normalised, 6), (gradients, 3), (perceptrons, 6), (attention, 2), (joined, 16),
             (copies, 16), (swaps, 8)]


@pytest.mark.parametrize("make, small", SCHEDULED)
def test_schedule_grows_with_the_graph(make: Callable[[int], list[Tensor]], small: int) -> None:
    few, many = [lines_to_schedule(make, n) for n in (small, small * FACTOR)]
    assert many < LEEWAY * FACTOR * few, (few, many)


@pytest.mark.slow
@pytest.mark.parametrize("make, small", SCHEDULED)
def test_schedule_grows_with_large_graphs(make: Callable[[int], list[Tensor]], small: int) -> None:
    few, many = [lines_to_schedule(make, small * n) for n in (FACTOR, FACTOR * FACTOR)]
    assert many < LEEWAY * FACTOR * few, (few, many)


@pytest.mark.parametrize("make", [chain, functions, joined, tree, outputs])
def test_codegen_grows_with_the_kernels(make: Callable[[int], list[Tensor]]) -> None:
    device = Device.get("CPU")
    counts = []
    for n in (10, 10 * FACTOR):
        roots = [t.uop for t in make(n)]
        calls = make_schedule(roots, graph_key(roots).buffers).calls
        asts: list[UOp] = list(dict.fromkeys([call.ast for call in calls if call.ast is not None]))

        def compile_all(asts: list[UOp] = asts) -> None:
            for ast in asts:
                device.render(generate(ast, device.target).linear, "k")

        compile_all()  # rules are compiled when first needed
        for ast in asts:  # what nodes remember would make the second time cheaper
            for node in ast.toposort():
                node._canonical = node._linear = node._bounds = node._ranges = None
        counts.append(lines_of(compile_all))
    assert counts[1] < LEEWAY * FACTOR * counts[0], counts
