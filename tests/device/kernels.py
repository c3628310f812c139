"""Kernels at the kernel level (docs/contracts.md) and a way to run them on any device."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.devices import CLANG, GCC
from whit.codegen import generate
from whit.codegen.opts import Opt
from whit.runtime.device import Buffer, Device, Launch
from whit.uop import AxisType, DType, Op, Ops, ParamArg, UOp, dtypes

Array = np.ndarray[Any, Any]
NUMPY: dict[DType, Any] = {
    dtypes.bool: np.bool_, dtypes.int8: np.int8, dtypes.uint8: np.uint8, dtypes.int16: np.int16,
    dtypes.uint16: np.uint16,
    dtypes.int32: np.int32, dtypes.uint32: np.uint32, dtypes.int64: np.int64, dtypes.uint64: np.uint64,
    dtypes.float16: np.float16, dtypes.float32: np.float32, dtypes.float64: np.float64,
    dtypes.bfloat16: ml_dtypes.bfloat16,
    dtypes.fp8e4m3: ml_dtypes.float8_e4m3fn, dtypes.fp8e5m2: ml_dtypes.float8_e5m2,
}
DTYPES = {np.dtype(v): k for k, v in NUMPY.items()}


DEVICES = ["CPU", CLANG, GCC, "PYTHON"]


def param(slot: int, size: int, dtype: DType) -> UOp:
    return UOp(Ops.PARAM, dtype, (), ParamArg(slot, size))


def read(memory: UOp, index: UOp, *valid: UOp) -> UOp:
    return UOp(Ops.INDEX, memory.dtype, (memory, UOp.index(index), *valid))


def write(memory: UOp, index: UOp, value: UOp, *valid: UOp) -> UOp:
    return UOp(Ops.STORE, dtypes.void, (memory, UOp.index(index), value, *valid))


def loop(size: int | UOp, uid: int) -> UOp:
    return UOp.range(size, AxisType.LOOP, uid)


def fold(size: int | UOp, uid: int) -> UOp:
    return UOp.range(size, AxisType.REDUCE, uid)


def buffer(device: str, array: Array) -> Buffer:
    result = Buffer(device, max(1, array.nbytes))
    if array.nbytes:
        result.copyin(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
    return result


def contents(memory: Buffer, like: Array) -> Array:
    return np.frombuffer(memory.copyout(), np.uint8)[:like.nbytes].copy().view(like.dtype).reshape(like.shape)


def run(device: str, ast: UOp, arrays: Sequence[Array], opts: Sequence[str] | None = (),
        variables: Sequence[int] = ()) -> list[Array]:
    """Compile the kernel with these opts (None: the heuristics') and run it; the arrays' contents
    afterwards."""
    runtime = Device.get(device)
    made = generate(ast, runtime.target, None if opts is None else [Opt.parse(text) for text in opts])
    binary = runtime.compile(runtime.render(made.linear, made.name), made.name)
    program = runtime.load(binary, made.name, Launch(made.tasks, made.global_size, made.local_size))
    buffers = [buffer(device, array) for array in arrays]
    program([b.handle for b in buffers], list(variables), wait=True)
    return [contents(b, array) for b, array in zip(buffers, arrays, strict=True)]


def elementwise(device: str, inputs: Sequence[Array], functions: Sequence[Callable[..., UOp]]) -> list[Array]:
    """Each function of the inputs' elements, as one array each; all in one kernel. System compilers take long
    over wide tiles of narrow floats: those stay loops there."""
    size, count = inputs[0].size, len(functions)
    i = loop(size, 0)
    operands = [read(param(count + n, size, DTYPES[a.dtype]), i) for n, a in enumerate(inputs)]
    values = [function(*operands) for function in functions]
    sink = UOp.sink(*[write(param(n, size, v.dtype), i, v).end(i) for n, v in enumerate(values)])
    outputs = [np.zeros(size, NUMPY[v.dtype]) for v in values]
    plain = device.startswith("CPU:") and inputs[0].dtype.itemsize < 4 and inputs[0].dtype.kind not in "biu"
    return run(device, sink, [*outputs, *inputs], () if plain else None)[:count]


def alu(op: Op) -> Callable[..., UOp]:
    return lambda x, *rest: x.alu(op, *rest)


def same(got: Array, expected: Array) -> None:
    """Equal values and signs; all NaNs are one."""
    assert got.dtype == expected.dtype
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected)
        return
    a, b = got.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(a, b)
    number = ~np.isnan(b)
    np.testing.assert_array_equal(np.signbit(a[number]), np.signbit(b[number]))
