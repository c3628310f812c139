"""A program written by hand (`whit.uop.program`) becomes a linear program: what the target lacks is spelled
out, and every expression stands before its first use.

Before:  LINEAR(RANGE(n; THREAD) i, LOAD(p1, i) a, STORE(p0, i, FLOORDIV(a, 3)), END(i))
After:   LINEAR(p0, p1, thread, … RANGE(n / tasks) j, i = thread * … + j, a, ALU…, STORE(p0, i, …), END(j))
"""

from __future__ import annotations

from whit.codegen.decompose import decompose
from whit.codegen.target import Target
from whit.uop import AxisType, Ops, RangeArg, SpecialArg, UOp, dtypes
from whit.uop.symbolic import simplify

_HEAD = (Ops.PARAM, Ops.VAR, Ops.SPECIAL, Ops.LOCAL)


def lower_program(program: UOp, target: Target) -> UOp:
    """The linear program; its arg stays the program's name."""
    return ordered(decompose(bind_tasks(program, target), target))


def bind_tasks(program: UOp, target: Target) -> UOp:
    """The parallel loop becomes one in each task over its share of the rounds.

    Before:  RANGE(100; THREAD) i
    After:   RANGE(min(13, 100 - thread * 13); LOOP) j,  i -> thread * 13 + j          for 8 threads
    """
    outer = program.src[0] if program.src else program
    if outer.op is not Ops.RANGE or outer.arg.axis is not AxisType.THREAD:
        return program
    size = outer.src[0]
    tasks = min(target.threads, size.arg) if size.op is Ops.CONST else target.threads
    if tasks <= 1:
        inner = outer.replace(arg=RangeArg(outer.arg.uid, AxisType.LOOP))
        return program.substitute({outer: inner})
    share = simplify((size + (tasks - 1)) // tasks)
    thread = UOp(Ops.SPECIAL, dtypes.index, (), SpecialArg("thread", tasks))
    left = size - thread * share
    inner = UOp.range(left.lt(share).where(left, share), AxisType.LOOP, outer.arg.uid)
    number = thread * share + inner
    items = [inner, *[item.substitute({outer: number}) for item in program.src[1:-1]],
             UOp(Ops.END, dtypes.void, (inner,))]
    return program.replace(src=tuple(items))


def ordered(program: UOp) -> UOp:
    """The list with every expression in it, computed again where the loop or branch that computed it before
    has ended."""
    nodes = program.toposort()
    result = [node for op in _HEAD for node in nodes if node.op is op]
    known = set(result)
    inside: list[list[UOp]] = [[]]
    for item in program.src:
        if item.op is Ops.END or item.op is Ops.ENDIF:
            result.append(item)
            known.difference_update(inside.pop())
            continue
        stack = [item]
        while stack:
            node = stack[-1]
            missing = [s for s in node.src if s not in known and s.op is not Ops.CONST]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if node.op is Ops.CONST or (node in known and node.op is not Ops.STORE):
                continue
            result.append(node)
            if node.op is not Ops.STORE:
                known.add(node)
                inside[-1].append(node)
        if item.op is Ops.RANGE or item.op is Ops.IF:
            inside.append([])
    return program.replace(src=tuple(result))
