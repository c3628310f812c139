"""Join kernels that loop over the same elements: one pass over memory computes several outputs (m, v and p of
Adam; the two sums of a batch norm's gradient)."""

from __future__ import annotations

from whit.schedule.fusion import Home
from whit.schedule.lower import Kernel
from whit.schedule.movement import memory_of
from whit.uop import Ops, UOp
from whit.uop.ops import AxisType

MOST_STORES = 8


def merge(kernels: list[Kernel], before: dict[Home, set[Home]], needed: set[UOp]) -> list[Kernel]:
    """Merge each kernel into the latest earlier one that fits, keeping the order valid. `needed`: nodes whose
    memory someone else reads; other merged values are never written."""
    result: list[Kernel] = []
    reach: dict[int, set[int]] = {}  # kernel number -> all kernels that must run before it
    number = {home: position for position, kernel in enumerate(kernels) for home in kernel.homes}
    for position, kernel in enumerate(kernels):
        earlier: set[int] = set()
        for home in kernel.homes:
            for other in before[home]:
                if other in number:  # copies, and kernels on their far side, bound the list from outside
                    earlier |= {number[other]} | reach.get(number[other], set())
        partner = _partner(kernel, result, number, earlier, reach) if _is_light(kernel) else None
        if partner is None:
            reach[position] = earlier
            result.append(kernel)
            continue
        target = number[partner.homes[0]]
        _join(partner, kernel)
        for home in kernel.homes:
            number[home] = target
        reach[target] = reach.get(target, set()) | (earlier - {target})
    for kernel in result:
        _drop_unneeded(kernel, result, needed)
    return result


def _partner(
    kernel: Kernel,
    candidates: list[Kernel],
    number: dict[Home, int],
    earlier: set[int],
    reach: dict[int, set[int]],
) -> Kernel | None:
    """The latest candidate that can take the kernel: same loops, light, sharing reads, and nothing in between
    needed first."""
    for candidate in reversed(candidates):
        mine = number[candidate.homes[0]]
        if len(candidate.stores) + len(kernel.stores) > MOST_STORES or not _same_loops(candidate, kernel):
            if mine in earlier:
                return None
            continue
        between = any(other != mine and (mine in reach.get(other, ()) or other > mine) for other in earlier)
        if (
            not between
            and _is_light(candidate)
            and _shares(candidate, kernel)
            and _no_hazard(candidate, kernel)
        ):
            return candidate
        if mine in earlier:
            return None  # what comes before it cannot take a kernel that needs it
    return None


def _same_loops(a: Kernel, b: Kernel) -> bool:
    return len(a.loops) > 0 and a.loops == b.loops and a.device == b.device


def _is_light(kernel: Kernel) -> bool:
    """No contraction inside: every read below a REDUCE depends on all the output loops that the REDUCE
    depends on, so nothing is read again and again, and a register tile would gain nothing."""
    for _, _, value, _ in kernel.stores:
        for node in value.toposort():
            if node.op is Ops.REDUCE and node.ranges:
                for inner in node.src[0].toposort(lambda n: n.op is Ops.REDUCE):
                    if inner.op is Ops.INDEX and node.ranges - inner.src[1].ranges:
                        return False
    return True


def _shares(a: Kernel, b: Kernel) -> bool:
    """Whether one reads what the other writes or reads."""
    written = {home.node for home in a.homes} | {memory for memory, *_ in a.stores}
    return any(
        node in a.reads
        or node in written
        or (node.op is Ops.AFTER and any(s in written for s in node.src[1:]))
        for node in b.reads
    )


def _no_hazard(a: Kernel, b: Kernel) -> bool:
    """Reads of memory that the other kernel writes must be of the very element that the same iteration
    writes."""
    for reader, writer in ((b, a), (a, b)):
        for memory, index, _, _ in writer.stores:
            for _, _, value, _ in reader.stores:
                for node in value.toposort():
                    if (
                        node.op is Ops.INDEX
                        and _memory(node.src[0]) is memory
                        and (
                            node.src[1] is not index or len(node.src) == 3 or not _single_version(node.src[0])
                        )
                    ):
                        return False
    return True


def _single_version(token: UOp) -> bool:
    """Not an AFTER of several stores, whose value no single store computes."""
    return token.op is Ops.BUFFER or token.arg.op is not Ops.AFTER or len(token.arg.src) == 2


def _memory(token: UOp) -> UOp:
    """The memory that a token of a read stands for."""
    node = token.arg if token.op is Ops.PARAM else token
    return memory_of(node) if node.op in (Ops.BUFFER, Ops.AFTER) else node


def _forwarded(value: UOp, values: dict[UOp, tuple[UOp, UOp]]) -> UOp:
    """Replace reads of what the kernel itself has just computed by the value."""
    changes = {}
    for node in value.toposort():
        if node.op is Ops.INDEX and node.src[0].op is Ops.PARAM and len(node.src) == 2:
            found = values.get(node.src[0].arg)
            if found is not None and found[0] is node.src[1]:
                changes[node] = found[1]
    return value.substitute(changes)


def _join(a: Kernel, b: Kernel) -> None:
    """Put b's stores behind a's."""
    values: dict[UOp, tuple[UOp, UOp]] = {}
    for home, (_, index, value, _) in zip(a.homes, a.stores, strict=True):
        values[home.node] = (index, value)
    for node in b.reads:
        if node.op is Ops.AFTER and len(node.src) == 2 and node.src[1] in values:
            values[node] = values[node.src[1]]
    shift = max([a_home.next_uid for a_home in a.homes])
    for memory, index, value, valid in b.stores:
        moved = _renumber(value, a.loops, shift)
        a.stores.append((memory, index, _forwarded(moved, values), valid))
    for home in b.homes:
        home.next_uid += shift
    a.homes += b.homes
    for node in b.reads:
        if node not in values:
            a.reads[node] = None


def _renumber(value: UOp, loops: list[UOp], shift: int) -> UOp:
    """Give the reduction loops numbers that the other kernel does not use."""
    changes = {}
    for node in value.toposort():
        if node.op is Ops.RANGE and node not in loops and node.arg.axis is AxisType.REDUCE:
            changes[node] = UOp.range(node.src[0], AxisType.REDUCE, node.arg.uid + shift)
    return value.substitute(changes)


def _drop_unneeded(kernel: Kernel, kernels: list[Kernel], needed: set[UOp]) -> None:
    """Leave out stores that nobody reads any more."""
    if len(kernel.homes) == 1:
        return
    keep = [
        position
        for position, home in enumerate(kernel.homes)
        if home.node.op is Ops.STORE or home.node in needed or any(home.node in k.reads for k in kernels)
    ]
    kernel.stores = [kernel.stores[p] for p in keep]
    kernel.homes = [kernel.homes[p] for p in keep]
