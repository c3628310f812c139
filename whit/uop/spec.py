"""What each level of the IR allows, as lists of patterns; `verify` checks a graph against its level's list.

A row is (ops, what is allowed in words, test of one node). A node must satisfy one of its op's rows. Checked
after every pass when SPEC=1, and always in the tests.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from whit.helpers import IRError
from whit.uop.args import (
    BufferArg,
    CallArg,
    LocalArg,
    ParamArg,
    RangeArg,
    ReduceArg,
    ScanArg,
    SpecialArg,
    StageArg,
    VarArg,
)
from whit.uop.dtype import DType, dtypes, wrap
from whit.uop.ops import ALU, MOVEMENT, REDUCTIONS, AxisType, Op, Ops
from whit.uop.uop import UOp

Test = Callable[[UOp], bool]


@dataclass(frozen=True)
class Row:
    """One allowed pattern."""

    ops: tuple[Op, ...]
    says: str
    test: Test


# ---- tests of one node -------------------------------------------------------------------------------------


def _const(u: UOp) -> bool:
    """The value is one of the dtype: right Python type, in range, already rounded."""
    values = u.arg if isinstance(u.arg, tuple) else (u.arg,)
    scalar = u.dtype.scalar
    kind = bool if scalar.is_bool else float if scalar.is_float else int
    if u.src or u.dtype is dtypes.void or (isinstance(u.arg, tuple) and len(values) != u.dtype.count):
        return False
    return all(type(v) is kind and (v != v or wrap(v, scalar) == v) for v in values)


def _takes(op: Op, dtype: DType) -> bool:
    return {"any": True, "int": dtype.is_int, "float": dtype.is_float,
            "number": dtype.is_int or dtype.is_float, "bitwise": dtype.is_int or dtype.is_bool}[op.takes]


def _alu(u: UOp) -> bool:
    op, src, dtype = u.op, u.src, u.dtype
    if len(src) != op.arity or dtype is dtypes.void:
        return False
    if op is Ops.WHERE:
        chooses = src[0].dtype.scalar is dtypes.bool and src[0].dtype.count == dtype.count
        return chooses and src[1].dtype is dtype and src[2].dtype is dtype
    operand = src[0].dtype
    if any(s.dtype is not operand for s in src) or not _takes(op, operand.scalar):
        return False
    if op.category == "compare":
        return dtype.scalar is dtypes.bool and dtype.count == operand.count
    return dtype is operand and (op is not Ops.THREEFRY or dtype.scalar is dtypes.uint64)


def _cast(u: UOp) -> bool:
    return len(u.src) == 1 and dtypes.void not in (u.dtype, u.src[0].dtype) \
        and u.dtype.count == u.src[0].dtype.count


def _bitcast(u: UOp) -> bool:
    if _cast(u):
        return u.dtype.bitsize == u.src[0].dtype.bitsize
    before = u.src[0].dtype if len(u.src) == 1 else dtypes.void  # lanes of another width, the first lowest
    return u.dtype.kind in "iuf" and before.kind in "iuf" and u.dtype.itemsize == before.itemsize


def _size(value: Any) -> bool:
    """A length or offset: a Python int or an index expression."""
    return value.dtype is dtypes.index if isinstance(value, UOp) else type(value) is int


def _sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(_size(v) for v in values)


def _pairs(values: Any) -> bool:
    return isinstance(values, tuple) \
        and all(isinstance(p, tuple) and len(p) == 2 and _sizes(p) for p in values)


def _axes(values: Any, rank: int) -> bool:
    """Distinct axes."""
    return isinstance(values, tuple) and len(set(values)) == len(values) \
        and all(type(axis) is int and 0 <= axis < rank for axis in values)


def _movement(u: UOp) -> bool:
    if len(u.src) != 1 or u.dtype is not u.src[0].dtype:
        return False
    rank = len(u.src[0].shape)
    if u.op in (Ops.RESHAPE, Ops.EXPAND):
        return _sizes(u.arg)
    if u.op in (Ops.PAD, Ops.SHRINK):
        return _pairs(u.arg) and len(u.arg) == rank
    return _axes(u.arg, rank) and (u.op is Ops.FLIP or len(u.arg) == rank)


def _same_as_source(u: UOp) -> bool:
    return len(u.src) == 1 and u.dtype is u.src[0].dtype


def _reduces(u: UOp) -> bool:
    return isinstance(u.arg, ReduceArg) and u.arg.op in REDUCTIONS and len(u.src) >= 1 \
        and u.dtype is u.src[0].dtype


def _reduce_axes(u: UOp) -> bool:
    return _reduces(u) and len(u.src) == 1 and bool(u.arg.axes) and _axes(u.arg.axes, len(u.src[0].shape))


def _reduce_ranges(u: UOp) -> bool:
    return _reduces(u) and not u.arg.axes and len(u.src) > 1 and len(set(u.src[1:])) == len(u.src) - 1 \
        and all(s.op is Ops.RANGE and s.arg.axis.is_reduce for s in u.src[1:])


def _take(u: UOp) -> bool:
    source, index = u.src
    return u.dtype is source.dtype and index.dtype.is_int and type(u.arg) is int \
        and 0 <= u.arg < len(source.shape)


def _base(u: UOp) -> UOp:
    """The memory that a view looks at."""
    while u.op in (*MOVEMENT, Ops.BITCAST) and u.src:
        u = u.src[0]
    return u


def _tensor_store(u: UOp) -> bool:
    if len(u.src) != 2 or u.dtype is not dtypes.void:
        return False
    view, value = u.src
    return view.dtype is value.dtype and view.shape == value.shape \
        and _base(view).op in (Ops.BUFFER, Ops.AFTER)


def _after(u: UOp) -> bool:
    return len(u.src) >= 1 and u.dtype is u.src[0].dtype and _base(u.src[0]).op in (Ops.BUFFER, Ops.AFTER) \
        and all(s.op is Ops.STORE for s in u.src[1:])


_MEMORY = (Ops.PARAM, Ops.BUFFER, Ops.LOCAL, Ops.STAGE, Ops.AFTER)


def _valid(rest: tuple[UOp, ...]) -> bool:
    return not rest or (len(rest) == 1 and rest[0].dtype is dtypes.bool)


def _index(u: UOp) -> bool:
    return len(u.src) >= 2 and u.src[0].op in _MEMORY and u.dtype is u.src[0].dtype \
        and u.src[1].dtype is dtypes.index and _valid(u.src[2:])


def _kernel_store(u: UOp) -> bool:
    return len(u.src) >= 3 and u.dtype is dtypes.void and u.src[0].op in _MEMORY \
        and u.src[1].dtype is dtypes.index \
        and u.src[2].dtype is u.src[0].dtype and _valid(u.src[3:])


def _range(axes: Iterable[AxisType]) -> Test:
    allowed = frozenset(axes)
    return lambda u: isinstance(u.arg, RangeArg) and u.arg.axis in allowed and u.dtype is dtypes.index \
        and u.src[0].dtype is dtypes.index


def _end(u: UOp) -> bool:
    return len(u.src) > 1 and u.dtype is dtypes.void and u.src[0].op in (Ops.STORE, Ops.END, Ops.SINK) \
        and all(s.op is Ops.RANGE for s in u.src[1:]) and len(set(u.src[1:])) == len(u.src) - 1


def _scalar(test: Test) -> Test:
    """The node and its operands have no shape and no lanes."""
    return lambda u: test(u) and not u.shape and u.dtype.count == 1


# ---- linear level ------------------------------------------------------------------------------------------


def _lanes(u: UOp) -> int:
    return u.dtype.count


def _load(u: UOp) -> bool:
    if not 2 <= len(u.src) <= 3 or u.src[0].op not in (Ops.PARAM, Ops.LOCAL):
        return False
    memory, index = u.src[:2]
    return u.dtype.scalar is memory.dtype and index.dtype.scalar is dtypes.index \
        and _lanes(index) in (1, _lanes(u)) \
        and all(m.dtype.scalar is dtypes.bool and _lanes(m) == _lanes(u) for m in u.src[2:])


def _linear_store(u: UOp) -> bool:
    if not 3 <= len(u.src) <= 4 or u.src[0].op not in (Ops.PARAM, Ops.LOCAL) or u.dtype is not dtypes.void:
        return False
    memory, index, value = u.src[:3]
    return value.dtype.scalar is memory.dtype and index.dtype.scalar is dtypes.index \
        and _lanes(index) in (1, _lanes(value)) \
        and all(m.dtype.scalar is dtypes.bool and _lanes(m) == _lanes(value) for m in u.src[3:])


def _shuffle(u: UOp) -> bool:
    return isinstance(u.arg, tuple) and len(u.arg) == _lanes(u) and u.dtype.scalar is u.src[0].dtype.scalar \
        and all(type(lane) is int and 0 <= lane < _lanes(u.src[0]) for lane in u.arg)


# ---- the lists ---------------------------------------------------------------------------------------------

_VALUES = (
    Row((Ops.CONST,), "a value of its dtype", _const),
    Row(tuple(ALU), "operands of one dtype that the op takes; comparisons give bool; WHERE is (bool, x, x)",
        _alu),
    Row((Ops.CAST,), "one value operand", _cast),
    Row((Ops.BITCAST,), "one operand of the same width (in all, between numbers)", _bitcast),
    Row((Ops.VAR,), "index, VarArg with min <= max",
        lambda u: u.dtype is dtypes.index and isinstance(u.arg, VarArg) and u.arg.min <= u.arg.max),
)

_TENSOR = (
    *_VALUES,
    Row((Ops.BIND,), "(VAR, CONST) within the bounds",
        lambda u: u.src[0].op is Ops.VAR and u.src[1].op is Ops.CONST
        and u.src[0].arg.min <= u.src[1].arg <= u.src[0].arg.max),
    Row((Ops.IOTA,), "an int dtype and a length", lambda u: u.dtype.is_int and _size(u.arg)),
    Row((Ops.BUFFER,), "BufferArg", lambda u: isinstance(u.arg, BufferArg) and u.arg.size >= 0),
    Row(tuple(MOVEMENT), "one operand of the same dtype; arg fits its rank", _movement),
    Row((Ops.REDUCE,), "ReduceArg of ADD, MUL, MAX or MIN over at least one axis of src[0]", _reduce_axes),
    Row((Ops.TAKE,), "(x, int index) and an axis of x", _take),
    Row((Ops.CONTIGUOUS, Ops.DETACH), "one operand of the same dtype", _same_as_source),
    Row((Ops.COPY,), "one operand of the same dtype; a device name",
        lambda u: _same_as_source(u) and type(u.arg) is str),
    Row((Ops.STORE,), "(view of a BUFFER or AFTER, value) of one shape and dtype", _tensor_store),
    Row((Ops.AFTER,), "(BUFFER or AFTER or a RESHAPE of one, STORE…)", _after),
    Row((Ops.CALL,), "values, and CallArg with a kernel", lambda u: isinstance(u.arg, CallArg)
        and u.arg.kernel.op in (Ops.SINK, Ops.LINEAR, Ops.SCAN)),
    Row((Ops.OUTPUT,), "(CALL) and (number, shape) of one of its outputs",
        lambda u: u.src[0].op is Ops.CALL and u.arg == (u.arg[0], u.src[0].arg.outputs[u.arg[0]][0])
        and u.dtype is u.src[0].arg.outputs[u.arg[0]][1]),
    Row((Ops.SINK,), "void", lambda u: u.dtype is dtypes.void),
)

_STEP = (  # of a SCAN: its inputs, and the marks of transforms, are still in it
    *[row for row in _TENSOR if row.ops[0] not in (Ops.CALL, Ops.OUTPUT, Ops.SINK, Ops.AFTER, Ops.STORE)],
    Row((Ops.PARAM,), "ParamArg", lambda u: isinstance(u.arg, ParamArg)),
    Row((Ops.CALL,), "values, and the gradients of what it gives", lambda u: hasattr(u.arg, "gradient")),
    Row((Ops.OUTPUT,), "(CALL[, value]) and (number, shape)", lambda u: u.src[0].op is Ops.CALL),
    Row((Ops.SCAN,), "the next carries, what a step gives; ScanArg", lambda u: isinstance(u.arg, ScanArg)
        and u.arg.length > 0 and len(u.src) >= u.arg.carries),
)

_KERNEL_COMMON = (
    *[Row(row.ops, row.says + "; a scalar", _scalar(row.test)) for row in _VALUES],
    Row((Ops.PARAM,), "ParamArg",
        lambda u: isinstance(u.arg, ParamArg) and u.arg.slot >= 0 and u.arg.size >= 0),
    Row((Ops.INDEX,), "(memory, index[, bool]) of the memory's dtype", _scalar(_index)),
    Row((Ops.REDUCE,), "ReduceArg with axes () over distinct RANGEs of a reducing axis type",
        _scalar(_reduce_ranges)),
    Row((Ops.STORE,), "(memory, index, value of its dtype[, bool])", _kernel_store),
    Row((Ops.END,), "(STORE, RANGE…), each RANGE once", _end),
    Row((Ops.SINK,), "END or STORE operands",
        lambda u: u.dtype is dtypes.void and all(s.op in (Ops.END, Ops.STORE) for s in u.src)
        and bool(u.src)),
)

_STAGE = Row((Ops.STAGE,), "(value, RANGE…) and StageArg",
             lambda u: isinstance(u.arg, StageArg) and u.dtype is u.src[0].dtype
             and all(s.op is Ops.RANGE for s in u.src[1:]))

_LINEAR = (
    *_VALUES,
    Row((Ops.LINEAR,), "void", lambda u: u.dtype is dtypes.void),
    Row((Ops.PARAM,), "ParamArg", lambda u: isinstance(u.arg, ParamArg)),
    Row((Ops.LOCAL,), "LocalArg", lambda u: isinstance(u.arg, LocalArg)),
    Row((Ops.SPECIAL,), "index and SpecialArg",
        lambda u: u.dtype is dtypes.index and isinstance(u.arg, SpecialArg)),
    Row((Ops.RANGE,), "index, a size and RangeArg", _range(AxisType)),
    Row((Ops.END,), "(RANGE)", lambda u: len(u.src) == 1 and u.src[0].op is Ops.RANGE),
    Row((Ops.IF,), "(bool)", lambda u: u.src[0].dtype is dtypes.bool),
    Row((Ops.ENDIF,), "(IF)", lambda u: u.src[0].op is Ops.IF),
    Row((Ops.REG,), "(initial value of its dtype)", lambda u: u.dtype is u.src[0].dtype),
    Row((Ops.SET,), "(REG, value of its dtype)",
        lambda u: u.src[0].op is Ops.REG and u.src[1].dtype is u.src[0].dtype),
    Row((Ops.LOAD,), "(PARAM or LOCAL, index[, mask]); index has one lane or the value's, mask the value's",
        _load),
    Row((Ops.STORE,),
        "(PARAM or LOCAL, index, value[, mask]); index has one lane or the value's, mask the value's",
        _linear_store),
    Row((Ops.PREFETCH,), "(PARAM, index) and a cache", lambda u: u.dtype is dtypes.void
        and u.src[0].op is Ops.PARAM and u.src[1].dtype is dtypes.index and u.arg in (2, 3)),
    Row((Ops.BARRIER,), "void", lambda u: u.dtype is dtypes.void),
    Row((Ops.BROADCAST,), "a scalar into lanes of its dtype",
        lambda u: _lanes(u.src[0]) == 1 and u.dtype.scalar is u.src[0].dtype),
    Row((Ops.STACK,), "one scalar a lane",
        lambda u: len(u.src) == _lanes(u) and all(s.dtype is u.dtype.scalar for s in u.src)),
    Row((Ops.EXTRACT,), "a lane of a vector",
        lambda u: u.dtype is u.src[0].dtype.scalar and type(u.arg) is int and 0 <= u.arg < _lanes(u.src[0])),
    Row((Ops.SHUFFLE,), "lanes of src[0], one for each lane of the result", _shuffle),
    Row((Ops.FOLD,), "a reduction of a vector to a scalar",
        lambda u: u.arg in (*REDUCTIONS, Ops.AND, Ops.OR) and u.dtype is u.src[0].dtype.scalar),
)

_PROGRAM = (
    *[Row(row.ops, row.says + "; a scalar", _scalar(row.test)) for row in _VALUES],
    *[row for row in _LINEAR if row.ops[0] in (Ops.PARAM, Ops.END, Ops.IF, Ops.ENDIF, Ops.LOAD, Ops.STORE)],
    Row((Ops.LINEAR,), "statements and a name", lambda u: u.dtype is dtypes.void and type(u.arg) is str
        and u.arg.isidentifier()),
    Row((Ops.LOCAL,), "LocalArg, not shared", lambda u: isinstance(u.arg, LocalArg) and not u.arg.shared),
    Row((Ops.RANGE,), "index, a size, axis LOOP or THREAD", _range((AxisType.LOOP, AxisType.THREAD))),
)

_SCHEDULE = (
    *_TENSOR,
    _STAGE,
    *[row for row in _KERNEL_COMMON if row.ops not in {r.ops for r in _TENSOR}],
    Row((Ops.REDUCE,), "a kernel's REDUCE", _scalar(_reduce_ranges)),
    Row((Ops.STORE,), "a kernel's STORE", _kernel_store),
    Row((Ops.RANGE,), "index, a size and RangeArg", _range(AxisType)),
    Row((Ops.CALL,), "(SINK, LINEAR, SCAN or COPY, BUFFERs or BINDs…)",
        lambda u: bool(u.src) and u.src[0].op in (Ops.SINK, Ops.LINEAR, Ops.SCAN, Ops.COPY)),
    *[row for row in _PROGRAM if row.ops[0] in (Ops.IF, Ops.ENDIF, Ops.LOAD, Ops.LOCAL, Ops.LINEAR)],
    Row((Ops.STORE, Ops.END), "of a program", lambda u: _linear_store(u) if u.op is Ops.STORE
        else u.src[0].op is Ops.RANGE),
    Row((Ops.SCAN,), "a loop", lambda u: isinstance(u.arg, ScanArg)),
    Row((Ops.LINEAR,), "CALLs", lambda u: all(s.op is Ops.CALL for s in u.src)),
)

LEVELS: dict[str, tuple[Row, ...]] = {
    "tensor": _TENSOR,
    "step": _STEP,
    "ranged": (*_KERNEL_COMMON, _STAGE,
               Row((Ops.BUFFER,), "BufferArg", lambda u: isinstance(u.arg, BufferArg)),
               Row((Ops.RANGE,), "index, a size and RangeArg", _range((AxisType.LOOP, AxisType.REDUCE)))),
    "kernel": (*_KERNEL_COMMON, _STAGE, Row((Ops.RANGE,), "index, a size, axis LOOP or REDUCE",
                                    _range((AxisType.LOOP, AxisType.REDUCE)))),
    "tiled": (*_KERNEL_COMMON, _STAGE, Row((Ops.RANGE,), "index, a size and RangeArg", _range(AxisType)),
              Row((Ops.SPECIAL,), "index and SpecialArg", lambda u: u.dtype is dtypes.index
                  and isinstance(u.arg, SpecialArg)),
              Row((Ops.LOCAL,), "LocalArg", lambda u: isinstance(u.arg, LocalArg)),
              Row((Ops.AFTER,), "(LOCAL, STORE or END…)", lambda u: u.src[0].op is Ops.LOCAL
                  and all(s.op in (Ops.STORE, Ops.END) for s in u.src[1:]))),
    "program": _PROGRAM,
    "linear": _LINEAR,
    "schedule": _SCHEDULE,
}


@lru_cache(None)
def _rows_by_op(level: str) -> dict[Op, list[Row]]:
    table: dict[Op, list[Row]] = {}
    for row in LEVELS[level]:
        for op in row.ops:
            table.setdefault(op, []).append(row)
    return table


# ---- verification ------------------------------------------------------------------------------------------


def verify(root: UOp, level: str, where: str = "") -> None:
    """Check every node against the level's list, then the rules on the whole graph. Raises IRError that names
    the node and the rule it breaks.

    >>> from whit.uop import UOp, dtypes
    >>> verify(UOp.const(1.0, dtypes.float32), "tensor")
    >>> verify(UOp.range(4, uid=0), "tensor", "as an example")
    Traceback (most recent call last):
    whit.helpers.IRError: level tensor, as an example: %0 = range index 4; uid=0 axis=LOOP: ...
    """
    if level not in LEVELS:
        raise IRError(f"verify at level {level!r}", because="there is no such level",
                      fix="one of " + ", ".join(LEVELS))
    rows = _rows_by_op(level)
    nodes = root.toposort()
    for node in nodes:
        allowed = rows.get(node.op)
        if allowed is None:
            _complain(node, level, where, f"the level has no {node.op.name}",
                      "lower it before, or widen the spec")
        elif not any(_passes(row.test, node) for row in allowed):
            _complain(node, level, where, f"{node.op.name} is not as the level allows",
                      " or ".join(row.says for row in allowed))
    if level in ("kernel", "tiled") and root.op is Ops.SINK:
        _verify_ranges(root, nodes, level, where)
    if level == "linear" and root.op is Ops.LINEAR:
        _verify_order(root, where)
    if level == "program":
        _verify_statements(root, where)
    if level == "tensor":
        for node in nodes:
            if node.op is Ops.CALL:
                verify_kernel(node.arg.kernel, where)


def verify_kernel(kernel: UOp, where: str = "") -> None:
    """A kernel that somebody gives: a SINK at kernel level, a LINEAR program, or a SCAN of tensor graphs.
    Raises IRError."""
    if kernel.op is Ops.SCAN:
        verify(kernel, "step", where)
        return
    if kernel.op not in (Ops.SINK, Ops.LINEAR):
        raise IRError(f"a kernel that is a {kernel.op.name}",
                      because="a kernel is a SINK of stores, or a LINEAR of statements",
                      fix="return UOp.sink(...), or finish() of a whit.uop.program.Program")
    verify(kernel, "kernel" if kernel.op is Ops.SINK else "program", where)


def _passes(test: Test, node: UOp) -> bool:
    try:
        return test(node)
    # an argument or a source of a wholly wrong kind
    except (AttributeError, IndexError, TypeError, ValueError):
        return False


def _close(node: UOp, level: str, where: str, opened: list[UOp]) -> None:
    """An END or ENDIF closes the loop or branch that was opened last."""
    if not opened or opened[-1] is not node.src[0]:
        _complain(node, level, where, "it does not close what was opened last",
                  "loops and branches that nest")
    opened.pop()


def _complain(node: UOp, level: str, where: str, problem: str, rule: str) -> None:
    from whit.uop.text import show
    lines = show(node).split("\n")
    line = lines[-1] if lines[-1] != "}" else lines[0]
    sources = "; ".join(f"src[{i}] is {s.op.name.lower()} {s.dtype}" for i, s in enumerate(node.src[:4]))
    raise IRError(f"level {level}{', ' + where if where else ''}: {line[:300]}",
                  because=problem + (f" ({sources})" if sources else ""), fix=f"allowed: {rule}")


def _verify_ranges(root: UOp, nodes: list[UOp], level: str, where: str) -> None:
    """A kernel closes every loop that it opens, and no two RANGEs share a number."""
    for open_range in sorted(root.ranges, key=lambda r: int(r.arg.uid)):
        _complain(open_range, level, where, "this loop is not closed",
                  "an END for each output range, a REDUCE for each reduced one")
    numbers: dict[object, UOp] = {}
    for node in nodes:
        if node.op is Ops.RANGE and numbers.setdefault(node.arg, node) is not node:
            _complain(node, level, where, f"another RANGE is {node.arg} too",
                      "a number of its own for every RANGE")


def _verify_statements(root: UOp, where: str) -> None:
    """What was read is used after that and inside of the same loop or branch; loops and branches nest; a
    THREAD loop holds everything."""
    seen: set[UOp] = set()
    gone: set[UOp] = set()
    inside: list[list[UOp]] = [[]]
    opened: list[UOp] = []
    for number, node in enumerate(root.src):
        stack = dict.fromkeys(node.src if node.op not in (Ops.END, Ops.ENDIF) else ())
        parts = list(stack)
        for part in parts:  # grows meanwhile: expressions down to what was read before
            placed = part.op is Ops.LOAD or part.op is Ops.RANGE
            if placed and (part not in seen or part in gone):
                _complain(part, "program", where, f"{node.op.name} uses it outside of where it is known",
                          "what is read, and counters, after that and inside of the same loop or branch")
            elif not placed:
                parts += [s for s in part.src if s not in stack]
                stack.update(dict.fromkeys(part.src))
        if node.op in (Ops.END, Ops.ENDIF):
            _close(node, "program", where, opened)
            gone.update(inside.pop())
        elif node.op in (Ops.RANGE, Ops.IF, Ops.LOAD):
            if node in seen:
                _complain(node, "program", where, "it stands twice in the list",
                          "a number of its own for each")
            inside[-1].append(node)
            seen.add(node)
            if node.op is not Ops.LOAD:
                is_task = node.op is Ops.RANGE and node.arg.axis is AxisType.THREAD
                if is_task and (number or root.src[-1].src != (node,)):
                    _complain(node, "program", where, "something stands outside of it",
                              "a parallel loop that holds the whole program")
                opened.append(node)
                inside.append([node])
        elif node.op is not Ops.STORE:
            _complain(node, "program", where, "it is no statement", "LOAD, STORE, RANGE, END, IF, ENDIF")
    if opened:
        _complain(opened[-1], "program", where, "it is never closed", "an END for every RANGE, an ENDIF for "
                  "every IF")


# never computed, so no loop owns them
_EVERYWHERE = (Ops.CONST, Ops.PARAM, Ops.VAR, Ops.SPECIAL, Ops.LOCAL)


def _verify_order(root: UOp, where: str) -> None:
    """Operands come before their users and inside their loop; loops and branches nest."""
    seen: set[UOp] = set()
    opened: list[UOp] = []
    closed: set[UOp] = set()  # instructions of loops and branches that have ended
    inside: list[list[UOp]] = [[]]
    for node in root.src:
        for source in node.src:
            if source.op is not Ops.CONST and source not in seen:
                _complain(node, "linear", where, f"it uses {source.op.name.lower()} before it appears",
                          "operands earlier in the list")
            if source in closed:
                _complain(node, "linear", where, f"it uses {source.op.name.lower()} after its loop has ended",
                          "values of a loop only inside of it; a REG to carry them out")
        if node.op in (Ops.END, Ops.ENDIF):
            _close(node, "linear", where, opened)
            closed.update(inside.pop())
        elif node.op in (Ops.RANGE, Ops.IF):
            if node in seen:
                _complain(node, "linear", where, "it is opened twice", "every loop once")
            opened.append(node)
            inside.append([node])
        elif node.op not in _EVERYWHERE and (node not in seen or node in closed):
            inside[-1].append(node)  # computed again after the loop or branch that computed it first
            closed.discard(node)
        seen.add(node)
    if opened:
        _complain(opened[-1], "linear", where, "it is never closed",
                  "an END for every RANGE, an ENDIF for every IF")
