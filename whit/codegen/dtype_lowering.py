"""Float types that a target only stores: loaded and stored as their bits, computed in float32.

Before:  STORE(p0: float16, i, ADD(INDEX(p1: float16, i), 1.0))
After:   STORE(p0: uint16, i, narrow(ADD(widen(INDEX(p1: uint16, i)), 1.0)))

`widen` and `narrow` are integer arithmetic. After every op the float32 value is rounded to the narrow type
(to nearest, ties to even), so that results equal those of NumPy and ml_dtypes. Exceptions: sums and products
over a REDUCE are carried in float32 and rounded at the end; MULACC rounds its sum to float32 first. Casts
from float64 and from wide integers round once.
"""
from __future__ import annotations

import math

from whit.codegen.transcendental import bits, magnitude
from whit.uop.dtype import FLOAT_INFO, DType, dtypes
from whit.uop.ops import Ops
from whit.uop.uop import UOp

F32, F64 = dtypes.float32, dtypes.float64
INFINITY = 0x7F800000  # the bits of float32's
STORAGE = {8: dtypes.uint8, 16: dtypes.uint16}
# these stay within the narrow type
EXACT = frozenset({Ops.NEG, Ops.MAX, Ops.MIN, Ops.WHERE, Ops.TRUNC, Ops.FLOOR, Ops.STAGE})


def lower_storage_floats(root: UOp, narrow_types: tuple[DType, ...], native_casts: bool = False) -> UOp:
    """Replace every value of the given types by a float32 value. Memory of them is accessed as bits, or, with
    `native_casts`, as it is and converted by CAST: many machines have an instruction for that."""
    kinds = frozenset(narrow_types)
    order = root.toposort()
    if not any(node.dtype in kinds for node in order):
        return root
    lowering = (_CastLowering if native_casts else _Lowering)(kinds)
    for node in order:
        lowering.new[node] = lowering.lower(node, tuple([lowering.new[s] for s in node.src]))
    return lowering.new[root]


class _Lowering:
    """The walk's memory. `unrounded` and `source` know what a rounded value and a widened one came from:
    storing rounds anyway, and storing what was loaded must keep every bit."""

    def __init__(self, kinds: frozenset[DType]) -> None:
        self.kinds = kinds
        self.new: dict[UOp, UOp] = {}
        self.unrounded: dict[tuple[UOp, DType], UOp] = {}
        self.source: dict[tuple[UOp, DType], UOp] = {}

    def lower(self, node: UOp, src: tuple[UOp, ...]) -> UOp:
        dtype, op = node.dtype, node.op
        before = node.src[0].dtype if node.src else dtypes.void
        if op is Ops.STORE and before in self.kinds:
            return node.replace(src=(src[0], src[1], self.narrow(src[2], before), *src[3:]))
        if op in (Ops.CAST, Ops.BITCAST) and before in self.kinds and dtype not in self.kinds:
            return src[0].cast(dtype) if op is Ops.CAST else self.narrow(src[0], before).bitcast(dtype)
        if dtype not in self.kinds:
            return node if src == node.src else node.replace(src=src)
        if op is Ops.PARAM or op is Ops.LOCAL:
            return node.replace(dtype=self.storage(dtype))
        if op is Ops.AFTER:  # memory once it is written
            return node.replace(dtype=src[0].dtype, src=src)
        if op is Ops.INDEX:
            return self.widen(UOp(Ops.INDEX, self.storage(dtype), src), dtype)
        if op is Ops.LOAD:
            return self.widen(UOp(Ops.LOAD, self.storage(dtype), src, node.arg), dtype)
        if op is Ops.CONST:
            return UOp.const(node.arg, F32)
        if op is Ops.BITCAST:
            number = self.narrow(src[0], before) if before in self.kinds else src[0]
            return self.widen(number.bitcast(self.storage(dtype)), dtype)
        if op is Ops.CAST:
            return self.cast(src[0], before, dtype)
        value = node.replace(dtype=F32, src=src)
        exact = op in EXACT or (op is Ops.REDUCE and node.arg.op in EXACT)
        return value if exact else self.round(value, dtype)

    def storage(self, dtype: DType) -> DType:
        """The type in which memory of `dtype` is accessed."""
        return STORAGE[dtype.bitsize]

    def cast(self, value: UOp, before: DType, dtype: DType) -> UOp:
        wide = to_float32(value, before, dtype)
        return wide if _contains(dtype, before) else self.round(wide, dtype)

    def round(self, value: UOp, dtype: DType) -> UOp:
        result = self.rounded(value, dtype)
        self.unrounded[result, dtype] = value
        return result

    def widen(self, number: UOp, dtype: DType) -> UOp:
        result = self.widened(number, dtype)
        self.source[result, dtype] = number
        return result

    def narrow(self, value: UOp, dtype: DType) -> UOp:
        number = self.source.get((value, dtype))
        return self.narrowed(self.unrounded.get((value, dtype), value), dtype) if number is None else number

    def rounded(self, value: UOp, dtype: DType) -> UOp:
        return round_to(value, dtype)

    def widened(self, number: UOp, dtype: DType) -> UOp:
        return widen(number, dtype)

    def narrowed(self, value: UOp, dtype: DType) -> UOp:
        return narrow(value, dtype)


class _CastLowering(_Lowering):
    """The same with the target's own conversions, which round once from any type."""

    def storage(self, dtype: DType) -> DType:
        return dtype

    def cast(self, value: UOp, before: DType, dtype: DType) -> UOp:
        return value.cast(F32) if _contains(dtype, before) else self.round(value, dtype)

    def rounded(self, value: UOp, dtype: DType) -> UOp:
        return UOp(Ops.CAST, F32, (self.narrowed(value, dtype),))

    def widened(self, number: UOp, dtype: DType) -> UOp:
        return UOp(Ops.CAST, F32, (number,))

    def narrowed(self, value: UOp, dtype: DType) -> UOp:
        return UOp(Ops.CAST, dtype, (value,))


def _contains(dtype: DType, other: DType) -> bool:
    """Whether the float type `dtype` holds every value of `other`."""
    info = FLOAT_INFO[dtype]
    if other not in FLOAT_INFO:
        return other.is_bool or other.bitsize <= info.mantissa + 1
    less = FLOAT_INFO[other]
    finite = less.mantissa <= info.mantissa and less.bias <= info.bias and less.max <= info.max
    return finite and (info.has_inf or not less.has_inf)


def to_float32(value: UOp, before: DType, after: DType) -> UOp:
    """`value`, of type `before` (float32 already if that is lowered), as a float32 that rounds to `after` as
    if directly."""
    if before is F64:
        return round_to_odd(value)
    if after is dtypes.bfloat16 and before.kind in "iux" and before.bitsize > 16:
        return round_to_odd(value.cast(F64))  # the other types overflow before float32 rounds their integers
    return value.cast(F32)


def round_to_odd(value: UOp) -> UOp:
    """A float64 as float32, inexact results with an odd last bit: rounding again to a narrower type is then
    correct (Boldo and Melquiond 2008)."""
    near = value.cast(F32)
    back = near.cast(F64)
    number = bits(near)
    change = back.not_equal(value) & (number & 1).equal(0) & magnitude(near).lt(math.inf)
    step = magnitude(back).lt(magnitude(value)).where(1, number.const_like(-1))
    return change.where(number + step, number).bitcast(F32)


def widen(number: UOp, dtype: DType) -> UOp:
    """The float32 value of the bits of a narrow float. Exact; NaN payloads are kept."""
    info = FLOAT_INFO[dtype]
    wide = number.cast(dtypes.uint32)
    if dtype is dtypes.bfloat16:
        return (wide << 16).bitcast(F32)
    top, shift = 1 << (dtype.bitsize - 1), 23 - info.mantissa
    rest = (wide & (top - 1)) << shift
    value = rest.bitcast(F32) * 2.0 ** (127 - info.bias)  # makes denormals normal, too
    special = ((1 << info.exponent) - 1) << 23 if info.has_inf else (top - 1) << shift
    number = rest.lt(special).where(bits(value), rest | INFINITY)
    return (number | ((wide & top) << (32 - dtype.bitsize))).bitcast(F32)


def narrow(value: UOp, dtype: DType) -> UOp:
    """The bits of a float32 rounded to a narrow float; too large becomes inf, or NaN where there is no
    inf."""
    info = FLOAT_INFO[dtype]
    drop, number = 23 - info.mantissa, bits(value)
    rest = number & (INFINITY | 0x7FFFFF)
    infinity = ((1 << info.exponent) - 1) << info.mantissa
    nan = infinity | (1 << (info.mantissa - 1)) if info.has_inf else infinity | ((1 << info.mantissa) - 1)
    code = (rest + ((1 << (drop - 1)) - 1) + ((rest >> drop) & 1)) >> drop
    if dtype is not dtypes.bfloat16:
        magic = UOp.const(2.0 ** (24 - info.bias - info.mantissa), F32)  # its last place: the least denormal
        denormal = bits(rest.bitcast(F32) + magic) - bits(magic)
        code = rest.lt((128 - info.bias) << 23).where(denormal, code - ((127 - info.bias) << info.mantissa))
        limit = code.const_like(infinity if info.has_inf else nan)
        code = limit.lt(code).where(limit, code)
    code = rest.le(INFINITY).where(code, nan)
    sign = (number >> (32 - dtype.bitsize)) & (1 << (dtype.bitsize - 1))
    return (code | sign).cast(STORAGE[dtype.bitsize])


def round_to(value: UOp, dtype: DType) -> UOp:
    """A float32 rounded to a value of a narrow float type."""
    info = FLOAT_INFO[dtype]
    drop, number = 23 - info.mantissa, bits(value)
    rest = number & (INFINITY | 0x7FFFFF)
    rounded = (rest + ((1 << (drop - 1)) - 1) + ((rest >> drop) & 1)) & (0xFFFFFFFF << drop & 0xFFFFFFFF)
    if dtype is not dtypes.bfloat16:
        magic = 2.0 ** (24 - info.bias - info.mantissa)
        denormal = bits((rest.bitcast(F32) + magic) - magic)
        rounded = rest.lt((128 - info.bias) << 23).where(denormal, rounded)
        largest = bits(UOp.const(info.max, F32))
        rounded = rounded.le(largest).where(rounded, INFINITY if info.has_inf else INFINITY | 0x400000)
    rounded = rest.le(INFINITY).where(rounded, rest)
    return (rounded | (number & 0x80000000)).bitcast(F32)
