"""Turn what a target lacks into what it has: transcendental functions, floor division, threefry, narrow
floats.

Runs on a kernel whose tiles are still folded, so that each function is written out once, not once per lane.
"""
from __future__ import annotations

import math
from collections.abc import Callable

from whit.codegen import transcendental
from whit.codegen.dtype_lowering import lower_storage_floats
from whit.codegen.target import Target
from whit.helpers import CompileError, DeviceError
from whit.uop.dtype import DType, dtypes, wrap
from whit.uop.ops import ALU, DOTS, Op, Ops
from whit.uop.pattern import PatternMatcher, UPat
from whit.uop.rewrite import graph_rewrite
from whit.uop.uop import UOp, alu

INDEX_SAFE = 1 << 40  # index values within this may be shifted by a multiple of the divisor without overflow


def decompose(ast: UOp, target: Target) -> UOp:
    """The kernel with ALU ops of `target.native` only, in dtypes that the target computes in.

    An op is native if the target's renderer gives it the meaning of the op table in every case (division by
    0, shifts by the width and more). Casts of floats to integers saturate and turn NaN into 0, in the
    renderer. CompileError if an op is not native and has no decomposition, DeviceError if the target runs no
    kernels at all.

    >>> target = Target("t", "c", native=frozenset({Ops.FDIV}))
    >>> decompose(alu(Ops.RECIPROCAL, UOp.const(3.0, dtypes.float32)), target).op
    Ops.FDIV
    """
    if target.language == "none":
        computing = [node.op for node in ast.toposort() if node.op.is_elementwise or node.op is Ops.REDUCE]
        names = ", ".join(sorted({op.name for op in computing})) or "a rearranging copy"
        raise DeviceError(f"{names} on {target.key}", because="it computes nothing",
                          fix='copy first: tensor.to("CPU")')
    ast = lower_storage_floats(ast, target.storage_only, Ops.CAST in target.native)
    ast = graph_rewrite(ast, RULES, target)
    for node in ast.toposort():
        if node.op in ALU and node.op not in target.native and not _is_basic(node):
            raise CompileError(f"{node.op.name} on {node.dtype} for target {target.key}",
                               because="it is not native there and has no decomposition",
                               fix="add it to the target's native ops")
    return ast


def _is_basic(node: UOp) -> bool:
    """FLOORDIV and FLOORMOD of addresses with dividends >= 0 stay: linearisation sees their structure, and
    renderers print them as truncating ones."""
    return node.op in (Ops.FLOORDIV, Ops.FLOORMOD) and node.dtype is dtypes.index and node.src[0].vmin >= 0


# ---- functions ---------------------------------------------------------------------------------------------


def _function(u: UOp, ctx: Target) -> UOp | None:
    """EXP2, LOG2, SIN, ERF and POW; types narrower than float32 go through float32."""
    if u.op in ctx.native:
        return None
    if u.dtype not in transcendental.UINT:
        wide = [s.cast(dtypes.float32) for s in u.src]
        return UOp(u.op, dtypes.float32, tuple(wide)).cast(u.dtype)
    if u.op is Ops.POW:
        return _power(u.src[0], u.src[1], ctx)
    if u.op is Ops.EXP2:
        return transcendental.exp2(u.src[0], Ops.MULACC in ctx.native, Ops.LDEXP in ctx.native)
    return transcendental.FUNCTIONS[u.op](u.src[0], Ops.MULACC in ctx.native)


def _exponential(u: UOp, ctx: Target) -> UOp | None:
    """EXP2(x * log2(e)) is e**x: rounding the product would cost up to 30 ulp."""
    product = u.src[0]
    if product.op is not Ops.MUL or u.dtype not in transcendental.UINT:
        return None
    base, factor = product.src if product.src[1].op is Ops.CONST else product.src[::-1]
    if factor.op is not Ops.CONST or abs(factor.arg) != transcendental.LOG2_E[u.dtype]:
        return None
    if Ops.EXP2 not in ctx.native:
        ldexp = Ops.LDEXP in ctx.native
        return transcendental.exp(base, factor.arg < 0, ldexp) if Ops.MULACC in ctx.native else None
    if u.dtype is dtypes.float64:
        return None
    exact = math.copysign(transcendental.LOG2_E[dtypes.float64], factor.arg)
    return alu(Ops.EXP2, base.cast(dtypes.float64) * exact).cast(u.dtype)


def _power(x: UOp, y: UOp, target: Target) -> UOp:
    """Small constant exponents are products; 1/2 is a square root that knows -inf and -0."""
    if y.op is Ops.CONST:
        if y.arg == 0.0:
            return x.const_like(1.0)
        if y.arg == 1.0:
            return x
        if y.arg == 2.0:
            return x * x
        if y.arg == -1.0:
            return alu(Ops.RECIPROCAL, x)
        if y.arg == 0.5 and Ops.SQRT in target.native:
            return x.equal(-math.inf).where(math.inf, alu(Ops.SQRT, x + 0.0))
    return transcendental.pow(x, y, Ops.MULACC in target.native)


def _reciprocal(u: UOp, ctx: Target) -> UOp | None:
    return None if Ops.RECIPROCAL in ctx.native else u.const_like(1.0) / u.src[0]


def _divide(u: UOp, ctx: Target) -> UOp | None:
    """x / c -> x * (1/c) where that is exact: c a power of two whose reciprocal is normal."""
    x, y = u.src
    if y.op is Ops.CONST and u.dtype.bitsize >= 16 and y.arg != 0 and math.isfinite(y.arg):
        fraction, exponent = math.frexp(y.arg)
        if abs(fraction) == 0.5 and abs(exponent) < (13 if u.dtype.bitsize < 32 else 125):
            return x * (1.0 / float(y.arg))
    return None if Ops.FDIV in ctx.native else x * alu(Ops.RECIPROCAL, y)


def _negate(u: UOp, ctx: Target) -> UOp | None:
    return None if Ops.NEG in ctx.native else u.src[0] * u.const_like(-1)


def _subtract(u: UOp, ctx: Target) -> UOp | None:
    return None if Ops.SUB in ctx.native else alu(Ops.ADD, u.src[0], alu(Ops.NEG, u.src[1]))


def _multiply_add(u: UOp, ctx: Target) -> UOp | None:
    return None if Ops.MULACC in ctx.native else alu(Ops.ADD, alu(Ops.MUL, u.src[0], u.src[1]), u.src[2])


def _dot(u: UOp, ctx: Target) -> UOp | None:
    """The parts one by one: cut out, made signed, multiplied."""
    if u.op in ctx.native and u.dtype in (dtypes.int32, dtypes.float32):
        return None
    if u.op is Ops.DOT2B:
        return _dot_halves(u)
    x, y, total = u.src
    if u.op is Ops.DOT4U and u.dtype is dtypes.int32 and Ops.DOT2 in ctx.native:
        for at in (0, 8):  # every second byte, as words of 16 bits
            a, b = [(v >> at if at else v) & 0x00FF00FF for v in (x, y)]
            sign = b & 0x00800080
            total = UOp(Ops.DOT2, u.dtype, (a, b | ((sign << 9) - (sign << 1)), total))
        return total
    if u.op is Ops.DOT4U and u.dtype is dtypes.int32 and Ops.DOT4 in ctx.native:
        for _ in range(2):  # what the flipped signs take away, 128 times y
            total = UOp(Ops.DOT4, u.dtype, (x.const_like(0x40404040), y, total))
        return UOp(Ops.DOT4, u.dtype, (x ^ x.const_like(wrap(0x80808080, u.dtype)), y, total))
    width = DOTS[u.op]
    half, top = x.const_like(wrap(1 << (width - 1), u.dtype)), x.const_like(wrap((1 << width) - 1, u.dtype))
    for at in range(0, 32, width):
        if at >= u.dtype.bitsize and u.dtype.is_unsigned:
            break  # narrow values are continued by their sign
        amount = x.const_like(min(at, u.dtype.bitsize - 1))
        a, b = [alu(Ops.SHR, v, amount) & top for v in (x, y)]
        b = (b ^ half) - half
        total = total + (a if u.op is Ops.DOT4U else (a ^ half) - half) * b
    return total


def _dot_halves(u: UOp) -> UOp:
    """A bfloat16 is the upper half of a float32."""
    x, y = [v.bitcast(dtypes.uint32) for v in u.src[:2]]
    first = (x & 0xFFFF0000).bitcast(u.dtype) * (y & 0xFFFF0000).bitcast(u.dtype)
    return u.src[2] + first + (x << 16).bitcast(u.dtype) * (y << 16).bitcast(u.dtype)


def _max_min(u: UOp, ctx: Target) -> UOp | None:
    """By comparison; NaN if either is."""
    a, b = u.src
    if u.dtype.is_bool:
        return a | b if u.op is Ops.MAX else a & b
    if u.op in ctx.native:
        return None
    keep = b.le(a) if u.op is Ops.MAX else a.le(b)
    if u.dtype.is_float:
        keep = keep | a.not_equal(a)
    return keep.where(a, b)


def _round_whole(u: UOp, ctx: Target) -> UOp | None:
    """TRUNC and FLOOR: adding and subtracting 2**mantissa rounds to nearest; step back where that went too
    far."""
    if u.op in ctx.native:
        return None
    x = u.src[0]
    if u.dtype not in transcendental.UINT:
        return UOp(u.op, dtypes.float32, (x.cast(dtypes.float32),)).cast(u.dtype)
    sign = transcendental.sign_mask(u.dtype)
    absolute = transcendental.magnitude(x)
    magic = float(1 << transcendental.MANTISSA[u.dtype])
    near = (absolute + magic) - magic
    down = absolute.lt(near).where(near - 1.0, near)
    signed = (transcendental.bits(down) | (transcendental.bits(x) & sign)).bitcast(u.dtype)
    whole = absolute.lt(magic).where(signed, x)
    if u.op is Ops.TRUNC:
        return whole
    return x.lt(whole).where(whole - 1.0, whole)


# ---- bools -------------------------------------------------------------------------------------------------


def _add_mul_bool(u: UOp) -> UOp:
    return u.src[0] | u.src[1] if u.op is Ops.ADD else u.src[0] & u.src[1]


def _compare_bool(u: UOp) -> UOp | None:
    """false < true."""
    a, b = u.src
    if not a.dtype.is_bool:
        return None
    if u.op is Ops.CMPNE:
        return a ^ b
    return ~(a ^ b) if u.op is Ops.CMPEQ else ~a & b if u.op is Ops.CMPLT else ~a | b


def _cast_to_bool(u: UOp) -> UOp:
    """NaN is true."""
    return u.src[0].not_equal(0)


# ---- integers ----------------------------------------------------------------------------------------------


def _remainder(u: UOp, ctx: Target) -> UOp | None:
    """TRUNCMOD by TRUNCDIV; by 0 both are 0."""
    if Ops.TRUNCMOD in ctx.native:
        return None
    x, y = u.src
    rest = x - alu(Ops.TRUNCDIV, x, y) * y
    return y.equal(0).where(0, rest)


def _flooring(u: UOp, ctx: Target) -> UOp | None:
    """FLOORDIV and FLOORMOD: of addresses by ones with dividends >= 0, by powers of two as shifts and masks,
    otherwise by truncating ones: one less, or the divisor more, where the signs differ and it is inexact."""
    x, y = u.src
    if u.dtype is dtypes.index and y.vmin > 0 and x.vmin >= 0:
        return None
    is_small = x.vmin > -INDEX_SAFE and x.vmax < INDEX_SAFE
    if u.dtype is dtypes.index and y.op is Ops.CONST and y.arg > 0 and is_small:
        turns = -(x.vmin // y.arg)
        moved = alu(u.op, x + turns * y.arg, y)
        return moved if u.op is Ops.FLOORMOD else moved - turns
    if y.op is Ops.CONST and y.arg > 0 and y.arg & (y.arg - 1) == 0:
        return x >> (int(y.arg).bit_length() - 1) if u.op is Ops.FLOORDIV else x & (y.arg - 1)
    if u.op in ctx.native and u.dtype is not dtypes.index:
        return None
    if u.dtype.is_unsigned or (x.vmin >= 0 and y.vmin >= 0):
        return alu(Ops.TRUNCDIV if u.op is Ops.FLOORDIV else Ops.TRUNCMOD, x, y)
    remainder = alu(Ops.TRUNCMOD, x, y)
    wrong = remainder.not_equal(0) & (remainder ^ y).lt(0)
    if u.op is Ops.FLOORMOD:
        return remainder + wrong.where(y, 0)
    return alu(Ops.TRUNCDIV, x, y) + wrong.where(-1, x.const_like(0))


def threefry(counter: UOp, key: UOp) -> UOp:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011); low and high halves of the words are the two
    lanes."""
    def halves(word: UOp) -> tuple[UOp, UOp]:
        return word.cast(dtypes.uint32), (word >> 32).cast(dtypes.uint32)
    (x0, x1), (k0, k1) = halves(counter), halves(key)
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = x0 + k0, x1 + k1
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << turn) | (x1 >> (32 - turn))) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + (keys[(block + 2) % 3] + (block + 1))
    return (x1.cast(dtypes.uint64) << 32) | x0.cast(dtypes.uint64)


def _threefry(u: UOp, ctx: Target) -> UOp | None:
    return None if Ops.THREEFRY in ctx.native else threefry(u.src[0], u.src[1])


def _compare_counter(u: UOp, ctx: Target) -> UOp | None:
    """A label of 64 bits compared with a loop's counter: in 32 bits, so that twice as many lanes fit.
    Outside of the loop the label becomes -1, which no counter is, if it is no counter's value.

    Before:  CMPEQ(label, CAST(k))
    After:   CMPEQ(CAST(WHERE(0 <= label < 1000, label, -1)), CAST(k))      for k below 1000
    """
    if u.src[0].dtype not in (dtypes.int64, dtypes.uint64):
        return None
    for label, counter in (u.src, u.src[::-1]):
        if counter.op is not Ops.CAST or counter.src[0].dtype is not dtypes.index:
            continue
        number = counter.src[0]
        low, high = number.bounds
        if low >= 0 and high < 1 << 31 and not number.ranges <= label.ranges:
            inside = label.ge(0) & label.le(int(high))
            narrow = inside.where(label.cast(dtypes.int32), -1)
            return alu(u.op, narrow, number.cast(dtypes.int32))
    return None


# ---- the rules ---------------------------------------------------------------------------------------------


Rewrite = Callable[..., UOp | None]


def _on(ops: Op | tuple[Op, ...], function: Rewrite, dtype: DType | None = None) -> tuple[UPat, Rewrite]:
    return UPat(ops, dtype, name="u"), function


RULES = PatternMatcher([
    _on((Ops.ADD, Ops.MUL), _add_mul_bool, dtypes.bool),
    _on((Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE), _compare_bool),
    _on((Ops.CMPEQ, Ops.CMPNE), _compare_counter),
    _on(Ops.CAST, _cast_to_bool, dtypes.bool),
    _on(Ops.EXP2, _exponential),
    _on((Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.ERF, Ops.POW), _function),
    _on((Ops.TRUNC, Ops.FLOOR), _round_whole),
    _on(Ops.RECIPROCAL, _reciprocal),
    _on(Ops.FDIV, _divide),
    _on((Ops.MAX, Ops.MIN), _max_min),
    _on(Ops.NEG, _negate),
    _on(Ops.SUB, _subtract),
    _on(Ops.MULACC, _multiply_add),
    _on(tuple(DOTS), _dot),
    _on((Ops.FLOORDIV, Ops.FLOORMOD), _flooring),
    _on(Ops.TRUNCMOD, _remainder),
    _on(Ops.THREEFRY, _threefry),
])
