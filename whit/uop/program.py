"""Kernels written by hand: arrays that a kernel reads and writes, and programs of loops, conditions and
stores in the order in which they run.

A program is a LINEAR of statements (LOAD, STORE, RANGE … END, IF … ENDIF) at the level "program" of
`whit.uop.spec`; between them stand expressions without effects, which need no place in the list.
Nothing in it is bound to a machine: any op of the table may be used in any dtype.

    p = Program("cumsum")
    with p.parallel(rows) as row:
        total = p.register(0.0, dtypes.float32)
        with p.loop(n) as i:
            p.set(total, total.value + x[row, i])
            p.store(y, (row, i), total.value)
    p.finish()
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from whit.helpers import IRError
from whit.uop.args import LocalArg, ParamArg, RangeArg
from whit.uop.dtype import DType, PyConst, dtypes
from whit.uop.ops import AxisType, Ops
from whit.uop.symbolic import simplify
from whit.uop.uop import Shape, Sint, UOp, alu, show_shape

Index = Any  # an int, an integer UOp, or a tuple of them


class Array:
    """A buffer, or scratch, as a kernel sees it: `a[i, j]` reads an element, `a.store((i, j), value)` writes
    one."""

    __slots__ = ("shape", "uop")

    def __init__(self, uop: UOp, shape: Shape) -> None:
        self.uop, self.shape = uop, shape

    @property
    def dtype(self) -> DType:
        return self.uop.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def at(self, index: Index) -> UOp:
        """The number of an element, row-major. IRError unless there is an index for every axis."""
        items = index if isinstance(index, tuple) else (index,)
        if len(items) != len(self.shape):
            raise IRError(f"an element of an array of shape {show_shape(self.shape)}",
                          because=f"{len(items)} indices are given", fix="give one for every axis")
        flat = UOp.index(0)
        for item, size in zip(items, self.shape, strict=True):
            flat = flat * UOp.index(size) + as_index(item)
        return flat

    def __getitem__(self, index: Index) -> UOp:
        return UOp(Ops.INDEX, self.dtype, (self.uop, self.at(index)))

    def read(self, index: Index, valid: UOp) -> UOp:
        """The element where `valid` holds, else 0."""
        return UOp(Ops.INDEX, self.dtype, (self.uop, self.at(index), valid))

    def store(self, index: Index, value: UOp | PyConst, valid: UOp | None = None) -> UOp:
        """A STORE of the element (where `valid` holds)."""
        made = value if isinstance(value, UOp) else UOp.const(value, self.dtype)
        gate = () if valid is None else (valid,)
        return UOp(Ops.STORE, dtypes.void, (self.uop, self.at(index), made.cast(self.dtype), *gate))


class Register(Array):
    """Scratch of one element: a value that changes while a program runs."""

    @property
    def value(self) -> UOp:
        """What it holds when the statement that uses this runs."""
        return self[0]


def as_index(value: Any) -> UOp:
    """An integer as a value of dtype index."""
    if not isinstance(value, UOp):
        return UOp.index(int(value))
    return value if value.dtype is dtypes.index else UOp(Ops.CAST, dtypes.index, (value,))


def param(slot: int, shape: Shape, dtype: DType) -> Array:
    """The kernel's argument number `slot`."""
    size = 1
    for length in shape:
        size *= length if isinstance(length, int) else int(length.vmax)
    return Array(UOp(Ops.PARAM, dtype, (), ParamArg(slot, size)), tuple(shape))


class Program:
    """Builds a program statement by statement. An expression reads memory (`a[i]`, `register.value`) when the
    statement that it stands in runs; `let` reads at once and keeps the value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: list[UOp] = []
        self.numbers = 0  # of loops, conditions and reads: each is a node of its own
        self.arrays = 0

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def scratch(self, size: int, dtype: DType) -> Array:
        """Memory of the task, on its stack: a few thousand elements at most. It holds anything at first."""
        self.arrays += 1
        return Array(UOp(Ops.LOCAL, dtype, (), LocalArg(self.arrays - 1, size, False)), (size,))

    def register(self, value: UOp | PyConst, dtype: DType | None = None) -> Register:
        """A value that `set` changes; `value` is what it starts with here."""
        if dtype is None:
            assert isinstance(value, UOp), "a register of a Python value needs a dtype"
            dtype = value.dtype
        made = Register(self.scratch(1, dtype).uop, (1,))
        self.set(made, value)
        return made

    def let(self, value: UOp) -> UOp:
        """The value of an expression at this point."""
        nodes = value.toposort(_is_known)
        if not any([node.op is Ops.INDEX for node in nodes]):
            return value
        new: dict[UOp, UOp] = {}
        for node in nodes:
            if _is_known(node):
                new[node] = node
                continue
            src = tuple([new[s] for s in node.src])
            if node.op is Ops.INDEX:
                new[node] = UOp(Ops.LOAD, node.dtype, src, self._number())
                self.items.append(new[node])
            else:
                new[node] = node if src == node.src else node.replace(src=src)
        return new[value]

    def store(self, array: Array, index: Index, value: UOp | PyConst, valid: UOp | None = None) -> None:
        """Write an element (where `valid` holds); the value is cast to the array's dtype."""
        store = array.store(index, value, valid)
        self.items.append(store.replace(src=(store.src[0], *[self.let(s) for s in store.src[1:]])))

    def set(self, register: Register, value: UOp | PyConst) -> None:
        """Give a register another value."""
        self.store(register, 0, value)

    @contextlib.contextmanager
    def loop(self, size: Sint | UOp, axis: AxisType = AxisType.LOOP) -> Iterator[UOp]:
        """The statements inside run for each value of the counter, 0 … size - 1 in turn; `size` may be any
        integer expression, and is computed once."""
        bound = self.let(simplify(as_index(size)) if not isinstance(size, int) else UOp.index(size))
        counter = UOp(Ops.RANGE, dtypes.index, (bound,), RangeArg(self._number(), axis))
        self.items.append(counter)
        yield counter
        self.items.append(UOp(Ops.END, dtypes.void, (counter,)))

    def parallel(self, size: Sint) -> contextlib.AbstractContextManager[UOp]:
        """A loop whose rounds run in any order and at once, in several tasks. It must hold the whole program,
        and no round may touch what another one writes."""
        return self.loop(size, AxisType.THREAD)

    @contextlib.contextmanager
    def when(self, condition: UOp) -> Iterator[None]:
        """The statements inside run if the condition (bool) holds."""
        made = UOp(Ops.IF, dtypes.void, (self.let(condition),), self._number())
        self.items.append(made)
        yield
        self.items.append(UOp(Ops.ENDIF, dtypes.void, (made,)))

    def finish(self) -> UOp:
        """The program as a LINEAR; its arg is the name."""
        return UOp(Ops.LINEAR, dtypes.void, tuple(self.items), self.name)


def _is_known(node: UOp) -> bool:
    """Values that are there already, and counters: what stands below them has been read."""
    return node.op is Ops.LOAD or node.op is Ops.RANGE


# ---- arithmetic that UOp has no operator for ---------------------------------------------------------------


def sqrt(x: UOp) -> UOp:
    return alu(Ops.SQRT, x)


def absolute(x: UOp) -> UOp:
    return x.lt(0).where(-x, x)


def exp(x: UOp) -> UOp:
    """e**x: the factor is known to the compiler, which gives the exact function."""
    return alu(Ops.EXP2, x * LOG2_E)


def log(x: UOp) -> UOp:
    return alu(Ops.LOG2, x) * LN_2


LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


def arrays_of(kernel: UOp) -> tuple[dict[int, UOp], set[int]]:
    """(the PARAMs of a kernel by slot, the slots that it stores to)."""
    params: dict[int, UOp] = {}
    stored: set[int] = set()
    for node in kernel.toposort():
        if node.op is Ops.PARAM:
            params[node.arg.slot] = node
        elif node.op is Ops.STORE and node.src[0].op is Ops.PARAM:
            stored.add(node.src[0].arg.slot)
    return params, stored


def with_slots(kernel: UOp, slots: Sequence[int]) -> UOp:
    """The kernel with PARAM i renamed to slot slots[i]."""
    params, _ = arrays_of(kernel)
    changes = {node: node.replace(arg=ParamArg(slots[slot], node.arg.size)) for slot, node in params.items()
               if slots[slot] != slot}
    return kernel.substitute(changes)
