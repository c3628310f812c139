"""Kernels for the tests of opts, heuristics and search, and a NumPy evaluator of kernel ASTs (optimised or
not)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whit.codegen.target import Target
from whit.uop import AxisType, Op, Ops, ParamArg, ReduceArg, StageArg, UOp, dtypes

AVX512 = Target("test-avx512", "llvm", vector_bytes=64, vector_registers=32, threads=2)
SSE = Target("test-sse", "llvm", vector_bytes=16, vector_registers=16, threads=4)
SCALAR = Target("test-scalar", "c")
GROUPS = Target("test-groups", "opencl", has_local=True, local_bytes=1 << 14, max_local=64, threads=1)
F32 = dtypes.float32


def param(slot: int, size: int, dtype: Any = F32) -> UOp:
    return UOp(Ops.PARAM, dtype, (), ParamArg(slot, size))


def read(p: UOp, index: UOp, *valid: UOp) -> UOp:
    return UOp(Ops.INDEX, p.dtype, (p, index, *valid))


def store(p: UOp, index: UOp, value: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.STORE, dtypes.void, (p, index, value)).end(*ranges)


def loops(*sizes: Any) -> list[UOp]:
    return [UOp.range(n, AxisType.LOOP, uid) for uid, n in enumerate(sizes)]


def folds(first: int, *sizes: Any) -> list[UOp]:
    return [UOp.range(n, AxisType.REDUCE, first + uid) for uid, n in enumerate(sizes)]


def fold(op: Op, value: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.REDUCE, value.dtype, (value, *ranges), ReduceArg(op))


def elementwise(*shape: int) -> UOp:
    """p0 = p1 * 2 + p2, contiguous."""
    axes = loops(*shape)
    size, index = int(np.prod(shape)), UOp.index(0)
    for axis, n in zip(axes, shape):
        index = index * n + axis
    return UOp.sink(
        store(param(0, size), index, read(param(1, size), index) * 2.0 + read(param(2, size), index), *axes)
    )


def transpose(m: int, n: int) -> UOp:
    i, j = loops(m, n)
    return UOp.sink(store(param(0, m * n), i * n + j, read(param(1, m * n), j * m + i), i, j))


def matmul(m: int, n: int, kk: int, left: bool = False, right: bool = False) -> UOp:
    """(m, k) @ (k, n); `left` and `right` say which operand is stored transposed."""
    i, j = loops(m, n)
    (k,) = folds(2, kk)
    a = read(param(1, m * kk), k * m + i if left else i * kk + k)
    b = read(param(2, kk * n), j * kk + k if right else k * n + j)
    return UOp.sink(store(param(0, m * n), i * n + j, fold(Ops.ADD, a * b, k), i, j))


def row_sum(m: int, n: int, op: Op = Ops.ADD) -> UOp:
    (i,) = loops(m)
    (k,) = folds(1, n)
    return UOp.sink(store(param(0, m), i, fold(op, read(param(1, m * n), i * n + k) + 1.0, k), i))


def column_sum(m: int, n: int) -> UOp:
    (j,) = loops(n)
    (k,) = folds(1, m)
    return UOp.sink(store(param(0, n), j, fold(Ops.ADD, read(param(1, m * n), k * n + j), k), j))


def full_sum(n: int) -> UOp:
    (k,) = folds(0, n)
    return UOp.sink(store(param(0, 1), UOp.index(0), fold(Ops.ADD, read(param(1, n), k), k)))


def softmax(m: int, n: int) -> UOp:
    i, j = loops(m, n)
    k, l = folds(2, n, n)
    x = param(1, m * n)
    most = fold(Ops.MAX, read(x, i * n + k), k)
    total = fold(Ops.ADD, ((read(x, i * n + l) - most) * 1.4427).alu(Ops.EXP2), l)
    value = ((read(x, i * n + j) - most) * 1.4427).alu(Ops.EXP2) * total.alu(Ops.RECIPROCAL)
    return UOp.sink(store(param(0, m * n), i * n + j, value, i, j))


def kept_softmax(m: int, n: int) -> UOp:
    """A softmax whose exponentials are kept in scratch, filled once for every row."""
    i, j = loops(m, n)
    k, l, t = folds(2, n, n, n)
    x = param(1, m * n)
    most = fold(Ops.MAX, read(x, i * n + k), k)
    value = ((read(x, i * n + t) - most) * 1.4427).alu(Ops.EXP2)
    kept = UOp(Ops.STAGE, F32, (value, t), StageArg("local", 0))
    total = fold(Ops.ADD, UOp(Ops.INDEX, F32, (kept, l)), l)
    result = UOp(Ops.INDEX, F32, (kept, j)) * total.alu(Ops.RECIPROCAL)
    return UOp.sink(store(param(0, m * n), i * n + j, result, i, j))


def conv(n: int, ci: int, co: int, h: int, w: int, kh: int, kw: int, step: int = 1) -> UOp:
    """Direct convolution without padding: x (n, ci, h, w), weight (co, ci, kh, kw)."""
    oh, ow = (h - kh) // step + 1, (w - kw) // step + 1
    b, o, y, x = loops(n, co, oh, ow)
    c, ky, kx = folds(4, ci, kh, kw)
    image = read(param(1, n * ci * h * w), ((b * ci + c) * h + y * step + ky) * w + x * step + kx)
    weight = read(param(2, co * ci * kh * kw), ((o * ci + c) * kh + ky) * kw + kx)
    return UOp.sink(
        store(
            param(0, n * co * oh * ow),
            ((b * co + o) * oh + y) * ow + x,
            fold(Ops.ADD, image * weight, c, ky, kx),
            b,
            o,
            y,
            x,
        )
    )


def conv_weight_gradient(n: int, ci: int, co: int, h: int, w: int, kh: int, kw: int) -> UOp:
    oh, ow = h - kh + 1, w - kw + 1
    o, c, ky, kx = loops(co, ci, kh, kw)
    b, y, x = folds(4, n, oh, ow)
    image = read(param(1, n * ci * h * w), ((b * ci + c) * h + y + ky) * w + x + kx)
    grad = read(param(2, n * co * oh * ow), ((b * co + o) * oh + y) * ow + x)
    return UOp.sink(
        store(
            param(0, co * ci * kh * kw),
            ((o * ci + c) * kh + ky) * kw + kx,
            fold(Ops.ADD, image * grad, b, y, x),
            o,
            c,
            ky,
            kx,
        )
    )


def conv_input_gradient(n: int, ci: int, co: int, h: int, w: int, kh: int, kw: int) -> UOp:
    """dx[b, c, y, x] = sum over o, ky, kx of dy[b, o, y - ky, x - kx] * w[o, c, ky, kx], masked at the
    border."""
    oh, ow = h - kh + 1, w - kw + 1
    b, c, y, x = loops(n, ci, h, w)
    o, ky, kx = folds(4, co, kh, kw)
    yy, xx = y - ky, x - kx
    inside = yy.ge(0) & yy.lt(oh) & xx.ge(0) & xx.lt(ow)
    grad = read(param(1, n * co * oh * ow), ((b * co + o) * oh + yy) * ow + xx, inside)
    weight = read(param(2, co * ci * kh * kw), ((o * ci + c) * kh + ky) * kw + kx)
    return UOp.sink(
        store(
            param(0, n * ci * h * w),
            ((b * ci + c) * h + y) * w + x,
            fold(Ops.ADD, grad * weight, o, ky, kx),
            b,
            c,
            y,
            x,
        )
    )


def two_stores(m: int, n: int) -> UOp:
    """Two outputs over the same axes, and one row sum used by both."""
    i, j = loops(m, n)
    (k,) = folds(2, n)
    x = param(2, m * n)
    total = fold(Ops.ADD, read(x, i * n + k), k)
    value = read(x, i * n + j)
    return UOp.sink(
        store(param(0, m * n), i * n + j, value - total, i, j),
        store(param(1, m * n), j * m + i, value * total, i, j),
    )


def gather(rows: int, width: int, picked: int) -> UOp:
    """p0[i, j] = table[idx[i], j], 0 where the index is outside."""
    i, j = loops(picked, width)
    row = read(param(2, picked, dtypes.int32), i).cast(dtypes.index)
    inside = row.ge(0) & row.lt(rows)
    return UOp.sink(
        store(
            param(0, picked * width),
            i * width + j,
            read(param(1, rows * width), row * width + j, inside),
            i,
            j,
        )
    )


def arange_sum(n: int) -> UOp:
    """A value made of the axis itself: sum over k of (k <= i)."""
    (i,) = loops(n)
    (k,) = folds(1, n)
    return UOp.sink(store(param(0, n), i, fold(Ops.ADD, k.le(i).where(UOp.const(1.0, F32), 0.0), k), i))


def product_of(m: int, n: int) -> UOp:
    (i,) = loops(m)
    (k,) = folds(1, n)
    return UOp.sink(store(param(0, m), i, fold(Ops.MUL, read(param(1, m * n), i * n + k), k), i))


KERNELS: dict[str, Callable[[], UOp]] = {
    "elementwise": lambda: elementwise(3, 4, 5),
    "transpose": lambda: transpose(6, 7),
    "matmul": lambda: matmul(6, 8, 5),
    "matmul_nt": lambda: matmul(4, 7, 6, right=True),
    "matmul_tn": lambda: matmul(6, 5, 4, left=True),
    "row_sum": lambda: row_sum(5, 7),
    "row_max": lambda: row_sum(4, 6, Ops.MAX),
    "column_sum": lambda: column_sum(5, 6),
    "full_sum": lambda: full_sum(24),
    "softmax": lambda: softmax(4, 6),
    "kept_softmax": lambda: kept_softmax(4, 9),
    "conv": lambda: conv(2, 2, 3, 5, 6, 3, 2),
    "conv_dw": lambda: conv_weight_gradient(2, 2, 2, 5, 4, 2, 3),
    "conv_dx": lambda: conv_input_gradient(1, 2, 2, 4, 5, 2, 3),
    "two_stores": lambda: two_stores(4, 6),
    "gather": lambda: gather(5, 6, 4),
    "arange": lambda: arange_sum(7),
    "product": lambda: product_of(3, 5),
}


# ---- evaluation ------------------------------------------------------------------------------------------

_NUMPY = {
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "bool": np.bool_,
    "index": np.int64,
}
_UFUNC: dict[Op, Any] = {
    Ops.ADD: np.add,
    Ops.SUB: np.subtract,
    Ops.MUL: np.multiply,
    Ops.MAX: np.maximum,
    Ops.MIN: np.minimum,
    Ops.FDIV: np.divide,
    Ops.NEG: np.negative,
    Ops.EXP2: np.exp2,
    Ops.RECIPROCAL: np.reciprocal,
    Ops.CMPLT: np.less,
    Ops.CMPLE: np.less_equal,
    Ops.CMPEQ: np.equal,
    Ops.CMPNE: np.not_equal,
    Ops.AND: np.logical_and,
    Ops.OR: np.logical_or,
    Ops.WHERE: np.where,
    Ops.FLOORDIV: np.floor_divide,
    Ops.FLOORMOD: np.mod,
}


def evaluate(ast: UOp, buffers: Sequence[np.ndarray[Any, Any]]) -> None:
    """Run a kernel, one after the other at the steps that add to what the step before has stored.

    Reads outside of a buffer that are not masked, and two stores of different values to one place, fail.
    """
    steps = _steps(ast)
    for numbers in itertools.product(*[range(r.src[0].arg) for r in steps]):
        _evaluate(ast, buffers, dict(zip(steps, numbers)))


def _steps(ast: UOp) -> list[UOp]:
    """The loops of stores that read their own memory, other than those over its elements."""
    nodes = ast.toposort()
    read = {u.src[0] for u in nodes if u.op is Ops.INDEX}
    stores = [u for u in nodes if u.op is Ops.STORE and u.src[0] in read]
    return list(dict.fromkeys(r for s in stores for r in s.src[2].ranges if r not in s.src[1].ranges))


def _evaluate(ast: UOp, buffers: Sequence[np.ndarray[Any, Any]], at: dict[UOp, int]) -> None:
    """Run a kernel at some steps: every value is an array over all RANGEs (one NumPy axis each)."""
    ranges = sorted([u for u in ast.toposort() if u.op is Ops.RANGE], key=lambda u: (u.arg.axis, u.arg.uid))
    sizes = [u.src[0].arg for u in ranges]
    position = {u: n for n, u in enumerate(ranges)}
    value: dict[UOp, Any] = {}
    for u in ast.toposort():
        src = [value.get(s) for s in u.src]
        if u.op is Ops.CONST:
            value[u] = np.array(u.arg, _NUMPY[u.dtype.name]).reshape((1,) * len(ranges))
        elif u in at:
            value[u] = np.array(at[u]).reshape((1,) * len(ranges))
        elif u.op is Ops.RANGE:
            shape = [1] * len(ranges)
            shape[position[u]] = sizes[position[u]]
            value[u] = np.arange(sizes[position[u]]).reshape(shape)
        elif u.op is Ops.PARAM:
            value[u] = buffers[u.arg.slot]
        elif u.op is Ops.STAGE:
            value[u] = scratch(src[0], [position[r] for r in u.src[1:]], sizes)
        elif u.op is Ops.INDEX and u.src[0].op is Ops.STAGE:
            value[u] = read_scratch(src)
        elif u.op is Ops.INDEX:
            value[u] = _read(src)
        elif u.op is Ops.REDUCE:
            axes = [position[r] for r in u.src[1:]]
            full = list(src[0].shape)
            for axis in axes:
                full[axis] = sizes[axis]
            value[u] = _UFUNC[u.arg.op].reduce(np.broadcast_to(src[0], full), axis=tuple(axes), keepdims=True)
        elif u.op is Ops.STORE:
            _write(src)
        elif u.op is Ops.CAST:
            value[u] = src[0].astype(_NUMPY[u.dtype.name])
        elif u.op in _UFUNC:
            with np.errstate(all="ignore"):
                value[u] = _UFUNC[u.op](*src)
        else:
            assert u.op in (Ops.END, Ops.SINK), f"evaluate: {u.op}"


def scratch(filled: Any, axes: list[int], sizes: list[int]) -> Any:
    """The elements of a STAGE along a further last axis, in the order of its ranges."""
    full = list(filled.shape)
    for axis in axes:
        full[axis] = sizes[axis]
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    turned = np.broadcast_to(filled, full).transpose(*rest, *axes)
    kept = [1 if axis in axes else full[axis] for axis in range(len(sizes))]
    return turned.reshape(*kept, -1)


def read_scratch(src: list[Any]) -> Any:
    memory, index = src[0], src[1]
    if len(src) > 2:
        index = np.where(src[2], index, 0)  # what is masked off touches no memory
    assert index.min() >= 0 and index.max() < memory.shape[-1], "a read outside of the scratch"
    full = np.broadcast_shapes(memory.shape[:-1], index.shape)
    memory = np.broadcast_to(memory, (*full, memory.shape[-1]))
    found = np.take_along_axis(memory, np.broadcast_to(index, full)[..., None], -1)[..., 0]
    return np.where(src[2], found, np.zeros((), found.dtype)) if len(src) > 2 else found


def _read(src: list[Any]) -> Any:
    memory, index = src[0], src[1]
    if len(src) == 2:
        assert index.min() >= 0 and index.max() < len(memory), "a read outside of the buffer"
        return memory[index]
    index, valid = np.broadcast_arrays(index, src[2])
    assert np.all((index >= 0) & (index < len(memory)) | ~valid), "a read outside of the buffer"
    return np.where(valid, memory[np.clip(index, 0, len(memory) - 1)], np.zeros((), memory.dtype))


def _write(src: list[Any]) -> None:
    memory = src[0]
    index, new, valid = np.broadcast_arrays(src[1], src[2], src[3] if len(src) > 3 else np.array(True))
    index, new = index[valid], new[valid]
    assert index.size == 0 or (index.min() >= 0 and index.max() < len(memory)), (
        "a store outside of the buffer"
    )
    memory[index] = new
    assert np.array_equal(memory[index], new, equal_nan=True), "two different values stored to one element"


def buffers_for(ast: UOp, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """A random array per PARAM, in slot order. Integers are small, so that they serve as rows to look up."""
    rng = np.random.default_rng(seed)
    params = sorted({u for u in ast.toposort() if u.op is Ops.PARAM}, key=lambda u: u.arg.slot)
    made: list[np.ndarray[Any, Any]] = []
    for p in params:
        kind = _NUMPY[p.dtype.name]
        made.append(
            rng.integers(-1, 6, p.arg.size).astype(kind)
            if p.dtype.is_int
            else rng.normal(size=p.arg.size).astype(kind)
        )
    return made


def outputs(ast: UOp, buffers: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """The buffers after the kernel ran on copies."""
    copies = [b.copy() for b in buffers]
    evaluate(ast, copies)
    return copies


def sizes_product(values: Sequence[int]) -> int:
    return int(np.prod(list(itertools.chain(values, [1]))))
