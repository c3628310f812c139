"""Element types, their limits, and how they promote (JAX's lattice: jax.readthedocs.io, "Type promotion
semantics")."""
from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Final, NamedTuple

from whit.helpers import DTypeError

PyConst = bool | int | float


class DType:
    """An element type. `count` > 1 (a hardware vector) exists only in linear programs.

    kind: "b" bool, "i" signed, "u" unsigned, "f" float, "x" index (internal), "v" void, "w" weak Python
    scalar.
    """

    __slots__ = ("bitsize", "count", "fmt", "kind", "name", "scalar_type")

    def __init__(self, name: str, kind: str, bitsize: int, fmt: str = "", count: int = 1,
                 scalar_type: DType | None = None) -> None:
        self.name, self.kind, self.bitsize = name, kind, bitsize
        self.fmt = fmt  # struct/memoryview format character where Python has one
        self.count, self.scalar_type = count, scalar_type

    @property
    def itemsize(self) -> int:
        """Bytes of one value (all lanes)."""
        return max(self.bitsize, 8) // 8 * self.count if self.bitsize else 0

    @property
    def scalar(self) -> DType:
        """The type of one lane."""
        return self.scalar_type or self

    def vec(self, count: int) -> DType:
        """The vector type of `count` lanes of this type."""
        return _vector(self.scalar, count)

    @property
    def is_float(self) -> bool:
        return self.kind == "f" or self is dtypes.weakfloat

    @property
    def is_int(self) -> bool:
        return self.kind in "iux" or self is dtypes.weakint

    @property
    def is_unsigned(self) -> bool:
        return self.kind == "u"

    @property
    def is_bool(self) -> bool:
        return self.kind == "b"

    @property
    def min(self) -> PyConst:
        """The least value: -inf for floats that have it."""
        if self.kind == "b":
            return False
        if self.is_float:
            return -self._top
        return 0 if self.kind == "u" else -(1 << (self.bitsize - 1))

    @property
    def max(self) -> PyConst:
        """The greatest value: inf for floats that have it."""
        if self.kind == "b":
            return True
        if self.is_float:
            return self._top
        return (1 << (self.bitsize - (self.kind != "u"))) - 1

    @property
    def _top(self) -> float:
        info = FLOAT_INFO.get(self.scalar)
        return math.inf if info is None or info.has_inf else info.max

    def __repr__(self) -> str:
        return f"dtypes.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return dtype_of_name, (self.name,)


@lru_cache(None)
def _vector(scalar: DType, count: int) -> DType:
    if count == 1:
        return scalar
    return DType(f"{scalar.name}x{count}", scalar.kind, scalar.bitsize, scalar.fmt, count, scalar)


class FloatInfo(NamedTuple):
    """Bits of the exponent (without sign) and of the fraction, exponent bias, greatest finite value, whether
    inf exists."""

    exponent: int
    mantissa: int
    bias: int
    max: float
    has_inf: bool = True


class dtypes:
    """All element types by name, with the aliases of PyTorch and tinygrad."""

    void: Final = DType("void", "v", 0)
    # loop counters and addresses: never overflows, never seen by users
    index: Final = DType("index", "x", 64, "q")
    bool: Final = DType("bool", "b", 1, "?")
    int8: Final = DType("int8", "i", 8, "b")
    uint8: Final = DType("uint8", "u", 8, "B")
    int16: Final = DType("int16", "i", 16, "h")
    uint16: Final = DType("uint16", "u", 16, "H")
    int32: Final = DType("int32", "i", 32, "i")
    uint32: Final = DType("uint32", "u", 32, "I")
    int64: Final = DType("int64", "i", 64, "q")
    uint64: Final = DType("uint64", "u", 64, "Q")
    fp8e4m3: Final = DType("fp8e4m3", "f", 8)
    fp8e5m2: Final = DType("fp8e5m2", "f", 8)
    float16: Final = DType("float16", "f", 16, "e")
    bfloat16: Final = DType("bfloat16", "f", 16)
    float32: Final = DType("float32", "f", 32, "f")
    float64: Final = DType("float64", "f", 64, "d")
    weakint: Final = DType("weakint", "w", 64)
    weakfloat: Final = DType("weakfloat", "w", 64)

    half = float16
    float = float32
    double = float64
    char = int8
    uchar = uint8
    short = int16
    ushort = uint16
    int = int32
    uint = uint32
    long = int64
    ulong = uint64

    fp8s: Final = (fp8e4m3, fp8e5m2)
    fp8_ocp: Final = fp8s
    int8s: Final = (uint8, int8)
    int16s: Final = (uint16, int16)
    int32s: Final = (uint32, int32)
    int64s: Final = (uint64, int64)
    floats: Final = (fp8e4m3, fp8e5m2, float16, bfloat16, float32, float64)
    uints: Final = (uint8, uint16, uint32, uint64)
    sints: Final = (int8, int16, int32, int64)
    ints: Final = uints + sints
    weaks: Final = (weakint, weakfloat)
    all: Final = (bool, *ints, *floats)

    default_float: DType = float32
    default_int: DType = int32

    @staticmethod
    def is_float(dtype: DType) -> "builtin_bool":
        return dtype.is_float

    @staticmethod
    def is_int(dtype: DType) -> "builtin_bool":
        return dtype.is_int

    @staticmethod
    def is_unsigned(dtype: DType) -> "builtin_bool":
        return dtype.is_unsigned

    @staticmethod
    def is_bool(dtype: DType) -> "builtin_bool":
        return dtype.is_bool

    @staticmethod
    def from_py(value: object) -> DType:
        """The dtype that a Python scalar, or a nested list of them, has when nothing else decides.

        >>> dtypes.from_py([1, 2.5]), dtypes.from_py(2**40)
        (dtypes.float32, dtypes.int64)
        """
        if isinstance(value, (list, tuple)):
            kinds = [dtypes.from_py(item) for item in value]
            return common_dtype(*kinds) if kinds else dtypes.default_float
        if value is True or value is False:
            return dtypes.bool
        if type(value) is _float or isinstance(value, _float):
            return dtypes.default_float
        if isinstance(value, _int):
            if dtypes.default_int.min <= value <= dtypes.default_int.max:
                return dtypes.default_int
            if dtypes.int64.min <= value <= dtypes.int64.max:
                return dtypes.int64
            if value <= dtypes.uint64.max and value >= 0:
                return dtypes.uint64
            raise DTypeError(f"the integer {value}", because="it fits no integer type of 64 bits",
                             fix="pass a float")
        raise DTypeError(f"a value of type {type(value).__name__}", because="it is no bool, int or float",
                         fix="pass Python scalars, nested lists of them, or a NumPy array")

    @staticmethod
    def finfo(dtype: DType) -> FloatInfo:
        """Layout and limits of a float type."""
        if dtype not in FLOAT_INFO:
            raise DTypeError(f"finfo({dtype})", because="it is not a float type",
                             fix="use dtypes.min and dtypes.max")
        return FLOAT_INFO[dtype]


builtin_bool = bool
_int, _float = int, float

FLOAT_INFO: dict[DType, FloatInfo] = {
    dtypes.fp8e4m3: FloatInfo(4, 3, 7, 448.0, has_inf=False),  # OCP "fn": S.1111.111 is NaN, there is no inf
    dtypes.fp8e5m2: FloatInfo(5, 2, 15, 57344.0),
    dtypes.float16: FloatInfo(5, 10, 15, 65504.0),
    dtypes.bfloat16: FloatInfo(8, 7, 127, 3.3895313892515355e38),
    dtypes.float32: FloatInfo(8, 23, 127, 3.4028234663852886e38),
    dtypes.float64: FloatInfo(11, 52, 1023, 1.7976931348623157e308),
}

_BY_NAME: dict[str, DType] = {d.name: d for d in vars(dtypes).values() if isinstance(d, DType)}
_ALIASES: dict[str, DType] = {n: d for n,
                              d in vars(dtypes).items() if isinstance(d,
                                                                      DType) and not n.startswith("default")}


def dtype_of_name(name: str) -> DType:
    """The dtype of that name or alias; a trailing xN makes it a vector of N lanes (linear programs only)."""
    if not isinstance(name, str):
        raise DTypeError(f"dtype {name!r}", because="it is neither a dtype nor the name of one",
                         fix="pass dtypes.float32 or its like, or a name")
    if name in _ALIASES:
        return _ALIASES[name]
    base, _, lanes = name.rpartition("x")
    if base in _BY_NAME and lanes.isascii() and lanes.isdigit() and 0 < int(lanes[:6]) <= 1 << 16:
        return _BY_NAME[base].vec(int(lanes))
    raise DTypeError(f"dtype {name!r}", because="there is no such type",
                     fix="one of " + ", ".join(d.name for d in dtypes.all))


def to_dtype(dtype: DType | str) -> DType:
    """Accept a DType or its name."""
    return dtype if isinstance(dtype, DType) else dtype_of_name(dtype)


# ---- promotion ---------------------------------------------------------------------------------------------

# direct edges of JAX's lattice; the 8-bit floats promote with nothing but integers and Python scalars
_EDGES: dict[DType, tuple[DType, ...]] = {
    dtypes.bool: (dtypes.weakint,),
    dtypes.weakint: (dtypes.uint8, dtypes.int8),
    dtypes.uint8: (dtypes.int16, dtypes.uint16), dtypes.uint16: (dtypes.int32, dtypes.uint32),
    dtypes.uint32: (dtypes.int64, dtypes.uint64), dtypes.uint64: (dtypes.weakfloat,),
    dtypes.int8: (dtypes.int16,), dtypes.int16: (dtypes.int32,), dtypes.int32: (dtypes.int64,),
    dtypes.int64: (dtypes.weakfloat,),
    dtypes.weakfloat: (dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.float16, dtypes.bfloat16),
    dtypes.fp8e4m3: (), dtypes.fp8e5m2: (),
    dtypes.float16: (dtypes.float32,), dtypes.bfloat16: (dtypes.float32,), dtypes.float32: (dtypes.float64,),
    dtypes.float64: (),
}


@lru_cache(None)
def _above(dtype: DType) -> frozenset[DType]:
    return frozenset({dtype}).union(*[_above(upper) for upper in _EDGES[dtype]])


@lru_cache(None)
def promote(*types: DType) -> DType:
    """The least upper bound in the lattice. Weak results stay weak.

    >>> promote(dtypes.int8, dtypes.uint8), promote(dtypes.int32, dtypes.float16)
    (dtypes.int16, dtypes.float16)
    >>> promote(dtypes.float32, dtypes.weakfloat)
    dtypes.float32
    """
    common = frozenset.intersection(*[_above(t) for t in types])
    least = [t for t in common if common <= _above(t)]
    if not least:
        names = " with ".join(t.name for t in dict.fromkeys(types))
        raise DTypeError(f"mixing {names}", because="8-bit floats have no implicit promotion",
                         fix="cast one of them")
    return least[0]


def common_dtype(*types: DType) -> DType:
    """The dtype in which values of these dtypes meet: `promote`, and a weak result (of int64 and uint64) made
    concrete.

    >>> common_dtype(dtypes.int64, dtypes.uint64)
    dtypes.float32
    """
    return strong(promote(*types))


def strong(dtype: DType) -> DType:
    """The concrete type of a weak one."""
    if dtype is dtypes.weakint:
        return dtypes.default_int
    return dtypes.default_float if dtype is dtypes.weakfloat else dtype


def float_of(dtype: DType) -> DType:
    """The float type in which functions such as exp work for inputs of `dtype`."""
    return dtype if dtype.is_float else dtypes.default_float


# ---- values ------------------------------------------------------------------------------------------------


def round_float(value: float, dtype: DType) -> float:
    """Round to the nearest value of a float type, ties to even; too large becomes inf (NaN where there is no
    inf)."""
    if dtype is dtypes.float64 or not math.isfinite(value):
        return math.nan if math.isinf(value) and not FLOAT_INFO[dtype].has_inf else value
    if dtype is dtypes.float32:
        try:
            return float(struct.unpack("f", struct.pack("f", value))[0])
        except OverflowError:
            return math.copysign(math.inf, value)
    info = FLOAT_INFO[dtype]
    if value == 0:
        return value
    # of the leading bit; denormals share the least exponent
    exponent = max(math.frexp(value)[1] - 1, 1 - info.bias)
    step = math.ldexp(1.0, exponent - info.mantissa)
    # Python rounds halves to even; the division by a power of two is exact
    rounded = round(value / step) * step
    if abs(rounded) > info.max:
        return math.copysign(math.inf, value) if info.has_inf else math.nan
    return math.copysign(rounded, value)


def wrap(value: PyConst, dtype: DType) -> PyConst:
    """The value as an element of `dtype`: integers wrap in two's complement, floats round, bool tests for
    non-zero."""
    if dtype.kind == "f":
        try:
            return round_float(float(value), dtype)
        except OverflowError:
            return math.copysign(math.inf, value) if FLOAT_INFO[dtype].has_inf else math.nan
    if dtype.kind == "b":
        return bool(value)
    if dtype.kind in "iu":
        bits = int(value) & ((1 << dtype.bitsize) - 1)
        return bits - (1 << dtype.bitsize) if dtype.kind == "i" and bits >> (dtype.bitsize - 1) else bits
    return int(value) if dtype.kind == "x" else value
