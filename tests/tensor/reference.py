"""A tensor-level graph evaluated in NumPy, straight from the meanings in `docs/contracts.md`: no whit compiler is
involved, so that a wrong graph and a wrong compiler are told apart."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from whit.tensor import storage
from whit.tensor.selection import actual
from whit.uop import DType, Op, Ops, UOp, dtypes

NUMPY = {d: np.dtype(d.name) for d in dtypes.all if d.name not in ("bfloat16", "fp8e4m3", "fp8e5m2")} | {
    dtypes.bfloat16: np.dtype(ml_dtypes.bfloat16), dtypes.fp8e4m3: np.dtype(ml_dtypes.float8_e4m3fn),
    dtypes.fp8e5m2: np.dtype(ml_dtypes.float8_e5m2), dtypes.index: np.dtype(np.int64)}


def _erf(x: Any) -> Any:
    import torch
    return torch.erf(torch.from_numpy(np.asarray(x, np.float64))).numpy()


def _quiet_div(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def _quiet_mod(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, a % np.where(b == 0, 1, b))


MEANING: dict[Op, Any] = {
    Ops.NEG: np.negative, Ops.RECIPROCAL: lambda x: 1 / x, Ops.SQRT: np.sqrt, Ops.EXP2: np.exp2, Ops.LOG2: np.log2,
    Ops.SIN: np.sin, Ops.ERF: _erf, Ops.TRUNC: np.trunc, Ops.FLOOR: np.floor, Ops.ADD: np.add, Ops.SUB: np.subtract,
    Ops.MUL: np.multiply, Ops.FDIV: np.divide, Ops.FLOORDIV: _quiet_div, Ops.FLOORMOD: _quiet_mod, Ops.MAX: np.maximum,
    Ops.MIN: np.minimum, Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor, Ops.POW: np.power,
    Ops.CMPLT: np.less, Ops.CMPLE: np.less_equal, Ops.CMPEQ: np.equal, Ops.CMPNE: np.not_equal, Ops.WHERE: np.where,
    Ops.TRUNCDIV: lambda a, b: np.where(b == 0, 0, np.sign(a) * np.sign(b) * _quiet_div(abs(a), abs(b))),
    Ops.TRUNCMOD: lambda a, b: np.where(b == 0, 0, np.fmod(a, np.where(b == 0, 1, b))),
    Ops.MULACC: lambda x, y, z: x * y + z,
    Ops.SHL: lambda a, b: np.where((b >= 0) & (b < a.dtype.itemsize * 8), a << b, 0),
    Ops.SHR: lambda a, b: np.where((b >= 0) & (b < a.dtype.itemsize * 8), a >> b, np.where(a < 0, -1, 0)),
}
FOLD = {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.MIN: np.minimum}


def evaluate(root: UOp) -> Any:
    """The value of a graph as a NumPy array."""
    values: dict[UOp, Any] = {}
    with np.errstate(all="ignore"):
        for node in root.toposort():
            if node.op is not Ops.STORE:
                values[node] = _value(node, values)
    return values[root]


def _size(size: Any) -> int:
    value = actual(size)
    assert value is not None, f"{size} has no value"
    return value


def _value(u: UOp, values: dict[UOp, Any]) -> Any:
    src = [values.get(s) for s in u.src]
    dtype = NUMPY.get(u.dtype)
    if u.op is Ops.CONST:
        return np.asarray(u.arg, dtype)
    if u.op is Ops.BUFFER:
        data = storage.peek(u)
        assert data is not None, f"{u} has no bytes"
        return np.frombuffer(data, dtype, u.arg.size)
    if u.op is Ops.IOTA:
        return np.arange(u.arg).astype(dtype)
    if u.op is Ops.VAR:
        return None
    if u.op is Ops.BIND:
        return np.asarray(u.src[1].arg, np.int64)
    if u.op is Ops.CAST:
        return _cast(src[0], u.dtype)
    if u.op is Ops.BITCAST:
        return src[0].view(dtype)
    if u.op in MEANING:
        return np.asarray(MEANING[u.op](*src)).astype(dtype)
    if u.op is Ops.REDUCE:
        return _reduce(src[0], u.arg.op, u.arg.axes).astype(dtype)
    if u.op is Ops.TAKE:
        return _take(src[0], src[1], u.arg)
    if u.op is Ops.AFTER:
        result = np.array(src[0])
        for store in u.src[1:]:
            _write(result, store, u.src[0], values)
        return result
    return src[0] if u.op in (Ops.CONTIGUOUS, Ops.DETACH, Ops.COPY) else _move(u, src[0])


def _cast(x: Any, dtype: DType) -> Any:
    if x.dtype.kind == "f" and dtype.is_int:  # saturates; NaN gives 0
        wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=float(dtype.max), neginf=float(dtype.min))
        return np.array([min(max(int(v), int(dtype.min)), int(dtype.max)) for v in wide.ravel()],
                        NUMPY[dtype]).reshape(x.shape)
    return x.astype(NUMPY[dtype])


def _reduce(x: Any, op: Op, axes: tuple[int, ...]) -> Any:
    if x.dtype == np.bool_:
        return (np.logical_and if op in (Ops.MUL, Ops.MIN) else np.logical_or).reduce(x, axis=axes)
    if op in (Ops.ADD, Ops.MUL):
        return FOLD[op].reduce(x, axis=axes, dtype=x.dtype)
    limit = dtypes.float32.max if x.dtype.kind in "fV" else None
    low = (-limit if limit else np.iinfo(x.dtype).min) if op is Ops.MAX else (limit or np.iinfo(x.dtype).max)
    return FOLD[op].reduce(x, axis=axes, initial=np.asarray(low, x.dtype))


def _take(x: Any, index: Any, axis: int) -> Any:
    n = x.shape[axis]
    inside = (index >= 0) & (index < n)
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1:])
    if n == 0:
        return np.zeros(shape, x.dtype)
    picked = np.take(x, np.where(inside, index, 0).astype(np.int64), axis)
    return np.where(inside.reshape((*inside.shape, *(1,) * (x.ndim - axis - 1))), picked, np.zeros((), x.dtype))


def _move(u: UOp, x: Any) -> Any:
    if u.op is Ops.RESHAPE:
        return x.reshape([_size(n) for n in u.arg])
    if u.op is Ops.PERMUTE:
        return x.transpose(u.arg)
    if u.op is Ops.EXPAND:
        return np.broadcast_to(x, [_size(n) for n in u.arg])
    if u.op is Ops.PAD:
        return np.pad(x, [(_size(a), _size(b)) for a, b in u.arg])
    if u.op is Ops.SHRINK:
        return x[tuple([slice(_size(a), _size(b)) for a, b in u.arg])]
    if u.op is Ops.FLIP:
        return np.flip(x, u.arg)
    raise NotImplementedError(f"no NumPy meaning of {u.op}")


def _write(result: Any, store: UOp, target: UOp, values: dict[UOp, Any]) -> None:
    """Write through the view, by moving the numbers of the target's elements the way that its elements move."""
    view, value = store.src
    chain = []
    while view is not target:
        chain.append(view)
        view = view.src[0]
    places = np.arange(result.size).reshape(result.shape)
    for node in reversed(chain):
        places = _move(node, places)
    result.reshape(-1)[places] = values[value]


def numpy_of(tensor: Any) -> Any:
    """A tensor's value by this evaluator."""
    return evaluate(tensor.uop)
