"""Builds small linear programs by hand and runs them on a device, for the tests of renderers and runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from whit.runtime.device import Buffer, Device, Launch, Program
from whit.uop import AxisType, DType, Op, Ops, ParamArg, RangeArg, UOp, VarArg, dtypes

NUMPY: dict[DType, Any] = {
    dtypes.bool: np.bool_,
    dtypes.int8: np.int8,
    dtypes.uint8: np.uint8,
    dtypes.int16: np.int16,
    dtypes.uint16: np.uint16,
    dtypes.int32: np.int32,
    dtypes.uint32: np.uint32,
    dtypes.int64: np.int64,
    dtypes.uint64: np.uint64,
    dtypes.float16: np.float16,
    dtypes.float32: np.float32,
    dtypes.float64: np.float64,
    dtypes.bfloat16: ml_dtypes.bfloat16,
    dtypes.fp8e4m3: ml_dtypes.float8_e4m3fn,
    dtypes.fp8e5m2: ml_dtypes.float8_e5m2,
    dtypes.index: np.int64,
}


class Kernel:
    """Collects instructions in order; every method returns the node."""

    def __init__(self) -> None:
        self.instructions: list[UOp] = []
        self.loops = 0

    def add(self, op: Op, dtype: DType, *src: UOp, arg: Any = None) -> UOp:
        node = UOp(op, dtype, src, arg)
        if node not in self.instructions:
            self.instructions.append(node)
        return node

    def param(self, slot: int, dtype: DType, size: int = 1 << 20) -> UOp:
        return self.add(Ops.PARAM, dtype, arg=ParamArg(slot, size))

    def const(self, value: Any, dtype: DType = dtypes.index) -> UOp:
        node = UOp.const(value, dtype)
        self.instructions.append(node)
        return node

    def var(self, name: str, low: int, high: int) -> UOp:
        return self.add(Ops.VAR, dtypes.index, arg=VarArg(name, low, high))

    def range(self, size: UOp | int) -> UOp:
        bound = self.const(size) if isinstance(size, int) else size
        self.loops += 1
        return self.add(Ops.RANGE, dtypes.index, bound, arg=RangeArg(self.loops, AxisType.LOOP))

    def end(self, loop: UOp) -> UOp:
        return self.add(Ops.END, dtypes.void, loop)

    def alu(self, op: Op, *src: UOp) -> UOp:
        count = src[-1].dtype.count
        return self.add(
            op,
            dtypes.bool.vec(count)
            if op.category == "compare"
            else src[-1].dtype
            if op not in (Ops.SHL, Ops.SHR)
            else src[0].dtype,
            *src,
        )

    def load(self, memory: UOp, index: UOp, lanes: int = 1, mask: UOp | None = None) -> UOp:
        return self.add(
            Ops.LOAD, memory.dtype.vec(lanes), memory, index, *((mask,) if mask is not None else ())
        )

    def store(self, memory: UOp, index: UOp, value: UOp, mask: UOp | None = None) -> UOp:
        return self.add(Ops.STORE, dtypes.void, memory, index, value, *((mask,) if mask is not None else ()))

    def linear(self) -> UOp:
        return UOp(Ops.LINEAR, dtypes.void, tuple(self.instructions))


def program(device: str, linear: UOp, name: str = "kernel", tasks: int = 1) -> Program:
    """Render, compile and load."""
    runtime = Device.get(device)
    return runtime.load(runtime.compile(runtime.render(linear, name), name), name, Launch(tasks))


def buffer(device: str, array: np.ndarray[Any, Any]) -> Buffer:
    """A buffer with the array's bytes."""
    result = Buffer(device, max(1, array.nbytes))
    if array.nbytes:
        result.copyin(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
    return result


def read(result: Buffer, dtype: Any, shape: Sequence[int] | int) -> np.ndarray[Any, Any]:
    """A buffer's bytes as an array."""
    return (
        np.frombuffer(bytes(result.copyout()), dtype=np.uint8)[
            : int(np.prod(shape)) * np.dtype(dtype).itemsize
        ]
        .copy()
        .view(dtype)
        .reshape(shape)
    )


def run(
    device: str,
    linear: UOp,
    out: np.ndarray[Any, Any],
    *inputs: np.ndarray[Any, Any],
    variables: Sequence[int] = (),
    tasks: int = 1,
) -> np.ndarray[Any, Any]:
    """Run a program whose PARAM 0 is the output (starting as `out`); the output afterwards."""
    buffers = [buffer(device, a) for a in (out, *inputs)]
    program(device, linear, tasks=tasks)([b.handle for b in buffers], list(variables))
    return read(buffers[0], out.dtype, out.shape)


def elementwise(
    device: str,
    compute: Callable[..., UOp],
    result: DType,
    inputs: Sequence[np.ndarray[Any, Any]],
    types: Sequence[DType],
    lanes: int,
) -> np.ndarray[Any, Any]:
    """compute(kernel, values…) on every element of equally long arrays, `lanes` at a time; the length must
    divide."""
    kernel, size = Kernel(), len(inputs[0])
    assert size % lanes == 0
    out = kernel.param(0, result)
    sources = [kernel.param(i + 1, dtype) for i, dtype in enumerate(types)]
    loop = kernel.range(size // lanes)
    index = kernel.alu(Ops.MUL, loop, kernel.const(lanes)) if lanes > 1 else loop
    values = [kernel.load(source, index, lanes) for source in sources]
    kernel.store(out, index, compute(kernel, *values))
    kernel.end(loop)
    return run(device, kernel.linear(), np.zeros(size, NUMPY[result]), *inputs)
