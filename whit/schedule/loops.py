"""Loops of the plan: a CALL of a SCAN becomes a schedule of its own, for one step, whose kernels run once for
every step on other pieces of the stacked memories.

Nothing in these kernels depends on the step: they are compiled once, whatever the length is.

    CALL(init, xs, w; SCAN(h', y; n))   ->   Loop(calls of one step, n, where each memory of a step lies)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from whit.autograd import marks
from whit.helpers import prod
from whit.schedule.movement import contiguous_view, stripped
from whit.uop import AxisType, BufferArg, Ops, UOp, dtypes
from whit.uop.args import CallArg, RangeArg, ScanArg
from whit.uop.program import param
from whit.uop.rewrite import rebuild


class Place(NamedTuple):
    """Where a memory of a step lies: in operand `operand` of the loop's call, at the step's own piece if
    `moves`. A carry is read where the step before has written it; the first step's in operand `first`."""

    operand: int
    moves: bool = False
    first: int = -1


class Loop(NamedTuple):
    """`plan`: the schedule of one step; `places`: of its external memories, and of its results."""

    plan: Any
    length: int
    reverse: bool
    externals: tuple[Place, ...]
    results: dict[int, Place]  # by slot

    def place_of(self, slot: int) -> Place | None:
        """Where a slot lies that is no temporary of a step; None if nothing uses it."""
        external: int = self.plan.slots[slot].external
        return self.externals[external] if external >= 0 else self.results.get(slot)


def loop_of(call: UOp) -> Loop:
    """The loop that a CALL of a SCAN stands for. Operands: its outputs, its values, scratch of a step."""
    from whit.schedule.schedule import graph_key, make_schedule

    kernel, arg = call.arg.kernel, call.arg.kernel.arg
    count = len(kernel.src)
    inputs = {
        node: UOp(
            Ops.BUFFER, node.dtype, (), BufferArg(-1 - node.src[0].arg.slot, node.src[0].arg.size, node.arg)
        )
        for node in kernel.toposort()
        if is_input(node)
    }
    slots = {buffer: node.src[0].arg.slot for node, buffer in inputs.items()}
    roots = rebuild(UOp.sink(*marks.unmarked(kernel.src)), lambda old, new: new, known=inputs).src
    roots = tuple(_apart(roots, call.arg.device))
    graph = graph_key(list(roots))
    plan = make_schedule(list(roots), graph.buffers)
    externals = [_place(slots[buffer], arg, count) for buffer in graph.buffers]
    results = {result.slot: Place(n, moves=True) for n, result in enumerate(plan.results)}
    return Loop(plan, arg.length, arg.reverse, tuple(externals), results)


def bare(kernel: UOp) -> UOp:
    """The kernel of a CALL without what only derivatives see: what tells schedules of loops apart."""
    if kernel.op is not Ops.SCAN:
        return kernel

    def change(old: UOp, new: UOp) -> UOp:
        if old.op is not Ops.CALL:
            return new
        return new.replace(arg=new.arg._replace(kernel=bare(new.arg.kernel), gradient=None))

    return kernel.replace(src=rebuild(UOp.sink(*marks.unmarked(kernel.src)), change).src)


def is_input(node: UOp) -> bool:
    """Whether a node of a step stands for one of its inputs."""
    return node.op is Ops.COPY and node.src[0].op is Ops.PARAM


def _place(slot: int, arg: ScanArg, outputs: int) -> Place:
    if slot < arg.carries:
        return Place(slot, moves=True, first=outputs + slot)
    return Place(outputs + slot, moves=slot < arg.carries + arg.stacked)


def _apart(roots: Sequence[UOp], device: str) -> list[UOp]:
    """The roots as values that each get memory of their own: what is an input, or stands twice, is copied."""
    seen: set[UOp] = set()
    made = []
    for root in roots:
        if contiguous_view(root) is not None or stripped(root) in seen:
            root = _copied(root, device)
        seen.add(stripped(root))
        made.append(root)
    return made


def _copied(value: UOp, device: str) -> UOp:
    """The same value, written by a kernel of its own."""
    size = prod(value.shape)
    to, source = param(0, (size,), value.dtype), param(1, (size,), value.dtype)
    i = UOp(Ops.RANGE, dtypes.index, (UOp.index(size),), RangeArg(0, AxisType.LOOP))
    kernel = UOp.sink(to.store(i, source[i]).end(i))
    call = UOp(Ops.CALL, dtypes.void, (value,), CallArg(kernel, ((value.shape, value.dtype),), device))
    return UOp(Ops.OUTPUT, value.dtype, (call,), (0, value.shape))


def pruned(root: UOp) -> UOp:
    """Loops without the values of steps that nobody reads (carries stay: the next step reads them)."""
    used: dict[UOp, set[int]] = {}
    for node in root.toposort():
        if node.op is Ops.OUTPUT and node.src[0].arg.kernel.op is Ops.SCAN:
            used.setdefault(node.src[0], set()).add(node.arg[0])
    if not used:
        return root
    kept = {call: sorted(numbers.union(range(call.arg.kernel.arg.carries))) for call, numbers in used.items()}

    def change(old: UOp, new: UOp) -> UOp:
        if old in kept:
            arg, numbers = old.arg, kept[old]
            kernel = arg.kernel.replace(src=tuple([arg.kernel.src[n] for n in numbers]))
            return new.replace(
                arg=arg._replace(kernel=kernel, outputs=tuple([arg.outputs[n] for n in numbers]))
            )
        if old.op is Ops.OUTPUT and old.src[0] in kept:
            return new.replace(arg=(kept[old.src[0]].index(old.arg[0]), old.arg[1]))
        return new

    return rebuild(root, change)
