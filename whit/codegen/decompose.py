"""Turn what a target lacks into what it has: transcendental functions, integer division, wide shifts, threefry, narrow floats.

Runs on a kernel whose tiles are still folded, so that each function is written out once, not once per lane.
"""
from __future__ import annotations

import math
from collections.abc import Callable

from whit.codegen import transcendental
from whit.codegen.dtype_lowering import lower_storage_floats
from whit.codegen.target import Target
from whit.helpers import CompileError
from whit.uop.dtype import DType, dtypes
from whit.uop.ops import ALU, Op, Ops
from whit.uop.pattern import PatternMatcher, UPat
from whit.uop.rewrite import graph_rewrite
from whit.uop.uop import UOp, alu

INDEX_SAFE = 1 << 40  # index values within this may be shifted by a multiple of the divisor without overflow


def decompose(ast: UOp, target: Target) -> UOp:
    """The kernel with ALU ops of `target.native` only, in dtypes that the target computes in.

    Unless the target is the interpreter (whose ops mean what the op table says in every case), divisors are never 0 or -1 and
    shift amounts are always within the width afterwards. Casts of floats to integers are left to the renderer, which saturates
    and turns NaN into 0. CompileError if an op can be expressed neither way.

    >>> from whit.uop import UOp, dtypes
    >>> x = UOp(Ops.INDEX, dtypes.float32, (UOp(Ops.PARAM, dtypes.float32, (), ParamArg(0, 4)), UOp.index(0)))
    >>> target = Target("t", "c", native=frozenset({Ops.FDIV}))
    >>> decompose(UOp.sink(alu(Ops.RECIPROCAL, x)), target).src[0].op
    Ops.FDIV
    """
    ast = lower_storage_floats(ast, target.storage_only)
    ast = graph_rewrite(ast, RULES, target)
    for node in ast.toposort():
        if node.op in ALU and node.op not in target.native and not _is_basic(node):
            raise CompileError(f"{node.op.name} on {node.dtype} for target {target.key}",
                               because="it is not native there and has no decomposition", fix="add it to the target's native ops")
    return ast


def _is_basic(node: UOp) -> bool:
    """FLOORDIV and FLOORMOD of addresses with dividends >= 0 stay: linearisation sees their structure, and renderers
    print them as truncating ones."""
    return node.op in (Ops.FLOORDIV, Ops.FLOORMOD) and node.dtype is dtypes.index and node.src[0].vmin >= 0


def _exact_semantics(target: Target) -> bool:
    return target.language == "python"


# ---- functions -------------------------------------------------------------------------------------------------------


def _function(u: UOp, ctx: Target) -> UOp | None:
    """EXP2, LOG2, SIN, ERF and POW; types narrower than float32 go through float32."""
    if u.op in ctx.native:
        return None
    if u.dtype not in transcendental.UINT:
        wide = [s.cast(dtypes.float32) for s in u.src]
        return UOp(u.op, dtypes.float32, tuple(wide)).cast(u.dtype)
    fma = Ops.MULACC in ctx.native
    if u.op is Ops.POW:
        return _power(u.src[0], u.src[1], ctx)
    return transcendental.FUNCTIONS[u.op](u.src[0], fma)


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
    """TRUNC and FLOOR: adding and subtracting 2**mantissa rounds to nearest; step back where that went too far."""
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


# ---- bools -----------------------------------------------------------------------------------------------------------


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


# ---- integers --------------------------------------------------------------------------------------------------------


def _excludes(u: UOp, value: int) -> bool:
    return bool(u.vmin > value or u.vmax < value)


def _is_safe_divisor(y: UOp) -> bool:
    """Neither 0 nor -1: by bounds, or because `_safe_divisor` made it."""
    if _excludes(y, 0) and (y.dtype.is_unsigned or _excludes(y, -1)):
        return True
    if y.op is not Ops.WHERE or y.src[1] is not y.const_like(1):
        return False
    return y.src[0] is _bad_divisor(y.src[2])


def _bad_divisor(y: UOp) -> UOp:
    zero = y.equal(0)
    return zero if y.dtype.is_unsigned else zero | y.equal(-1)


def _truncating(u: UOp, ctx: Target) -> UOp | None:
    """TRUNCDIV and TRUNCMOD: 0 where the divisor is 0; -1 is kept from the hardware, which traps on INT_MIN / -1."""
    x, y = u.src
    if u.op is Ops.TRUNCMOD and Ops.TRUNCMOD not in ctx.native:
        return x - alu(Ops.TRUNCDIV, x, y) * y
    if _exact_semantics(ctx) or _is_safe_divisor(y):
        return None
    if y.op is Ops.CONST:
        return u.const_like(0) if y.arg == 0 or u.op is Ops.TRUNCMOD else alu(Ops.NEG, x)
    safe = alu(u.op, x, _bad_divisor(y).where(1, y))  # a remainder by 1 is 0, as those by 0 and -1 are
    if u.op is Ops.TRUNCMOD:
        return safe
    if not y.dtype.is_unsigned and not _excludes(y, -1):
        safe = y.equal(-1).where(alu(Ops.NEG, x), safe)
    return safe if _excludes(y, 0) else y.equal(0).where(0, safe)


def _flooring(u: UOp, ctx: Target) -> UOp | None:
    """FLOORDIV and FLOORMOD by truncating ones: one less, or the divisor more, where the signs differ and it is inexact."""
    if u.op in ctx.native:
        return None
    x, y = u.src
    if u.dtype is dtypes.index and y.op is Ops.CONST and y.arg > 0:
        return _floor_index(u, x, y.arg)
    if u.dtype is dtypes.index and x.vmin >= 0 and y.vmin > 0:
        return None
    if u.dtype.is_unsigned or (x.vmin >= 0 and y.vmin >= 0):
        return alu(Ops.TRUNCDIV if u.op is Ops.FLOORDIV else Ops.TRUNCMOD, x, y)
    if y.op is Ops.CONST and y.arg > 0 and y.arg & (y.arg - 1) == 0:
        return x >> (y.arg.bit_length() - 1) if u.op is Ops.FLOORDIV else x & (y.arg - 1)
    remainder = alu(Ops.TRUNCMOD, x, y)
    wrong = remainder.not_equal(0) & (remainder ^ y).lt(0)
    if u.op is Ops.FLOORMOD:
        return remainder + wrong.where(y, 0)
    return alu(Ops.TRUNCDIV, x, y) + wrong.where(-1, x.const_like(0))


def _floor_index(u: UOp, x: UOp, divisor: int) -> UOp | None:
    """Addresses stay FLOORDIV and FLOORMOD, so that linearisation still sees their structure; dividends become >= 0."""
    if x.vmin >= 0:
        return None
    if x.vmin < -INDEX_SAFE or x.vmax > INDEX_SAFE:
        remainder = alu(Ops.TRUNCMOD, x, UOp.index(divisor))
        below = remainder.lt(0)
        if u.op is Ops.FLOORMOD:
            return remainder + below.where(divisor, UOp.index(0))
        return alu(Ops.TRUNCDIV, x, UOp.index(divisor)) + below.where(-1, UOp.index(0))
    turns = -(x.vmin // divisor)
    moved = alu(u.op, x + turns * divisor, UOp.index(divisor))
    return moved if u.op is Ops.FLOORMOD else moved - turns


def _shift(u: UOp, ctx: Target) -> UOp | None:
    """Amounts outside of 0 … width-1 give 0, or the sign everywhere."""
    if _exact_semantics(ctx):
        return None
    x, y = u.src
    last = u.dtype.bitsize - 1
    if y.vmin >= 0 and y.vmax <= last:
        return None
    fills = u.op is Ops.SHR and not u.dtype.is_unsigned
    if y.op is Ops.CONST:
        return x >> last if fills else u.const_like(0)
    inside = (y & (-1 - last)).equal(0) if not y.dtype.is_unsigned else y.le(last)
    within = y & last
    if fills:
        return x >> inside.where(within, last)
    return inside.where(alu(u.op, x, within), 0)


def threefry(counter: UOp, key: UOp) -> UOp:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011); low and high halves of the words are the two lanes."""
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


# ---- the rules -------------------------------------------------------------------------------------------------------


def _on(ops: Op | tuple[Op, ...], function: Callable[..., UOp | None], dtype: DType | None = None) -> tuple[UPat, Callable[..., UOp | None]]:
    return UPat(ops, dtype, name="u"), function


RULES = PatternMatcher([
    _on((Ops.ADD, Ops.MUL), _add_mul_bool, dtypes.bool),
    _on((Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE), _compare_bool),
    _on(Ops.CAST, _cast_to_bool, dtypes.bool),
    _on((Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.ERF, Ops.POW), _function),
    _on((Ops.TRUNC, Ops.FLOOR), _round_whole),
    _on(Ops.RECIPROCAL, _reciprocal),
    _on(Ops.FDIV, _divide),
    _on((Ops.MAX, Ops.MIN), _max_min),
    _on(Ops.NEG, _negate),
    _on(Ops.SUB, _subtract),
    _on(Ops.MULACC, _multiply_add),
    _on((Ops.FLOORDIV, Ops.FLOORMOD), _flooring),
    _on((Ops.TRUNCDIV, Ops.TRUNCMOD), _truncating),
    _on((Ops.SHL, Ops.SHR), _shift),
    _on(Ops.THREEFRY, _threefry),
])
