"""Linear program -> LLVM IR text, for any CPU that LLVM knows.

Values: bool is i1 (i8 in memory), index is i64, float16, bfloat16 and the 8-bit floats are kept as bits (i16,
i8) and converted at CASTs. Float arithmetic carries no fast-math flags: codegen has fused and reassociated
what may be, and the error-free transformations inside its functions rely on every other operation being
rounded as written. The text calls nothing but LLVM intrinsics that become instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whit.helpers import CompileError
from whit.renderer import scratch_alignment
from whit.renderer.llvm_values import (
    ARM_DOTS,
    BOOL_OPS,
    Dots,
    Values,
    constant,
    memory_dtype,
    suffix,
    type_of,
    x86_dots,
)
from whit.uop import DType, Op, Ops, UOp
from whit.uop.uop import variables_of

__all__ = ["ARM_DOTS", "LLVMRenderer", "render", "x86_dots"]
LITTLE_WORK = 1000  # instructions: less than a microsecond in any order and form


def _instructions_executed(linear: UOp) -> int:
    """How many instructions one task of a program executes; loops of unknown size run for long."""
    total, times, sizes = 0, 1, []
    for node in linear.src:
        if node.op is Ops.RANGE:
            sizes.append(times)
            times *= node.src[0].arg if node.src[0].op is Ops.CONST else LITTLE_WORK
        elif node.op is Ops.END:
            times = sizes.pop()
        total += times
    return total


class LLVMRenderer(Values):
    """Renders one linear program; make a new one for each. `half`: the target converts float16 in hardware.
    `fence`: the intrinsic that makes non-temporal stores visible in order, where a machine needs one.
    `dots`: its intrinsics for DOT ops.

    A kernel is `void name(void **buffers, const int64_t *variables, int64_t thread)`.
    """

    def __init__(self, half: bool = True, fence: str = "", dots: Dots | None = None) -> None:
        super().__init__(half, dots)
        self.fence = fence
        self.hint = ""  # the metadata that makes a store non-temporal
        self.streamed: dict[UOp, str] = {}  # PARAM of non-temporal stores -> whether it is aligned for them
        self.entry: list[str] = []  # allocas, pointers and variables: once, at the top
        self.names: dict[UOp, str] = {}
        self.spare: dict[str, str] = {}  # dummy memory that masked-off scalar accesses go to
        self.block = "entry"
        self.scopes: dict[UOp, str] = {}

    def open_block(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def value(self, node: UOp) -> str:
        """The operand text of a node, without its type."""
        if node.op is Ops.CONST:
            return constant(node.arg, node.dtype)
        if node.op is Ops.REG:
            return self.emit(f"load {type_of(node.dtype)}, ptr {self.names[node]}")
        return self.names[node]

    # ---- the program

    def render(self, linear: UOp, name: str) -> str:
        """The text of a LINEAR.

        >>> "define void" in LLVMRenderer().render(UOp(Ops.LINEAR), "empty")
        True
        """
        self.prepare(linear)
        for node in linear.src:
            op = node.op
            if op is Ops.CONST:
                continue
            special = _INSTRUCTIONS.get(op)
            if special is not None:
                special(self, node)
            elif op.is_alu:
                self.names[node] = self.alu(op, node.dtype, node.src, [self.value(s) for s in node.src])
            else:
                raise CompileError(
                    f"kernel {name}: LLVM cannot spell {op.name}",
                    because="it is no instruction of a linear program",
                    fix="report this kernel with DEBUG=6",
                )
        widths = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'
        if linear.arg is not None:
            widths += ' "whit-work"="by hand"'  # compiled with all effort (`whit.runtime.native`)
        elif _instructions_executed(linear) <= LITTLE_WORK:
            widths += ' "whit-work"="little"'  # compiled with little effort
        attributes = f'attributes #0 = {{ nounwind "no-builtins" {widths} }}'
        arguments = "ptr noalias readonly %buffers, ptr noalias readonly %variables, i64 %thread"
        head = f'define void @"{name}"({arguments}) #0 {{\nentry:'
        if self.streamed and self.fence:
            self.declared[self.fence] = f"declare void @{self.fence}()"
            self.lines.append(f"  call void @{self.fence}()")
        return "\n".join(
            [
                head,
                *self.entry,
                *self.lines,
                "  ret void",
                "}",
                *self.declared.values(),
                attributes,
                *self.metadata(),
                "",
            ]
        )

    def prepare(self, linear: UOp) -> None:
        """Pointers of PARAMs and values of VARs at the top; alias scopes when a PARAM is stored to; whether
        the PARAMs of non-temporal stores are aligned, since those fault elsewhere."""
        params: list[UOp] = []
        written = False
        for node in linear.src:
            if node.op is Ops.PARAM:
                params.append(node)
            elif node.op is Ops.STORE:
                written = True
                if node.arg is not None:
                    self.streamed[node.src[0]] = f"%p{node.src[0].arg.slot}.aligned"
        for node in params:
            self.names[node] = pointer = f"%p{node.arg.slot}"
            self.entry += [
                f"  {pointer}.at = getelementptr ptr, ptr %buffers, i64 {node.arg.slot}",
                f"  {pointer} = load ptr, ptr {pointer}.at",
            ]
        self.hint = f"!{3 * len(params) + 1}"
        for node, aligned in self.streamed.items():
            pointer = self.names[node]
            self.entry += [
                f"  {pointer}.address = ptrtoint ptr {pointer} to i64",
                f"  {pointer}.low = and i64 {pointer}.address, 63",
                f"  {aligned} = icmp eq i64 {pointer}.low, 0",
            ]
        if written and len(params) > 1:
            for number, node in enumerate(params):
                own = 2 * number + 1 + len(params)
                self.scopes[node] = f", !alias.scope !{own}, !noalias !{own + 1}"
        for position, node in enumerate(variables_of(linear.src)):
            self.names[node] = f"%var{position}"
            self.entry += [
                f"  %var{position}.at = getelementptr i64, ptr %variables, i64 {position}",
                f"  %var{position} = load i64, ptr %var{position}.at",
            ]

    def metadata(self) -> list[str]:
        """One alias scope per PARAM: different PARAMs never overlap where one of them is stored to."""
        count = len(self.scopes)
        lines = [f"{self.hint} = !{{i32 1}}"] if self.streamed else []
        if not count:
            return lines
        lines += ["!0 = distinct !{!0}"] + [f"!{n + 1} = distinct !{{!{n + 1}, !0}}" for n in range(count)]
        for n in range(count):
            others = ", ".join([f"!{m + 1}" for m in range(count) if m != n])
            lines += [f"!{2 * n + 1 + count} = !{{!{n + 1}}}", f"!{2 * n + 2 + count} = !{{{others}}}"]
        return lines

    # ---- loops, registers, control

    def range(self, node: UOp) -> None:
        size, label = node.src[0], f"loop{len(self.names)}_{self.count}"
        counter = f"%i_{label}"
        self.names[node] = counter
        bound = self.value(size)
        if not (size.op is Ops.CONST and size.arg >= 1):
            runs = self.emit(f"icmp sgt i64 {bound}, 0")
            before = self.block
            self.lines.append(f"  br i1 {runs}, label %{label}, label %{label}.end")
        else:
            before = self.block
            self.lines.append(f"  br label %{label}")
        self.open_block(label)
        self.lines.append(f"  {counter} = phi i64 [ 0, %{before} ], [ {counter}.next, %{label}.latch ]")

    def end(self, node: UOp) -> None:
        counter = self.names[node.src[0]]
        label, size = counter[3:], node.src[0].src[0]
        self.lines += [
            f"  br label %{label}.latch",
            f"{label}.latch:",
            f"  {counter}.next = add nuw nsw i64 {counter}, 1",
            f"  {counter}.done = icmp eq i64 {counter}.next, {self.value(size)}",
            f"  br i1 {counter}.done, label %{label}.end, label %{label}",
        ]
        self.open_block(f"{label}.end")

    def if_(self, node: UOp) -> None:
        label = self.names[node] = f"if{self.count}_{len(self.names)}"
        self.lines.append(f"  br i1 {self.value(node.src[0])}, label %{label}, label %{label}.end")
        self.open_block(label)

    def endif(self, node: UOp) -> None:
        label = self.names[node.src[0]]
        self.lines.append(f"  br label %{label}.end")
        self.open_block(f"{label}.end")

    def reg(self, node: UOp) -> None:
        name = f"%reg{len(self.names)}"
        self.names[node] = name
        self.entry.append(f"  {name} = alloca {type_of(node.dtype)}")
        self.store_reg(node, node.src[0])

    def set(self, node: UOp) -> None:
        target = node.src[0]
        while target.op is not Ops.REG:
            target = target.src[0]
        self.store_reg(target, node.src[1])

    def store_reg(self, reg: UOp, value: UOp) -> None:
        self.lines.append(f"  store {type_of(reg.dtype)} {self.value(value)}, ptr {self.names[reg]}")

    def local(self, node: UOp) -> None:
        self.names[node] = name = f"%local{node.arg.uid}"
        kind, size = type_of(memory_dtype(node.dtype)), max(1, node.arg.size)
        align = scratch_alignment(node, bool(self.streamed))
        self.entry.append(f"  {name} = alloca [{size} x {kind}], align {align}")

    def special(self, node: UOp) -> None:
        self.names[node] = "%thread" if node.arg.name == "thread" else "0"

    def nothing(self, node: UOp) -> None:
        """PARAM and VAR stand in the entry block; a CPU task is alone in its group, so BARRIER does
        nothing."""

    # ---- memory

    def address(self, memory: UOp, index: UOp, inbounds: bool) -> str:
        kind = "inbounds " if inbounds else ""
        element = type_of(memory_dtype(memory.dtype.scalar))
        where = f"{type_of(index.dtype)} {self.value(index)}"
        return self.emit(f"getelementptr {kind}{element}, ptr {self.names[memory]}, {where}")

    def dummy(self, kind: str, purpose: str) -> str:
        """Memory for masked-off scalar accesses: reads see 0, writes are lost."""
        key = f"{purpose}.{kind}"
        name = self.spare.get(key)
        if name is None:
            name = self.spare[key] = f"%dummy{len(self.spare)}"
            self.entry += [f"  {name} = alloca {kind}", f"  store {kind} zeroinitializer, ptr {name}"]
        return name

    def load(self, node: UOp) -> None:
        memory, index = node.src[:2]
        mask = node.src[2] if len(node.src) > 2 else None
        held = memory_dtype(node.dtype)
        kind, align, scope = type_of(held), max(1, held.scalar.itemsize), self.scopes.get(memory, "")
        where = self.address(memory, index, inbounds=mask is None)
        if index.dtype.count > 1:
            on = "splat (i1 true)" if mask is None else self.value(mask)
            text = self.masked_call(
                f"llvm.masked.gather.{suffix(held)}.v{held.count}p0",
                held,
                f"<{held.count} x ptr>",
                where,
                align,
                on,
            )
        elif mask is None:
            text = self.emit(f"load {kind}, ptr {where}, align {align}{scope}")
        elif held.count == 1:
            picked = self.emit(f"select i1 {self.value(mask)}, ptr {where}, ptr {self.dummy(kind, 'zero')}")
            text = self.emit(f"load {kind}, ptr {picked}, align {align}{scope}")
        else:
            text = self.masked_call(
                f"llvm.masked.load.{suffix(held)}.p0", held, "ptr", where, align, self.value(mask)
            )
        self.names[node] = (
            text
            if held is node.dtype
            else self.emit(f"icmp ne {kind} {text}, zeroinitializer")
            if held.count > 1
            else self.emit(f"icmp ne i8 {text}, 0")
        )

    def prefetch(self, node: UOp) -> None:
        """A read (0) into a cache (3: the nearest) of data (1)."""
        where = self.address(node.src[0], node.src[1], inbounds=False)
        self.declared["llvm.prefetch.p0"] = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        self.lines.append(f"  call void @llvm.prefetch.p0(ptr {where}, i32 0, i32 {node.arg}, i32 1)")

    def masked_call(
        self, intrinsic: str, held: DType, pointers: str, where: str, align: int, mask: str
    ) -> str:
        """A masked load or gather; lanes that are off give 0."""
        kind = type_of(held)
        return self.call(
            intrinsic,
            held,
            [
                (pointers, where),
                ("i32", str(align)),
                (f"<{held.count} x i1>", mask),
                (kind, "zeroinitializer"),
            ],
        )

    def store(self, node: UOp) -> None:
        memory, index, value = node.src[:3]
        mask = node.src[3] if len(node.src) > 3 else None
        held = memory_dtype(value.dtype)
        kind, align, scope = type_of(held), max(1, held.scalar.itemsize), self.scopes.get(memory, "")
        text = self.value(value)
        if held is not value.dtype:
            text = self.emit(f"zext {type_of(value.dtype)} {text} to {kind}")
        where = self.address(memory, index, inbounds=mask is None)
        run = _run_of(mask) if mask is not None and index.dtype.count == 1 else None
        if run is not None:
            self.store_run(text, held, where, *run, align, scope)
            return
        if index.dtype.count > 1 or (mask is not None and held.count > 1):
            scatter = index.dtype.count > 1
            name = (
                f"llvm.masked.scatter.{suffix(held)}.v{held.count}p0"
                if scatter
                else f"llvm.masked.store.{suffix(held)}.p0"
            )
            pointers = f"<{held.count} x ptr>" if scatter else "ptr"
            on = "splat (i1 true)" if mask is None else self.value(mask)
            self.declared[name] = f"declare void @{name}({kind}, {pointers}, i32, <{held.count} x i1>)"
            place = f"{pointers} {where}, i32 {align}, <{held.count} x i1> {on}"
            self.lines.append(f"  call void @{name}({kind} {text}, {place})")
            return
        if mask is not None:
            where = self.emit(f"select i1 {self.value(mask)}, ptr {where}, ptr {self.dummy(kind, 'lost')}")
        plain = f"  store {kind} {text}, ptr {where}, align {align}{scope}"
        if node.arg is None:
            self.lines.append(plain)
        else:
            aligned = min(64, held.itemsize)
            self.stream(memory, f"  store {kind} {text}, ptr {where}, align {aligned}{scope}", plain)

    def store_run(
        self, text: str, held: DType, where: str, start: int, stop: int, align: int, scope: str
    ) -> None:
        """Store lanes start … stop - 1. Not a masked store with a constant mask: of a truncated vector's
        single lane LLVM 22 makes a store of the wide type with AVX-512, which overwrites what follows."""
        if start == stop:
            return
        kind, element = type_of(held), type_of(held.scalar)
        where = self.emit(f"getelementptr {element}, ptr {where}, i64 {start}") if start else where
        if stop - start == 1:
            text, kind = self.emit(f"extractelement {kind} {text}, i32 {start}"), element
        elif stop - start < held.count:
            lanes = ", ".join([f"i32 {lane}" for lane in range(start, stop)])
            taken = f"<{stop - start} x i32> <{lanes}>"
            text = self.emit(f"shufflevector {kind} {text}, {kind} poison, {taken}")
            kind = f"<{stop - start} x {element}>"
        self.lines.append(f"  store {kind} {text}, ptr {where}, align {align}{scope}")

    def stream(self, memory: UOp, store: str, plain: str) -> None:
        """A non-temporal store into memory that is aligned; a plain one into other memory."""
        self.count += 1
        label = f"stream{self.count}"
        self.lines += [
            f"  br i1 {self.streamed[memory]}, label %{label}, label %{label}.plain",
            f"{label}:",
            f"{store}, !nontemporal {self.hint}",
            f"  br label %{label}.end",
            f"{label}.plain:",
            plain,
            f"  br label %{label}.end",
        ]
        self.open_block(f"{label}.end")

    # ---- lanes

    def broadcast(self, node: UOp) -> None:
        source, kind = node.src[0], type_of(node.dtype)
        first = self.emit(f"insertelement {kind} poison, {type_of(source.dtype)} {self.value(source)}, i64 0")
        self.names[node] = self.emit(
            f"shufflevector {kind} {first}, {kind} poison, <{node.dtype.count} x i32> zeroinitializer"
        )

    def stack(self, node: UOp) -> None:
        kind, text = type_of(node.dtype), "poison"
        for lane, source in enumerate(node.src):
            text = self.emit(
                f"insertelement {kind} {text}, {type_of(source.dtype)} {self.value(source)}, i64 {lane}"
            )
        self.names[node] = text

    def extract(self, node: UOp) -> None:
        source = node.src[0]
        self.names[node] = self.emit(
            f"extractelement {type_of(source.dtype)} {self.value(source)}, i64 {node.arg}"
        )

    def shuffle(self, node: UOp) -> None:
        source = node.src[0]
        self.names[node] = self.pick(self.value(source), source.dtype, node.arg)

    def pick(self, text: str, dtype: DType, lanes: Sequence[int]) -> str:
        kind = type_of(dtype)
        chosen = ", ".join([f"i32 {lane}" for lane in lanes])
        return self.emit(f"shufflevector {kind} {text}, {kind} poison, <{len(lanes)} x i32> <{chosen}>")

    def fold(self, node: UOp) -> None:
        """Halve until one lane is left; an odd lane is folded in at the end. Bools are one test of a mask."""
        source = node.src[0]
        text, dtype, op = self.value(source), source.dtype, node.arg
        if dtype.kind == "b":
            name = f"llvm.vector.reduce.{BOOL_OPS[op]}.{suffix(dtype)}"
            self.names[node] = self.call(name, dtype.scalar, [(type_of(dtype), text)])
            return
        odd: list[str] = []
        while dtype.count > 1:
            half = dtype.count // 2
            if dtype.count % 2:
                odd.append(self.emit(f"extractelement {type_of(dtype)} {text}, i64 {dtype.count - 1}"))
            narrow = dtype.scalar.vec(half)
            low, high = self.pick(text, dtype, range(half)), self.pick(text, dtype, range(half, 2 * half))
            if half == 1:
                low, high = [
                    self.emit(f"extractelement <1 x {type_of(narrow)}> {part}, i64 0") for part in (low, high)
                ]
            text, dtype = self.alu(op, narrow, (), [low, high]), narrow
        for lane in odd:
            text = self.alu(op, dtype, (), [text, lane])
        self.names[node] = text

    def cast(self, node: UOp) -> None:
        source = node.src[0]
        self.names[node] = self.convert(self.value(source), source.dtype, node.dtype)

    def bitcast(self, node: UOp) -> None:
        source = node.src[0]
        here, there = type_of(source.dtype), type_of(node.dtype)
        text = self.value(source)
        self.names[node] = (
            text
            if here == there and source.op is not Ops.CONST
            else self.emit(f"bitcast {here} {text} to {there}")
        )


_INSTRUCTIONS: dict[Op, Callable[[LLVMRenderer, UOp], None]] = {
    Ops.PARAM: LLVMRenderer.nothing,
    Ops.VAR: LLVMRenderer.nothing,
    Ops.BARRIER: LLVMRenderer.nothing,
    Ops.SPECIAL: LLVMRenderer.special,
    Ops.RANGE: LLVMRenderer.range,
    Ops.END: LLVMRenderer.end,
    Ops.REG: LLVMRenderer.reg,
    Ops.SET: LLVMRenderer.set,
    Ops.LOCAL: LLVMRenderer.local,
    Ops.IF: LLVMRenderer.if_,
    Ops.ENDIF: LLVMRenderer.endif,
    Ops.LOAD: LLVMRenderer.load,
    Ops.PREFETCH: LLVMRenderer.prefetch,
    Ops.STORE: LLVMRenderer.store,
    Ops.BROADCAST: LLVMRenderer.broadcast,
    Ops.STACK: LLVMRenderer.stack,
    Ops.EXTRACT: LLVMRenderer.extract,
    Ops.SHUFFLE: LLVMRenderer.shuffle,
    Ops.FOLD: LLVMRenderer.fold,
    Ops.CAST: LLVMRenderer.cast,
    Ops.BITCAST: LLVMRenderer.bitcast,
}


def _run_of(mask: UOp) -> tuple[int, int] | None:
    """The lanes start … stop - 1 that a constant mask of a vector lets through; None for other masks and for
    those with gaps."""
    if mask.op is not Ops.CONST or mask.dtype.count == 1:
        return None
    lanes = mask.arg if isinstance(mask.arg, tuple) else (mask.arg,) * mask.dtype.count
    on = [lane for lane, let in enumerate(lanes) if let]
    start, stop = (on[0], on[-1] + 1) if on else (0, 0)
    return (start, stop) if stop - start == len(on) else None


def render(linear: UOp, name: str, half: bool = True, fence: str = "", dots: Dots | None = None) -> str:
    """LLVM IR text of a linear program (see `LLVMRenderer`)."""
    return LLVMRenderer(half, fence, dots).render(linear, name)
