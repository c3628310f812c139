"""The next row is fetched while this one is worked on: when, which lines; values stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.codegen.opts_kernels import elementwise, fold, folds, loops, param, read, row_sum, softmax, store
from tests.codegen.test_keep import run
from tests.devices import GCC
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


def test_long_streams_are_fetched_ahead() -> None:
    """Each line once, a page before it is read; not where all of it fits the caches."""
    target = SMALL._replace(stream_bytes=1 << 17)
    linear = generate(elementwise(1 << 18), target).linear
    found = [u for u in linear.src if u.op is Ops.PREFETCH]
    (loop,) = [u for u in linear.src if u.op is Ops.RANGE]
    for slot in (1, 2):
        lines = [
            value(u.src[1], {loop: step}) * 4
            for u in found
            if u.src[0].arg.slot == slot
            for step in range(loop.src[0].arg)
        ]
        assert sorted(lines) == list(range(4096, 4096 + (4 << 18), 64))
    assert not prefetches(elementwise(1 << 14), target)


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


def fetched(linear: UOp, row: int) -> tuple[list[int], dict[UOp, int]]:
    """The lines of the buffer that are fetched while a row is worked on; by loop, how many times."""
    open_loops: list[UOp] = []
    lines: list[int] = []
    times: dict[UOp, int] = {}
    for node in linear.src:
        if node.op is Ops.RANGE:
            open_loops.append(node)
        elif node.op is Ops.END:
            open_loops.pop()
        elif node.op is Ops.PREFETCH:
            rows, inner = open_loops
            count = inner.src[0].arg
            lines += [value(node.src[1], {rows: row, inner: step}) * 4 // 64 for step in range(count)]
            times[inner] = times.get(inner, 0) + count
    return lines, times


@pytest.mark.parametrize("columns", [1024, 2048])
@pytest.mark.parametrize("stream_bytes", [0, 1 << 16])
def test_every_line_of_the_next_row(columns: int, stream_bytes: int) -> None:
    target = SMALL._replace(l2_bytes=1 << 17, stream_bytes=stream_bytes)
    lines, times = fetched(generate(softmax(64, columns), target).linear, 5)
    each = columns * 4 // 64
    assert set(lines) >= set(range(6 * each, 7 * each)) and max(lines) < 7.5 * each
    assert len(lines) <= 1.5 * each  # few come twice
    assert len(times) > 1  # all loops over a row fetch a part


def test_loops_fetch_as_they_have_time() -> None:
    """The loop of the exponentials computes for long; the one of the maximum does not."""
    _, times = fetched(generate(softmax(64, 2048), SMALL._replace(l2_bytes=1 << 17)).linear, 5)
    first, second, *_ = times.values()
    assert second > 3 * first > 0


def test_a_loop_that_stores_past_the_caches_fetches_most() -> None:
    """Mean, differences and their squares take a few instructions; stores past the caches take long."""
    (i, j), k = loops(64, 2048), folds(2, 2048)[0]
    x = param(1, 64 * 2048)
    total = fold(Ops.ADD, read(x, i * 2048 + k) * read(x, i * 2048 + k), k)
    scaled = UOp.sink(store(param(0, 64 * 2048), i * 2048 + j, read(x, i * 2048 + j) * total, i, j))
    _, times = fetched(generate(scaled, SMALL._replace(l2_bytes=1 << 17, stream_bytes=1 << 16)).linear, 5)
    first, second = times.values()
    assert second > 3 * first > 0


@pytest.mark.parametrize("shape", [(32, 1024), (33, 1000), (64, 513)])
def test_values(shape: tuple[int, int]) -> None:
    data = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    power = np.exp2((data.astype(np.float64) - data.max(1, keepdims=True)) * 1.4427)
    got = run(softmax(*shape), data, SMALL)
    np.testing.assert_allclose(got, power / power.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("device", ["CPU", GCC, "PYTHON"])
def test_every_device_runs_it(device: str) -> None:
    """Addresses beyond the end of the buffer do not fault."""
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
