"""Elementwise operations: arithmetic, comparison, bits, functions, activations.

Values follow NumPy (NaN, infinities, signed zeros, wrap-around of integers) unless a docstring says
otherwise. Operands broadcast and promote; a Python scalar takes the dtype of the other operand (`int32 + 1.5`
is float32, `float16 + 1.5` is float16). A Python integer that the common integer dtype cannot hold raises
DTypeError, except in comparisons.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Self, TypeAlias, TypeVar, cast

from whit.helpers import ArgumentError, DTypeError
from whit.tensor.base import TensorBase, check_devices, scalar_shape
from whit.uop import DType, Op, Ops, UOp, dtypes, promote
from whit.uop.dtype import common_dtype, float_of, strong, to_dtype

Bool: TypeAlias = bool  # inside the class, bool, int and float are methods
Int: TypeAlias = int
Float: TypeAlias = float

_INT_OF_SIZE = {8: dtypes.int8, 16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}

# atan(sqrt z) / sqrt z on [0, tan(pi/8)**2] as a polynomial in z: interpolated at Chebyshev nodes with 60
# digits; relative errors 6e-10 and 3e-18
_ATAN_SINGLE = [
    1.0,
    -0.3333330689293243,
    0.19998183034820705,
    -0.14239532553566966,
    0.10569827940676421,
    -0.060263029935534104,
]
_ATAN_DOUBLE = [
    1.0,
    -0.3333333333333312,
    0.1999999999994089,
    -0.14285714279250195,
    0.11111110744917155,
    -0.0909089680899165,
    0.0769204532960224,
    -0.06662951798681727,
    0.058468781872398394,
    -0.05035101954410522,
    0.03796524453835579,
    -0.017805382891899698,
]


F = TypeVar("F", bound=Callable[..., Any])


def _in_single(function: F) -> F:
    """A function made of several operations: floats narrower than float32 compute in float32 and are rounded
    once, at the end."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        dtype = self.uop.dtype
        if dtype.kind == "f" and dtype.bitsize < 32:
            return function(self.cast(dtypes.float32), *args, **options).cast(dtype)
        return function(self, *args, **options)

    return cast(F, call)


class ElementwiseMixin(TensorBase):
    """Methods of the elementwise family."""

    # ---- helpers

    def _float(self) -> Self:
        """This tensor in the float dtype in which functions work: itself, or the default float."""
        dtype = self.uop.dtype
        return self if dtype.kind == "f" else self._wrap(self.uop.cast(float_of(dtype)))

    def _function(self, op: Op) -> Self:
        """A float function: integers and bools are cast to the default float."""
        uop = self.uop
        if uop.dtype.kind != "f":
            uop = uop.cast(float_of(uop.dtype))
        return self._wrap(UOp(op, uop.dtype, (uop,)))

    def _number(self, what: str) -> Self:
        if self.uop.dtype.is_bool:
            raise DTypeError(
                f"{what} of a bool tensor",
                because="booleans have no arithmetic sign",
                fix="use logical_not or ^ for bools, or cast to an integer dtype",
            )
        return self

    def _constant(self, value: Bool | Float) -> Self:
        """A constant of this dtype and shape."""
        return self._wrap(scalar_shape(UOp.const(value, self.uop.dtype), self.uop.shape))

    # ---- dtype

    def cast(self, dtype: DType | str) -> Self:
        """Convert the values. Float to integer truncates, saturates at the limits and turns NaN into 0; to
        bool tests for non-zero; between integers wraps.

        >>> Tensor([1.7, -1.7]).cast(dtypes.int32).tolist()
        [1, -1]
        """
        want = to_dtype(dtype)
        return self if want is self.uop.dtype else self._wrap(self.uop.cast(want))

    def half(self) -> Self:
        return self.cast(dtypes.float16)

    def float(self) -> Self:
        return self.cast(dtypes.float32)

    def double(self) -> Self:
        return self.cast(dtypes.float64)

    def bfloat16(self) -> Self:
        return self.cast(dtypes.bfloat16)

    def char(self) -> Self:
        return self.cast(dtypes.int8)

    def short(self) -> Self:
        return self.cast(dtypes.int16)

    def int(self) -> Self:
        return self.cast(dtypes.int32)

    def long(self) -> Self:
        return self.cast(dtypes.int64)

    def bool(self) -> Self:
        return self.cast(dtypes.bool)

    # ---- arithmetic

    def usum(self, *others: Any) -> Self:
        """The sum of this and the other operands, element by element."""
        total = self
        for other in others:
            total = total.add(other)
        return total

    def uprod(self, *others: Any) -> Self:
        """The product of this and the other operands, element by element."""
        total = self
        for other in others:
            total = total.mul(other)
        return total

    def add(self, other: Any, reverse: Bool = False) -> Self:
        """x + y; integers wrap, bools `or`.

        >>> Tensor([1, 2]).add(Tensor([10, 20])).tolist()
        [11, 22]
        """
        return self._broadcast_binary(Ops.ADD, other, "add", reverse)

    def sub(self, other: Any, reverse: Bool = False) -> Self:
        """x - y; integers wrap. DTypeError for bools."""
        a, b = self._operands(other, "sub")
        if a.dtype.is_bool:
            self._number("sub")
        return self._apply(Ops.SUB, "sub", b, a) if reverse else self._apply(Ops.SUB, "sub", a, b)

    def mul(self, other: Any, reverse: Bool = False) -> Self:
        """x * y; integers wrap, bools `and`."""
        return self._broadcast_binary(Ops.MUL, other, "mul", reverse)

    def div(self, other: Any, reverse: Bool = False, rounding_mode: str | None = None) -> Self:
        """x / y. Without a rounding mode integers divide as floats; "floor" and "trunc" round the quotient
        and keep integers, for which division by zero gives 0.

        >>> (Tensor([7, -7]) / 2).tolist(), Tensor([7, -7]).div(2, rounding_mode="trunc").tolist()
        ([3.5, -3.5], [3, -3])
        """
        if rounding_mode not in (None, "floor", "trunc"):
            raise ArgumentError(
                f"div(rounding_mode={rounding_mode!r})",
                because="there is no such mode",
                fix='use None, "floor" or "trunc"',
            )
        a, b = self._operands(other, "div")
        if reverse:
            a, b = b, a
        if rounding_mode is None:
            return self._apply(Ops.FDIV, "div", a.cast(float_of(a.dtype)), b.cast(float_of(b.dtype)))
        if a.dtype.kind != "f":
            a, b = (a.cast(dtypes.int8), b.cast(dtypes.int8)) if a.dtype.is_bool else (a, b)
            return self._apply(Ops.FLOORDIV if rounding_mode == "floor" else Ops.TRUNCDIV, "div", a, b)
        if rounding_mode == "trunc":
            return self._apply(Ops.FDIV, "div", a, b)._function(Ops.TRUNC)
        return self._floor_quotient(self._wrap(a), self._wrap(b))

    def _floor_quotient(self, a: Self, b: Self) -> Self:
        """floor(a / b) of floats such that a == q * b + mod(a, b), as Python and NumPy: from the remainder,
        so that the rounding of the quotient does not lift it to the next integer."""
        x, y = a.cast(dtypes.float64), b.cast(dtypes.float64)
        r = self._float_remainder(x.uop, y.uop)
        quotient = ((x - r) / y)._round_half_even()
        wrong_sign = r.ne(0) & ((r < 0) ^ (y < 0))
        return y.eq(0).where(x / y, wrong_sign.where(quotient - 1, quotient)).cast(a.uop.dtype)

    def idiv(self, other: Any) -> Self:
        """x / y rounded towards zero, in the promoted dtype."""
        return self.div(other, rounding_mode="trunc")

    def floor_divide(self, other: Any) -> Self:
        """x / y rounded down; integer division by zero gives 0."""
        return self.div(other, rounding_mode="floor")

    def mod(self, other: Any, reverse: Bool = False) -> Self:
        """The remainder with the sign of the divisor, as Python and NumPy; integer division by zero gives 0.

        >>> (Tensor([-7, 7]) % 3).tolist()
        [2, 1]
        """
        a, b = self._operands(other, "mod")
        if reverse:
            a, b = b, a
        if a.dtype.kind != "f":
            a, b = (a.cast(dtypes.int8), b.cast(dtypes.int8)) if a.dtype.is_bool else (a, b)
            return self._apply(Ops.FLOORMOD, "mod", a, b)
        r, d = self._float_remainder(a, b), self._wrap(b)
        wrong_sign = r.ne(0) & ((r < 0) ^ (d < 0))
        return wrong_sign.where(r + d, r._zero_like(d))

    def remainder(self, other: Any) -> Self:
        """Another name of `mod`."""
        return self.mod(other)

    def fmod(self, other: Any) -> Self:
        """The remainder with the sign of the dividend, as C's fmod; integer division by zero gives 0. Floats:
        exact while the quotient is below 2**100."""
        a, b = self._operands(other, "fmod")
        if a.dtype.kind != "f":
            return self._apply(Ops.TRUNCMOD, "fmod", a, b)
        return self._float_remainder(a, b)._zero_like(self._wrap(a))

    def _float_remainder(self, a: UOp, b: UOp) -> Self:
        """a - b * trunc(a / b), computed in float64 in two steps, each exact: the first leaves |r| < |a| /
        2**50, the second takes the rest; a quotient that was rounded up leaves a remainder of the wrong sign,
        which is put right."""
        x, y = self._wrap(a.cast(dtypes.float64)), self._wrap(b.cast(dtypes.float64))
        below = (x < 0).where(-x, x) < (y < 0).where(-y, y)  # what is less than the divisor is itself
        big = x.isfinite() & ((x > 2.0**900) | (x < -(2.0**900)))  # scaled, so that no product overflows
        scale = big.where(self._wrap(UOp.const(2.0**-64, dtypes.float64)), 1.0)
        r, divisor = x * scale, below.where(1.0, y) * scale
        for _ in range(2):
            product, error = (r / divisor)._function(Ops.TRUNC)._exact_product(divisor)
            r = r - product - error
        size = (divisor < 0).where(-divisor, divisor)
        over = r.ne(0) & ((r < 0) ^ (x < 0))
        r = over.where((x < 0).where(r - size, r + size), r) / scale
        return below.where(x, r).cast(a.dtype)

    def _exact_product(self, other: Self) -> tuple[Self, Self]:
        """(x * y rounded, its error) in float64, for factors below 2**996 (Dekker 1971): not every device
        multiplies and adds with one rounding."""
        product = self * other
        (a, b), (c, d) = self._halves(), other._halves()  # no gradient: an error of rounding has none
        rounded = self._wrap(product.uop.detach())
        return product, b * d - (rounded - a * c - b * c - a * d)

    def _halves(self) -> tuple[Self, Self]:
        """A float64 as a sum of two numbers of 26 bits."""
        x = self._wrap(self.uop.detach())
        wide = x * (2.0**27 + 1)
        high = wide - (wide - x)
        return high, x - high

    def _zero_like(self, other: Self) -> Self:
        """This value; where it is zero, with the sign of `other`. Sums give 0.0, so that -(0.0 - x) is -0.0;
        the gradient is 1 everywhere."""
        return other._negative_bit().where(-(0.0 - self), self + 0.0)

    def neg(self) -> Self:
        """-x. DTypeError for bools."""
        return self._wrap(UOp(Ops.NEG, self._number("neg").uop.dtype, (self.uop,)))

    def reciprocal(self) -> Self:
        """1 / x as a float."""
        return self._function(Ops.RECIPROCAL)

    def square(self) -> Self:
        """x * x."""
        return self * self

    def pow(self, other: Any, reverse: Bool = False) -> Self:
        """x to the power y. Integers stay integers and wrap; a negative integer exponent raises ArgumentError
        when it is a Python number and gives 0 (±1 for bases ±1) when it is an element.

        >>> (Tensor([2, 3]) ** 3).tolist(), (2 ** Tensor([1.0, 0.5])).tolist()
        ([8, 27], [2.0, 1.4142135381698608])
        """
        if not reverse and isinstance(other, (int, float)) and not isinstance(other, bool):
            done = self._pow_constant(other)
            if done is not None:
                return done
        a, b = self._operands(other, "pow")
        if reverse:
            a, b = b, a
        if a.dtype.kind != "f":
            a, b = (a.cast(dtypes.int8), b.cast(dtypes.int8)) if a.dtype.is_bool else (a, b)
            return self._int_pow(self._wrap(a), self._wrap(b))
        return self._apply(Ops.POW, "pow", a, b)

    def _pow_constant(self, exponent: Int | Float) -> Self | None:
        """Powers that are cheaper as products or roots; None for all others."""
        if self.uop.dtype.kind != "f":
            if not isinstance(exponent, int):
                return self._float()._pow_constant(exponent)
            if exponent < 0:
                raise ArgumentError(
                    f"pow of an {self.uop.dtype} tensor and {exponent}",
                    because="the result is no integer",
                    fix="cast the tensor to a float dtype first",
                )
            base = self.cast(dtypes.int8) if self.uop.dtype.is_bool else self
            return base._power(exponent)
        if exponent == 0.5:
            return self.sqrt()
        if exponent == -0.5:
            return self.rsqrt()
        if exponent == int(exponent if math.isfinite(exponent) else 0.5) and abs(exponent) <= 4:
            power = self._power(abs(int(exponent)))
            return power.reciprocal() if exponent < 0 else power
        return None

    def _power(self, exponent: Int) -> Self:
        """Square and multiply."""
        result, base = None, self
        while exponent:
            if exponent & 1:
                result = base if result is None else result * base
            exponent >>= 1
            if exponent:
                base = base * base
        return self._constant(1) if result is None else result

    def _int_pow(self, base: Self, exponent: Self) -> Self:
        bits = exponent.uop.dtype.bitsize
        result = base._wrap(UOp.const(1, base.uop.dtype))
        square = base
        for bit in range(bits - (exponent.uop.dtype.kind == "i")):
            result = (exponent & (1 << bit)).ne(0).where(result * square, result)
            square = square * square
        if exponent.uop.dtype.kind == "u":
            return result
        one = base.eq(1) | (base.eq(-1) & (exponent & 1).eq(0))
        inverse = one.where(1, base.eq(-1).where(-1, 0)).cast(base.uop.dtype)
        return (exponent < 0).where(inverse, result)

    def maximum(self, other: Any) -> Self:
        """The greater, NaN if either is NaN."""
        return self._broadcast_binary(Ops.MAX, other, "maximum")

    def minimum(self, other: Any) -> Self:
        """The lesser, NaN if either is NaN."""
        return self._broadcast_binary(Ops.MIN, other, "minimum")

    def fmax(self, other: Any) -> Self:
        """The greater, ignoring NaN where the other is a number."""
        y = self._of(other)
        return self.isnan().where(y, y.isnan().where(self, self.maximum(y)))

    def fmin(self, other: Any) -> Self:
        """The lesser, ignoring NaN where the other is a number."""
        y = self._of(other)
        return self.isnan().where(y, y.isnan().where(self, self.minimum(y)))

    def lerp(self, end: Any, weight: Any) -> Self:
        """self + (end - self) * weight."""
        return self + (self._of(end) - self).mul(weight)

    def logaddexp(self, other: Any) -> Self:
        """log(exp(x) + exp(y)) without overflow."""
        a, b = self._operands(other, "logaddexp")
        return self._wrap(a)._logaddexp(self._wrap(b))

    @_in_single
    def _logaddexp(self, other: Self) -> Self:
        x, y = self._float(), other.cast(self._float().uop.dtype)
        gap = (x.eq(y) & x.isinf()).where(0, x - y)  # inf - inf would be NaN
        negative, size = gap._split_sign()
        return negative.where(y, x) + (-size).exp().log1p()

    def hypot(self, other: Any) -> Self:
        """sqrt(x*x + y*y) without overflow."""
        x, y = self._float().abs(), self._of(other)._float().abs()
        big, small = x.maximum(y), x.minimum(y)
        ratio = small / big.eq(0).where(1, big)
        infinite = x.eq(math.inf) | y.eq(math.inf)
        return infinite.where(math.inf, big * (ratio * ratio + 1).sqrt())

    def copysign(self, other: Any) -> Self:
        """|x| with the sign of y, also of zeros and NaN."""
        a, b = self._operands(other, "copysign")
        x, y = self._wrap(a)._float(), self._wrap(b)._float()
        size = x._negative_bit().where(-x, x)
        return y._negative_bit().where(-size, size)

    def _negative_bit(self) -> Self:
        """The sign bit of a float."""
        whole = _INT_OF_SIZE[self.uop.dtype.bitsize]
        return self._wrap(self.uop.bitcast(whole)) < 0

    # ---- choice

    def where(self, x: Any, y: Any) -> Self:
        """x where self is true (non-zero), else y. Two Python scalars promote with each other.

        >>> (Tensor([1, -1]) > 0).where(10, 20).tolist()
        [10, 20]
        """
        if isinstance(x, TensorBase):
            a, b = x._operands(y, "where")
        elif isinstance(y, TensorBase):
            b, a = y._operands(x, "where")
        elif isinstance(x, (bool, int, float)) and isinstance(y, (bool, int, float)):
            dtype = common_dtype(dtypes.from_py(x), dtypes.from_py(y))
            a, b = UOp.const(x, dtype), UOp.const(y, dtype)
        else:
            a, b = self._of(x)._operands(y, "where")
        condition = self.uop.cast(dtypes.bool)
        check_devices("where", condition, a, b)
        return self._apply(Ops.WHERE, "where", condition, a, b)

    def clip(self, min: Any = None, max: Any = None) -> Self:
        """Limit to [min, max]; either may be None, a scalar or a tensor. NaN stays. At a bound that is a
        scalar, the gradient passes."""
        if min is None and max is None:
            raise ArgumentError(
                "clip", because="neither min nor max is given", fix="pass at least one of them"
            )
        result = self
        if min is not None:
            scalar = self.uop.dtype.is_float and isinstance(min, (int, float))
            result = (self < min).where(min, self) if scalar else self.maximum(min)
        if max is None:
            return result
        scalar = result.uop.dtype.is_float and isinstance(max, (int, float))
        return (result > max).where(max, result) if scalar else result.minimum(max)

    def clamp(self, min: Any = None, max: Any = None) -> Self:
        """Another name of `clip`."""
        return self.clip(min, max)

    def clamp_min(self, min: Any) -> Self:
        return self.maximum(min)

    def clamp_max(self, max: Any) -> Self:
        return self.minimum(max)

    def masked_fill(self, mask: Self, value: Any) -> Self:
        """`value` where mask holds."""
        return self._of(mask).where(value, self)

    def nan_to_num(self, nan: Float = 0.0, posinf: Float | None = None, neginf: Float | None = None) -> Self:
        """NaN and infinities replaced; by default by 0 and the dtype's greatest and least finite values."""
        if not self.uop.dtype.is_float:
            return self
        limit = dtypes.finfo(self.uop.dtype).max
        result = self.isnan().where(nan, self)
        result = self.eq(math.inf).where(limit if posinf is None else posinf, result)
        return self.eq(-math.inf).where(-limit if neginf is None else neginf, result)

    # ---- comparison

    def _compare(self, op: Op, other: Any, what: str, reverse: Bool = False) -> Self:
        dtype = self.uop.dtype
        if type(other) is int and dtype.kind in "iub":
            whole = strong(promote(dtype, dtypes.weakint))
            if not whole.min <= other <= whole.max:  # every element is on the same side of it
                assert op.meaning is not None
                bound = whole.max if other > 0 else whole.min
                answer = op.meaning(other, bound) if reverse else op.meaning(bound, other)
                return self._wrap(scalar_shape(UOp.const(answer, dtypes.bool), self.uop.shape))
        return self._broadcast_binary(op, other, what, reverse)

    def eq(self, other: Any) -> Self:
        """x == y as bools."""
        return self._compare(Ops.CMPEQ, other, "eq")

    def ne(self, other: Any) -> Self:
        """x != y as bools."""
        return self._compare(Ops.CMPNE, other, "ne")

    def lt(self, other: Any) -> Self:
        return self._compare(Ops.CMPLT, other, "lt")

    def le(self, other: Any) -> Self:
        return self._compare(Ops.CMPLE, other, "le")

    def gt(self, other: Any) -> Self:
        return self._compare(Ops.CMPLT, other, "gt", True)

    def ge(self, other: Any) -> Self:
        return self._compare(Ops.CMPLE, other, "ge", True)

    def isnan(self) -> Self:
        """Whether each element is NaN."""
        return self.ne(self) if self.uop.dtype.is_float else self.cast(dtypes.bool)._constant(False)

    def isinf(self, detect_positive: Bool = True, detect_negative: Bool = True) -> Self:
        """Whether each element is an infinity."""
        if not self.uop.dtype.is_float:
            return self.cast(dtypes.bool)._constant(False)
        if not detect_negative:
            return self.eq(math.inf)
        return self.eq(math.inf) | self.eq(-math.inf) if detect_positive else self.eq(-math.inf)

    def isposinf(self) -> Self:
        return self.isinf(detect_negative=False)

    def isneginf(self) -> Self:
        return self.isinf(detect_positive=False)

    def isfinite(self) -> Self:
        """Whether each element is neither NaN nor an infinity."""
        if not self.uop.dtype.is_float:
            return self.cast(dtypes.bool)._constant(True)
        return (self < math.inf) & (self > -math.inf)

    def isclose(self, other: Any, rtol: Float = 1e-05, atol: Float = 1e-08, equal_nan: Bool = False) -> Self:
        """|x - y| <= atol + rtol * |y|; equal infinities are close, NaN only with `equal_nan`."""
        a, b = self._operands(other, "isclose")
        x, y = self._wrap(a)._float(), self._wrap(b)._float()
        near = ((x - y).abs() <= y.abs() * rtol + atol) & y.isfinite() | x.eq(y)
        return near | (x.isnan() & y.isnan()) if equal_nan else near

    # ---- bits and logic

    def _bits(self, op: Op, other: Any, what: str, reverse: Bool = False) -> Self:
        a, b = self._operands(other, what)
        if a.dtype.is_float:
            raise DTypeError(
                f"{what} of a {a.dtype} tensor",
                because="floats have no bitwise operations",
                fix="use integer or bool tensors (bitcast gives the bits of floats)",
            )
        return self._apply(op, what, b, a) if reverse else self._apply(op, what, a, b)

    def bitwise_and(self, other: Any, reverse: Bool = False) -> Self:
        return self._bits(Ops.AND, other, "bitwise_and", reverse)

    def bitwise_or(self, other: Any, reverse: Bool = False) -> Self:
        return self._bits(Ops.OR, other, "bitwise_or", reverse)

    def bitwise_xor(self, other: Any, reverse: Bool = False) -> Self:
        return self._bits(Ops.XOR, other, "bitwise_xor", reverse)

    def bitwise_not(self) -> Self:
        """~x: all bits flipped; of bools the negation."""
        return self._bits(Ops.XOR, True if self.uop.dtype.is_bool else self._constant(-1), "bitwise_not")

    def logical_not(self) -> Self:
        """Whether each element is zero."""
        return self.eq(False) if self.uop.dtype.is_bool else self.eq(0)

    def logical_and(self, other: Any) -> Self:
        return self.bool() & self._of(other).bool()

    def logical_or(self, other: Any) -> Self:
        return self.bool() | self._of(other).bool()

    def logical_xor(self, other: Any) -> Self:
        return self.bool() ^ self._of(other).bool()

    def lshift(self, other: Any, reverse: Bool = False) -> Self:
        """x << y; 0 when y is negative or at least the width."""
        return self._shift(Ops.SHL, other, "lshift", reverse)

    def rshift(self, other: Any, reverse: Bool = False) -> Self:
        """x >> y, arithmetic for signed integers; sign fill when y is negative or at least the width."""
        return self._shift(Ops.SHR, other, "rshift", reverse)

    def _shift(self, op: Op, other: Any, what: str, reverse: Bool) -> Self:
        x = self.cast(dtypes.int8) if self.uop.dtype.is_bool else self
        return x._bits(op, other, what, reverse)

    # ---- signs and rounding

    def sign(self) -> Self:
        """-1, 0 or 1; NaN stays, and -0.0 gives 0.0."""
        return self._sign() + 0.0 if self.uop.dtype.is_float else self._sign()

    def _sign(self) -> Self:
        """`sign` that keeps the sign of zeros."""
        if self.uop.dtype.is_bool or self.uop.dtype.is_unsigned:
            return self.ne(0).cast(self.uop.dtype)
        rest: Any = (
            self * 0 if self.uop.dtype.is_float else 0
        )  # keeps NaN and the sign of zero, has no gradient
        one, minus = UOp.const(1, self.uop.dtype), UOp.const(-1, self.uop.dtype)
        return (self > 0).where(self._wrap(one), (self < 0).where(self._wrap(minus), rest))

    def abs(self) -> Self:
        """|x|; its gradient at 0 is 0."""
        dtype = self.uop.dtype
        if dtype.is_float:
            return self * self._sign()
        return self if dtype.is_bool or dtype.is_unsigned else (self < 0).where(-self, self)

    def trunc(self) -> Self:
        """Round towards zero."""
        return self._wrap(UOp(Ops.TRUNC, self.uop.dtype, (self.uop,))) if self.uop.dtype.is_float else self

    def floor(self) -> Self:
        """Round down."""
        return self._wrap(UOp(Ops.FLOOR, self.uop.dtype, (self.uop,))) if self.uop.dtype.is_float else self

    def ceil(self) -> Self:
        """Round up."""
        return -(-self).floor() if self.uop.dtype.is_float else self

    def frac(self) -> Self:
        """x - trunc(x)."""
        return self - self.trunc()

    def round(self, decimals: Int = 0) -> Self:
        """Round to the nearest; ties go to the even neighbour.

        >>> Tensor([0.5, 1.5, 2.5, -0.4]).round().tolist()
        [0.0, 2.0, 2.0, -0.0]
        """
        if not self.uop.dtype.is_float:
            return self
        if decimals == 0:
            return self._round_half_even()
        scale = float(10 ** abs(decimals))
        if decimals > 0:
            return (self * scale)._round_half_even() / scale
        return (self / scale)._round_half_even() * scale

    def _round_half_even(self) -> Self:
        whole = self.trunc()
        part = (self - whole).abs()
        half = whole * 0.5
        away = (part > 0.5) | (part.eq(0.5) & half.ne(half.trunc()))
        return away.where(whole + self.sign(), whole)

    # ---- functions

    def sqrt(self) -> Self:
        """Square root; NaN below zero.

        >>> Tensor([4, 9]).sqrt().tolist()
        [2.0, 3.0]
        """
        return self._function(Ops.SQRT)

    @_in_single
    def rsqrt(self) -> Self:
        return self.sqrt().reciprocal()

    def exp2(self) -> Self:
        return self._function(Ops.EXP2)

    def log2(self) -> Self:
        return self._function(Ops.LOG2)

    @_in_single
    def exp(self) -> Self:
        return (self._float() * (1 / math.log(2)))._function(Ops.EXP2)

    @_in_single
    def log(self) -> Self:
        return self.log2() * math.log(2)

    @_in_single
    def log10(self) -> Self:
        return self.log2() * math.log10(2)

    def sin(self) -> Self:
        return self._function(Ops.SIN)

    def erf(self) -> Self:
        return self._function(Ops.ERF)

    @_in_single
    def cos(self) -> Self:
        """Cosine of radians, as 1 - 2 sin(x/2)**2: halving is exact, so large arguments lose nothing. The
        error is one of rounding of 1, also beside the zeros, where it is large for what is left."""
        half = (self._float() * 0.5).sin()
        return 1 - half * half * 2

    @_in_single
    def tan(self) -> Self:
        """Tangent of radians: sin / cos."""
        return self.sin() / self.cos()

    @_in_single
    def expm1(self) -> Self:
        """exp(x) - 1, accurate near zero (a series where |x| < 0.5)."""
        x = self._float()
        small = (x < 0.5) & (x > -0.5)
        near = small.where(x, 0)
        terms = 18 if x.uop.dtype is dtypes.float64 else 9
        series = near._horner([1 / math.factorial(k) for k in range(1, terms)]) * near
        return small.where(series, small.where(0, x).exp() - 1)

    @_in_single
    def log1p(self) -> Self:
        """log(1 + x), accurate near zero (W. Kahan's correction of the rounding of 1 + x)."""
        x = self._float()
        total = x + 1
        exact = total.eq(1) | total.eq(math.inf)
        step = exact.where(1, total - 1)
        return total.eq(1).where(x, total.log() * exact.where(1, x / step))

    def _horner(self, coefficients: list[Float]) -> Self:
        """c[0] + c[1] x + c[2] x**2 + …"""
        result: Self | None = None
        for c in reversed(coefficients):
            result = self._wrap(UOp.const(c, self.uop.dtype)) if result is None else result * self + c
        assert result is not None
        return result

    def _split_sign(self) -> tuple[Self, Self]:
        """(x < 0, |x|), for functions made from f(|x|). The slope of |x| is 1 at zero, so that the gradient
        of an odd function there is f'(0)."""
        x = self._float()
        negative = x < 0
        return negative, negative.where(-x, x)

    def _odd(self, negative: Self) -> Self:
        """f(|x|) with the sign of x."""
        return negative.where(-self, self)

    @_in_single
    def sinh(self) -> Self:
        """Hyperbolic sine."""
        negative, x = self._split_sign()
        half = (x * 0.5).exp()  # exp(x) would overflow before the result does
        big = half * 0.5 * half - (-x).exp() * 0.5
        small = x < 1
        near = small.where(x, 0)
        series = (near * near)._horner([1 / math.factorial(2 * k + 1) for k in range(10)]) * near
        return small.where(series, big)._odd(negative)

    @_in_single
    def cosh(self) -> Self:
        """Hyperbolic cosine."""
        x = self._float().abs()
        half = (x * 0.5).exp()
        return half * 0.5 * half + (-x).exp() * 0.5

    @_in_single
    def tanh(self) -> Self:
        """Hyperbolic tangent.

        >>> Tensor([0.0, 100.0]).tanh().tolist()
        [0.0, 1.0]
        """
        negative, x = self._split_sign()
        e = (x * -2).expm1()
        return (-e / (e + 2))._odd(negative)

    @_in_single
    def asinh(self) -> Self:
        """Inverse hyperbolic sine."""
        negative, x = self._split_sign()
        big = x > 1e4
        a = big.where(1, x)
        near = (a * (a / ((a * a + 1).sqrt() + 1) + 1)).log1p()
        return big.where(big.where(x, 1).log() + math.log(2), near)._odd(negative)

    @_in_single
    def acosh(self) -> Self:
        """Inverse hyperbolic cosine; NaN below 1."""
        x = self._float()
        big = x > 1e4
        t = big.where(1, x) - 1
        return big.where(big.where(x, 1).log() + math.log(2), (t + t.sqrt() * (t + 2).sqrt()).log1p())

    @_in_single
    def atanh(self) -> Self:
        """Inverse hyperbolic tangent; NaN beyond ±1."""
        negative, x = self._split_sign()
        return ((x * 2 / (1 - x)).log1p() * 0.5)._odd(negative)

    @_in_single
    def atan(self) -> Self:
        """Arc tangent: two reductions of the argument, then a polynomial."""
        negative, x = self._split_sign()
        inverted = x > 1
        t = inverted.where(1 / inverted.where(x, 1), x)
        shifted = t > math.tan(math.pi / 8)
        u = shifted.where((t - 1) / (t + 1), t)
        small = u * (u * u)._horner(_ATAN_DOUBLE if x.uop.dtype is dtypes.float64 else _ATAN_SINGLE)
        angle = shifted.where(small + math.pi / 4, small)
        return inverted.where(math.pi / 2 - angle, angle)._odd(negative)

    @_in_single
    def asin(self) -> Self:
        """Arc sine; NaN beyond ±1."""
        x = self._float()
        return (x / ((1 - x) * (x + 1)).sqrt()).atan()

    @_in_single
    def acos(self) -> Self:
        """Arc cosine; NaN beyond ±1."""
        x = self._float()
        return ((1 - x) / (x + 1)).sqrt().atan() * 2

    @_in_single
    def sinc(self) -> Self:
        """sin(pi x) / (pi x), 1 at zero."""
        x = self._float() * math.pi
        zero = x.eq(0)
        return zero.where(1, x.sin() / zero.where(1, x))

    def heaviside(self, values: Any) -> Self:
        """0 below zero, 1 above, `values` at zero."""
        return self.isnan().where(self, (self < 0).where(0, (self > 0).where(1, values)))

    # ---- activations

    def relu(self) -> Self:
        """max(x, 0)."""
        return self.maximum(0)

    def relu6(self) -> Self:
        return self.maximum(0).minimum(6)

    def hardtanh(self, min_val: Float = -1, max_val: Float = 1) -> Self:
        return self.maximum(min_val).minimum(max_val)

    @_in_single
    def sigmoid(self) -> Self:
        """1 / (1 + exp(-x)); the exponential never overflows, so that the gradient is finite everywhere."""
        negative, size = self._split_sign()
        e = (size * (-1 / math.log(2))).exp2()
        return negative.where(e, 1) * (e + 1).reciprocal()

    @_in_single
    def hardsigmoid(self, alpha: Float = 1 / 6, beta: Float = 0.5) -> Self:
        """alpha * x + beta, limited to [0, 1]."""
        return (self._float() * alpha + beta).maximum(0).minimum(1)

    @_in_single
    def silu(self) -> Self:
        """x * sigmoid(x)."""
        x = self._float()
        return x * x.sigmoid()

    def swish(self) -> Self:
        return self.silu()

    @_in_single
    def hardswish(self) -> Self:
        return self * (self._float() + 3).relu6() * (1 / 6)

    @_in_single
    def elu(self, alpha: Float = 1.0) -> Self:
        """x above zero, else alpha * (exp(x) - 1)."""
        x = self._float()
        return (x > 0).where(x, (x > 0).where(0, x).expm1() * alpha)

    @_in_single
    def celu(self, alpha: Float = 1.0) -> Self:
        """x above zero, else alpha * (exp(x / alpha) - 1)."""
        x = self._float()
        return (x > 0).where(x, ((x > 0).where(0, x) / alpha).expm1() * alpha)

    @_in_single
    def selu(self, alpha: Float = 1.6732632423543772, gamma: Float = 1.0507009873554805) -> Self:
        """gamma * elu(x, alpha)."""
        return self.elu(alpha) * gamma

    def leaky_relu(self, neg_slope: Float = 0.01) -> Self:
        """x above zero, else neg_slope * x."""
        return (self > 0).where(self, self * neg_slope)

    @_in_single
    def gelu(self, approximate: str = "tanh") -> Self:
        """x * P(N(0, 1) <= x). "tanh" (default, as tinygrad and GPT-2) is within 1e-3 of the exact "none"
        (erf)."""
        x = self._float()
        if approximate == "none":
            return x * 0.5 * ((x * math.sqrt(0.5)).erf() + 1)
        if approximate != "tanh":
            raise ArgumentError(
                f"gelu(approximate={approximate!r})",
                because="there is no such form",
                fix='use "tanh" or "none"',
            )
        # 0.5 (1 + tanh z) is sigmoid(2 z)
        return x * ((x + x * x * x * 0.044715) * (2 * math.sqrt(2 / math.pi))).sigmoid()

    @_in_single
    def quick_gelu(self) -> Self:
        """x * sigmoid(1.702 x)."""
        x = self._float()
        return x * (x * 1.702).sigmoid()

    @_in_single
    def softplus(self, beta: Float = 1.0) -> Self:
        """log(1 + exp(beta x)) / beta without overflow."""
        x = self._float() * beta if beta != 1 else self._float()
        y = x.logaddexp(0.0)
        return y / beta if beta != 1 else y

    @_in_single
    def logsigmoid(self) -> Self:
        return -(-self._float()).softplus()

    @_in_single
    def softsign(self) -> Self:
        return self._float() / (self._float().abs() + 1)

    @_in_single
    def mish(self) -> Self:
        """x * tanh(softplus(x))."""
        x = self._float()
        return x * x.softplus().tanh()

    # ---- Python's operators

    def __add__(self, other: Any) -> Self:
        return self._broadcast_binary(Ops.ADD, other, "add")

    def __radd__(self, other: Any) -> Self:
        return self._broadcast_binary(Ops.ADD, other, "add", True)

    def __sub__(self, other: Any) -> Self:
        return self.sub(other)

    def __rsub__(self, other: Any) -> Self:
        return self.sub(other, True)

    def __mul__(self, other: Any) -> Self:
        return self._broadcast_binary(Ops.MUL, other, "mul")

    def __rmul__(self, other: Any) -> Self:
        return self._broadcast_binary(Ops.MUL, other, "mul", True)

    def __truediv__(self, other: Any) -> Self:
        return self.div(other)

    def __rtruediv__(self, other: Any) -> Self:
        return self.div(other, True)

    def __floordiv__(self, other: Any) -> Self:
        return self.div(other, rounding_mode="floor")

    def __rfloordiv__(self, other: Any) -> Self:
        return self.div(other, True, rounding_mode="floor")

    def __mod__(self, other: Any) -> Self:
        return self.mod(other)

    def __rmod__(self, other: Any) -> Self:
        return self.mod(other, True)

    def __pow__(self, other: Any) -> Self:
        return self.pow(other)

    def __rpow__(self, other: Any) -> Self:
        return self.pow(other, True)

    def __and__(self, other: Any) -> Self:
        return self.bitwise_and(other)

    def __rand__(self, other: Any) -> Self:
        return self.bitwise_and(other, True)

    def __or__(self, other: Any) -> Self:
        return self.bitwise_or(other)

    def __ror__(self, other: Any) -> Self:
        return self.bitwise_or(other, True)

    def __xor__(self, other: Any) -> Self:
        return self.bitwise_xor(other)

    def __rxor__(self, other: Any) -> Self:
        return self.bitwise_xor(other, True)

    def __lshift__(self, other: Any) -> Self:
        return self.lshift(other)

    def __rlshift__(self, other: Any) -> Self:
        return self.lshift(other, True)

    def __rshift__(self, other: Any) -> Self:
        return self.rshift(other)

    def __rrshift__(self, other: Any) -> Self:
        return self.rshift(other, True)

    # x += y makes x another tensor; whoever has the old one keeps it

    def __iadd__(self, other: Any) -> Self:
        return self.__add__(other)

    def __isub__(self, other: Any) -> Self:
        return self.__sub__(other)

    def __imul__(self, other: Any) -> Self:
        return self.__mul__(other)

    def __itruediv__(self, other: Any) -> Self:
        return self.__truediv__(other)

    def __ifloordiv__(self, other: Any) -> Self:
        return self.__floordiv__(other)

    def __imod__(self, other: Any) -> Self:
        return self.__mod__(other)

    def __ipow__(self, other: Any) -> Self:
        return self.__pow__(other)

    def __iand__(self, other: Any) -> Self:
        return self.__and__(other)

    def __ior__(self, other: Any) -> Self:
        return self.__or__(other)

    def __ixor__(self, other: Any) -> Self:
        return self.__xor__(other)

    def __ilshift__(self, other: Any) -> Self:
        return self.__lshift__(other)

    def __irshift__(self, other: Any) -> Self:
        return self.__rshift__(other)

    def __neg__(self) -> Self:
        return self.neg()

    def __pos__(self) -> Self:
        return self

    def __abs__(self) -> Self:
        return self.abs()

    def __invert__(self) -> Self:
        return self.bitwise_not()

    def __lt__(self, other: Any) -> Self:
        return self.lt(other)

    def __le__(self, other: Any) -> Self:
        return self.le(other)

    def __gt__(self, other: Any) -> Self:
        return self.gt(other)

    def __ge__(self, other: Any) -> Self:
        return self.ge(other)

    def __eq__(self, other: object) -> Any:
        return self.eq(other) if other is not None else False

    def __ne__(self, other: object) -> Any:
        return self.ne(other) if other is not None else True

    __hash__ = object.__hash__
