"""Rules on the values of a kernel, by subject. Each is exact: for floats down to NaN and the sign of zero,
for integers in two's complement. Index arithmetic has laws of its own (`whit.uop.symbolic`); these rules
leave it alone.

No rule makes a graph bigger: each removes a node, replaces an op by a cheaper one, or moves a constant to the
right.
"""
from __future__ import annotations

import math
import struct
from typing import Any

from whit.uop import PatternMatcher, UOp, UPat, dtypes, graph_rewrite, rule
from whit.uop.dtype import FLOAT_INFO, DType, wrap
from whit.uop.ops import ALU, Op, Ops
from whit.uop.pattern import Rule
from whit.uop.rewrite import Pass
from whit.uop.uop import alu

BOOL = (dtypes.bool,)
INTS = dtypes.ints
FLOATS = dtypes.floats
BITS = (*INTS, dtypes.bool)
NUMBERS = (*INTS, *FLOATS)
VALUES = (*NUMBERS, dtypes.bool)
TRUE, FALSE = UPat(Ops.CONST, BOOL, arg=True), UPat(Ops.CONST, BOOL, arg=False)
Pattern = Any  # a parameter of a rule; its default says which dtypes it stands for


def simplify_values(root: UOp) -> UOp:
    """The kernel with its scalar values simplified, to a fixed point. Results are equal bit for bit (all NaNs
    are one).

    Before:  x * 1.0 + NEG(y)
    After:   x - y
    """
    return graph_rewrite(root, value_rules)


simplify_values_pass = Pass("simplify values", lambda root, _: simplify_values(root), "kernel", "kernel",
                            "exact rules on scalar values")

# ---- constants ---------------------------------------------------------------------------------------------


def _fold(u: UOp) -> UOp | None:
    """An op on constants is a constant. MULACC of floats is left: rounding once needs more than float64
    has."""
    fused = u.op is Ops.MULACC and u.dtype.is_float
    if fused or u.dtype not in VALUES \
            or any([s.dtype not in VALUES or isinstance(s.arg, tuple) for s in u.src]):
        return None
    assert u.op.meaning is not None, f"{u.op} has no meaning"
    return UOp.const(u.op.meaning(*[s.arg for s in u.src]), u.dtype)


def _fold_bitcast(u: UOp, c_x: UOp) -> UOp | None:
    """The bits of a constant, for types that Python can pack."""
    source, target = c_x.dtype, u.dtype
    if not source.fmt or not target.fmt or dtypes.index in (source, target) \
            or dtypes.bool in (source, target):
        return None
    return UOp.const(struct.unpack(target.fmt, struct.pack(source.fmt, c_x.arg))[0], target)


def _decided(u: UOp) -> UOp | None:
    """Integers and bools whose bounds leave one value."""
    low, high = u.bounds
    return UOp.const(low, u.dtype) if low == high else None


def _constant_right(u: UOp, c_x: UOp, y: UOp) -> UOp | None:
    """c + y -> y + c. Commutative ops keep their constant on the right, so that equal values become one
    node."""
    return None if y.op is Ops.CONST or u.dtype is dtypes.index or c_x.dtype is dtypes.index \
        else alu(u.op, y, c_x)


COMMUTATIVE = tuple([op for op in ALU if op.commutative])
_c_first, _c_any = UPat.cvar("c_x", VALUES), UPat.var("y", VALUES)

constants = [
    Rule("fold_constants", UPat(tuple(ALU), VALUES, UPat(Ops.CONST), name="u"), _fold, doc=_fold.__doc__
         or ""),
    Rule("fold_cast", UPat(Ops.CAST, VALUES, (_c_first,), name="u"), lambda u, c_x: c_x.cast(u.dtype)),
    Rule("fold_bitcast", UPat(Ops.BITCAST, NUMBERS, (_c_first,), name="u"), _fold_bitcast),
    Rule("decided_by_bounds", UPat((Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE), BOOL,
                                   (UPat.var("x", INTS), UPat.var("y", INTS)), name="u"), lambda u, x,
         y: _decided(u)),
    Rule("extreme_by_bounds",
         UPat((Ops.MAX, Ops.MIN, Ops.FLOORDIV, Ops.FLOORMOD, Ops.TRUNCDIV, Ops.TRUNCMOD, Ops.AND,
                                    Ops.SHR), INTS, name="u"), _decided),
    Rule("constant_right", UPat(COMMUTATIVE, src=(_c_first, _c_any), name="u"), _constant_right),
]

# ---- arithmetic --------------------------------------------------------------------------------------------


@rule
def mul_one(x: Pattern = VALUES) -> Any:
    """x * 1 -> x. Exact for every float: NaN, inf and -0.0 pass through."""
    return x * 1, x


@rule
def mul_zero(x: Pattern = BITS) -> Any:
    """x * 0 -> 0 for integers and bools only: inf * 0 is NaN, and -1.0 * 0 is -0.0."""
    return x * 0, 0


@rule
def add_zero(x: Pattern = BITS) -> Any:
    """x + 0 -> x. Not for floats: -0.0 + 0.0 is 0.0."""
    return x + 0, x


@rule
def add_minus_zero(x: Pattern = FLOATS) -> Any:
    """x + -0.0 -> x, for every float."""
    return x + -0.0, x


@rule
def sub_zero(x: Pattern = NUMBERS) -> Any:
    """x - 0 -> x, also -0.0 - 0.0."""
    return x - 0, x


@rule
def sub_itself(x: Pattern = INTS) -> Any:
    """x - x -> 0. Not for floats: inf - inf is NaN."""
    return x - x, 0


@rule
def neg_neg(x: Pattern = NUMBERS) -> Any:
    """--x -> x. The least integer negates to itself, twice."""
    return -x.alu(Ops.NEG), x


@rule
def add_negated(x: Pattern = NUMBERS, y: Pattern = NUMBERS) -> Any:
    """x + -y -> x - y. IEEE subtraction is defined so."""
    return x + (-y), x - y


@rule
def sub_negated(x: Pattern = NUMBERS, y: Pattern = NUMBERS) -> Any:
    """x - -y -> x + y."""
    return x - (-y), x + y


@rule
def mul_negated(x: Pattern = NUMBERS, y: Pattern = NUMBERS) -> Any:
    """-x * -y -> x * y. Signs multiply exactly."""
    return (-x) * (-y), x * y


@rule
def sub_constant(x: Pattern = INTS, c_: Pattern = INTS) -> Any:
    """x - c -> x + -c for integers, which wrap: one form for constants to meet in."""
    return x - c_, lambda x, c_: x + c_.const_like(-c_.arg), lambda c_: c_.arg != 0


@rule
def add_constants(x: Pattern = INTS, c_1: Pattern = INTS, c_2: Pattern = INTS) -> Any:
    """(x + a) + b -> x + (a + b) for integers, which wrap. Never for floats."""
    return (x + c_1) + c_2, lambda x, c_1, c_2: x + (c_1.arg + c_2.arg)


@rule
def mul_constants(x: Pattern = INTS, c_1: Pattern = INTS, c_2: Pattern = INTS) -> Any:
    """(x * a) * b -> x * (a * b) for integers, which wrap. Never for floats."""
    return (x * c_1) * c_2, lambda x, c_1, c_2: x * (c_1.arg * c_2.arg)


@rule
def div_one(x: Pattern = FLOATS) -> Any:
    """x / 1 -> x."""
    return x / 1, x


def _has_exact_reciprocal(c_: UOp) -> bool:
    """A power of two whose reciprocal is a normal number too."""
    value, info = c_.arg, FLOAT_INFO[c_.dtype]
    if value == 0 or not math.isfinite(value) or abs(math.frexp(value)[0]) != 0.5:
        return False
    return bool(math.ldexp(1.0, 1 - info.bias) <= abs(1.0 / value) <= info.max)


@rule
def div_by_power_of_two(x: Pattern = FLOATS, c_: Pattern = FLOATS) -> Any:
    """x / 2^k -> x * 2^-k: both round the same real number, also to denormals."""
    return x / c_, lambda x, c_: x * (1.0 / c_.arg), _has_exact_reciprocal


arithmetic = [mul_one, mul_zero, add_zero, add_minus_zero, sub_zero, sub_itself, neg_neg, add_negated,
              sub_negated,
              mul_negated, sub_constant, add_constants, mul_constants, div_one, div_by_power_of_two]

# ---- integer division --------------------------------------------------------------------------------------


@rule
def floordiv_one(x: Pattern = INTS) -> Any:
    """x // 1 -> x."""
    return x // 1, x


@rule
def floormod_one(x: Pattern = INTS) -> Any:
    """x % 1 -> 0."""
    return x % 1, 0


@rule
def truncdiv_one(x: Pattern = INTS) -> Any:
    """x / 1 -> x."""
    return x.alu(Ops.TRUNCDIV, 1), x


@rule
def truncmod_one(x: Pattern = INTS) -> Any:
    """The remainder of a division by one is 0."""
    return x.alu(Ops.TRUNCMOD, 1), 0


def _is_power_of_two(c_: UOp) -> bool:
    return bool(c_.arg > 1 and c_.arg & (c_.arg - 1) == 0)


@rule
def floordiv_shift(x: Pattern = INTS, c_: Pattern = INTS) -> Any:
    """x // 2^k -> x >> k: an arithmetic shift rounds down, as FLOORDIV does."""
    return x // c_, lambda x, c_: x >> (c_.arg.bit_length() - 1), _is_power_of_two


@rule
def floormod_mask(x: Pattern = INTS, c_: Pattern = INTS) -> Any:
    """x % 2^k -> x & (2^k - 1), for negative x too in two's complement."""
    return x % c_, lambda x, c_: x & (c_.arg - 1), _is_power_of_two


def _is_whole(x: UOp, c_: UOp) -> bool:
    return bool(x.vmin >= 0) and _is_power_of_two(c_)


@rule
def truncdiv_shift(x: Pattern = INTS, c_: Pattern = INTS) -> Any:
    """x / 2^k -> x >> k where x cannot be negative."""
    return x.alu(Ops.TRUNCDIV, c_), lambda x, c_: x >> (c_.arg.bit_length() - 1), _is_whole


@rule
def truncmod_mask(x: Pattern = INTS, c_: Pattern = INTS) -> Any:
    """The remainder of x / 2^k -> x & (2^k - 1) where x cannot be negative."""
    return x.alu(Ops.TRUNCMOD, c_), lambda x, c_: x & (c_.arg - 1), _is_whole


@rule
def floordiv_floordiv(x: Pattern = INTS, c_1: Pattern = INTS, c_2: Pattern = INTS) -> Any:
    """(x // a) // b -> x // (a * b) for positive a and b whose product is a value of the type."""
    return (x // c_1) // c_2, lambda x, c_1, c_2: x // (c_1.arg * c_2.arg), \
        lambda c_1, c_2: c_1.arg > 0 and c_2.arg > 0 and c_1.arg * c_2.arg <= c_1.dtype.max


@rule
def mod_of_smaller(x: Pattern = INTS, c_: Pattern = INTS) -> Any:
    """x % c -> x where 0 <= x < c for certain."""
    return x % c_, x, lambda x, c_: x.vmin >= 0 and x.vmax < c_.arg


division = [floordiv_one, floormod_one, truncdiv_one, truncmod_one, mod_of_smaller, floordiv_shift,
            floormod_mask,
            truncdiv_shift, truncmod_mask, floordiv_floordiv]

# ---- choices -----------------------------------------------------------------------------------------------


@rule
def where_same(c: Pattern = BOOL, x: Pattern = VALUES) -> Any:
    """Both branches are the same value."""
    return c.where(x, x), x


@rule
def where_known(c_: Pattern = BOOL, x: Pattern = VALUES, y: Pattern = VALUES) -> Any:
    """The condition is a constant."""
    return c_.where(x, y), lambda c_, x, y: x if c_.arg else y


@rule
def where_not(c: Pattern = BOOL, x: Pattern = VALUES, y: Pattern = VALUES) -> Any:
    """where(not c, x, y) -> where(c, y, x)."""
    return (c ^ True).where(x, y), c.where(y, x)


@rule
def where_condition(c: Pattern = BOOL) -> Any:
    """where(c, True, False) -> c."""
    return c.where(TRUE, FALSE), c


@rule
def where_not_condition(c: Pattern = BOOL) -> Any:
    """where(c, False, True) -> not c."""
    return c.where(FALSE, TRUE), c ^ True


@rule
def where_true_inside(c: Pattern = BOOL, x: Pattern = VALUES, y: Pattern = VALUES,
                      z: Pattern = VALUES) -> Any:
    """The same condition again, in the branch where it holds."""
    return c.where(c.where(x, y), z), c.where(x, z)


@rule
def where_false_inside(c: Pattern = BOOL, x: Pattern = VALUES, y: Pattern = VALUES,
                       z: Pattern = VALUES) -> Any:
    """The same condition again, in the branch where it does not hold."""
    return c.where(x, c.where(y, z)), c.where(x, z)


def _orderings() -> list[Rule]:
    """where(x < y, y, x) and its relatives are MAX or MIN. Integers only: a NaN would choose a side, and so
    would zeros of different signs."""
    x, y = UPat.var("x", INTS), UPat.var("y", INTS)
    return [Rule(f"{name}_by_{compare.name.lower()}", UPat(compare, src=(x, y)).where(*branches), right)
            for compare in (Ops.CMPLT, Ops.CMPLE)
            for name, branches, right in (("max", (y, x), x.maximum(y)), ("min", (x, y), x.minimum(y)))]


choices = [where_same, where_known, where_not, where_condition, where_not_condition, where_true_inside,
           where_false_inside, *_orderings()]

# ---- comparisons -------------------------------------------------------------------------------------------


@rule
def less_than_itself(x: Pattern = VALUES) -> Any:
    """x < x is false, for NaN too."""
    return x.lt(x), lambda x: UOp.const(False, dtypes.bool)


@rule
def at_most_itself(x: Pattern = BITS) -> Any:
    """x <= x is true for integers (not for NaN)."""
    return x.le(x), lambda x: UOp.const(True, dtypes.bool)


@rule
def equal_to_itself(x: Pattern = BITS) -> Any:
    """x == x is true for integers (not for NaN)."""
    return x.equal(x), lambda x: UOp.const(True, dtypes.bool)


@rule
def unequal_to_itself(x: Pattern = BITS) -> Any:
    """x != x is false for integers (NaN differs from itself)."""
    return x.not_equal(x), lambda x: UOp.const(False, dtypes.bool)


@rule
def bool_is_not_false(x: Pattern = BOOL) -> Any:
    """b != False -> b."""
    return x.not_equal(False), x


@rule
def bool_is_true(x: Pattern = BOOL) -> Any:
    """b == True -> b."""
    return x.equal(True), x


@rule
def bool_is_not_true(x: Pattern = BOOL) -> Any:
    """b != True -> not b."""
    return x.not_equal(True), x ^ True


@rule
def bool_is_false(x: Pattern = BOOL) -> Any:
    """b == False -> not b."""
    return x.equal(False), x ^ True


@rule
def cast_bool_is_not_zero(x: Pattern = BOOL) -> Any:
    """number(b) != 0 -> b."""
    return x.cast().not_equal(0), x


@rule
def cast_bool_is_zero(x: Pattern = BOOL) -> Any:
    """number(b) == 0 -> not b."""
    return x.cast().equal(0), x ^ True


@rule
def not_equal_negated(x: Pattern = VALUES, y: Pattern = VALUES) -> Any:
    """not (x == y) -> x != y; these two are opposites for NaN too."""
    return x.equal(y) ^ True, x.not_equal(y)


@rule
def equal_negated(x: Pattern = VALUES, y: Pattern = VALUES) -> Any:
    """not (x != y) -> x == y."""
    return x.not_equal(y) ^ True, x.equal(y)


@rule
def less_negated(x: Pattern = BITS, y: Pattern = BITS) -> Any:
    """not (x < y) -> y <= x. Not for floats: with a NaN both are false."""
    return x.lt(y) ^ True, y.le(x)


@rule
def at_most_negated(x: Pattern = BITS, y: Pattern = BITS) -> Any:
    """not (x <= y) -> y < x. Not for floats."""
    return x.le(y) ^ True, y.lt(x)


comparisons = [less_than_itself, at_most_itself, equal_to_itself, unequal_to_itself, bool_is_not_false,
               bool_is_true,
               bool_is_not_true, bool_is_false, cast_bool_is_not_zero, cast_bool_is_zero, not_equal_negated,
               equal_negated, less_negated, at_most_negated]

# ---- bits and bools ----------------------------------------------------------------------------------------


@rule
def and_zero(x: Pattern = BITS) -> Any:
    """x & 0 -> 0."""
    return x & 0, 0


def _is_full(c_: UOp) -> bool:
    return bool(c_.arg == wrap(-1, c_.dtype))


@rule
def and_ones(x: Pattern = BITS, c_: Pattern = BITS) -> Any:
    """x & 11…1 -> x."""
    return x & c_, x, _is_full


@rule
def or_zero(x: Pattern = BITS) -> Any:
    """x | 0 -> x."""
    return x | 0, x


@rule
def or_ones(x: Pattern = BITS, c_: Pattern = BITS) -> Any:
    """x | 11…1 -> 11…1."""
    return x | c_, c_, _is_full


@rule
def xor_zero(x: Pattern = BITS) -> Any:
    """x ^ 0 -> x."""
    return x ^ 0, x


@rule
def xor_itself(x: Pattern = BITS) -> Any:
    """x ^ x -> 0."""
    return x ^ x, 0


def _idempotent() -> list[Rule]:
    """x op x -> x. MAX and MIN are idempotent for floats too: NaN stays NaN."""
    x = UPat.var("x", VALUES)
    return [Rule(f"{op.name.lower()}_itself", UPat(op, src=(x, x)), x) for op in (Ops.AND, Ops.OR, Ops.MAX,
                                                                                  Ops.MIN)]


def _constants_meet(op: Op) -> Rule:
    """(x op a) op b -> x op (a op b), for integers and bools."""
    x, a, b = UPat.var("x", BITS), UPat.cvar("c_1", BITS), UPat.cvar("c_2", BITS)

    def merge(x: UOp, c_1: UOp, c_2: UOp) -> UOp:
        assert op.meaning is not None, f"{op} has no meaning"
        return alu(op, x, x.const_like(op.meaning(c_1.arg, c_2.arg)))
    return Rule(f"{op.name.lower()}_constants", UPat(op, src=(UPat(op, src=(x, a)), b)), merge)


@rule
def shift_left_zero(x: Pattern = INTS) -> Any:
    """x << 0 -> x."""
    return x << 0, x


@rule
def shift_right_zero(x: Pattern = INTS) -> Any:
    """x >> 0 -> x."""
    return x >> 0, x


def _shifts_add(c_1: UOp, c_2: UOp) -> bool:
    return min(c_1.arg, c_2.arg) >= 0 and bool(c_1.arg + c_2.arg < c_1.dtype.bitsize)


@rule
def shift_left_twice(x: Pattern = INTS, c_1: Pattern = INTS, c_2: Pattern = INTS) -> Any:
    """(x << a) << b -> x << (a + b) while that is less than the width."""
    return (x << c_1) << c_2, lambda x, c_1, c_2: x << (c_1.arg + c_2.arg), _shifts_add


@rule
def shift_right_twice(x: Pattern = INTS, c_1: Pattern = INTS, c_2: Pattern = INTS) -> Any:
    """(x >> a) >> b -> x >> (a + b) while that is less than the width."""
    return (x >> c_1) >> c_2, lambda x, c_1, c_2: x >> (c_1.arg + c_2.arg), _shifts_add


def _bool_arithmetic() -> list[Rule]:
    """On bools ADD and MAX are OR, MUL and MIN are AND."""
    x, y = UPat.var("x", BOOL), UPat.var("y", BOOL)
    return [Rule(f"bool_{op.name.lower()}", UPat(op, src=(x, y)), UPat(better, src=(x, y)))
            for op, better in ((Ops.ADD, Ops.OR), (Ops.MAX, Ops.OR), (Ops.MUL, Ops.AND), (Ops.MIN, Ops.AND))]


@rule
def max_minus_infinity(x: Pattern = FLOATS) -> Any:
    """max(x, -inf) -> x, NaN too."""
    return x.maximum(-math.inf), x


@rule
def min_infinity(x: Pattern = FLOATS) -> Any:
    """min(x, inf) -> x, NaN too."""
    return x.minimum(math.inf), x


@rule
def mul_by_bool(x: Pattern = INTS, b: Pattern = BOOL) -> Any:
    """x * int(b) -> where(b, x, 0). Not for floats: inf * 0 is NaN."""
    return x * b.cast(), b.where(x, 0)


bits = [and_zero, and_ones, or_zero, or_ones, xor_zero, xor_itself, *_idempotent(),
        *[_constants_meet(op) for op in (Ops.AND, Ops.OR, Ops.XOR, Ops.MAX, Ops.MIN)],
        shift_left_zero, shift_right_zero, shift_left_twice, shift_right_twice, *_bool_arithmetic(),
        max_minus_infinity, min_infinity, mul_by_bool]

# ---- casts -------------------------------------------------------------------------------------------------


def holds(outer: DType, inner: DType) -> bool:
    """Whether every value of `inner` is a value of `outer`, so that a cast there and on loses nothing."""
    if outer is inner:
        return True
    if outer.is_bool:
        return False
    if outer.is_float:
        wide = FLOAT_INFO[outer]
        if inner.is_float:
            narrow = FLOAT_INFO[inner]
            return wide.mantissa >= narrow.mantissa and (wide.has_inf or not narrow.has_inf) \
                and wide.max >= narrow.max and wide.bias + wide.mantissa >= narrow.bias + narrow.mantissa
        bits_needed = 1 if inner.is_bool else inner.bitsize - (not inner.is_unsigned)
        return wide.mantissa + 1 >= bits_needed and 2.0 ** bits_needed <= wide.max
    return not inner.is_float and outer.min <= inner.min and inner.max <= outer.max


def _through(x: UOp, middle: UOp, u: UOp) -> UOp | None:
    """cast(cast(x, mid), out) -> cast(x, out) where mid keeps every value of x, or keeps the low bits that
    out takes."""
    source, mid, out = x.dtype, middle.dtype, u.dtype
    if mid not in VALUES or source not in VALUES:
        return None
    exact = holds(mid, source)
    # the float saturates where the integer would wrap
    if mid.is_float and not source.is_float and out.is_int:
        exact = exact and out.min <= x.vmin and x.vmax <= out.max
    elif not exact and source.is_int and mid.is_int:
        exact = (mid.min <= x.vmin and x.vmax <= mid.max) or (out.is_int and mid.bitsize >= out.bitsize)
    return x.cast(out) if exact else None


@rule
def cast_to_same(x: Pattern = VALUES) -> Any:
    """A cast to the type that a value has already."""
    return x.cast().named("u"), lambda x, u: x if x.dtype is u.dtype else None


@rule
def bitcast_twice(x: Pattern = VALUES) -> Any:
    """Bits reinterpreted twice are reinterpreted once."""
    return UPat(Ops.BITCAST, src=(UPat(Ops.BITCAST, src=(x,)),), name="u"), lambda x, u: x.bitcast(u.dtype)


casts = [cast_to_same, bitcast_twice,
         Rule("cast_through",
              UPat(Ops.CAST, VALUES, (UPat(Ops.CAST, VALUES, (UPat.var("x"),), name="middle"),), name="u"),
              _through, doc=_through.__doc__ or "")]

# ---- reductions --------------------------------------------------------------------------------------------


def _repeated(u: UOp) -> UOp | None:
    """A value that some of the reduced ranges do not reach: MAX and MIN of equal values are the value, an
    integer sum of n of them is n times the value."""
    value, ranges = u.src[0], u.src[1:]
    reached = value.ranges
    idle = [r for r in ranges if r not in reached and r.src[0].op is Ops.CONST and r.src[0].arg > 0]
    summed = u.arg.op is Ops.ADD and u.dtype in INTS
    if not idle or not (summed or (u.arg.op in (Ops.MAX, Ops.MIN) and u.dtype in VALUES)):
        return None
    if any(r in reached for other in ranges for r in other.src[0].ranges):
        return None
    rest = tuple([r for r in ranges if r not in idle])
    less = UOp(Ops.REDUCE, u.dtype, (value, *rest), u.arg) if rest else value
    return less * math.prod([r.src[0].arg for r in idle]) if summed else less


reductions = [Rule("repeated_value", UPat(Ops.REDUCE, VALUES, name="u"), _repeated, doc=_repeated.__doc__
                   or "")]

# ---- all of them -------------------------------------------------------------------------------------------

value_rules = PatternMatcher([*constants, *arithmetic, *division, *choices, *comparisons, *bits, *casts,
                              *reductions])
