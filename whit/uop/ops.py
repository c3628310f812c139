"""The op table: every op of the IR is one row here. `python -m whit.uop` prints it.

A row states the category (which decides arity, dtype and shape rules), the one-line meaning, the value on
Python scalars where the op computes one, and the algebraic facts that rules and tests may rely on.
"""
from __future__ import annotations

import enum
import math
import operator
import struct
from collections.abc import Callable

from whit.uop.dtype import DType, PyConst


class AxisType(enum.IntEnum):
    """What a RANGE becomes; the order is the order of nesting, outermost first."""

    GLOBAL = 0  # a work-group index of a GPU-like device
    THREAD = 1  # one task of the CPU's pool
    LOCAL = 2  # a work-item index inside a group
    LOOP = 3  # a sequential loop over outputs
    GROUP_REDUCE = 4  # a reduction shared by the work-items of a group
    REDUCE = 5  # a sequential loop that accumulates
    UPCAST = 6  # part of the register tile: outputs computed side by side
    UNROLL = 7  # part of the register tile: steps of a reduction done side by side

    @property
    def is_tile(self) -> bool:
        return self is AxisType.UPCAST or self is AxisType.UNROLL

    @property
    def is_reduce(self) -> bool:
        return self in (AxisType.REDUCE, AxisType.GROUP_REDUCE, AxisType.UNROLL)


class Op:
    """A row of the table. `meaning` computes on Python scalars (before wrapping to the dtype); `arity` None
    varies; `associative`: exactly, on integers; `identity` of a reduction (MAX's and MIN's depend on the
    dtype); `takes`: operand dtypes: any, number, float, int, bitwise (int or bool)."""

    __slots__ = (
        "arity", "associative", "category", "commutative", "differentiable", "doc", "idempotent", "identity",
        "is_alu", "is_elementwise", "is_movement", "meaning", "name", "takes",
    )

    def __init__(self, name: str, category: str, arity: int | None, doc: str,
                 meaning: Callable[..., PyConst] | None = None, commutative: bool = False,
                 associative: bool = False, idempotent: bool = False, identity: PyConst | None = None,
                 takes: str = "any", differentiable: bool = True) -> None:
        self.name, self.category, self.arity, self.doc, self.meaning = name, category, arity, doc, meaning
        self.commutative, self.associative, self.idempotent = commutative, associative, idempotent
        self.identity, self.takes, self.differentiable = identity, takes, differentiable
        # computed from the category, and plain attributes because every new node asks
        self.is_alu = category in ("unary", "binary", "compare", "ternary")
        self.is_elementwise = self.is_alu or category == "cast"
        self.is_movement = category == "movement"

    def __repr__(self) -> str:
        return f"Ops.{self.name}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return op_of_name, (self.name,)


_TABLE: dict[str, Op] = {}


def op_of_name(name: str) -> Op:
    """The row of that name (upper case). KeyError if there is none."""
    return _TABLE[name]


def all_ops() -> list[Op]:
    """Every row in the order of the table."""
    return list(_TABLE.values())


def define(name: str, category: str, arity: int | None, doc: str,
           meaning: Callable[..., PyConst] | None = None, *,
           commutative: bool = False, associative: bool = False,
           idempotent: bool = False, identity: PyConst | None = None, takes: str = "any",
           differentiable: bool = True) -> Op:
    """Add a row to the table (docs/add-an-op.md)."""
    op = Op(name, category, arity, doc, meaning, commutative, associative, idempotent, identity, takes,
            differentiable)
    assert name not in _TABLE, f"two rows define {name}"
    _TABLE[name] = op
    return op


def _total(function: Callable[[float], float], at_overflow: float = math.inf) -> Callable[[PyConst], PyConst]:
    """IEEE results where Python's math raises: NaN outside the domain, infinity on overflow."""
    def call(x: PyConst) -> PyConst:
        try:
            return function(float(x))
        except OverflowError:
            return at_overflow
        except ValueError:
            return math.nan
    return call


def _divide(a: PyConst, b: PyConst) -> PyConst:
    if b == 0:
        if a == 0 or math.isnan(a):
            return math.nan
        return math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


def _log2(x: PyConst) -> PyConst:
    return -math.inf if x == 0 else (_total(math.log2)(x))


def _maximum(a: PyConst, b: PyConst) -> PyConst:
    return a if a != a else b if b != b else max(a, b)


def _minimum(a: PyConst, b: PyConst) -> PyConst:
    return a if a != a else b if b != b else min(a, b)


def _trunc_div(a: PyConst, b: PyConst) -> PyConst:
    return 0 if b == 0 else (abs(int(a)) // abs(int(b))) * (1 if (a < 0) == (b < 0) else -1)


def _pow(a: PyConst, b: PyConst) -> PyConst:
    try:
        result = math.pow(a, b)
    except OverflowError:
        return -math.inf if a < 0 and b % 2 == 1 else math.inf
    except ValueError:
        if a == 0:  # 0 to a negative power
            return math.copysign(math.inf, a) if b % 2 == 1 else math.inf
        return math.nan
    return result


def _ldexp(x: PyConst, k: PyConst) -> PyConst:
    if k != k:
        return math.nan
    try:
        return math.ldexp(x, int(max(-5000.0, min(5000.0, k))))
    except OverflowError:
        return math.copysign(math.inf, x)


def _float_trunc(x: PyConst) -> PyConst:
    return x if isinstance(x, int) or not math.isfinite(x) else math.copysign(float(math.trunc(x)), x)


def _float_floor(x: PyConst) -> PyConst:
    return x if isinstance(x, int) or not math.isfinite(x) else math.copysign(float(math.floor(x)), x)


def _threefry(counter: PyConst, key: PyConst) -> PyConst:
    """Threefry-2x32, 20 rounds (Salmon et al. 2011): low and high halves of 64-bit words are the two lanes.
    """
    mask, rotations = 0xFFFFFFFF, ((13, 15, 26, 6), (17, 29, 16, 24))
    x0, x1 = int(counter) & mask, (int(counter) >> 32) & mask
    k0, k1 = int(key) & mask, (int(key) >> 32) & mask
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + keys[0]) & mask, (x1 + keys[1]) & mask
    for block in range(5):
        for turn in rotations[block % 2]:
            x0 = (x0 + x1) & mask
            x1 = ((x1 << turn | x1 >> (32 - turn)) & mask) ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & mask
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & mask
    return x1 << 32 | x0


def _dot(width: int, is_signed: bool) -> Callable[[PyConst, PyConst, PyConst], PyConst]:
    """z plus the sum of products of the parts of `width` bits, in the low 32 bits, of x and y; those of y are
    signed."""
    half, top = 1 << (width - 1), 1 << width

    def call(x: PyConst, y: PyConst, z: PyConst) -> PyConst:
        total = int(z)
        for at in range(0, 32, width):
            a, b = (int(x) >> at) % top, ((int(y) >> at) + half) % top - half
            total += (a if not is_signed or a < half else a - top) * b
        return total

    return call


def _dot_brains(x: PyConst, y: PyConst, z: PyConst) -> PyConst:
    """z plus the products of the bfloat16 halves of two float32 words."""
    a, b = [struct.unpack("<I", struct.pack("<f", v))[0] for v in (x, y)]
    total = float(z)
    for shift in (16, 0):
        first, second = [
            struct.unpack("<f", struct.pack("<I", (v >> shift & 0xFFFF) << 16))[0] for v in (a, b)
        ]
        total += first * second
    return total


class Ops:
    """The namespace of all rows."""

    # ---- sources
    CONST = define("CONST", "source", 0, "A constant of shape (); arg is the Python value.")
    IOTA = define("IOTA", "source", 0, "0, 1, 2, … along one axis; arg is the length. Costs no memory.")
    BUFFER = define("BUFFER", "source", 0,
                     "A flat piece of device memory that the user's tensors own; arg BufferArg.")
    PARAM = define("PARAM", "source", 0, "A kernel's buffer argument; arg ParamArg.")
    VAR = define("VAR", "source", 0, "A symbolic integer with bounds; arg VarArg.")
    BIND = define("BIND", "source", 2, "A VAR with the value (a CONST) that it has in this call.")

    # ---- unary
    NEG = define("NEG", "unary", 1, "-x", operator.neg, takes="number")
    RECIPROCAL = define("RECIPROCAL", "unary", 1, "1 / x", lambda x: _divide(1.0, x), takes="float")
    SQRT = define("SQRT", "unary", 1, "Square root; NaN below zero.",
                   lambda x: x if x == 0 else _total(math.sqrt)(x), takes="float")
    EXP2 = define("EXP2", "unary", 1, "2 to the power x.", _total(lambda x: math.pow(2.0, x)), takes="float")
    LOG2 = define("LOG2", "unary", 1, "Logarithm to base 2; -inf at zero, NaN below.", _log2, takes="float")
    SIN = define("SIN", "unary", 1, "Sine of radians; NaN at infinity.", _total(math.sin), takes="float")
    ERF = define("ERF", "unary", 1, "The error function.", _total(math.erf), takes="float")
    TRUNC = define("TRUNC", "unary", 1, "Round towards zero, as a float.", _float_trunc, takes="float")
    FLOOR = define("FLOOR", "unary", 1, "Round down, as a float.", _float_floor, takes="float")

    # ---- binary
    ADD = define("ADD", "binary", 2, "x + y; integers wrap. On bools: or.", operator.add, commutative=True,
                  associative=True, identity=0)
    SUB = define("SUB", "binary", 2, "x - y; integers wrap.", operator.sub, takes="number")
    MUL = define("MUL", "binary", 2, "x * y; integers wrap. On bools: and.", operator.mul, commutative=True,
                  associative=True, identity=1)
    FDIV = define("FDIV", "binary", 2, "x / y in IEEE arithmetic.", _divide, takes="float")
    FLOORDIV = define("FLOORDIV", "binary", 2, "x / y rounded down; 0 when y is 0.",
                       lambda a, b: 0 if b == 0 else a // b, takes="int", differentiable=False)
    FLOORMOD = define("FLOORMOD", "binary", 2, "x - y * floor(x / y), with the sign of y; 0 when y is 0.",
                       lambda a, b: 0 if b == 0 else a % b, takes="int", differentiable=False)
    TRUNCDIV = define("TRUNCDIV", "binary", 2, "x / y rounded towards zero; 0 when y is 0.", _trunc_div,
                       takes="int",
                       differentiable=False)
    TRUNCMOD = define("TRUNCMOD", "binary", 2, "x - y * trunc(x / y), with the sign of x; 0 when y is 0.",
                       lambda a, b: 0 if b == 0 else a - b * _trunc_div(a, b), takes="int",
                       differentiable=False)
    MAX = define("MAX", "binary", 2, "The greater; NaN if either is NaN. On bools: or.", _maximum,
                  commutative=True, associative=True, idempotent=True)
    MIN = define("MIN", "binary", 2, "The lesser; NaN if either is NaN. On bools: and.", _minimum,
                  commutative=True, associative=True, idempotent=True)
    AND = define("AND", "binary", 2, "Bitwise and.", operator.and_, commutative=True, associative=True,
                  idempotent=True,
                  takes="bitwise", differentiable=False)
    OR = define("OR", "binary", 2, "Bitwise or.", operator.or_, commutative=True, associative=True,
                 idempotent=True,
                 takes="bitwise", differentiable=False)
    XOR = define("XOR", "binary", 2, "Bitwise exclusive or.", operator.xor, commutative=True,
                  associative=True,
                  takes="bitwise", differentiable=False)
    SHL = define("SHL", "binary", 2, "x << y; 0 when y is negative or at least the width.",
                  lambda a, b: a << b if 0 <= b < 64 else 0, takes="int", differentiable=False)
    SHR = define("SHR", "binary", 2,
                  "x >> y, arithmetic when signed; sign fill when y is negative or at least the width.",
                  lambda a, b: a >> b if 0 <= b < 64 else (-1 if a < 0 else 0), takes="int",
                  differentiable=False)
    POW = define("POW", "binary", 2, "x to the power y, as C's pow.", _pow, takes="float")
    LDEXP = define("LDEXP", "binary", 2,
                    "x * 2**k, rounded once, for a whole number k; where it is one instruction.",
                    _ldexp, takes="float", differentiable=False)
    THREEFRY = define("THREEFRY", "binary", 2, "Threefry-2x32 of a uint64 counter under a uint64 key.",
                       _threefry,
                       takes="int", differentiable=False)

    # ---- comparisons give bool
    CMPLT = define("CMPLT", "compare", 2, "x < y; false if either is NaN.", operator.lt,
                    differentiable=False)
    CMPLE = define("CMPLE", "compare", 2, "x <= y; false if either is NaN.", operator.le,
                    differentiable=False)
    CMPEQ = define("CMPEQ", "compare", 2, "x == y; false if either is NaN.", operator.eq, commutative=True,
                    differentiable=False)
    CMPNE = define("CMPNE", "compare", 2, "x != y; true if either is NaN.", operator.ne, commutative=True,
                    differentiable=False)

    # ---- ternary
    WHERE = define("WHERE", "ternary", 3, "y where the bool x holds, else z.", lambda c, a, b: a if c else b)
    MULACC = define("MULACC", "ternary", 3, "x * y + z, rounded once.", lambda a, b, c: a * b + c,
                     takes="number")
    DOT4 = define("DOT4", "ternary", 3,
                   "z plus the sum of four products: signed bytes of x times signed bytes of y.",
                   _dot(8, True), takes="int", differentiable=False)
    DOT4U = define("DOT4U", "ternary", 3,
                    "z plus the sum of four products: unsigned bytes of x times signed bytes of y.",
                    _dot(8, False), takes="int", differentiable=False)
    DOT2 = define("DOT2", "ternary", 3,
                   "z plus the sum of two products: signed halves (16 bits) of x times those of y.",
                   _dot(16, True), takes="int", differentiable=False)
    DOT2B = define("DOT2B", "ternary", 3,
                   "z plus the sum of two products: the bits of x and y are pairs of bfloat16 values; a "
                   "subnormal one may count as 0.",
                   _dot_brains, takes="float", differentiable=False)

    # ---- casts
    CAST = define("CAST", "cast", 1, "Convert the value; float to integer truncates.")
    BITCAST = define("BITCAST", "cast", 1,
                      "Reinterpret the bits in a type of the same width (a vector's lanes together).",
                      differentiable=False)

    # ---- movement: tensor level only
    RESHAPE = define("RESHAPE", "movement", 1, "Same elements in row-major order; arg is the new shape.")
    PERMUTE = define("PERMUTE", "movement", 1, "Reorder axes; arg[i] is the source axis of axis i.")
    EXPAND = define("EXPAND", "movement", 1, "Repeat axes of size 1; arg is the new shape.")
    PAD = define("PAD", "movement", 1, "Zeros around; arg is ((before, after), …).")
    SHRINK = define("SHRINK", "movement", 1, "Keep start <= i < stop; arg is ((start, stop), …).")
    FLIP = define("FLIP", "movement", 1, "Reverse axes; arg is the axes.")

    # ---- tensor level: reductions, data-dependent reads, memory
    REDUCE = define("REDUCE", "reduce", None,
                     "Tensor: fold arg.op over arg.axes, which vanish. Kernel: over the RANGEs in src[1:].")
    TAKE = define("TAKE", "take", 2,
                   "x with axis arg replaced by x[idx]; an index outside of the axis reads 0.")
    CONTIGUOUS = define("CONTIGUOUS", "memory", 1, "The value, in memory of its own.")
    DETACH = define("DETACH", "memory", 1, "The value; no gradient flows.", differentiable=False)
    COPY = define("COPY", "memory", 1, "The value on the device arg.")
    STORE = define("STORE", "memory", None,
                    "Tensor: (view, value). Kernel: (buffer, index, value[, valid]).", differentiable=False)
    AFTER = define("AFTER", "memory", None,
                    "src[0] once the STOREs in src[1:] have happened: the next version of a buffer.")

    # ---- ranged and kernel levels
    RANGE = define("RANGE", "loop", 1, "0 … size-1; src[0] is the size, arg RangeArg.")
    INDEX = define("INDEX", "memory", None, "Read (buffer, index[, valid]); 0 where not valid.")
    STAGE = define("STAGE", "memory", None,
                    "The value src[0] computed over the RANGEs src[1:] into scratch; arg StageArg.")
    END = define("END", "loop", None,
                  "src[0] is done for every value of the RANGEs src[1:]; outermost first.")
    SINK = define("SINK", "sink", None, "The root of a kernel or of a set of tensors.")
    CALL = define("CALL", "sink", None,
                   "Schedule: run src[0] (SINK, LINEAR or COPY) on the buffers src[1:]. Tensor: the kernel "
                   "arg.kernel on the values src.")
    SCAN = define("SCAN", "sink", None,
                   "The kernel of a CALL that is a loop: src are graphs of a step over PARAMs; arg ScanArg.")
    OUTPUT = define("OUTPUT", "sink", 1, "One of the values that a CALL gives; arg (its number, its shape).")
    LINEAR = define("LINEAR", "sink", None, "Instructions or calls in order.")

    # ---- linear level
    SPECIAL = define("SPECIAL", "loop", 0, "An index that the hardware gives; arg SpecialArg.")
    REG = define("REG", "linear", 1,
                  "A mutable register holding src[0]; used as an operand it reads the present value; "
                  "arg is its number.")
    SET = define("SET", "linear", 2, "Assign src[1] to the REG src[0].")
    LOAD = define("LOAD", "linear", None,
                   "Read (memory, index[, mask]): a vector dtype with a scalar index reads consecutive "
                   "elements, with a vector index gathers; 0 where masked off.")
    PREFETCH = define("PREFETCH", "linear", 2,
                       "Bring the line of (memory, index), which may lie outside, near; arg 3: to the first "
                       "cache, 2: to the second.")
    LOCAL = define("LOCAL", "linear", 0,
                    "Scratch memory shared by a work-group, or private to a task; arg LocalArg.")
    BARRIER = define("BARRIER", "linear", None, "All work-items of the group arrive before any goes on.")
    BROADCAST = define("BROADCAST", "linear", 1, "A scalar in every lane.")
    STACK = define("STACK", "linear", None, "A vector of the scalars in src.")
    EXTRACT = define("EXTRACT", "linear", 1, "Lane arg of a vector.")
    SHUFFLE = define("SHUFFLE", "linear", 1,
                      "Lanes of a vector reordered; arg is the tuple of source lanes.")
    FOLD = define("FOLD", "linear", 1, "Combine all lanes of a vector with the binary op arg.")
    IF = define("IF", "linear", 1, "Run up to the matching ENDIF when the scalar bool src[0] holds.")
    ENDIF = define("ENDIF", "linear", 1, "End of the IF src[0].")


ELEMENTWISE = frozenset(op for op in all_ops() if op.is_elementwise)
ALU = frozenset(op for op in all_ops() if op.is_alu)
MOVEMENT = frozenset(op for op in all_ops() if op.is_movement)
COMPARE = frozenset(op for op in all_ops() if op.category == "compare")
# op -> bits of a part; x and y hold 32 bits of parts
DOTS = {Ops.DOT4: 8, Ops.DOT4U: 8, Ops.DOT2: 16, Ops.DOT2B: 16}
REDUCTIONS = (Ops.ADD, Ops.MUL, Ops.MAX, Ops.MIN)


def identity(op: Op, dtype: DType) -> PyConst:
    """The value that changes nothing in a reduction by `op`.

    >>> from whit.uop.dtype import dtypes
    >>> identity(Ops.MAX, dtypes.uint8), identity(Ops.MIN, dtypes.uint8), identity(Ops.MUL, dtypes.uint8)
    (0, 255, 1)
    """
    if op is Ops.MAX:
        return dtype.min
    return dtype.max if op is Ops.MIN else op.identity or 0
