"""The next row is fetched while this one is worked on: when, which lines; values stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.codegen.opts_kernels import elementwise, row_sum, softmax
from tests.codegen.test_keep import run
from tests.runtime.linear_kernels import buffer, program
from tests.runtime.linear_kernels import read as contents
from whit.codegen.pipeline import generate
from whit.codegen.target import Target
from whit.renderer import c, llvm
from whit.runtime.cpu import cpu_target
from whit.uop import Ops, UOp

# a machine with caches so small that small kernels exceed them
REAL = cpu_target("llvm", "llvm")
SMALL = REAL._replace(l1_bytes=1 << 13, l2_bytes=1 << 15, threads=1, native=REAL.native - {Ops.LDEXP})


def prefetches(ast: UOp, target: Target = SMALL) -> list[UOp]:
    return [u for u in generate(ast, target).linear.src if u.op is Ops.PREFETCH]


def test_rows_that_several_loops_read_are_fetched_ahead() -> None:
    found = prefetches(softmax(32, 1024))
    assert found and {u.src[0].arg.slot for u in found} == {1}
    assert all(u.arg == 2 for u in found)  # four rows of this length fill the first cache
    assert all(u.arg == 3 for u in prefetches(softmax(64, 512)))


@pytest.mark.parametrize(
    "ast",
    [
        softmax(4, 1024),  # all of it fits the second cache
        softmax(1024, 64),  # rows too short
        softmax(4, 1 << 14),  # a row does not fit
        row_sum(64, 1024),  # one loop
        elementwise(1 << 16),
    ],
    ids=["small", "short", "long", "one loop", "elementwise"],
)
def test_nothing_is_fetched_where_it_brings_nothing(ast: UOp) -> None:
    assert not prefetches(ast)


def test_targets_without_vectors_do_not_fetch() -> None:
    assert not prefetches(softmax(32, 1024), SMALL._replace(vector_bytes=0))


def value(index: UOp, counters: dict[UOp, int]) -> int:
    """An index instruction computed in Python."""
    if index.op is Ops.CONST:
        return int(index.arg)
    if index.op is Ops.RANGE:
        return counters[index]
    assert index.op in (Ops.ADD, Ops.MUL)
    a, b = (value(s, counters) for s in index.src)
    return a + b if index.op is Ops.ADD else a * b


def test_every_line_of_the_next_row_once() -> None:
    linear = generate(softmax(32, 1024), SMALL).linear
    open_loops: list[UOp] = []
    where: dict[UOp, list[UOp]] = {}
    for node in linear.src:
        if node.op is Ops.RANGE:
            open_loops.append(node)
        elif node.op is Ops.END:
            open_loops.pop()
        elif node.op is Ops.PREFETCH:
            where[node] = list(open_loops)
    lines = [
        value(node.src[1], {rows: 5, inner: step}) * 4 // 64
        for node, (rows, inner) in where.items()
        for step in range(inner.src[0].arg)
    ]
    assert sorted(lines) == list(range(6 * 1024 * 4 // 64, 7 * 1024 * 4 // 64))


def loops_with_prefetches(ast: UOp) -> list[int]:
    """For each loop at the end of which something is fetched: how many lines each time."""
    found: dict[UOp, int] = {}
    stack: list[UOp] = []
    for node in generate(ast, SMALL).linear.src:
        if node.op is Ops.RANGE:
            stack.append(node)
        elif node.op is Ops.END:
            stack.pop()
        elif node.op is Ops.PREFETCH:
            found[stack[-1]] = found.get(stack[-1], 0) + 1
    return list(found.values())


def test_loops_with_time_to_spare_fetch() -> None:
    """The loop of the exponentials computes for long; summing them up and dividing them does not."""
    assert len(loops_with_prefetches(softmax(32, 1024))) == 1


def test_a_loop_that_stores_past_the_caches_fetches_too() -> None:
    linear = generate(softmax(32, 1024), SMALL._replace(stream_bytes=1 << 16)).linear
    assert sum(u.op is Ops.PREFETCH for u in linear.src) >= 2
    inside: list[list[UOp]] = []
    for node in linear.src:
        if node.op is Ops.RANGE:
            inside.append([])
        elif node.op is Ops.PREFETCH:
            inside[-1].append(node)
    assert sum(bool(found) for found in inside) == 2


@pytest.mark.parametrize("shape", [(32, 1024), (33, 1000), (64, 513)])
def test_values(shape: tuple[int, int]) -> None:
    data = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    power = np.exp2((data.astype(np.float64) - data.max(1, keepdims=True)) * 1.4427)
    got = run(softmax(*shape), data, SMALL)
    np.testing.assert_allclose(got, power / power.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("device", ["CPU", "CPU:GCC", "PYTHON"])
def test_every_device_runs_it(device: str) -> None:
    """Addresses beyond the end of the buffer do not fault."""
    if device == "CPU:GCC":
        pytest.importorskip("shutil").which("gcc") or pytest.skip("no gcc")
    made = generate(softmax(16, 512), SMALL)
    assert any(u.op is Ops.PREFETCH for u in made.linear.src)
    data: Any = np.random.default_rng(4).standard_normal((16, 512)).astype(np.float32)
    buffers = [buffer(device, np.zeros_like(data)), buffer(device, data)]
    program(device, made.linear, made.name)([b.handle for b in buffers], [])
    power = np.exp2((data.astype(np.float64) - data.max(1, keepdims=True)) * 1.4427)
    got = contents(buffers[0], np.float32, data.shape)
    np.testing.assert_allclose(got, power / power.sum(1, keepdims=True), rtol=1e-5)


def test_spelling() -> None:
    linear = generate(softmax(32, 1024), SMALL).linear
    assert "@llvm.prefetch.p0(ptr %" in llvm.render(linear, "k") and ", 0, 2);" in c.render(linear, "k")
