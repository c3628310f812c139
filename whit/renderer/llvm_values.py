"""Values of LLVM IR: types, literals, arithmetic and casts, one function per kind. `llvm` makes programs of
them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from whit.helpers import CompileError
from whit.uop import DType, Op, Ops, PyConst, UOp, dtypes
from whit.uop.dtype import FLOAT_INFO
from whit.uop.ops import DOTS

_SMALL = (dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2)


def _scalar_type(dtype: DType) -> str:
    """The type of one lane in a register."""
    if dtype is dtypes.float32:
        return "float"
    if dtype is dtypes.float64:
        return "double"
    return f"i{dtype.bitsize}"


_types: dict[DType, str] = {}


def type_of(dtype: DType) -> str:
    """The register type: `<8 x float>`, `i1`, …"""
    text = _types.get(dtype)
    if text is None:
        lane = _scalar_type(dtype.scalar)
        text = _types[dtype] = lane if dtype.count == 1 else f"<{dtype.count} x {lane}>"
    return text


def memory_dtype(dtype: DType) -> DType:
    """bool lives in bytes."""
    return dtypes.uint8.vec(dtype.count) if dtype.kind == "b" else dtype


def suffix(dtype: DType) -> str:
    """The type in an intrinsic's name: `v8f32`."""
    scalar = dtype.scalar
    lane = ("f" if scalar in (dtypes.float32, dtypes.float64) else "i") + str(scalar.bitsize)
    return lane if dtype.count == 1 else f"v{dtype.count}{lane}"


def small_float_bits(value: float, dtype: DType) -> int:
    """The bit pattern of a value that a 8- or 16-bit float type represents."""
    info = FLOAT_INFO[dtype]
    sign = (1 if math.copysign(1.0, value) < 0 else 0) << (dtype.bitsize - 1)
    top = ((1 << info.exponent) - 1) << info.mantissa
    if math.isnan(value):
        return top | (1 << (info.mantissa - 1)) if info.has_inf else (1 << (dtype.bitsize - 1)) - 1
    if math.isinf(value):
        return sign | top
    fraction, exponent = math.frexp(abs(value))
    exponent = max(exponent - 1, 1 - info.bias)
    steps = int(math.ldexp(abs(value), info.mantissa - exponent)) if fraction else 0
    return sign | (steps + ((exponent + info.bias - 1) << info.mantissa) if steps else 0)


def _lane_text(value: PyConst, scalar: DType) -> str:
    if scalar in _SMALL:
        return str(small_float_bits(float(value), scalar))
    if scalar.is_float:
        if value != value:
            return "0x7FF8000000000000"
        return f"0x{struct.unpack('Q', struct.pack('d', float(value)))[0]:016X}"
    if scalar.kind == "b":
        return "true" if value else "false"
    return str(int(value))


def constant(value: PyConst | tuple[PyConst, ...], dtype: DType) -> str:
    """A literal, without its type."""
    scalar = dtype.scalar
    if dtype.count == 1:
        return _lane_text(value[0] if isinstance(value, tuple) else value, scalar)
    lane = _scalar_type(scalar)
    if isinstance(value, tuple):
        return "<" + ", ".join([f"{lane} {_lane_text(item, scalar)}" for item in value]) + ">"
    return f"splat ({lane} {_lane_text(value, scalar)})"


Dots = Mapping[Op, Mapping[int, str]]
PMADDWD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
VDPBF16PS = {lanes: f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}" for lanes in (4, 8, 16)}
VPDPBUSD = {lanes: f"llvm.x86.avx512.vpdpbusd.{32 * lanes}" for lanes in (4, 8, 16)}


ARM_DOTS: Dots = {
    Ops.DOT4: {n: f"llvm.aarch64.neon.sdot.v{n}i32.v{4 * n}i8" for n in (2, 4)},
    Ops.DOT4U: {n: f"llvm.aarch64.neon.usdot.v{n}i32.v{4 * n}i8" for n in (2, 4)},
}  # with the features dotprod and i8mm


def x86_dots(vector_bytes: int) -> Dots:
    """The intrinsics of an x86 with vectors of this size for DOT ops, of which the target's native ones are
    used."""
    lanes = [n for n in (4, 8, 16) if 4 * n <= vector_bytes]
    named = {Ops.DOT2: PMADDWD, Ops.DOT4U: VPDPBUSD, Ops.DOT2B: VDPBF16PS}
    return {op: {n: names[n] for n in lanes} for op, names in named.items()}


class Values:
    """Appends instructions to `lines` and returns the names of their results. `half`: the target converts
    float16 in hardware. `dots`: the target's intrinsics for DOT ops on vectors, by the number of lanes."""

    def __init__(self, half: bool, dots: Dots | None = None) -> None:
        self.half, self.dots = half, dots or {}
        self.lines: list[str] = []
        self.declared: dict[str, str] = {}
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def emit(self, text: str) -> str:
        """An instruction with a result: its name."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def call(
        self, intrinsic: str, result: DType, arguments: Sequence[tuple[str, str]], flags: str = ""
    ) -> str:
        """Call an intrinsic; arguments are (type, value)."""
        kind = type_of(result)
        self.declared[intrinsic] = f"declare {kind} @{intrinsic}({', '.join([t for t, _ in arguments])})"
        return self.emit(f"call {flags}{kind} @{intrinsic}({', '.join([f'{t} {v}' for t, v in arguments])})")

    # ---- arithmetic

    def alu(self, op: Op, dtype: DType, src: Sequence[UOp], args: list[str]) -> str:
        """An ALU op; src may be empty (inside FOLD), then all operands have type `dtype`."""
        operand = src[-1].dtype if src else dtype
        scalar = operand.scalar
        if op is Ops.WHERE:
            kind = type_of(dtype)
            return self.emit(f"select {type_of(src[0].dtype)} {args[0]}, {kind} {args[1]}, {kind} {args[2]}")
        if scalar in _SMALL:
            wide = dtypes.float32.vec(operand.count)
            args = [self.widen(a, operand) for a in args]
            if op.category == "compare":
                return self.float_op(op, wide, args, src)
            return self.narrow(self.float_op(op, wide, args, ()), operand)
        if scalar.is_float:
            return self.float_op(op, operand, args, src)
        if op.category == "compare":
            return self.emit(f"icmp {_ICMP[op][scalar.kind in 'ub']} {type_of(operand)} {args[0]}, {args[1]}")
        if scalar.kind == "b":
            return self.emit(f"{BOOL_OPS[op]} {type_of(operand)} {args[0]}, {args[1]}")
        return self.int_op(op, dtype, args, src)

    def float_op(self, op: Op, dtype: DType, args: list[str], src: Sequence[UOp]) -> str:
        kind = type_of(dtype)
        if op in _FLOAT_BINARY:
            return self.emit(f"{_FLOAT_BINARY[op]} {kind} {args[0]}, {args[1]}")
        if op.category == "compare":
            return self.emit(f"fcmp {_FCMP[op]} {kind} {args[0]}, {args[1]}")
        if op is Ops.RECIPROCAL:
            return self.emit(f"fdiv {kind} {constant(1.0, dtype)}, {args[0]}")
        if op is Ops.NEG:
            return self.emit(f"fneg {kind} {args[0]}")
        if op is Ops.MAX or op is Ops.MIN:
            return self.extremum(op, dtype, args, src)
        if op is Ops.LDEXP:
            return self.scale(dtype, args)
        if op is Ops.DOT2B:
            return self.dot(op, dtype, args)
        if op in _FLOAT_INTRINSIC:
            return self.call(f"llvm.{_FLOAT_INTRINSIC[op]}.{suffix(dtype)}", dtype, [(kind, a) for a in args])
        raise CompileError(
            f"LLVM renderer: {op.name} on {dtype}",
            because="LLVM has no instruction for it",
            fix="leave it out of Target.native so that codegen decomposes it",
        )

    def scale(self, dtype: DType, args: list[str]) -> str:
        """LDEXP by the instruction that AVX-512 has for it, on vectors of 16, 32 or 64 bytes."""
        lanes = max(1 << (dtype.count - 1).bit_length(), 16 // dtype.scalar.itemsize)
        wide, kind = dtype.scalar.vec(lanes), type_of(dtype)
        if wide.itemsize > 64:
            count = dtype.count // 2
            half = dtype.scalar.vec(count)
            low, high = [
                self.scale(half, [self.lanes(a, dtype, at, count) for a in args]) for at in (0, count)
            ]
            order = ", ".join([f"i32 {n}" for n in range(dtype.count)])
            both = f"{type_of(half)} {low}, {type_of(half)} {high}"
            return self.emit(f"shufflevector {both}, <{dtype.count} x i32> <{order}>")
        if dtype.count == 1:
            args = [self.emit(f"insertelement {type_of(wide)} poison, {kind} {a}, i64 0") for a in args]
        elif dtype.count < lanes:
            args = [self.lanes(a, dtype, 0, lanes) for a in args]
        lane = "ps" if dtype.scalar.itemsize == 4 else "pd"
        name = f"llvm.x86.avx512.mask.scalef.{lane}.{8 * wide.itemsize}"
        mask = f"i{max(8, lanes)}"
        operands = [*[(type_of(wide), a) for a in args], (type_of(wide), "zeroinitializer"), (mask, "-1")]
        result = self.call(name, wide, [*operands, ("i32", "4")] if wide.itemsize == 64 else operands)
        if dtype.count == 1:
            return self.emit(f"extractelement {type_of(wide)} {result}, i64 0")
        return self.lanes(result, wide, 0, dtype.count) if dtype.count < lanes else result

    def lanes(self, text: str, dtype: DType, first: int, count: int) -> str:
        """Lanes of a vector from `first` on; those beyond its end hold anything."""
        order = ", ".join([f"i32 {min(first + n, dtype.count)}" for n in range(count)])
        kind = type_of(dtype)
        return self.emit(f"shufflevector {kind} {text}, {kind} poison, <{count} x i32> <{order}>")

    def extremum(self, op: Op, dtype: DType, args: list[str], src: Sequence[UOp]) -> str:
        """MAX or MIN that returns NaN if either operand is: the machine's maxps returns its second operand
        then, so one operand needs a test. A constant needs none; a REG (the accumulator) goes second, off the
        chain of tests."""
        kind, compare = type_of(dtype), "ogt" if op is Ops.MAX else "olt"
        x, y = args
        if src and (src[0].op is Ops.REG or _is_number(src[0])) and not _is_number(src[1]):
            x, y = y, x
        if src and (_is_number(src[0]) or _is_number(src[1])):
            better = self.emit(f"fcmp {compare} {kind} {y}, {x}")
            return self.emit(f"select {_bool_like(kind)} {better}, {kind} {y}, {kind} {x}")
        name = f"llvm.{'maximum' if op is Ops.MAX else 'minimum'}.{suffix(dtype)}"
        return self.call(name, dtype, [(kind, x), (kind, y)], flags="nsz ")

    def int_op(self, op: Op, dtype: DType, args: list[str], src: Sequence[UOp]) -> str:
        kind, unsigned = type_of(dtype), dtype.kind == "u"
        exact = " nsw" if dtype.kind == "x" else ""
        if op in _INT_BINARY:
            return self.emit(f"{_INT_BINARY[op]}{exact if op in _WRAPS else ''} {kind} {args[0]}, {args[1]}")
        if op is Ops.NEG:
            return self.emit(f"sub {kind} {constant(0, dtype)}, {args[0]}")
        if op is Ops.MULACC:
            product = self.emit(f"mul{exact} {kind} {args[0]}, {args[1]}")
            return self.emit(f"add{exact} {kind} {product}, {args[2]}")
        if op is Ops.MAX or op is Ops.MIN:
            return self.call(
                f"llvm.{'u' if unsigned else 's'}{op.name.lower()}.{suffix(dtype)}",
                dtype,
                [(kind, a) for a in args],
            )
        if op in DOTS:
            return self.dot(op, dtype, args)
        if op is Ops.SHL or op is Ops.SHR:
            return self.shift(op, dtype, args, src)
        if op in (Ops.TRUNCDIV, Ops.TRUNCMOD, Ops.FLOORDIV, Ops.FLOORMOD):
            return self.divide(op, dtype, args, src)
        raise CompileError(
            f"LLVM renderer: {op.name} on {dtype}",
            because="LLVM has no instruction for it",
            fix="leave it out of Target.native so that codegen decomposes it",
        )

    def dot(self, op: Op, dtype: DType, args: list[str]) -> str:
        """z plus products of the parts of x and y: by the target's instruction where there is one for so many
        lanes, otherwise part by part."""
        kind, count, bits = type_of(dtype), dtype.count, DOTS[op]
        name = self.dots.get(op, {}).get(count)
        if name is None:
            return self.dot_parts(op, dtype, args)
        parts = f"<{count * 32 // bits} x {'bfloat' if op is Ops.DOT2B else f'i{bits}'}>"
        x, y = [self.emit(f"bitcast {kind} {a} to {parts}") for a in args[:2]]
        if op is Ops.DOT2:
            products = self.call(name, dtype, [(parts, x), (parts, y)])
            return self.emit(f"add {kind} {products}, {args[2]}")
        return self.call(name, dtype, [(kind, args[2]), (parts, x), (parts, y)])

    def dot_parts(self, op: Op, dtype: DType, args: list[str]) -> str:
        """Each part moved to the top and back down, which copies its sign, or not."""
        if op is Ops.DOT2B:
            return self.dot_halves(dtype, args)
        kind, bits, (x, y, total) = type_of(dtype), DOTS[op], args
        down = constant(32 - bits, dtype)
        for at in range(0, 32, bits):
            up = constant(32 - bits - at, dtype)
            a, b = [self.emit(f"shl {kind} {v}, {up}") for v in (x, y)]
            a = self.emit(f"{'lshr' if op is Ops.DOT4U else 'ashr'} {kind} {a}, {down}")
            b = self.emit(f"ashr {kind} {b}, {down}")
            total = self.emit(f"add {kind} {total}, {self.emit(f'mul {kind} {a}, {b}')}")
        return total

    def dot_halves(self, dtype: DType, args: list[str]) -> str:
        """A bfloat16 is the upper half of a float32."""
        kind, words, total = type_of(dtype), dtypes.int32.vec(dtype.count), args[2]
        whole = type_of(words)
        x, y = [self.emit(f"bitcast {kind} {a} to {whole}") for a in args[:2]]
        for step, by in (("and", -0x10000), ("shl", 16)):
            cut = [self.emit(f"{step} {whole} {v}, {constant(by, words)}") for v in (x, y)]
            a, b = [self.emit(f"bitcast {whole} {v} to {kind}") for v in cut]
            total = self.emit(f"fadd {kind} {total}, {self.emit(f'fmul {kind} {a}, {b}')}")
        return total

    def shift(self, op: Op, dtype: DType, args: list[str], src: Sequence[UOp]) -> str:
        """Shifts by a negative amount or by the width and more give 0 (SHR of a signed value: the sign)."""
        amount, width, kind = src[1], dtype.bitsize, type_of(dtype)
        left = src[0].dtype
        kind, unsigned = type_of(left), left.kind == "u"
        name = "shl" if op is Ops.SHL else "lshr" if unsigned else "ashr"
        fill = constant(width - 1, left) if name == "ashr" else constant(0, left)
        if amount.op is Ops.CONST and not isinstance(amount.arg, tuple):
            if 0 <= amount.arg < width:
                return self.emit(f"{name} {kind} {args[0]}, {constant(amount.arg, left)}")
            return self.emit(f"ashr {kind} {args[0]}, {fill}") if name == "ashr" else constant(0, left)
        inside = self.emit(f"icmp ult {type_of(amount.dtype)} {args[1]}, {constant(width, amount.dtype)}")
        by = self.resize(args[1], amount.dtype, left)
        safe = self.emit(f"select {_bool_like(kind)} {inside}, {kind} {by}, {kind} {fill}")
        shifted = self.emit(f"{name} {kind} {args[0]}, {safe}")
        if name == "ashr":
            return shifted
        return self.emit(f"select {_bool_like(kind)} {inside}, {kind} {shifted}, {kind} {constant(0, left)}")

    def divide(self, op: Op, dtype: DType, args: list[str], src: Sequence[UOp]) -> str:
        """Division with 0 for a zero divisor, and two's complement wrap for the least integer by -1."""
        kind, (x, y) = type_of(dtype), args
        unsigned = dtype.kind == "u"
        divisor = src[1] if src else None
        known = divisor is not None and divisor.op is Ops.CONST and not isinstance(divisor.arg, tuple)
        if known and divisor is not None and divisor.arg == 0:
            return constant(0, dtype)
        if dtype.kind == "x" and src and src[0].vmin >= 0 and src[1].vmin > 0:
            return self.emit(f"{'udiv' if op in (Ops.TRUNCDIV, Ops.FLOORDIV) else 'urem'} {kind} {x}, {y}")
        zero = minus = None
        if not known:
            zero = self.emit(f"icmp eq {kind} {y}, {constant(0, dtype)}")
            y = self.emit(f"select {_bool_like(kind)} {zero}, {kind} {constant(1, dtype)}, {kind} {y}")
        if not unsigned and not (known and divisor is not None and divisor.arg != -1):
            minus = self.emit(f"icmp eq {kind} {y}, {constant(-1, dtype)}")
        quotient = self.quotient(x, y, dtype, minus, known)
        if op in (Ops.TRUNCDIV, Ops.FLOORDIV) and (op is Ops.TRUNCDIV or unsigned):
            result = quotient
        else:
            product = self.emit(f"mul {kind} {quotient}, {y}")
            rest = self.emit(f"sub {kind} {x}, {product}")
            result = rest if op is Ops.TRUNCMOD or unsigned else self.floored(op, dtype, quotient, rest, y)
        if zero is None:
            return result
        return self.emit(f"select {_bool_like(kind)} {zero}, {kind} {constant(0, dtype)}, {kind} {result}")

    def floored(self, op: Op, dtype: DType, quotient: str, rest: str, y: str) -> str:
        """From truncated to floored results: one less when the remainder and the divisor differ in sign."""
        kind = type_of(dtype)
        uneven = self.emit(f"icmp ne {kind} {rest}, {constant(0, dtype)}")
        signs = self.emit(f"xor {kind} {rest}, {y}")
        differ = self.emit(f"icmp slt {kind} {signs}, {constant(0, dtype)}")
        wrong = self.emit(f"and {_bool_like(kind)} {uneven}, {differ}")
        if op is Ops.FLOORDIV:
            fixed = self.emit(f"sub {kind} {quotient}, {constant(1, dtype)}")
            return self.emit(f"select {_bool_like(kind)} {wrong}, {kind} {fixed}, {kind} {quotient}")
        fixed = self.emit(f"add {kind} {rest}, {y}")
        return self.emit(f"select {_bool_like(kind)} {wrong}, {kind} {fixed}, {kind} {rest}")

    def quotient(self, x: str, y: str, dtype: DType, minus: str | None, known: bool) -> str:
        """x / y towards zero for y != 0. Vectors of at most 32 bits divide as float64, which is exact for
        them."""
        kind, unsigned = type_of(dtype), dtype.kind == "u"
        if dtype.count > 1 and dtype.bitsize <= 32 and not known:
            wide = dtypes.float64.vec(dtype.count)
            a, b = [
                self.emit(f"{'u' if unsigned else 's'}itofp {kind} {v} to {type_of(wide)}") for v in (x, y)
            ]
            ratio = self.emit(f"fdiv {type_of(wide)} {a}, {b}")
            long = dtypes.int64.vec(dtype.count)  # so that the least integer by -1 wraps
            whole = self.emit(f"fptosi {type_of(wide)} {ratio} to {type_of(long)}")
            return self.emit(f"trunc {type_of(long)} {whole} to {kind}")
        if minus is not None:
            y = self.emit(f"select {_bool_like(kind)} {minus}, {kind} {constant(1, dtype)}, {kind} {y}")
        result = self.emit(f"{'udiv' if unsigned else 'sdiv'} {kind} {x}, {y}")
        if minus is not None:
            negative = self.emit(f"sub {kind} {constant(0, dtype)}, {x}")
            result = self.emit(f"select {_bool_like(kind)} {minus}, {kind} {negative}, {kind} {result}")
        return result

    # ---- casts

    def resize(self, text: str, source: DType, target: DType) -> str:
        """Between integer types."""
        if source.bitsize == target.bitsize:
            return text
        name = "trunc" if source.bitsize > target.bitsize else "zext" if source.kind in "ub" else "sext"
        return self.emit(f"{name} {type_of(source)} {text} to {type_of(target)}")

    def convert(self, text: str, source: DType, target: DType) -> str:
        """CAST of a value: integers wrap, floats round to nearest even, float to integer truncates and
        saturates (NaN: 0)."""
        a, b = source.scalar, target.scalar
        here, there, count = type_of(source), type_of(target), source.count
        if a is b:
            return text
        if a in _SMALL and b.kind != "b":
            return self.convert(self.widen(text, source), dtypes.float32.vec(count), target)
        if b in _SMALL:
            return self.to_small(text, source, target)
        if b.kind == "b":
            if a in _SMALL:
                text = self.emit(
                    f"shl {here} {text}, {constant_bits(1, source)}"
                )  # without the sign: -0 is false
            if a in _SMALL or not a.is_float:
                return self.emit(
                    f"icmp ne {here} {text}, zeroinitializer" if count > 1 else f"icmp ne {here} {text}, 0"
                )
            return self.emit(f"fcmp une {here} {text}, {constant(0.0, source)}")
        if a.is_float and b.is_float:
            return self.emit(f"{'fpext' if b is dtypes.float64 else 'fptrunc'} {here} {text} to {there}")
        if a.is_float and count > 1:
            return self.saturate(text, source, target)
        if a.is_float:
            name = "fptoui" if b.kind == "u" else "fptosi"
            return self.call(f"llvm.{name}.sat.{suffix(target)}.{suffix(source)}", target, [(here, text)])
        if b.is_float:
            return self.emit(f"{'uitofp' if a.kind in 'ub' else 'sitofp'} {here} {text} to {there}")
        return self.resize(text, source, target)

    def saturate(self, text: str, source: DType, target: DType) -> str:
        """Vectors of floats to integers by clamping: the saturating intrinsics would go lane by lane."""
        low, high, width = int(target.min), int(target.max), source.bitsize
        wide = target if target.bitsize >= 32 else dtypes.int32.vec(target.count)
        here, flag = type_of(source), _bool_like(type_of(source))
        top = float(high) if width == 64 else _float_of_bits(_float_bits(high))
        if top > high:  # rounded up: clamp to the float below, and repair what was above
            top = math.nextafter(top, 0.0) if width == 64 else _float_of_bits(_float_bits(top) - 1)
        original = text
        for compare, limit in (("ogt", float(low)), ("olt", top)):
            inside = self.emit(f"fcmp {compare} {here} {text}, {constant(limit, source)}")
            text = self.emit(f"select {flag} {inside}, {here} {text}, {here} {constant(limit, source)}")
        number = self.emit(f"fpto{'ui' if wide.kind == 'u' else 'si'} {here} {text} to {type_of(wide)}")
        if top < high:
            above = self.emit(f"fcmp ogt {here} {original}, {constant(top, source)}")
            number = self.emit(
                f"select {flag} {above}, {type_of(wide)} {constant(high, wide)}, {type_of(wide)} {number}"
            )
        nan = self.emit(f"fcmp uno {here} {original}, {original}")
        number = self.emit(
            f"select {flag} {nan}, {type_of(wide)} {constant(0, wide)}, {type_of(wide)} {number}"
        )
        return number if wide is target else self.resize(number, wide, target)

    def to_small(self, text: str, source: DType, target: DType) -> str:
        """Any type to float16, bfloat16 or an 8-bit float: through float32, rounded once."""
        single = dtypes.float32.vec(source.count)
        if source.scalar is dtypes.float64 or (source.kind in "iux" and source.bitsize > 16):
            return self.narrow(
                self.round_to_odd(self.convert(text, source, dtypes.float64.vec(source.count)), source.count),
                target,
            )
        return self.narrow(self.convert(text, source, single), target)

    def round_to_odd(self, text: str, count: int) -> str:
        """float64 -> float32 such that rounding once more gives what rounding once would: an inexact result
        has its last bit set (Boldo and Melquiond 2008)."""
        double, single, bits = dtypes.float64.vec(count), dtypes.float32.vec(count), dtypes.int32.vec(count)
        d, f, i, flag = type_of(double), type_of(single), type_of(bits), _bool_like(type_of(bits))
        near = self.emit(f"fptrunc {d} {text} to {f}")
        back = self.emit(f"fpext {f} {near} to {d}")
        pattern = self.emit(f"bitcast {f} {near} to {i}")
        magnitudes = [self.call(f"llvm.fabs.{suffix(double)}", double, [(d, v)]) for v in (back, text)]
        above = self.emit(f"fcmp ogt {d} {magnitudes[0]}, {magnitudes[1]}")
        step = self.emit(f"select {flag} {above}, {i} {constant(-1, bits)}, {i} {constant(1, bits)}")
        inexact = self.emit(f"fcmp one {d} {back}, {text}")
        last = self.emit(f"trunc {i} {pattern} to {flag}")
        even = self.emit(f"xor {flag} {last}, {'splat (i1 true)' if count > 1 else 'true'}")
        move = self.emit(f"and {flag} {inexact}, {even}")
        moved = self.emit(f"add {i} {pattern}, {step}")
        return self.emit(
            f"bitcast {i} {self.emit(f'select {flag} {move}, {i} {moved}, {i} {pattern}')} to {f}"
        )

    def widen(self, text: str, dtype: DType) -> str:
        """Bits of a small float -> float32, exactly."""
        count, scalar = dtype.count, dtype.scalar
        if scalar is dtypes.float16 and self.half:
            half = "half" if count == 1 else f"<{count} x half>"
            cast = self.emit(f"bitcast {type_of(dtype)} {text} to {half}")
            return self.emit(f"fpext {half} {cast} to {type_of(dtypes.float32.vec(count))}")
        bits, single = dtypes.int32.vec(count), dtypes.float32.vec(count)
        i, f, flag, info = type_of(bits), type_of(single), _bool_like(type_of(bits)), FLOAT_INFO[scalar]
        whole = self.emit(f"zext {type_of(dtype)} {text} to {i}")
        if scalar is dtypes.bfloat16:
            return self.emit(f"bitcast {i} {self.emit(f'shl {i} {whole}, {constant(16, bits)}')} to {f}")
        size = (1 << (scalar.bitsize - 1)) - 1
        magnitude = self.emit(f"and {i} {whole}, {constant(size, bits)}")
        sign = self.emit(
            f"shl {i} {self.emit(f'xor {i} {whole}, {magnitude}')}, {constant(32 - scalar.bitsize, bits)}"
        )
        moved = self.emit(f"shl {i} {magnitude}, {constant(23 - info.mantissa, bits)}")
        tiny = self.emit(f"bitcast {i} {moved} to {f}")
        scaled = self.emit(
            f"fmul {f} {tiny}, {constant(2.0 ** (127 - info.bias), single)}"
        )  # denormals come out right too
        pattern = self.emit(f"bitcast {f} {scaled} to {i}")
        limit = (
            ((1 << info.exponent) - 1) << info.mantissa if info.has_inf else size
        )  # from here on: inf and NaN
        odd = self.emit(f"icmp uge {i} {magnitude}, {constant(limit, bits)}")
        filled = self.emit(f"or {i} {moved}, {constant(0x7F800000, bits)}")
        chosen = self.emit(f"select {flag} {odd}, {i} {filled}, {i} {pattern}")
        return self.emit(f"bitcast {i} {self.emit(f'or {i} {chosen}, {sign}')} to {f}")

    def narrow(self, text: str, dtype: DType) -> str:
        """float32 -> bits of a small float, to nearest even."""
        count, scalar = dtype.count, dtype.scalar
        bits, single = dtypes.int32.vec(count), dtypes.float32.vec(count)
        i, f, flag, kind = type_of(bits), type_of(single), _bool_like(type_of(bits)), type_of(dtype)
        if scalar is dtypes.float16 and self.half:
            half = "half" if count == 1 else f"<{count} x half>"
            return self.emit(f"bitcast {half} {self.emit(f'fptrunc {f} {text} to {half}')} to {kind}")
        info = FLOAT_INFO[scalar]
        shift = 23 - info.mantissa
        whole = self.emit(f"bitcast {f} {text} to {i}")
        magnitude = self.emit(f"and {i} {whole}, {constant(0x7FFFFFFF, bits)}")
        sign = self.emit(
            f"lshr {i} {self.emit(f'xor {i} {whole}, {magnitude}')}, {constant(32 - scalar.bitsize, bits)}"
        )
        last = self.emit(
            f"and {i} {self.emit(f'lshr {i} {magnitude}, {constant(shift, bits)}')}, {constant(1, bits)}"
        )
        rounded = self.emit(
            f"add {i} {magnitude}, {self.emit(f'add {i} {last}, {constant((1 << (shift - 1)) - 1, bits)}')}"
        )
        result = self.emit(f"lshr {i} {rounded}, {constant(shift, bits)}")
        if info.bias != 127:  # re-bias, and let an addition round what is denormal in the small type
            result = self.emit(f"sub {i} {result}, {constant((127 - info.bias) << info.mantissa, bits)}")
            magic = 2.0 ** (1 - info.bias - info.mantissa + 23)
            summed = self.emit(
                f"fadd {f} {self.emit(f'bitcast {i} {magnitude} to {f}')}, {constant(magic, single)}"
            )
            denormal = self.emit(
                f"sub {i} {self.emit(f'bitcast {f} {summed} to {i}')}, {constant(_float_bits(magic), bits)}"
            )
            small = self.emit(f"icmp ult {i} {magnitude}, {constant((128 - info.bias) << 23, bits)}")
            result = self.emit(f"select {flag} {small}, {i} {denormal}, {i} {result}")
        top = ((1 << info.exponent) - 1) << info.mantissa if info.has_inf else (1 << (scalar.bitsize - 1)) - 1
        result = self.call(f"llvm.umin.{suffix(bits)}", bits, [(i, result), (i, constant(top, bits))])
        nan = self.emit(f"icmp ugt {i} {magnitude}, {constant(0x7F800000, bits)}")
        result = self.emit(
            f"select {flag} {nan}, {i} {constant(small_float_bits(math.nan, scalar), bits)}, {i} {result}"
        )
        return self.emit(f"trunc {i} {self.emit(f'or {i} {result}, {sign}')} to {kind}")


def constant_bits(value: int, dtype: DType) -> str:
    """An integer literal in the register type of a small float."""
    return str(value) if dtype.count == 1 else f"splat (i{dtype.bitsize} {value})"


def _float_bits(value: float) -> int:
    return int(struct.unpack("I", struct.pack("f", value))[0])


def _float_of_bits(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def _is_number(node: UOp) -> bool:
    """A constant that is not NaN in any lane."""
    if node.op is not Ops.CONST:
        return node.op is Ops.BROADCAST and _is_number(node.src[0])
    values = node.arg if isinstance(node.arg, tuple) else (node.arg,)
    return all(value == value for value in values)


def _bool_like(kind: str) -> str:
    """The bool type with the lanes of a register type."""
    return kind[: kind.index("x")] + "x i1>" if kind[0] == "<" else "i1"


_FLOAT_BINARY = {Ops.ADD: "fadd", Ops.SUB: "fsub", Ops.MUL: "fmul", Ops.FDIV: "fdiv"}
_FLOAT_INTRINSIC = {Ops.SQRT: "sqrt", Ops.TRUNC: "trunc", Ops.FLOOR: "floor", Ops.MULACC: "fma"}
_INT_BINARY = {Ops.ADD: "add", Ops.SUB: "sub", Ops.MUL: "mul", Ops.AND: "and", Ops.OR: "or", Ops.XOR: "xor"}
_WRAPS = (Ops.ADD, Ops.SUB, Ops.MUL)
BOOL_OPS = {
    Ops.ADD: "or",
    Ops.MUL: "and",
    Ops.MAX: "or",
    Ops.MIN: "and",
    Ops.AND: "and",
    Ops.OR: "or",
    Ops.XOR: "xor",
}
_ICMP = {
    Ops.CMPLT: ("slt", "ult"),
    Ops.CMPLE: ("sle", "ule"),
    Ops.CMPEQ: ("eq", "eq"),
    Ops.CMPNE: ("ne", "ne"),
}
_FCMP = {Ops.CMPLT: "olt", Ops.CMPLE: "ole", Ops.CMPEQ: "oeq", Ops.CMPNE: "une"}
