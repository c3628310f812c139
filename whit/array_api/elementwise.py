"""Functions of elements: each is a method of Tensor, under the standard's name and signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whit.helpers import ArgumentError
from whit.tensor import Tensor

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Any, Any], Tensor]


def _unary(name: str, method: Callable[[Any], Any], doc: str) -> Unary:
    def call(x: Tensor, /) -> Tensor:
        return method(_tensor(name, x))  # type: ignore[no-any-return]

    call.__name__, call.__qualname__, call.__doc__ = name, name, doc
    return call


def _binary(name: str, method: Callable[[Any, Any], Any], doc: str) -> Binary:
    def call(x1: Any, x2: Any, /) -> Tensor:
        a, b = pair(name, x1, x2)
        return method(a, b)  # type: ignore[no-any-return]

    call.__name__, call.__qualname__, call.__doc__ = name, name, doc
    return call


def _tensor(what: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise ArgumentError(
            f"{what}({repr(x)[:60]})", because="it takes a tensor", fix="convert it with asarray"
        )
    return x


def pair(what: str, x1: Any, x2: Any) -> tuple[Tensor, Any]:
    """Two operands of which at least one is a tensor; a scalar takes its dtype beside it."""
    if isinstance(x1, Tensor):
        return x1, x2
    return _tensor(what, x2).ufix(x1), x2


abs = _unary("abs", Tensor.abs, "|x|.")
acos = _unary("acos", Tensor.acos, "Arc cosine; NaN beyond 1.")
acosh = _unary("acosh", Tensor.acosh, "Inverse hyperbolic cosine.")
asin = _unary("asin", Tensor.asin, "Arc sine; NaN beyond 1.")
asinh = _unary("asinh", Tensor.asinh, "Inverse hyperbolic sine.")
atan = _unary("atan", Tensor.atan, "Arc tangent.")
atanh = _unary("atanh", Tensor.atanh, "Inverse hyperbolic tangent.")
bitwise_invert = _unary("bitwise_invert", Tensor.bitwise_not, "All bits flipped.")
ceil = _unary("ceil", Tensor.ceil, "Round up.")
conj = _unary("conj", Tensor.__pos__, "The complex conjugate: real numbers are their own.")
cos = _unary("cos", Tensor.cos, "Cosine of radians.")
cosh = _unary("cosh", Tensor.cosh, "Hyperbolic cosine.")
exp = _unary("exp", Tensor.exp, "e to the power x.")
expm1 = _unary("expm1", Tensor.expm1, "exp(x) - 1.")
floor = _unary("floor", Tensor.floor, "Round down.")
imag = _unary("imag", Tensor.zeros_like, "The imaginary part: zeros.")
isfinite = _unary("isfinite", Tensor.isfinite, "Whether an element is neither NaN nor infinite.")
isinf = _unary("isinf", Tensor.isinf, "Whether an element is infinite.")
isnan = _unary("isnan", Tensor.isnan, "Whether an element is NaN.")
log = _unary("log", Tensor.log, "Natural logarithm.")
log1p = _unary("log1p", Tensor.log1p, "log(1 + x).")
log2 = _unary("log2", Tensor.log2, "Logarithm to base 2.")
log10 = _unary("log10", Tensor.log10, "Logarithm to base 10.")
logical_not = _unary("logical_not", Tensor.logical_not, "Whether an element is zero.")
negative = _unary("negative", Tensor.neg, "-x.")
positive = _unary("positive", Tensor.__pos__, "+x.")
real = _unary("real", Tensor.__pos__, "The real part.")
reciprocal = _unary("reciprocal", Tensor.reciprocal, "1 / x.")
round = _unary("round", Tensor.round, "Round to the nearest; ties go to the even neighbour.")
sign = _unary("sign", Tensor.sign, "-1, 0 or 1; NaN stays.")
signbit = _unary("signbit", Tensor.signbit, "Whether the sign bit is set.")
sin = _unary("sin", Tensor.sin, "Sine of radians.")
sinh = _unary("sinh", Tensor.sinh, "Hyperbolic sine.")
sqrt = _unary("sqrt", Tensor.sqrt, "Square root; NaN below zero.")
square = _unary("square", Tensor.square, "x * x.")
tan = _unary("tan", Tensor.tan, "Tangent of radians.")
tanh = _unary("tanh", Tensor.tanh, "Hyperbolic tangent.")
trunc = _unary("trunc", Tensor.trunc, "Round towards zero.")

add = _binary("add", Tensor.add, "x1 + x2.")
atan2 = _binary("atan2", Tensor.atan2, "The angle of the point (x2, x1).")
bitwise_and = _binary("bitwise_and", Tensor.bitwise_and, "x1 & x2.")
bitwise_left_shift = _binary("bitwise_left_shift", Tensor.lshift, "x1 << x2.")
bitwise_or = _binary("bitwise_or", Tensor.bitwise_or, "x1 | x2.")
bitwise_right_shift = _binary("bitwise_right_shift", Tensor.rshift, "x1 >> x2.")
bitwise_xor = _binary("bitwise_xor", Tensor.bitwise_xor, "x1 ^ x2.")
copysign = _binary("copysign", Tensor.copysign, "|x1| with the sign of x2.")
divide = _binary("divide", Tensor.div, "x1 / x2.")
equal = _binary("equal", Tensor.eq, "x1 == x2.")
floor_divide = _binary("floor_divide", Tensor.floor_divide, "x1 // x2.")
greater = _binary("greater", Tensor.gt, "x1 > x2.")
greater_equal = _binary("greater_equal", Tensor.ge, "x1 >= x2.")
hypot = _binary("hypot", Tensor.hypot, "sqrt(x1*x1 + x2*x2) without overflow.")
less = _binary("less", Tensor.lt, "x1 < x2.")
less_equal = _binary("less_equal", Tensor.le, "x1 <= x2.")
logaddexp = _binary("logaddexp", Tensor.logaddexp, "log(exp(x1) + exp(x2)).")
logical_and = _binary("logical_and", Tensor.logical_and, "Whether both are not zero.")
logical_or = _binary("logical_or", Tensor.logical_or, "Whether one is not zero.")
logical_xor = _binary("logical_xor", Tensor.logical_xor, "Whether exactly one is not zero.")
maximum = _binary("maximum", Tensor.maximum, "The greater; NaN if one is NaN.")
minimum = _binary("minimum", Tensor.minimum, "The lesser; NaN if one is NaN.")
multiply = _binary("multiply", Tensor.mul, "x1 * x2.")
nextafter = _binary("nextafter", Tensor.nextafter, "The next number from x1 towards x2.")
not_equal = _binary("not_equal", Tensor.ne, "x1 != x2.")
pow = _binary("pow", Tensor.pow, "x1 to the power x2.")
remainder = _binary("remainder", Tensor.mod, "The remainder of x1 / x2, with the sign of x2.")
subtract = _binary("subtract", Tensor.sub, "x1 - x2.")


def clip(x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """Limit to [min, max], each a tensor, a scalar or None; the dtype stays x's.

    >>> clip(Tensor([1, 5, 9]), 2, 7).tolist()
    [2, 5, 7]
    """
    result = x
    for bound, limited in ((min, Tensor.maximum), (max, Tensor.minimum)):
        if bound is not None:
            result = limited(result, bound if isinstance(bound, Tensor) else result.ufix(bound))
    return result.cast(x.dtype) if result is not x else Tensor._wrap(x.uop)
