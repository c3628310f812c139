"""Order of kernels and in-place hazards: who must run before whom so that every reader sees its own version
of a buffer."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from whit.schedule.fusion import Fusion, Home, store_place
from whit.schedule.lower import elements
from whit.schedule.movement import flat_index, memory_of
from whit.uop import Ops, UOp


def overwritten_version(store: UOp) -> UOp:
    """The BUFFER or AFTER whose elements a STORE replaces."""
    node = store.src[0]
    while node.op not in (Ops.BUFFER, Ops.AFTER):
        node = node.src[0]
    return node


def misaligned_stores(fusion: Fusion) -> list[UOp]:
    """STOREs whose value reads other elements of the buffer than the one being written: the value needs
    memory first."""
    found: dict[UOp, None] = {}
    for version, readers in fusion.reads.items():
        memory = memory_of(version)
        for home, place in readers:
            if home.node.op is Ops.STORE and home.node not in found and memory_of(home.node.src[0]) is memory:
                _, written = store_place(home)
                if flat_index(place, version.shape) is not written:
                    found[home.node] = None
    return list(found)


def dependencies(
    fusion: Fusion, read_by: dict[Home, dict[UOp, None]]
) -> tuple[dict[Home, set[Home]], list[tuple[Home, Home, UOp]]]:
    """(who must run before each home, the write-after-read edges as (reader, writer, version))."""
    before: dict[Home, set[Home]] = {home: set() for home in read_by}
    homes = fusion.homes
    writers: dict[UOp, list[Home]] = {}
    for node, home in homes.items():
        if node.op is Ops.STORE:
            version = overwritten_version(node)
            writers.setdefault(version, []).append(home)
            if version.op is Ops.AFTER:  # write after write
                before[home].update(homes[store] for store in version.src[1:])
    war: list[tuple[Home, Home, UOp]] = []
    for home, nodes in read_by.items():
        for node in nodes:
            if node.op is Ops.AFTER:
                before[home].update(homes[store] for store in node.src[1:] if homes[store] is not home)
            elif node.op is not Ops.BUFFER:
                before[home].add(homes.get(node) or fusion.hosts[node])
            for writer in writers.get(node, ()):
                if writer is not home:
                    war.append((home, writer, node))
                    before[writer].add(home)
    return before, war


def execution_order(
    homes: list[Home], before: dict[Home, set[Home]], memory: Memory
) -> tuple[list[Home], set[Home]]:
    """(homes in an order that respects `before`, those that are in or behind a cycle).

    What gives back at least as much memory as it takes runs as soon as it can (the gradient of a weight once
    both of its factors exist, the update that reads it), most first; the rest earliest given first.
    """
    rank = {home: position for position, home in enumerate(homes)}
    waiting = {home: len(before[home]) for home in homes}
    after: dict[Home, list[Home]] = {home: [] for home in homes}
    for home in homes:
        for earlier in before[home]:
            after[earlier].append(home)
    ready = [rank[home] for home in homes if waiting[home] == 0]
    heapq.heapify(ready)
    relief = [(memory.grows[homes[r]], r) for r in ready if memory.grows[homes[r]] <= 0]
    heapq.heapify(relief)
    result: dict[Home, None] = {}
    while ready:
        home = homes[heapq.heappop(relief)[1] if relief else heapq.heappop(ready)]
        if home in result:  # it stood in both
            continue
        result[home] = None
        for later in after[home]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, rank[later])
        for other in dict.fromkeys([*after[home], *memory.run(home)]):
            if not waiting[other] and memory.grows[other] <= 0:
                heapq.heappush(relief, (memory.grows[other], rank[other]))
    return list(result), set(homes) - set(result)


class Memory:
    """By how many bytes the temporaries in use grow when a home runs next: those it writes, less those that
    nobody else is going to read."""

    def __init__(self, fusion: Fusion, read_by: dict[Home, dict[UOp, None]], kept: Collection[UOp]) -> None:
        self.read_by, self.kept = read_by, kept
        self.grows: dict[Home, int] = dict.fromkeys(read_by, 0)
        self.readers: dict[UOp, set[Home]] = {}
        for home, nodes in read_by.items():
            for node in nodes:
                self.readers.setdefault(node, set()).add(home)
        for node, home in {**fusion.homes, **fusion.hosts}.items():
            if node.op is not Ops.STORE:
                self.grows[home] += _bytes(node)
                self.last_reader(node)

    def last_reader(self, node: UOp) -> Home | None:
        """The only home that is still going to read a temporary; the memory is given back to its account."""
        readers = self.readers.get(node, ())
        if len(readers) != 1 or node in self.kept or node.op in (Ops.BUFFER, Ops.AFTER):
            return None
        (home,) = readers
        self.grows[home] -= _bytes(node)
        return home

    def run(self, home: Home) -> list[Home]:
        """The homes whose account has changed now that one has run."""
        changed = []
        for node in self.read_by[home]:
            self.readers[node].discard(home)
            last = self.last_reader(node)
            if last is not None:
                changed.append(last)
        return changed


def _bytes(node: UOp) -> int:
    return elements(node) * node.dtype.itemsize


def versions_to_copy(
    stuck: set[Home], before: dict[Home, set[Home]], war: list[tuple[Home, Home, UOp]]
) -> list[UOp]:
    """Of each knot of homes that wait for each other, one version whose readers had better read a copy.

    A copy that reads a version cannot be helped by another copy. There is always another reader: copies,
    values and writes after writes alone wait only for what the program did earlier.
    """
    knot = _knots(stuck, before)
    found: dict[int, UOp] = {}
    for reader, writer, version in war:
        if reader.node.op is not Ops.COPY and reader in stuck and knot[reader] == knot.get(writer):
            found.setdefault(knot[reader], version)
    return list(dict.fromkeys(found.values()))


def _knots(homes: set[Home], before: dict[Home, set[Home]]) -> dict[Home, int]:
    """A number for each home, equal for those that wait for each other (Tarjan 1972, without recursion)."""
    index: dict[Home, int] = {}
    low: dict[Home, int] = {}
    knot: dict[Home, int] = {}
    path: list[Home] = []
    for start in homes:
        stack = [(start, iter(before[start]))] if start not in index else []
        while stack:
            home, sources = stack[-1]
            if home not in index:
                index[home] = low[home] = len(index)
                path.append(home)
            unseen = None
            for other in sources:
                if other not in homes or other in knot:
                    continue
                if other not in index:
                    unseen = other
                    break
                low[home] = min(low[home], index[other])
            if unseen is not None:
                stack.append((unseen, iter(before[unseen])))
                continue
            stack.pop()
            if stack:
                low[stack[-1][0]] = min(low[stack[-1][0]], low[home])
            if low[home] == index[home]:
                number = len(knot)
                while home not in knot:
                    knot[path.pop()] = number
    return knot
