"""Linear programs as Python source, one statement per lane, and the checks around it. The PYTHON device runs
this.

    r2 = RANGE(4); x = LOAD(p1, r2); y = MUL(x, x); STORE(p0, r2, y); END(r2)

becomes

    def kernel(memory, variables, special, local):
        m0, m1 = memory
        n0, n1 = len(m0), len(m1)
        for v2 in range(4):
            v3 = m1[v2] if -1 < v2 < n1 else bad('read', 1, v2, n1)
            F[0] = v3 * v3; v4 = F[0]
            if not -1 < v2 < n0: bad('write', 0, v2, n0)
            m0[v2] = v4

`F` is one cell of float32: assigning to it rounds. Barriers are `yield`s.
"""
from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from whit.helpers import CompileError
from whit.uop import DType, Op, Ops, UOp, dtypes
from whit.uop.dtype import FLOAT_INFO, round_float, wrap
from whit.uop.ops import COMPARE, all_ops
from whit.uop.uop import cast_value

Scalar: TypeAlias = "bool | int | float"

# ---- elements in memory ------------------------------------------------------------------------------------

# what a memoryview can hold directly; narrow floats are kept as their bits
FORMAT = {dtype: dtype.fmt for dtype in dtypes.all if dtype.fmt}
FORMAT |= {dtypes.index: "q"}
FORMAT |= {dtypes.float16: "H", dtypes.bfloat16: "H", dtypes.fp8e4m3: "B", dtypes.fp8e5m2: "B"}


@lru_cache(None)
def decode_table(dtype: DType) -> tuple[float, ...]:
    """The value of every bit pattern of a narrow float."""
    if dtype is dtypes.float16:
        return struct.unpack("65536e", struct.pack("65536H", *range(65536)))
    if dtype is dtypes.bfloat16:
        return struct.unpack("65536f", struct.pack("65536I", *[i << 16 for i in range(65536)]))
    info = FLOAT_INFO[dtype]
    top = (1 << info.exponent) - 1

    def value(code: int) -> float:
        exponent, fraction = (code & 127) >> info.mantissa, code & ((1 << info.mantissa) - 1)
        if exponent == top and (info.has_inf or fraction == (1 << info.mantissa) - 1):
            result = math.nan if fraction or not info.has_inf else math.inf
        else:
            hidden = fraction + ((1 << info.mantissa) if exponent else 0)
            result = math.ldexp(hidden, max(exponent, 1) - info.bias - info.mantissa)
        return -result if code & 128 else result
    return tuple([value(code) for code in range(256)])


@lru_cache(None)
def _encode_table(dtype: DType) -> dict[float, int]:
    half = decode_table(dtype)[:1 << (dtype.bitsize - 1)]
    return {value: code for code, value in enumerate(half) if value == value}


def encode(value: float, dtype: DType) -> int:
    """The bits of a narrow float that `value` is one of."""
    top = 1 << (dtype.bitsize - 1)
    if value != value:
        info = FLOAT_INFO[dtype]
        ones = ((1 << info.exponent) - 1) << info.mantissa
        code = ones | ((1 << (info.mantissa - 1)) if info.has_inf else (1 << info.mantissa) - 1)
    else:
        code = _encode_table(dtype)[abs(value)]
    return code | top if math.copysign(1.0, value) < 0 else code


def to_bits(value: Scalar, dtype: DType) -> int:
    """The bits of a value as an unsigned integer."""
    if dtype in FLOAT_INFO and dtype not in (dtypes.float32, dtypes.float64):
        return encode(float(value), dtype)
    if dtype.is_float:
        return int.from_bytes(struct.pack("<" + dtype.fmt, value), "little")
    return int(value) & ((1 << dtype.bitsize) - 1)


def from_bits(number: int, dtype: DType) -> Scalar:
    """The value that the low bits of a number are."""
    if dtype not in FLOAT_INFO:
        return wrap(number, dtype)
    number &= (1 << dtype.bitsize) - 1
    if dtype in (dtypes.float32, dtypes.float64):
        return float(struct.unpack("<" + dtype.fmt, number.to_bytes(dtype.itemsize, "little"))[0])
    return decode_table(dtype)[number]


def bitcast(value: Scalar, before: DType, after: DType) -> Scalar:
    """The value of type `after` with the bits of `value`."""
    return from_bits(to_bits(value, before), after)


# ---- arithmetic --------------------------------------------------------------------------------------------


def to_odd(value: float, error: float) -> float:
    """`value`, which is off by a nonzero `error`, replaced by its odd neighbour: rounding it again is then
    correct."""
    if error == 0 or not math.isfinite(value) or not math.isfinite(error):
        return value
    if struct.unpack("<q", struct.pack("<d", value))[0] & 1:
        return value
    return math.nextafter(value, math.inf if error > 0 else -math.inf)


def multiply_add(a: Scalar, b: Scalar, c: Scalar, dtype: DType) -> Scalar:
    """a*b + c rounded once."""
    if not dtype.is_float:
        return wrap(a * b + c, dtype)
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    if dtype is dtypes.float64:
        return _exact_multiply_add(float(a), float(b), float(c))
    product = float(a) * float(b)  # exact: twice 24 bits fit into 53
    total = product + c
    high = total - c
    return round_float(to_odd(total, (product - high) + (c - (total - high))), dtype)


def _exact_multiply_add(a: float, b: float, c: float) -> float:
    from fractions import Fraction
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # for the sign of zero
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def convert(value: Scalar, before: DType, after: DType) -> Scalar:
    """CAST: rounds once; floats saturate in integers, NaN becomes 0."""
    if after.is_float and before.bitsize == 64 and not before.is_float and after is not dtypes.float64:
        number = abs(int(value))
        drop = max(0, number.bit_length() - 52)
        sticky = 1 if number & ((1 << drop) - 1) else 0
        number = (number >> drop | sticky) << drop  # 52 bits, odd when inexact
        return round_float(float(-number if value < 0 else number), after)
    return cast_value(value, after)


# ---- writing the source ------------------------------------------------------------------------------------


def to_source(linear: UOp, name: str) -> str:
    """Python source of `def kernel(memory, variables, special, local)` for a linear program."""
    return _Writer(linear, name).text()


class _Writer:
    """One pass over the instructions. `lanes` maps each value to its variables or literals, one per lane."""

    def __init__(self, linear: UOp, name: str) -> None:
        self.code = linear.src
        self.name = name
        self.lines: list[str] = []
        self.depth = 1
        self.lanes: dict[UOp, list[str]] = {}
        self.memory: dict[UOp, str] = {}
        self.count = 0

    def text(self) -> str:
        params = sorted({u for u in self.code if u.op is Ops.PARAM}, key=lambda u: int(u.arg.slot))
        variables = sorted({u for u in self.code if u.op is Ops.VAR}, key=lambda u: str(u.arg.name))
        kinds = tuple((u.arg.slot, u.dtype.name, u.arg.size) for u in params)
        locals_ = [u for u in self.code if u.op is Ops.LOCAL]
        scratch = tuple((u.arg.uid, u.dtype.name, u.arg.size, u.arg.shared) for u in locals_)
        head = [f"# {self.name}", f"PARAMS = {kinds!r}", f"LOCALS = {scratch!r}",
                f"VARIABLES = {tuple(u.arg.name for u in variables)!r}",
                f"BARRIERS = {any(u.op is Ops.BARRIER for u in self.code)}",
                "def kernel(memory, variables, special, local):"]
        for position, node in enumerate(params):
            self.memory[node] = f"m{node.arg.slot}"
            self.put(f"m{node.arg.slot} = memory[{position}]; n{node.arg.slot} = len(m{node.arg.slot})")
        for node in variables:
            self.lanes[node] = [self.fresh()]
            self.put(f"{self.lanes[node][0]} = variables[{node.arg.name!r}]")
        for node in self.code:
            self.instruction(node)
        if self.depth != 1:
            raise CompileError(f"kernel {self.name}", because="a loop or an IF is not closed",
                               fix="end every RANGE and IF")
        return "\n".join([*head, *self.lines, "    return", ""])

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def of(self, node: UOp) -> list[str]:
        """The lanes of an operand."""
        if node.op is Ops.CONST:
            values = node.arg if isinstance(node.arg, tuple) else (node.arg,) * node.dtype.count
            return [_literal(value) for value in values]
        return self.lanes[node]

    def open(self, line: str) -> None:
        self.put(line)
        self.depth += 1

    def instruction(self, node: UOp) -> None:
        handler = _HANDLERS.get(node.op)
        if handler is not None:
            handler(self, node)
        elif node.op is Ops.BITCAST and node.dtype.count != node.src[0].dtype.count:
            self.regroup(node)
        elif node.op.is_elementwise:
            operands = [self.of(s) for s in node.src]
            rows = zip(*operands, strict=True)
            self.lanes[node] = [self.assign(node, list(row)) for row in rows]
        elif node.op not in (Ops.PARAM, Ops.VAR, Ops.CONST, Ops.SINK):
            raise CompileError(f"{node.op.name} on PYTHON",
                               because="it is not an instruction of linear programs",
                               fix="lower it before linearising")

    def regroup(self, node: UOp) -> None:
        """BITCAST to lanes of another width: the bits of all lanes, the first lowest."""
        before, dtype, result = node.src[0].dtype, node.dtype.scalar, []
        bits, width = self.fresh(), before.bitsize
        lanes = [f"to_bits({lane}, D_{before.scalar.name})" for lane in self.of(node.src[0])]
        self.put(f"{bits} = {' | '.join([f'{lane} << {width * at}' for at, lane in enumerate(lanes)])}")
        for at in range(node.dtype.count):
            result.append(self.fresh())
            self.put(f"{result[-1]} = from_bits({bits} >> {dtype.bitsize * at}, D_{dtype.name})")
        self.lanes[node] = result

    def assign(self, node: UOp, operands: list[str]) -> str:
        """A statement that computes one lane; the new variable."""
        result = self.fresh()
        text, exact = expression(node.op, node.dtype.scalar, [s.dtype.scalar for s in node.src], operands)
        self.put(f"{result} = {text}" if exact else rounded(result, text, node.dtype.scalar))
        return result

    # ---- instructions that are not arithmetic

    def loop(self, node: UOp) -> None:
        self.lanes[node] = [self.fresh()]
        self.open(f"for {self.lanes[node][0]} in range({self.of(node.src[0])[0]}):")

    def end(self, node: UOp) -> None:
        self.put("pass")
        self.depth -= 1

    def condition(self, node: UOp) -> None:
        self.open(f"if {self.of(node.src[0])[0]}:")

    def special(self, node: UOp) -> None:
        self.lanes[node] = [self.fresh()]
        self.put(f"{self.lanes[node][0]} = special[{node.arg.name!r}]")

    def register(self, node: UOp) -> None:
        self.lanes[node] = [f"g{node.arg}_{lane}" for lane in range(node.dtype.count)]
        self.move(self.lanes[node], self.of(node.src[0]))

    def set(self, node: UOp) -> None:
        self.move(self.lanes[node.src[0]], self.of(node.src[1]))

    def move(self, names: list[str], values: list[str]) -> None:
        self.put(f"{', '.join(names)} = {', '.join(values)}")

    def scratch(self, node: UOp) -> None:
        self.memory[node] = f"l{node.arg.uid}"
        self.put(f"l{node.arg.uid} = local[{node.arg.uid}]; n{_slot(node)} = {node.arg.size}")

    def barrier(self, node: UOp) -> None:
        self.put("yield")

    def nothing(self, node: UOp) -> None:
        """A PREFETCH changes no value."""

    def load(self, node: UOp) -> None:
        memory, masks = node.src[0], self.of(node.src[2]) if len(node.src) > 2 else []
        zero = "0.0" if node.dtype.is_float else "False" if node.dtype.is_bool else "0"
        as_bits = node.dtype.scalar in _TABLED and memory.op is Ops.PARAM
        name, slot, result = self.memory[memory], _slot(memory), []
        for lane, at in enumerate(self.places(node.src[1], node.dtype.count)):
            text = f"{name}[{at}] if -1 < {at} < n{slot} else bad('read', {slot!r}, {at})"
            text = f"T_{node.dtype.scalar.name}[{text}]" if as_bits else text
            if masks:
                text = f"({text}) if {masks[lane]} else {zero}"
            result.append(self.fresh())
            self.put(f"{result[-1]} = {text}")
        self.lanes[node] = result

    def store(self, node: UOp) -> None:
        memory, value, masks = node.src[0], node.src[2], self.of(node.src[3]) if len(node.src) > 3 else []
        kind, values = value.dtype.scalar, self.of(value)
        as_bits = kind in _TABLED and memory.op is Ops.PARAM
        for lane, at in enumerate(self.places(node.src[1], value.dtype.count)):
            text = f"E_{kind.name}({values[lane]})" if as_bits else values[lane]
            if masks:
                self.open(f"if {masks[lane]}:")
            self.put(f"if not -1 < {at} < n{_slot(memory)}: bad('write', {_slot(memory)!r}, {at})")
            self.put(f"{self.memory[memory]}[{at}] = {text}")
            self.depth -= bool(masks)

    def places(self, index: UOp, count: int) -> list[str]:
        """The element index of each lane: consecutive for a scalar index."""
        base = self.of(index)
        if index.dtype.count > 1 or count == 1:
            return base
        names = [self.fresh() for _ in range(count)]
        self.move(names, [f"{base[0]} + {lane}" for lane in range(count)])
        return names

    def pick(self, node: UOp) -> None:
        """BROADCAST, STACK, EXTRACT, SHUFFLE: new names for old lanes; copies where a register could change
        later."""
        source = [lane for s in node.src for lane in self.of(s)]
        if node.op is Ops.BROADCAST:
            source = source * node.dtype.count
        elif node.op is Ops.EXTRACT:
            source = [source[node.arg]]
        elif node.op is Ops.SHUFFLE:
            source = [source[lane] for lane in node.arg]
        if any(s.op is Ops.REG for s in node.src):
            names = [self.fresh() for _ in source]
            self.move(names, source)
            source = names
        self.lanes[node] = source

    def fold(self, node: UOp) -> None:
        first, *others = self.of(node.src[0])
        step = UOp(node.arg, node.dtype, (UOp.const(0, node.dtype), UOp.const(0, node.dtype)))
        for lane in others:
            first = self.assign(step, [first, lane])
        self.lanes[node] = [first]


_HANDLERS: dict[Op, Callable[[_Writer, UOp], None]] = {
    Ops.RANGE: _Writer.loop, Ops.END: _Writer.end, Ops.IF: _Writer.condition, Ops.ENDIF: _Writer.end,
    Ops.SPECIAL: _Writer.special, Ops.REG: _Writer.register, Ops.SET: _Writer.set, Ops.LOCAL: _Writer.scratch,
    Ops.BARRIER: _Writer.barrier, Ops.PREFETCH: _Writer.nothing,
    Ops.LOAD: _Writer.load, Ops.STORE: _Writer.store,
    Ops.BROADCAST: _Writer.pick,
    Ops.STACK: _Writer.pick, Ops.EXTRACT: _Writer.pick, Ops.SHUFFLE: _Writer.pick, Ops.FOLD: _Writer.fold,
}
_TABLED = (dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2)


def _slot(memory: UOp) -> int | str:
    return int(memory.arg.slot) if memory.op is Ops.PARAM else f"_local{memory.arg.uid}"


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "(-inf)"
    return f"({value!r})" if str(value)[0] == "-" else repr(value)


def rounded(result: str, text: str, dtype: DType) -> str:
    """A statement that assigns the value of `text`, made a value of `dtype`."""
    if dtype is dtypes.float32:
        return f"F[0] = {text}; {result} = F[0]"
    if dtype is dtypes.float64 or dtype.kind in "xb":
        return f"{result} = {text}"
    if dtype.is_float:
        return f"{result} = round_float({text}, D_{dtype.name})"
    mask, top = (1 << dtype.bitsize) - 1, 1 << (dtype.bitsize - 1)
    if dtype.is_unsigned:
        return f"{result} = ({text}) & {mask}"
    return f"{result} = (({text}) + {top} & {mask}) - {top}"


_INFIX = {Ops.ADD: "+", Ops.SUB: "-", Ops.MUL: "*", Ops.CMPLT: "<", Ops.CMPLE: "<=", Ops.CMPEQ: "==",
          Ops.CMPNE: "!=",
          Ops.AND: "&", Ops.OR: "|", Ops.XOR: "^"}


def expression(op: Op, dtype: DType, before: Sequence[DType], operands: Sequence[str]) -> tuple[str, bool]:
    """Python text of one scalar op, and whether its value needs no rounding or wrapping."""
    if dtype.is_bool and op in (Ops.ADD, Ops.MUL, Ops.MAX, Ops.MIN):
        return f"{operands[0]} {'|' if op in (Ops.ADD, Ops.MAX) else '&'} {operands[1]}", True
    if op in _INFIX:
        return f"{operands[0]} {_INFIX[op]} {operands[1]}", op in COMPARE or op in (Ops.AND, Ops.OR, Ops.XOR)
    if op is Ops.MAX or op is Ops.MIN:
        x, y = operands
        nan = f" or {x} != {x}" if dtype.is_float else ""
        return f"{x} if {x} {'>' if op is Ops.MAX else '<'} {y}{nan} else {y}", True
    if op is Ops.WHERE:
        return f"{operands[1]} if {operands[0]} else {operands[2]}", True
    if op is Ops.NEG:
        return f"-{operands[0]}", dtype.is_float
    if op is Ops.CAST:
        takes_all = dtype in (dtypes.float64, dtypes.index) and not before[0].is_float
        if takes_all or before[0].is_bool or dtype.is_bool:
            return f"{'float' if dtype.is_float else 'bool' if dtype.is_bool else 'int'}({operands[0]})", True
        if dtype.is_int and before[0].is_int:
            return operands[0], dtype.bitsize > before[0].bitsize and not dtype.is_unsigned
        return f"convert({operands[0]}, D_{before[0].name}, D_{dtype.name})", True
    if op is Ops.BITCAST:
        return f"bitcast({operands[0]}, D_{before[0].name}, D_{dtype.name})", True
    if op is Ops.MULACC:
        return f"multiply_add({', '.join(operands)}, D_{dtype.name})", True
    return f"O_{op.name}({', '.join(operands)})", op in (Ops.TRUNC, Ops.FLOOR, Ops.THREEFRY)


@lru_cache(None)
def environment() -> dict[str, Any]:
    """The names that kernels use, but for `bad`, which knows the kernel."""
    env: dict[str, Any] = {"F": memoryview(bytearray(4)).cast("f"), "inf": math.inf, "nan": math.nan,
                           "convert": convert,
                           "bitcast": bitcast, "to_bits": to_bits,
                           "from_bits": from_bits, "multiply_add": multiply_add, "round_float": round_float}
    env |= {f"D_{dtype.name}": dtype for dtype in (*dtypes.all, dtypes.index)}
    env |= {f"O_{op.name}": op.meaning for op in all_ops() if op.meaning is not None}
    env |= {f"T_{dtype.name}": decode_table(dtype) for dtype in _TABLED}
    env |= {f"E_{dtype.name}": (lambda value, kind=dtype: encode(value, kind)) for dtype in _TABLED}
    return env
