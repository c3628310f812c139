"""Large results go past the caches: which stores are marked, and that marked ones write what they should
wherever the memory begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.codegen.opts_kernels import AVX512, elementwise, folds, loops, param, read, store
from tests.runtime.linear_kernels import NUMPY, Kernel, buffer, program
from tests.runtime.linear_kernels import read as contents
from whit.codegen.pipeline import generate
from whit.codegen.stream import NONTEMPORAL, stream_stores
from whit.codegen.target import Target
from whit.runtime.cpu import bytes_at, cpu_target, memory
from whit.runtime.device import Device
from whit.uop import DType, Ops, UOp, dtypes
from whit.uop.text import parse, show

LARGE = AVX512._replace(native=frozenset(cpu_target("llvm", "llvm").native), stream_bytes=1 << 20)


def stores(ast: UOp, target: Target = LARGE) -> list[UOp]:
    return [u for u in generate(ast, target).linear.src if u.op is Ops.STORE]


def test_large_results_are_streamed() -> None:
    assert all(u.arg == NONTEMPORAL for u in stores(elementwise(1 << 18)))
    assert all(u.arg is None for u in stores(elementwise(1 << 17)))
    assert all(u.arg is None for u in stores(elementwise(1 << 18), AVX512._replace(native=LARGE.native)))


def test_what_is_read_is_not_streamed() -> None:
    """In place: the lines are in the cache already."""
    (i,) = loops(1 << 18)
    p = param(0, 1 << 18)
    assert all(u.arg is None for u in stores(UOp.sink(store(p, i, read(p, i) * 2.0, i))))


def test_a_few_sums_of_much_are_not_streamed() -> None:
    (i,), (k,) = loops(64), folds(1, 1 << 16)
    value = read(param(1, 64 << 16), i * (1 << 16) + k).reduce_ranges(Ops.ADD, k)
    assert all(u.arg is None for u in stores(UOp.sink(store(param(0, 64), i, value, i))))


def test_all_results_of_a_kernel_count() -> None:
    (i,) = loops(1 << 17)
    value = read(param(2, 1 << 17), i)
    first, second = store(param(0, 1 << 17), i, value * 2.0, i), store(param(1, 1 << 17), i, -value, i)
    found = stores(UOp.sink(first, second))
    assert len(found) >= 2 and all(u.arg == NONTEMPORAL for u in found)


def test_single_elements_and_scattered_ones_are_not_streamed() -> None:
    (i,) = loops(1 << 18)
    one = stores(UOp.sink(store(param(0, 1 << 20), i * 3, read(param(1, 1 << 18), i), i)))
    assert all(u.arg is None for u in one)
    scalar = LARGE._replace(vector_bytes=0)
    assert all(u.arg is None for u in stores(elementwise(1 << 18), scalar))


def test_the_text_form_shows_it() -> None:
    linear = generate(elementwise(1 << 18), LARGE).linear
    text = show(linear)
    assert '; "nontemporal"' in text and parse(text) is linear


def copies(size: int, dtype: DType, lanes: int) -> UOp:
    """out = a, `lanes` at a time, in two tasks' worth of one loop; the last vector is masked if need be."""
    kernel = Kernel()
    out, a = kernel.param(0, dtype, size), kernel.param(1, dtype, size)
    loop = kernel.range(-(-size // lanes))
    index = kernel.alu(Ops.MUL, loop, kernel.const(lanes))
    mask = None
    if size % lanes:
        number = kernel.add(Ops.CAST, dtypes.int32, index)
        wide = kernel.add(Ops.BROADCAST, dtypes.int32.vec(lanes), number)
        lane = UOp.const(tuple(range(lanes)), dtypes.int32.vec(lanes))
        place = kernel.alu(Ops.ADD, wide, lane)
        mask = kernel.alu(Ops.CMPLT, place, UOp.const(size, dtypes.int32.vec(lanes)))
    kernel.store(out, index, kernel.load(a, index, lanes, mask), mask)
    kernel.end(loop)
    return kernel.linear()


def has_gcc() -> bool:
    import shutil

    return shutil.which("gcc") is not None


DTYPES = [dtypes.float32, dtypes.float64, dtypes.uint8, dtypes.float16, dtypes.bool]
DEVICES = ["CPU", pytest.param("CPU:GCC", marks=pytest.mark.skipif(not has_gcc(), reason="no gcc"))]


@pytest.mark.parametrize("device", [*DEVICES, "PYTHON"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [128, 131])
def test_values(device: str, dtype: DType, size: int) -> None:
    rng = np.random.default_rng(size)
    data = rng.integers(0, 2, size).astype(NUMPY[dtype])
    for nbytes in (16, 32, 64):
        lanes = nbytes // dtype.itemsize
        linear = stream_stores(copies(size, dtype, lanes), LARGE._replace(stream_bytes=1))
        assert any(u.arg == NONTEMPORAL for u in linear.src)
        out, source = buffer(device, np.zeros(size, NUMPY[dtype])), buffer(device, data)
        program(device, linear)([out.handle, source.handle], [])
        np.testing.assert_array_equal(contents(out, NUMPY[dtype], size), data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [0, 4, 8, 16, 32, 60, 64])
def test_memory_that_is_not_aligned(device: str, shift: int) -> None:
    """Memory that something else owns may begin anywhere; a streamed store would fault."""
    data = np.arange(100, dtype=np.float32)
    linear = stream_stores(copies(100, dtypes.float32, 16), LARGE._replace(stream_bytes=1))
    address, size = memory.allocate(1024), 1024
    runtime: Any = Device.get(device)
    try:
        view = bytes_at(address, size)
        view[:] = bytes(size)
        out = runtime.from_memory(address + shift, 400)
        program(device, linear)([out.handle, buffer(device, data).handle], [])
        got = np.frombuffer(view[shift : shift + 400], np.float32).copy()
        np.testing.assert_array_equal(got, data)
        assert not any(view[:shift]) and not any(view[shift + 400 :])
    finally:
        memory.free(address, size)


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 13])
def test_whole_kernels(size: int) -> None:
    """The heuristics' kernel with its results streamed, on all threads."""
    target = cpu_target("llvm", "llvm")._replace(stream_bytes=1)
    made = generate(elementwise(size), target)
    assert any(u.arg == NONTEMPORAL for u in made.linear.src)
    a, b = np.random.default_rng(1).standard_normal((2, size)).astype(np.float32)
    buffers = [buffer("CPU", x) for x in (np.zeros(size, np.float32), a, b)]
    program("CPU", made.linear, made.name, made.tasks)([x.handle for x in buffers], [])
    np.testing.assert_array_equal(contents(buffers[0], np.float32, size), a * np.float32(2) + b)


def test_the_kernel_ends_with_a_fence() -> None:
    """Streamed stores are ordered by nothing else on x86; other kernels do not pay for it."""
    from whit.renderer import c, llvm

    linear = copies(128, dtypes.float32, 16)
    streamed = stream_stores(linear, LARGE._replace(stream_bytes=1))
    text = llvm.render(streamed, "k", fence="llvm.x86.sse.sfence")
    assert "call void @llvm.x86.sse.sfence()\n  ret void" in text and "!nontemporal" in text
    plain = llvm.render(linear, "k", fence="llvm.x86.sse.sfence")
    assert "sfence" not in plain and "nontemporal" not in plain
    assert "STREAM_END;\n}" in c.render(streamed, "k") and "STREAM" not in c.render(linear, "k")
