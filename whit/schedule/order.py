"""Order of kernels and in-place hazards: who must run before whom so that every reader sees its own version
of a buffer."""

from __future__ import annotations

import heapq

from whit.schedule.fusion import Fusion, Home, store_place
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


def execution_order(homes: list[Home], before: dict[Home, set[Home]]) -> tuple[list[Home], set[Home]]:
    """(homes in an order that respects `before`, those that are in or behind a cycle). Stable: earliest given
    first."""
    rank = {home: position for position, home in enumerate(homes)}
    waiting = {home: len(before[home]) for home in homes}
    after: dict[Home, list[Home]] = {home: [] for home in homes}
    for home in homes:
        for earlier in before[home]:
            after[earlier].append(home)
    ready = [rank[home] for home in homes if waiting[home] == 0]
    heapq.heapify(ready)
    result: list[Home] = []
    while ready:
        home = homes[heapq.heappop(ready)]
        result.append(home)
        for later in after[home]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, rank[later])
    return result, set(homes) - set(result)


def versions_to_copy(
    stuck: set[Home], before: dict[Home, set[Home]], war: list[tuple[Home, Home, UOp]]
) -> list[UOp]:
    """Of each knot of homes that wait for each other, one version whose readers had better read a copy.

    A copy that reads a version cannot be helped by another copy. There is always another reader: copies, values
    and writes after writes alone wait only for what the program did earlier.
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
