"""Transcendental functions as straight-line arithmetic: no branches, no tables, no calls, so that every lane
of a vector does the same. Each function states its greatest error in ulp over the whole range of its type;
infinities, NaN, denormals and signed zeros come out as IEEE and the op table say.

All functions take scalar nodes of float32 or float64 and `fma`: whether MULACC may be used. Coefficients are
Chebyshev fits; the mpmath call that gives each is next to it (lowest power first: reverse what `chebyfit`
returns).
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from whit.uop.dtype import DType, dtypes
from whit.uop.ops import Op, Ops
from whit.uop.uop import UOp, alu

F32, F64 = dtypes.float32, dtypes.float64
UINT = {F32: dtypes.uint32, F64: dtypes.uint64}
MANTISSA = {F32: 23, F64: 52}
BIAS = {F32: 127, F64: 1023}
Pair = tuple[UOp, UOp]  # an unevaluated sum: the second is an error term of the first

# chebyfit(lambda f: expm1(f*ln2)/f, [-.5, .5], n): 2**f = 1 + f*P(f)
EXP2_7 = (0.6931471805568324, 0.24022650695888503, 0.055504109063258665, 0.00961812913523614,
          0.0013333478473685416,
          0.00015403475186530786, 1.5303700711365693e-05, 1.325080551750225e-06)
EXP2 = {
    F32: (0.6931471824645996, 0.24022650718688965, 0.055503569543361664, 0.009618083015084267,
          0.0013390863314270973,
          0.00015453163359779865),
    F64: (0.6931471805599453, 0.24022650695910097, 0.0555041086648216, 0.009618129107606888,
          0.0013333558146416936,
          0.0001540353044173605, 1.525273382983612e-05, 1.321544258792169e-06, 1.0178062445845774e-07,
          7.072585949269223e-09, 4.4549605981865186e-10),
}
# chebyfit(lambda r: (expm1(r) - r)/r**2, [-ln2/2, ln2/2], n): e**r = 1 + r + r*r*P(r)
EXP = {
    F32: (0.5, 0.16666577756404877, 0.041666556149721146, 0.008363173343241215, 0.0013926175888627768),
    F64: (0.5000000000000001, 0.16666666666666669, 0.041666666666624164, 0.008333333333330065,
          0.0013888888917196719, 0.00019841269863040545, 2.4801521322368692e-05, 2.7557268480310024e-06,
          2.7620075879983367e-07, 2.5100375832561234e-08),
}
# log2(e); ln(2) in two parts: whole multiples of the first are exact; from where on e**x is inf, e**-x is 0
LOG2_E = {F32: 1.4426950216293335, F64: 1.4426950408889634}
LN2 = {F32: (0.693145751953125, 1.428606765330187e-06), F64: (0.6931471805598903, 5.497923018708371e-14)}
EXP_LIMITS = {F32: (89.0, 105.0), F64: (710.0, 746.0)}
# chebyfit(lambda r: log1p(r)/ln2/r - 1, [.70710677-1, 1.41421354-1], 10): log2(1+r) = r + r*P(r)
LOG2 = (0.4426950514316559, -0.7213473320007324, 0.48089852929115295, -0.36069655418395996,
        0.28855255246162415,
        -0.23960812389850616, 0.20485764741897583, -0.19138836860656738, 0.18476034700870514,
        -0.10749790817499161)
# with s = (m-1)/(m+1), z = s*s: chebyfit(lambda z: ((atanh(sqrt(z))/sqrt(z)-1)/z - 1/3)/z, [0, .02944], 9)
ATANH = (0.2, 0.14285714285714282, 0.11111111111114215, 0.09090909089828463, 0.07692307880585086,
         0.06666648267216471,
         0.058834065605171064, 0.05228163634742257, 0.053812122097824)
# chebyfit(lambda z: 2/ln2*atanh(sqrt(z))/sqrt(z), [0, .02944], 7)
LOG2_FAST = (2.885390081777927, 0.9617966939243335, 0.5770780172467822, 0.4121984019742357,
             0.3206163935263423,
             0.26144407006393944, 0.2429183013526297)
# chebyfit(lambda z: (sin(sqrt(z))/sqrt(z)-1)/z, [0, 1], n): sin r = r + r*z*P(z)
SIN = {
    F32: (-0.1666666716337204, 0.008333327248692513, -0.0001983817492146045, 2.7060668799094856e-06),
    F64: (-0.16666666666666666, 0.0083333333333333, -0.00019841269841216566, 2.755731919201122e-06,
          -2.5052099244914114e-08, 1.6057701922579786e-10, -7.549371704181243e-13),
}
# chebyfit(lambda z: ((cos(sqrt(z))-1)/z + 1/2)/z, [0, (pi/4*1.001)**2], n): cos r = 1 - z/2 + z*z*P(z)
COS = {
    F32: (0.0416666641831398, -0.0013888300163671374, 2.4547436623834074e-05),
    F64: (0.041666666666666664, -0.0013888888888887382, 2.480158729874307e-05, -2.7557317260008837e-07,
          2.0876143827993133e-09, -1.1382456778061306e-11),
}
# chebyfit(lambda z: erf(sqrt(z))/sqrt(z) - 1, [0, .8649] or [0, 1], n): erf x = x + x*P(x*x)
ERF_SMALL = {
    F32: (0.12837916612625122, -0.37612634897232056, 0.11283691227436066, -0.02685915119946003,
          0.005200368817895651,
          -0.000813470920547843, 8.334718586411327e-05),
    F64: (0.1283791670955126, -0.37612638903183754, 0.1128379167095512, -0.02686617064512984,
          0.0052239776254232985,
          -0.000854832702193483, 0.00012055332902888736, -1.4925647567519332e-05, 1.6462045441468418e-06,
          -1.6364642158167616e-07, 1.4792401209404813e-08, -1.216456005728345e-09, 8.709045129053106e-11,
          -4.230945824295338e-12),
}
# chebyfit(lambda t: log(erfc(t + c), 2), [low - c, high - c], n): erf x = 1 - 2**P(x - c)
ERF_LARGE = {
    F32: (0.0005331810098141432, -1.6309316158294678, -0.9108018279075623, -0.1596677154302597,
          0.03873792290687561,
          -0.007155763916671276, 0.0009478638530708849, -8.27028852654621e-05, 4.085693490196718e-06,
          -7.909459043276001e-08),  # [.93, 4], c = 0, n = 10
    F64: (-20.359943454935095, -10.482765842739799, -1.394729837840854, -0.007539031202173449,
          0.0012604643689662271,
          -0.00021250576938155777, 3.5182100580158246e-05, -5.61144481924182e-06, 8.448622741330383e-07,
          -1.1641543767787293e-07, 1.3751857057911883e-08, -1.1179370846410012e-09, -3.610714747551819e-11,
          4.422127881933836e-11, -1.3120688374120663e-11, 2.9653263505211716e-12, -5.996999358534309e-13,
          9.670742773850904e-14, -7.578469362582625e-15, 7.946175584266071e-16, -5.969159898337317e-16,
          2.690295799090805e-17, 4.5733390864876724e-17, -7.268550218656629e-18),  # [1, 6], c = 3.5, n = 24
}
ERF_LIMITS = {F32: (0.93, 4.0, 0.0), F64: (1.0, 6.0, 3.5)}  # where the small form ends, where erf is 1, c

# ---- small pieces ------------------------------------------------------------------------------------------


def mad(a: UOp, b: UOp | float, c: UOp | float, fma: bool) -> UOp:
    """a*b + c."""
    b = b if isinstance(b, UOp) else a.const_like(b)
    c = c if isinstance(c, UOp) else a.const_like(c)
    return alu(Ops.MULACC, a, b, c) if fma else alu(Ops.ADD, alu(Ops.MUL, a, b), c)


def horner(x: UOp, coefficients: Sequence[float], fma: bool) -> UOp:
    """The polynomial with these coefficients, lowest power first."""
    result = x.const_like(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = mad(result, x, coefficient, fma)
    return result


def bits(x: UOp) -> UOp:
    """The bits of a float as an unsigned integer."""
    return x.bitcast(UINT[x.dtype])


def sign_mask(dtype: DType) -> int:
    """The sign bit alone."""
    return 1 << (dtype.bitsize - 1)


def magnitude(x: UOp) -> UOp:
    """|x|, for NaN too."""
    return (bits(x) & (sign_mask(x.dtype) - 1)).bitcast(x.dtype)


def at_most(x: UOp, limit: float) -> UOp:
    """min(x, limit) that keeps NaN; one instruction on x86."""
    return x.const_like(limit).lt(x).where(x.const_like(limit), x)


def at_least(x: UOp, limit: float) -> UOp:
    """max(x, limit) that keeps NaN."""
    return x.lt(limit).where(x.const_like(limit), x)


def two_sum(a: UOp, b: UOp) -> Pair:
    """a + b and its rounding error, for |a| >= |b| or a = 0 (Dekker 1971)."""
    total = a + b
    return total, b - (total - a)


def two_product(a: UOp, b: UOp, fma: bool) -> Pair:
    """a * b and its rounding error (Veltkamp's splitting where there is no fused multiply-add)."""
    product = a * b
    if fma:
        return product, mad(a, b, -product, fma)
    factor = float((1 << (MANTISSA[a.dtype] // 2 + 1)) + 1)

    def halves(x: UOp) -> Pair:
        scaled = x * factor
        high = scaled - (scaled - x)
        return high, x - high
    (ah, al), (bh, bl) = halves(a), halves(b)
    return product, al * bl - (((product - ah * bh) - al * bh) - ah * bl)


def pair_product(a: Pair, b: Pair, fma: bool) -> Pair:
    """The product of two pairs, to about twice the precision."""
    high, low = two_product(a[0], b[0], fma)
    return two_sum(high, low + (a[0] * b[1] + a[1] * b[0]))


def constant_pair(like: UOp, high: float, low: float) -> Pair:
    """A constant to twice the precision."""
    return like.const_like(high), like.const_like(low)


# ---- exp2 --------------------------------------------------------------------------------------------------


def _round_exponent(x: UOp, offset: int) -> tuple[UOp, UOp]:
    """x rounded to an integer k: (as a float, as bits whose low part is k + offset). |x| must stay below
    2**(mantissa-2)."""
    magic = _magic(x.dtype, offset)
    shifted = x + magic
    return shifted - magic, bits(shifted)


def _magic(dtype: DType, offset: int) -> float:
    """What rounds a number to an integer when it is added."""
    return 1.5 * (1 << MANTISSA[dtype]) + offset


def _power_of_two(number: UOp, dtype: DType) -> UOp:
    """2**(number - bias) from the biased exponent; higher bits of `number` fall off."""
    return (number << MANTISSA[dtype]).bitcast(dtype)


def exp2(x: UOp, fma: bool, ldexp: bool = False) -> UOp:
    """2**x. At most 1 ulp (1.2 without fused multiply-add), denormal results included; exact at integers.
    `ldexp`: whether the target has LDEXP."""
    bias, mantissa = BIAS[x.dtype], MANTISSA[x.dtype]
    return _exp2_pair(at_least(at_most(x, bias + 1.0), -(bias + mantissa + 1.0)), None, fma, ldexp)


def exp(x: UOp, negative: bool, ldexp: bool = False) -> UOp:
    """e**x, or e**-x. At most 1 ulp where exp2(x * log2(e)) loses up to 30: the multiple of ln(2) nearest to
    x is taken away exactly (Cody and Waite 1980), which takes fused multiply-add."""
    dtype, sign = x.dtype, -1.0 if negative else 1.0
    top, bottom = EXP_LIMITS[dtype]
    limited = at_least(at_most(x, bottom), -top) if negative else at_least(at_most(x, top), -bottom)
    magic = _magic(dtype, 2 * BIAS[dtype])
    shifted = mad(limited, sign * LOG2_E[dtype], magic, True)
    whole = shifted - magic
    high, low = LN2[dtype]
    rest = mad(whole, -sign * low, mad(whole, -sign * high, limited, True), True)  # of e**-x the negative
    coefficients = [sign**power * c for power, c in enumerate((1.0, 1.0, *EXP[dtype]))]
    value = horner(rest, coefficients, True)
    return alu(Ops.LDEXP, value, whole) if ldexp else _scaled(value, bits(shifted))


def _exp2_pair(x: UOp, tail: UOp | None, fma: bool, ldexp: bool = False) -> UOp:
    """2**(x + tail), for x from the least power of two (or a little below) to the first too large one."""
    whole, number = _round_exponent(x, 2 * BIAS[x.dtype])
    fraction = x - whole if tail is None else (x - whole) + tail
    value = mad(horner(fraction, EXP2[x.dtype], fma), fraction, 1.0, fma)
    return alu(Ops.LDEXP, value, whole) if ldexp else _scaled(value, number)


def _scaled(value: UOp, number: UOp) -> UOp:
    """value * 2**k, k + 2 * bias in the low part of `number`: two factors, so that neither over- nor
    underflows before the last multiplication."""
    half = number >> 1
    return value * _power_of_two(half, value.dtype) * _power_of_two(number - half, value.dtype)


def _exp2_normal(x: UOp, tail: UOp | None, coefficients: Sequence[float], fma: bool) -> UOp:
    """2**(x + tail) where the result is a normal number."""
    whole, number = _round_exponent(x, BIAS[x.dtype])
    fraction = x - whole if tail is None else (x - whole) + tail
    return mad(horner(fraction, coefficients, fma), fraction, 1.0, fma) * _power_of_two(number, x.dtype)


# ---- log2 --------------------------------------------------------------------------------------------------


def _log_special(x: UOp, result: UOp) -> UOp:
    """-inf at 0, NaN below, inf and NaN as they are."""
    result = x.lt(math.inf).where(result, x)
    return x.equal(0.0).where(-math.inf, x.lt(0.0).where(math.nan, result))


def log2(x: UOp, fma: bool) -> UOp:
    """Logarithm to base 2. At most 1.5 ulp in float32, 1 ulp in float64."""
    dtype = x.dtype
    tiny, scale = (2.0**-126, 25) if dtype is F32 else (2.0**-1022, 54)
    denormal = x.lt(tiny)
    normal = denormal.where(x * 2.0**scale, x)
    correction = denormal.where(float(-scale), x.const_like(0.0))
    if dtype is F64:
        high, low = _log2_pair(normal, correction, fma)
        return _log_special(x, high + low)
    whole = (bits(normal) - 0x3f3504f3).bitcast(dtypes.int32) >> 23  # exponent of the number over sqrt(1/2)
    rest = (bits(normal) - (whole << 23).bitcast(dtypes.uint32)).bitcast(F32) - 1.0
    exponent = whole.cast(F32) + correction
    return _log_special(x, exponent + mad(horner(rest, LOG2, fma), rest, rest, fma))


def _split_double(x: UOp) -> Pair:
    """(e as a float, m) with x = 2**e * m and m about sqrt(1/2) … sqrt(2), for normal x > 0."""
    top = (bits(x) >> 32).cast(dtypes.uint32).bitcast(dtypes.int32)
    exponent = (top - 0x3fe6a09e) >> 20
    mantissa = (bits(x) - (exponent.cast(dtypes.int64) << 52).bitcast(dtypes.uint64)).bitcast(F64)
    return exponent.cast(F64), mantissa


def _log2_pair(x: UOp, correction: UOp, fma: bool) -> Pair:
    """log2(x) + correction as a float64 pair, relative error about 2**-63, for normal x > 0."""
    exponent, m = _split_double(x)
    over, under = m - 1.0, m + 1.0
    under_low = m - (under - 1.0)
    quotient = over / under
    product, error = two_product(quotient, under, fma)
    s = quotient, (((over - product) - error) - quotient * under_low) / under
    z = pair_product(s, s, fma)
    third = two_sum(x.const_like(1 / 3), z[0] * horner(z[0], ATANH, fma))
    v = pair_product(z, (third[0], third[1] + 1.850371707708594e-17), fma)
    one_v = two_sum(x.const_like(1.0), v[0])
    series = pair_product(s, (one_v[0], one_v[1] + v[1]), fma)
    high, low = pair_product(series, constant_pair(x, 2.8853900817779268, 4.0710547481862066e-17), fma)
    total, error = two_sum(exponent + correction, high)
    return total, error + low


# ---- sin ---------------------------------------------------------------------------------------------------


def sin(x: UOp, fma: bool) -> UOp:
    """Sine of radians. At most 2 ulp for every finite argument, however large; NaN at infinity."""
    dtype = x.dtype
    absolute = magnitude(x)
    reduced, rest, turned = _reduce(absolute, fma)
    small = absolute.lt(1.0)
    r = small.where(absolute, reduced)
    tail = small.where(0.0, rest) if rest is not None else None
    quadrant = small.where(0, turned)
    z = r * r
    cubic = r * z * horner(z, SIN[dtype], fma)
    half = z * 0.5
    cosine = 1.0 - half
    lost = (1.0 - cosine) - half
    sine = r + (cubic if tail is None else cubic + tail)
    cosine = cosine + mad(z * z, horner(z, COS[dtype], fma), lost if tail is None else lost - r * tail, fma)
    value = (quadrant & 1).equal(0).where(sine, cosine)
    sign = ((quadrant & 2).cast(UINT[dtype]) << (dtype.bitsize - 2)) ^ (bits(x) & sign_mask(dtype))
    return absolute.lt(math.inf).where((bits(value) ^ sign).bitcast(dtype), math.nan)


def _reduce(x: UOp, fma: bool) -> tuple[UOp, UOp | None, UOp]:
    """(r, tail, quadrant) with x = quadrant*pi/2 + r + tail, modulo whole turns, for finite x >= 1.

    The integer mantissa times the bits of 2/pi between those that only add whole turns and those too small to
    matter (Payne and Hanek 1983), in limbs of 32 bits: the window is chosen by the exponent's high bits and
    shifted by its low ones."""
    dtype = x.dtype
    lead = MANTISSA[dtype] + 2  # zeros before 2/pi, so that the window of x = 1 starts with the first word
    buckets, limbs = (4, 3) if dtype is F32 else (32, 6)
    place = (bits(x) >> MANTISSA[dtype]).cast(dtypes.uint32) - BIAS[dtype]
    words = [UOp.const(word, dtypes.uint32) for word in two_over_pi(lead, buckets + limbs)]
    step = buckets // 2
    while step:
        chosen = (place & (32 * step)).not_equal(0)
        words = [chosen.where(words[i + step], words[i]) for i in range(len(words) - step)]
        step //= 2
    shift = place & 31
    opposite = 31 - shift
    neighbours = itertools.pairwise(words[:limbs + 1])
    window = [(high << shift) | ((low >> 1) >> opposite) for high, low in neighbours]
    mantissa = (bits(x) & ((1 << MANTISSA[dtype]) - 1)) | (1 << MANTISSA[dtype])
    return _fraction32(mantissa, window) if dtype is F32 else _fraction64(mantissa, window, fma)


@lru_cache(None)
def two_over_pi(lead: int, count: int) -> tuple[int, ...]:
    """`lead` zero bits and then the fraction bits of 2/pi, as `count` words of 32 bits; exact integer
    arithmetic (Machin)."""
    guard = 32 * count + 64

    def arctan_inverse(n: int) -> int:
        total, term, k = 0, (1 << guard) // n, 1
        while term:
            total += term // k if k % 4 == 1 else -(term // k)
            term //= n * n
            k += 2
        return total
    pi = 4 * (4 * arctan_inverse(5) - arctan_inverse(239))
    value = ((2 << (2 * guard)) // pi) >> (guard - 32 * count + lead)
    return tuple([(value >> (32 * (count - 1 - i))) & 0xFFFFFFFF for i in range(count)])


def _fraction32(mantissa: UOp, window: list[UOp]) -> tuple[UOp, None, UOp]:
    first = (mantissa * window[0]).cast(dtypes.uint64) << 32  # what is above it are whole turns
    m, second, third = [value.cast(dtypes.uint64) for value in (mantissa, *window[1:])]
    product = first + m * second + ((m * third) >> 32)  # top two bits: the quadrant
    quadrant = ((product + (1 << 61)) >> 62).cast(dtypes.uint32)
    signed = (product << 2).bitcast(dtypes.int64) >> 2
    high, low = (signed >> 31).cast(dtypes.int32), (signed & 0x7FFFFFFF).cast(dtypes.int32)
    value = (high.cast(F64) * 2.0**31 + low.cast(F64)) * (math.pi * 2.0**-63)
    return value.cast(F32), None, quadrant


def _fraction64(mantissa: UOp, window: list[UOp], fma: bool) -> tuple[UOp, UOp, UOp]:
    low32 = 0xFFFFFFFF
    m0, m1 = mantissa & low32, mantissa >> 32
    wide = [word.cast(dtypes.uint64) for word in reversed(window)]  # column 0 is the lowest
    lower, upper = [m0 * word for word in wide], [m1 * word for word in wide[:-1]]
    columns: list[UOp] = []
    carry = UOp.const(0, dtypes.uint64)
    for c in range(6):
        total = carry + (lower[c] & low32)
        if c >= 1:
            total = total + (lower[c - 1] >> 32) + (upper[c - 1] & low32)
        if c >= 2:
            total = total + (upper[c - 2] >> 32)
        columns.append(total & low32)
        carry = total >> 32
    top = (columns[5] << 32) | columns[4]
    quadrant = ((top + (1 << 61)) >> 62).cast(dtypes.uint32)
    signed = (top << 2).bitcast(dtypes.int64) >> 2

    def part(value: UOp, scale: float) -> UOp:
        return value.cast(F64) * scale
    first = part((signed >> 32).cast(dtypes.int32), 2.0**-30)
    value = two_sum(first, part((signed & low32).cast(dtypes.uint32), 2.0**-62))
    rest = part(columns[3].cast(dtypes.uint32), 2.0**-94) + part(columns[2].cast(dtypes.uint32), 2.0**-126)
    value = two_sum(value[0], value[1] + rest)
    r, tail = pair_product(value, constant_pair(value[0], math.pi / 2, 6.123233995736766e-17), fma)
    return r, tail, quadrant


# ---- erf ---------------------------------------------------------------------------------------------------


def erf(x: UOp, fma: bool) -> UOp:
    """The error function. At most 2 ulp in float32, 3 ulp in float64 (4 ulp without fused multiply-add)."""
    dtype = x.dtype
    border, end, centre = ERF_LIMITS[dtype]
    absolute = magnitude(x)
    small = mad(horner(absolute * absolute, ERF_SMALL[dtype], fma), absolute, absolute, fma)
    moved = at_most(absolute, end) - centre if centre else at_most(absolute, end)
    exponent = horner(moved, ERF_LARGE[dtype], fma)
    large = 1.0 - _exp2_normal(exponent, None, EXP2[dtype], fma)
    value = absolute.lt(border).where(small, large)
    return (bits(value) | (bits(x) & sign_mask(dtype))).bitcast(dtype)


# ---- pow ---------------------------------------------------------------------------------------------------


def pow(x: UOp, y: UOp, fma: bool) -> UOp:
    """x to the power y with the special cases of C's pow. At most 1 ulp in float32 (through float64), 2 ulp
    in float64."""
    absolute = magnitude(x)
    positive = _pow_single(absolute, y, fma) if x.dtype is F32 else _pow_double(absolute, y, fma)
    return _pow_special(x, y, absolute, positive)


def _pow_single(absolute: UOp, y: UOp, fma: bool) -> UOp:
    exponent, m = _split_double(absolute.cast(F64))
    s = (m - 1.0) / (m + 1.0)
    logarithm = exponent + s * horner(s * s, LOG2_FAST, fma)
    bounded = at_least(at_most(y.cast(F64), 2.0**40), -2.0**40)  # finite, so that 1 to the power inf is 1
    power = at_least(at_most(bounded * logarithm, 200.0), -200.0)
    return _exp2_normal(power, None, EXP2_7, fma).cast(F32)


def _pow_double(absolute: UOp, y: UOp, fma: bool) -> UOp:
    denormal = absolute.lt(2.0**-1022)
    normal = denormal.where(absolute * 2.0**54, absolute)
    logarithm = _log2_pair(normal, denormal.where(-54.0, absolute.const_like(0.0)), fma)
    bounded = at_least(at_most(y, 2.0**65), -2.0**65)  # beyond, the result is 0, 1 or inf anyway
    high, low = two_product(bounded, logarithm[0], fma)
    high, low = two_sum(high, low + bounded * logarithm[1])
    inside = magnitude(high).lt(1100.0)
    low = inside.where(low, 0.0)
    high = at_least(at_most(high, 1100.0), -1100.0)
    return _exp2_pair(high, low, fma)


def _pow_special(x: UOp, y: UOp, absolute: UOp, positive: UOp) -> UOp:
    """|x|**y made x**y: zeros, infinities, signs, NaN; 1 where y is 0 or x is 1."""
    dtype = x.dtype
    zero = absolute.equal(0.0)
    outside = zero | absolute.equal(math.inf)
    vanishes = zero ^ y.lt(0.0)
    result = outside.where(vanishes.where(0.0, x.const_like(math.inf)), positive)
    integral = alu(Ops.TRUNC, y).equal(y)
    half = y * 0.5
    odd = integral & alu(Ops.TRUNC, half).not_equal(half)
    sign = odd.where(bits(x) & sign_mask(dtype), 0)
    result = (bits(result) ^ sign).bitcast(dtype)
    undefined = x.lt(0.0) & ~integral & absolute.lt(math.inf)
    result = (undefined | x.not_equal(x) | y.not_equal(y)).where(math.nan, result)
    return (x.equal(1.0) | y.equal(0.0)).where(1.0, result)


# what counts for more than one instruction; divisions keep their unit busy for as long as that
INSTRUCTIONS: dict[Op, float] = {
    Ops.EXP2: 15.0, Ops.LOG2: 24.0, Ops.SIN: 70.0, Ops.ERF: 40.0, Ops.POW: 70.0, Ops.THREEFRY: 100.0,
    Ops.RECIPROCAL: 8.0, Ops.FDIV: 8.0, Ops.SQRT: 10.0,
}
FUNCTIONS: dict[object, Callable[[UOp, bool], UOp]] = {
    Ops.EXP2: exp2, Ops.LOG2: log2, Ops.SIN: sin, Ops.ERF: erf,
}
