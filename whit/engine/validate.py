"""VALIDATE=1: every kernel also runs on the reference device (PYTHON), and what both wrote is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whit.engine.compile import compiled
from whit.engine.counters import account
from whit.helpers import DeviceError
from whit.runtime.device import Buffer
from whit.uop import DType, Ops, UOp, dtypes

if TYPE_CHECKING:
    from whit.engine.realize import Step

# relative to the largest magnitude in the output: sums in another order, and results rounded once instead of
# twice
TOLERANCE = {
    dtypes.float64: 1e-9,
    dtypes.float32: 2e-4,
    dtypes.float16: 5e-3,
    dtypes.bfloat16: 4e-2,
    dtypes.fp8e4m3: 0.2,
    dtypes.fp8e5m2: 0.4,
}


def run_and_compare(step: Step) -> None:
    """Run a kernel and its reference on equal inputs; DeviceError names the first element that differs."""
    assert step.kernel is not None
    values = [value for _, value in step.variables]
    copies = []
    for buffer in step.buffers:
        copy = Buffer("PYTHON", buffer.nbytes)
        copy.copyin(memoryview(buffer.copyout()))
        copies.append(copy)
    reference = compiled(step.kernel.ast, "PYTHON")
    reference.program([copy.handle for copy in copies], values)
    account(step.kernel.work, step.kernel.program([b.handle for b in step.buffers], values, True))
    for slot, dtype in written(step.kernel.ast).items():
        compare(
            step.buffers[slot].copyout(),
            copies[slot].copyout(),
            dtype,
            f"kernel {step.kernel.work.name} on {step.kernel.device}",
        )


def written(ast: UOp) -> dict[int, DType]:
    """Slot -> dtype of the buffers that a kernel stores to."""
    stores = [u for u in ast.toposort() if u.op is Ops.STORE and u.src[0].op is Ops.PARAM]
    return {u.src[0].arg.slot: u.src[0].dtype for u in stores}


def compare(got: bytearray, expected: bytearray, dtype: DType, where: str) -> None:
    """Raise DeviceError at the first difference beyond the dtype's tolerance."""
    if got == expected:
        return
    import numpy as np

    a, b = as_array(got, dtype), as_array(expected, dtype)
    if dtype.is_float:
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = b[np.isfinite(b)]
        limit = TOLERANCE[dtype] * max(1e-30, float(np.abs(finite).max()) if finite.size else 1.0)
        with np.errstate(invalid="ignore"):
            bad = ~((np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b)))
    else:
        bad = a != b
    if bad.any():
        place = int(np.flatnonzero(bad)[0])
        raise DeviceError(
            f"{where}: element {place} of the output is {a[place]}",
            because=f"the reference computes {b[place]} ({int(bad.sum())} of {bad.size} elements differ)",
            fix="run again with NOOPT=1 to tell a wrong optimisation from a wrong backend; DEBUG=4 shows the "
            "kernel",
        )


def as_array(data: bytes | bytearray, dtype: DType) -> Any:
    """Bytes as a NumPy array."""
    import ml_dtypes
    import numpy as np

    special = {
        dtypes.bfloat16: ml_dtypes.bfloat16,
        dtypes.fp8e4m3: ml_dtypes.float8_e4m3fn,
        dtypes.fp8e5m2: ml_dtypes.float8_e5m2,
    }
    return np.frombuffer(bytes(data), dtype=special.get(dtype, dtype.name))
