"""A second opinion on tensor graphs: NumPy computes what each node says, with none of whit's compiler.

`evaluate(tensor)` gives the value as a NumPy array. WHIT_TEST_DEVICE chooses who computes: "reference" (this
file), or a device such as "CPU", "PYTHON", "CPU:CLANG".
"""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any

import numpy as np

from whit import Tensor, dtypes
from whit.helpers import DEV
from whit.tensor import storage
from whit.tensor.tensor import numpy_dtype
from whit.uop import DType, Ops, UOp

DEVICE = os.environ.get("WHIT_TEST_DEVICE", "CPU")
if DEVICE != "reference":
    DEV.value = DEVICE
if DEVICE != "reference":
    DEV.value = DEVICE


def evaluate(tensor: Tensor) -> np.ndarray:
    """The value of a tensor, from NumPy or from the device that is being tested."""
    if DEVICE == "reference":
        return reference(tensor.uop)
    return np.asarray(tensor.numpy())


def reference(root: UOp) -> np.ndarray:
    """The value of a tensor-level node."""
    values: dict[UOp, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for node in root.toposort():
            values[node] = _value(node, [values.get(s) for s in node.src], values)
    return values[root]


def _value(node: UOp, src: list[Any], values: dict[UOp, np.ndarray]) -> Any:
    op, arg = node.op, node.arg
    if op is Ops.CONST:
        return np.array(arg, numpy_dtype(node.dtype)) if node.dtype is not dtypes.index else np.array(arg)
    if op is Ops.IOTA:
        return np.arange(size_of(arg)).astype(numpy_dtype(node.dtype))
    if op is Ops.BUFFER:
        return _memory(node)
    if op in (Ops.VAR, Ops.STORE):
        return None
    if op is Ops.CALL:
        return _given_kernel(arg, src)
    if op is Ops.OUTPUT:
        return src[0][arg[0]]
    if op is Ops.BIND:
        return src[1]
    if op is Ops.AFTER:
        return _written(node, src[0], values)
    if op is Ops.REDUCE:
        return _reduce(arg.op, src[0], arg.axes)
    if op is Ops.TAKE:
        return _take(src[0], src[1], arg)
    if op.is_movement:
        return _movement(node, src[0])
    if op in (Ops.CONTIGUOUS, Ops.DETACH, Ops.COPY):
        return src[0]
    if op is Ops.CAST:
        return _cast(src[0], node.dtype)
    if op is Ops.BITCAST:
        return (
            src[0].view(numpy_dtype(node.dtype))
            if src[0].ndim
            else src[0].reshape(1).view(numpy_dtype(node.dtype))[0]
        )
    return _elementwise(node, src)


def size_of(size: Any) -> int:
    """A size with its bound variables replaced by their values."""
    if isinstance(size, int):
        return size
    return int(reference(size)) if isinstance(size, UOp) else int(size)


def _memory(node: UOp) -> np.ndarray:
    data = storage.peek(node)
    if data is None:
        from whit.engine import buffer_of

        data = memoryview(buffer_of(node).copyout())
    return (
        np.frombuffer(data, numpy_dtype(node.dtype), count=node.arg.size)
        if node.arg.size
        else np.empty(0, numpy_dtype(node.dtype))
    )


def _movement(node: UOp, x: np.ndarray) -> np.ndarray:
    op, arg = node.op, node.arg
    if op is Ops.RESHAPE:
        return x.reshape([size_of(s) for s in arg])
    if op is Ops.PERMUTE:
        return x.transpose(arg)
    if op is Ops.EXPAND:
        return np.broadcast_to(x, [size_of(s) for s in arg])
    if op is Ops.PAD:
        return np.pad(x, [(size_of(a), size_of(b)) for a, b in arg]) if x.ndim else x
    if op is Ops.SHRINK:
        return x[tuple(slice(size_of(a), size_of(b)) for a, b in arg)]
    assert op is Ops.FLIP
    return np.flip(x, arg)


def _reduce(op: Any, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    if op is Ops.ADD:
        return np.any(x, axis=axes) if x.dtype == bool else np.sum(x, axis=axes, dtype=x.dtype)
    if op is Ops.MUL:
        return np.all(x, axis=axes) if x.dtype == bool else np.prod(x, axis=axes, dtype=x.dtype)
    function = np.max if op is Ops.MAX else np.min
    if any(x.shape[a] == 0 for a in axes):  # folds to the identity
        kept = [n for a, n in enumerate(x.shape) if a not in axes]
        low = x.dtype == bool or np.issubdtype(x.dtype, np.integer)
        bounds = (
            (False, True)
            if x.dtype == bool
            else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
            if low
            else (-np.inf, np.inf)
        )
        return np.full(kept, bounds[0] if op is Ops.MAX else bounds[1], x.dtype)
    return function(x, axis=axes)


def _take(x: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    index = index.astype(np.int64)
    inside = (index >= 0) & (index < x.shape[axis])
    if not x.shape[axis]:
        return np.zeros(x.shape[:axis] + index.shape + x.shape[axis + 1 :], x.dtype)
    taken = np.take(x, np.where(inside, index, 0), axis=axis)
    wide = inside.reshape((1,) * axis + index.shape + (1,) * (x.ndim - axis - 1))
    return np.where(wide, taken, np.zeros((), x.dtype))


def _written(node: UOp, target: np.ndarray, values: dict[UOp, np.ndarray]) -> np.ndarray:
    result = target.copy()
    for store in node.src[1:]:
        view = store.src[0]
        chain = []
        while view is not node.src[0]:
            chain.append(view)
            view = view.src[0]
        place = np.arange(target.size).reshape(target.shape)
        for step in reversed(chain):
            place = _movement(step, place)
        result.reshape(-1)[place.reshape(-1)] = values[store.src[1]].reshape(-1)
    return result


def _given_kernel(arg: Any, src: list[np.ndarray]) -> list[np.ndarray]:
    """What a kernel written by hand writes, by the reference interpreter. Such algorithms have tests of their
    own against NumPy and PyTorch."""
    from whit.engine.validate import reference as interpreted

    shapes = [(shape, numpy_dtype(dtype)) for shape, dtype in arg.outputs]
    before = [bytearray(math.prod(shape) * kind.itemsize) for shape, kind in shapes]
    before += [bytearray(np.ascontiguousarray(x).tobytes()) for x in src]
    after = interpreted(arg.kernel, before, [])
    return [np.frombuffer(data, kind).reshape(shape) for data, (shape, kind) in zip(after, shapes)]


def _cast(x: np.ndarray, dtype: DType) -> np.ndarray:
    kind = numpy_dtype(dtype)
    if dtype.is_bool:
        return x != 0
    if dtype.is_int and x.dtype.kind not in "iub":  # saturates, NaN is 0
        wide = x.astype(np.float64)
        low, high = float(dtype.min), float(dtype.max)
        clipped = np.where(np.isnan(wide), 0, np.clip(wide, low, high))
        exact = np.where(clipped >= high, 0, clipped).astype(
            np.int64 if dtype is not dtypes.uint64 else np.uint64
        )
        return np.where(clipped >= high, np.array(dtype.max, kind), exact.astype(kind))
    return x.astype(kind)


def _elementwise(node: UOp, src: list[np.ndarray]) -> np.ndarray:
    shape = np.broadcast_shapes(*[s.shape for s in src])
    kind = numpy_dtype(node.dtype) if node.dtype is not dtypes.index else np.dtype(np.int64)
    narrow = node.dtype in (dtypes.bfloat16, *dtypes.fp8s) or src[-1].dtype.name in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    )
    if narrow and node.op is not Ops.WHERE:
        src = [s.astype(np.float32) if s.dtype != bool else s for s in src]
    return np.broadcast_to(np.asarray(_NUMPY[node.op](*src)).astype(kind), shape)


def _erf(x: np.ndarray) -> np.ndarray:
    import torch

    return torch.erf(torch.from_numpy(np.array(x, np.float64))).numpy()


def _int_divide(function: Any) -> Any:
    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        safe = np.where(b == 0, np.ones((), b.dtype), b)
        return np.where(b == 0, np.zeros((), a.dtype), function(a, safe))

    return divide


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.floor_divide(a, b)
    return quotient + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def _shift(function: Any, left: bool) -> Any:
    def shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        bits = a.dtype.itemsize * 8
        ok = (b >= 0) & (b < bits)
        over = np.zeros((), a.dtype) if left else np.where(a < 0, -1, 0).astype(a.dtype)
        return np.where(ok, function(a, np.where(ok, b, 0).astype(a.dtype)), over)

    return shift


def _threefry(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    assert (
        Ops.THREEFRY.meaning is not None
    )  # the op's own meaning; checked against published vectors in tests/uop
    f = np.frompyfunc(lambda c, k: Ops.THREEFRY.meaning(int(c), int(k)), 2, 1)
    return np.asarray(f(counter, key)).astype(np.uint64)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once."""
    if a.dtype.kind != "f":
        return a * b + c

    def one(x: float, y: float, z: float) -> float:
        if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
            return x * y + z
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        return float(exact) if exact else x * y + z

    return np.asarray(np.frompyfunc(one, 3, 1)(a.astype(float), b.astype(float), c.astype(float))).astype(
        a.dtype
    )


_NUMPY: dict[Any, Any] = {
    Ops.NEG: np.negative,
    Ops.RECIPROCAL: lambda x: np.divide(np.ones((), x.dtype), x),
    Ops.SQRT: np.sqrt,
    Ops.EXP2: np.exp2,
    Ops.LOG2: np.log2,
    Ops.SIN: np.sin,
    Ops.ERF: _erf,
    Ops.TRUNC: np.trunc,
    Ops.FLOOR: np.floor,
    Ops.ADD: np.add,
    Ops.SUB: np.subtract,
    Ops.MUL: np.multiply,
    Ops.FDIV: np.divide,
    Ops.FLOORDIV: _int_divide(np.floor_divide),
    Ops.FLOORMOD: _int_divide(np.remainder),
    Ops.TRUNCDIV: _int_divide(_truncated),
    Ops.TRUNCMOD: _int_divide(np.fmod),
    Ops.MAX: np.maximum,
    Ops.MIN: np.minimum,
    Ops.AND: np.bitwise_and,
    Ops.OR: np.bitwise_or,
    Ops.XOR: np.bitwise_xor,
    Ops.SHL: _shift(np.left_shift, True),
    Ops.SHR: _shift(np.right_shift, False),
    Ops.POW: np.power,
    Ops.THREEFRY: _threefry,
    Ops.CMPLT: np.less,
    Ops.CMPLE: np.less_equal,
    Ops.CMPEQ: np.equal,
    Ops.CMPNE: np.not_equal,
    Ops.WHERE: np.where,
    Ops.MULACC: _fused,
}
