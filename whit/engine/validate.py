"""VALIDATE=1: every kernel also runs on the reference device (PYTHON), and what both wrote is compared.

Results may differ as far as rounding explains: by the dtype's tolerance, or, where values cancel, by as much
as the reference itself changes when its inputs change in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whit.engine.compile import compiled
from whit.engine.counters import account
from whit.helpers import DeviceError
from whit.runtime.device import Buffer
from whit.uop import DType, Ops, UOp, dtypes
from whit.uop.dtype import FLOAT_INFO

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
    values, ast = [value for _, value in step.variables], step.kernel.ast
    before = [buffer.copyout() for buffer in step.buffers]
    wanted = reference(ast, before, values)
    account(step.kernel.work, step.kernel.program([b.handle for b in step.buffers], values, True))
    where = f"kernel {step.kernel.work.name} on {step.kernel.device}"
    spread: dict[int, Any] | None = None
    for slot, dtype in written(ast).items():
        got = step.buffers[slot].copyout()
        if differing(got, wanted[slot], dtype).any():
            if spread is None:
                spread = sensitivity(ast, before, values, wanted)
            compare(got, wanted[slot], dtype, where, spread[slot])


def reference(ast: UOp, contents: Sequence[bytearray], values: Sequence[int]) -> list[bytearray]:
    """What the buffers hold after the kernel ran on the reference device."""
    copies = [Buffer("PYTHON", len(data)) for data in contents]
    for copy, data in zip(copies, contents):
        copy.copyin(memoryview(data))
    compiled(ast, "PYTHON").program([copy.handle for copy in copies], values)
    return [copy.copyout() for copy in copies]


# ---- what rounding explains --------------------------------------------------------------------------------

_INEXACT = frozenset({Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.ERF, Ops.POW, Ops.RECIPROCAL, Ops.SQRT, Ops.FDIV})
_RUNS = 4
_SPREAD = 16  # roundings of intermediate values add up: how often an input's one counts


def sensitivity(
    ast: UOp, contents: Sequence[bytearray], values: Sequence[int], wanted: Sequence[bytearray]
) -> dict[int, Any]:
    """For each buffer that the kernel writes, how far its elements move when floats that it reads, and
    results that no two machines round alike, change in their last bits; a few random changes."""
    import numpy as np

    kinds = {u.arg.slot: u.dtype for u in ast.toposort() if u.op is Ops.PARAM}
    spread: dict[int, Any] = {}
    for seed in range(_RUNS):
        rng = np.random.default_rng(seed)
        changed = [
            _nudged(data, kinds[slot], rng) if slot in kinds else data for slot, data in enumerate(contents)
        ]
        found = reference(_inexact(ast, 1 if seed % 2 else -1), changed, values)
        for slot, dtype in written(ast).items():
            moved = _distance(as_array(found[slot], dtype), as_array(wanted[slot], dtype), dtype)
            spread[slot] = np.fmax(spread.get(slot, 0.0), moved)
    return spread


def _last_bit(dtype: DType) -> float:
    """The last bit of 1."""
    return 2.0 ** -FLOAT_INFO[dtype].mantissa


def _nudged(data: bytearray, dtype: DType, rng: Any) -> bytearray:
    """Floats changed by up to one unit in the last place."""
    import numpy as np

    if not dtype.is_float:
        return data
    values = as_array(data, dtype)
    steps = rng.integers(-1, 2, values.size) * _last_bit(dtype)
    with np.errstate(all="ignore"):
        return bytearray((values.astype(np.float64) * (1 + steps)).astype(values.dtype).tobytes())


def _inexact(ast: UOp, sign: int) -> UOp:
    """The kernel with results of functions changed in the last place."""
    new: dict[UOp, UOp] = {}
    for node in ast.toposort():
        changed = node.replace(src=tuple([new[s] for s in node.src])) if node.src else node
        if node.op in _INEXACT and node.dtype in FLOAT_INFO:
            changed = changed * (1.0 + sign * _last_bit(node.dtype))
        new[node] = changed
    return new[ast]


def _distance(a: Any, b: Any, dtype: DType) -> Any:
    """|a - b|, of equal values and of two NaNs 0, of a NaN and a number infinite."""
    import numpy as np

    if not dtype.is_float:
        return np.where(a > b, a, b).astype(np.float64) - np.where(a > b, b, a).astype(np.float64)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        far = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(far), np.inf, far)


def written(ast: UOp) -> dict[int, DType]:
    """Slot -> dtype of the buffers that a kernel stores to."""
    stores = [u for u in ast.toposort() if u.op is Ops.STORE and u.src[0].op is Ops.PARAM]
    return {u.src[0].arg.slot: u.src[0].dtype for u in stores}


def differing(got: bytearray, expected: bytearray, dtype: DType, spread: Any = 0.0) -> Any:
    """Which elements differ by more than the dtype's tolerance and `_SPREAD` times `spread`."""
    import numpy as np

    a, b = as_array(got, dtype), as_array(expected, dtype)
    if got == expected:
        return np.zeros(a.size, bool)
    limit = 0.0
    if dtype.is_float:
        wide = b.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        limit = TOLERANCE[dtype] * max(1e-30, float(np.abs(finite).max()) if finite.size else 1.0)
    return ~((a == b) | (_distance(a, b, dtype) <= limit + _SPREAD * spread))


def compare(got: bytearray, expected: bytearray, dtype: DType, where: str, spread: Any = 0.0) -> None:
    """Raise DeviceError at the first difference beyond the dtype's tolerance, and beyond what the `spread` of
    each element (see `sensitivity`) explains."""
    bad = differing(got, expected, dtype, spread)
    if bad.any():
        import numpy as np

        a, b, place = as_array(got, dtype), as_array(expected, dtype), int(np.flatnonzero(bad)[0])
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
