"""The memory planner: temporaries of one schedule share an arena; two may overlap in space only if never
alive together."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from whit.helpers import round_up

ALIGN = 64


class Lifetime(NamedTuple):
    """A temporary: bytes, and the first and last call that touch it."""

    nbytes: int
    first: int
    last: int


def plan(items: Sequence[Lifetime]) -> tuple[list[int], int]:
    """(offset of each item, size of the arena). Largest first, each at the lowest gap among those alive at
    the same time.

    >>> plan([Lifetime(64, 0, 1), Lifetime(64, 1, 2), Lifetime(64, 2, 3)])
    ([0, 64, 0], 128)
    """
    offsets = [0] * len(items)
    placed: list[tuple[int, int, int, int]] = []  # start, stop, first, last: in order of the starts
    size = 0
    for number in sorted(range(len(items)), key=lambda i: (-items[i].nbytes, i)):
        nbytes, first, last = items[number]
        offset = 0
        for start, stop, begin, end in placed:
            if begin <= last and first <= end:
                if offset + nbytes <= start:
                    break
                if stop > offset:
                    offset = round_up(stop, ALIGN)
        offsets[number] = offset
        bisect.insort(placed, (offset, offset + nbytes, first, last))
        size = max(size, offset + round_up(nbytes, ALIGN))
    return offsets, size
