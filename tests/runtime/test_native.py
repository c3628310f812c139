"""LLVM in this process: several compilations at once, and little effort for small kernels, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from whit import Device, Tensor, dtypes
from whit.codegen import generate
from whit.helpers import CompileError
from whit.renderer import llvm
from whit.runtime import native
from whit.runtime.device import Buffer, Launch
from whit.schedule import schedule
from whit.uop import AxisType, Ops, UOp
from whit.uop import dtypes as types


def kernels(*tensors: Tensor) -> list[UOp]:
    """The kernels that compute tensors."""
    plan, _, _ = schedule([t.uop for t in tensors])
    return [call.ast for call in plan.calls if call.ast is not None]


def source_of(ast: UOp) -> tuple[str, int]:
    """(LLVM IR of a kernel, its tasks)."""
    device = Device.get("CPU")
    made = generate(ast, device.target)
    return device.render(made.linear, "k"), made.tasks


def run(ast: UOp, source: str, tasks: int) -> list[bytes]:
    """What a kernel writes, from repeatable values."""
    device = Device.get("CPU")
    params = {u.arg.slot: u for u in ast.toposort() if u.op is Ops.PARAM}
    buffers = []
    rng = np.random.default_rng(1)
    for _, param in sorted(params.items()):
        count = param.arg.size
        values: Any = rng.uniform(-3, 3, count) if param.dtype.is_float else rng.integers(0, 2, count)
        half = param.dtype in (types.bfloat16, types.fp8e4m3, types.fp8e5m2)
        kind = np.dtype({1: np.uint8, 2: np.uint16}[param.dtype.itemsize] if half else str(param.dtype))
        buffers.append(Buffer("CPU", count * param.dtype.itemsize))
        buffers[-1].copyin(memoryview(bytearray(values.astype(kind).tobytes())))
    program = device.load(native.compile_ir(source, "k"), "k", Launch(tasks))
    program([b.handle for b in buffers], [], True)
    return [bytes(b.copyout()) for b in buffers]


def functions() -> list[Tensor]:
    """Values whose kernels use every kind of instruction: functions, masks, gathers, conversions, folds."""
    x = Tensor.rand(6, 7).realize()
    wide = Tensor.rand(6, 7).cast(dtypes.float64).realize()
    whole = Tensor.randint(6, 7, low=-9, high=9).realize()
    half = Tensor.rand(6, 7).cast(dtypes.float16).realize()
    index = Tensor([5, 0, 3]).realize()
    return [
        x.exp() + x.log() - x.sin() * x.erf(), wide.exp() + wide.log() * wide.sin(), x.softmax(-1),
        x.softmax(0),
        x[1:, :3].pad((2, 1, 3, 0)), x[index], x @ x.T, wide @ wide.T, whole // 3 + whole % 5 + (whole << 2),
        (whole * 3).cast(dtypes.int8).cast(dtypes.uint32) >> 3, half * half + 1, half @ half.T,
        x.cast(dtypes.bfloat16) + 1, (x > 0.5).where(x, -x).max(1), whole.prod(1), x.argmax(1), x.cumsum(1),
        x.flip(0).permute(1, 0) + x.reshape(7, 6), (x > 0.3).any(0), x.std(1), wide.prod(0), x.sort()[0],
    ]  # fmt: skip


def test_little_and_full_effort_give_the_same_bits() -> None:
    levels = set()
    for ast in kernels(*functions()):
        source, tasks = source_of(ast)
        levels.add(native.LITTLE_WORK in source)
        full = source.replace(native.LITTLE_WORK, "")
        little = full.replace("attributes #0 = { ", f"attributes #0 = {{ {native.LITTLE_WORK} ")
        assert native.LITTLE_WORK in little and native.compile_ir(full, "k") != native.compile_ir(little, "k")
        assert run(ast, full, tasks) == run(ast, little, tasks)
    assert levels == {False, True}


@pytest.mark.parametrize("size, little", [(16, True), (100, True), (1 << 14, False), (1 << 20, False)])
def test_effort_follows_the_work(size: int, little: bool) -> None:
    (ast,) = kernels(Tensor.empty(size) + 1.0)
    assert (native.LITTLE_WORK in source_of(ast)[0]) == little


def test_loops_of_unknown_length_get_full_effort() -> None:
    r = UOp.range(UOp.variable("n", 1, 4), AxisType.LOOP, 0)
    end = UOp(Ops.END, types.void, (r,))
    assert native.LITTLE_WORK not in llvm.render(UOp(Ops.LINEAR, types.void, (r.src[0], r, end)), "k")
    assert native.LITTLE_WORK in llvm.render(UOp(Ops.LINEAR), "k")


def test_threads_compile_what_one_thread_compiles() -> None:
    sources = [source_of(ast)[0] for ast in kernels(*functions())]
    alone = [native.compile_ir(source, "k") for source in sources]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(native.compile_ir, sources * 3, ["k"] * 3 * len(sources)))
    assert together == alone * 3


def test_errors_in_threads_name_the_kernel_and_harm_no_other() -> None:
    good = source_of(kernels(Tensor.empty(16) + 1.0)[0])[0]
    bad = "define void @f() { %x = add i32 1, 2.0 ret void }"

    def compile_or_not(source: str) -> bytes | str:
        try:
            return native.compile_ir(source, "the kernel")
        except CompileError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(compile_or_not, [good, bad] * 20))
    assert set(found[::2]) == {native.compile_ir(good, "k")}
    assert all(isinstance(text, str) and "the kernel" in text for text in found[1::2])


def test_without_its_lock_or_with_it() -> None:
    """Releases of llvmlite that lock in another way are used as they are."""

    class Function:
        def _cfn(self) -> str:
            return "direct"

    assert native._direct(Function())() == "direct"
    assert native._direct(len) is len
