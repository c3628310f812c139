"""Join kernels that loop over the same elements: one pass over memory computes several outputs (m, v and p of
Adam; the two sums of a batch norm's gradient)."""

from __future__ import annotations

import bisect

from whit.schedule.fusion import KERNEL_WORK, Home
from whit.schedule.lower import Kernel
from whit.schedule.movement import memory_of
from whit.uop import Ops, UOp
from whit.uop.ops import AxisType

MOST_STORES = 8


def merge(kernels: list[Kernel], before: dict[Home, set[Home]], needed: set[UOp]) -> list[Kernel]:
    """Merge each kernel into the latest earlier one that fits, keeping the order valid. `needed`: nodes whose
    memory someone else reads; other merged values are never written."""
    result: dict[int, Kernel] = {}  # by position
    number = {home: position for position, kernel in enumerate(kernels) for home in kernel.homes}
    open_kernels = _Candidates()
    for position, kernel in enumerate(kernels):
        # copies, and kernels on their far side, bound the list from outside
        earlier = [number[other] for home in kernel.homes for other in before[home] if other in number]
        light = _is_light(kernel)
        target = _partner(kernel, result, open_kernels, max(earlier, default=-1)) if light else None
        if target is None:
            result[position] = kernel
            if light:
                open_kernels.add(position, kernel)
            continue
        partner = result[target]
        _join(partner, kernel)
        for home in kernel.homes:
            number[home] = target
        if len(partner.stores) < MOST_STORES:
            open_kernels.add(target, partner)
    found = list(result.values())
    read = {node for kernel in found for node in kernel.reads} | needed
    for kernel in found:
        _drop_unneeded(kernel, read)
    return found


class _Candidates:
    """Positions of light kernels that can take more stores, by their loops and by what they read or write."""

    def __init__(self) -> None:
        self.touching: dict[tuple[tuple[UOp, ...], str | None, UOp], list[int]] = {}  # each in order

    def add(self, position: int, kernel: Kernel) -> None:
        loops, device = tuple(kernel.loops), kernel.device
        memories = [memory for memory, *_ in kernel.stores]
        for node in dict.fromkeys([*kernel.reads, *[home.node for home in kernel.homes], *memories]):
            positions = self.touching.setdefault((loops, device, node), [])
            place = bisect.bisect_left(positions, position)
            if positions[place : place + 1] != [position]:
                positions.insert(place, position)

    def sharing(self, kernel: Kernel, first: int, kernels: dict[int, Kernel]) -> list[int]:
        """From `first` on, the kernels with equal loops that read or write what this one reads, the latest
        first. Full kernels met on the way are forgotten."""
        loops, device = tuple(kernel.loops), kernel.device
        found: set[int] = set()
        for node in kernel.reads:
            for key in (node, *(node.src[1:] if node.op is Ops.AFTER else ())):
                positions = self.touching.get((loops, device, key), [])
                for place in reversed(range(bisect.bisect_left(positions, first), len(positions))):
                    if len(kernels[positions[place]].stores) < MOST_STORES:
                        found.add(positions[place])
                    else:
                        del positions[place]
        return sorted(found, reverse=True)


def _partner(
    kernel: Kernel, kernels: dict[int, Kernel], candidates: _Candidates, latest_needed: int
) -> int | None:
    """The position of the latest kernel that can take this one: same loops, light, sharing reads, and not
    before anything that this one needs."""
    if not kernel.loops:
        return None
    for position in candidates.sharing(kernel, max(latest_needed, 0), kernels):
        other = kernels[position]
        work = sum([home.work for home in (*other.homes, *kernel.homes)])
        room = len(other.stores) + len(kernel.stores) <= MOST_STORES and work <= KERNEL_WORK
        if room and _is_light(other) and _no_hazard(other, kernel):
            return position
    return None


def _is_light(kernel: Kernel) -> bool:
    """No contraction and no scratch inside: every read below a REDUCE depends on all the output loops that
    the REDUCE depends on, so nothing is read again and again, and a register tile would gain nothing."""
    if kernel.guests:
        return False
    for _, _, value, _ in kernel.stores:
        for node in value.toposort():
            if node.op is Ops.STAGE:
                return False
            if node.op is Ops.REDUCE and node.ranges:
                for inner in node.src[0].toposort(lambda n: n.op is Ops.REDUCE):
                    if inner.op is Ops.INDEX and node.ranges - inner.src[1].ranges:
                        return False
    return True


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


def _drop_unneeded(kernel: Kernel, read: set[UOp]) -> None:
    """Leave out stores of a merged kernel that nobody reads any more."""
    if len(kernel.homes) == 1:
        return
    keep = [p for p, home in enumerate(kernel.homes) if home.node.op is Ops.STORE or home.node in read]
    kernel.stores = [kernel.stores[p] for p in keep]
    kernel.homes = [kernel.homes[p] for p in keep]
