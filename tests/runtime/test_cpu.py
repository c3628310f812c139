"""The CPU device: memory, copies, names, compilers that are missing or fail, the disk cache between
processes."""

from __future__ import annotations

import array
import gc
import itertools
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.linear_kernels import Kernel, buffer, program, read
from tests.threads import run_together
from whit.helpers import CompileError, DeviceError
from whit.runtime import cpu, native
from whit.runtime.cpu import CCompiler, CPUDevice
from whit.runtime.device import Buffer, Device, PlanCall
from whit.runtime.memory import HostMemory, size_class
from whit.uop import Ops, UOp, dtypes

ROOT = Path(__file__).parents[2]


def add_one(size: int = 8) -> UOp:
    kernel = Kernel()
    out, a = kernel.param(0, dtypes.float32), kernel.param(1, dtypes.float32)
    loop = kernel.range(size)
    kernel.store(out, loop, kernel.alu(Ops.ADD, kernel.load(a, loop), kernel.const(1.0, dtypes.float32)))
    kernel.end(loop)
    return kernel.linear()


# ---- memory


@pytest.mark.parametrize(
    "nbytes",
    [1, 63, 64, 65, 100, 4095, 4096, 5000, 1 << 16, (1 << 16) + 1, 1 << 20, 3_000_001, 2**31 + 5, 2**40],
)
def test_size_classes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes and size % 64 == 0 and size_class(size) == size
    assert size - nbytes <= max(63, nbytes // 4 if nbytes <= 1 << 16 else nbytes // 16)


def test_blocks_are_aligned_distinct_and_reused() -> None:
    memory = HostMemory()
    sizes = [1, 64, 100, 1000, 4096, 10_000, 70_000, 5 << 20] * 3
    blocks = [(memory.allocate(size), size) for size in sizes]
    assert all(address % 64 == 0 for address, _ in blocks)
    assert all(address % 4096 == 0 for address, size in blocks if size >= 4096)
    assert all(address % (2 << 20) == 0 for address, size in blocks if size >= 2 << 20)
    ordered = sorted(blocks)
    assert all(low + size <= high for (low, size), (high, _) in itertools.pairwise(ordered))
    assert memory.used == sum(map(size_class, sizes))
    for address, size in blocks:
        cpu.bytes_at(address, size)[:] = b"\x5a" * size  # all of it can be written
        memory.free(address, size)
    assert memory.used == 0
    again = {memory.allocate(size) for size in sizes}
    assert again == {address for address, _ in blocks}


def test_threads_never_get_the_same_block() -> None:
    memory, taken = HostMemory(), []

    def work() -> None:
        mine = [memory.allocate(64) for _ in range(3000)]
        taken.extend(mine)

    run_together([work] * 4)
    assert len(set(taken)) == 12000 and memory.used == 64 * 12000


def test_kept_memory_is_bounded() -> None:
    memory = HostMemory()
    memory.limit = 8 << 20
    for address in [memory.allocate(3 << 20) for _ in range(6)]:
        memory.free(address, 3 << 20)
    assert 0 < memory.kept <= 8 << 20
    memory.release()
    assert memory.kept == 0


def test_a_smaller_request_takes_a_kept_block_of_about_its_size() -> None:
    memory = HostMemory()
    block = memory.allocate(100 << 20)
    memory.free(block, 100 << 20)
    assert memory.allocate(60 << 20) == block and memory.kept == 0
    assert memory.allocate(100 << 20) != block  # it is in use
    memory.free(block, 60 << 20)
    assert memory.allocate(100 << 20) == block  # whole again
    memory.free(block, 100 << 20)
    assert memory.allocate(40 << 20) != block  # more than half of it would be for nothing


def test_blocks_together_stay_near_what_was_in_use_at_once() -> None:
    """A step whose temporaries have another size every time: 64 MiB and 130 MiB alternate."""
    memory = HostMemory()
    for _ in range(3):
        for size in (64 << 20, 130 << 20):
            block = memory.allocate(size)
            assert memory.used + memory.kept <= memory.most * 5 // 4
            memory.free(block, size)
    assert memory.used == 0 and memory.kept <= size_class(130 << 20) * 5 // 4
    memory.release()


def test_more_memory_than_there_is() -> None:
    with pytest.raises(DeviceError, match=r"allocate .* on the CPU: .*To fix: free tensors"):
        Device.get("CPU").allocate(1 << 60)


def test_buffers_give_their_memory_back() -> None:
    before = cpu.memory.used
    held = Buffer("CPU", 1 << 20)
    address = held.handle
    assert cpu.memory.used == before + size_class(1 << 20)
    window = held.view(64, 128)
    assert window.handle == address + 64
    del held
    gc.collect()
    assert cpu.memory.used > before  # the window keeps it
    del window
    gc.collect()
    assert cpu.memory.used == before


def test_copies_take_every_memoryview() -> None:
    target = Buffer("CPU", 16)
    for data in (
        memoryview(bytes(range(16))),
        memoryview(bytearray(range(16))),
        memoryview(array.array("i", [1, -2, 3, -4])),
        memoryview(np.arange(4, dtype=np.float32).reshape(2, 2)),
        memoryview(np.arange(2.0)).toreadonly(),
    ):
        target.copyin(data)
        assert bytes(target.copyout()) == data.tobytes()
    out = np.zeros((2, 2), np.float32)
    Device.get("CPU").copyout(memoryview(out), target.handle)
    assert out.tobytes() == bytes(target.copyout())


def test_foreign_memory_is_shared_not_copied() -> None:
    runtime, numbers, result = Device.get("CPU"), np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    assert isinstance(runtime, CPUDevice)
    a, out = [runtime.from_memory(x.ctypes.data, x.nbytes, keep=x) for x in (numbers, result)]
    program("CPU", add_one())([out.handle, a.handle], [])
    np.testing.assert_array_equal(result, numbers + 1)
    del a, out
    gc.collect()
    np.testing.assert_array_equal(numbers, np.arange(8))


# ---- names and compilers


@pytest.mark.parametrize("name", ["CPU:RUST", "CPU:-1", "CPU:LLVM2"])
def test_unknown_compilers(name: str) -> None:
    with pytest.raises(DeviceError, match="use CPU, CPU:LLVM, CPU:CLANG or CPU:GCC"):
        CPUDevice(name)


def test_names_of_one_cpu() -> None:
    assert Device.get("CPU").target.key == Device.get("CPU:LLVM").target.key == Device.get("CPU:1").target.key
    assert Device.get("CPU") is not Device.get("CPU:1")


def test_a_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceError, match=r"there is no clang in PATH\. To fix: install clang, or use CPU"):
        CPUDevice("CPU:CLANG")


def fake_compiler(folder: Path, script: str) -> CCompiler:
    path = folder / "gcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    compiler = CCompiler.__new__(CCompiler)
    compiler.path, compiler.kind, compiler.key = str(path), "gcc", "fake"
    return compiler


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"kernel k with .*gcc: it failed: no such luck"):
        fake_compiler(tmp_path, "echo no such luck >&2; exit 1").compile("", "k")
    with pytest.raises(CompileError, match="it failed"):
        fake_compiler(tmp_path, "exit 0").compile("", "k")  # says yes, writes nothing
    broken = fake_compiler(tmp_path, "exit 0")
    os.unlink(tmp_path / "gcc")
    with pytest.raises(CompileError, match="it failed"):
        broken.compile("", "k")


def test_source_that_gcc_refuses() -> None:
    with pytest.raises(CompileError, match=r"kernel k .*error"):
        CCompiler("gcc").compile("int f( {", "k")


def test_machine_code_can_be_read() -> None:
    runtime = Device.get("CPU")
    text = runtime.disassemble(runtime.compile(runtime.render(add_one(), "plus"), "plus"))
    assert "<plus>:" in text or "install objdump" in text


# ---- programs


def test_timing_and_empty_variables() -> None:
    kernel = program("CPU", add_one())
    data = buffer("CPU", np.arange(8, dtype=np.float32))
    seconds = kernel([data.handle, data.handle], [], wait=True)
    assert seconds is not None and 0 < seconds < 1
    assert kernel([data.handle, data.handle], ()) is None
    np.testing.assert_array_equal(read(data, np.float32, 8), np.arange(8) + 2)


def test_a_launch_costs_microseconds() -> None:
    kernel, data = program("CPU", add_one()), buffer("CPU", np.zeros(8, np.float32))
    handles = [data.handle, data.handle]
    best = min(_seconds(lambda: kernel(handles, ()), 200) for _ in range(20))
    assert best < 10e-6
    plan = Device.get("CPU").plan([PlanCall(kernel, (0, 0), ())] * 100)
    best = min(_seconds(lambda: plan.run(handles, ()), 10) for _ in range(20))
    assert best < 100e-6  # for a hundred kernels


def _seconds(function: object, times: int) -> float:
    assert callable(function)
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times


# ---- the target and the cache


def test_target_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = native.host_key()
    native.host_key.cache_clear()
    monkeypatch.setattr(native, "host", lambda: ("x86_64.another", frozenset({"avx2", "fma"})))
    assert native.host_key() != here
    native.host_key.cache_clear()


def test_a_warm_start_loads_neither_llvmlite_nor_numpy(tmp_path: Path) -> None:
    code = """
import sys
from whit.runtime import pool
from whit.runtime.device import Device
device = Device.get("CPU")
pool.pool()
print("llvmlite" in sys.modules, "numpy" in sys.modules)
"""
    environment = {**os.environ, "WHIT_CACHE": str(tmp_path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert outputs == [["True", "False"], ["False", "False"]]


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """Several processes start at once on an empty cache, with entries that are damaged in between."""
    code = (
        "from tests.runtime.test_cpu_pool import add_thread, run, np\n"
        "print(run('CPU', add_thread(3), np.zeros(3, np.int64), tasks=3).tolist())"
    )
    environment = {**os.environ, "WHIT_CACHE": str(tmp_path)}
    for _ in range(2):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        assert [process.communicate()[0].strip() for process in started] == ["[1, 2, 3]"] * 3
        for file in (tmp_path / "native").iterdir():
            file.write_bytes(file.read_bytes()[:-40])
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code = "import warnings; warnings.simplefilter('ignore')\n"
    code += "from whit.runtime import pool; pool.pool(); print('fine')"
    environment = {**os.environ, "WHIT_CACHE": str(tmp_path / "file")}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "fine"
