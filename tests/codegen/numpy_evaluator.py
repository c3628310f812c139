"""Evaluates graphs of elementwise nodes over NumPy arrays: every float32 op is rounded to float32, integers
wrap."""
from __future__ import annotations

import ml_dtypes
import numpy as np

from whit.uop import AxisType, DType, Op, Ops, ParamArg, UOp, dtypes

NUMPY = {dtypes.bool: np.bool_, dtypes.int8: np.int8, dtypes.int16: np.int16, dtypes.int32: np.int32,
         dtypes.int64: np.int64,
         dtypes.uint8: np.uint8, dtypes.uint16: np.uint16, dtypes.uint32: np.uint32, dtypes.uint64: np.uint64,
         dtypes.float16: np.float16, dtypes.float32: np.float32, dtypes.float64: np.float64,
         dtypes.bfloat16: ml_dtypes.bfloat16, dtypes.index: np.int64}

BINARY = {
    Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.FDIV: np.divide, Ops.MAX: np.maximum,
    Ops.MIN: np.minimum,
    Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor, Ops.CMPLT: np.less,
    Ops.CMPLE: np.less_equal,
    Ops.CMPEQ: np.equal, Ops.CMPNE: np.not_equal, Ops.SQRT: np.sqrt, Ops.TRUNC: np.trunc, Ops.FLOOR: np.floor,
    Ops.NEG: np.negative,
}


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exact product of float64s as a sum, for magnitudes where splitting neither over- nor underflows."""
    def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scaled = x * 134217729.0
        high = scaled - (scaled - x)
        return high, x - high
    product = a * b
    (ah, al), (bh, bl) = halves(a), halves(b)
    return product, al * bl - (((product - ah * bh) - al * bh) - ah * bl)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c rounded once (float32), or nearly so (float64: through x86's 80-bit numbers and an exact
    product)."""
    if a.dtype == np.float32:
        product = a.astype(np.float64) * b.astype(np.float64)  # exact
        total = product + c.astype(np.float64)
        error = (product - (total - c)) + (c - (total - (total - c)))
        # an inexact float64 sum is made odd: then rounding again is as good as rounding once
        number = total.view(np.int64)
        fix = (error != 0) & np.isfinite(error) & (number & 1 == 0)
        number = np.where(fix, number + np.where((error > 0) == (total > 0), 1, -1), number)
        return number.view(np.float64).astype(np.float32)
    product, error = two_product(a, b)
    exact = (product.astype(np.longdouble) + c.astype(np.longdouble)) + error.astype(np.longdouble)
    plain = a * b + c
    return np.where(np.isfinite(exact) & np.isfinite(error), exact.astype(np.float64), plain)


def shifted(op: object, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    width = a.dtype.itemsize * 8
    assert ((b >= 0) & (b < width)).all(), "shift amount outside of the width"
    return np.left_shift(a, b.astype(a.dtype)) if op is Ops.SHL else np.right_shift(a, b.astype(a.dtype))


def divided(op: object, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert (b != 0).all(), "division by zero"
    assert a.dtype.kind == "u" or not ((b == -1) & (a == np.iinfo(a.dtype).min)).any(), "INT_MIN / -1"
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        quotient = np.where((quotient < 0) & (quotient * b != a), quotient + 1, quotient)
    return quotient.astype(a.dtype) if op is Ops.TRUNCDIV else (a - b * quotient).astype(a.dtype)


def cast(value: np.ndarray, dtype: DType) -> np.ndarray:
    wanted = NUMPY[dtype]
    if value.dtype.kind == "f" and dtype.is_int:
        info = np.iinfo(wanted)
        whole = np.nan_to_num(np.trunc(value.astype(np.longdouble)), nan=0.0, posinf=info.max,
                              neginf=info.min)
        return np.clip(whole, np.longdouble(info.min), np.longdouble(info.max)).astype(wanted)
    return value.astype(wanted)


def evaluate(root: UOp, leaves: dict[UOp, np.ndarray]) -> np.ndarray:
    """The value of every lane. Every node but leaves and constants must be elementwise."""
    values: dict[UOp, np.ndarray] = dict(leaves)
    uses: dict[UOp, int] = {}
    order = root.toposort(lambda n: n in leaves)
    for node in order:
        for source in node.src if node not in leaves else ():
            uses[source] = uses.get(source, 0) + 1
    with np.errstate(all="ignore"):
        for node in order:
            if node not in values:
                values[node] = _apply(node, [values[s] for s in node.src])
                for source in node.src:
                    uses[source] -= 1
                    if not uses[source] and source not in leaves:
                        del values[source]
    return values[root]


def compute(root: UOp, *arrays: np.ndarray) -> np.ndarray:
    """The value of a graph whose INDEX nodes read the PARAMs of slots 0, 1, … at one index: one lane per
    array element. Memory of narrow floats is given as their bits."""
    leaves = {node: arrays[node.src[0].arg.slot] for node in root.toposort() if node.op is Ops.INDEX}
    return np.broadcast_to(evaluate(root, leaves), arrays[0].shape)


def operand(dtype: DType, slot: int = 0) -> UOp:
    """The read that `compute` gives the array of that slot."""
    return UOp(Ops.INDEX, dtype,
               (UOp(Ops.PARAM, dtype, (), ParamArg(slot, 1 << 20)), UOp.range(1 << 20, AxisType.LOOP, 0)))


def dot(op: Op, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """z plus the products of the parts, in 64 bits, wrapped: parts are cut out by views of the memory."""
    x, y = np.broadcast_arrays(x, y)
    if op is Ops.DOT2B:  # products of bfloat16 are exact in float64
        a, b = [np.ascontiguousarray(v).view(ml_dtypes.bfloat16).astype(np.float64) for v in (x, y)]
        return (z + (a * b).reshape(*x.shape, -1).sum(-1)).astype(z.dtype)
    kinds = {Ops.DOT4: (np.int8, np.int8), Ops.DOT4U: (np.uint8, np.int8), Ops.DOT2: (np.int16, np.int16)}[op]
    low = [np.ascontiguousarray(v.astype(np.int64)).view(np.int32)[..., ::2] for v in (x, y)]
    a, b = [np.ascontiguousarray(v).view(kind) for v, kind in zip(low, kinds, strict=True)]
    products = a.astype(np.int64) * b.astype(np.int64)
    return (z.astype(np.int64) + products.reshape(*x.shape, -1).sum(-1)).astype(z.dtype)


def _apply(node: UOp, src: list[np.ndarray]) -> np.ndarray:
    op, dtype = node.op, NUMPY[node.dtype]
    if op is Ops.CONST:
        return np.array([node.arg]).astype(dtype)
    if op is Ops.WHERE:
        return np.where(*src)
    if op is Ops.CAST:
        return cast(src[0], node.dtype)
    if op is Ops.BITCAST:
        return np.ascontiguousarray(src[0]).view(dtype)
    if op is Ops.MULACC:
        return fused(*np.broadcast_arrays(*src))
    if op in (Ops.SHL, Ops.SHR):
        return shifted(op, *np.broadcast_arrays(*src))
    if op in (Ops.TRUNCDIV, Ops.TRUNCMOD):
        return divided(op, *np.broadcast_arrays(*src))
    if op in (Ops.DOT4, Ops.DOT4U, Ops.DOT2):
        return dot(op, *np.broadcast_arrays(*src))
    if op is Ops.LDEXP:
        return np.ldexp(src[0], np.nan_to_num(src[1]).astype(np.int32)).astype(dtype)
    if op is Ops.RECIPROCAL:
        return np.array(1, dtype) / src[0]
    result = BINARY[op](*src)
    assert node.dtype is dtypes.bool or result.dtype == dtype, f"{node}: {result.dtype}"
    return result
