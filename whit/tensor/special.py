"""Special functions, and the doors to single operations of the IR.

Functions made of series compute in float64 whatever float they are given, and round once at the end: their
series cancel, and their derivatives (which follow from the same formulas) are as good as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

from whit.helpers import ArgumentError, DTypeError
from whit.tensor.base import check_devices
from whit.tensor.elementwise import ElementwiseMixin
from whit.uop import Op, Ops, UOp, dtypes
from whit.uop.dtype import common_dtype, to_dtype

F = TypeVar("F", bound=Callable[..., Any])

# zeta(k) - 1 for k = 2 … 31, summed with 40 digits: the Taylor coefficients of lgamma around 2 are
# (-1)**k (zeta(k) - 1) / k
_ZETA_MINUS_1 = [
    0.6449340668482264, 0.2020569031595943, 0.08232323371113819, 0.03692775514336993, 0.01734306198444914,
    0.008349277381922827, 0.00407735619794434, 0.0020083928260822143, 0.0009945751278180853,
    0.0004941886041194645, 0.0002460865533080483, 0.00012271334757848915, 6.124813505870483e-05,
    3.058823630702049e-05, 1.528225940865187e-05, 7.637197637899763e-06, 3.81729326499984e-06,
    1.908212716553939e-06, 9.539620338727962e-07, 4.769329867878064e-07, 2.38450502727733e-07,
    1.1921992596531106e-07, 5.960818905125948e-08, 2.980350351465228e-08, 1.4901554828365043e-08,
    7.45071178983543e-09, 3.725334024788457e-09, 1.862659723513049e-09, 9.313274324196682e-10,
    4.656629065033784e-10,
]  # fmt: skip
# a polynomial through Chebyshev nodes, computed with 50 digits: relative error 4e-16
_ERFC_START = -5 / 7
_ERFC = [
    0.6849972881253069, -0.17442650995032094, 0.06781283641264234, -0.012531475817381527,
    -0.005896222616090185, 0.006653009972209617, -0.003114385594678328, 0.0007094473646597933,
    5.2656052522904204e-05,
    -8.421225521269295e-05, 1.2520198469105693e-05, 7.407952771737049e-06, -2.466708460972391e-06,
    -7.093882499581117e-07, 3.712139521006458e-07, 8.761827492762465e-08, -5.3878997298742483e-08,
    -1.3807073753782757e-08, 7.559737479002659e-09, 2.1447850637735797e-09, -9.14294385462459e-10,
    -2.0527853932466103e-10, 6.846284934076203e-11,
]  # fmt: skip
_EULER = 0.57721566490153286061
# B(2k) for k = 1 … 8: Stirling's series of lgamma and of its derivative
_BERNOULLI = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510]


def _in_double(function: F) -> F:
    """A function that computes in float64 and gives the dtype of a float argument (the default float for
    others)."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        x = self._float()
        result = function(x.cast(dtypes.float64), *args, **options)
        return result.cast(x.uop.dtype)

    return cast(F, call)


class SpecialMixin(ElementwiseMixin):
    """Methods of the family of special functions."""

    # ---- functions

    @_in_double
    def lgamma(self) -> Self:
        """log |gamma(x)|; inf at 0 and at negative integers. Any shape; any float (integers and bools as the
        default float). Its gradient is `digamma`.

        >>> Tensor([1.0, 5.0, -1.0]).lgamma().exp().round(decimals=3).tolist()
        [1.0, 24.0, inf]
        """
        negative = self < 0
        pole = negative & self.eq(self.floor()) | self.eq(0) | self.isinf()
        x = pole.where(1.5, self)
        negative = negative & ~pole
        value = negative.where(1 - x, x)._lgamma_positive()
        # gamma(x) gamma(1 - x) = pi / sin(pi x); the sine of the distance to the nearest integer
        sine = ((negative.where(x, 0.5) - negative.where(x, 0.5).round()) * math.pi).sin().abs()
        reflected = math.log(math.pi) - sine.log() - value
        return pole.where(math.inf, negative.where(reflected, value))

    def _lgamma_positive(self) -> Self:
        """lgamma of positive numbers: Taylor's series around 2 (lgamma vanishes at 1 and 2) up to 2.5,
        Stirling's from 8.5 on, six steps of the recurrence in between."""
        near = self < 2.5
        y = near.where(self, 2.0)
        tiny, low = y < 0.5, y < 1.5
        z = y - tiny.where(0.0, low.where(1.0, 2.0))
        terms = [1 - _EULER, *[(-1) ** k * zeta / k for k, zeta in enumerate(_ZETA_MINUS_1, 2)]]
        small = z._horner(terms) * z
        small = small - low.where(low.where(z, 0.0).log1p(), 0.0) - tiny.where(tiny.where(y, 1.0).log(), 0.0)
        step = self < 8.5
        w = near.where(9.0, self)
        m = step.where(w, 1.0)
        product = m * (m + 1) * (m + 2) * (m + 3) * (m + 4) * (m + 5)
        w = step.where(w + 6, w)
        big = (w - 0.5) * (w.log() - 1) + (0.5 * math.log(2 * math.pi) - 0.5) + w._stirling()
        return near.where(small, step.where(big - product.log(), big))

    def _stirling(self) -> Self:
        """sum B(2k) / (2k (2k-1) x**(2k-1)), for x > 8."""
        inverse = self.reciprocal()
        series = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]
        return (inverse * inverse)._horner(series) * inverse

    @_in_double
    def digamma(self) -> Self:
        """The derivative of `lgamma`; NaN at negative integers, -inf at 0 (inf at -0.0).

        >>> Tensor([1.0]).digamma().round(decimals=5).tolist()
        [-0.5772200226783752]
        """
        negative = self < 0.5
        whole = self.eq(self.floor()) & negative | self.eq(-math.inf)
        infinite = self.eq(math.inf)
        x = (whole | infinite).where(1.5, self)
        negative = negative & ~whole
        value = negative.where(1 - x, x)._digamma_positive()
        turn = negative.where(x - x.round(), 0.25) * math.pi
        result = negative.where(value - math.pi * turn.cos() / turn.sin(), value)
        result = infinite.where(math.inf, whole.where(math.nan, result))
        return self.eq(0).where(-(self.eq(0).where(self, 1.0).reciprocal()), result)

    def _digamma_positive(self) -> Self:
        step = self < 8.5
        m = step.where(self, 1.0)
        steps: Any = sum([(m + k).reciprocal() for k in range(1, 8)], m.reciprocal())
        w = step.where(self + 8, self)
        inverse = w.reciprocal()
        square = inverse * inverse
        series = square._horner([b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)]) * square
        value = w.log() - inverse * 0.5 - series
        return step.where(value - steps, value)

    @_in_double
    def erfc(self) -> Self:
        """1 - erf(x), with full relative accuracy also where it is tiny.

        >>> Tensor([0.0, 3.0]).erfc().tolist()
        [1.0, 2.2090496713644825e-05]
        """
        low = self < 0.5
        x = low.where(self, 0.0)
        tail = low.where(low.where(-self, 1.0).maximum(0.5), self)
        far = tail._erfc_tail()
        return (self.abs() < 0.5).where(1 - x.erf(), low.where(2 - far, far))

    def _erfc_tail(self) -> Self:
        """erfc of numbers from 0.5 on: exp(x*x) (1 + x) erfc(x) is smooth in (x - 3) / (x + 3)."""
        y = (self > 30.0).where(30.0, self)  # 0 from 27.3 on
        s = (y - 3) / (y + 3)
        t = (s * 2 - (1 + _ERFC_START)) / (1 - _ERFC_START)
        square, error = y._exact_product(y)
        return t._horner(_ERFC) / (y + 1) * (-square).exp() * (1 - error)

    @_in_double
    def erfinv(self) -> Self:
        """The inverse of `erf`; ±inf at ±1, NaN beyond.

        >>> Tensor([0.0, 0.5, 1.0]).erfinv().round(decimals=4).tolist()
        [0.0, 0.47690001130104065, inf]
        """
        inside = (self < 1) & (self > -1)
        x = inside.where(self, 0.0)
        # the start is within 0.002 (S. Winitzki 2008); Halley's method makes three times the digits of it
        log = (-(x * x)).log1p()
        a = 0.147
        part = log * 0.5 + 2 / (math.pi * a)
        root = ((part * part - log / a).sqrt() - part).maximum(0).sqrt()
        y = self._wrap((x < 0).where(-root, root).uop.detach())
        rest = 1 - x._size()  # exact from 0.5 on, where erf would lose what erfc has
        near = rest > 0.5
        for _ in range(3):
            square = y * y
            slope = (-square).exp() * (2 / math.sqrt(math.pi))
            far = near.where(1.0, y._size())._erfc_tail() - rest
            newton = near.where(near.where(y, 0.0).erf() - x, (x < 0).where(far, -far)) / slope
            y = y - newton / (y * newton + 1)
        # where(two Python numbers) would be a float32
        limit = self.eq(1).where(self._constant(math.inf), self.eq(-1).where(-math.inf, math.nan))
        return inside.where(y, limit)

    @_in_double
    def i0(self) -> Self:
        """The modified Bessel function of the first kind and order 0.

        >>> Tensor([0.0, 1.0]).i0().round(decimals=5).tolist()
        [1.0, 1.266070008277893]
        """
        size = self.abs()
        near = size < 20
        quarter = near.where(self * self * 0.25, 0.0)
        small = quarter._horner([1 / math.factorial(k) ** 2 for k in range(56)])
        far = near.where(20.0, size)
        series = [1.0]
        for k in range(1, 31):
            series.append(series[-1] * (2 * k - 1) ** 2 / (8 * k))
        half = (far * 0.5).exp()  # exp(x) would overflow before the result does
        big = half / (far * (2 * math.pi)).sqrt() * far.reciprocal()._horner(series) * half
        return near.where(small, size.eq(math.inf).where(math.inf, big))

    def atan2(self, other: Any) -> Self:
        """The angle of the point (other, self), from -pi to pi, with the signs of zeros and infinities as
        C's atan2. Operands broadcast and promote; integers give the default float.

        >>> Tensor([1.0, -1.0]).atan2(Tensor([-1.0, -1.0])).round(decimals=4).tolist()
        [2.3561999797821045, -2.3561999797821045]
        """
        a, b = self._operands(other, "atan2")
        return self._wrap(a)._float()._atan2(self._wrap(b)._float())

    def _atan2(self, other: Self) -> Self:
        dtype = self.uop.dtype
        y, x = self.cast(dtypes.float64), other.cast(dtypes.float64)
        up, right = y._size(), x._size()
        steep = up > right
        both = up.eq(right)
        equal = both & (up.eq(0) | up.isinf())  # 0/0 and inf/inf, both of which the signs decide
        ratio = equal.where(0.0, steep.where(right, up)) / equal.where(1.0, steep.where(up, right))
        angle = up.eq(0).where(0.0, equal.where(math.pi / 4, ratio.atan()))
        angle = steep.where(math.pi / 2 - angle, angle)
        angle = x._negative_bit().where(math.pi - angle, angle)
        angle = (y.isnan() | x.isnan()).where(math.nan, angle)
        return y._negative_bit().where(-angle, angle).cast(dtype)

    def _size(self) -> Self:
        """|x| of a float, whose slope at zero is that of x."""
        return self._negative_bit().where(-self, self)

    def signbit(self) -> Self:
        """Whether the sign is negative, also of -0.0 and NaN; of integers, whether they are below zero.

        >>> Tensor([-0.0, 0.0, -3.0]).signbit().tolist()
        [True, False, True]
        """
        if self.uop.dtype.is_float:
            return self._negative_bit()
        return self._wrap(self.cast(dtypes.int8).uop) < 0 if self.uop.dtype.is_bool else self < 0

    def nextafter(self, other: Any) -> Self:
        """The next number of this float dtype in the direction of `other`; NaN if either is NaN. Both must
        be floats; no gradient.

        >>> Tensor([1.0]).nextafter(Tensor([2.0])).tolist()
        [1.0000001192092896]
        """
        a, b = self._operands(other, "nextafter")
        if not a.dtype.is_float:
            raise DTypeError(
                f"nextafter of {a.dtype} tensors",
                because="integers have no neighbours in between",
                fix="cast them to a float dtype",
            )
        x, y = self._wrap(a.detach()), self._wrap(b.detach())
        whole = {8: dtypes.int8, 16: dtypes.int16, 32: dtypes.int32, 64: dtypes.int64}[a.dtype.bitsize]
        bits = self._wrap(x.uop.bitcast(whole))
        away = (x < y).where(1, -1).cast(whole) * (bits < 0).where(-1, 1).cast(whole)
        moved = self._wrap((bits + away).uop.bitcast(a.dtype))
        least = self._wrap(self._of(1).cast(whole).uop.bitcast(a.dtype))
        moved = x.eq(0).where((y > 0).where(least, -least), moved)
        result = x.eq(y).where(y, moved)
        return (x.isnan() | y.isnan()).where(math.nan, result)

    # ---- doors to the IR

    def alu(self, op: Op, *src: Any) -> Self:
        """One elementwise operation of the IR (`Ops.ADD`, `Ops.WHERE` …) on this and the other operands,
        which are promoted among each other; the first of WHERE is a bool.

        Errors: ArgumentError for an op that is not elementwise or another number of operands.

        >>> Tensor([1, 2]).alu(Ops.ADD, Tensor([10, 20])).tolist()
        [11, 22]
        """
        if not isinstance(op, Op) or not op.is_alu:
            raise ArgumentError(
                f"alu({op})",
                because="it is no elementwise operation",
                fix="use ADD, MUL, WHERE or their like",
            )
        if len(src) + 1 != op.arity:
            raise ArgumentError(
                f"alu({op.name}) of {len(src) + 1} operands",
                because=f"{op.name} takes {op.arity}",
                fix="pass as many",
            )
        operands = [self, *[self.ufix(x) for x in src]]
        if op is Ops.WHERE:
            return self.where(operands[1], operands[2])
        nodes = [x.uop for x in operands]
        common = common_dtype(*[u.dtype for u in nodes])
        check_devices("alu", *nodes)
        return self._apply(op, op.name.lower(), *[u.cast(common) for u in nodes])

    def ufix(self, x: Any) -> Self:
        """`x` as an operand beside this tensor: a tensor as it is, a Python scalar as a constant of this
        dtype (of the dtype that both promote to, where this one cannot hold it).

        >>> Tensor([1.5]).ufix(2).dtype
        dtypes.float32
        """
        if isinstance(x, type(self)):
            return x
        if isinstance(x, (bool, int, float)):
            return self._wrap(self._operands(x, "ufix")[1])
        return self._of(x)

    @classmethod
    def const(cls, value: Any, dtype: Any = None) -> Self:
        """A constant of shape (), which broadcasts and costs no memory.

        >>> Tensor.const(2.5).shape
        ()
        """
        if not isinstance(value, (bool, int, float)):
            raise ArgumentError(f"const({value!r})", because="it is no Python scalar", fix="pass a number")
        want = dtypes.from_py(value) if dtype is None else to_dtype(dtype)
        return cls._wrap(UOp.const(value, want))
