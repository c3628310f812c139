"""Linear program -> C with vector extensions, for gcc (>= 12) and clang. The values are those of the LLVM
renderer.

Types: i8 … u64, f32, f64; small floats are u16 or u8 bits; a vector of 8 float32 is f32x8 (lanes are rounded
up to a power of two, the extra ones hold anything). A scalar bool is _Bool; a bool vector is a mask: integers
0 or -1, of whatever width the comparison had, converted where it is used. What the vector extension lacks is
a loop over the lanes, which compilers vectorise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from whit.helpers import CompileError
from whit.renderer import scratch_alignment
from whit.renderer.llvm_values import small_float_bits
from whit.uop import DType, Op, Ops, PyConst, UOp, dtypes
from whit.uop.dtype import FLOAT_INFO
from whit.uop.uop import variables_of

_SMALL = (dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2)

_PRELUDE = """\
typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned u32; typedef long long i64; typedef unsigned long long u64;
typedef float f32; typedef double f64; typedef union { f32 f; u32 i; } word;
"""

# float64 -> float32 such that a second rounding gives what one rounding would: inexact results get an odd
# last bit
_TO_ODD = """\
static inline f32 to_odd(f64 x) {
  word w = {.f = (f32)x};
  f64 back = w.f;
  if (back == back && back != x && !(w.i & 1)) w.i += __builtin_fabs(back) > __builtin_fabs(x) ? -1 : 1;
  return w.f;
}
"""

# clang has one builtin for non-temporal stores, gcc one for each width and none that is general
_STREAM_PRELUDE = """\
#if __has_builtin(__builtin_nontemporal_store)
#define STREAM(kind, p, v) __builtin_nontemporal_store(v, (kind *)(p))
#elif defined(__x86_64__)
typedef f32 line_4 __attribute__((vector_size(16)));
typedef f32 line_8 __attribute__((vector_size(32)));
typedef f32 line_16 __attribute__((vector_size(64)));
#ifdef __AVX512F__
#define STREAM_64(p, v) __builtin_ia32_movntps512((f32 *)(p), *(line_16 *)&(v))
#else
#define STREAM_64(p, v) *(__typeof__(v) *)(p) = v
#endif
#ifdef __AVX__
#define STREAM_32(p, v) __builtin_ia32_movntps256((f32 *)(p), *(line_8 *)&(v))
#else
#define STREAM_32(p, v) *(__typeof__(v) *)(p) = v
#endif
#define STREAM(kind, p, v) do { \
  if (sizeof(v) == 64) { STREAM_64(p, v); } else if (sizeof(v) == 32) { STREAM_32(p, v); } \
  else __builtin_ia32_movntps((f32 *)(p), *(line_4 *)&(v)); } while (0)
#else
#define STREAM(kind, p, v) (*(kind *)(p) = (v))
#endif
#ifdef __x86_64__
#define STREAM_END __builtin_ia32_sfence()
#else
#define STREAM_END
#endif
"""
_STREAM = """\
static inline void stream_KIND(void *p, KIND v, _Bool aligned) {
  if (aligned) STREAM(KIND, p, v);
  else *(KIND_ *)p = v;
}
"""


def _lane_type(dtype: DType) -> str:
    """The C type of one lane in memory or in a vector."""
    if dtype in _SMALL:
        return f"u{dtype.bitsize}"
    if dtype.kind == "b":
        return "u8"
    return ("i" if dtype.kind == "x" else dtype.kind) + str(dtype.bitsize)


def _scalar_type(dtype: DType) -> str:
    return "_Bool" if dtype.kind == "b" else _lane_type(dtype)


def _lanes(count: int) -> int:
    """Lanes of the C vector that holds `count`."""
    return 1 << (count - 1).bit_length()


def _literal(value: PyConst, dtype: DType) -> str:
    """One value of a scalar type."""
    if dtype in _SMALL:
        return str(small_float_bits(float(value), dtype))
    if dtype.is_float:
        end = "f" if dtype is dtypes.float32 else ""
        number = float(value)
        if math.isnan(number):
            return f'__builtin_nan{end}("")'
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}__builtin_inf{end}()"
        return f"{number.hex()}{end}"
    number = int(value)
    if dtype.kind == "b":
        return str(number)
    if number == -(1 << 63):
        return "(-9223372036854775807LL - 1)"
    kind = (
        "ULL"
        if dtype is dtypes.uint64
        else "LL"
        if dtype.bitsize == 64
        else "U"
        if dtype is dtypes.uint32
        else ""
    )
    return f"({number}{kind})" if number < 0 else f"{number}{kind}"


class CRenderer:
    """Renders one linear program; make a new one for each. `half`: the target converts float16 in hardware.

    A kernel is `void name(void **buffers, const int64_t *variables, int64_t thread)`.
    """

    def __init__(self, half: bool = True) -> None:
        self.half = half
        self.lines: list[str] = []
        self.types: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.names: dict[UOp, str] = {}
        self.mask_bits: dict[str, int] = {}  # width of the lanes of a named mask
        self.count = 0
        self.depth = 1
        self.streamed: set[UOp] = set()  # PARAMs of non-temporal stores

    # ---- emission

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def vector(self, lane: str, count: int) -> str:
        """Declare and name a vector type. The second type, with _, is for memory: as aligned as one lane."""
        lanes = _lanes(count)
        name = f"{lane}x{lanes}"
        if name not in self.types:
            size = int(lane[1:]) // 8
            self.types[name] = (
                f"typedef {lane} {name} __attribute__((vector_size({size * lanes})));\n"
                f"typedef {lane} {name}_ "
                f"__attribute__((vector_size({size * lanes}), aligned({size}), may_alias));"
            )
        return name

    def type_of(self, dtype: DType, bits: int = 8) -> str:
        """The C type of a value; masks have lanes of `bits`."""
        if dtype.count == 1:
            return _scalar_type(dtype)
        return self.vector(f"i{bits}" if dtype.kind == "b" else _lane_type(dtype.scalar), dtype.count)

    def define(self, kind: str, text: str) -> str:
        """A named value."""
        self.count += 1
        self.line(f"const {kind} v{self.count} = {text};")
        return f"v{self.count}"

    def mask(self, text: str, bits: int, count: int) -> str:
        """A named mask with lanes of `bits`."""
        name = self.define(self.vector(f"i{bits}", count), text)
        self.mask_bits[name] = bits
        return name

    def as_mask(self, text: str, bits: int, count: int) -> str:
        """A mask with lanes of that width."""
        if self.mask_bits[text] == bits:
            return text
        return self.mask(f"__builtin_convertvector({text}, {self.vector(f'i{bits}', count)})", bits, count)

    def by_lane(self, dtype: DType, expression: str, *args: str) -> str:
        """A vector computed lane by lane: {0}, {1}, … in the expression stand for the lanes of the arguments,
        k for the number."""
        self.count += 1
        name = f"v{self.count}"
        bits = 8
        self.line(f"{self.type_of(dtype, bits)} {name};")
        lanes = [f"{a}[k]" for a in args]
        self.line(f"for (int k = 0; k < {dtype.count}; k++) {name}[k] = {expression.format(*lanes)};")
        if dtype.kind == "b":
            self.mask_bits[name] = bits
        return name

    def value(self, node: UOp) -> str:
        """The operand text of a node: a name, or a literal."""
        if node.op is not Ops.CONST:
            return self.names[node]
        dtype = node.dtype
        if dtype.count == 1:
            return _literal(node.arg, dtype)
        values = node.arg if isinstance(node.arg, tuple) else (node.arg,) * dtype.count
        values = (*values, *(values[-1],) * (_lanes(dtype.count) - dtype.count))
        if dtype.kind == "b":
            return self.mask(
                f"({self.type_of(dtype)}){{{', '.join([str(-int(v)) for v in values])}}}", 8, dtype.count
            )
        kind = self.type_of(dtype)
        return self.define(kind, f"({kind}){{{', '.join([_literal(v, dtype.scalar) for v in values])}}}")

    # ---- the program

    def render(self, linear: UOp, name: str) -> str:
        """The text of a LINEAR.

        >>> "void empty(" in CRenderer().render(UOp(Ops.LINEAR), "empty")
        True
        """
        self.streamed = {node.src[0] for node in linear.src if node.op is Ops.STORE and node.arg is not None}
        for position, node in enumerate(variables_of(linear.src)):
            self.names[node] = f"var{position}"
            self.line(f"const i64 var{position} = variables[{position}];")
        for node in linear.src:
            op = node.op
            if op is Ops.CONST:
                continue
            special = _INSTRUCTIONS.get(op)
            if special is not None:
                special(self, node)
            elif op.is_alu:
                self.names[node] = self.alu(
                    op, node.dtype, [s.dtype for s in node.src], [self.value(s) for s in node.src]
                )
            else:
                raise CompileError(
                    f"kernel {name}: C cannot spell {op.name}",
                    because="it is no instruction of a linear program",
                    fix="report this kernel with DEBUG=6",
                )
        head = f"void {name}(void *const *buffers, const i64 *variables, i64 thread) {{"
        end = ["  STREAM_END;", "}", ""] if self.streamed else ["}", ""]
        prelude = [_PRELUDE, _STREAM_PRELUDE] if self.streamed else [_PRELUDE]
        return "\n".join(
            [*prelude, *self.types.values(), *self.functions.values(), head, *self.lines, *end]
        )

    def param(self, node: UOp) -> None:
        slot, kind = node.arg.slot, _lane_type(node.dtype)
        self.names[node] = f"p{slot}"
        self.line(f"{kind} *const restrict p{slot} = buffers[{slot}];")
        if node in self.streamed:
            self.line(f"const _Bool p{slot}_aligned = (u64)p{slot} % 64 == 0;")

    def nothing(self, node: UOp) -> None:
        """VAR is declared at the top; a CPU task is alone in its group, so BARRIER does nothing."""

    def special(self, node: UOp) -> None:
        self.names[node] = "thread" if node.arg.name == "thread" else "0LL"

    def range(self, node: UOp) -> None:
        self.count += 1
        name = self.names[node] = f"n{self.count}"
        self.line(f"for (i64 {name} = 0; {name} < {self.value(node.src[0])}; {name}++) {{")
        self.depth += 1

    def if_(self, node: UOp) -> None:
        self.line(f"if ({self.value(node.src[0])}) {{")
        self.depth += 1

    def close(self, node: UOp) -> None:
        self.depth -= 1
        self.line("}")

    def reg(self, node: UOp) -> None:
        self.count += 1
        name = self.names[node] = f"r{self.count}"
        if node.dtype.kind == "b" and node.dtype.count > 1:
            self.mask_bits[name] = 8
        self.line(f"{self.type_of(node.dtype)} {name} = {self.held(node.src[0])};")

    def set(self, node: UOp) -> None:
        target = node.src[0]
        while target.op is not Ops.REG:
            target = target.src[0]
        self.line(f"{self.names[target]} = {self.held(node.src[1])};")

    def held(self, node: UOp) -> str:
        """A value as a REG keeps it: masks in bytes."""
        text = self.value(node)
        return (
            self.as_mask(text, 8, node.dtype.count)
            if node.dtype.kind == "b" and node.dtype.count > 1
            else text
        )

    def local(self, node: UOp) -> None:
        self.names[node] = name = f"local{node.arg.uid}"
        kind, size = _lane_type(node.dtype.scalar), max(1, node.arg.size)
        align = scratch_alignment(node, bool(self.streamed))
        self.line(f"{kind} {name}[{size}] __attribute__((aligned({align})));")

    # ---- memory

    def load(self, node: UOp) -> None:
        memory, index = self.names[node.src[0]], self.value(node.src[1])
        mask = self.value(node.src[2]) if len(node.src) > 2 else None
        dtype, count = node.dtype, node.dtype.count
        raw = dtypes.uint8.vec(count) if dtype.kind == "b" else dtype
        if count == 1:
            read = f"{memory}[{index}]" + (" != 0" if dtype.kind == "b" else "")
            text = self.define(self.type_of(dtype), read if mask is None else f"{mask} ? {read} : 0")
        elif node.src[1].dtype.count > 1:
            read = memory + "[{0}]"
            text = (
                self.by_lane(raw, read, index)
                if mask is None
                else self.by_lane(raw, "{1} ? " + read + " : 0", index, mask)
            )
        elif mask is not None:
            text = self.by_lane(raw, f"{{0}} ? {memory}[{index} + k] : 0", mask)
        elif _lanes(count) == count:
            kind = self.type_of(raw)
            text = self.define(kind, f"*(const {kind}_ *)({memory} + {index})")
        else:
            text = self.by_lane(raw, f"{memory}[{index} + k]")
        self.names[node] = self.mask(f"{text} != 0", 8, count) if dtype.kind == "b" and count > 1 else text

    def prefetch(self, node: UOp) -> None:
        place = f"{self.names[node.src[0]]} + {self.value(node.src[1])}"
        self.line(f"__builtin_prefetch({place}, 0, {node.arg});")

    def store(self, node: UOp) -> None:
        memory, index, value = self.names[node.src[0]], self.value(node.src[1]), node.src[2]
        mask = self.value(node.src[3]) if len(node.src) > 3 else None
        dtype, count = value.dtype, value.dtype.count
        text = self.value(value)
        if count == 1:
            guard = "" if mask is None else f"if ({mask}) "
            self.line(f"{guard}{memory}[{index}] = {text};")
            return
        if dtype.kind == "b":
            bytes_ = self.vector("u8", count)
            text = self.define(bytes_, f"({bytes_})({self.as_mask(text, 8, count)} & 1)")
        if node.src[1].dtype.count == 1 and mask is None and _lanes(count) == count:
            kind = self.vector(_lane_type(dtype.scalar), count)
            place = f"{memory} + {index}"
            if node.arg is None:
                self.line(f"*({kind}_ *)({place}) = {text};")
            else:
                self.line(f"{self.stream(kind)}({place}, {text}, {memory}_aligned);")
            return
        place = f"{index}[k]" if node.src[1].dtype.count > 1 else f"{index} + k"
        guard = "" if mask is None else f"if ({mask}[k]) "
        self.line(f"for (int k = 0; k < {count}; k++) {guard}{memory}[{place}] = {text}[k];")

    def stream(self, kind: str) -> str:
        """The name of a function for non-temporal stores of a vector type; plain ones into memory that is not
        aligned, and where the compiler has nothing for it."""
        name = f"stream_{kind}"
        self.functions[name] = _STREAM.replace("KIND", kind)
        return name

    # ---- lanes

    def lanes(self, node: UOp, values: Sequence[str]) -> None:
        """A vector of scalar texts."""
        dtype = node.dtype
        values = [*values, *[values[-1]] * (_lanes(dtype.count) - dtype.count)]
        kind = self.type_of(dtype)
        if dtype.kind == "b":
            self.names[node] = self.mask(
                f"({kind}){{{', '.join([f'-({v})' for v in values])}}}", 8, dtype.count
            )
        else:
            self.names[node] = self.define(kind, f"({kind}){{{', '.join(values)}}}")

    def broadcast(self, node: UOp) -> None:
        self.lanes(node, [self.value(node.src[0])] * node.dtype.count)

    def stack(self, node: UOp) -> None:
        self.lanes(node, [self.value(s) for s in node.src])

    def lane(self, text: str, dtype: DType, number: int) -> str:
        return f"({text}[{number}] != 0)" if dtype.kind == "b" else f"{text}[{number}]"

    def extract(self, node: UOp) -> None:
        source = node.src[0]
        self.names[node] = self.define(
            self.type_of(node.dtype), self.lane(self.value(source), source.dtype, node.arg)
        )

    def shuffle(self, node: UOp) -> None:
        text, dtype = self.value(node.src[0]), node.src[0].dtype
        self.lanes(node, [self.lane(text, dtype, number) for number in node.arg])

    def fold(self, node: UOp) -> None:
        """Halve until one lane is left (the same order as the LLVM renderer's); odd lanes are folded in at
        the end."""
        source, op = node.src[0], node.arg
        text, dtype = self.value(source), source.dtype
        odd: list[str] = []
        while dtype.count > 1:
            half, scalar = dtype.count // 2, dtype.scalar
            if dtype.count % 2:
                odd.append(self.define(self.type_of(scalar), self.lane(text, dtype, dtype.count - 1)))
            if half == 1:
                parts = [self.define(self.type_of(scalar), self.lane(text, dtype, n)) for n in (0, 1)]
            else:
                parts = [self.part(text, dtype, first, half) for first in (0, half)]
            dtype = scalar.vec(half)
            text = self.alu(op, dtype, [dtype, dtype], parts)
        for lane in odd:
            text = self.alu(op, dtype, [dtype, dtype], [text, lane])
        self.names[node] = text

    def part(self, text: str, dtype: DType, first: int, count: int) -> str:
        """Consecutive lanes as a vector."""
        numbers = [min(first + k, dtype.count - 1) for k in range(_lanes(count))]
        if dtype.kind == "b":
            bits = self.mask_bits[text]
            kind = self.vector(f"i{bits}", count)
            return self.mask(f"({kind}){{{', '.join([f'{text}[{n}]' for n in numbers])}}}", bits, count)
        kind = self.vector(_lane_type(dtype.scalar), count)
        return self.define(kind, f"({kind}){{{', '.join([f'{text}[{n}]' for n in numbers])}}}")

    # ---- arithmetic

    def alu(self, op: Op, dtype: DType, types: Sequence[DType], args: list[str]) -> str:
        """An ALU op: a named value."""
        operand = types[-1]
        if op is Ops.WHERE:
            return self.where(dtype, args)
        if operand.scalar in _SMALL:
            wide = dtypes.float32.vec(operand.count)
            args = [self.widen(a, operand) for a in args]
            if op.category == "compare":
                return self.alu(op, dtype, [wide] * len(args), args)
            return self.narrow(self.alu(op, wide, [wide] * len(args), args), operand)
        if op.category == "compare":
            return self.compare(op, operand, args)
        if operand.kind == "b":
            return self.logic(_BOOL[op], operand, args)
        symbol = _SYMBOLS.get(op)
        kind = self.type_of(dtype)
        if symbol is not None and len(args) == 2:
            return self.define(kind, f"{args[0]} {symbol} {args[1]}")
        if op is Ops.NEG:
            return self.define(kind, f"-{args[0]}")
        if dtype.count > 1 and (op is Ops.MAX or op is Ops.MIN):
            return self.extremum(op, dtype, args)
        if dtype.count > 1 and op in _FLOAT_FUNCTION and dtype.is_float:
            name = f"v{_FLOAT_FUNCTION[op]}"
            self.functions[name] = _BY_LANE_FALLBACK[op]
            return self.define(kind, f"{name}({', '.join(args)})")
        expression = self.expression(op, dtype.scalar, types)
        if dtype.count == 1:
            return self.define(kind, expression.format(*args))
        return self.by_lane(dtype, expression, *args)

    def extremum(self, op: Op, dtype: DType, args: list[str]) -> str:
        """MAX or MIN of vectors; NaN if either is NaN."""
        better = f"{args[0]} {'>' if op is Ops.MAX else '<'} {args[1]}"
        if dtype.is_float:
            better = f"({better}) | ({args[0]} != {args[0]})"
        return self.where(dtype, [self.mask(better, dtype.bitsize, dtype.count), *args])

    def expression(self, op: Op, scalar: DType, types: Sequence[DType]) -> str:
        """C for one lane, with {0}, {1}, … for the operands."""
        end, kind = "f" if scalar is dtypes.float32 else "", _scalar_type(scalar)
        if scalar.is_float:
            if op in _FLOAT_FUNCTION:
                return (
                    f"__builtin_{_FLOAT_FUNCTION[op]}{end}("
                    + ", ".join([f"{{{n}}}" for n in range(op.arity or 1)])
                    + ")"
                )
            if op is Ops.RECIPROCAL:
                return f"1.0{end} / {{0}}"
            if op is Ops.MAX or op is Ops.MIN:
                return f"({{0}} {'>' if op is Ops.MAX else '<'} {{1}} || {{0}} != {{0}}) ? {{0}} : {{1}}"
        elif op is Ops.MAX or op is Ops.MIN:
            return f"{{0}} {'>' if op is Ops.MAX else '<'} {{1}} ? {{0}} : {{1}}"
        elif op is Ops.MULACC:
            return "{0} * {1} + {2}"
        elif op is Ops.SHL:
            return f"(u64){{1}} < {scalar.bitsize} ? ({kind})({{0}} << {{1}}) : 0"
        elif op is Ops.SHR:
            fill = f"{{0}} >> {scalar.bitsize - 1}" if scalar.kind != "u" else "0"
            return f"(u64){{1}} < {scalar.bitsize} ? {{0}} >> {{1}} : {fill}"
        elif op in (Ops.TRUNCDIV, Ops.TRUNCMOD, Ops.FLOORDIV, Ops.FLOORMOD):
            return f"{self.division(op, scalar)}({{0}}, {{1}})"
        raise CompileError(
            f"C renderer: {op.name} on {scalar}",
            because="C has no operator for it",
            fix="leave it out of Target.native so that codegen decomposes it",
        )

    def division(self, op: Op, scalar: DType) -> str:
        """The name of a function that divides: 0 for a zero divisor, wrap for the least integer by -1."""
        kind = _scalar_type(scalar)
        name = f"{op.name.lower()}_{kind}"
        if name not in self.functions:
            minus = (
                ""
                if scalar.kind == "u"
                else f"  if (y == -1) return {'-x' if op in (Ops.TRUNCDIV, Ops.FLOORDIV) else '0'};\n"
            )
            floored = scalar.kind != "u" and op in (Ops.FLOORDIV, Ops.FLOORMOD)
            quotient, rest = "x / y", "x % y"
            if floored:
                wrong = "((x % y != 0) & ((x % y < 0) != (y < 0)))"
                quotient, rest = f"x / y - {wrong}", f"x % y + ({wrong} ? y : 0)"
            result = quotient if op in (Ops.TRUNCDIV, Ops.FLOORDIV) else rest
            self.functions[name] = (
                f"static inline {kind} {name}({kind} x, {kind} y) {{\n  if (y == 0) return 0;\n{minus}"
                f"  return {result};\n}}"
            )
        return name

    def where(self, dtype: DType, args: list[str]) -> str:
        count = dtype.count
        if count == 1:
            return self.define(self.type_of(dtype), f"{args[0]} ? {args[1]} : {args[2]}")
        if dtype.kind == "b":
            bits = self.mask_bits[args[1]]
            chosen, yes, no = [self.as_mask(a, bits, count) for a in args]
            return self.mask(f"({chosen} & {yes}) | (~{chosen} & {no})", bits, count)
        bits, kind = dtype.scalar.bitsize, self.type_of(dtype)
        chosen, whole = self.as_mask(args[0], bits, count), self.vector(f"i{bits}", count)
        return self.define(
            kind, f"({kind})(({chosen} & ({whole}){args[1]}) | (~{chosen} & ({whole}){args[2]}))"
        )

    def compare(self, op: Op, operand: DType, args: list[str]) -> str:
        symbol, count = _COMPARE[op], operand.count
        if count == 1:
            return self.define("_Bool", f"{args[0]} {symbol} {args[1]}")
        if operand.kind == "b":  # false < true, but their masks are 0 and -1
            bits = self.mask_bits[args[0]]
            other = self.as_mask(args[1], bits, count)
            return self.mask(f"-{args[0]} {symbol} -{other}", bits, count)
        return self.mask(f"{args[0]} {symbol} {args[1]}", operand.scalar.bitsize, count)

    def logic(self, symbol: str, operand: DType, args: list[str]) -> str:
        if operand.count == 1:
            return self.define("_Bool", f"{args[0]} {symbol} {args[1]}")
        bits = self.mask_bits[args[0]]
        return self.mask(
            f"{args[0]} {symbol} {self.as_mask(args[1], bits, operand.count)}", bits, operand.count
        )

    # ---- casts

    def cast(self, node: UOp) -> None:
        self.names[node] = self.convert(self.value(node.src[0]), node.src[0].dtype, node.dtype)

    def bitcast(self, node: UOp) -> None:
        source, text = node.src[0].dtype, self.value(node.src[0])
        here, there = self.type_of(source), self.type_of(node.dtype)
        if (source.count > 1 and node.dtype.count > 1) or here == there:
            self.names[node] = self.define(there, f"({there}){text}")
            return
        self.names[node] = self.define(there, f"((union {{ {here} a; {there} b; }}){{.a = {text}}}).b")

    def convert(self, text: str, source: DType, target: DType) -> str:
        """CAST of a value: integers wrap, floats round to nearest even, float to integer truncates and
        saturates (NaN: 0)."""
        a, b, count = source.scalar, target.scalar, source.count
        if a is b:
            return text
        if b.kind == "b":
            nonzero = f"({text} & {(1 << (a.bitsize - 1)) - 1})" if a in _SMALL else text  # -0 is false
            return (
                self.define("_Bool", f"{nonzero} != 0")
                if count == 1
                else self.mask(f"{nonzero} != 0", a.bitsize, count)
            )
        if a in _SMALL:
            return self.convert(self.widen(text, source), dtypes.float32.vec(count), target)
        if b in _SMALL:
            if a is dtypes.float64 or (a.kind in "iux" and a.bitsize > 16):
                double = self.convert(text, source, dtypes.float64.vec(count))
                self.functions["to_odd"] = _TO_ODD
                single = dtypes.float32.vec(count)
                odd = (
                    self.define("f32", f"to_odd({double})")
                    if count == 1
                    else self.by_lane(single, "to_odd({0})", double)
                )
                return self.narrow(odd, target)
            return self.narrow(self.convert(text, source, dtypes.float32.vec(count)), target)
        if a.is_float and not b.is_float:
            saturating = self.saturate(a, b)
            return (
                self.define(_scalar_type(b), saturating.format(text))
                if count == 1
                else self.by_lane(target, saturating, text)
            )
        kind = self.type_of(target)
        if count == 1:
            return self.define(kind, f"({kind}){text}")
        if a.kind == "b":
            return self.convert_mask(text, target)
        return self.define(kind, f"__builtin_convertvector({text}, {kind})")

    def convert_mask(self, text: str, target: DType) -> str:
        """A mask to 0 and 1 of another type."""
        kind, bits = self.type_of(target), target.scalar.bitsize
        ones = self.as_mask(text, bits, target.count)
        if target.is_float:
            return self.define(kind, f"__builtin_convertvector({ones} & 1, {kind})")
        return self.define(kind, f"({kind})({ones} & 1)")

    def saturate(self, source: DType, target: DType) -> str:
        """C for one lane of float to integer."""
        low, high = int(target.min), int(target.max)
        kind = _scalar_type(target)
        above = _literal(float(high + 1), source)
        below = _literal(float(low), source)
        return (
            f"{{0}} != {{0}} ? 0 : {{0}} >= {above} ? {_literal(high, target)} : {{0}} <= {below} ? "
            f"{_literal(low, target)} : ({kind}){{0}}"
        )

    def widen(self, text: str, dtype: DType) -> str:
        """Bits of a small float -> float32, exactly."""
        function = self.widener(dtype.scalar)
        if dtype.count == 1:
            return self.define("f32", f"{function}({text})")
        return self.by_lane(dtypes.float32.vec(dtype.count), f"{function}({{0}})", text)

    def narrow(self, text: str, dtype: DType) -> str:
        """float32 -> bits of a small float, to nearest even."""
        function = self.narrower(dtype.scalar)
        if dtype.count == 1:
            return self.define(_scalar_type(dtype), f"{function}({text})")
        return self.by_lane(dtype, f"{function}({{0}})", text)

    def widener(self, dtype: DType) -> str:
        name, kind, info = f"from_{dtype.name}", _lane_type(dtype), FLOAT_INFO[dtype]
        if name in self.functions:
            return name
        size = (1 << (dtype.bitsize - 1)) - 1
        limit = ((1 << info.exponent) - 1) << info.mantissa if info.has_inf else size
        if dtype is dtypes.float16 and self.half:
            body = "  return ((union { u16 i; _Float16 f; }){.i = x}).f;"
        elif dtype is dtypes.bfloat16:
            body = "  return ((word){.i = (u32)x << 16}).f;"
        else:  # scaling by a power of two gets denormals right too
            scale = _literal(2.0 ** (127 - info.bias), dtypes.float32)
            body = (
                f"  u32 m = x & {size}, sign = (u32)(x ^ m) << {32 - dtype.bitsize};\n"
                f"  word w = {{.i = m << {23 - info.mantissa}}}, r = {{.f = w.f * {scale}}};\n"
                f"  r.i = (m >= {limit} ? w.i | 0x7F800000 : r.i) | sign;\n  return r.f;"
            )
        self.functions[name] = f"static inline f32 {name}({kind} x) {{\n{body}\n}}"
        return name

    def narrower(self, dtype: DType) -> str:
        name, kind, info = f"to_{dtype.name}", _lane_type(dtype), FLOAT_INFO[dtype]
        if name in self.functions:
            return name
        if dtype is dtypes.float16 and self.half:
            self.functions[name] = (
                f"static inline u16 {name}(f32 x) {{\n"
                "  return ((union { _Float16 f; u16 i; }){.f = (_Float16)x}).i;\n}"
            )
            return name
        shift = 23 - info.mantissa
        top = ((1 << info.exponent) - 1) << info.mantissa if info.has_inf else (1 << (dtype.bitsize - 1)) - 1
        denormal = ""
        if info.bias != 127:  # re-bias, and let an addition round what is denormal in the small type
            magic = 2.0 ** (1 - info.bias - info.mantissa + 23)
            text = _literal(magic, dtypes.float32)
            denormal = (
                f"  word s = {{.f = ((word){{.i = m}}).f + {text}}};\n"
                f"  r -= {(127 - info.bias) << info.mantissa};\n"
                f"  r = m < {(128 - info.bias) << 23}u ? s.i - ((word){{.f = {text}}}).i : r;\n"
            )
        self.functions[name] = (
            f"static inline {kind} {name}(f32 x) {{\n  u32 w = ((word){{.f = x}}).i, m = w & 0x7FFFFFFF, "
            f"sign = (w ^ m) >> {32 - dtype.bitsize};\n"
            f"  u32 r = (m + ((m >> {shift}) & 1) + {(1 << (shift - 1)) - 1}) >> {shift};\n"
            f"{denormal}  r = r > {top} ? {top} : r;\n"
            f"  return (m > 0x7F800000 ? {small_float_bits(math.nan, dtype)} : r) | sign;\n}}"
        )
        return name


_SYMBOLS = {Ops.ADD: "+", Ops.SUB: "-", Ops.MUL: "*", Ops.FDIV: "/", Ops.AND: "&", Ops.OR: "|", Ops.XOR: "^"}
_BOOL = {Ops.ADD: "|", Ops.MUL: "&", Ops.MAX: "|", Ops.MIN: "&", Ops.AND: "&", Ops.OR: "|", Ops.XOR: "^"}
_COMPARE = {Ops.CMPLT: "<", Ops.CMPLE: "<=", Ops.CMPEQ: "==", Ops.CMPNE: "!="}
_FLOAT_FUNCTION = {Ops.SQRT: "sqrt", Ops.TRUNC: "trunc", Ops.FLOOR: "floor", Ops.MULACC: "fma"}
# a float function on vectors: clang has it, for gcc it is a loop over lanes that becomes one instruction
_BY_LANE_FALLBACK = {
    op: f"""\
#if __has_builtin(__builtin_elementwise_{name})
#define v{name} __builtin_elementwise_{name}
#else
#define v{name}({arguments}) ({{ __typeof__(a) r_; \\
  for (unsigned k = 0; k < sizeof(a) / sizeof(a[0]); k++) \\
    r_[k] = sizeof(a[0]) == 4 ? __builtin_{name}f({lanes}) : __builtin_{name}({lanes}); r_; }})
#endif"""
    for op, name, arguments, lanes in (
        (Ops.SQRT, "sqrt", "a", "a[k]"),
        (Ops.TRUNC, "trunc", "a", "a[k]"),
        (Ops.FLOOR, "floor", "a", "a[k]"),
        (Ops.MULACC, "fma", "a, b, c", "a[k], b[k], c[k]"),
    )
}
_INSTRUCTIONS: dict[Op, Callable[[CRenderer, UOp], None]] = {
    Ops.PARAM: CRenderer.param,
    Ops.VAR: CRenderer.nothing,
    Ops.BARRIER: CRenderer.nothing,
    Ops.SPECIAL: CRenderer.special,
    Ops.RANGE: CRenderer.range,
    Ops.END: CRenderer.close,
    Ops.REG: CRenderer.reg,
    Ops.SET: CRenderer.set,
    Ops.LOCAL: CRenderer.local,
    Ops.IF: CRenderer.if_,
    Ops.ENDIF: CRenderer.close,
    Ops.LOAD: CRenderer.load,
    Ops.PREFETCH: CRenderer.prefetch,
    Ops.STORE: CRenderer.store,
    Ops.BROADCAST: CRenderer.broadcast,
    Ops.STACK: CRenderer.stack,
    Ops.EXTRACT: CRenderer.extract,
    Ops.SHUFFLE: CRenderer.shuffle,
    Ops.FOLD: CRenderer.fold,
    Ops.CAST: CRenderer.cast,
    Ops.BITCAST: CRenderer.bitcast,
}


def render(linear: UOp, name: str, half: bool = True) -> str:
    """C text of a linear program (see `CRenderer`)."""
    return CRenderer(half).render(linear, name)
