"""The memory planner: temporaries of one schedule share an arena; two may overlap in space only if never
alive together."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from whit.helpers import PAGE, round_up

ALIGN = 64
MANY = 2000  # items beyond which placing each against all others takes too long


class Lifetime(NamedTuple):
    """A temporary: bytes, and the first and last call that touch it."""

    nbytes: int
    first: int
    last: int


def plan(items: Sequence[Lifetime]) -> tuple[list[int], int]:
    """(offset of each item, size of the arena).

    >>> plan([Lifetime(64, 0, 1), Lifetime(64, 1, 2), Lifetime(64, 2, 3)])
    ([0, 64, 0], 128)
    """
    return largest_first(items) if len(items) <= MANY else in_order_of_use(items)


def largest_first(items: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Largest first, each at the lowest gap among those alive at the same time: the least memory in every
    model that was tried, in quadratic time."""
    offsets = [0] * len(items)
    placed: list[tuple[int, int, int, int]] = []  # start, stop, first, last: in order of the starts
    size = 0
    for number in sorted(range(len(items)), key=lambda i: (-items[i].nbytes, i)):
        nbytes, first, last = items[number]
        offset, align = 0, PAGE if nbytes >= PAGE else ALIGN
        for start, stop, begin, end in placed:
            if begin <= last and first <= end:
                if offset + nbytes <= start:
                    break
                if stop > offset:
                    offset = round_up(stop, align)
        offsets[number] = offset
        bisect.insort(placed, (offset, offset + nbytes, first, last))
        size = max(size, offset + round_up(nbytes, ALIGN))
    return offsets, size


def in_order_of_use(items: Sequence[Lifetime]) -> tuple[list[int], int]:
    """As an allocator would: each item takes the smallest gap that holds it when it is first used, and leaves
    a gap after its last use. A little more memory, in nearly linear time."""
    offsets = [0] * len(items)
    gaps: list[tuple[int, int]] = []  # (start, stop) below `top`, in order, never adjacent
    used: list[tuple[int, int, int]] = []  # (last, start, stop): a heap
    top = size = 0
    for number in sorted(range(len(items)), key=lambda i: (items[i].first, -items[i].nbytes, i)):
        nbytes, first, last = items[number]
        while used and used[0][0] < first:
            _, start, stop = heapq.heappop(used)
            top = _release(gaps, start, stop, top)
        length = round_up(nbytes, ALIGN)
        fitting = [(stop - start, at) for at, (start, stop) in enumerate(gaps) if stop - start >= length]
        if fitting:
            at = min(fitting)[1]
            start, stop = gaps[at]
            gaps[at : at + 1] = [(start + length, stop)] if stop - start > length else []
        else:
            start, top = top, top + length
        offsets[number], size = start, max(size, top)
        heapq.heappush(used, (last, start, start + length))
    return offsets, size


def _release(gaps: list[tuple[int, int]], start: int, stop: int, top: int) -> int:
    """Make a gap of start … stop, joined with its neighbours; at the top there are no gaps. The new top."""
    at = bisect.bisect_left(gaps, (start, stop))
    if at < len(gaps) and gaps[at][0] == stop:
        stop = gaps.pop(at)[1]
    if at and gaps[at - 1][1] == start:
        at -= 1
        start = gaps.pop(at)[0]
    if stop == top:
        return start
    if start < stop:
        gaps.insert(at, (start, stop))
    return top
