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
    placed: list[int] = []
    for number in sorted(range(len(items)), key=lambda i: (-items[i].nbytes, i)):
        item = items[number]
        taken: list[tuple[int, int]] = []
        for other in placed:
            if items[other].first <= item.last and item.first <= items[other].last:
                bisect.insort(taken, (offsets[other], offsets[other] + items[other].nbytes))
        offset = 0
        for start, stop in taken:
            if offset + item.nbytes <= start:
                break
            offset = max(offset, round_up(stop, ALIGN))
        offsets[number] = offset
        placed.append(number)
    return offsets, max((offsets[i] + round_up(items[i].nbytes, ALIGN) for i in range(len(items))), default=0)
